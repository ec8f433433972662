//! A part of a disk as a disk of its own: from an offset on, or a partition.
//!
//! Only what clients see is moved: extents name the places that they have in the whole disk.

use crate::raw::check_range;
use mica_block::{
    Disk, Error, ErrorKind, Extent, Geometry, IoFuture, LocalFuture, Plan, Planned, Result,
    Writing, Zeroes, ready,
};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};
use std::sync::Arc;

/// Which part of a disk it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowPlace {
    /// The first byte, a multiple of a sector.
    pub start: u64,
    /// How many bytes, whole sectors; those up to the end of the disk, however long that becomes,
    /// if it is not stated.
    pub len: Option<u64>,
}

/// A part of a disk.
pub struct Window {
    disk: Arc<dyn Disk>,
    place: WindowPlace,
}

impl Window {
    /// The part of `disk` at `place`.
    ///
    /// # Errors
    /// `Invalid` if it does not consist of whole sectors of the disk.
    pub fn new(disk: Arc<dyn Disk>, place: WindowPlace) -> Result<Self> {
        let invalid = |what: String| Err(Error::new(ErrorKind::Invalid, what));
        let (all, WindowPlace { start, len }) = (disk.geometry().len, place);
        if !start.is_multiple_of(SECTOR_BYTES) || !len.unwrap_or(0).is_multiple_of(SECTOR_BYTES) {
            return invalid("a part of a disk consists of whole sectors of 512 bytes".to_owned());
        }
        let end = start.checked_add(len.unwrap_or(0)).filter(|end| *end <= all);
        if end.is_none() || start == all || len == Some(0) {
            return invalid(format!("the disk of {all} bytes has no such part"));
        }
        Ok(Self { disk, place })
    }

    /// The same range, as the whole disk calls it.
    fn moved(&self, range: GuestRange) -> Result<GuestRange> {
        check_range(range, self.geometry())?;
        let start = GuestOffset::new(range.start().bytes() + self.place.start);
        Ok(GuestRange::new(start, range.len()).expect("within the disk"))
    }

    /// Extents of the whole disk, as clients call them.
    fn moved_back(&self, mut extents: Vec<Extent>) -> Vec<Extent> {
        for extent in &mut extents {
            extent.start = GuestOffset::new(extent.start.bytes() - self.place.start);
        }
        extents
    }

    fn plan_back<'a>(&self, plan: Plan<'a>) -> Plan<'a> {
        let (extents, in_flight) = plan.into_parts();
        Plan::new(self.moved_back(extents), in_flight)
    }
}

impl Disk for Window {
    fn geometry(&self) -> Geometry {
        let all = self.disk.geometry();
        let rest = all.len.saturating_sub(self.place.start);
        Geometry { len: self.place.len.unwrap_or(rest), ..all }
    }

    fn plan(&self, range: GuestRange, extents: Vec<Extent>) -> Planned<'_> {
        let moved = match self.moved(range) {
            Ok(moved) => moved,
            Err(error) => return Planned::Ready(Err(error)),
        };
        match self.disk.plan(moved, extents) {
            Planned::Ready(planned) => Planned::Ready(planned.map(|plan| self.plan_back(plan))),
            Planned::Pending(planned) => {
                Planned::Pending(Box::pin(async move { Ok(self.plan_back(planned.await?)) }))
            }
        }
    }

    fn survey(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            let extents = self.disk.survey(self.moved(range)?).await?;
            Ok(self.moved_back(extents))
        })
    }

    fn read(&self, extent: &Extent, buf: Buf) -> IoFuture {
        let start = GuestOffset::new(extent.start.bytes() + self.place.start);
        self.disk.read(&Extent { start, ..*extent }, buf)
    }

    fn is_writable(&self) -> bool {
        self.disk.is_writable()
    }

    fn write(&self, at: GuestOffset, buf: Buf) -> Writing<'_> {
        let range = GuestRange::new(at, buf.len() as u64)
            .ok_or_else(|| Error::new(ErrorKind::Invalid, "a write beyond the end of the disk"));
        match range.and_then(|range| self.moved(range)) {
            Ok(moved) => self.disk.write(moved.start(), buf),
            Err(error) => Writing::Direct(ready(Err(error), buf)),
        }
    }

    fn write_zeroes(&self, range: GuestRange, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.disk.write_zeroes(self.moved(range)?, how).await })
    }

    fn discard(&self, range: GuestRange) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.disk.discard(self.moved(range)?).await })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.disk.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RawDisk;
    use mica_block::read_whole;
    use mica_rt::{Backend, Executor};
    use mica_store::MemoryStore;

    fn range(start: u64, len: u64) -> GuestRange {
        GuestRange::new(GuestOffset::new(start), len).expect("small")
    }

    #[test]
    fn part_shows_and_changes_only_its_own_bytes() {
        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("simulated");
        executor.block_on(async {
            let bytes: Vec<u8> = (0..8).flat_map(|sector| [sector; 512]).collect();
            let whole = RawDisk::new_writable(Arc::new(MemoryStore::new_writable("disk", bytes)))
                .expect("a disk");
            let whole: Arc<dyn Disk> = Arc::new(whole);
            let place = WindowPlace { start: 1024, len: Some(1536) };
            let part = Window::new(Arc::clone(&whole), place).expect("a part");
            assert_eq!(part.geometry().len, 1536);
            let plan = part.plan(range(512, 1024), Vec::new()).finish().await.expect("a plan");
            assert!(Extent::covers(&plan, range(512, 1024)));
            let read = read_whole(&part, &plan).await.expect("read");
            assert_eq!((read[0], read[1023]), (3, 4));
            drop(plan);
            for beyond in [range(1024, 1024), range(1536, 512)] {
                assert!(part.plan(beyond, Vec::new()).finish().await.is_err());
                let buf = Buf::zeroed(usize::try_from(beyond.len()).expect("small"));
                assert!(part.write(beyond.start(), buf).await.0.is_err());
                assert!(part.discard(beyond).await.is_err());
            }
            part.write(GuestOffset::new(1024), Buf::from_slice(&[9; 512])).await.0.expect("room");
            part.write_zeroes(range(0, 512), Zeroes::default()).await.expect("room");
            let plan = whole.plan(range(0, 4096), Vec::new()).finish().await.expect("a plan");
            let all = read_whole(&*whole, &plan).await.expect("read");
            let sectors: Vec<u8> = all.chunks(512).map(|sector| sector[0]).collect();
            assert_eq!(sectors, [0, 1, 0, 3, 9, 5, 6, 7]);
        });
    }

    #[test]
    fn part_that_the_disk_does_not_have_is_refused() {
        let whole =
            RawDisk::new(Arc::new(MemoryStore::new("disk", vec![0; 4096]))).expect("a disk");
        let whole: Arc<dyn Disk> = Arc::new(whole);
        let refused =
            |start, len| Window::new(Arc::clone(&whole), WindowPlace { start, len }).is_err();
        assert!(refused(100, None) && refused(0, Some(100)) && refused(0, Some(0)));
        assert!(refused(4096, None) && refused(3584, Some(1024)) && refused(8192, None));
        assert!(refused(512, Some(u64::MAX - 511)));
        let rest = Window::new(whole, WindowPlace { start: 3584, len: None }).expect("a part");
        assert_eq!(rest.geometry().len, 512);
    }
}
