use super::*;
use crate::NullDisk;
use mica_block::{ChangeFuture, StoreIdentity, Survey, Witness, read_extents};
use mica_rt::{Backend, Executor};
use mica_store::MemoryStore;
use parking_lot::Mutex;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

fn range(start: u64, len: u64) -> GuestRange {
    GuestRange::new(GuestOffset::new(start), len).expect("a range")
}

fn raw(bytes: Vec<u8>) -> RawDisk {
    RawDisk::new(Arc::new(MemoryStore::new("memory", bytes))).expect("a disk")
}

fn survey(disk: &dyn Disk, range: GuestRange) -> Result<Vec<Extent>> {
    let executor = Executor::new(Backend::Sim { seed: 0 }).expect("a simulator");
    executor.block_on(disk.survey(range))
}

fn plan(disk: &dyn Disk, range: GuestRange) -> Result<Vec<Extent>> {
    let planned = disk.plan(range, Vec::new());
    let executor = Executor::new(Backend::Sim { seed: 0 }).expect("a simulator");
    Ok(executor.block_on(planned.finish())?.into_parts().0)
}

fn read(disk: &dyn Disk, range: GuestRange) -> Vec<u8> {
    let extents = plan(disk, range).expect("a plan");
    let executor = Executor::new(Backend::Sim { seed: 0 }).expect("a simulator");
    let poisoned = vec![0xee; usize::try_from(range.len()).expect("small")];
    let read = read_extents(disk, &extents, Buf::from_slice(&poisoned));
    executor.block_on(read).expect("a read").to_vec()
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
    let extents = plan(&disk, range(100, 3000)).unwrap();
    assert_eq!(extents, [extent_at(GuestOffset::new(100), 3000, ExtentKind::Data)]);
}

#[test]
fn survey_shows_holes_and_covers_the_range() {
    let disk = raw(vec![7; 700]);
    let extents = survey(&disk, range(100, 924)).unwrap();
    assert_eq!(
        extents,
        [
            extent_at(GuestOffset::new(100), 600, ExtentKind::Data),
            extent_at(GuestOffset::new(700), 324, ExtentKind::ZeroAllocated),
        ]
    );
}

#[test]
fn survey_tells_what_is_known_before_it_reports_a_failure() {
    let store = Fussy::new(4096, true);
    store.unknown_from.store(1024, Ordering::Relaxed);
    let disk = RawDisk::new(Arc::clone(&store) as _).expect("a disk");
    run(async {
        let mut parts = Survey::new(&disk, range(512, 3000));
        let known = parts.next().await.expect("known").expect("not the end");
        assert_eq!(known, [extent_at(GuestOffset::new(512), 512, ExtentKind::Data)]);
        assert_eq!(parts.next().await.expect_err("the device is gone").kind(), ErrorKind::Io);
    });
}

#[test]
fn range_beyond_the_end_is_refused_and_an_empty_one_is_not() {
    let null = NullDisk::new(4096).unwrap();
    let raw = raw(vec![7; 4096]);
    for disk in [&raw as &dyn Disk, &null] {
        for ask in [plan, survey] {
            let error = ask(disk, range(4000, 97)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            let error = ask(disk, range(u64::MAX, 0)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert_eq!(ask(disk, range(4096, 0)).unwrap(), []);
        }
    }
}

#[test]
fn null_disk_is_zeros_that_a_server_has_to_send() {
    let disk = NullDisk::new(1 << 40).unwrap();
    let extents = plan(&disk, range(0, 4096)).unwrap();
    assert_eq!(extents[0].kind, ExtentKind::Data);
    assert_eq!(read(&disk, range(1 << 39, 4096)), [0; 4096]);
    let extents = survey(&disk, range(0, 1 << 40)).unwrap();
    assert_eq!((extents[0].kind, extents[0].len), (ExtentKind::Hole, 1 << 40));
    assert_eq!(NullDisk::new(1000).err().unwrap().kind(), ErrorKind::Invalid);
}

/// A memory store with operations to refuse, and a record of its calls.
struct Fussy {
    bytes: Mutex<Vec<u8>>,
    calls: Mutex<Vec<&'static str>>,
    knows_space: bool,
    sync_fails: AtomicBool,
    /// Where the part begins whose runs cannot be told.
    unknown_from: AtomicU64,
    /// What bytes read as that were never written.
    unwritten: AtomicU8,
    /// The longest that it says that it is: a write that makes it longer is still under way.
    said_len_max: AtomicU64,
    writes_fail: AtomicBool,
}

impl Fussy {
    fn new(len: usize, knows_space: bool) -> Arc<Self> {
        Arc::new(Self {
            bytes: Mutex::new(vec![7; len]),
            calls: Mutex::default(),
            knows_space,
            sync_fails: AtomicBool::new(false),
            unknown_from: AtomicU64::new(u64::MAX),
            unwritten: AtomicU8::new(0),
            said_len_max: AtomicU64::new(u64::MAX),
            writes_fail: AtomicBool::new(false),
        })
    }

    fn note(&self, call: &'static str) {
        self.calls.lock().push(call);
    }

    fn calls(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.calls.lock())
    }

    fn bytes(&self) -> Vec<u8> {
        self.bytes.lock().clone()
    }
}

impl Store for Fussy {
    fn read_at(&self, buf: Buf, _: HostOffset) -> IoFuture {
        mica_block::ready(Ok(()), buf)
    }

    fn len(&self) -> Result<u64> {
        let said_max = self.said_len_max.load(Ordering::Relaxed);
        Ok((self.bytes.lock().len() as u64).min(said_max))
    }

    fn run_at(&self, at: HostOffset, len: u64) -> Result<mica_block::Run> {
        let known = self.unknown_from.load(Ordering::Relaxed).saturating_sub(at.bytes());
        match known {
            0 => Err(Error::new(ErrorKind::Io, "the device is gone")),
            known => Ok(mica_block::Run { kind: RunKind::Data, len: len.min(known) }),
        }
    }

    fn name(&self) -> String {
        "disk.raw".to_owned()
    }

    fn identity(&self) -> StoreIdentity {
        StoreIdentity::own()
    }

    fn reads_unwritten_as_zeros(&self) -> bool {
        self.unwritten.load(Ordering::Relaxed) == 0
    }

    fn witness(&self) -> Witness {
        Witness::None
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.len()
    }

    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        self.note("write");
        if self.writes_fail.load(Ordering::Relaxed) {
            let error = Error::new(ErrorKind::NoSpace, "the file system is full");
            return mica_block::ready(Err(error), buf);
        }
        let mut bytes = self.bytes.lock();
        let start = usize::try_from(offset.bytes()).expect("small");
        let end = start + buf.len();
        let len = bytes.len().max(end);
        bytes.resize(len, self.unwritten.load(Ordering::Relaxed));
        bytes[start..end].copy_from_slice(&buf);
        mica_block::ready(Ok(()), buf)
    }

    fn sync(&self) -> ChangeFuture {
        self.note("sync");
        let failure = Error::new(ErrorKind::Io, "the device is gone");
        let fails = self.sync_fails.load(Ordering::Relaxed);
        Box::pin(async move { if fails { Err(failure) } else { Ok(()) } })
    }

    fn set_len(&self, len: u64) -> ChangeFuture {
        self.note("set_len");
        let len = usize::try_from(len).expect("small");
        let unwritten = self.unwritten.load(Ordering::Relaxed);
        self.bytes.lock().resize(len, unwritten);
        Box::pin(async { Ok(()) })
    }

    fn space(&self, change: Space, at: HostOffset, len: u64) -> ChangeFuture {
        self.note(match change {
            Space::Punch => "punch",
            Space::Zero => "zero",
            Space::Allocate => "allocate",
        });
        if !self.knows_space {
            let error = Error::new(ErrorKind::Unsupported, "not here");
            return Box::pin(async move { Err(error) });
        }
        let mut bytes = self.bytes.lock();
        let start = usize::try_from(at.bytes()).expect("small");
        let end = start + usize::try_from(len).expect("small");
        bytes[start..end].fill(0);
        Box::pin(async { Ok(()) })
    }
}

fn run<T>(future: impl Future<Output = T>) -> T {
    Executor::new(Backend::Sim { seed: 0 }).expect("a simulator").block_on(future)
}

fn writable(store: &Arc<Fussy>) -> RawDisk {
    RawDisk::new_writable(Arc::clone(store) as _).expect("a disk")
}

fn write(disk: &dyn Disk, at: u64, bytes: &[u8]) -> Result<()> {
    let (result, buf) = run(disk.write(GuestOffset::new(at), Buf::from_slice(bytes)));
    assert_eq!(*buf, *bytes, "the buffer comes back as it was");
    result
}

const HOW: Zeroes = Zeroes { may_unmap: false, fast: false };

#[test]
fn disk_opened_for_reading_takes_no_writes() {
    let store = Fussy::new(4096, true);
    let raw = RawDisk::new(Arc::clone(&store) as _).expect("a disk");
    let null = NullDisk::new(4096).expect("a disk");
    for disk in [&raw as &dyn Manage, &null] {
        assert!(!disk.is_writable());
        assert_eq!(write(disk, 0, &[1; 512]).unwrap_err().kind(), ErrorKind::Denied);
        let zeroes = run(disk.write_zeroes(range(0, 512), HOW));
        assert_eq!(zeroes.unwrap_err().kind(), ErrorKind::Denied);
        assert_eq!(run(disk.discard(range(0, 512))).unwrap_err().kind(), ErrorKind::Denied);
        run(disk.flush()).expect("there is nothing to flush");
        run(disk.close()).expect("there is nothing to close");
    }
    assert!(store.calls().is_empty());
}

#[test]
fn writes_beyond_the_end_are_refused() {
    let store = Fussy::new(4096, true);
    let null = NullDisk::new(4096).expect("a disk").writable();
    for disk in [&writable(&store) as &dyn Disk, &null] {
        assert!(disk.is_writable());
        write(disk, 3584, &[1; 512]).expect("the last sector");
        for at in [3584, 4096, u64::MAX - 511] {
            assert_eq!(write(disk, at, &[1; 1024]).unwrap_err().kind(), ErrorKind::Invalid);
        }
        for range in [range(4096, 512), range(0, 4608)] {
            let zeroes = run(disk.write_zeroes(range, HOW));
            assert_eq!(zeroes.unwrap_err().kind(), ErrorKind::Invalid);
            assert_eq!(run(disk.discard(range)).unwrap_err().kind(), ErrorKind::Invalid);
        }
    }
    assert_eq!(store.bytes().len(), 4096);
}

/// The story: what was written behind the end of the file was answered, and nowhere afterwards.
#[test]
fn last_sector_that_is_only_begun_is_completed_when_it_is_written() {
    let store = Fussy::new(700, true);
    let disk = writable(&store);
    write(&disk, 0, &[1; 512]).expect("written");
    run(disk.write_zeroes(range(0, 1024), HOW)).expect("zeroed");
    run(disk.discard(range(512, 512))).expect("discarded");
    assert_eq!(store.bytes(), [0; 700], "nobody wrote to what is missing");
    write(&disk, 512, &[2; 512]).expect("written");
    assert_eq!(store.bytes()[512..], [2; 512]);
    run(disk.write_zeroes(range(600, 424), HOW)).expect("zeroed");
    assert_eq!(store.bytes()[600..], [0; 424]);
    assert_eq!(disk.geometry().len, 1024);
}

/// The story: an encrypted image ended within a sector, and what was decrypted of the missing part
/// was no zeros.
#[test]
fn last_sector_that_is_only_begun_is_zeroed_as_a_whole_where_what_is_missing_is_no_zeros() {
    let store = Fussy::new(700, false);
    store.unwritten.store(9, Ordering::Relaxed);
    let disk = writable(&store);
    run(disk.write_zeroes(range(512, 512), HOW)).expect("zeroed");
    assert_eq!(store.bytes()[512..], [0; 512]);
}

#[test]
fn zeroes_change_the_space_and_are_written_out_only_where_they_must() {
    let store = Fussy::new(3 << 20, true);
    let disk = writable(&store);
    let unmap = Zeroes { may_unmap: true, ..HOW };
    run(disk.write_zeroes(range(0, 1024), HOW)).expect("zeroed");
    run(disk.write_zeroes(range(0, 1024), unmap)).expect("zeroed");
    run(disk.discard(range(0, 1024))).expect("discarded");
    assert_eq!(store.calls(), ["zero", "punch", "punch"]);

    let store = Fussy::new(3 << 20, false);
    let disk = writable(&store);
    run(disk.discard(range(0, 1024))).expect("a hint only");
    let fast = run(disk.write_zeroes(range(0, 1024), Zeroes { fast: true, ..unmap }));
    assert_eq!(fast.unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(store.calls(), ["punch", "punch"]);
    assert_eq!(store.bytes(), vec![7; 3 << 20]);
    run(disk.write_zeroes(range(512, (5 << 19) - 512), unmap)).expect("zeroed");
    let calls = store.calls();
    let (punch, writes) = calls.split_first().expect("something was done");
    assert_eq!(*punch, "punch");
    assert!(writes.len() > 1 && writes.iter().all(|call| *call == "write"), "in pieces");
    let bytes = store.bytes();
    assert_eq!((bytes[511], bytes[5 << 19]), (7, 7));
    assert!(bytes[512..5 << 19].iter().all(|byte| *byte == 0));
}

#[test]
fn failed_sync_latches_the_disk() {
    let store = Fussy::new(4096, true);
    let disk = writable(&store);
    run(disk.flush()).expect("synced");
    assert!(disk.latch().is_none());
    store.sync_fails.store(true, Ordering::Relaxed);
    let error = run(disk.flush()).expect_err("the device is gone");
    assert_eq!(error.kind(), ErrorKind::Io);
    // The device comes back; what was lost meanwhile does not.
    store.sync_fails.store(false, Ordering::Relaxed);
    store.calls();
    let say = |error: Error| assert!(error.to_string().contains("a sync of it failed"), "{error}");
    say(disk.latch().expect("it is latched"));
    say(run(disk.flush()).unwrap_err());
    say(write(&disk, 0, &[1; 512]).unwrap_err());
    say(run(disk.write_zeroes(range(0, 512), HOW)).unwrap_err());
    say(run(disk.discard(range(0, 512))).unwrap_err());
    say(run(disk.close()).unwrap_err());
    assert!(store.calls().is_empty());
    assert_eq!(read(&disk, range(0, 512)).len(), 512, "it is still read");
}

#[test]
fn disk_becomes_longer_and_its_end_is_zeros() {
    let store = Fussy::new(700, true);
    let disk = writable(&store);
    run(disk.resize(2048)).expect("longer");
    assert_eq!(store.calls(), ["set_len", "sync"], "durable before anybody learns of it");
    assert_eq!(disk.geometry().len, 2048);
    assert_eq!(store.bytes()[700..], [0; 1348]);
    write(&disk, 512, &[1; 1536]).expect("the last sector of before is whole now");
    assert_eq!(store.bytes()[512..], [1; 1536]);
    assert_eq!(write(&disk, 2048, &[1; 512]).unwrap_err().kind(), ErrorKind::Invalid);
    run(disk.resize(2048)).expect("as long as it is");
}

#[test]
fn new_end_is_zeros_where_the_store_gives_anything() {
    let store = Fussy::new(700, true);
    store.unwritten.store(9, Ordering::Relaxed);
    let disk = writable(&store);
    run(disk.resize(2048)).expect("longer");
    // After a power cut in between, nothing that nobody wrote would be in its new part.
    assert_eq!(store.calls(), ["write", "sync"]);
    assert_eq!(store.bytes()[1024..], [0; 1024]);
}

/// The story: an encrypted disk, whose file ended within a sector, was made longer while a guest
/// wrote that sector, and what it had written behind the end of the file became zeros.
#[test]
fn last_sector_that_is_being_written_stays_while_the_disk_becomes_longer() {
    for has_space in [true, false] {
        let store = Fussy::new(700, true);
        store.unwritten.store(9, Ordering::Relaxed);
        let disk = writable(&store);
        store.said_len_max.store(700, Ordering::Relaxed);
        write(&disk, 512, &[2; 512]).expect("written");
        store.writes_fail.store(!has_space, Ordering::Relaxed);
        assert_eq!(run(disk.resize(2048)).is_ok(), has_space);
        assert_eq!(store.bytes()[512..1024], [2; 512]);
        let end: &[u8] = if has_space { &[0; 1024] } else { &[] };
        assert_eq!(store.bytes()[1024..], *end);
    }
}

#[test]
fn served_disk_is_not_made_shorter_nor_odd() {
    let store = Fussy::new(4096, true);
    let disk = writable(&store);
    for len in [3584, 4097, 0] {
        assert_eq!(run(disk.resize(len)).unwrap_err().kind(), ErrorKind::Invalid);
    }
    let frozen = RawDisk::new(Arc::clone(&store) as _).expect("a disk");
    assert_eq!(run(frozen.resize(8192)).unwrap_err().kind(), ErrorKind::Denied);
    let null = NullDisk::new(4096).expect("a disk").writable();
    assert_eq!(run(null.resize(8192)).unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(store.calls().is_empty());
    assert_eq!(disk.geometry().len, 4096);
}

#[test]
fn length_that_did_not_become_durable_is_none() {
    let store = Fussy::new(4096, true);
    let disk = writable(&store);
    store.sync_fails.store(true, Ordering::Relaxed);
    assert_eq!(run(disk.resize(8192)).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(disk.geometry().len, 4096);
    let again = run(disk.resize(8192)).unwrap_err();
    assert!(again.to_string().contains("a sync of it failed"), "{again}");
}

#[test]
fn device_that_became_longer_by_itself_is_left_as_it_is() {
    let store = Fussy::new(4096, true);
    let disk = writable(&store);
    store.bytes.lock().resize(8192, 3);
    run(disk.resize(8192)).expect("noticed");
    assert_eq!(store.calls(), ["sync"]);
    assert_eq!((disk.geometry().len, store.bytes()[8191]), (8192, 3));
}
