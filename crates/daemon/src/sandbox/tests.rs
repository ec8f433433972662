use super::*;
use crate::config::DiskConfig;
use crate::settings::{DiskSettings, ProcessSettings, VolumeSettings};
use crate::sockets::Sockets;
use io_uring::IoUring;
use mica_rt::{Backend, Executor};
use mica_store::{CacheMode, FileStore, Handles, Located, Locking};
use rustix::fs::{AtFlags, Mode, OFlags};
use std::fs::{self, File};
use std::io;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;

/// Two folders; the sandbox allows reading the first.
struct Place {
    folder: TempDir,
    needs: Needs,
}

const SECRET: &[u8] = b"secret";
const NO_ERRANDS: HelperDoes = HelperDoes { mounts: false, removes: false };

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

    /// Runs `test` on a sandboxed thread; skipped if the kernel does not support it.
    #[track_caller]
    fn inside(&self, test: impl FnOnce() + Send) {
        self.inside_with(|| (), |()| test());
    }

    /// The same, with what `before` creates between entering and closing, as threads create their
    /// rings.
    #[track_caller]
    fn inside_with<T>(&self, before: impl FnOnce() -> T + Send, test: impl FnOnce(T) + Send) {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let sandbox = Sandbox::enter(SandboxMode::Require, &self.needs).expect("entered");
                let made = before();
                // A test continues after a refusal.
                match sandbox.close_for(Threads::This, Unlisted::Error) {
                    Ok(()) => test(made),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
                        eprintln!("SKIPPED: {error}");
                    }
                }
            });
            thread.join().expect("the test ended");
        });
    }
}

fn is_refused<T>(result: io::Result<T>) -> bool {
    let refusals = [libc::EACCES, libc::EPERM, libc::ENOSYS].map(Some);
    result.is_err_and(|error| refusals.contains(&error.raw_os_error()))
}

fn is_errno_of_refusal<T>(result: rustix::io::Result<T>) -> bool {
    is_refused(result.map_err(io::Error::from))
}

/// Makes a system call by number, with all arguments zero.
fn call(number: i64) -> Option<i32> {
    // SAFETY: a call that is refused does nothing; what is not refused fails the test, and with
    // these arguments names no memory.
    let returned = unsafe { libc::syscall(number, 0, 0, 0, 0, 0, 0) };
    (returned == -1).then(|| io::Error::last_os_error().raw_os_error()).flatten()
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
        // Somebody unrestricted keeps swapping the name.
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

/// The story: sockets were made and connected through rings, where no filter sees it.
#[test]
fn rings_are_those_that_there_were_and_do_what_they_are_for() {
    let place = Place::new();
    let executor = || match Executor::new(Backend::Uring) {
        Ok(executor) => Some(executor),
        Err(error) => {
            eprintln!("SKIPPED: no io_uring ({error})");
            None
        }
    };
    let file = File::open(place.at("in/layer")).expect("there");
    place.inside_with(executor, |executor| {
        assert!(is_refused(IoUring::new(2)), "io_uring_setup");
        assert!(is_refused(Executor::new(Backend::Uring)), "io_uring_setup");
        assert_eq!(call(libc::SYS_io_uring_setup), Some(libc::EPERM));
        let Some(executor) = executor else { return };
        let file = Arc::new(mica_rt::File::new(file.into(), mica_rt::Access::Buffered));
        executor.block_on(async {
            let (read, bytes) = mica_rt::read_at(&file, mica_rt::Buf::new(5), 0).await;
            assert_eq!((read.expect("read"), &bytes[..]), (5, &b"layer"[..]));
        });
    });
}

/// The story: `connect()` to the socket of any other program succeeded.
#[test]
fn socket_of_another_program_is_out_of_reach() {
    let mut place = Place::new();
    let socket = place.at("in/theirs");
    place.needs.add_socket(&socket);
    let _theirs = UnixListener::bind(&socket).expect("bound");
    let datagrams = UnixDatagram::bind(place.at("in/datagrams")).expect("bound");
    place.inside(|| {
        assert!(is_refused(UnixStream::connect(&socket)));
        assert!(is_refused(UnixDatagram::unbound()), "what sends without connecting");
        assert!(is_refused(UnixDatagram::pair()));
        let listener = UnixListener::bind(place.at("in/ours")).expect("to listen is allowed");
        let address = rustix::net::SocketAddrUnix::new(&socket).expect("short");
        assert!(is_errno_of_refusal(rustix::net::connect(&listener, &address)));
        let flags = rustix::net::SendFlags::empty();
        assert!(is_errno_of_refusal(rustix::net::sendto(&listener, b"x", flags, &address)));
        for number in [libc::SYS_connect, libc::SYS_sendmmsg, libc::SYS_socketpair] {
            assert_eq!(call(number), Some(libc::EPERM), "{number}");
        }
    });
    drop(datagrams);
}

/// The story: all of this succeeded, on files of the image's folder and on any other.
#[test]
fn modes_owners_times_and_attributes_stay_whatever_file_it_is() {
    use rustix::fs::{AtFlags, CWD, Mode, Timestamps, XattrFlags};
    let place = Place::new();
    let now = rustix::fs::Timespec { tv_sec: 1, tv_nsec: 1 };
    let times = Timestamps { last_access: now, last_modification: now };
    for name in ["in/layer", "out/secret"] {
        let path = place.at(name);
        let open = File::options().write(true).open(&path).expect("there");
        let before = fs::metadata(&path).expect("there");
        place.inside(|| {
            let mode = Mode::from_raw_mode(0o4777);
            assert!(is_errno_of_refusal(rustix::fs::chmod(&path, mode)));
            assert!(is_errno_of_refusal(rustix::fs::fchmod(&open, mode)));
            assert!(is_errno_of_refusal(rustix::fs::chmodat(CWD, &path, mode, AtFlags::empty())));
            assert!(is_refused(std::os::unix::fs::chown(&path, Some(1), Some(1))));
            assert!(is_refused(std::os::unix::fs::lchown(&path, Some(1), Some(1))));
            assert!(is_refused(std::os::unix::fs::fchown(&open, Some(1), Some(1))));
            let none = AtFlags::empty();
            assert!(is_errno_of_refusal(rustix::fs::utimensat(CWD, &path, &times, none)));
            assert!(is_errno_of_refusal(rustix::fs::futimens(&open, &times)));
            for attribute in ["security.capability", "user.x"] {
                let flags = XattrFlags::empty();
                let set = rustix::fs::setxattr(&path, attribute, b"x", flags);
                assert!(is_errno_of_refusal(set), "{attribute}");
                let set = rustix::fs::fsetxattr(&open, attribute, b"x", flags);
                assert!(is_errno_of_refusal(set), "{attribute}");
                assert!(is_errno_of_refusal(rustix::fs::removexattr(&path, attribute)));
            }
            assert!(is_refused(fs::hard_link(&path, place.at("in/hard"))));
        });
        let after = fs::metadata(&path).expect("there");
        let seen = |found: &fs::Metadata| (found.mode(), found.uid(), found.mtime(), found.ctime());
        assert_eq!(seen(&before), seen(&after), "{name}");
    }
}

#[test]
fn code_is_the_programs_own() {
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
    const BYTES: usize = 4096;
    let place = Place::new();
    place.inside(|| {
        let map = |access| {
            // SAFETY: a new mapping, at a place that the kernel chooses.
            unsafe { mmap_anonymous(std::ptr::null_mut(), BYTES, access, MapFlags::PRIVATE) }
        };
        assert!(is_errno_of_refusal(map(ProtFlags::READ | ProtFlags::EXEC)));
        let mapped = map(ProtFlags::READ | ProtFlags::WRITE).expect("memory is allowed");
        // SAFETY: it is the mapping above.
        unsafe {
            let access = MprotectFlags::READ | MprotectFlags::EXEC;
            assert!(is_errno_of_refusal(mprotect(mapped, BYTES, access)));
            munmap(mapped, BYTES).expect("unmapped");
        }
    });
}

#[test]
fn other_programs_users_and_hosts_are_refused_with_an_error() {
    let place = Place::new();
    let elsewhere = TcpListener::bind("127.0.0.1:0").expect("bound");
    let elsewhere = elsewhere.local_addr().expect("an address");
    let mut child = Command::new("sleep").arg("60").spawn().expect("started");
    let pid = rustix::process::Pid::from_child(&child);
    let terminal = File::open("/dev/null").expect("there");
    place.inside(|| {
        assert!(is_refused(Command::new("/bin/true").status()), "execve");
        assert!(is_refused(symlink("layer", place.at("in/link"))), "symlink");
        assert!(is_refused(std::os::unix::fs::chroot(place.at("in"))), "chroot");
        assert!(is_refused(UdpSocket::bind("127.0.0.1:0")), "datagrams");
        assert!(is_refused(TcpStream::connect(elsewhere)), "connect");
        assert!(is_refused(TcpListener::bind("127.0.0.1:0")), "bind");
        let killed = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        assert!(is_errno_of_refusal(killed));
        let descriptor = terminal.as_raw_fd();
        // SAFETY: none of these names memory.
        unsafe {
            assert_eq!(libc::ioctl(descriptor, libc::TIOCSTI, 0), -1);
            assert_eq!(libc::fcntl(descriptor, libc::F_SETOWN, 1), -1);
            assert_eq!(libc::fcntl(descriptor, libc::F_SETLEASE, 0), -1);
            assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 0), -1);
            assert_eq!(libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0), -1, "a process");
        }
        // Threads, which are needed, still work.
        assert_eq!(std::thread::spawn(|| 7).join().expect("started"), 7);
    });
    child.kill().expect("it still runs");
    child.wait().expect("ended");
}

#[test]
fn helper_makes_no_file_that_could_be_given_a_name() {
    let place = Place::new();
    let folder = place.at("in");
    let restricted = || {
        rustix::thread::set_no_new_privs(true).expect("set");
        calls::restrict_helper(NO_ERRANDS, Threads::This, Unlisted::Error).expect("restricted");
        let open = |flags| {
            let flags = OFlags::TMPFILE | OFlags::RDWR | flags;
            rustix::fs::open(&folder, flags, Mode::RUSR | Mode::WUSR)
        };
        assert!(is_errno_of_refusal(open(OFlags::empty())), "linkat would name it");
        open(OFlags::EXCL).expect("made");
    };
    std::thread::scope(|scope| scope.spawn(restricted).join()).expect("the test ended");
}

#[test]
fn helper_removes_files_only_if_some_were_made_and_never_folders() {
    for removes in [false, true] {
        let place = Place::new();
        let (file, folder) = (place.at("in/made"), place.at("in/folder"));
        fs::write(&file, "").expect("made");
        fs::create_dir(&folder).expect("made");
        let restricted = || {
            rustix::thread::set_no_new_privs(true).expect("set");
            let does = HelperDoes { removes, ..NO_ERRANDS };
            calls::restrict_helper(does, Threads::This, Unlisted::Error).expect("restricted");
            let unlink = |path, flags| rustix::fs::unlinkat(rustix::fs::CWD, path, flags);
            assert!(is_errno_of_refusal(unlink(&folder, AtFlags::REMOVEDIR)));
            match removes {
                true => unlink(&file, AtFlags::empty()).expect("removed"),
                false => assert!(is_errno_of_refusal(unlink(&file, AtFlags::empty()))),
            }
        };
        std::thread::scope(|scope| scope.spawn(restricted).join()).expect("the test ended");
    }
}

/// Whatever calls the kernel has, now or in future.
#[test]
fn call_that_is_on_no_list_is_refused() {
    const NUMBERS: i64 = 1024;
    /// The flag in the numbers of x32 system calls.
    const X32: i64 = 0x4000_0000;
    /// Used by the kernel's own probes: no filter can refuse them, and the kernel kills any other
    /// caller.
    const PROBES: [i64; 2] = [335, 336];
    let place = Place::new();
    place.inside(|| {
        let is_probe = |number: &i64| cfg!(target_arch = "x86_64") && PROBES.contains(number);
        let unlisted = (0..NUMBERS).filter(|number| !calls::knows(*number) && !is_probe(number));
        let twins =
            (0..NUMBERS).map(|number| number | X32).filter(|_| cfg!(target_arch = "x86_64"));
        let answered = unlisted
            .chain(twins)
            .filter(|number| !matches!(call(*number), Some(libc::EPERM | libc::ENOSYS)));
        assert_eq!(answered.collect::<Vec<_>>(), Vec::<i64>::new());
    });
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
        let own = mica_serve::SocketUsers::Own;
        let _listening = mica_serve::Listener::unix_for(&socket, own).expect("listens");
        // It can no longer be told from that of a living server.
        let error = mica_serve::Listener::unix(&socket).expect_err("there is one");
        assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    });
}

/// The story: the rules for buckets took the place of those for servers, so that one with a bucket
/// could open sockets of any protocol, connect by sending, and set any option.
#[test]
fn bucket_widens_nothing_but_what_a_client_of_it_does() {
    use libc::{AF_INET, AF_INET6, AF_NETLINK, AF_PACKET, AF_VSOCK};
    let mut place = Place::new();
    let service = TcpListener::bind("127.0.0.1:0").expect("bound");
    let elsewhere = TcpListener::bind("127.0.0.1:0").expect("bound");
    let address = |of: &TcpListener| of.local_addr().expect("an address");
    let (service_address, elsewhere_address) = (address(&service), address(&elsewhere));
    place.needs.connects.insert(service_address.port());
    place.inside(|| {
        let socket = |family, kind, protocol| {
            // SAFETY: it names no memory.
            let made = unsafe { libc::socket(family, kind, protocol) };
            // SAFETY: it was just made, and nobody else has it.
            (made >= 0).then(|| unsafe { OwnedFd::from_raw_fd(made) })
        };
        let (stream, datagram) = (libc::SOCK_STREAM | libc::SOCK_CLOEXEC, libc::SOCK_DGRAM);
        for (family, kind, protocol) in [
            (AF_INET, stream, libc::IPPROTO_MPTCP),
            (AF_INET6, stream, libc::IPPROTO_MPTCP),
            (AF_INET, stream, libc::IPPROTO_SCTP),
            (AF_INET, datagram, libc::IPPROTO_ICMP),
            (AF_INET, datagram, libc::IPPROTO_UDPLITE),
            (AF_INET, libc::SOCK_RAW, libc::IPPROTO_TCP),
            (AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_NETFILTER),
            (AF_PACKET, datagram, 0),
            (AF_VSOCK, stream, 0),
            (libc::AF_UNIX, datagram, 0),
        ] {
            let made = socket(family, kind, protocol);
            assert!(made.is_none(), "{family} {kind} {protocol}");
            let errno = io::Error::last_os_error();
            assert_eq!(errno.raw_os_error(), Some(libc::ENOSYS), "{family} {kind} {protocol}");
        }
        assert!(is_refused(TcpStream::connect(elsewhere_address)), "another port");
        let connected = TcpStream::connect(service_address).expect("the service");
        let descriptor = connected.as_raw_fd();
        let option = |level, name: libc::c_int| {
            let value: libc::c_int = 1;
            let len = libc::socklen_t::try_from(size_of_val(&value)).expect("small");
            // SAFETY: the value lives through the call, and has this length.
            let set = unsafe {
                libc::setsockopt(descriptor, level, name, std::ptr::from_ref(&value).cast(), len)
            };
            (set != 0).then(|| io::Error::last_os_error().raw_os_error()).flatten()
        };
        for (level, name) in [
            (libc::SOL_SOCKET, libc::SO_BINDTODEVICE),
            (libc::SOL_SOCKET, libc::SO_DEBUG),
            (libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT),
            (libc::IPPROTO_TCP, libc::TCP_REPAIR),
            (libc::IPPROTO_IP, libc::IP_TRANSPARENT),
        ] {
            assert_eq!(option(level, name), Some(libc::ENOSYS), "{level} {name}");
        }
        for (level, name) in [
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
            (libc::IPPROTO_TCP, libc::TCP_NODELAY),
            (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
        ] {
            assert_eq!(option(level, name), None, "{level} {name}");
        }
        let opens = socket(AF_INET, stream, 0).expect("TCP");
        let flags = rustix::net::SendFlags::from_bits_retain(libc::MSG_FASTOPEN.cast_unsigned());
        let sent = rustix::net::sendto(&opens, b"x", flags, &elsewhere_address);
        assert!(is_errno_of_refusal(sent), "connecting by sending");
        let message = [libc::SYS_sendmsg, libc::SYS_sendmmsg].map(|call| {
            let descriptor = i64::from(opens.as_raw_fd());
            let flags = i64::from(libc::MSG_FASTOPEN);
            // SAFETY: a call that is refused reads nothing, and null is no memory.
            match unsafe { libc::syscall(call, descriptor, 0, flags, flags) } {
                -1 => io::Error::last_os_error().raw_os_error(),
                _ => None,
            }
        });
        assert_eq!(message, [Some(libc::ENOSYS); 2], "connecting by sending");
        // For names of hosts.
        let lookup = UdpSocket::bind("127.0.0.1:0").expect("datagrams");
        lookup.send_to(b"x", lookup.local_addr().expect("bound")).expect("sent");
        assert!(socket(AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE).is_some());
    });
}

/// The story: all shared memory of other programs could be written to.
#[test]
fn logs_of_this_user_are_left_and_nothing_beside_them() {
    let mut place = Place::new();
    let mut disk = DiskConfig::new("disk".to_owned(), place.at("in/layer"));
    disk.images.redo_dir = place.at("out");
    let mut read_only = disk.clone();
    read_only.settings.read_only = true;
    for (disk, is_written) in [(read_only, false), (disk, true)] {
        place.needs = Needs::default();
        place.needs.add_disk(&disk);
        let folder = mica_stack::redo_folder(&place.at("out")).expect("made");
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

/// The story: a server of volumes in a bucket could remove what other servers of this user had not
/// flushed.
#[test]
fn server_of_volumes_in_a_bucket_can_do_nothing_to_logs() {
    let mut place = Place::new();
    let mut disk = DiskConfig::new("disk".to_owned(), place.at("in/layer"));
    disk.volume.volume = Some("s3://bucket/web".to_owned());
    place.needs.add_disk(&disk);
    let usual = mica_stack::usual_redo_directory();
    let logs = mica_stack::redo_folder(usual).expect("made");
    let notes = mica_stack::volumes_folder(usual).expect("made");
    let name = format!("test-{}", std::process::id());
    let (log, note) = (logs.join(&name), notes.join(&name));
    fs::write(&log, b"log").expect("written");
    place.inside(|| {
        assert!(is_refused(fs::read(&log)), "read");
        assert!(is_refused(fs::write(&log, b"")), "written");
        assert!(is_refused(fs::remove_file(&log)), "removed");
        fs::write(&note, b"lives").expect("this is what it may");
        fs::remove_file(&note).expect("removed");
    });
    fs::remove_file(&log).expect("it is there");
}

/// The story: such a disk was added, could not make its log at the first write, and lost what was
/// not flushed by a kill.
#[test]
fn disk_whose_folder_of_logs_cannot_be_made_is_refused() {
    let place = Place::new();
    let mut disk = DiskConfig::new("disk".to_owned(), place.at("in/layer"));
    disk.images.redo_dir = place.at("out");
    let granted = place.needs.granted();
    place.inside(|| {
        let error = granted.check(&disk).expect_err("it would have no log");
        assert!(error.to_string().contains("a folder for redo logs"), "{error}");
        let option = format!("--redo-dir {}", place.at("out").display());
        assert!(error.to_string().contains(&option), "{error}");
        let mut read_only = disk.clone();
        read_only.settings.read_only = true;
        let error = granted.check(&read_only).err();
        let says = error.map_or(String::new(), |error| error.to_string());
        assert!(!says.contains("redo logs"), "{says}");
    });
    assert!(mica_stack::redo_folder(&place.at("out")).is_ok(), "outside it can");
}

/// A port cannot be put into the configuration for a backup alone.
#[test]
fn port_that_was_not_granted_is_refused_with_what_helps() {
    let place = Place::new();
    let nbd = vec!["tcp:127.0.0.1:10809".parse().expect("a place")];
    let granted = place.needs.granted();
    let refused = granted.check_sockets(&DiskSettings { nbd, ..DiskSettings::default() });
    let refused = refused.expect_err("no port was granted").to_string();
    for part in ["10809", "--nbd unix:PATH", "--sandbox off"] {
        assert!(refused.contains(part), "{refused}");
    }
}

/// The story: the folder of the logs was removed and made again while the server ran. The kernel's
/// rule was for the one before: a disk was added, and had no log.
#[test]
fn disk_whose_folder_of_logs_is_another_than_was_granted_is_refused() {
    let mut place = Place::new();
    let mut disk = DiskConfig::new("disk".to_owned(), place.at("in/layer"));
    disk.images.redo_dir = place.at("out");
    place.needs.add_disk(&disk);
    let granted = place.needs.granted();
    granted.check(&disk).expect("as it was");
    let folder = mica_stack::redo_folder(&place.at("out")).expect("there");
    // The one before keeps its inode.
    fs::rename(&folder, place.at("out/before")).expect("renamed");
    mica_stack::redo_folder(&place.at("out")).expect("made");
    let error = granted.check(&disk).expect_err("the kernel refuses it");
    assert!(error.to_string().contains("restart the server"), "{error}");
    assert!(error.to_string().contains(&folder.display().to_string()), "{error}");
    fs::remove_dir(&folder).expect("empty");
    fs::rename(place.at("out/before"), &folder).expect("renamed");
    granted.check(&disk).expect("as it was");
}

#[test]
fn disk_with_logs_elsewhere_is_told_of_them_and_not_of_disks_in() {
    let mut place = Place::new();
    let mut disk = DiskConfig::new("disk".to_owned(), place.at("in/layer"));
    place.needs.add_disk(&disk);
    let granted = place.needs.granted();
    mica_stack::redo_folder(&place.at("out")).expect("made");
    disk.images.redo_dir = place.at("out");
    let error = granted.check(&disk).expect_err("it was not there").to_string();
    assert!(error.contains("redo logs in") && !error.contains("--disks-in"), "{error}");
}

#[test]
fn without_a_sandbox_nothing_changes() {
    let place = Place::new();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let sandbox = Sandbox::enter(SandboxMode::Off, &place.needs).expect("nothing to do");
            sandbox.close_for(Threads::This, Unlisted::Error).expect("nothing to do");
            fs::read(place.at("out/secret")).expect("not refused")
        });
        assert_eq!(thread.join().expect("ended"), SECRET);
    });
}

/// The story: a snapshot was only read, and its whole store could be written.
#[test]
fn volume_that_is_only_read_gets_no_rights_to_write() {
    let place = Place::new();
    let (store, log) = (place.at("in"), place.at("out/log"));
    let disk = |name: &str| {
        let volume = Some(format!("file://{}/{name}", store.display()));
        let volume =
            VolumeSettings { volume, log_device: Some(log.clone()), ..VolumeSettings::default() };
        DiskConfig::of_volume("web".to_owned(), volume)
    };
    let mut read_only = disk("web");
    read_only.settings.read_only = true;
    for disk in [disk("web@monday"), read_only] {
        let needs = Needs::of(&ProcessSettings::default(), &[disk], &Sockets::default());
        let needs = needs.expect("nothing is in the way");
        assert!(!needs.has_links);
        let writes = AccessFs::WriteFile | AccessFs::MakeReg | AccessFs::RemoveFile;
        let granted = needs.files.iter().filter(|(_, access)| access.intersects(writes));
        assert_eq!(granted.count(), 0, "{needs:?}");
    }
    let needs = Needs::of(&ProcessSettings::default(), &[disk("web")], &Sockets::default());
    let needs = needs.expect("nothing is in the way");
    assert!(needs.has_links);
    assert!(needs.files[&store].contains(AccessFs::WriteFile | AccessFs::MakeReg));
}

#[test]
fn states_of_an_image_that_is_written_are_kept_beside_it_and_nowhere_else() {
    let mut place = Place::new();
    let disk = DiskConfig::new("web".to_owned(), place.at("in/layer"));
    let of = |disk: DiskConfig| {
        let needs = Needs::of(&ProcessSettings::default(), &[disk], &Sockets::default());
        needs.expect("nothing is in the way")
    };
    let mut read_only = disk.clone();
    read_only.settings.read_only = true;
    read_only.settings.index = crate::settings::IndexMode::Read;
    let needs = of(read_only);
    let folder = place.at("in").canonicalize().expect("it is there");
    assert!(!needs.has_links && !needs.files[&folder].contains(AccessFs::MakeReg));
    place.needs = of(disk);
    place.inside(|| {
        let made = File::create_new(place.at("in/.layer@a.new"));
        made.expect("a file beside it");
        fs::hard_link(place.at("in/layer"), place.at("in/layer@a")).expect("a second name");
        fs::rename(place.at("in/.layer@a.new"), place.at("in/layer")).expect("the first name");
        let folder = File::open(place.at("in")).expect("opened");
        folder.sync_all().expect("durable");
        assert!(is_refused(fs::hard_link(place.at("in/layer@a"), place.at("out/layer"))));
        assert!(is_refused(File::create_new(place.at("out/new"))));
    });
}

/// The story: a thousand images in one folder had a thousand rules, which the kernel walks.
#[test]
fn image_in_a_granted_folder_has_no_rule_of_its_own_and_one_behind_a_link_has() {
    let place = Place::new();
    let of = |image: std::path::PathBuf| {
        let disk = DiskConfig::new("web".to_owned(), image.clone());
        let needs = Needs::of(&ProcessSettings::default(), &[disk], &Sockets::default());
        needs.expect("nothing is in the way").files.contains_key(&image)
    };
    let folder = place.at("in").canonicalize().expect("it is there");
    assert!(!of(folder.join("layer")));
    std::os::unix::fs::symlink(place.at("out/secret"), folder.join("link")).expect("made");
    assert!(of(folder.join("link")));
}
