//! The bytes of an image, to damage and to inspect.

use mica_tests::server::{Server, Stopped};
use mica_tests::{qemu, tools};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Where the incompatible features are in the header.
const INCOMPATIBLE_AT: u64 = 72;
pub(super) const DIRTY: u64 = 1;
pub(super) const CORRUPT: u64 = 2;
pub(super) const COPIED: u64 = 1 << 63;
pub(super) const CLUSTER: u64 = 64 << 10;

/// Whether QEMU's programs are there.
pub(super) fn tools_present() -> bool {
    tools::present(&[tools::QEMU_IMG, tools::QEMU_IO])
}

/// Makes `disk.qcow2` of 16 MiB in `dir`, whose first 2 MiB hold 0x11.
pub(super) fn make(dir: &Path, options: &str) {
    qemu::create(dir, "disk.qcow2", &["-o", options], "16M");
    qemu::io(dir, &[], "disk.qcow2", &["write -P 17 0 2M"]);
}

/// Serves `disk.qcow2` in `dir`, to be written.
#[track_caller]
pub(super) fn serve(dir: &Path, more: &[&str]) -> Server {
    Server::mica_writable(&dir.join("disk.qcow2"), "qcow2", more).expect("served")
}

/// Stops `server`, which must not have been ended by a signal or a panic.
#[track_caller]
pub(super) fn stop_alive(server: Server) -> Stopped {
    let stopped = server.stop().expect("it stops");
    assert!(stopped.status.code().is_some(), "{stopped:?}");
    assert!(!stopped.log.contains("panicked"), "{stopped:?}");
    stopped
}

/// QEMU finds nothing, or unused clusters.
#[track_caller]
pub(super) fn sound_but_for_leaks(dir: &Path) {
    let said = qemu::img(dir, ["check", "-f", "qcow2", "disk.qcow2"]);
    assert!(matches!(said.code(), Some(0 | 3)), "{said}");
}

/// QEMU finds nothing.
#[track_caller]
pub(super) fn sound(dir: &Path) {
    let said = qemu::img(dir, ["check", "-f", "qcow2", "disk.qcow2"]);
    assert_eq!(said.code(), Some(0), "{said}");
}

/// An image file, in big-endian words.
pub(super) struct Image(File);

impl Image {
    pub(super) fn open(dir: &Path) -> Self {
        let path = dir.join("disk.qcow2");
        Self(OpenOptions::new().read(true).write(true).open(path).expect("there"))
    }

    pub(super) fn word(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, at).expect("in the file");
        u64::from_be_bytes(bytes)
    }

    pub(super) fn put(&self, at: u64, word: u64) {
        self.0.write_all_at(&word.to_be_bytes(), at).expect("written");
    }

    pub(super) fn cluster(&self, at: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(CLUSTER).expect("small")];
        // The last cluster may be shorter.
        let _ = self.0.read_at(&mut bytes, at).expect("read");
        bytes
    }

    pub(super) fn set_len(&self, len: u64) {
        self.0.set_len(len).expect("cut");
    }

    pub(super) fn l1(&self) -> u64 {
        self.word(40)
    }

    pub(super) fn l2(&self) -> u64 {
        self.word(self.l1()) & 0x00ff_ffff_ffff_fe00
    }

    pub(super) fn refcount_table(&self) -> u64 {
        self.word(48)
    }

    pub(super) fn incompatible(&self) -> u64 {
        self.word(INCOMPATIBLE_AT)
    }

    pub(super) fn set_incompatible(&self, bits: u64) {
        self.put(INCOMPATIBLE_AT, self.incompatible() | bits);
    }
}
