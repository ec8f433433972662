//! Disks one behind the other as one disk, for reading.

use crate::raw::check_range;
use mica_block::{Disk, Extent, Geometry, IoFuture, LocalFuture, Plan, Planned, Result, Survey};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange};
use std::sync::Arc;

/// Several disks as one. Nobody writes to them.
pub struct Joined {
    /// Each with where it starts; there is at least one.
    parts: Vec<(u64, Arc<dyn Disk>)>,
    geometry: Geometry,
}

impl Joined {
    /// `disks`, of which there is at least one, in their order.
    pub fn new(disks: impl IntoIterator<Item = Arc<dyn Disk>>) -> Self {
        let (mut parts, mut geometry) = (Vec::new(), Geometry { len: 0, preferred_bytes: 4096 });
        for disk in disks {
            let Geometry { len, preferred_bytes } = disk.geometry();
            parts.push((geometry.len, disk));
            geometry.len += len;
            geometry.preferred_bytes = geometry.preferred_bytes.max(preferred_bytes);
        }
        Self { parts, geometry }
    }

    /// The disk that has the byte at `at`, with where it starts.
    fn part_at(&self, at: u64) -> &(u64, Arc<dyn Disk>) {
        let after = self.parts.partition_point(|(start, _)| *start <= at);
        &self.parts[after.saturating_sub(1)]
    }

    /// The part of `range`, from its start, that lies on one disk, as that disk calls it.
    fn first_of(&self, range: GuestRange) -> (u64, &Arc<dyn Disk>, GuestRange) {
        let at = range.start().bytes();
        let (start, disk) = self.part_at(at);
        let len = range.len().min(start + disk.geometry().len - at);
        let there = GuestRange::new(GuestOffset::new(at - start), len);
        (*start, disk, there.expect("within the disk"))
    }

    async fn plan_all(&self, range: GuestRange, mut all: Vec<Extent>) -> Result<Plan<'_>> {
        let mut left = range;
        while !left.is_empty() {
            let (start, disk, there) = self.first_of(left);
            let plan = disk.plan(there, Vec::new()).finish().await?;
            all.extend(plan.iter().map(|extent| moved(extent, start)));
            left = rest(left, there.len());
        }
        // Nobody writes, so that no space is used again.
        Ok(Plan::untracked(all))
    }
}

fn moved(extent: &Extent, by: u64) -> Extent {
    Extent { start: GuestOffset::new(extent.start.bytes() + by), ..*extent }
}

fn rest(range: GuestRange, done: u64) -> GuestRange {
    let start = GuestOffset::new(range.start().bytes() + done);
    GuestRange::between(start, range.end()).expect("a part of it")
}

impl Disk for Joined {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn plan(&self, range: GuestRange, extents: Vec<Extent>) -> Planned<'_> {
        match check_range(range, self.geometry) {
            Ok(()) => Planned::Pending(Box::pin(self.plan_all(range, extents))),
            Err(error) => Planned::Ready(Err(error)),
        }
    }

    fn survey(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            check_range(range, self.geometry)?;
            if range.is_empty() {
                return Ok(Vec::new());
            }
            let (start, disk, there) = self.first_of(range);
            let extents = Survey::new(&**disk, there).next().await?.unwrap_or_default();
            Ok(extents.iter().map(|extent| moved(extent, start)).collect())
        })
    }

    fn read(&self, extent: &Extent, buf: Buf) -> IoFuture {
        let at = extent.start.bytes();
        let (start, disk) = self.part_at(at);
        disk.read(&Extent { start: GuestOffset::new(at - start), ..*extent }, buf)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RawDisk;
    use mica_block::read_whole;
    use mica_rt::{Backend, Executor};
    use mica_store::MemoryStore;

    #[test]
    fn disks_follow_each_other() {
        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("simulated");
        executor.block_on(async {
            let disk = |sectors: usize, byte: u8| -> Arc<dyn Disk> {
                let store = MemoryStore::new("disk", vec![byte; sectors * 512]);
                Arc::new(RawDisk::new(Arc::new(store)).expect("a disk"))
            };
            let joined = Joined::new([disk(2, 1), disk(1, 2), disk(3, 3)]);
            assert_eq!(joined.geometry().len, 6 * 512);
            for (first, count) in [(0, 6), (1, 3), (2, 1), (5, 1), (3, 3)] {
                let range = GuestRange::new(GuestOffset::new(first * 512), count * 512);
                let range = range.expect("small");
                let plan = joined.plan(range, Vec::new()).finish().await.expect("a plan");
                assert!(Extent::covers(&plan, range));
                let read = read_whole(&joined, &plan).await.expect("read");
                let sectors: Vec<u8> = read.chunks(512).map(|sector| sector[0]).collect();
                let all = [1, 1, 2, 3, 3, 3];
                let [from, to] =
                    [first, first + count].map(|at| usize::try_from(at).expect("small"));
                assert_eq!(sectors, all[from..to]);
                let mut survey = Survey::new(&joined, range);
                let mut found = Vec::new();
                while let Some(extents) = survey.next().await.expect("a survey") {
                    found.extend(extents);
                }
                assert!(Extent::covers(&found, range));
            }
            let beyond = GuestRange::new(GuestOffset::new(5 * 512), 1024).expect("small");
            assert!(joined.plan(beyond, Vec::new()).finish().await.is_err());
        });
    }
}
