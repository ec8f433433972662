//! Mounting, finding mounts, and unmounting.

use super::*;
use crate::testing::clock::until;
use vm_memory::{FileOffset, MmapRegion};

#[test]
fn file_has_owner_and_mode_and_counts_what_it_did() {
    let Some(place) = Place::new() else { return };
    let running = place.start(Arc::new(MemoryDisk::new(LEN)), Discard::Unmap).expect("served");
    let file = place.file();
    let found = file.metadata().expect("stat");
    assert!(found.is_file());
    assert_eq!((found.len(), found.blocks(), found.mode() & 0o7777), (LEN, LEN / 512, 0o600));
    assert_eq!(found.uid(), rustix::process::getuid().as_raw());
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).expect("root may");
    assert_eq!(file.metadata().expect("stat").mode() & 0o7777, 0o640);
    assert_eq!(std::fs::read(&file).expect("read").len() as u64, LEN);

    let counters = running.shutdown();
    assert_eq!((counters.read_bytes, counters.refused, counters.panics), (LEN, 0, 0));
}

#[test]
fn living_server_is_left_alone() {
    let Some(place) = Place::new() else { return };
    place.with(Arc::new(MemoryDisk::new(LEN)), |path| {
        let second = place.start(Arc::new(MemoryDisk::new(LEN)), Discard::Unmap);
        let error = second.expect_err("another serves there");
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(error.to_string().contains("another server is mounted there"), "{error}");
        assert_eq!(path.metadata().expect("it lives").len(), LEN);
    });
}

/// The story: the kernel keeps what a program has mapped, so that it showed nothing of what an NBD
/// client of the same disk wrote later.
#[test]
fn file_of_a_disk_with_other_servers_cannot_be_mapped_into_shared_memory() {
    let Some(place) = Place::new() else { return };
    let disk = Arc::new(MemoryDisk::new(LEN));
    let config = ServerConfig {
        mapping: Mapping::Refused,
        ..place.config(Arc::clone(&disk) as _, Discard::Unmap)
    };
    let running = Server::start(config).expect("served");
    let file = open(&place.file());
    file.write_all_at(&[7; 512], 0).expect("written");
    let map = |file: &File| {
        let file = file.try_clone().expect("a descriptor");
        MmapRegion::<()>::from_file(FileOffset::new(file, 0), 4096)
    };
    assert!(map(&file).is_err());
    let mut read = [0; 512];
    file.read_exact_at(&mut read, 0).expect("read");
    assert_eq!(read, [7; 512]);
    drop(file);
    running.shutdown();
}

/// A mount whose server is this descriptor, and answers nothing.
fn mount_of_nobody(path: &Path) -> File {
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").expect("opened");
    let options = format!("fd={},rootmode=100600,user_id=0,group_id=0", device.as_raw_fd());
    let options = std::ffi::CString::new(options).expect("no zero byte");
    mount("nobody", path, "fuse", MountFlags::NODEV, Some(&*options)).expect("mounted");
    device
}

#[test]
fn mounts_of_servers_that_are_gone_are_cleared() {
    let Some(place) = Place::new() else { return };
    // Without a server the file cannot even be opened to be mounted over, so this is done twice.
    drop(mount_of_nobody(&place.file()));
    assert_eq!(errno(place.file().metadata()), Some(Errno::NOTCONN));
    drop(mount_of_nobody(&place.file()));

    place.with(Arc::new(MemoryDisk::new(LEN)), |path| {
        assert_eq!(path.metadata().expect("served").len(), LEN);
    });
}

#[test]
fn unresponsive_server_is_left_alone_and_blocks_nobody() {
    let Some(place) = Place::new() else { return };
    let silent = mount_of_nobody(&place.file());

    let error = place.start(Arc::new(MemoryDisk::new(LEN)), Discard::Unmap).expect_err("occupied");

    assert!(error.to_string().contains("does not answer"), "{error}");
    drop(silent);
    place.with(Arc::new(MemoryDisk::new(LEN)), |_| {});
}

#[test]
fn file_that_is_still_open_fails_after_the_end() {
    let Some(place) = Place::new() else { return };
    let running = place.start(Arc::new(MemoryDisk::new(LEN)), Discard::Unmap).expect("served");
    let file = open(&place.file());
    running.shutdown();
    assert_eq!(errno(file.read_at(&mut [0; 512], 0)), Some(Errno::NOTCONN));
    assert_eq!(std::fs::read(place.file()).expect("unmounted"), UNDERNEATH);
}

#[test]
fn server_that_is_never_started_answers_nobody_and_leaves_no_mount() {
    let Some(place) = Place::new() else { return };
    let disk = Arc::new(MemoryDisk::new(LEN));
    let prepared = Server::prepare(place.config(disk, Discard::Unmap)).expect("mounted");
    let file = place.file();
    let (sender, answer) = std::sync::mpsc::channel();
    let asking = std::thread::spawn(move || sender.send(file.metadata().map(|found| found.len())));
    let early = answer.recv_timeout(std::time::Duration::from_millis(200));
    drop(prepared);
    asking.join().expect("asked").expect("heard");
    assert!(early.is_err(), "answered: {early:?}");
    // It fails, unless that thread came late and found the file underneath.
    let len = answer.recv().expect("it was sent").ok();
    assert!(len.is_none_or(|len| len == UNDERNEATH.len() as u64), "{len:?}");
    assert_eq!(std::fs::read(place.file()).expect("unmounted"), UNDERNEATH);
}

#[test]
fn image_is_not_hidden_under_its_own_disk() {
    let Some(place) = Place::new() else { return };
    let config = place.config(Arc::new(MemoryDisk::new(LEN)), Discard::Unmap);
    let error = Server::start(ServerConfig { image: Some(place.file()), ..config });
    assert_eq!(error.expect_err("the same file").kind(), ErrorKind::Invalid);
    assert_eq!(std::fs::read(place.file()).expect("not mounted"), UNDERNEATH);
}

/// The story: the thread that takes requests had not heard of it yet, the kernel had given the
/// numbers of the first mount to the second, and the end of the first server took that away.
#[test]
fn mount_that_the_user_removed_is_not_an_error_and_a_later_one_stays() {
    let Some(place) = Place::new() else { return };
    let first = place.start(Arc::new(MemoryDisk::new(LEN)), Discard::Unmap).expect("served");
    assert!(!first.device.is_gone());
    rustix::mount::unmount(place.file(), rustix::mount::UnmountFlags::empty()).expect("unmounted");
    // At once, whatever the thread has heard.
    assert!(first.device.is_gone());
    let second = place.start(Arc::new(MemoryDisk::new(2 * LEN)), Discard::Unmap).expect("served");

    first.shutdown();

    assert_eq!(place.file().metadata().expect("served").len(), 2 * LEN);
    second.shutdown();
    assert_eq!(std::fs::read(place.file()).expect("unmounted"), UNDERNEATH);
}

/// The story: the thread had heard of it and closed its end, but had not said so yet; the server
/// took what it could not ask for mounted still, and unmounted the next one.
#[test]
fn mount_whose_thread_is_about_to_end_counts_as_gone() {
    let Some(place) = Place::new() else { return };
    let first = place.start(Arc::new(MemoryDisk::new(LEN)), Discard::Unmap).expect("served");
    rustix::mount::unmount(place.file(), rustix::mount::UnmountFlags::empty()).expect("unmounted");
    first.device.close();
    assert!(first.device.is_gone());
    first.shutdown();
}

#[test]
fn started_and_stopped_again_and_again_it_leaves_nothing() {
    let Some(place) = Place::new() else { return };
    let count = || std::fs::read_dir("/proc/self/fd").expect("listed").count();
    place.with(Arc::new(MemoryDisk::new(LEN)), |_| {});
    let before = count();
    for _ in 0..20 {
        place.with(Arc::new(MemoryDisk::new(LEN)), |path| {
            assert_eq!(File::open(path).expect("opened").read_at(&mut [0; 9], 3).expect("read"), 9);
        });
    }
    // Other tests of this process run concurrently, some of them with hundreds.
    until("as few files are open as before", || count() < before + 20);
}

/// A disk that never says where anything is.
struct StuckDisk;

impl Disk for StuckDisk {
    fn geometry(&self) -> Geometry {
        Geometry { len: LEN, preferred_bytes: 512 }
    }

    fn plan(&self, _: GuestRange, _: Vec<Extent>) -> Planned<'_> {
        Planned::Pending(Box::pin(std::future::pending()))
    }

    fn read(&self, _: &Extent, buf: Buf) -> IoFuture {
        ready(Ok(()), buf)
    }
}

#[test]
fn disk_that_is_stuck_does_not_hold_the_end_up() {
    let Some(place) = Place::new() else { return };
    let running = place.start(Arc::new(StuckDisk), Discard::Unmap).expect("served");
    let (sender, receiver) = mpsc::channel();
    let path = place.file();
    std::thread::spawn(move || {
        let file = File::open(path).expect("opened");
        sender.send(None).expect("somebody waits");
        sender.send(errno(file.read_at(&mut [0; 512], 0))).expect("somebody waits");
    });
    receiver.recv().expect("it reads");
    while running.counters().reads == 0 {
        std::thread::yield_now();
    }

    running.shutdown();

    let limit = Duration::from_secs(30);
    let answer = receiver.recv_timeout(limit).expect("an answer");
    assert!(matches!(answer, Some(Errno::CONNABORTED | Errno::NOTCONN)), "{answer:?}");
    assert_eq!(std::fs::read(place.file()).expect("unmounted"), UNDERNEATH);
}

#[test]
fn disk_that_is_only_read_is_not_opened_to_be_written() {
    let Some(place) = Place::new() else { return };
    let running = place.start(Arc::new(StuckDisk), Discard::Unmap).expect("served");
    let file = place.file();
    assert_eq!(file.metadata().expect("stat").mode() & 0o7777, 0o400);
    let opened = OpenOptions::new().write(true).open(&file);
    assert_eq!(errno(opened), Some(Errno::ROFS));
    let mode = std::fs::Permissions::from_mode(0o600);
    assert_eq!(errno(std::fs::set_permissions(&file, mode)), Some(Errno::ROFS));
    drop(running);
    assert_eq!(std::fs::read(&file).expect("unmounted"), UNDERNEATH);
}
