//! Snapshots of several disks at one instant.

use crate::world::{Model, TOOLS, guest_at};
use mica_tests::command::Finished;
use mica_tests::flag::RaisedAtEnd;
use mica_tests::guest::{Answer, Guest, Request};
use mica_tests::server::Server;
use mica_tests::{mica, qemu, tools};
use serde_json::Value;
use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;

const BLOCK: usize = 4096;

/// Two disks of one server.
struct Pair {
    dir: TempDir,
    server: Server,
}

impl Pair {
    fn new() -> Option<Self> {
        if !tools::present(TOOLS) {
            return None;
        }
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path();
        for name in ["a.qcow2", "b.qcow2"] {
            qemu::create(folder, name, &[], "8M");
        }
        let server = Server::start("", |socket| {
            let config = format!(
                "control = \"control\"\nqueues = 2\n\
                 [[disk]]\nname = \"a\"\nimage = \"a.qcow2\"\nnbd = [\"{}\"]\n\
                 [[disk]]\nname = \"b\"\nimage = \"b.qcow2\"\nnbd = [\"b.nbd\"]\n",
                socket.display()
            );
            fs::write(folder.join("mica.toml"), config).expect("written");
            let mut serve = Command::new(mica::binary());
            serve.arg("serve").arg("--config").arg(folder.join("mica.toml"));
            serve
        });
        let pair = Self { server: server.expect("served"), dir };
        pair.ctl(&["status"]).ok();
        Some(pair)
    }

    fn ctl(&self, verb: &[&str]) -> Finished {
        let control = self.dir.path().join("control").display().to_string();
        let words = ["ctl"].into_iter().chain(verb.iter().copied());
        mica::run(words.chain(["--control", &control]))
    }

    /// A group whose layers have these names.
    fn group(&self, a: &str, b: &str) -> Finished {
        let of =
            |disk: &str, file: &str| format!("{disk}={}", self.dir.path().join(file).display());
        self.ctl(&["snapshot", "--output", "json", "--group", &of("a", a), &of("b", b)])
    }

    /// The number at the start of an image.
    fn number(&self, image: &str) -> u64 {
        qemu::flatten(self.dir.path(), image, "content.raw");
        let content = fs::read(self.dir.path().join("content.raw")).expect("read");
        u64::from_le_bytes(content[..8].try_into().expect("eight bytes"))
    }
}

#[test]
fn snapshots_of_a_group_are_of_one_instant() {
    const GROUPS: usize = 20;
    let Some(pair) = Pair::new() else { return };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut a = Guest::connect(&pair.server).expect("served");
        let mut b = guest_at(&pair.dir.path().join("b.nbd"));
        let is_over = &is_over;
        // First a, then b: b never has what a does not have yet.
        let work = scope.spawn(move || {
            let mut number = 0_u64;
            while !is_over.load(Ordering::Relaxed) {
                number += 1;
                for guest in [&mut a, &mut b] {
                    let mut bytes = vec![0; BLOCK];
                    bytes[..8].copy_from_slice(&number.to_le_bytes());
                    guest.send(&Request::Write { offset: 0, bytes, fua: false }).expect("sent");
                    let (_, answer) = guest.receive().expect("served");
                    assert_eq!(answer, Answer::Done(Vec::new()));
                }
            }
        });
        let over = RaisedAtEnd(is_over);
        for number in 0..GROUPS {
            let taken = pair.group(&format!("a-{number}"), &format!("b-{number}")).json();
            let disks: Vec<_> =
                taken.as_array().expect("two").iter().map(|one| &one["disk"]).collect();
            assert_eq!(disks, [&Value::from("a"), &"b".into()]);
        }
        drop(over);
        work.join().expect("it works");
    });
    let dir = pair.dir.path().to_owned();
    let Pair { dir: kept, server } = pair;
    assert!(server.stop().expect("it stops").status.success());
    let pair = |image: &str| {
        qemu::img(&dir, ["check", "-f", "qcow2", image]).ok();
        qemu::flatten(&dir, image, "content.raw");
        let content = fs::read(dir.join("content.raw")).expect("read");
        u64::from_le_bytes(content[..8].try_into().expect("eight bytes"))
    };
    for number in 0..GROUPS - 1 {
        let (a, b) = (pair(&format!("a-{number}")), pair(&format!("b-{number}")));
        assert!(a == b || a == b + 1, "group {number}: a has {a}, b has {b}");
    }
    drop(kept);
}

#[test]
fn if_one_of_a_group_fails_no_disk_gets_a_layer() {
    let Some(pair) = Pair::new() else { return };
    let folder = pair.dir.path();
    fs::write(folder.join("taken"), b"something").expect("written");
    let said = pair.group("a-1.qcow2", "taken").refusal();
    assert!(said.contains("exists") && said.contains("\"b\""), "{said}");
    assert!(!folder.join("a-1.qcow2").exists() && !folder.join("a.qcow2.mica-above").exists());
    // One that turns out to be unusable only when all are held is as much of a failure.
    qemu::create(folder, "stranger.qcow2", &[], "8M");
    let path = |file: &str| folder.join(file).display().to_string();
    let [a, b] = [format!("a={}", path("a-1.qcow2")), format!("b={}", path("stranger.qcow2"))];
    let said = pair.ctl(&["snapshot", "--reuse", "--group", &a, &b]).refusal();
    assert!(said.contains("overlay"), "{said}");
    assert!(!folder.join("a-1.qcow2").exists() && !folder.join("a.qcow2.mica-above").exists());
    let said = pair.group("same.qcow2", "./same.qcow2").refusal();
    assert!(said.contains("named for two disks") && !folder.join("same.qcow2").exists(), "{said}");
    pair.ctl(&["snapshot", "--group", "a=x", "a=y"]).refusal();
    pair.ctl(&["snapshot", "--group", "a"]).refusal();
    let status = pair.ctl(&["status", "--output", "json"]).json();
    assert_eq!(status["disks"][0]["layers"], 1, "{status}");
    // The disks go on, and so do their groups.
    let mut guest = Guest::connect(&pair.server).expect("served");
    Model::new(3).work(&mut guest).expect("served");
    pair.group("a-1.qcow2", "b-1.qcow2").ok();
    assert_eq!(pair.number("b.qcow2"), 0);
}
