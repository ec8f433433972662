//! Where chains live: folders in memory, and where the system lets us mount, small file systems
//! that can be made full.

use super::story::{Outcome, trouble};
use crate::mounts::{self, Mount};
use crate::power;
use crate::tasks::{TaskGroup, TaskLimit};
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tempfile::TempDir;

/// Memory, as a folder, wherever nothing can be mounted. Images in it may name no others.
const MEMORY: &str = "/dev/shm";
const ROOM_MIB: u64 = 8 << 10;
const SMALL_MIB: u64 = 192;
const LOG_MIB: u64 = 24;
const FILLER: &str = "filler";

/// On what kind of file system images are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ground {
    /// A folder with room enough.
    Folder,
    /// A small file system of memory.
    Memory,
    /// A small ext4 on a loop device.
    Ext4,
}

/// The places of one thread of the storm, which has one chain at a time.
#[derive(Debug)]
pub(super) struct Places {
    // Mounts go before the folder that they are in.
    memory: Option<Mount>,
    ext4: Option<Mount>,
    small_log: Option<Mount>,
    /// Where all else is, and `ext4` lies; it goes after that.
    room: Option<Mount>,
    /// Where killed servers leave what they have.
    log: TempDir,
    folder: TempDir,
    tasks: Option<TaskGroup>,
    /// Why no power can be cut here, if it cannot.
    power_lack: Option<String>,
}

impl Places {
    /// Makes them; what cannot be mounted is not there.
    pub(super) fn new() -> Outcome<Self> {
        let folder = tempfile::Builder::new().prefix("mica-storm-").tempdir()?;
        let mount = |name: &str, mib| Mount::memory(&folder.path().join(name), mib).ok();
        let room = mount("room", ROOM_MIB);
        let memory = room.is_some().then(|| mount("memory", SMALL_MIB)).flatten();
        let small_log = room.is_some().then(|| mount("small-log", LOG_MIB)).flatten();
        let ext4 = match &room {
            Some(room) => small_ext4(room.folder(), &folder.path().join("ext4"))?,
            None => None,
        };
        let log_in = room.as_ref().map_or(Path::new(MEMORY), Mount::folder);
        let log = tempfile::Builder::new().prefix("mica-storm-").tempdir_in(log_in)?;
        let tasks = TaskGroup::new();
        let nothing_mounts = || Some("nothing can be mounted".to_owned());
        let power_lack = room.as_ref().map_or_else(nothing_mounts, power_lack);
        Ok(Self { memory, ext4, small_log, room, log, folder, tasks, power_lack })
    }

    /// The kinds of file systems that there are.
    pub(super) fn grounds(&self) -> Vec<Ground> {
        let memory = self.memory.is_some().then_some(Ground::Memory);
        let ext4 = self.ext4.is_some().then_some(Ground::Ext4);
        [Some(Ground::Folder), memory, ext4].into_iter().flatten().collect()
    }

    /// A folder for images.
    pub(super) fn images(&self, ground: Ground) -> PathBuf {
        let mount = match ground {
            Ground::Folder => None,
            Ground::Memory => self.memory.as_ref(),
            Ground::Ext4 => self.ext4.as_ref(),
        };
        mount.map_or(self.plain(), Mount::folder).join("images")
    }

    /// A folder with room enough.
    fn plain(&self) -> &Path {
        self.room.as_ref().map_or(self.folder.path(), Mount::folder)
    }

    /// A folder for sockets, logs of servers, and copies.
    pub(super) fn run(&self) -> PathBuf {
        self.plain().join("run")
    }

    /// A folder for what killed servers leave.
    pub(super) fn log(&self) -> PathBuf {
        self.log.path().join("log")
    }

    /// The same, on a small file system.
    pub(super) fn small_log(&self) -> Option<PathBuf> {
        self.small_log.as_ref().map(|mount| mount.folder().to_owned())
    }

    /// Whether servers can be refused threads.
    pub(super) fn limits_threads(&self) -> bool {
        self.tasks.is_some()
    }

    /// Why no disk can be recorded, for power cuts, if it cannot.
    pub(super) fn power_lack(&self) -> Option<&str> {
        self.power_lack.as_deref()
    }

    /// Lets server `pid` have only `more` threads in addition to what it has.
    pub(super) fn limit_threads(&self, pid: u32, more: u64) -> Outcome<TaskLimit<'_>> {
        let tasks = self.tasks.as_ref().ok_or_else(|| trouble("no control group"))?;
        Ok(tasks.limit(pid, more)?)
    }

    /// Empties all of it for the next chain.
    pub(super) fn clear(&self) -> Outcome {
        let mounted = [&self.memory, &self.ext4, &self.small_log].into_iter().flatten();
        mounted.for_each(|mount| empty(mount.folder()));
        let grounds = self.grounds();
        let images = grounds.iter().map(|ground| self.images(*ground));
        for folder in images.chain([self.run(), self.log()]) {
            if folder.exists() {
                fs::remove_dir_all(&folder)?;
            }
            fs::create_dir_all(&folder)?;
        }
        Ok(())
    }
}

/// Why no disk can be recorded, if it cannot, which is tried once.
fn power_lack(room: &Mount) -> Option<String> {
    static LACK: OnceLock<Option<String>> = OnceLock::new();
    let lack = LACK.get_or_init(|| match crate::tools::missing(&power::TOOLS).first() {
        Some(tool) => Some(format!("{tool} is missing")),
        None => power::lacks(room.folder()),
    });
    lack.clone()
}

/// Lets go of a file that fills a file system.
fn empty(folder: &Path) {
    // There need not be one.
    let _ = fs::remove_file(folder.join(FILLER));
}

fn small_ext4(room: &Path, folder: &Path) -> Outcome<Option<Mount>> {
    let image = room.join("ext4.img");
    if !crate::tools::MKE2FS.is_there() {
        return Ok(None);
    }
    let options = ["-m", "0", "-E", "lazy_itable_init=1,nodiscard"];
    mounts::make_ext4(&image, SMALL_MIB << 20, &options)?;
    Ok(Mount::ext4(&image, folder).ok())
}

/// Takes space from the file system of `folder` until `left` bytes are free; gives it back when
/// dropped.
#[derive(Debug)]
pub(super) struct Filler(PathBuf);

impl Filler {
    pub(super) fn new(mount: &Path, left: u64) -> Outcome<Self> {
        let path = mount.join(FILLER);
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(&path)?;
        let filler = Self(path);
        let space = statvfs(mount).map_err(trouble)?;
        let free = space.f_bavail * space.f_frsize;
        if let Some(taken) = free.checked_sub(left).filter(|taken| *taken > 0) {
            // Less than that may be free by now, which does as well.
            let _ = fallocate(&file, FallocateFlags::empty(), 0, taken);
        }
        Ok(filler)
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        // A process that is started at this moment may hold the file a little longer, so that
        // removing it alone would give back nothing yet.
        let _ = File::options().write(true).truncate(true).open(&self.0);
        let _ = fs::remove_file(&self.0);
    }
}

/// The mounted folder that images of this ground are in.
pub(super) fn mount_of(images: &Path) -> &Path {
    images.parent().unwrap_or(images)
}
