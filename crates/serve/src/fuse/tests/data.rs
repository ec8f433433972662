//! What is written, read, emptied and made durable.

use super::*;

#[test]
fn requests_of_any_offset_and_length_keep_every_neighbour() {
    let Some(place) = Place::new() else { return };
    let disk = Arc::new(MemoryDisk::new(LEN));
    place.with(Arc::clone(&disk), |path| {
        let file = open(path);
        let mut shadow = vec![0xee; usize::try_from(LEN).expect("small")];
        let mut random = Random(7);
        for round in 0..600_u64 {
            let Range { start, end } = range(&mut random);
            let at = usize::try_from(start).expect("small")..usize::try_from(end).expect("small");
            match random.below(8) {
                0..3 => {
                    let bytes: Vec<_> = (start..end).map(|at| low_byte(at * 7 + round)).collect();
                    file.write_all_at(&bytes, start).expect("written");
                    shadow[at].copy_from_slice(&bytes);
                }
                3 => {
                    empty(&file, FallocateFlags::PUNCH_HOLE, start..end).expect("punched");
                    shadow[at].fill(0);
                }
                4 => {
                    empty(&file, FallocateFlags::ZERO_RANGE, start..end).expect("zeroed");
                    shadow[at].fill(0);
                }
                _ => {
                    let mut bytes = vec![0; at.len()];
                    file.read_exact_at(&mut bytes, start).expect("read");
                    assert!(bytes == shadow[at], "round {round}, {start}..{end}");
                }
            }
        }
        assert!(disk.bytes(0..shadow.len()) == shadow);
    });
    assert!(disk.is_quiet());
}

fn low_byte(number: u64) -> u8 {
    number.to_le_bytes()[0]
}

fn range(random: &mut Random) -> Range<u64> {
    let start = random.below(LEN - 1);
    let longest = if random.below(10) == 0 { LEN } else { 3000 };
    start..(start + 1 + random.below(longest)).min(LEN)
}

fn empty(file: &File, how: FallocateFlags, range: Range<u64>) -> io::Result<()> {
    let mode = how | FallocateFlags::KEEP_SIZE;
    Ok(fallocate(file, mode, range.start, range.end - range.start)?)
}

#[test]
fn writes_side_by_side_in_one_sector_all_arrive() {
    let Some(place) = Place::new() else { return };
    let disk = Arc::new(MemoryDisk::new(LEN));
    place.with(Arc::clone(&disk), |path| {
        std::thread::scope(|scope| {
            for lane in 0..8_u8 {
                scope.spawn(move || {
                    let file = open(path);
                    for sector in 0..64_u64 {
                        let at = sector * 512 + u64::from(lane) * 64;
                        file.write_all_at(&[lane + 1; 64], at).expect("written");
                    }
                });
            }
        });
    });
    let wanted: Vec<u8> = (0..64 * 512).map(|at: u64| low_byte(at % 512 / 64 + 1)).collect();
    assert!(disk.bytes(0..wanted.len()) == wanted);
}

#[test]
fn what_goes_beyond_the_end_is_cut_or_refused() {
    let Some(place) = Place::new() else { return };
    place.with(Arc::new(MemoryDisk::new(LEN)), |path| {
        let file = open(path);
        assert_eq!(path.metadata().expect("stat").len(), LEN);
        assert_eq!(file.read_at(&mut [0; 100], LEN - 10).expect("cut"), 10);
        assert_eq!(file.read_at(&mut [0; 100], LEN).expect("the end"), 0);
        assert_eq!(file.write_at(&[1; 100], LEN - 10).expect("cut"), 10);
        assert_eq!(errno(file.write_at(&[1], LEN)), Some(Errno::NOSPC));
        assert_eq!(errno(file.write_at(&[1], LEN + 5000)), Some(Errno::NOSPC));
        let append = OpenOptions::new().append(true).open(path).expect("opened").write(&[1]);
        assert_eq!(errno(append), Some(Errno::NOSPC));

        assert_eq!(errno(file.set_len(LEN + 512)), Some(Errno::PERM));
        assert_eq!(errno(file.set_len(0)), Some(Errno::PERM));
        file.set_len(LEN).expect("as long as it is");
        let emptied = OpenOptions::new().write(true).truncate(true).open(path);
        assert_eq!(errno(emptied), Some(Errno::PERM));
        assert_eq!(path.metadata().expect("stat").len(), LEN);
    });
}

#[test]
fn fallocate_empties_and_never_makes_longer() {
    let Some(place) = Place::new() else { return };
    let disk = Arc::new(MemoryDisk::new(LEN));
    place.with(Arc::clone(&disk), |path| {
        let file = open(path);
        let (punch, zero) = (FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE);
        let call = |mode, at, len| fallocate(&file, mode, at, len).err();

        assert_eq!(call(punch | FallocateFlags::KEEP_SIZE, 4096, 512), None);
        assert_eq!(call(zero | FallocateFlags::KEEP_SIZE, 8192, 512), None);
        assert_eq!(call(zero, 16_384, 512), None);
        let events = disk.events();
        let unmap = Zeroes { may_unmap: true, fast: false };
        assert_eq!(events[0], Event::Zeroes { at: 4096, len: 512, how: unmap });
        assert_eq!(events[1], Event::Zeroes { at: 8192, len: 512, how: Zeroes::default() });
        assert_eq!(events[2], Event::Zeroes { at: 16_384, len: 512, how: Zeroes::default() });

        let (inside, across) = ((0, 4096), (LEN - 512, 1024));
        assert_eq!(call(FallocateFlags::empty(), inside.0, inside.1), Some(Errno::OPNOTSUPP));
        assert_eq!(call(FallocateFlags::empty(), across.0, across.1), Some(Errno::NOSPC));
        assert_eq!(call(zero, across.0, across.1), Some(Errno::NOSPC));
        assert_eq!(call(FallocateFlags::COLLAPSE_RANGE, 0, 4096), Some(Errno::OPNOTSUPP));
        assert_eq!(disk.events(), []);
        // What is beyond the end is empty already.
        assert_eq!(call(punch | FallocateFlags::KEEP_SIZE, LEN - 512, 4096), None);
        assert_eq!(call(punch | FallocateFlags::KEEP_SIZE, LEN + 512, 4096), None);
        assert_eq!(disk.events(), [Event::Zeroes { at: LEN - 512, len: 512, how: unmap }]);
    });
}

#[test]
fn hole_is_zeros_also_where_they_have_to_be_written_out() {
    let Some(place) = Place::new() else { return };
    let disk = Arc::new(MemoryDisk { slow_zeroes: true, ..MemoryDisk::new(LEN) });
    place.with(Arc::clone(&disk), |path| {
        empty(&open(path), FallocateFlags::PUNCH_HOLE, 100..4096).expect("written out");
    });
    assert_eq!(disk.bytes(0..100), [0xee; 100]);
    assert_eq!(disk.bytes(100..4096), [0; 3996]);
}

#[test]
fn space_is_kept_where_discards_are_ignored() {
    let Some(place) = Place::new() else { return };
    let disk = Arc::new(MemoryDisk::new(LEN));
    let served = Arc::clone(&disk);
    let running = place.start(served, Discard::Ignore).expect("served");
    let file = open(&place.file());
    empty(&file, FallocateFlags::PUNCH_HOLE, 0..4096).expect("zeroed");
    let keep = Zeroes::default();
    assert_eq!(disk.events(), [Event::Zeroes { at: 0, len: 4096, how: keep }]);
    drop(file);
    assert_eq!(running.shutdown().discards, 1);
}

#[test]
fn sync_and_close_and_synchronous_writes_flush_the_disk() {
    let Some(place) = Place::new() else { return };
    let disk = Arc::new(MemoryDisk::new(LEN));
    place.with(Arc::clone(&disk), |path| {
        let write = Event::Write { at: 0, len: 512 };
        let file = open(path);
        file.write_all_at(&[1; 512], 0).expect("written");
        assert_eq!(disk.events(), [write]);
        file.sync_data().expect("durable");
        assert_eq!(disk.events(), [Event::Flush]);
        drop(file);
        assert_eq!(disk.events(), [Event::Flush]);
        for flag in [libc::O_SYNC, libc::O_DSYNC] {
            let file = OpenOptions::new().write(true).custom_flags(flag).open(path);
            let file = file.expect("opened");
            file.write_all_at(&[1; 512], 0).expect("durable");
            assert_eq!(disk.events()[..2], [write, Event::Flush]);
            drop(file);
            disk.events();
        }
        drop(File::open(path).expect("opened"));
        assert_eq!(disk.events(), [], "without write access there is nothing to flush");
    });
}

#[test]
fn errors_of_the_disk_are_reported_and_end_nothing() {
    let Some(place) = Place::new() else { return };
    let no_space = ErrorKind::NoSpace;
    let disk = MemoryDisk { bad: 4096..8192, kind: no_space, ..MemoryDisk::new(LEN) };
    let disk = Arc::new(MemoryDisk { flush_fails: true, ..disk });
    let running = place.start(disk, Discard::Unmap).expect("served");
    let file = open(&place.file());
    assert_eq!(errno(file.write_at(&[1; 512], 4096)), Some(Errno::NOSPC));
    assert_eq!(errno(file.sync_all()), Some(Errno::IO));
    file.write_all_at(&[1; 512], 0).expect("another place");
    drop(file);
    let counters = running.shutdown();
    // The file's last `close` flushed too.
    assert_eq!((counters.writes, counters.written_bytes, counters.failed), (2, 512, 3));
}
