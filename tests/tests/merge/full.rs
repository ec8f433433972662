//! Merges and copies where the file system is full: what is there stays as it was, and the same
//! command gets to its end once there is room.

use crate::chain::{Chain, KINDS};
use crate::live::{ctl, serve, stop};
use mica_tests::mounts::Mount;
use mica_tests::{judge, qemu, tools};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

const TOOLS: &[tools::Tool] = &[tools::QEMU_IMG, tools::QEMU_IO];
/// The room of the file system.
const MIB: u64 = 160;
/// How much of it is left, in bytes.
const LEFT: [u64; 4] = [0, 4 << 10, 100 << 10, 700 << 10];

fn small(dir: &Path) -> Option<Mount> {
    let small = Mount::memory(&dir.join("small"), MIB).ok();
    if small.is_none() {
        tools::skip("mounting a tmpfs is not allowed here");
    }
    small
}

/// Takes all the room but so many bytes, until it is dropped.
struct Filler(PathBuf);

impl Filler {
    fn new(small: &Mount, left: u64) -> Self {
        let path = small.folder().join("filler");
        let mut file = fs::File::create(&path).expect("made");
        let mut len = 0;
        while let Ok(more @ 1..) = file.write(&[1; 64 << 10]) {
            len += more as u64;
        }
        file.set_len(len - left).expect("shorter");
        Self(path)
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn merge_of_a_served_disk_without_room_changes_nothing_and_goes_on_when_there_is() {
    if !tools::present(TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let Some(small) = small(dir.path()) else { return };
    let merges: [&[&str]; 3] = [
        &["stream", "top"],
        &["commit", "top"],
        &["commit", "top", "--base", "one.qcow2", "--top", "three.qcow2"],
    ];
    for merge in merges {
        for (number, left) in LEFT.into_iter().enumerate() {
            let chain = Chain::new_in(small.folder(), KINDS[1]);
            let mut server = serve(&chain);
            let filler = Filler::new(&small, left);
            let said = ctl(&chain, merge).refusal();
            assert!(said.contains("space"), "{merge:?} {left}: {said}");
            let read = |server: &mica_tests::server::Server| {
                let mut client = server.connect(&Default::default()).expect("served");
                let bytes = client.read_all().expect("read");
                judge::same_bytes(&format!("{merge:?} {left}"), &bytes, &chain.expected());
            };
            read(&server);
            if number % 2 == 1 {
                // It dies, and the next one is started while there is no room either.
                drop(server);
                server = serve(&chain);
                read(&server);
            }
            drop(filler);
            ctl(&chain, merge).ok();
            read(&server);
            stop(server);
            chain.judge(&chain.expected());
        }
    }
    small.unmount();
}

#[test]
fn verb_without_room_leaves_what_is_there_and_goes_on_when_there_is() {
    if !tools::present(TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let Some(small) = small(dir.path()) else { return };
    let verbs: [&[&str]; 6] = [
        &["commit", "top.qcow2"],
        &["commit", "-b", "one.qcow2", "top.qcow2"],
        &["rebase", "-b", "", "top.qcow2"],
        &["convert", "--force", "top.qcow2", "old"],
        &["restore", "--force", "states@one", "old"],
        &["backup", "-q", "top.qcow2", "more", "--as", "two"],
    ];
    for verb in verbs {
        for left in LEFT {
            let chain = Chain::new_in(small.folder(), KINDS[1]);
            chain.mica(&["backup", "-q", "top.qcow2", "states", "--as", "one"]).ok();
            fs::write(chain.path("old"), "old").expect("written");
            let filler = Filler::new(&small, left);
            let said = chain.mica(verb).refusal();
            assert!(said.contains("space"), "{verb:?} {left}: {said}");
            assert_eq!(fs::read(chain.path("old")).expect("there"), b"old", "{verb:?} {left}");
            assert!(!chain.path(".old.mica-unfinished").exists(), "{verb:?} {left}");
            drop(filler);
            chain.judge(&chain.expected());
            chain.mica(verb).ok();
            chain.judge(&chain.expected());
            match verb[0] {
                "backup" => {
                    chain.mica(&["backup", "verify", "more"]).ok();
                    chain.mica(&["restore", "--force", "more", "old"]).ok();
                }
                "convert" | "restore" => {}
                _ => continue,
            }
            qemu::flatten(chain.dir(), "old", "now.raw");
            let now = fs::read(chain.path("now.raw")).expect("flat");
            judge::same_bytes(&format!("{verb:?} {left}"), &now, &chain.expected());
        }
    }
    small.unmount();
}
