//! A server that takes over from another, under a client that writes all the time. The client
//! always finds a server at the socket, and everything acknowledged is there.

use mica_tests::guest::{Answer, Guest};
use mica_tests::takeover::{LIMIT, Process};
use mica_tests::{clock, nbd, qemu, tools};
use rustix::process::Signal;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{sync::Arc, sync::Mutex};

const SLOT_BYTES: u64 = 64 << 10;
const SLOTS: u64 = 64;

/// A client that writes until it has to stop.
struct Writer {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    acknowledged: AtomicU64,
    /// What each slot was last acknowledged to hold.
    slots: Mutex<Vec<u64>>,
    /// The longest time without an acknowledgement.
    longest: Mutex<Duration>,
}

impl Writer {
    fn start(socket: &Path) -> Self {
        let shared = Arc::new(Shared::default());
        *shared.slots.lock().expect("sound") = vec![0; usize::try_from(SLOTS).expect("few")];
        let (socket, at) = (socket.to_owned(), Arc::clone(&shared));
        let thread = std::thread::spawn(move || {
            let mut guest = connect(&socket);
            let mut last = clock::now();
            for number in 1.. {
                if at.stop.load(Ordering::Relaxed) {
                    break;
                }
                let slot = number % SLOTS;
                while guest.write(slot * SLOT_BYTES, &pattern(number)).ok() != Some(0) {
                    // A request without an answer is sent again, as a machine's NBD client does.
                    guest = connect(&socket);
                }
                at.slots.lock().expect("sound")[usize::try_from(slot).expect("few")] = number;
                at.acknowledged.store(number, Ordering::Relaxed);
                let mut longest = at.longest.lock().expect("sound");
                *longest = longest.max(last.elapsed());
                last = clock::now();
            }
        });
        Self { shared, thread }
    }

    /// Waits until it has made progress.
    #[track_caller]
    fn wait(&self) {
        let before = self.shared.acknowledged.load(Ordering::Relaxed);
        let goes_on =
            || (self.shared.acknowledged.load(Ordering::Relaxed) > before + 8).then_some(());
        assert!(clock::poll(LIMIT, Duration::from_millis(1), goes_on).is_some(), "it stands still");
    }

    fn take_longest(&self) -> Duration {
        std::mem::take(&mut *self.shared.longest.lock().expect("sound"))
    }

    /// Stops it, and compares the disk with what was acknowledged.
    #[track_caller]
    fn judge(self, socket: &Path) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the client saw no error");
        let mut guest = connect(socket);
        let slots = self.shared.slots.lock().expect("sound");
        for (slot, number) in (0_u64..).zip(&*slots) {
            let read = guest.read(slot * SLOT_BYTES, u32::try_from(SLOT_BYTES).expect("small"));
            assert_eq!(read.expect("read"), Answer::Done(pattern(*number)), "slot {slot}");
        }
    }
}

/// A server listens at all times. It may end during the handshake: then the next one answers.
#[track_caller]
fn connect(socket: &Path) -> Guest {
    let greeted = || {
        std::os::unix::net::UnixStream::connect(socket).expect("somebody listens");
        nbd::Connection::open(socket, "", &nbd::Wish::default()).ok()
    };
    let connection = clock::poll(LIMIT, Duration::from_millis(1), greeted);
    Guest::on(connection.expect("greeted in time"))
}

fn pattern(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(usize::try_from(SLOT_BYTES).expect("small") / 8)
}

/// A folder with an image, a server of it, and a client that writes.
struct World {
    dir: tempfile::TempDir,
    old: Process,
    writer: Writer,
}

const OPTIONS: [&str; 3] = ["--nbd", "socket", "disk.qcow2"];

impl World {
    fn new() -> Option<Self> {
        if !tools::present(&[tools::QEMU_IMG]) {
            return None;
        }
        let dir = tempfile::tempdir().expect("a folder");
        qemu::create(dir.path(), "base.qcow2", &[], "16M");
        qemu::overlay(dir.path(), "disk.qcow2", "base.qcow2", &[]);
        let old = Process::start(dir.path(), "old", &OPTIONS);
        let socket = dir.path().join("socket");
        old.wait_for(&socket);
        let writer = Writer::start(&socket);
        writer.wait();
        Some(Self { dir, old, writer })
    }

    fn start(&self, name: &str, options: &[&str]) -> Process {
        Process::start(self.dir.path(), name, &[&["--takeover"], options].concat())
    }

    /// The old one still serves: the client continues, and everything is there.
    #[track_caller]
    fn judge(self) {
        let Self { dir, old, writer } = self;
        writer.wait();
        writer.judge(&dir.path().join("socket"));
        old.stop();
        for name in ["socket", "control"] {
            assert!(!dir.path().join(name).exists(), "{name} stays");
        }
        qemu::img(dir.path(), ["check", "-q", "disk.qcow2"]).ok();
    }
}

#[test]
fn ten_takeovers_lose_nothing_that_was_acknowledged() {
    let Some(mut world) = World::new() else { return };
    let mut gaps = Vec::new();
    world.writer.take_longest();
    for round in 0..10 {
        let new = world.start(&format!("new{round}"), &OPTIONS);
        assert_eq!(world.old.ended(), Some(0), "{}\n{}", world.old.log(), new.log());
        world.old = new;
        world.writer.wait();
        gaps.push(world.writer.take_longest().as_millis());
    }
    println!("the client waited for {gaps:?} ms");
    world.judge();
}

#[test]
fn server_that_cannot_serve_leaves_the_other_serving() {
    let Some(world) = World::new() else { return };
    for (name, options, why) in [
        ("none", &["--nbd", "socket", "missing.qcow2"][..], "missing.qcow2"),
        ("format", &["--nbd", "socket", "--format", "cow", "disk.qcow2"], "cow"),
        ("nowhere", &["--nbd", "socket", "--nbd", "none/socket", "disk.qcow2"], "none/socket"),
        ("shared", &["--nbd", "socket", "--shared", "0", "disk.qcow2"], "shared 0"),
    ] {
        let mut new = world.start(name, options);
        assert_eq!(new.ended(), Some(1), "{name}: {}", new.log());
        assert!(new.log().contains(why), "{name}: {}", new.log());
        world.writer.wait();
    }
    world.old.wait_until_said("keeps serving");
    world.judge();
}

#[test]
fn server_that_is_killed_in_the_middle_leaves_the_other_serving() {
    let Some(world) = World::new() else { return };
    // It takes some seconds to open the image.
    let slow = [&["--inject", "delay=1s"][..], &OPTIONS].concat();
    for round in 0..3 {
        let mut new = world.start(&format!("new{round}"), &slow);
        let stands_still = || {
            let before = world.writer.shared.acknowledged.load(Ordering::Relaxed);
            clock::sleep(Duration::from_millis(200));
            (world.writer.shared.acknowledged.load(Ordering::Relaxed) == before).then_some(())
        };
        clock::poll(LIMIT, Duration::ZERO, stands_still).expect("the old one has closed");
        new.signal(Signal::KILL);
        assert_eq!(new.ended(), None, "killed: {}", new.log());
        world.writer.wait();
    }
    world.old.wait_until_said("keeps serving");
    world.judge();
}

#[test]
fn missing_server_to_take_over_from_is_reported() {
    let dir = tempfile::tempdir().expect("a folder");
    let options = ["--takeover", "--nbd", "socket", "--format", "null", "1M"];
    let mut new = Process::start(dir.path(), "new", &options);
    assert_eq!(new.ended(), Some(1));
    assert!(new.log().contains("leave --takeover out"), "{}", new.log());
    assert!(!dir.path().join("socket").exists());
}

#[test]
fn socket_no_longer_served_is_removed_and_a_new_one_is_added() {
    let dir = tempfile::tempdir().expect("a folder");
    let options = |socket| ["--nbd", "both", "--nbd", socket, "--format", "null", "1M"];
    let mut old = Process::start(dir.path(), "old", &options("first"));
    old.wait_for(&dir.path().join("first"));

    let more = [&["--takeover"][..], &options("second")].concat();
    let new = Process::start(dir.path(), "new", &more);
    assert_eq!(old.ended(), Some(0), "{}", old.log());
    new.wait_for(&dir.path().join("second"));
    new.wait_for(&dir.path().join("both"));
    let gone = || (!dir.path().join("first").exists()).then_some(());
    assert!(clock::poll(LIMIT, Duration::from_millis(5), gone).is_some(), "{}", new.log());
    new.stop();
    assert!(!dir.path().join("both").exists() && !dir.path().join("second").exists());
}
