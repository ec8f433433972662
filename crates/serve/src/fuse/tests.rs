//! Real mounts of disks in memory. They need the right to mount, and say so where it is missing.

use super::{AllowOther, Mapping, MountsHere, Running, Server, ServerConfig};
use crate::discard::Discard;
use crate::testing::memory::{Event, MemoryDisk};
use crate::testing::random::Random;
use crate::workers::Workers;
use mica_block::{Disk, ErrorKind, Extent, Geometry, IoFuture, Planned, Result, Zeroes, ready};
use mica_rt::{Backend, Buf, FallocateFlags};
use mica_units::GuestRange;
use rustix::fs::fallocate;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tempfile::TempDir;

mod data;
mod mounts;

const LEN: u64 = 4 << 20;
const UNDERNEATH: &[u8] = b"what lies underneath";

/// A folder with a file to be mounted over, if this process may mount.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Option<Self> {
        let may = rustix::process::geteuid().is_root()
            && OpenOptions::new().read(true).write(true).open("/dev/fuse").is_ok();
        if !may {
            assert!(std::env::var_os("CI").is_none(), "needs root and /dev/fuse");
            let name = std::thread::current().name().unwrap_or("a test").to_owned();
            let _ = writeln!(io::stderr(), "SKIPPED {name}: needs root and /dev/fuse");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("a disk"), UNDERNEATH).expect("written");
        Some(Self { folder })
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("a disk")
    }

    fn start(&self, disk: Arc<dyn Disk>, discard: Discard) -> Result<Running> {
        Server::start(self.config(disk, discard))
    }

    fn config(&self, disk: Arc<dyn Disk>, discard: Discard) -> ServerConfig {
        ServerConfig {
            file: self.file(),
            disk,
            image: None,
            discard,
            mapping: Mapping::Allowed,
            edges: Arc::default(),
            allow_other: AllowOther::Auto,
            workers: Workers::start(2, Backend::Pool).expect("executors"),
            mounts: Arc::new(MountsHere::default()),
        }
    }

    /// Serves `disk` while `test` runs.
    fn with(&self, disk: Arc<MemoryDisk>, test: impl FnOnce(&Path)) {
        let running = self.start(disk, Discard::Unmap).expect("served");
        test(&self.file());
        running.shutdown();
        assert_eq!(std::fs::read(self.file()).expect("unmounted"), UNDERNEATH);
    }
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("opened")
}

fn errno<T>(result: io::Result<T>) -> Option<Errno> {
    result.err().and_then(|error| Errno::from_io_error(&error))
}
