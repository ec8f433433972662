//! The server of one file: mounting, the thread that takes the kernel's requests, and the way down.
//!
//! At the end nobody gets in any more, what is under way is answered, and then the file is
//! unmounted, whoever still has it open: what they ask fails from then on. Each step has a limit,
//! so that a disk that hangs, or one that lies on its own file, holds nobody up.

use super::attributes::{Access, AllowOther, Attributes, Others};
use super::file::DiskFile;
use super::gate::Gate;
use super::mount::{self, MountPoint};
use super::stats::{Counters, QueueStats};
use super::unmounter::Unmounter;
use crate::discard::Discard;
use crate::edges::Edges;
use crate::listener::lock_directory;
use crate::workers::Workers;
use fuser::{Config, MountOption, Session, SessionACL};
use mica_block::{Disk, Error, ErrorKind, Result};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// A disk, and the file that it is served as.
pub struct ServerConfig {
    /// The regular file that is mounted over. It must be none that the disk itself is made of.
    pub file: PathBuf,
    /// What is served.
    pub disk: Arc<dyn Disk>,
    /// The image whose allocated blocks are told as the file's, as QEMU does. Without it all of the
    /// disk counts as allocated.
    pub image: Option<PathBuf>,
    /// What becomes of holes that are punched.
    pub discard: Discard,
    /// Whether others than this user may use the file.
    pub allow_other: AllowOther,
    /// The executors.
    pub workers: Arc<Workers>,
    /// Who unmounts the file in the end.
    pub unmounter: Arc<Unmounter>,
}

/// What the kernel's requests are about.
pub(super) struct Export {
    pub(super) gate: Arc<Gate>,
    pub(super) attributes: Attributes,
    pub(super) discard: Discard,
    pub(super) edges: Edges,
    /// For each executor, and last for the thread that takes requests.
    pub(super) stats: Box<[QueueStats]>,
    pub(super) failures_logged: AtomicU32,
}

/// For the requests under way to end at shutdown.
const DRAIN_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });
/// For the kernel to let go of the connection after that. Only users without privileges wait: for
/// who still has the file open.
const RELEASE_LIMIT: Duration = Duration::from_secs(2);

/// Starts servers.
#[derive(Debug)]
pub struct Server;

impl Server {
    /// Mounts the disk over the file and serves it. The mount that a killed server left there is
    /// cleared. What mounts it is the [`Unmounter`], as is the thread that takes requests: they are
    /// in no sandbox that the caller is in.
    ///
    /// # Errors
    /// `Denied` if a living server is mounted there, or if this user may not mount; `Invalid` if
    /// the file is no regular file, or the image itself; else what the system says.
    pub fn start(config: ServerConfig) -> Result<Running> {
        let outside = Arc::clone(&config.unmounter);
        outside.mount(move || Self::start_here(config))
    }

    fn start_here(config: ServerConfig) -> Result<Running> {
        let ServerConfig { file, disk, image, discard, allow_other, workers, unmounter } = config;
        let context = || format!("serving a disk as {}", file.display());
        mount::check_name(&file)?;
        // Two servers that find no other must not both mount.
        let _alone = lock_directory(&file).map_err(|error| Error::from_io(context(), error))?;
        let path = mount::prepare(&file)?;
        let image = image.map(|image| open_image(&image, &path)).transpose()?;
        let access = if disk.is_writable() { Access::ReadWrite } else { Access::Read };
        let export = |others, image| {
            let stats = (0..=workers.handles().len()).map(|_| QueueStats::default()).collect();
            Arc::new(Export {
                gate: Gate::new(Arc::clone(&disk), workers.pool()),
                attributes: Attributes::new(access, others, image),
                discard,
                edges: Edges::default(),
                stats,
                failures_logged: AtomicU32::new(0),
            })
        };
        let attempt = |others| -> std::io::Result<_> {
            let image = image.as_ref().map(File::try_clone).transpose()?;
            let export = export(others, image);
            mount_over(&path, &export, access, others, &workers).map(|session| (session, export))
        };
        let mounted = match allow_other {
            AllowOther::On => attempt(Others::Allowed),
            AllowOther::Off => attempt(Others::Denied),
            AllowOther::Auto => attempt(Others::Allowed).or_else(|_| attempt(Others::Denied)),
        };
        let (session, export) = mounted.map_err(|error| Error::from_io(context(), error))?;
        let mount = MountPoint::just_mounted(path);
        let (sender, ended) = mpsc::channel();
        let file = mount.path().to_owned();
        let taking = move || {
            let result = session.run();
            if let Err(error) = result {
                tracing::error!(file = %file.display(), %error, "a FUSE file is served no more");
            }
            // Nobody waits any more where the server has ended before.
            let _ = sender.send(());
        };
        let thread = std::thread::Builder::new().name("mica-fuse".to_owned()).spawn(taking);
        if let Err(error) = thread {
            // Not by dropping a `Running`: this may be the thread that it would wait for.
            mount.unmount()?;
            return Err(Error::from_io(context(), error));
        }
        Ok(Running { export, mount: Some(mount), unmounter, ended, _workers: workers })
    }
}

/// Opens `image` for nothing but to ask what it is. It must not be the file that is mounted over:
/// an image under its own disk could not be opened again.
fn open_image(image: &Path, over: &Path) -> Result<File> {
    let failed = |error| Error::from_io(format!("looking at {}", image.display()), error);
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(image);
    let opened = opened.map_err(failed)?;
    let (found, over) = (opened.metadata().map_err(failed)?, over.metadata().map_err(failed)?);
    if (found.dev(), found.ino()) == (over.dev(), over.ino()) {
        let context = format!("{}: an image cannot be mounted over by its disk", image.display());
        return Err(Error::new(ErrorKind::Invalid, context));
    }
    Ok(opened)
}

fn mount_over(
    path: &Path,
    export: &Arc<Export>,
    access: Access,
    others: Others,
    workers: &Workers,
) -> std::io::Result<Session<DiskFile>> {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("mica".to_owned()),
        MountOption::DefaultPermissions,
        MountOption::NoAtime,
        match access {
            Access::Read => MountOption::RO,
            Access::ReadWrite => MountOption::RW,
        },
    ];
    config.acl = match others {
        Others::Allowed => SessionACL::All,
        Others::Denied => SessionACL::Owner,
    };
    let file = DiskFile {
        export: Arc::clone(export),
        workers: workers.handles().to_vec(),
        next: AtomicUsize::new(0),
    };
    Session::new(file, path, &config)
}

/// A disk that is served as a file. Dropping it ends that.
pub struct Running {
    export: Arc<Export>,
    /// `None` once stopped.
    mount: Option<MountPoint>,
    unmounter: Arc<Unmounter>,
    ended: mpsc::Receiver<()>,
    /// They live as long as there is work for them.
    _workers: Arc<Workers>,
}

impl Running {
    /// What it did so far.
    pub fn counters(&self) -> Counters {
        let mut sum = Counters::default();
        self.export.stats.iter().for_each(|stats| stats.add_to(&mut sum));
        sum
    }

    /// Takes no more requests, answers those under way, and unmounts the file.
    pub fn shutdown(mut self) -> Counters {
        self.stop();
        self.counters()
    }

    fn stop(&mut self) {
        let Some(mount) = self.mount.take() else { return };
        let file = mount.path().display().to_string();
        self.export.gate.close();
        let left = self.export.gate.drain(DRAIN_LIMIT);
        if left > 0 {
            tracing::warn!(file, left, "requests of a FUSE file did not end in time");
        }
        if self.ended.try_recv().is_ok() {
            // Somebody has unmounted it. What is mounted there now is not ours.
            return;
        }
        if let Err(error) = self.unmounter.unmount(mount) {
            tracing::error!(file, ?error, "a FUSE file stays mounted");
        }
        if self.ended.recv_timeout(RELEASE_LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
            tracing::info!(file, "somebody has a FUSE file still open; what they ask fails");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Running({:?})", self.mount.as_ref().map(MountPoint::path))
    }
}
