//! Reads that follow a plan, and reads whose plan turned out to be older than the tables.

use super::Map;
use crate::layer::Layer;
use mica_block::{Extent, ExtentKind, Result, read_extents_by};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};
use std::sync::Arc;
use std::time::Duration;

/// How often, and for how long each time, a reader waits for a link to be published.
const PUBLISH_WAITS_MAX: u32 = 10_000;
const PUBLISH_WAIT: Duration = Duration::from_millis(1);

impl Map {
    /// Reads what was planned as encoded in `layer`, which is being written, after that failed:
    /// some of its clusters were overwritten or discarded since.
    pub(crate) async fn read_again(
        self: &Arc<Self>,
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
            let count = buf_len(left).min(buf.len() - done);
            let part = GuestRange::new(at, count as u64).expect("a part of the disk");
            match self.read_cluster_again(layer, part).await {
                Ok(visible) => buf.put(done, &visible),
                Err(error) => return (Err(error), buf),
            }
            done += count;
        }
        (Ok(()), buf)
    }

    /// As [`Self::read_again`], for a part of one cluster. Between a link and its publication the
    /// plan is older than the entry; then both are queried again until they agree.
    async fn read_cluster_again(self: &Arc<Self>, layer: &Layer, part: GuestRange) -> Result<Buf> {
        let mut waits = 0;
        loop {
            let extents = self.extents_at(part.start(), part.len()).await?;
            if extents.iter().all(|extent| extent.kind != ExtentKind::Encoded) {
                return self.read_extents(extents).await;
            }
            let buf = Buf::new(buf_len(part.len()));
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

    /// Where the bytes from `start` on are.
    pub(crate) async fn extents_at(&self, start: GuestOffset, len: u64) -> Result<Vec<Extent>> {
        let range = GuestRange::new(start, len).expect("a part of the disk");
        self.plan(range).await
    }

    /// Reads `extents`, which follow one another.
    pub(crate) async fn read_extents(self: &Arc<Self>, extents: Vec<Extent>) -> Result<Buf> {
        let buf = Buf::new(buf_len(Extent::total_len(&extents)));
        let read = |extent: &Extent, part| self.read(&self.layers_now(), extent, part);
        read_extents_by(read, &extents, buf).await
    }
}

fn buf_len(len: u64) -> usize {
    usize::try_from(len).expect("a part of a request")
}
