//! Opening of images. A format asks for files by name through this trait and never opens one
//! itself, so that one place decides what may be opened, and the simulator can be that place.

use crate::{
    Error, ErrorKind, LocalFuture, Passphrase, RedoLogs, Result, Sidecars, Store, StoreIdentity,
};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Changes within this time of each other may leave the same timestamps.
const RACY_NS: i128 = 1_000_000_000;
/// The same if timestamps are whole seconds: their resolution may even be two seconds, as on FAT.
const COARSE_RACY_NS: i128 = 4_000_000_000;
const SECOND_NS: i128 = 1_000_000_000;

/// Which file it is, and whether it changed since it was last examined. Both times of a block
/// device are `i128::MAX`: no timestamp shows that a device was written. So is the change time if
/// the file system has none that cannot be set.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Identity {
    /// Device that holds it.
    pub device: u64,
    /// Inode on that device.
    pub inode: u64,
    /// Length in bytes.
    pub len: u64,
    /// Last change of the content, in nanoseconds since the epoch.
    pub mtime_ns: i128,
    /// Last change of content or inode, in nanoseconds since the epoch. It cannot be set back.
    pub ctime_ns: i128,
}

impl Identity {
    /// Whether a file that has this identity now, and had it at `since_ns`, is certain not to have
    /// changed after that. A change shows in its timestamps only once the clock of its file system
    /// has advanced since the previous change.
    pub fn proves_unchanged_since(&self, since_ns: i128) -> bool {
        // The change time alone shows the resolution of timestamps: the other one can be set.
        let is_coarse = self.ctime_ns.rem_euclid(SECOND_NS) == 0;
        let margin_ns = if is_coarse { COARSE_RACY_NS } else { RACY_NS };
        self.mtime_ns.max(self.ctime_ns).saturating_add(margin_ns) < since_ns
    }

    /// Whether its timestamps can ever prove anything.
    pub fn has_stamps(&self) -> bool {
        self.mtime_ns.max(self.ctime_ns) != i128::MAX
    }
}

impl From<&Identity> for StoreIdentity {
    fn from(file: &Identity) -> Self {
        Self::File { device: file.device, inode: file.inode }
    }
}

/// Tells by its content whether an image is unchanged if the timestamps of its file do not.
pub trait ContentProof: Send + Sync {
    /// Whether the content of `store`, the image's file opened again, is unchanged.
    fn holds(&self, store: Arc<dyn Store>) -> LocalFuture<'static, Result<bool>>;
}

/// Where a format leaves the proof of an image's content for when its file is opened again.
#[derive(Clone, Default)]
pub struct ProofSlot(Arc<OnceLock<Arc<dyn ContentProof>>>);

impl ProofSlot {
    /// Leaves `proof`, unless there is one already.
    pub fn set(&self, proof: Arc<dyn ContentProof>) {
        let _ = self.0.set(proof);
    }

    /// The proof, if there is one.
    pub fn get(&self) -> Option<&Arc<dyn ContentProof>> {
        self.0.get()
    }
}

/// A file that was opened as an image.
#[derive(Clone)]
pub struct OpenImage {
    /// Its bytes.
    pub store: Arc<dyn Store>,
    /// Its identity when it was opened.
    pub identity: Identity,
    /// For the proof that it is unchanged, in case its file is closed and opened again.
    pub content: ProofSlot,
}

/// An image that is open for reading, and can be written once that is allowed.
pub struct Upgradable {
    /// The image. Its store writes, too, which nobody does before [`Self::upgrade`].
    pub image: OpenImage,
    upgrade: Box<dyn Fn() -> Result<()> + Send + Sync>,
}

impl Upgradable {
    /// An `image` that may be written when `upgrade` succeeds.
    pub fn new(image: OpenImage, upgrade: impl Fn() -> Result<()> + Send + Sync + 'static) -> Self {
        Self { image, upgrade: Box::new(upgrade) }
    }

    /// Excludes other writers, and readers: from now on the image may be written.
    ///
    /// # Errors
    /// `Denied` if somebody else has the image open: perhaps this chain, by another store. Whoever
    /// does not try again closes the image.
    pub fn upgrade(&self) -> Result<()> {
        (self.upgrade)()
    }
}

/// Decides which images may be opened, and opens them.
pub trait Images: Send + Sync {
    /// The file that `name`, which is stored in the image at `referrer`, refers to. A relative name
    /// is relative to the referrer's directory.
    ///
    /// # Errors
    /// `Denied` if the user did not allow that place, `Unsupported` for a name with a protocol.
    fn resolve(&self, referrer: &Path, name: &Path) -> Result<PathBuf>;

    /// Opens the file at `path` for reading.
    ///
    /// # Errors
    /// What the system or the policy reports.
    fn open(&self, path: &Path) -> Result<OpenImage>;

    /// Opens the file at `path` for reading and writing, excluding other writers.
    ///
    /// # Errors
    /// What the system or the policy reports, or that another program has the file open.
    fn open_writable(&self, path: &Path) -> Result<OpenImage>;

    /// Opens the file at `path` for reading, which this process has open for writing and writes no
    /// more. No other program can write to it between the two.
    ///
    /// # Errors
    /// As [`Self::open`].
    fn open_frozen(&self, path: &Path) -> Result<OpenImage>;

    /// What is open for writing here had another name when it was opened, and is at `path` now:
    /// messages are to name that.
    fn note_name(&self, path: &Path) {
        let _ = path;
    }

    /// Opens the file at `path`, which a chain reads already, so that it can be read and, later,
    /// written.
    ///
    /// # Errors
    /// What the system or the policy reports, or that another program writes the file.
    fn open_upgradable(&self, path: &Path) -> Result<Upgradable>;

    /// Opens the file at `path` for reading and writing, if nobody has it open, here or elsewhere,
    /// and nobody can meanwhile: for a moment. A wrapper that forgets to forward this is refused.
    ///
    /// # Errors
    /// What the system or the policy reports; `Denied` if somebody has it open, or if that cannot
    /// be told.
    fn open_alone(&self, path: &Path) -> Result<OpenImage> {
        let what = format!("{} is not opened for that", path.display());
        Err(Error::new(ErrorKind::Denied, what))
    }

    /// Which file is at `path` now.
    ///
    /// # Errors
    /// What the system reports.
    fn identify(&self, path: &Path) -> Result<Identity>;

    /// The passphrase of the encrypted image at `path`, if the user gave one. A wrapper that
    /// forgets to forward this gets no access.
    ///
    /// # Errors
    /// If what the user named has none.
    fn passphrase(&self, path: &Path) -> Result<Option<Arc<Passphrase>>> {
        let _ = path;
        Ok(None)
    }

    /// The sidecars of layers.
    fn sidecars(&self) -> &dyn Sidecars;

    /// The redo logs that writers keep in memory that outlives them.
    fn redo_logs(&self) -> &dyn RedoLogs;

    /// Now, in nanoseconds since the epoch, by the clock that stamps files.
    fn now_ns(&self) -> i128;
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i128 = 1_700_000_000_123_456_789;

    fn stamped(mtime_ns: i128, ctime_ns: i128) -> Identity {
        Identity { device: 1, inode: 2, len: 3, mtime_ns, ctime_ns }
    }

    #[test]
    fn stamps_prove_nothing_about_a_change_just_before() {
        let changed = stamped(NOW, NOW);
        assert!(!changed.proves_unchanged_since(NOW + RACY_NS));
        assert!(changed.proves_unchanged_since(NOW + RACY_NS + 1));
        // The later of the two timestamps counts.
        let touched = stamped(0, NOW);
        assert!(!touched.proves_unchanged_since(NOW + RACY_NS));
    }

    #[test]
    fn stamps_of_two_seconds_prove_nothing_after_one() {
        let second = NOW / SECOND_NS * SECOND_NS;
        let changed = stamped(second, second);
        assert!(!changed.proves_unchanged_since(second + 3 * SECOND_NS));
        assert!(changed.proves_unchanged_since(second + 5 * SECOND_NS));
        // A time that was set says nothing about the file system.
        let touched = stamped(second, second + 1);
        assert!(touched.proves_unchanged_since(second + 2 * SECOND_NS));
    }

    #[test]
    fn file_without_stamps_proves_nothing_ever() {
        for identity in [stamped(i128::MAX, i128::MAX), stamped(0, i128::MAX)] {
            assert!(!identity.has_stamps());
            assert!(!identity.proves_unchanged_since(i128::MAX));
        }
    }
}
