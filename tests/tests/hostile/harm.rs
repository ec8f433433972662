//! Makes images, breaks them byte by byte, and runs every verb on them.

use mica_tests::command::{self, Finished};
use mica_tests::server::Server;
use mica_tests::{mica, nbd, qemu, tools};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// How long a verb may take on a small image, however broken.
const LIMIT: Duration = Duration::from_secs(60);
/// Address space that a verb may take for one, in bytes.
const MEMORY: u64 = 2 << 30;
/// Memory that a server may use for one.
const SERVER_BYTES_MAX: u64 = 128 << 20;

/// Bits of an entry that are an address.
pub(crate) const ADDRESS: u64 = 0x00ff_ffff_ffff_fe00;

/// An image that is about to be broken.
pub(crate) struct Victim {
    dir: TempDir,
}

impl Victim {
    /// An image of 8 MiB with data, zeros, a compressed cluster and an internal snapshot, created
    /// with `options`; `None` if QEMU is missing.
    pub(crate) fn new(options: &str) -> Option<Self> {
        if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
            return None;
        }
        let victim = Self { dir: tempfile::tempdir().expect("a folder") };
        let dir = victim.dir();
        qemu::create(dir, "disk.qcow2", &["-o", options], "8M");
        qemu::io(dir, &[], "disk.qcow2", &["write -P 1 0 1M", "write -P 2 2M 64k"]);
        if !options.contains("data_file") {
            qemu::io(dir, &[], "disk.qcow2", &["write -c -P 3 4M 64k"]);
            qemu::img(dir, ["snapshot", "-c", "one", "disk.qcow2"]).ok();
            qemu::io(dir, &[], "disk.qcow2", &["write -P 4 64k 128k"]);
        }
        Some(victim)
    }

    /// Its folder.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Its file.
    pub(crate) fn path(&self) -> PathBuf {
        self.dir().join("disk.qcow2")
    }

    /// The big-endian number at `offset` of the file.
    pub(crate) fn number(&self, offset: u64) -> u64 {
        let file = fs::File::open(self.path()).expect("there");
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, offset).expect("in the file");
        u64::from_be_bytes(bytes)
    }

    /// Puts `bytes` at `offset` of the file.
    pub(crate) fn patch(&self, offset: u64, bytes: impl AsRef<[u8]>) -> &Self {
        let file = OpenOptions::new().write(true).open(self.path()).expect("there");
        file.write_all_at(bytes.as_ref(), offset).expect("written");
        self
    }

    /// Makes the file `len` bytes long.
    pub(crate) fn set_len(&self, len: u64) {
        let file = OpenOptions::new().write(true).open(self.path()).expect("there");
        file.set_len(len).expect("set");
    }

    /// Where the active L1 table is.
    pub(crate) fn l1(&self) -> u64 {
        self.number(40)
    }

    /// Where the first L2 table is.
    pub(crate) fn l2(&self) -> u64 {
        self.number(self.l1()) & ADDRESS
    }

    /// Where the refcount table is.
    pub(crate) fn refcount_table(&self) -> u64 {
        self.number(48)
    }

    /// Where the snapshot table is.
    pub(crate) fn snapshots(&self) -> u64 {
        self.number(64)
    }

    /// Runs a verb on the image, with little memory and time.
    fn run(&self, words: &[&str]) -> Finished {
        self.run_within(MEMORY, words)
    }

    /// The same, with an address space of `bytes`.
    pub(crate) fn run_within(&self, bytes: u64, words: &[&str]) -> Finished {
        let mut verb = Command::new("prlimit");
        verb.arg(format!("--as={bytes}")).arg(mica::binary()).args(words).arg(self.path());
        let said = command::finish_within(&mut verb, LIMIT);
        assert!(said.signal().is_none() && said.code() != Some(134), "died: {said}");
        assert!(!said.stderr.contains("panicked"), "panicked: {said}");
        said
    }

    /// Runs the verbs that read tables and data; they may refuse, but must exit cleanly.
    fn verbs_end(&self) {
        for words in [
            &["info", "--output", "json"][..],
            &["info"],
            &["check"],
            &["check", "--output", "json"],
            &["map", "--output", "json"],
            &["index", "status"],
        ] {
            self.run(words);
        }
    }

    /// The image is refused by `serve` with one clear line; the other verbs exit cleanly.
    #[track_caller]
    pub(crate) fn refused(&self) -> String {
        self.verbs_end();
        let socket = self.dir().join("socket");
        let socket = socket.to_str().expect("a plain name");
        let said = self.run(&["serve", "--nbd", socket]).refusal();
        assert!(!Path::new(socket).exists(), "a refusal leaves no socket");
        said
    }

    /// The image is served, and every cluster is read separately, so that a broken one fails alone.
    /// Returns the clusters of 64 KiB that could not be read.
    #[track_caller]
    pub(crate) fn served(&self) -> Vec<u64> {
        self.verbs_end();
        let server = Server::mica(&self.path(), "qcow2", &[]);
        let server = server.unwrap_or_else(|error| panic!("not served: {error:#}"));
        let mut client = server.connect(&nbd::Wish::default()).expect("served");
        let clusters = client.len.div_ceil(64 << 10).min(1024);
        let mut failed = Vec::new();
        for cluster in 0..clusters {
            let len = (client.len - (cluster << 16)).min(64 << 10);
            if client.read(cluster << 16, len).is_err() {
                failed.push(cluster);
                client = server.connect(&nbd::Wish::default()).expect("it serves on");
            }
        }
        drop(client);
        let (_, peak) = server.memory();
        assert!(peak < SERVER_BYTES_MAX, "the server came to use {peak} bytes");
        let stopped = server.stop().expect("it stops");
        assert!(stopped.status.success() && !stopped.socket_left, "{stopped:?}");
        assert!(!stopped.log.contains("panicked"), "{stopped:?}");
        failed
    }

    /// The image is opened for writing in little memory, whether or not all of it can be written.
    #[track_caller]
    pub(crate) fn opens_for_writing(&self) {
        let server = Server::mica_writable(&self.path(), "qcow2", &[]);
        let server = server.unwrap_or_else(|error| panic!("not served: {error:#}"));
        let (_, peak) = server.memory();
        assert!(peak < SERVER_BYTES_MAX, "the server came to use {peak} bytes");
        assert!(server.stop().expect("it stops").status.success());
    }

    /// Every cluster can be read, and reads as in QEMU.
    #[track_caller]
    pub(crate) fn served_whole(&self) {
        assert_eq!(self.served(), Vec::<u64>::new(), "clusters that cannot be read");
        mica_tests::judge::same_as_qemu(self.dir(), "disk.qcow2");
    }

    /// Replaces the name by which an image names a file: its external data file, its backing file.
    pub(crate) fn rename(&self, old: &str, new: &str) {
        let mut image = fs::read(self.path()).expect("read");
        let first = image.get(..64 << 10).expect("a first cluster");
        let at = first.windows(old.len()).position(|bytes| bytes == old.as_bytes());
        let at = at.expect("the name is there");
        assert!(new.len() <= old.len(), "{new} is longer than {old}");
        image[at..at + old.len()].fill(0);
        image[at..at + new.len()].copy_from_slice(new.as_bytes());
        let len = u32::try_from(new.len()).expect("short").to_be_bytes();
        if image[8..16] == (at as u64).to_be_bytes() {
            image[16..20].copy_from_slice(&len);
        } else {
            image[at - 4..at].copy_from_slice(&len);
            // What followed the longer name now follows the shorter one's padding.
            let (end, new_end) =
                (at + old.len().next_multiple_of(8), at + new.len().next_multiple_of(8));
            let rest = image[end..4096].to_vec();
            image[new_end..new_end + rest.len()].copy_from_slice(&rest);
        }
        fs::write(self.path(), image).expect("written");
    }
}
