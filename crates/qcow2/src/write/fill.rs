//! Selective copy-on-write: which bytes a write puts in a new place, and in how few operations.
//!
//! In a unit (a subcluster, or a cluster if it has none) that gets a place, the guest's bytes are
//! written and the rest is filled with what currently shows there. Zeros are written only if the
//! place is not blank, or a sequence of writes is expected there
//! ([`Streams`](super::streams::Streams)), and a unit that the guest wrote whole is not looked at.

use super::Writer;
use super::gather::Guest;
use super::plan::ClusterPlan;
use super::unreadable;
use mica_block::{Error, Extent, Result};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, HostOffset};
use smallvec::SmallVec;
use std::sync::atomic::Ordering;

/// Guest data of at least this length is written without a copy. Shorter data is copied together
/// with the fill beside it, which saves a write.
const GUEST_ALONE_BYTES: u64 = 64 << 10;
/// What is copied is read at once with the guest's own bytes in between, if these are no more: they
/// cost less than a second read.
const READ_BETWEEN_MAX: u64 = 16 << 10;

/// Where bytes come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Source {
    Guest,
    Zeros,
    /// What shows at this guest offset.
    Visible(GuestOffset),
}

/// Bytes that go to one place.
#[derive(Clone, Copy, Debug)]
struct Part {
    host: HostOffset,
    len: u64,
    source: Source,
}

/// What was read for a batch of neighbouring parts.
enum Visible {
    /// Each part that is copied, in order.
    Parts(Vec<Buf>),
    /// What shows where all of them are, the guest's included: the batch as it was.
    Whole(Buf),
}

/// Everything that a transaction writes, in the guest's order.
#[derive(Default)]
pub(super) struct Parts {
    parts: SmallVec<[Part; 1]>,
}

impl Parts {
    /// Plans the fills of writes to `ranges`, in rising order, on a disk of `disk_len` bytes.
    ///
    /// # Errors
    /// What the system reports when a device is asked for its length.
    pub(super) fn plan(
        writer: &Writer,
        disk_len: u64,
        ranges: &[GuestRange],
        plans: &[ClusterPlan],
        visible: &[Extent],
    ) -> Result<Self> {
        let mut parts = Self::default();
        for plan in plans {
            parts.plan_cluster(writer, disk_len, ranges, plan, visible)?;
        }
        Ok(parts)
    }

    fn plan_cluster(
        &mut self,
        writer: &Writer,
        disk_len: u64,
        ranges: &[GuestRange],
        plan: &ClusterPlan,
        visible: &[Extent],
    ) -> Result<()> {
        let start = writer.l2.cluster_bits.start_of(plan.entry.cluster).bytes();
        let unit_bytes = writer.l2.subcluster_bytes();
        for unit in 0..writer.units() {
            let unit_start = start + u64::from(unit) * unit_bytes;
            let whole = GuestRange::new(GuestOffset::new(unit_start), unit_bytes);
            let Some(whole) = whole else { continue };
            let written = ranges.iter().filter_map(|range| whole.intersect(*range));
            let host = |at: GuestOffset| {
                plan.host.checked_add(at.bytes() - start).expect("within a cluster of the file")
            };
            if plan.must & (1 << unit) == 0 {
                for written in written {
                    self.push(host(written.start()), written.len(), Source::Guest);
                }
                continue;
            }
            let mut at = whole.start();
            let skips_zeros = plan.blank && !plan.is_solid;
            for written in written {
                self.fill(GuestRange::between(at, written.start()), skips_zeros, visible, host);
                self.push(host(written.start()), written.len(), Source::Guest);
                at = written.end();
            }
            // Nothing shows beyond the end of the disk; zeros, in case it grows one day.
            let end = GuestOffset::new(whole.end().bytes().min(disk_len)).max(at);
            self.fill(GuestRange::between(at, end), skips_zeros, visible, host);
            if !plan.blank && end < whole.end() {
                let tail = whole.end().bytes() - end.bytes();
                self.push(host(end), writer.cut_at_end(host(end), tail)?, Source::Zeros);
            }
        }
        Ok(())
    }

    /// Fills `range` with what currently shows there.
    fn fill(
        &mut self,
        range: Option<GuestRange>,
        skips_zeros: bool,
        visible: &[Extent],
        host: impl Fn(GuestOffset) -> HostOffset,
    ) {
        let Some(range) = range.filter(|range| !range.is_empty()) else { return };
        for part in visible.iter().filter_map(|extent| extent.within(range)) {
            match part.kind.reads_as_zero() {
                true if skips_zeros => {}
                true => self.push(host(part.start), part.len, Source::Zeros),
                false => self.push(host(part.start), part.len, Source::Visible(part.start)),
            }
        }
    }

    /// Appends a part, joined to the last one if it continues it.
    fn push(&mut self, host: HostOffset, len: u64, source: Source) {
        if len == 0 {
            return;
        }
        if let Some(last) = self.parts.last_mut() {
            let goes_on = last.host.checked_add(last.len) == Some(host);
            let same = match (last.source, source) {
                (Source::Guest, Source::Guest) | (Source::Zeros, Source::Zeros) => true,
                (Source::Visible(one), Source::Visible(next)) => {
                    one.checked_add(last.len) == Some(next)
                }
                _ => false,
            };
            if goes_on && same {
                last.len += len;
                return;
            }
        }
        self.parts.push(Part { host, len, source });
    }

    /// The parts, grouped so that each group is a single write.
    fn batches(&self) -> impl Iterator<Item = &[Part]> {
        self.parts.chunk_by(|one, next| {
            let alone = |part: &Part| part.source == Source::Guest && part.len >= GUEST_ALONE_BYTES;
            one.host.checked_add(one.len) == Some(next.host) && !alone(one) && !alone(next)
        })
    }
}

impl Writer {
    /// How many of the `len` bytes at `host` there is a place for: the end of a device with the
    /// data may be within the last cluster, as that of the disk.
    fn cut_at_end(&self, host: HostOffset, len: u64) -> Result<u64> {
        if !self.layer.data_is_device {
            return Ok(len);
        }
        Ok(len.min(self.data.len()?.saturating_sub(host.bytes())))
    }

    /// Writes the parts.
    pub(super) async fn write_parts(&self, parts: Parts, mut guest: Guest) -> Result<()> {
        let mut visible = match parts.batches().any(copies_anything) {
            true => Box::pin(self.read_all_visible(&parts)).await?,
            false => Vec::new(),
        }
        .into_iter();
        let mut batches = parts.batches().map(|batch| {
            let bytes = match batch {
                [Part { source: Source::Guest, len, .. }] => guest.take(bytes_len(*len)),
                batch if copies_anything(batch) => {
                    let visible = visible.next().expect("each was read");
                    self.assemble(batch, &mut guest, visible)
                }
                batch => self.assemble(batch, &mut guest, Visible::Parts(Vec::new())),
            };
            (batch[0].host, bytes)
        });
        let Some((host, bytes)) = batches.next() else { return Ok(()) };
        let others: Vec<_> = batches.collect();
        // Nothing fallible lies between the first write and the wait for all of them: clusters are
        // returned only when no write to them is in flight.
        let first = self.data.write_at(bytes, host);
        let failed = |error: Error| error.wrap(self.data.name());
        if others.is_empty() {
            return first.await.0.map_err(failed);
        }
        let others = others.into_iter().map(|(host, bytes)| self.data.write_at(bytes, host));
        let writes = std::iter::once(first).chain(others);
        let done = Box::pin(mica_rt::join_all(writes)).await;
        done.into_iter().try_for_each(|(result, _)| result.map_err(failed))
    }

    /// Reads all that is copied, for each batch that copies anything.
    async fn read_all_visible(&self, parts: &Parts) -> Result<Vec<Visible>> {
        let batches = parts.batches().filter(|batch| copies_anything(batch));
        let reads = batches.map(|batch| self.read_batch(batch));
        mica_rt::join_all(reads).await.into_iter().collect()
    }

    async fn read_batch(&self, batch: &[Part]) -> Result<Visible> {
        if let Some((start, len)) = span(batch)
            && let Ok(whole) = self.read_visible(start, len).await
        {
            self.counters.copied_read_bytes.fetch_add(len, Ordering::Relaxed);
            return Ok(Visible::Whole(whole));
        }
        // Also if something in between cannot be read, which the guest is about to replace.
        let reads = batch.iter().filter_map(|part| match part.source {
            Source::Visible(start) => Some(self.read_visible(start, part.len)),
            Source::Guest | Source::Zeros => None,
        });
        let parts: Vec<Buf> = mica_rt::join_all(reads).await.into_iter().collect::<Result<_>>()?;
        let read: usize = parts.iter().map(Buf::len).sum();
        self.counters.copied_read_bytes.fetch_add(read as u64, Ordering::Relaxed);
        Ok(Visible::Parts(parts))
    }

    /// Reads what shows at `start`.
    async fn read_visible(&self, start: GuestOffset, len: u64) -> Result<Buf> {
        let read = async {
            let extents = self.map.extents_at(start, len).await?;
            self.map.read_extents(extents).await
        };
        read.await.map_err(unreadable)
    }

    /// The bytes of neighbouring parts in one buffer.
    fn assemble(&self, batch: &[Part], guest: &mut Guest, visible: Visible) -> Buf {
        let total: u64 = batch.iter().map(|part| part.len).sum();
        let (mut bytes, parts) = match visible {
            Visible::Whole(whole) => (whole, None),
            Visible::Parts(parts) => (Buf::new(bytes_len(total)), Some(parts)),
        };
        let is_whole = parts.is_none();
        let mut parts = parts.into_iter().flatten();
        let mut at = 0;
        let mut filled = 0;
        for part in batch {
            let len = bytes_len(part.len);
            let to = at..at + len;
            at += len;
            filled += if part.source == Source::Guest { 0 } else { part.len };
            match part.source {
                Source::Guest => guest.copy_to(&mut bytes.own_bytes()[to]),
                Source::Zeros => bytes.fill_part(to, 0),
                Source::Visible(_) if is_whole => {}
                Source::Visible(_) => {
                    bytes.put(to.start, &parts.next().expect("each was read"));
                }
            }
        }
        self.counters.copied_written_bytes.fetch_add(filled, Ordering::Relaxed);
        bytes
    }
}

fn copies_anything(batch: &[Part]) -> bool {
    batch.iter().any(|part| matches!(part.source, Source::Visible(_)))
}

/// The stretch of the disk that the bytes of `batch` belong to, if all that it copies is best read
/// at once.
fn span(batch: &[Part]) -> Option<(GuestOffset, u64)> {
    let host = batch.first()?.host;
    let (mut start, mut reads, mut between) = (None, 0, 0);
    for part in batch {
        match part.source {
            Source::Zeros => return None,
            Source::Guest => between += part.len,
            Source::Visible(at) => {
                let first = at.bytes().checked_sub(part.host.checked_since(host)?)?;
                if start.is_some_and(|start| start != first) {
                    return None;
                }
                start = Some(first);
                reads += 1;
            }
        }
    }
    let len = batch.iter().map(|part| part.len).sum();
    (reads > 1 && between <= READ_BETWEEN_MAX).then_some((GuestOffset::new(start?), len))
}

fn bytes_len(len: u64) -> usize {
    usize::try_from(len).expect("a transaction's bytes")
}
