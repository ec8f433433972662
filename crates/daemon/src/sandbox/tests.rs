use super::*;
use crate::config::DiskConfig;
use io_uring::{IoUring, opcode, types};
use mica_store::{CacheMode, FileStore, Handles, Located, Locking};
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;

/// Two folders, of which the sandbox allows to read the first.
struct Place {
    folder: TempDir,
    needs: Needs,
}

const SECRET: &[u8] = b"secret";

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["in", "out"] {
            fs::create_dir(folder.path().join(name)).expect("made");
        }
        fs::write(folder.path().join("in/layer"), b"layer").expect("written");
        fs::write(folder.path().join("out/secret"), SECRET).expect("written");
        let mut needs = Needs::default();
        needs.allow(&folder.path().join("in"), AccessFs::ReadFile.into());
        Self { folder, needs }
    }

    fn at(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    /// Runs `test` on a thread that is in the sandbox; not where the kernel has none.
    #[track_caller]
    fn inside(&self, test: impl FnOnce() + Send) {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| match enter(SandboxMode::Require, &self.needs) {
                Ok(()) => test(),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
                    eprintln!("SKIPPED: {error}");
                }
            });
            thread.join().expect("the test ended");
        });
    }
}

fn is_refused<T>(result: io::Result<T>) -> bool {
    let refusals = [libc::EACCES, libc::EPERM].map(Some);
    result.is_err_and(|error| refusals.contains(&error.raw_os_error()))
}

#[test]
fn file_elsewhere_is_refused_whatever_it_is_called() {
    let place = Place::new();
    let secret = place.at("out/secret");
    symlink(&secret, place.at("in/link")).expect("linked");
    symlink("../out", place.at("in/folder")).expect("linked");
    let pinned = fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&secret);
    let pinned = pinned.expect("found");
    let root = Path::new("/proc/self/root").join(secret.strip_prefix("/").expect("absolute"));
    let names = [
        secret.clone(),
        place.at("in/../out/secret"),
        place.at("in/link"),
        place.at("in/folder/secret"),
        format!("/proc/self/fd/{}", pinned.as_raw_fd()).into(),
        root,
        "/proc/self/environ".into(),
        "/etc/hostname".into(),
    ];
    place.inside(|| {
        for name in names {
            assert!(name.exists(), "{name:?}: the test is of no use");
            assert!(is_refused(File::open(&name)), "{name:?}");
        }
        assert_eq!(fs::read(place.at("in/layer")).expect("allowed"), b"layer");
        assert!(is_refused(File::options().append(true).open(place.at("in/layer"))), "no writing");
        assert!(is_refused(fs::write(place.at("in/new"), b"")), "no new files");
        assert!(is_refused(fs::rename(place.at("in/layer"), place.at("in/other"))));
        assert!(is_refused(fs::hard_link(&secret, place.at("in/hard"))));
    });
}

#[test]
fn store_below_the_policy_opens_nothing_elsewhere() {
    let place = Place::new();
    let handles = Handles::new(4);
    place.inside(|| {
        let read = |name: &str| {
            let located = Located::find(&place.at(name));
            let mut located = located.expect("to find a file opens nothing");
            let (cache, locking) = (CacheMode::Writeback, Locking::On);
            FileStore::new_shared(&mut located, cache, locking, &handles).map(drop)
        };
        read("in/layer").expect("allowed");
        let error = read("out/secret").expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    });
}

#[test]
fn name_that_changes_what_it_means_opens_nothing_elsewhere() {
    const ROUNDS: usize = 2000;
    let place = Place::new();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Somebody who may do what they like swaps the name all the time.
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for target in ["layer", "../out/secret"] {
                    let new = place.at("in/swapped.new");
                    symlink(target, &new).expect("linked");
                    fs::rename(&new, place.at("in/swapped")).expect("renamed");
                }
            }
        });
        place.inside(|| {
            for _ in 0..ROUNDS {
                if let Ok(content) = fs::read(place.at("in/swapped")) {
                    assert_ne!(content, SECRET);
                }
            }
        });
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn ring_opens_nothing_that_the_thread_may_not() {
    let place = Place::new();
    if let Err(error) = IoUring::new(2) {
        return eprintln!("SKIPPED: no io_uring ({error})");
    }
    place.inside(|| {
        let mut ring = IoUring::new(2).expect("allowed");
        let mut open = |name: &str| {
            let path = place.at(name);
            let path = CString::new(path.as_os_str().as_bytes()).expect("no zero in it");
            let at = types::Fd(libc::AT_FDCWD);
            let entry = opcode::OpenAt::new(at, path.as_ptr()).flags(libc::O_RDONLY).build();
            // SAFETY: the path lives until the operation has completed, below.
            unsafe { ring.submission().push(&entry) }.expect("there is room");
            ring.submit_and_wait(1).expect("submitted");
            ring.completion().next().expect("completed").result()
        };
        assert!(open("in/layer") >= 0);
        assert_eq!(open("out/secret"), -libc::EACCES);
    });
}

#[test]
fn other_programs_users_and_hosts_are_refused_with_an_error() {
    let place = Place::new();
    let elsewhere = TcpListener::bind("127.0.0.1:0").expect("bound");
    let elsewhere = elsewhere.local_addr().expect("an address");
    let mut child = Command::new("sleep").arg("60").spawn().expect("started");
    let pid = rustix::process::Pid::from_child(&child);
    place.inside(|| {
        assert!(is_refused(Command::new("/bin/true").status()), "execve");
        assert!(is_refused(symlink("layer", place.at("in/link"))), "symlink");
        assert!(is_refused(std::os::unix::fs::chroot(place.at("in"))), "chroot");
        assert!(is_refused(UdpSocket::bind("127.0.0.1:0")), "datagrams");
        assert!(is_refused(TcpStream::connect(elsewhere)), "connect");
        assert!(is_refused(TcpListener::bind("127.0.0.1:0")), "bind");
        let killed = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        assert_eq!(killed, Err(rustix::io::Errno::PERM));
        // What is needed works: threads, and sockets of this machine.
        assert_eq!(std::thread::spawn(|| 7).join().expect("started"), 7);
        let (mut left, mut right) = UnixStream::pair().expect("made");
        io::Write::write_all(&mut left, b"x").expect("sent");
        io::Read::read_exact(&mut right, &mut [0]).expect("received");
    });
    child.kill().expect("it still runs");
    child.wait().expect("ended");
}

#[test]
fn port_and_socket_of_the_configuration_are_left() {
    let mut place = Place::new();
    let socket = place.at("in/socket");
    place.needs.ports.insert(0);
    place.needs.add_socket(&socket);
    place.inside(|| {
        TcpListener::bind("127.0.0.1:0").expect("the port that was asked for");
        drop(mica_serve::Listener::unix(&socket).expect("listens"));
        assert!(!socket.exists(), "removed");
        let listening = UnixListener::bind(&socket).expect("bound");
        UnixStream::connect(&socket).expect("connected");
        drop(listening);
        mica_serve::Listener::unix(&socket).expect("takes the place of one that is gone");
    });
}

/// The story: all of the memory that programs share could be written to.
#[test]
fn logs_of_this_user_are_left_and_nothing_beside_them() {
    let mut place = Place::new();
    let mut disk = DiskConfig::new("disk".to_owned(), place.at("in/layer"));
    disk.handover_dir = place.at("out");
    let read_only = DiskConfig { read_only: true, ..disk.clone() };
    for (disk, is_written) in [(read_only, false), (disk, true)] {
        place.needs = Needs::default();
        place.needs.add_disk(&disk).expect("found");
        let folder = mica_stack::handover_folder(&place.at("out")).expect("made");
        let [left, made] = ["left", "made"].map(|name| folder.join(name));
        fs::write(&left, b"log").expect("written");
        place.inside(|| {
            assert_eq!(fs::read(&left).expect("read"), b"log");
            assert_eq!(fs::write(&made, b"log").is_ok(), is_written);
            assert_eq!(fs::remove_file(&left).is_ok(), is_written);
            assert!(is_refused(fs::write(place.at("out/beside"), b"")), "beside them");
            assert!(is_refused(fs::read(place.at("out/secret"))), "of another program");
        });
    }
}

#[test]
fn without_a_sandbox_nothing_changes() {
    let place = Place::new();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            enter(SandboxMode::Off, &place.needs).expect("nothing to do");
            fs::read(place.at("out/secret")).expect("not refused")
        });
        assert_eq!(thread.join().expect("ended"), SECRET);
    });
}
