//! The system refuses new threads to a server that runs, as a limit of processes does. What the
//! kernel's rings and the server would have given to a thread is done all the same.

use mica_tests::guest::Guest;
use mica_tests::nbd::{Connection, Wish};
use mica_tests::server::Server;
use mica_tests::takeover::{self, Channel, Process, word};
use mica_tests::tasks::TaskGroup;
use mica_tests::{clock, mica, qemu, tools};
use std::fs;
use std::os::unix::fs::chown;
use std::process::Command;
use std::time::Duration;

const BLOCK: usize = 4096;
/// A user without privileges: of root the system counts no processes.
const USER: u32 = 61_234;

#[test]
fn server_that_gets_no_more_threads_serves_and_flushes() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        tools::skip("needs root, to become another user");
        return;
    }
    for cache in ["writeback", "none"] {
        let dir = tempfile::tempdir().expect("a folder");
        let (dir, user) = (dir.path(), Some(USER));
        qemu::create(dir, "disk.qcow2", &[], "8M");
        for path in [dir.to_owned(), dir.join("disk.qcow2")] {
            chown(path, user, user).expect("given away");
        }
        // The folder that it was built in may be root's alone.
        let program = dir.join("mica");
        fs::copy(mica::binary(), &program).expect("copied");
        let as_user = || {
            let user = USER.to_string();
            let mut command = Command::new("setpriv");
            command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]);
            command
        };
        let serve = |socket: &std::path::Path| {
            chown(socket.parent().expect("in a folder"), user, user).expect("given away");
            let mut serve = as_user();
            serve.arg(&program).args(["serve", "--cache", cache, "--redo-dir", "off", "--nbd"]);
            serve.arg(socket).arg(dir.join("disk.qcow2"));
            serve
        };
        let server = Server::start("", serve).expect("served");
        let pid = server.pid().to_string();
        let limited = as_user().args(["prlimit", "--pid", &pid, "--nproc=1"]).status();
        assert!(limited.expect("setpriv").success());
        let mut guest = Guest::connect(&server).expect("served");
        for place in 0..8 {
            assert_eq!(guest.write(place << 20, &[1; BLOCK]).expect("answered"), 0, "{cache}");
            assert_eq!(guest.flush().expect("answered"), 0, "{cache}");
        }
        // Not flushed: that is for the server to do when it ends.
        assert_eq!(guest.write(0, &[2; BLOCK]).expect("answered"), 0, "{cache}");
        let stopped = server.stop().expect("it stops");
        assert!(stopped.status.success(), "{cache}: {stopped:?}");
        qemu::io(dir, &["-r"], "disk.qcow2", &["read -P 2 0 4k", "read -P 1 7M 4k"]);
    }
}

#[test]
fn server_that_gets_no_more_threads_grows_a_disk_and_hands_over() {
    let Some(group) = TaskGroup::new() else {
        tools::skip("no control groups can be made here");
        return;
    };
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let mut config = String::new();
    // Threads of a device end with the disk, and are needed to serve it again.
    for name in ["disk", "other"] {
        mica::run(["create", "-q", &dir.join(name).display().to_string(), "8M"]).ok();
        config += &format!(
            "[[disk]]\nname = \"{name}\"\nimage = \"{name}\"\nredo-dir = \"off\"\n\
             nbd = [\"{name}.nbd\"]\nvhost-user = \"{name}.vm\"\n"
        );
    }
    fs::write(dir.join("mica.toml"), config).expect("written");
    let options = ["--config", "mica.toml"];
    let control = dir.join("control").display().to_string();
    let mut old = Process::start(dir, "old", &options);
    // The control socket is there a moment after those of the disks.
    let status = ["ctl", "--control", &control, "status"];
    let answered = || mica::run(status).status.success().then_some(());
    assert!(clock::poll(takeover::LIMIT, Duration::from_millis(5), answered).is_some());
    let limit = group.limit(old.pid(), 0).expect("limited");
    let grown = mica::run(["ctl", "--control", &control, "resize", "disk", "16M"]).ok();
    assert!(grown.contains("16777216 bytes now"), "{grown}");
    // The first one to take over goes away when the image is closed.
    let (channel, sockets) = Channel::take(dir).expect("it agrees");
    channel.say(&word("ready"), &[]).expect("heard");
    assert_eq!(channel.hear().expect("it closes the image"), "closed");
    drop((channel, sockets));
    for name in ["disk", "other"] {
        old.wait_until_said(&format!("disk \"{name}\" is served again by this process"));
    }
    let new = Process::start(dir, "new", &[&["--takeover"], &options[..]].concat());
    let ended = old.ended_within(takeover::LIMIT);
    assert_eq!(ended, Some(0), "old: {}\nnew: {}", old.log(), new.log());
    drop(limit);
    let socket = dir.join("disk.nbd");
    new.wait_for(&socket);
    assert_eq!(Connection::open(&socket, "", &Wish::default()).expect("served").len, 16 << 20);
    new.stop();
}
