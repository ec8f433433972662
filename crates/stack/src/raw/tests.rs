use super::*;
use crate::NullDisk;
use mica_rt::{Backend, Executor};
use mica_store::MemoryStore;

fn range(start: u64, len: u64) -> GuestRange {
    GuestRange::new(GuestOffset::new(start), len).expect("a range")
}

fn raw(bytes: Vec<u8>) -> RawDisk {
    RawDisk::new(Arc::new(MemoryStore::new("memory", bytes))).expect("a disk")
}

fn plan(disk: &dyn Disk, range: GuestRange, detail: Detail) -> Result<Vec<Extent>> {
    let mut extents = Vec::new();
    let planned = disk.plan(range, detail, &mut extents);
    let executor = Executor::new(Backend::Sim { seed: 0 }).expect("a simulator");
    executor.block_on(planned.finish())?;
    Ok(extents)
}

fn read(disk: &dyn Disk, range: GuestRange) -> Vec<u8> {
    let extents = plan(disk, range, Detail::Read).expect("a plan");
    let executor = Executor::new(Backend::Sim { seed: 0 }).expect("a simulator");
    let mut bytes = Vec::new();
    for extent in extents {
        let buf = Buf::from_slice(&vec![0xee; usize::try_from(extent.len).expect("small")]);
        let (result, buf) = executor.block_on(disk.read(&extent, buf));
        result.expect("a read");
        bytes.extend_from_slice(&buf);
    }
    bytes
}

#[test]
fn last_sector_is_filled_up_with_zeros() {
    let disk = raw(vec![7; 700]);
    assert_eq!(disk.geometry().len, 1024);
    let bytes = read(&disk, range(512, 512));
    assert_eq!(bytes[..188], [7; 188]);
    assert_eq!(bytes[188..], [0; 324]);
}

#[test]
fn read_plan_is_one_extent() {
    let disk = raw(vec![7; 4096]);
    let extents = plan(&disk, range(100, 3000), Detail::Read).unwrap();
    assert_eq!(extents, [extent_at(GuestOffset::new(100), 3000, ExtentKind::Data)]);
}

#[test]
fn allocation_plan_tells_holes_and_covers_the_range() {
    let disk = raw(vec![7; 700]);
    let extents = plan(&disk, range(100, 924), Detail::Allocation).unwrap();
    assert_eq!(
        extents,
        [
            extent_at(GuestOffset::new(100), 600, ExtentKind::Data),
            extent_at(GuestOffset::new(700), 324, ExtentKind::ZeroAllocated),
        ]
    );
}

#[test]
fn range_beyond_the_end_is_refused_and_an_empty_one_is_not() {
    let null = NullDisk::new(4096).unwrap();
    let raw = raw(vec![7; 4096]);
    for disk in [&raw as &dyn Disk, &null] {
        for detail in [Detail::Read, Detail::Allocation] {
            let error = plan(disk, range(4000, 97), detail).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            let error = plan(disk, range(u64::MAX, 0), detail).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert_eq!(plan(disk, range(4096, 0), detail).unwrap(), []);
        }
    }
}

#[test]
fn null_disk_is_zeros_that_a_server_has_to_send() {
    let disk = NullDisk::new(1 << 40).unwrap();
    let extents = plan(&disk, range(0, 4096), Detail::Read).unwrap();
    assert_eq!(extents[0].kind, ExtentKind::Data);
    assert_eq!(read(&disk, range(1 << 39, 4096)), [0; 4096]);
    let extents = plan(&disk, range(0, 1 << 40), Detail::Allocation).unwrap();
    assert_eq!((extents[0].kind, extents[0].len), (ExtentKind::Hole, 1 << 40));
    assert_eq!(NullDisk::new(1000).err().unwrap().kind(), ErrorKind::Invalid);
}
