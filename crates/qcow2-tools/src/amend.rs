//! Changes what the header of an image that is not in use says about its format.
//!
//! ```text
//! what the new header needs: no clusters marked as zeros, refcounts of another width ─▶ durable
//!   ─▶ the new header                                     qcow2_format::HeaderChange
//! ```
//!
//! Invariants
//! - I1 The old header and the new one show the same disk: what has to change before the new one is
//!   written means the same to the old one. So a power cut leaves the old header or the new one,
//!   and at worst leaks.
//! - I2 Everything that can be refused is refused before anything is written.

mod zeros;

use crate::check::{Finding, Task, check, count};
use crate::recover::{open_for_change, write_refcounts};
use mica_block::{Error, ErrorKind, Images, OpenImage, Result, Store, read_exact, write_all};
use mica_qcow2::snapshots::list;
use mica_qcow2_format::{
    Compression, FeatureName, Header, HeaderChange, RefcountWidth, SnapshotEntry, Version,
    parse_data_file_name,
};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

/// Extra data of a snapshot's entry that version 3 requires.
const SNAPSHOT_EXTRA_BYTES_MIN: u32 = 16;

/// What is to change; what is not set stays.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Amendment {
    /// Version of the format.
    pub version: Option<Version>,
    /// Whether a writer may leave refcounts for later.
    pub lazy_refcounts: Option<bool>,
    /// Width of a refcount.
    pub refcount_width: Option<RefcountWidth>,
    /// The format that the image states for its backing file.
    pub backing_format: Option<String>,
    /// The name of the file that holds the data, which is the same file.
    pub data_file: Option<OsString>,
    /// Whether the data file is a raw disk by itself.
    pub data_file_raw: Option<bool>,
}

/// Makes the changes to the image at `path`: all of them, or none. Returns its header.
///
/// # Errors
/// `Unsupported` or `Invalid` if an image cannot be both what it is and what is wanted; `Corrupt`
/// if it has to be repaired first; any error of the store. In all but the last case the image is
/// unchanged.
pub async fn amend(images: &dyn Images, path: &Path, wanted: &Amendment) -> Result<Header> {
    let (image, header) = open_for_change(images, path).await?;
    let step = async {
        let next = wanted.applied_to(&header)?;
        if let Some(name) = wanted.data_file.as_ref() {
            images.open(&images.resolve(path, &parse_data_file_name(name)?)?)?;
        }
        let amender = Amender { image, header };
        let checked = amender.check(&next).await?;
        amender.make(next, checked).await
    };
    step.await.map_err(|error: Error| error.wrap(path.display().to_string()))
}

impl Amendment {
    /// The header of an image that has `header`.
    pub(crate) fn applied_to(&self, header: &Header) -> Result<Header> {
        let mut next = header.clone();
        // They name a redo log, which has been replayed.
        next.autoclear.unknown = 0;
        if let Some(version) = self.version {
            next.version = version;
        }
        if let Some(lazy) = self.lazy_refcounts {
            next.compatible.lazy_refcounts = lazy;
        }
        if let Some(width) = self.refcount_width {
            next.refcount_width = width;
        }
        if let Some(format) = &self.backing_format {
            let Some(backing) = &mut next.backing else {
                return Err(invalid("backing_fmt: the image has no backing file"));
            };
            if let Some(known) = backing.format.as_ref().filter(|known| *known != format) {
                return Err(invalid(&format!(
                    "backing_fmt: the image says {known}, and would show something else: if that \
                     is wrong, `mica rebase -u -b FILE -F {format}` changes it"
                )));
            }
            backing.format = Some(format.clone());
        }
        if self.data_file.is_some() || self.data_file_raw == Some(true) {
            if !next.incompatible.external_data_file {
                return Err(invalid(
                    "data_file, data_file_raw: the data of the image is in the image: `mica convert \
                     -o data_file=...` makes one whose data is elsewhere",
                ));
            }
            if self.data_file_raw == Some(true) && !next.autoclear.raw_external {
                return Err(invalid(
                    "data_file_raw=on: the data file is no raw disk, and does not become one: `mica \
                     convert -o data_file=...,data_file_raw=on` makes one",
                ));
            }
        }
        if let Some(name) = &self.data_file {
            next.data_file_name = Some(name.clone());
        }
        next.autoclear.raw_external &= self.data_file_raw != Some(false);
        match next.version {
            Version::V2 => self.make_plain(&mut next)?,
            Version::V3 if header.version == Version::V2 => {
                next.feature_names = FeatureName::known();
            }
            Version::V3 => {}
        }
        Ok(next)
    }

    /// Leaves out what version 2 has no place for, if nothing is lost by that.
    fn make_plain(&self, next: &mut Header) -> Result<()> {
        let refuse = |what: &str| Err(Error::new(ErrorKind::Unsupported, format!("v2: {what}")));
        let wants = |wish: Option<bool>| wish == Some(true);
        if wants(self.lazy_refcounts) {
            return refuse("lazy_refcounts needs version 3: add compat=1.1");
        }
        if next.refcount_width != RefcountWidth::DEFAULT {
            return refuse(
                "refcounts have 16 bits in version 2: add refcount_bits=16 or compat=1.1",
            );
        }
        if next.incompatible.external_data_file {
            return refuse("an image of version 2 has no data file: `mica convert` makes a copy");
        }
        if next.incompatible.extended_l2 {
            return refuse("an image of version 2 has no subclusters: `mica convert` makes a copy");
        }
        if next.compression != Compression::Deflate {
            return refuse("only zlib compresses in version 2: `mica convert -c` makes a copy");
        }
        if next.bitmaps.is_some() {
            return refuse(
                "it has no bitmaps: `mica bitmap --remove` removes those that there are",
            );
        }
        next.compatible = Default::default();
        next.autoclear = Default::default();
        next.feature_names.clear();
        next.unknown_tail.clear();
        next.stale_bitmaps = false;
        Ok(())
    }
}

/// An image that is changed.
pub(crate) struct Amender {
    pub(crate) image: OpenImage,
    pub(crate) header: Header,
}

/// The image can get the header that was asked about.
pub(crate) struct Checked {
    /// Tables with marks that the new version does not know.
    marked: Vec<HostOffset>,
}

impl Amender {
    /// Whether the image can get the header `next` (I2).
    pub(crate) async fn check(&self, next: &Header) -> Result<Checked> {
        // Whether there is room for it; only places and the width change from here on.
        self.plan(next).await?;
        let is_older = next.version < self.header.version;
        let has_other_width = next.refcount_width != self.header.refcount_width;
        if is_older || has_other_width {
            self.check_soundness().await?;
        }
        if has_other_width {
            self.check_refcounts(next).await?;
        }
        if next.version > self.header.version {
            self.check_snapshots().await?;
        }
        let marked = match is_older {
            true => zeros::find(self.store(), &self.header).await?,
            false => Vec::new(),
        };
        Ok(Checked { marked })
    }

    /// Gives the image the header `next`, but for the places of what is written for it.
    pub(crate) async fn make(self, mut next: Header, checked: Checked) -> Result<Header> {
        zeros::clear(self.store(), &self.header, &checked.marked).await?;
        if next.refcount_width != self.header.refcount_width {
            next = write_refcounts(Arc::clone(&self.image.store), &next).await?;
        }
        let HeaderChange { name, sector } = self.plan(&next).await?;
        for (at, bytes) in name.into_iter().chain([(0, sector)]) {
            let at = HostOffset::new(at as u64);
            write_all(self.store(), Buf::from_slice(&bytes), at).await?;
            self.store().sync().await?;
        }
        Ok(next)
    }

    async fn plan(&self, next: &Header) -> Result<HeaderChange> {
        let len = usize::try_from(next.cluster_bits.bytes()).expect("2 MiB");
        let cluster = read_exact(self.store(), HostOffset::ZERO, len).await?;
        HeaderChange::plan(&cluster, next)
    }

    /// Tables that contradict each other are not changed.
    async fn check_soundness(&self) -> Result<()> {
        let store = Arc::clone(&self.image.store);
        let report = check(store, &self.header, &mut |_: Finding| {}).await?;
        if report.corruptions > 0 || report.check_errors > 0 {
            let what = "the image is damaged: `mica check -r all` repairs it";
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        Ok(())
    }

    /// Whether each refcount finds room in the width of `next`.
    async fn check_refcounts(&self, next: &Header) -> Result<()> {
        let mut overflows = false;
        let observer = &mut |finding: Finding| {
            overflows |= matches!(finding, Finding::TooManyReferences { .. });
        };
        count(Arc::clone(&self.image.store), next, Task::WithoutRefcounts, observer).await?;
        if overflows {
            let bits = next.refcount_width.bits();
            return Err(invalid(&format!(
                "refcount_bits={bits}: clusters are shared more often than such refcounts count, by \
                 internal snapshots or compressed clusters"
            )));
        }
        Ok(())
    }

    /// Whether each snapshot says what version 3 requires, which old programs left out of an image
    /// of version 2.
    async fn check_snapshots(&self) -> Result<()> {
        let snapshots = list(self.store(), &self.header, usize::MAX).await?;
        let is_incomplete = |entry: &&SnapshotEntry| entry.extra_bytes < SNAPSHOT_EXTRA_BYTES_MIN;
        let Some(first) = snapshots.iter().find(is_incomplete) else { return Ok(()) };
        let what = format!(
            "v3: the snapshot {:?} does not say how long its disk is, which version 3 requires: \
             `mica snapshot -d` deletes it, `qemu-img amend` completes it",
            first.name
        );
        Err(Error::new(ErrorKind::Unsupported, what))
    }

    fn store(&self) -> &dyn Store {
        &*self.image.store
    }
}

fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::Invalid, what)
}

#[cfg(test)]
mod tests;
