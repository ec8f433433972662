//! Selective copy-on-write: which bytes a write brings to a new place, and in how few operations.
//!
//! Of a unit (a subcluster, or a cluster where there are none) that gets a place, what the guest
//! wrote is written; the rest is filled with what shows there now. Zeros are written only where the
//! place is not blank, and a unit that the guest wrote whole is not looked at.

use super::Writer;
use super::gather::Guest;
use super::request::ClusterPlan;
use crate::chain::Chain;
use crate::layer::Layer;
use mica_block::{Detail, Disk, Extent, ExtentKind, Result};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, HostOffset, SECTOR_BYTES};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What of the guest is written without a copy, if it is at least this long. Less is copied
/// together with what is filled beside it, which saves a write.
const GUEST_ALONE_BYTES: u64 = 64 << 10;

/// How often, and for how long each time, a reader waits until a link is published.
const PUBLISH_WAITS_MAX: u32 = 10_000;
const PUBLISH_WAIT: Duration = Duration::from_millis(1);

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

/// All that a transaction writes, in the guest's order.
#[derive(Default)]
pub(super) struct Parts {
    parts: Vec<Part>,
}

impl Parts {
    /// For writes to `ranges`, in rising order, of a disk of `disk_len` bytes.
    pub(super) fn plan(
        writer: &Writer,
        disk_len: u64,
        ranges: &[GuestRange],
        plans: &[ClusterPlan],
        visible: &[Extent],
    ) -> Self {
        let mut parts = Self::default();
        for plan in plans {
            parts.plan_cluster(writer, disk_len, ranges, plan, visible);
        }
        parts
    }

    fn plan_cluster(
        &mut self,
        writer: &Writer,
        disk_len: u64,
        ranges: &[GuestRange],
        plan: &ClusterPlan,
        visible: &[Extent],
    ) {
        let start = plan.entry.cluster << writer.l2.cluster_bits.bits();
        let unit_bits = writer.l2.subcluster_bits();
        for unit in 0..writer.units() {
            let unit_start = start + (u64::from(unit) << unit_bits);
            let whole = GuestRange::new(GuestOffset::new(unit_start), 1 << unit_bits);
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
            for written in written {
                self.fill(GuestRange::between(at, written.start()), plan.blank, visible, host);
                self.push(host(written.start()), written.len(), Source::Guest);
                at = written.end();
            }
            // Beyond the end of the disk nothing shows; zeros, for the day on which it grows.
            let end = GuestOffset::new(whole.end().bytes().min(disk_len)).max(at);
            self.fill(GuestRange::between(at, end), plan.blank, visible, host);
            if !plan.blank && end < whole.end() {
                self.push(host(end), whole.end().bytes() - end.bytes(), Source::Zeros);
            }
        }
    }

    /// Fills `range` with what shows there.
    fn fill(
        &mut self,
        range: Option<GuestRange>,
        blank: bool,
        visible: &[Extent],
        host: impl Fn(GuestOffset) -> HostOffset,
    ) {
        let Some(range) = range.filter(|range| !range.is_empty()) else { return };
        for part in visible.iter().filter_map(|extent| extent.within(range)) {
            match part.kind.reads_as_zero() {
                true if blank => {}
                true => self.push(host(part.start), part.len, Source::Zeros),
                false => self.push(host(part.start), part.len, Source::Visible(part.start)),
            }
        }
    }

    /// Appends a part, joined to the last one where it goes on.
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

    /// The parts in groups that one write each can take to the file.
    fn batches(&self) -> impl Iterator<Item = &[Part]> {
        self.parts.chunk_by(|one, next| {
            let alone = |part: &Part| part.source == Source::Guest && part.len >= GUEST_ALONE_BYTES;
            one.host.checked_add(one.len) == Some(next.host) && !alone(one) && !alone(next)
        })
    }
}

impl Chain {
    /// Writes the parts.
    pub(super) async fn write_parts(
        &self,
        writer: &Writer,
        parts: Parts,
        mut guest: Guest,
    ) -> Result<()> {
        let reads = parts.parts.iter().filter_map(|part| match part.source {
            Source::Visible(start) => Some(self.read_visible(start, part.len)),
            Source::Guest | Source::Zeros => None,
        });
        let visible: Result<Vec<_>> = mica_rt::join_all(reads).await.into_iter().collect();
        let mut visible = visible?.into_iter();
        let mut ready = Vec::new();
        for batch in parts.batches() {
            let host = batch[0].host;
            let bytes = match batch {
                [Part { source: Source::Guest, len, .. }] => guest.take(bytes_len(*len)),
                batch => assemble(writer, batch, &mut guest, &mut visible),
            };
            ready.push((host, bytes));
        }
        // Nothing that may fail lies between the first write and the wait for all: clusters go
        // back only when no write to them is under way.
        let writes: Vec<_> =
            ready.into_iter().map(|(host, bytes)| writer.data.write_at(bytes, host)).collect();
        for (result, _) in mica_rt::join_all(writes).await {
            result.map_err(|error| error.wrap(writer.data.name()))?;
        }
        Ok(())
    }

    /// Reads what shows at `start`.
    async fn read_visible(&self, start: GuestOffset, len: u64) -> Result<Buf> {
        self.read_extents(self.extents_at(start, len).await?).await
    }

    /// Reads what was planned as encoded in `layer`, which is written, and failed to be read so:
    /// some of its clusters were overwritten or discarded since.
    pub(crate) async fn read_again(
        &self,
        layer: &Layer,
        start: GuestOffset,
        mut buf: Buf,
    ) -> (Result<()>, Buf) {
        let cluster_bytes =
            layer.tables.as_ref().map_or(SECTOR_BYTES, |tables| tables.l2.cluster_bits.bytes());
        let mut done = 0;
        while done < buf.len() {
            let at = GuestOffset::new(start.bytes() + done as u64);
            let left = cluster_bytes - at.bytes() % cluster_bytes;
            let count = bytes_len(left).min(buf.len() - done);
            let part = GuestRange::new(at, count as u64).expect("a part of the disk");
            match self.read_cluster_again(layer, part).await {
                Ok(visible) => buf[done..done + count].copy_from_slice(&visible),
                Err(error) => return (Err(error), buf),
            }
            done += count;
        }
        (Ok(()), buf)
    }

    /// The same for a part of one cluster. Between a link and its publication the plan is older
    /// than the entry; then both are asked again until they agree.
    async fn read_cluster_again(&self, layer: &Layer, part: GuestRange) -> Result<Buf> {
        let mut waits = 0;
        loop {
            let extents = self.extents_at(part.start(), part.len()).await?;
            if extents.iter().all(|extent| extent.kind != ExtentKind::Encoded) {
                return self.read_extents(extents).await;
            }
            let buf = Buf::new(bytes_len(part.len()));
            let (result, buf) = layer.read_deferred(part.start(), buf, &self.decoded).await;
            let Err(error) = result else { return Ok(buf) };
            let is_planned_so = layer.own_runs(part).await?.any_deferred();
            if is_planned_so || waits == PUBLISH_WAITS_MAX {
                return Err(error);
            }
            mica_rt::sleep(PUBLISH_WAIT).await;
            waits += 1;
        }
    }

    async fn extents_at(&self, start: GuestOffset, len: u64) -> Result<Vec<Extent>> {
        let range = GuestRange::new(start, len).expect("a part of the disk");
        let mut extents = Vec::new();
        self.plan(range, Detail::Read, &mut extents).finish().await?;
        Ok(extents)
    }

    async fn read_extents(&self, extents: Vec<Extent>) -> Result<Buf> {
        let len = extents.iter().map(|extent| extent.len).sum();
        let mut whole = Buf::new(bytes_len(len));
        let mut at = 0;
        for extent in extents {
            let piece_len = bytes_len(extent.len);
            let (result, piece) = self.read(&extent, Buf::new(piece_len)).await;
            result?;
            whole[at..at + piece_len].copy_from_slice(&piece);
            at += piece_len;
        }
        Ok(whole)
    }
}

/// The bytes of neighbouring parts in one buffer; `visible` has those that show, in order.
fn assemble(
    writer: &Writer,
    batch: &[Part],
    guest: &mut Guest,
    visible: &mut impl Iterator<Item = Buf>,
) -> Buf {
    let counters = &writer.counters;
    let total: u64 = batch.iter().map(|part| part.len).sum();
    let mut bytes = Buf::new(bytes_len(total));
    let mut at = 0;
    for part in batch {
        let len = bytes_len(part.len);
        let to = at..at + len;
        at += len;
        if part.source != Source::Guest {
            counters.copied_written_bytes.fetch_add(part.len, Ordering::Relaxed);
        }
        match part.source {
            Source::Guest => guest.copy_to(&mut bytes[to]),
            Source::Zeros => bytes[to].fill(0),
            Source::Visible(_) => {
                bytes[to].copy_from_slice(&visible.next().expect("each was read"));
                counters.copied_read_bytes.fetch_add(part.len, Ordering::Relaxed);
            }
        }
    }
    bytes
}

fn bytes_len(len: u64) -> usize {
    usize::try_from(len).expect("a transaction's bytes")
}
