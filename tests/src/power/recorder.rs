//! An ext4 whose disk is recorded: loop device, `nbdfuse`, and `blklogwrites` in QEMU's storage
//! daemon. The daemon's own FUSE export would be simpler, but it mixes up concurrent writes.

use crate::mounts::{FuseFile, Mount, make_ext4};
use crate::server::Server;
use crate::tools;
use crate::write_log::WriteLog;
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes of the recorded disk.
pub const DISK_BYTES: u64 = 64 << 20;

/// The foreign programs that recording needs.
pub const TOOLS: [tools::Tool; 3] = [tools::QEMU_STORAGE_DAEMON, tools::NBDFUSE, tools::MKE2FS];

/// A file system at work. The fields are dropped in order, from the top of the stack down.
pub struct Recorder {
    ext4: Mount,
    disk: FuseFile,
    daemon: Server,
    log: PathBuf,
    /// The disk before the first entry of the log.
    before: Vec<u8>,
}

/// What was recorded.
pub struct Recording {
    /// The disk before the log.
    pub before: Vec<u8>,
    /// Everything that reached it.
    pub log: WriteLog,
}

/// Why this system cannot record, if it cannot: a container may lack what is needed.
pub fn lacks(dir: &Path) -> Option<String> {
    let probe = || Recorder::start(&dir.join("probe"), 4096).and_then(Recorder::stop);
    probe().err().map(|error| format!("no disk can be recorded here: {error:#}"))
}

impl Recorder {
    /// Starts to record, in `dir`, a new ext4 with blocks of `block_bytes`.
    ///
    /// # Errors
    /// If this system does not let it.
    pub fn start(dir: &Path, block_bytes: u64) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let [store, log] = ["store.img", "log.img"].map(|name| dir.join(name));
        let at_once = "lazy_itable_init=0,lazy_journal_init=0";
        make_ext4(&store, DISK_BYTES, &["-b", &block_bytes.to_string(), "-E", at_once])
            .expect("made");
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
    pub fn folder(&self) -> &Path {
        self.ext4.folder()
    }

    /// The file of the log. Every write and flush that was acknowledged is within its length.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Makes everything in the file system durable; returns the length of the log then.
    ///
    /// # Errors
    /// If the system reports one.
    pub fn sync(&self) -> Result<u64> {
        rustix::fs::syncfs(File::open(self.folder())?)?;
        Ok(self.log.metadata()?.len())
    }

    /// Ends the recording.
    ///
    /// # Errors
    /// If a program of it ends badly, or its log cannot be read.
    pub fn stop(self) -> Result<Recording> {
        self.ext4.unmount();
        self.disk.unmount();
        let stopped = self.daemon.stop()?;
        ensure!(stopped.status.success(), "the storage daemon ends with {stopped:?}");
        let log = WriteLog::parse(fs::read(&self.log)?)?;
        Ok(Recording { before: self.before, log })
    }
}
