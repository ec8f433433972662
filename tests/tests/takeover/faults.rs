//! Takeovers in which one of the two processes fails, dies, or is told to stop; and other requests
//! to a server meanwhile. The test often plays one of the two.

use mica_tests::guest::{Answer, Guest, Request};
use mica_tests::takeover::{Channel, LIMIT, Process, post, word};
use mica_tests::{clock, command, mica, nbd, qemu, tools};
use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;
use serde_json::json;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;
use tempfile::TempDir;

/// For what should happen at once. The machine may be busy.
pub(crate) const SOON: Duration = Duration::from_secs(8);
const OPTIONS: [&str; 3] = ["--nbd", "socket", "disk.qcow2"];
const TAKE_OVER: [&str; 4] = ["--takeover", "--nbd", "socket", "disk.qcow2"];

/// A folder with an image of 64 MiB.
fn folder() -> Option<TempDir> {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return None;
    }
    let dir = tempfile::tempdir().expect("a folder");
    qemu::create(dir.path(), "disk.qcow2", &[], "64M");
    Some(dir)
}

/// The image in `dir`, and a server of it that was started with `more` options.
fn served(more: &[&str]) -> Option<(TempDir, Process)> {
    let dir = folder()?;
    let server = Process::start(dir.path(), "old", &[more, &OPTIONS].concat());
    server.wait_for(&dir.path().join("socket"));
    Some((dir, server))
}

#[track_caller]
fn guest(dir: &Path) -> Guest {
    let socket = dir.join("socket");
    let wish = nbd::Wish::default();
    let greeted = || nbd::Connection::open(&socket, "", &wish).ok();
    Guest::on(clock::poll(LIMIT, Duration::from_millis(5), greeted).expect("served"))
}

/// A write that is acknowledged, and not flushed.
#[track_caller]
pub(crate) fn write(dir: &Path, offset: u64, byte: u8) {
    assert_eq!(guest(dir).write(offset, &[byte; 4096]).expect("answered"), 0);
}

#[track_caller]
fn assert_holds(dir: &Path, offset: u64, byte: u8) {
    let read = guest(dir).read(offset, 4096).expect("answered");
    assert_eq!(read, Answer::Done(vec![byte; 4096]), "at {offset}");
}

/// The state of its disk, as the server reports it.
fn state(dir: &Path) -> String {
    let status = ["ctl", "status", "--output", "json", "--control", "control"];
    let status = command::finish(Command::new(mica::binary()).args(status).current_dir(dir)).json();
    status["disks"][0]["state"].as_str().expect("a state").to_owned()
}

#[track_caller]
fn assert_sound(dir: &Path) {
    qemu::img(dir, ["check", "-q", "disk.qcow2"]).ok();
}

#[test]
fn disk_that_cannot_be_closed_is_not_served_and_reported_as_failed() {
    // The first write syncs once, the flush again, and then the end.
    for failing in ["from:2", "from:4"] {
        let fault = format!("error={failing},op=sync");
        let Some((dir, mut old)) = served(&["--inject", &fault]) else { return };
        let dir = dir.path();
        let mut client = guest(dir);
        assert_eq!(client.write(0, &[1; 4096]).expect("answered"), 0);
        let is_flushed = client.flush().expect("answered") == 0;
        assert_eq!(is_flushed, failing == "from:4");
        let written = client.write(1 << 20, &[2; 65536]).expect("answered");
        assert_eq!(written == 0, is_flushed, "nothing is acknowledged after a flush that failed");

        let mut new = Process::start(dir, "new", &TAKE_OVER);
        assert_eq!(new.ended(), Some(1), "{failing}: {}", new.log());
        assert!(new.log().contains("could not hand over"), "{failing}: {}", new.log());
        assert_eq!(state(dir), "failed", "{failing}: {}", old.log());
        // Its client is notified, and does not wait for what was lost.
        assert!(client.read(1 << 20, 4096).is_err(), "{failing}");
        assert!(UnixStream::connect(dir.join("socket")).is_err(), "{failing}: {}", old.log());
        old.signal(Signal::TERM);
        assert_eq!(old.ended_within(SOON), Some(1), "it was told: {failing}: {}", old.log());

        // The medium need not have lost what it could not make durable; what was flushed is there
        // in any case.
        let next = Process::start(dir, "next", &OPTIONS);
        next.wait_for(&dir.join("socket"));
        if is_flushed {
            assert_holds(dir, 0, 1);
            assert_holds(dir, 1 << 20, 2);
        }
        next.stop();
        // Refcounts of clusters that no table names are left, which is harmless.
        let code = qemu::img(dir, ["check", "-q", "disk.qcow2"]).code();
        assert!([Some(0), Some(3)].contains(&code), "{failing}: {code:?}");
    }
}

#[test]
fn other_disks_are_still_served_if_one_cannot_be_closed() {
    let Some(dir) = folder() else { return };
    let dir = dir.path();
    qemu::create(dir, "bad.qcow2", &[], "64M");
    let config = |fault: &str| {
        format!(
            "[[disk]]\nname = 'good'\nimage = 'disk.qcow2'\nnbd = ['socket']\n\
             [[disk]]\nname = 'bad'\nimage = 'bad.qcow2'\nnbd = ['bad']\n{fault}\n"
        )
    };
    std::fs::write(dir.join("m.toml"), config("inject = ['error=from:2,op=sync']")).expect("made");
    let mut old = Process::start(dir, "old", &["--config", "m.toml"]);
    old.wait_for(&dir.join("bad"));
    let bad = nbd::Connection::open(&dir.join("bad"), "", &nbd::Wish::default()).expect("served");
    let mut bad = Guest::on(bad);
    assert_eq!(bad.write(0, &[7; 65536]).expect("answered"), 0);
    write(dir, 0, 1);

    std::fs::write(dir.join("m.toml"), config("")).expect("made");
    let mut new = Process::start(dir, "new", &["--takeover", "--config", "m.toml"]);
    assert_eq!(new.ended(), Some(1), "{}", new.log());
    assert_holds(dir, 0, 1);
    assert!(UnixStream::connect(dir.join("bad")).is_err());
    old.signal(Signal::TERM);
    assert_eq!(old.ended_within(SOON), Some(1), "{}", old.log());
}

/// The story: its clients were left waiting for a disk that nobody would serve.
#[test]
fn disk_that_cannot_be_opened_again_is_not_waited_for() {
    let Some((dir, mut old)) = served(&[]) else { return };
    let dir = dir.path();
    write(dir, 0, 2);
    let (channel, sockets) = Channel::take(dir).expect("it agrees");
    channel.say(&word("ready"), &[]).expect("heard");
    assert_eq!(channel.hear().expect("it closes"), "closed");
    std::fs::rename(dir.join("disk.qcow2"), dir.join("elsewhere.qcow2")).expect("renamed");
    let waiting = UnixStream::connect(dir.join("socket")).expect("it waits");
    drop((channel, sockets));
    old.wait_until_said("is no longer served");
    assert_eq!(std::io::Read::read(&mut &waiting, &mut [0]).ok().filter(|count| *count > 0), None);
    assert!(!dir.join("socket").exists(), "{}", old.log());
    assert_eq!(state(dir), "failed", "{}", old.log());

    old.signal(Signal::TERM);
    assert_eq!(old.ended_within(SOON), Some(0), "nothing was lost: {}", old.log());
    std::fs::rename(dir.join("elsewhere.qcow2"), dir.join("disk.qcow2")).expect("renamed");
    assert_sound(dir);
}

#[test]
fn old_process_that_is_killed_leaves_all_to_the_new_one() {
    // Before and after the new one was notified that everything is closed.
    for delay in ["delay=3s,op=sync", "delay=0ms"] {
        let Some((dir, mut old)) = served(&["--inject", delay]) else { return };
        let dir = dir.path();
        write(dir, 1 << 20, 3);
        let slow = [&["--inject", "delay=300ms"], &TAKE_OVER[..]].concat();
        let new = Process::start(dir, "new", &slow);
        let stands_still = || (state(dir) != "serving").then_some(());
        clock::poll(LIMIT, Duration::from_millis(5), stands_still).expect("it closes");
        old.signal(Signal::KILL);
        assert_eq!(old.ended(), None);

        assert_holds(dir, 1 << 20, 3);
        write(dir, 2 << 20, 4);
        new.stop();
        assert!(!dir.join("socket").exists() && !dir.join("control").exists(), "{delay}");
        assert_sound(dir);
    }
}

#[test]
fn image_that_a_dead_process_still_holds_is_waited_for() {
    let Some((dir, mut old)) = served(&["--read-only", "--inject", "delay=4s"]) else { return };
    let dir = dir.path();
    // Something that holds the image for a while, as the rings of a dead process do.
    let mut holder = Command::new("qemu-io");
    holder.args(["-r", "-c", "sleep 2500", "disk.qcow2"]).current_dir(dir);
    let mut holder = holder.spawn().expect("started");
    // It has to be answered before the image is closed, and is not before the process is killed.
    let mut client = guest(dir);
    client.send(&Request::Read { offset: 0, len: 4096 }).expect("sent");
    // Files left by a killed process, and files that are not ours.
    for name in ["mica-takeover-999999999-0", "mica-takeover-1-0"] {
        std::fs::create_dir(dir.join(name)).expect("made");
        File::create(dir.join(name).join("socket")).expect("made");
    }
    let new = Process::start(dir, "new", &TAKE_OVER);
    clock::poll(LIMIT, Duration::from_millis(5), || (state(dir) != "serving").then_some(()))
        .expect("it closes");
    old.signal(Signal::KILL);
    assert_eq!(old.ended(), None);
    write(dir, 0, 1);
    assert!(holder.wait().expect("ended").success());
    new.stop();
    assert!(!dir.join("mica-takeover-999999999-0").exists());
    assert!(dir.join("mica-takeover-1-0/socket").exists(), "that process lives");
}

#[test]
fn many_disks_are_opened_concurrently_after_a_takeover_that_failed() {
    const DISKS: usize = 12;
    let Some(dir) = folder() else { return };
    let dir = dir.path();
    let mut config = String::new();
    for index in 0..DISKS {
        qemu::create(dir, &format!("{index}.qcow2"), &[], "64M");
        config += &format!(
            "[[disk]]\nname = 'd{index}'\nimage = '{index}.qcow2'\nnbd = ['n{index}']\n\
             inject = ['delay=300ms']\nindex = 'off'\n"
        );
    }
    std::fs::write(dir.join("m.toml"), config).expect("written");
    let start = clock::now();
    let old = Process::start(dir, "old", &["--config", "m.toml"]);
    old.wait_for(&dir.join(format!("n{}", DISKS - 1)));
    let one_after_the_other = start.elapsed();
    clock::poll(LIMIT, Duration::from_millis(5), || dir.join("control").exists().then_some(()))
        .expect("it listens");

    let (channel, sockets) = Channel::take(dir).expect("it agrees");
    channel.say(&word("ready"), &[]).expect("heard");
    assert_eq!(channel.hear().expect("it closes"), "closed");
    let start = clock::now();
    drop((channel, sockets));
    old.wait_until_said("keeps serving");
    let side_by_side = start.elapsed();
    println!("{DISKS} disks: at first {one_after_the_other:?}, again {side_by_side:?}");
    // It waits for storage only, and for a twelfth of the time that one after the other would take.
    assert!(side_by_side < one_after_the_other * 2 / 3);
    assert_eq!(old.log().matches("is served again").count(), DISKS, "{}", old.log());
    old.stop();
}

#[test]
fn new_process_that_is_told_to_stop_ends_soon_and_the_old_one_still_serves() {
    let Some((dir, old)) = served(&["--inject", "delay=2s,op=sync"]) else { return };
    let dir = dir.path();
    for round in 0..2 {
        write(dir, 1 << 20, 5 + round);
        let mut new = Process::start(dir, &format!("new{round}"), &TAKE_OVER);
        let is_closing = || (state(dir) != "serving").then_some(());
        clock::poll(LIMIT, Duration::from_millis(5), is_closing).expect("it closes");
        new.signal(if round == 0 { Signal::TERM } else { Signal::INT });
        // It does not wait for the old one's syncs.
        let start = clock::now();
        assert_eq!(new.ended_within(SOON), Some(1), "{}", new.log());
        assert!(new.log().contains("told to stop"), "{}", new.log());
        println!("it ended {:?} after the signal", start.elapsed());
        assert_holds(dir, 1 << 20, 5 + round);
    }
    old.wait_until_said("keeps serving");
    old.stop();
    assert_sound(dir);
}

#[test]
fn old_process_that_is_told_to_stop_before_it_has_closed_ends_the_takeover() {
    let Some((dir, mut old)) = served(&[]) else { return };
    let dir = dir.path();
    write(dir, 0, 6);
    // A new one that is never ready.
    let (channel, sockets) = Channel::take(dir).expect("it agrees");
    assert_eq!(sockets.len(), 2, "the disk's, and the control socket");
    old.signal(Signal::TERM);
    assert_eq!(channel.hear().expect("it is told"), "failed");
    assert_eq!(old.ended_within(SOON), Some(0), "{}", old.log());
    assert!(!dir.join("socket").exists() && !dir.join("control").exists());
    assert_sound(dir);
}

#[test]
fn old_process_that_is_told_to_stop_after_it_has_closed_leaves_all_to_the_new_one() {
    let Some((dir, mut old)) = served(&[]) else { return };
    let dir = dir.path();
    write(dir, 0, 7);
    let (channel, _sockets) = Channel::take(dir).expect("it agrees");
    channel.say(&word("ready"), &[]).expect("heard");
    assert_eq!(channel.hear().expect("it closes"), "closed");
    old.signal(Signal::TERM);
    assert_eq!(channel.hear().expect("it is told"), "ending");
    assert_eq!(old.ended_within(SOON), Some(0), "{}", old.log());
    assert!(dir.join("socket").exists() && dir.join("control").exists(), "they are the new one's");
    assert_sound(dir);

    // The same with a real new process, which is slow.
    let old_options = OPTIONS;
    for name in ["socket", "control"] {
        std::fs::remove_file(dir.join(name)).expect("there");
    }
    let mut old = Process::start(dir, "second", &old_options);
    old.wait_for(&dir.join("socket"));
    let slow = [&["--inject", "delay=500ms"], &TAKE_OVER[..]].concat();
    let new = Process::start(dir, "new", &slow);
    clock::poll(LIMIT, Duration::from_millis(5), || (state(dir) == "drained").then_some(()))
        .expect("it closes");
    old.signal(Signal::TERM);
    assert_eq!(old.ended_within(SOON), Some(0), "{}", old.log());
    assert_holds(dir, 0, 7);
    new.stop();
    assert!(!dir.join("socket").exists() && !dir.join("control").exists());
}

#[test]
fn new_process_that_vanishes_while_the_old_one_is_told_to_stop_leaves_nothing() {
    let Some((dir, mut old)) = served(&[]) else { return };
    let dir = dir.path();
    write(dir, 0, 8);
    let (channel, sockets) = Channel::take(dir).expect("it agrees");
    channel.say(&word("ready"), &[]).expect("heard");
    assert_eq!(channel.hear().expect("it closes"), "closed");
    drop((channel, sockets));
    old.signal(Signal::TERM);
    assert_eq!(old.ended_within(SOON), Some(0), "{}", old.log());
    assert!(!dir.join("socket").exists() && !dir.join("control").exists(), "{}", old.log());
    assert_sound(dir);
}

#[test]
fn drains_are_refused_while_another_process_takes_over_and_done_after_it() {
    let Some((dir, mut old)) = served(&[]) else { return };
    let dir = dir.path();
    let control = dir.join("control");
    write(dir, 0, 9);
    let (channel, sockets) = Channel::take(dir).expect("it agrees");
    for closed in [false, true] {
        if closed {
            channel.say(&word("ready"), &[]).expect("heard");
            assert_eq!(channel.hear().expect("it closes"), "closed");
        }
        for path in ["/v1/drain", "/v1/disks/disk/drain", "/v1/takeover"] {
            let body = if path == "/v1/takeover" { "{\"socket\":\"/nowhere\"}" } else { "" };
            let (status, said) = post(&control, path, body).expect("answered");
            assert!([404, 409].contains(&status), "{path}: {status}: {said}");
        }
    }
    drop((channel, sockets));
    // The takeover has failed, and the disk is served again.
    assert_holds(dir, 0, 9);
    old.wait_until_said("keeps serving");
    let (status, said) = post(&control, "/v1/drain", "").expect("answered");
    assert_eq!(status, 200, "{said}");
    assert_eq!(old.ended_within(SOON), Some(0), "{}", old.log());
    assert_sound(dir);
}

#[test]
fn drain_completes_although_its_client_has_disconnected() {
    let Some((dir, mut old)) = served(&["--inject", "delay=400ms,op=sync"]) else { return };
    let dir = dir.path();
    write(dir, 1 << 20, 10);
    let mut http = UnixStream::connect(dir.join("control")).expect("it listens");
    http.write_all(b"POST /v1/drain HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        .expect("sent");
    clock::poll(LIMIT, Duration::from_millis(1), || (state(dir) != "serving").then_some(()))
        .expect("it drains");
    drop(http);
    assert_eq!(old.ended(), Some(0), "{}", old.log());
    assert!(!dir.join("socket").exists() && !dir.join("control").exists());
    assert_sound(dir);
    qemu::io(dir, &[], "disk.qcow2", &["read -P 10 1M 4k"]);
}

/// An old process's side of a takeover, until the new one is ready: it hands over `control`.
#[track_caller]
fn give_control(control: &UnixListener) -> Channel {
    // The previous process may have changed the mode of the socket that it was given.
    control.set_nonblocking(false).expect("set");
    let channel = Channel::give(control).expect("it asks");
    let told = json!([{ "name": "mica.control", "is_of_unit": false }]);
    let sockets = json!({ "say": "sockets", "sockets": told, "more": false });
    channel.say(&sockets, &[control.as_fd()]).expect("heard");
    assert_eq!(channel.hear().expect("it is"), "ready");
    channel
}

#[test]
fn new_process_does_not_serve_without_consent_of_the_old_one() {
    let Some(dir) = folder() else { return };
    let dir = dir.path();
    let control = UnixListener::bind(dir.join("control")).expect("bound");
    for answer in ["failed", "serving", "nothing"] {
        let mut new = Process::start(dir, answer, &TAKE_OVER);
        let channel = give_control(&control);
        let said = json!({ "say": answer, "why": "a test" });
        // The last says nothing, and is still alive.
        let _ = if answer == "nothing" { Ok(()) } else { channel.say(&said, &[]) };
        drop(channel);
        assert_eq!(new.ended(), Some(1), "{answer}: {}", new.log());
        assert!(!dir.join("socket").exists(), "{answer}");
    }
}

#[test]
fn new_process_that_opens_a_hanging_image_hears_the_old_one_and_signals() {
    let Some(dir) = folder() else { return };
    let dir = dir.path();
    let control = UnixListener::bind(dir.join("control")).expect("bound");
    let hanging = [&TAKE_OVER[..], &["--inject", "delay=60s"]].concat();
    for answer in ["given-up", "nothing"] {
        let mut new = Process::start(dir, answer, &hanging);
        let channel = give_control(&control);
        channel.say(&word("closed"), &[]).expect("heard");
        let opens = || holds_open(new.pid(), "/disk.qcow2").then_some(());
        clock::poll(LIMIT, Duration::from_millis(5), opens).expect("it opens it");
        match answer {
            "nothing" => new.signal(Signal::TERM),
            answer => channel.say(&word(answer), &[]).expect("heard"),
        }
        assert_eq!(new.ended_within(SOON), Some(1), "{answer}: {}", new.log());
        assert!(!dir.join("socket").exists(), "{answer}");
    }
}

/// The old process comes back, and knows nothing of what the new one may have done meanwhile. An
/// image of version 2 names no log in which it would find that.
#[test]
fn new_process_that_is_killed_before_it_serves_all_disks_has_answered_nobody() {
    const WRITES: u64 = 64;
    let Some(dir) = folder() else { return };
    let dir = dir.path();
    qemu::create(dir, "disk.qcow2", &["-o", "compat=0.10"], "64M");
    qemu::create(dir, "slow.qcow2", &[], "64M");
    let config = |fault: &str| {
        let config = format!(
            "[[disk]]\nname = 'good'\nimage = 'disk.qcow2'\nnbd = ['socket']\n\
             [[disk]]\nname = 'slow'\nimage = 'slow.qcow2'\nnbd = ['slow']\n{fault}\n"
        );
        std::fs::write(dir.join("m.toml"), config).expect("written");
    };
    config("");
    let old = Process::start(dir, "old", &["--config", "m.toml"]);
    old.wait_for(&dir.join("slow"));
    clock::poll(LIMIT, Duration::from_millis(5), || dir.join("control").exists().then_some(()))
        .expect("it listens");
    // Not served by the new process before it is killed.
    config("inject = ['delay=20s']");
    let mut new = Process::start(dir, "new", &["--takeover", "--config", "m.toml"]);
    let holds = || holds_open(new.pid(), "/disk.qcow2").then_some(());
    clock::poll(LIMIT, Duration::from_millis(5), holds).expect("it opens it");

    let (sender, answers) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for index in 0..WRITES {
                write(dir, index << 16, 1);
                // Who has heard enough is no longer there.
                let _ = sender.send(());
            }
        });
        let early = answers.recv_timeout(Duration::from_secs(1));
        new.signal(Signal::KILL);
        assert_eq!(new.ended(), None);
        assert!(early.is_err(), "answered by a process that does not serve: {}", new.log());
    });
    assert_eq!(guest(dir).flush().expect("answered"), 0);
    (0..WRITES).for_each(|index| assert_holds(dir, index << 16, 1));
    old.stop();
    assert_sound(dir);
}

/// Whether a process has a file open whose path ends with `name`. One that it only names counts for
/// nothing: the sandbox does so with each image, long before it is opened.
pub(crate) fn holds_open(process: u32, name: &str) -> bool {
    /// As `fdinfo` shows the flags.
    const O_PATH: u32 = 0o10_000_000;
    let Ok(files) = std::fs::read_dir(format!("/proc/{process}/fd")) else { return false };
    files.flatten().any(|file| {
        let is_it = std::fs::read_link(file.path())
            .is_ok_and(|path| path.to_string_lossy().ends_with(name));
        let number = file.file_name();
        let info = format!("/proc/{process}/fdinfo/{}", number.to_string_lossy());
        let info = std::fs::read_to_string(info).unwrap_or_default();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
        is_it && flags.is_some_and(|flags| flags & O_PATH == 0)
    })
}

#[test]
fn folder_locked_by_a_stranger_is_reported_and_delays_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let lock = File::open(dir.path()).expect("there");
    flock(&lock, FlockOperation::LockExclusive).expect("locked");
    let options = ["--nbd", "socket", "--format", "null", "1M"];
    let mut server = Process::start(dir.path(), "locked", &options);
    let start = clock::now();
    assert_eq!(server.ended_within(Duration::from_secs(20)), Some(1), "{}", server.log());
    println!("it gave up after {:?}", start.elapsed());
    assert!(server.log().contains("locked by another program"), "{}", server.log());
    assert!(!dir.path().join("socket").exists());

    // If it is unlocked in time, mica waits for it.
    let server = Process::start(dir.path(), "waiting", &options);
    clock::sleep(Duration::from_millis(500));
    drop(lock);
    server.wait_for(&dir.path().join("socket"));
    server.stop();
}
