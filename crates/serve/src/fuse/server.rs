//! The server of one file: mounting, the thread that takes the kernel's requests, and shutdown.
//!
//! At shutdown no more requests are admitted, those under way are answered, and then the file is
//! unmounted, even if it is open: later requests fail. Each step has a time limit, so that a disk
//! that hangs, or one that is stored on its own file, does not block the rest.

use super::attributes::{Access, AllowOther, Attributes, Others};
use super::export::{Export, Mapping};
use super::file::DiskFile;
use super::gate::Gate;
use super::mounts::{MountRequest, Mounts};
use super::stats::{Counters, QueueStats};
use crate::discard::Discard;
use crate::prepared::Prepared;
use crate::workers::Workers;
use fuser::{Config, Session, SessionACL};
use mica_block::{Disk, Error, Result};
use mica_rt::LogLimit;
use mica_rt::sync::SharedLock;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// A disk, and the file that it is served as.
pub struct ServerConfig {
    /// The regular file that is mounted over. It must not be part of the disk itself.
    pub file: PathBuf,
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// The image whose allocated blocks are reported as the file's, as in QEMU. Without it the
    /// whole disk counts as allocated.
    pub image: Option<PathBuf>,
    /// What happens to holes that are punched.
    pub discard: Discard,
    /// The lock of changes at the edges of sectors: one for all servers of the disk.
    pub edges: Arc<SharedLock>,
    /// Whether programs may map the file into their memory.
    pub mapping: Mapping,
    /// Whether others than this user may use the file.
    pub allow_other: AllowOther,
    /// The executors.
    pub workers: Arc<Workers>,
    /// Mounts it over the file, and unmounts it in the end.
    pub mounts: Arc<dyn Mounts>,
}

/// Time for the requests under way to end at shutdown.
const DRAIN_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });
/// Time for the kernel to release the connection after that. Only unprivileged users wait: for
/// processes that still have the file open.
const RELEASE_LIMIT: Duration = Duration::from_secs(2);

/// Starts servers.
#[derive(Debug)]
pub struct Server;

impl Server {
    /// Mounts the disk over the file and serves it.
    ///
    /// # Errors
    /// As [`Server::prepare`].
    pub fn start(config: ServerConfig) -> Result<Running> {
        Ok(Self::prepare(config)?.start())
    }

    /// Mounts the disk over the file and serves nobody yet: who uses the file waits.
    ///
    /// # Errors
    /// As [`Mounts::mount`]; else any error of the system.
    pub fn prepare(config: ServerConfig) -> Result<Prepared<Running>> {
        let ServerConfig { file, disk, image, discard, .. } = config;
        let ServerConfig { mapping, edges, allow_other, workers, mounts, .. } = config;
        let image = image.as_deref().map(open_image).transpose()?;
        let (image, identity) = image.unzip();
        let access = if disk.is_writable() { Access::ReadWrite } else { Access::Read };
        let mounted = mounts.mount(&MountRequest {
            file: file.clone(),
            is_writable: access == Access::ReadWrite,
            allow_other,
            image: identity,
        })?;
        if mounted.cleared > 0 {
            let file = file.display();
            tracing::info!(%file, "cleared the mount of a dead server");
        }
        let others = if mounted.is_for_others { Others::Allowed } else { Others::Denied };
        let stats = (0..=workers.handles().len()).map(|_| QueueStats::default()).collect();
        let export = Arc::new(Export {
            gate: Gate::new(disk, workers.pool()),
            attributes: Attributes::new(access, others, image),
            discard,
            mapping,
            edges,
            stats,
            failures: LogLimit::failures(),
        });
        match take_requests(mounted.device, &file, &export, others, &workers) {
            Ok(Taking { device, start, ended }) => {
                let file = Some(file);
                let running = Running { export, file, mounts, device, ended, _workers: workers };
                Ok(Prepared::new(start, running))
            }
            Err(error) => {
                let error = Error::from_io(format!("serving a disk as {}", file.display()), error);
                // The first failure is reported.
                let _ = mounts.unmount(&file);
                Err(error)
            }
        }
    }
}

/// Opens `image` only to inspect it. Returns its device and inode too.
fn open_image(image: &Path) -> Result<(File, (u64, u64))> {
    let failed = |error| Error::from_io(format!("checking {}", image.display()), error);
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(image);
    let opened = opened.map_err(failed)?;
    let found = opened.metadata().map_err(failed)?;
    Ok((opened, (found.dev(), found.ino())))
}

/// The thread that takes the kernel's requests.
struct Taking {
    /// A descriptor of the device that stays open as long as the thread takes requests.
    device: Arc<Device>,
    /// It begins when told to, and ends if it never is.
    start: mpsc::Sender<()>,
    /// Says that it has ended.
    ended: mpsc::Receiver<()>,
}

/// Starts the thread that takes the kernel's requests from `device`.
fn take_requests(
    device: OwnedFd,
    file: &Path,
    export: &Arc<Export>,
    others: Others,
    workers: &Workers,
) -> std::io::Result<Taking> {
    let watched = Arc::new(Device(Mutex::new(Some(device.try_clone()?))));
    let disk = DiskFile {
        export: Arc::clone(export),
        workers: workers.handles().to_vec(),
        next: AtomicUsize::new(0),
    };
    let acl = match others {
        Others::Allowed => SessionACL::All,
        Others::Denied => SessionACL::Owner,
    };
    let session = Session::from_fd(disk, device, acl, Config::default())?;
    let (start, started) = mpsc::channel();
    let (sender, ended) = mpsc::channel();
    let (name, taken_from) = (file.to_owned(), Arc::clone(&watched));
    let taking = move || {
        if started.recv().is_err() {
            return;
        }
        if let Err(error) = session.run() {
            let file = name.display();
            tracing::error!(%file, %error, "stopped serving a FUSE file");
        }
        taken_from.close();
        // Nobody waits any more where the server has ended before.
        let _ = sender.send(());
    };
    std::thread::Builder::new().name("mica-fuse".to_owned()).spawn(taking)?;
    Ok(Taking { device: watched, start, ended })
}

/// The kernel's end of a mount, to check whether it still exists.
pub(super) struct Device(Mutex<Option<OwnedFd>>);

impl Device {
    /// Whether the mount is gone, or its connection has ended. Then the kernel may have given the
    /// mount's numbers to another.
    pub(super) fn is_gone(&self) -> bool {
        let device = self.0.lock();
        let Some(device) = &*device else { return true };
        let mut fds = [PollFd::new(device, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(PollFlags::ERR)
    }

    pub(super) fn close(&self) {
        self.0.lock().take();
    }
}

/// A disk that is served as a file. Dropping it ends that.
pub struct Running {
    export: Arc<Export>,
    /// `None` once stopped.
    file: Option<PathBuf>,
    mounts: Arc<dyn Mounts>,
    pub(super) device: Arc<Device>,
    ended: mpsc::Receiver<()>,
    /// They live as long as there is work for them.
    _workers: Arc<Workers>,
}

impl Running {
    /// Its counters so far.
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
        let Some(path) = self.file.take() else { return };
        let file = path.display().to_string();
        self.export.gate.close();
        let left = self.export.gate.drain(DRAIN_LIMIT);
        if left > 0 {
            tracing::warn!(file, left, "requests of a FUSE file did not complete in time");
        }
        // If somebody has unmounted it, whatever is mounted there now is not ours. The thread may
        // not know that yet.
        if self.ended.try_recv().is_ok() {
            return;
        }
        if !self.device.is_gone()
            && let Err(error) = self.mounts.unmount(&path)
        {
            tracing::error!(file, ?error, "cannot unmount a FUSE file");
        }
        if self.ended.recv_timeout(RELEASE_LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
            tracing::info!(file, "FUSE file still open elsewhere; further requests fail");
        }
        self.device.close();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Running({:?})", self.file)
    }
}
