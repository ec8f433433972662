//! The repair of an image: what `qemu-img check -r` does, and what opening a dirty image for
//! writing needs.
//!
//! The tables that map the disk are the truth; refcounts, and the flags that follow from them, are
//! made to fit. What the guest reads does not change.
//!
//! - I1. A power cut at any point leaves an image that can be repaired again and reads the same.
//!   Each step is durable before the next begins, and no step needs more than those before it.
//! - I2. Refcounts that cannot be corrected in place are rebuilt in clusters that nothing names;
//!   the header names them in one sector, once they are durable.
//! - I3. Clusters beyond the end of the file that something names are claimed: the file is extended
//!   over them, so that none of them is used for anything else.
//! - I4. Memory, time and growth are bounded by the length of the file, not by what a header or an
//!   entry claims.
//! - I5. The dirty and corrupt bits are cleared last, and only if a check of the whole image finds
//!   no corruption any more.
//!
//! ```text
//! count ─▶ entries, the lost tail, snapshots                check::mend, grow, snapshots
//!       ─▶ refcounts: in place, or rebuilt                    refcounts, rebuild
//!       ─▶ flags "refcount is one"                            check::mend
//!       ─▶ check ─▶ bits                                      header
//! ```

mod grow;
mod header;
mod rebuild;
mod refcounts;
mod snapshots;
mod watch;

pub(crate) use rebuild::write_refcounts;
pub(crate) use refcounts::{Which, rewrite};

use crate::check::{CheckReport, Counted, Finding, Kept, Observer, Task, check, count};
use mica_block::{Error, ErrorKind, Images, LocalFuture, OpenImage, Result, Store};
use mica_qcow2::{read_header, read_header_as, replay_redo_log, settle_bitmaps};
use mica_qcow2_format::Header;
use std::path::Path;
use std::sync::Arc;
use watch::{Found, Watch};

/// How many times a repair starts over with what it left.
const ROUNDS_MAX: u32 = 3;

/// The extent of a repair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RepairMode {
    /// Refcounts that are too high.
    Leaks,
    /// Everything that can be repaired.
    All,
}

/// How much was repaired.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Repaired {
    /// Clusters that were not in use and can be used again.
    pub leaks: u64,
    /// Contradictions that were resolved.
    pub corruptions: u64,
}

/// What a repair found, did and left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Repair {
    /// The check before.
    pub before: CheckReport,
    /// What was done.
    pub repaired: Repaired,
    /// The check afterwards; the one before if nothing was done.
    pub after: CheckReport,
}

/// Opens the image at `path` for a change of its metadata: exclusively, with what its last writer
/// left put into it, and repaired if that did not close it. Returns its header, too.
///
/// # Errors
/// If it is not an image that can be written, or it cannot be repaired.
pub(crate) async fn open_for_change(
    images: &dyn Images,
    path: &Path,
) -> Result<(OpenImage, Header)> {
    // What keeps it from being opened is said with its name.
    let image = images.open_writable(path)?;
    let step = async {
        replay_redo_log(images, path, &*image.store).await?;
        let header = read_header(&*image.store).await?;
        let mut header = settle_bitmaps(&*image.store, header).await?;
        if header.incompatible.dirty || header.incompatible.corrupt {
            header = repair_dirty(Arc::clone(&image.store), &header).await?;
        }
        Ok((image, header))
    };
    step.await.map_err(|error: Error| error.wrap(path.display().to_string()))
}

/// Opens the image at `path` for [`repair`].
///
/// # Errors
/// If it is not a qcow2 image that can be checked, or it cannot be written.
pub async fn open_for_repair(images: &dyn Images, path: &Path) -> Result<(OpenImage, Header)> {
    // What keeps it from being opened is said with its name.
    let image = images.open_writable(path)?;
    let step = async {
        replay_redo_log(images, path, &*image.store).await?;
        // A repair clears the bits that say which bitmaps are true. What is wrong with the header
        // is found below.
        if let Ok(header) = read_header(&*image.store).await {
            settle_bitmaps(&*image.store, header).await?;
        }
        let header = read_header_as(&*image.store, Header::decode_for_check).await?;
        Ok((image, header))
    };
    step.await.map_err(|error: Error| error.wrap(path.display().to_string()))
}

/// Repairs the image in `store`, whose header is `header` as returned by
/// [`Header::decode_for_check`]. The findings of the first check, and of the last, are passed to
/// `observer`.
///
/// # Errors
/// As [`check`]; `Corrupt` if only leaks are to be repaired and the refcounts are so broken that
/// they must be rebuilt; `Limit` if there is no room for that; any failure of a write or a sync.
pub async fn repair(
    store: Arc<dyn Store>,
    header: &Header,
    mode: RepairMode,
    observer: &mut dyn Observer,
) -> Result<Repair> {
    let mut repairer = Repairer::new(store, header, mode);
    Ok(repairer.run(observer).await?.0)
}

/// Repairs an image that its last writer did not close, before it is opened for writing. Returns
/// its header after that.
///
/// QEMU opens even what it could not wholly repair. Here an image is refused if a write could still
/// do damage: if a cluster has more users than its refcount can hold, or tables name clusters far
/// beyond the end of the file. Other corruptions are left as they are, and the image stays dirty.
///
/// # Errors
/// As [`repair`]; `Corrupt` for what is refused.
pub async fn repair_dirty(store: Arc<dyn Store>, header: &Header) -> Result<Header> {
    if header.incompatible.corrupt {
        return Err(Error::new(
            ErrorKind::Corrupt,
            "the image is marked corrupt and cannot be opened for writing; repair it with \
             `mica check -r all`",
        ));
    }
    let mut repairer = Repairer::new(store, header, RepairMode::All);
    let (repair, left) = repairer.run(&mut |_: Finding| {}).await?;
    if left.unsafe_to_write() || repair.after.check_errors > 0 {
        return Err(Error::new(
            ErrorKind::Corrupt,
            "the image was not closed and could not be repaired: `mica check` lists what is left",
        ));
    }
    Ok(repairer.header)
}

/// As [`repair_dirty`], in the form of [`ChainOptions::repair`](mica_qcow2::ChainOptions::repair).
pub fn repair_for_opening(
    store: Arc<dyn Store>,
    header: Header,
) -> LocalFuture<'static, Result<Header>> {
    Box::pin(async move { repair_dirty(store, &header).await })
}

/// A repair in progress.
struct Repairer {
    store: Arc<dyn Store>,
    header: Header,
    mode: RepairMode,
    repaired: Repaired,
}

impl Repairer {
    fn new(store: Arc<dyn Store>, header: &Header, mode: RepairMode) -> Self {
        Self { store, header: header.clone(), mode, repaired: Repaired::default() }
    }

    /// Returns what was done and what is left.
    async fn run(&mut self, observer: &mut dyn Observer) -> Result<(Repair, Found)> {
        let (counted, found) = self.count(observer).await?;
        let before = counted.report;
        let broken = found.needs_rebuild || counted.kept.shared_block;
        if self.mode == RepairMode::Leaks && broken {
            return Err(Error::new(
                ErrorKind::Corrupt,
                "the refcount structure must be rebuilt, which `check -r all` does",
            ));
        }
        let is_clean = before.corruptions == 0 && before.check_errors == 0;
        if is_clean && before.leaks == 0 {
            // Marks may still be set.
            self.clear_marks().await?;
            return Ok((Repair { before, repaired: self.repaired, after: before }, found));
        }
        self.clear_autoclear().await?;
        let (mut counted, mut found) = (counted, found);
        let mut rounds = 1;
        loop {
            self.mend_all(counted, found).await?;
            let mut watch = Watch { observer, found: Found::default() };
            let after = check(Arc::clone(&self.store), &self.header, &mut watch).await?;
            let left = watch.found;
            // If a table names the header as a table, writing changes what is counted.
            if self.mode == RepairMode::All && left.repairable() && rounds < ROUNDS_MAX {
                rounds += 1;
                (counted, found) = self.count(&mut |_: Finding| {}).await?;
                continue;
            }
            if after.corruptions == 0 && after.check_errors == 0 {
                self.clear_marks().await?;
            }
            return Ok((Repair { before, repaired: self.repaired, after }, left));
        }
    }

    /// Everything that can be corrected, once.
    async fn mend_all(&mut self, counted: Counted, found: Found) -> Result<()> {
        let (counted, found) = match self.mode {
            RepairMode::Leaks => (counted, found),
            RepairMode::All => self.mend_all_but_refcounts(counted, found).await?,
        };
        let repaired_before = self.repaired;
        let kept = self.mend_refcounts(counted, &found).await?;
        let flags_may_be_wrong = found.flags > 0 || self.repaired != repaired_before;
        // As in QEMU: a flag cannot be judged by wrong refcounts.
        let flags_can_be_judged = self.mode == RepairMode::All || !found.more_than_flags();
        if flags_may_be_wrong && flags_can_be_judged {
            self.mend(Task::MendFlags(&kept.places)).await?;
        }
        Ok(())
    }

    async fn count(&self, observer: &mut dyn Observer) -> Result<(Counted, Found)> {
        let mut watch = Watch { observer, found: Found::default() };
        let counted = count(Arc::clone(&self.store), &self.header, Task::Keep, &mut watch).await?;
        Ok((counted, watch.found))
    }

    /// Corrects the entries and snapshots that QEMU corrects, and makes room for a lost tail.
    /// Counts again if it did anything.
    async fn mend_all_but_refcounts(
        &mut self,
        counted: Counted,
        found: Found,
    ) -> Result<(Counted, Found)> {
        let (mut counted, mut found) = (counted, found);
        let mut ignore = |_: Finding| {};
        if found.mendable_entries {
            self.mend(Task::MendEntries(&counted.kept.places)).await?;
            (counted, found) = self.count(&mut ignore).await?;
        }
        if let Some(len) = grow::wanted_len(&self.header, &counted) {
            let beyond = found.beyond;
            self.store.set_len(len).await?;
            self.store.sync().await?;
            (counted, found) = self.count(&mut ignore).await?;
            self.repaired.corruptions += beyond.saturating_sub(found.beyond);
        }
        let incomplete = found.incomplete_snapshots;
        if incomplete > 0 {
            self.header = snapshots::complete(&*self.store, &self.header, &counted).await?;
            (counted, found) = self.count(&mut ignore).await?;
            self.repaired.corruptions += incomplete.saturating_sub(found.incomplete_snapshots);
        }
        Ok((counted, found))
    }

    /// Sets the refcounts to what was counted. Returns the resulting places of everything.
    async fn mend_refcounts(&mut self, counted: Counted, found: &Found) -> Result<Kept> {
        let is_rebuilt = self.mode == RepairMode::All
            && (found.broken_structure > 0 || rebuild::is_needed(&self.header, &counted));
        if is_rebuilt {
            let differences = refcounts::differences(&*self.store, &counted).await?;
            self.repaired.leaks += differences.leaks;
            self.repaired.corruptions += differences.corruptions + found.broken_structure;
            drop(counted);
            let (header, kept) = rebuild::rebuild(Arc::clone(&self.store), &self.header).await?;
            self.header = header;
            return Ok(kept);
        }
        let done = refcounts::correct(&*self.store, &counted, self.mode).await?;
        self.store.sync().await?;
        self.repaired.leaks += done.leaks;
        self.repaired.corruptions += done.corruptions;
        Ok(counted.kept)
    }

    /// Walks over the image and writes the entries that are subject to `task`.
    async fn mend(&mut self, task: Task<'_>) -> Result<()> {
        let ignore = &mut |_: Finding| {};
        let counted = count(Arc::clone(&self.store), &self.header, task, ignore).await?;
        if counted.mended > 0 {
            self.store.sync().await?;
        }
        self.repaired.corruptions += counted.mended;
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests;
