//! An ext4 whose disk is recorded: loop device, `nbdfuse`, and `blklogwrites` in QEMU's storage
//! daemon. The daemon's own FUSE export would be simpler, but it mixes up concurrent writes.

use anyhow::{Context, Result, ensure};
use mica_tests::mounts::{FuseFile, Mount};
use mica_tests::server::Server;
use mica_tests::tools;
use mica_tests::write_log::WriteLog;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes of the recorded disk.
pub(super) const DISK_BYTES: u64 = 64 << 20;

/// A file system at work. The fields are dropped in order, from the top of the stack down.
pub(super) struct Recorder {
    ext4: Mount,
    disk: FuseFile,
    daemon: Server,
    log: PathBuf,
    /// The disk before the first entry of the log.
    before: Vec<u8>,
}

/// What was recorded.
pub(super) struct Recording {
    /// The disk before the log.
    pub(super) before: Vec<u8>,
    /// Everything that reached it.
    pub(super) log: WriteLog,
}

/// Why this system cannot record, if it cannot: a container may lack what is needed.
pub(super) fn lacks(dir: &Path) -> Option<String> {
    let store = dir.join("probe.img");
    make_ext4(&store, 4096);
    if let Err(error) = Mount::ext4(&store, &dir.join("probe")).map(Mount::unmount) {
        return Some(format!("no file can be mounted over a loop device here: {error:#}"));
    }
    let server = Server::mica(&store, "raw", &[]).expect("mica serves the file");
    match FuseFile::mount(&dir.join("fuse-probe"), &server.uri()) {
        Some(file) => file.unmount(),
        None => return Some("there is no FUSE for us here".to_owned()),
    }
    None
}

/// Makes `file` a disk with an ext4.
fn make_ext4(file: &Path, block_bytes: u64) {
    File::create(file).and_then(|disk| disk.set_len(DISK_BYTES)).expect("made");
    let mke2fs = tools::MKE2FS.find().expect("it is present");
    let mut make = Command::new(mke2fs);
    make.args(["-q", "-F", "-t", "ext4", "-b", &block_bytes.to_string()]);
    make.args(["-E", "lazy_itable_init=0,lazy_journal_init=0"]).arg(file);
    mica_tests::command::finish(&mut make).ok();
}

impl Recorder {
    /// Starts to record, in `dir`, a new ext4 with blocks of `block_bytes`.
    pub(super) fn start(dir: &Path, block_bytes: u64) -> Result<Self> {
        let [store, log] = ["store.img", "log.img"].map(|name| dir.join(name));
        make_ext4(&store, block_bytes);
        File::create(&log)?;
        let before = fs::read(&store)?;
        let daemon = Server::start("recorded", |socket| {
            let mut daemon = Command::new("qemu-storage-daemon");
            // The test judges the files, not the disk beneath them: no syncs there.
            for (node, file) in [("store", &store), ("log", &log)] {
                let node = format!("driver=file,node-name={node},cache.no-flush=on");
                daemon.arg("--blockdev").arg(format!("{node},filename={}", file.display()));
            }
            daemon.arg("--blockdev").arg(
                "driver=blklogwrites,node-name=recorder,file=store,log=log,log-append=off,\
                 log-super-update-interval=1",
            );
            let socket = format!("addr.type=unix,addr.path={}", socket.display());
            daemon.args(["--nbd-server", &socket, "--export"]);
            daemon.arg("type=nbd,id=export,node-name=recorder,name=recorded,writable=on");
            daemon
        })?;
        let disk = FuseFile::mount(&dir.join("fuse"), &daemon.uri()).context("no FUSE")?;
        let ext4 = Mount::ext4(&disk.path(), &dir.join("recorded"))?;
        Ok(Self { ext4, disk, daemon, log, before })
    }

    /// Where the file system is.
    pub(super) fn folder(&self) -> &Path {
        self.ext4.folder()
    }

    /// The file of the log. Every write and flush that was acknowledged is within its length.
    pub(super) fn log(&self) -> &Path {
        &self.log
    }

    /// Makes everything in the file system durable; returns the length of the log then.
    pub(super) fn sync(&self) -> Result<u64> {
        rustix::fs::syncfs(File::open(self.folder())?)?;
        Ok(self.log.metadata()?.len())
    }

    /// Ends the recording.
    pub(super) fn stop(self) -> Result<Recording> {
        self.ext4.unmount();
        self.disk.unmount();
        let stopped = self.daemon.stop()?;
        ensure!(stopped.status.success(), "the storage daemon ends with {stopped:?}");
        let log = WriteLog::parse(fs::read(&self.log)?)?;
        Ok(Recording { before: self.before, log })
    }
}
