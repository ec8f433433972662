use super::*;
use rustix::fs::inotify;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;

/// The story: a client whose machine had lost its power kept its place for ever.
#[test]
fn tcp_client_that_says_nothing_is_probed() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("listens");
    let address = listener.local_addr().expect("an address");
    let _client = std::net::TcpStream::connect(address).expect("connects");
    let socket = Socket::new(listener.accept().expect("there").0).expect("a socket");
    tune(&socket, Family::Tcp(address));
    assert!(sockopt::socket_keepalive(&socket).expect("known"));
    let idle = sockopt::tcp_keepidle(&socket).expect("known");
    let interval = sockopt::tcp_keepintvl(&socket).expect("known");
    let probes = sockopt::tcp_keepcnt(&socket).expect("known");
    assert_eq!(idle + interval * probes, Duration::from_secs(120));
}

/// Once, a script that waited for the file and then connected was refused.
#[test]
fn socket_that_is_seen_accepts() {
    const ROUNDS: usize = 5000;
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let (go, asked) = mpsc::channel();
    let (sender, listeners) = mpsc::channel();
    std::thread::scope(|scope| {
        let path = &path;
        scope.spawn(move || {
            for () in asked {
                sender.send(Listener::unix(path)).expect("awaited");
            }
        });
        for _ in 0..ROUNDS {
            go.send(()).expect("it waits");
            loop {
                match UnixStream::connect(path) {
                    Ok(_) => break,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => panic!("what is seen does not listen: {error}"),
                }
            }
            drop(listeners.recv().expect("made").expect("listens"));
            assert!(!path.exists());
        }
        drop(go);
    });
}

/// The story: a server was killed between listening and naming its socket, and no server in a
/// sandbox could start in its place again.
#[test]
fn place_is_cleared_of_sockets_that_never_got_their_name() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    for name in [path.clone(), bound_name(&path)] {
        drop(UnixListener::bind(name).expect("bound"));
    }
    Clearing::default().clear(&path).expect("their servers are dead");
    assert_eq!(directory.path().read_dir().expect("a directory").count(), 0);
}

#[test]
fn name_of_a_socket_is_not_what_it_is_bound_to() {
    let directory = tempfile::tempdir().expect("a directory");
    let flags = inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC;
    let watch = inotify::init(flags).expect("a watch");
    let wanted = inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO;
    inotify::add_watch(&watch, directory.path(), wanted).expect("watched");

    let listener = Listener::unix(&directory.path().join("socket")).expect("listens");

    let mut space = [std::mem::MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(&watch, &mut space);
    let mut seen = Vec::new();
    while let Ok(event) = reader.next() {
        let name = event.file_name().expect("of a file").to_string_lossy().into_owned();
        seen.push((name, event.events().contains(inotify::ReadFlags::MOVED_TO)));
    }
    assert_eq!(seen, [("socket~".to_owned(), false), ("socket".to_owned(), true)]);
    drop(listener);
}

#[test]
fn socket_of_a_process_that_was_killed_before_it_listened_is_replaced() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    drop(UnixListener::bind(directory.path().join("socket~")).expect("bind"));

    let listener = Listener::unix(&path).expect("listens");

    UnixStream::connect(&path).expect("it listens");
    drop(listener);
    assert_eq!(directory.path().read_dir().expect("listed").count(), 0);
}

#[test]
fn private_socket_is_private_from_the_first_moment() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let _listener = Listener::unix_for(&path, SocketUsers::Own).expect("listens");
    let mode = path.metadata().expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn socket_whose_name_is_as_long_as_can_be_is_found_by_its_heir() {
    let directory = tempfile::tempdir().expect("a directory");
    for longest in [106, 107] {
        let rest = longest - directory.path().as_os_str().len() - 1;
        let path = directory.path().join("s".repeat(rest));
        let listener = Listener::unix(&path).expect("listens");
        UnixStream::connect(&path).expect("it listens");
        let fd = listener.as_fd().try_clone_to_owned().expect("a descriptor");
        let heir = Listener::inherited(fd).expect("it listens");
        assert_eq!(heir.path(), Some(&*path), "{longest}");
    }
}

#[test]
fn socket_of_a_dead_server_is_replaced() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    // Dropping a std listener closes it and leaves its file, as a killed server does.
    drop(UnixListener::bind(&path).expect("bind"));
    assert!(path.exists());

    let listener = Listener::unix(&path).expect("replaces it");

    UnixStream::connect(&path).expect("it listens");
    drop(listener);
    assert!(!path.exists());
}

#[test]
fn socket_of_a_living_server_is_left_alone() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let _living = Listener::unix(&path).expect("bind");

    let error = Listener::unix(&path).expect_err("it lives");

    assert_eq!(error.kind(), ErrorKind::Denied);
    UnixStream::connect(&path).expect("it still listens");
}

/// The story: a start waited without end for a server that was stopped, and kept all others in that
/// folder from starting.
#[test]
fn server_that_lets_nobody_in_counts_as_living() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let stopped = UnixListener::bind(&path).expect("bind");
    rustix::net::listen(&stopped, 0).expect("listens");
    let mut waiting = Vec::new();
    while let Ok(Some(client)) = connect_unix_at_once(&path) {
        waiting.push(client);
    }
    assert!(!waiting.is_empty());

    let error = Listener::unix(&path).expect_err("it lives");

    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(path.exists());
}

#[test]
fn file_that_is_not_a_socket_is_left_alone() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, b"precious").expect("write");

    let error = Listener::unix(&path).expect_err("not a socket");

    assert_eq!(error.kind(), ErrorKind::Denied);
    assert_eq!(std::fs::read(&path).expect("read"), b"precious");
}

#[test]
fn file_goes_with_the_last_clone_and_stays_after_a_takeover() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let first = Listener::unix(&path).expect("bind");
    let clone = first.clone();
    let fd = first.as_fd().try_clone_to_owned().expect("a descriptor");
    let heir = Listener::inherited(fd).expect("it listens");
    assert_eq!(heir.path(), Some(&*path));

    drop(first);
    assert!(path.exists());
    clone.leave_file();
    drop(clone);
    UnixStream::connect(&path).expect("the heir listens");
    heir.own_file();
    drop(heir);
    assert!(!path.exists());
}

#[test]
fn file_that_another_server_put_there_since_is_left_alone() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let ours = Listener::unix(&path).expect("bind");
    std::fs::remove_file(&path).expect("remove");
    let _theirs = UnixListener::bind(&path).expect("bind");

    drop(ours);

    UnixStream::connect(&path).expect("it still listens");
}

/// As on file systems that cannot rename without replacing.
#[test]
fn name_that_is_given_by_a_link_replaces_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let (unseen, path) = (directory.path().join("unseen"), directory.path().join("socket"));
    std::fs::write(&path, "of somebody else").expect("written");
    let listening = UnixListener::bind(&unseen).expect("bound");
    let error = name_by_link(&unseen, &path).expect_err("taken");
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert_eq!(std::fs::read(&path).expect("still there"), b"of somebody else");
    std::fs::remove_file(&path).expect("removed");
    name_by_link(&unseen, &path).expect("free");
    assert!(!unseen.exists());
    UnixStream::connect(&path).expect("it listens");
    drop(listening);
}
