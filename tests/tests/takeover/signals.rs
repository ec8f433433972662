//! Signals that come while a server opens its disks, whether it takes over from another one or not.

use super::faults::{SOON, holds_open, write};
use mica_tests::takeover::{LIMIT, Process};
use mica_tests::{clock, mica, qemu, tools};
use rustix::process::Signal;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// How long a server that was told to end may still open its disks.
const OPENING_LIMIT: Duration = Duration::from_secs(5);

/// A folder with the images disk.qcow2 and other.qcow2.
fn folder() -> Option<TempDir> {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return None;
    }
    let dir = tempfile::tempdir().expect("a folder");
    qemu::create(dir.path(), "disk.qcow2", &[], "64M");
    qemu::create(dir.path(), "other.qcow2", &[], "64M");
    Some(dir)
}

/// Writes the configuration: disks of these images at sockets, with these faults.
fn configure(dir: &Path, disks: &[(&str, &str, &str)]) {
    let table = |(image, socket, fault): &(&str, &str, &str)| {
        format!(
            "[[disk]]\nname = '{image}'\nimage = '{image}.qcow2'\nnbd = ['{socket}']\n\
             inject = [{fault}]\n"
        )
    };
    fs::write(dir.join("next.toml"), disks.iter().map(table).collect::<String>()).expect("made");
    fs::rename(dir.join("next.toml"), dir.join("m.toml")).expect("renamed");
}

/// A server without a terminal, which would make another thing of SIGHUP.
fn start(dir: &Path, name: &str, options: &[&str]) -> Process {
    let mut alone = Command::new("setsid");
    alone.arg(mica::binary());
    Process::start_command(alone, dir, name, &[&["--config", "m.toml"], options].concat())
}

#[track_caller]
fn wait_until_it_opens(process: &Process, image: &str) {
    let opens = || holds_open(process.pid(), image).then_some(());
    let opens = clock::poll(LIMIT, Duration::from_millis(5), opens);
    assert!(opens.is_some(), "it opens nothing: {}", process.log());
}

/// The story: a SIGHUP that came while a server took over was forgotten.
#[test]
fn signals_that_come_while_disks_are_opened_are_acted_on_later() {
    for takes_over in [false, true] {
        let Some(dir) = folder() else { return };
        let dir = dir.path();
        configure(dir, &[("disk", "socket", "")]);
        let old = takes_over.then(|| start(dir, "old", &[]));
        if let Some(old) = &old {
            old.wait_for(&dir.join("socket"));
            clock::poll(LIMIT, Duration::from_millis(5), || {
                dir.join("control").exists().then_some(())
            })
            .expect("it listens");
        }
        let slow = ("disk", "socket", "'delay=1s,op=read'");
        configure(dir, &[slow]);
        let options: &[&str] = if takes_over { &["--takeover"] } else { &[] };
        let new = start(dir, "new", options);
        wait_until_it_opens(&new, "/disk.qcow2");
        configure(dir, &[slow, ("other", "other", "")]);
        new.signal(Signal::USR1);
        new.signal(Signal::HUP);
        new.wait_for(&dir.join("socket"));
        new.wait_for(&dir.join("other"));
        new.stop();
        if let Some(mut old) = old {
            assert_eq!(old.ended(), Some(0), "{}", old.log());
        }
    }
}

/// The story: the disks that it had opened already, and served, were left as by a kill.
#[test]
fn server_that_is_told_to_end_while_one_disk_hangs_closes_the_others() {
    let Some(dir) = folder() else { return };
    let dir = dir.path();
    configure(dir, &[("disk", "socket", ""), ("other", "other", "'delay=60s'")]);
    let mut server = start(dir, "log", &[]);
    write(dir, 1 << 20, 9);
    wait_until_it_opens(&server, "/other.qcow2");
    server.signal(Signal::TERM);
    assert_eq!(server.ended_within(OPENING_LIMIT + SOON), Some(1), "{}", server.log());
    assert!(server.log().contains("not all disks were open"), "{}", server.log());
    assert!(!dir.join("socket").exists() && !dir.join("control").exists(), "{}", server.log());
    qemu::io(dir, &[], "disk.qcow2", &["read -P 9 1M 4k"]);
    qemu::img(dir, ["check", "-q", "disk.qcow2"]).ok();
}
