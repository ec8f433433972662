//! Makes the disk of an image longer while it is being served.
//!
//! ```text
//! room in the L1 table ─▶ the new part is there for this process ─▶ zeros where something would
//! show ─▶ flush ─▶ the size in the header ─▶ the new part is there for everybody
//! ```
//!
//! Invariants
//! - I1 The header names an L1 table only when that table and the counts of its clusters are
//!   durable. No entry changes while the table is copied, and it is copied when all its entries are
//!   durable.
//! - I2 The header gets the new size only when everything in the new part is zeros for good,
//!   whatever a longer layer beneath has there, and whatever the image kept from a time when it was
//!   longer. QEMU does the same (`block_resize`, `qemu-img resize`).
//! - I3 A power cut leaves the old size or the new one; at worst clusters leak.
//! - I4 An error leaves the disk at its old length.

use super::Writer;
use super::allocate::Reserved;
use super::header::HeaderChange;
use super::pages::Metadata;
use crate::header_io::read_header;
use crate::l1_place::table_bytes;
use crate::redo::Stage;
use mica_block::{Error, ErrorKind, Result, Zeroes, check_longer, read_exact, write_all};
use mica_qcow2_format::{Header, Version};
use mica_rt::{Buf, Pace};
use mica_units::{GuestOffset, GuestRange, HostOffset};

/// Size of the pieces in which the new part is examined.
const WINDOW_BYTES: u64 = 32 << 20;
/// Number of its parts zeroed before other tasks get a turn.
const PARTS_PER_TURN: u64 = 16;

/// In the search for a run, clusters that may be skipped for each one wanted, and in addition.
const PASSED_PER_CLUSTER: u64 = 4;
const PASSED_MIN: u64 = 4096;

/// Whether nothing of an image but its length would have to change.
///
/// # Errors
/// `Unsupported` if more would.
pub fn check_resizable(header: &Header) -> Result<()> {
    let refuse = |what: &str| Err(Error::new(ErrorKind::Unsupported, what));
    if header.snapshot_count > 0 && header.version == Version::V2 {
        return refuse("Can't resize a v2 image which has snapshots");
    }
    if header.incompatible.external_data_file && header.snapshot_count > 0 {
        return refuse("the image keeps its data in an external file, and has snapshots");
    }
    Ok(())
}

impl Writer {
    /// Makes the disk `len` bytes long.
    pub(crate) async fn grow(&self, len: u64) -> Result<()> {
        self.check_usable()?;
        let _growing = self.growing.lock().await;
        let old = self.map.len();
        check_longer(old, len)?;
        if old == len {
            return Ok(());
        }
        let header = read_header(&*self.layer.store).await?;
        check_resizable(&header)?;
        if header.incompatible.external_data_file {
            let what = "an image with a data file can grow only while nobody uses it";
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let entries = header.l1_entries_for(len)?;
        self.mark_in_use().await?;
        self.note_change();
        self.grow_l1(entries).await?;
        let bitmaps = self.lengthen_bitmaps(len).await?;
        {
            // A request that takes the last cluster for a whole one, as the disk ends in it, is
            // done or sees the new length.
            let last = self.l2.cluster_bits.guest_cluster(GuestOffset::new(old));
            let _claimed = self.claim_clusters(last, last).await;
            self.map.set_len(len);
        }
        let grown = async {
            self.zero_new(old, len).await?;
            self.flush().await?;
            self.metadata.change_header(&self.space, HeaderChange::Size(len)).await
        };
        if let Err(error) = grown.await {
            self.map.set_len(old);
            // If the header was not written, nobody knows which length it says: the next process to
            // open the image finds tables for either, and flagged.
            if self.check_usable().is_ok()
                && let Err(error) = self.end_growth(bitmaps, (old, old)).await
            {
                tracing::warn!(%error, "a dirty bitmap has the length that the disk did not get");
            }
            return Err(error);
        }
        let ended = self.end_growth(bitmaps, (old, len)).await;
        // The disk has its length, whatever became of its bitmaps.
        self.map.publish_len(len);
        if let Err(error) = ended {
            tracing::warn!(%error, "a dirty bitmap may lack the new part of the disk");
        }
        Ok(())
    }

    /// Zeroes what would show from `old` to `new` (I2).
    async fn zero_new(&self, old: u64, new: u64) -> Result<()> {
        let cluster_bytes = self.l2.cluster_bits.bytes();
        let end = GuestOffset::new(new);
        let mut pace = Pace::new(PARTS_PER_TURN);
        let mut at = old;
        while at < new {
            pace.steps(1).await;
            if let Some(unowned) = self.map.skip_unowned(GuestOffset::new(at), end).await? {
                at += unowned;
                continue;
            }
            let stop = (at / WINDOW_BYTES + 1).saturating_mul(WINDOW_BYTES).min(new);
            let window = GuestRange::between(GuestOffset::new(at), GuestOffset::new(stop));
            let window = window.expect("it goes on");
            let extents = self.map.plan(window).await?;
            let mut done = at;
            for extent in extents.iter().filter(|extent| !extent.kind.reads_as_zero()) {
                // In whole clusters, as an entry zeroes them at once; the bytes around are zeros
                // already.
                let (first, last) = (extent.start.bytes(), extent.range().end().bytes());
                let start = (first / cluster_bytes * cluster_bytes).max(done);
                let end = last.next_multiple_of(cluster_bytes).min(stop);
                let part = GuestRange::between(GuestOffset::new(start), GuestOffset::new(end));
                if let Some(part) = part.filter(|part| !part.is_empty()) {
                    self.zero_range(part, Zeroes { may_unmap: true, fast: false }).await?;
                    done = end;
                    pace.steps(1).await;
                }
            }
            at = stop;
        }
        Ok(())
    }
}

impl Writer {
    /// Gives the L1 table at least `entries` entries.
    async fn grow_l1(&self, entries: u32) -> Result<()> {
        let (at, before) = self.l1_place.get();
        if entries <= before {
            return Ok(());
        }
        self.metadata.ranges.check_table(at)?;
        let bits = self.l2.cluster_bits;
        let (old, new) = (table_bytes(before), table_bytes(entries));
        let has_place = at != HostOffset::ZERO;
        if has_place && bits.clusters_for(new) == bits.clusters_for(old) {
            self.lengthen_l1(at, old..new).await?;
            self.metadata.change_header(&self.space, HeaderChange::L1(at, entries)).await?;
            self.l1_place.set(at, entries);
            self.metadata.ranges.remove(at);
            self.metadata.ranges.add(at, new, "the L1 table");
            return Ok(());
        }
        self.move_l1(entries).await
    }

    /// Clears the rest of the table's last cluster, for good.
    async fn lengthen_l1(&self, table: HostOffset, new: std::ops::Range<u64>) -> Result<()> {
        let page_bytes = self.metadata.lock().page_bytes();
        let mut at = table.bytes() + new.start;
        let end = table.bytes() + new.end;
        while at < end {
            let stop = ((at / page_bytes + 1) * page_bytes).min(end);
            let (place, len) = (HostOffset::new(at), len_of(stop - at));
            let clear = self.metadata.change(place, |pages| {
                // Late: links may be put into the same page, and must not be durable before.
                pages.get_mut(place, len, Stage::Late).expect("the page is there").fill(0);
            });
            clear.await?;
            at = stop;
        }
        self.flush().await
    }

    /// Moves the table to another place, with room for `entries` (I1).
    async fn move_l1(&self, entries: u32) -> Result<()> {
        let _moving = self.l1_moves.lock().await;
        let _held = Held::new(&self.metadata);
        self.flush().await?;
        let bits = self.l2.cluster_bits;
        let store = &*self.metadata.store;
        let (old_at, before) = self.l1_place.get();
        let count = bits.clusters_for(table_bytes(entries));
        let len = bits.bytes_of(count);
        let mut table = Buf::zeroed(len_of(len));
        let known = read_exact(store, old_at, len_of(table_bytes(before))).await?;
        table.put(0, &known);
        let what =
            "a longer L1 table in one piece: `mica resize` finds it while nobody uses the image";
        let run = self.reserve_run(count, what).await?;
        let at = bits.start_of(run.first);
        let written = async {
            self.metadata.ranges.check(at, len)?;
            self.metadata.lock().drop_cluster(at, len);
            write_all(store, table, at).await?;
            self.flush().await
        };
        if let Err(error) = written.await {
            self.space.give_back(run);
            return Err(error);
        }
        self.metadata.change_header(&self.space, HeaderChange::L1(at, entries)).await?;
        let mut pages = self.metadata.lock();
        self.l1_place.set(at, entries);
        if old_at != HostOffset::ZERO {
            let old_count = bits.clusters_for(table_bytes(before));
            pages.drop_cluster(old_at, bits.bytes_of(old_count));
            let first = bits.host_cluster(old_at);
            pages.group.freed.extend(first.up_to(first.saturating_add(old_count)));
            self.metadata.ranges.remove(old_at);
        }
        self.metadata.ranges.add(at, table_bytes(entries), "the L1 table");
        Ok(())
    }

    /// Waits until the L1 table has its final place, if it is being moved.
    pub(super) async fn l1_moved(&self) {
        drop(self.l1_moves.lock().await);
    }

    /// Takes `count` contiguous clusters. `what` they are for, and what helps if the free space is
    /// too fragmented, is said then.
    pub(super) async fn reserve_run(&self, count: u64, what: &str) -> Result<Reserved> {
        let mut run: Option<Reserved> = None;
        let mut passed = Vec::new();
        let mut looked_at = 0;
        let found = loop {
            match run {
                Some(run) if run.count >= count => break Ok(run),
                _ if looked_at > count * PASSED_PER_CLUSTER + PASSED_MIN => {
                    let context = format!("the file has no room for {what}");
                    break Err(Error::new(ErrorKind::NoSpace, context));
                }
                _ => {}
            }
            let wanted = count - run.map_or(0, |run| run.count);
            let next = match self.space.reserve(wanted).await {
                Ok(next) => next,
                Err(error) => break Err(error),
            };
            looked_at += next.count;
            match &mut run {
                Some(run) if run.end() == next.first => {
                    run.count += next.count;
                    run.group = run.group.max(next.group);
                }
                run => passed.extend(run.replace(next)),
            }
        };
        if found.is_err() {
            passed.extend(run);
        }
        passed.into_iter().for_each(|passed| self.space.give_back(passed));
        found
    }
}

/// While this lives, no L1 entry changes.
pub(super) struct Held<'a>(&'a Metadata);

impl<'a> Held<'a> {
    pub(super) fn new(metadata: &'a Metadata) -> Self {
        metadata.lock().l1_is_held = true;
        Self(metadata)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.lock().l1_is_held = false;
    }
}

/// A length that was checked to be small enough.
pub(super) fn len_of(len: u64) -> usize {
    usize::try_from(len).expect("a table fits the memory")
}
