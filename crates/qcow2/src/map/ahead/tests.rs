use super::*;

fn read(sequence: &Sequence, at: u64, len: u64) -> Option<Range<u64>> {
    sequence.follow(GuestOffset::new(at), len)
}

/// Reads `len` bytes at `at` in pieces of 64 KiB; returns the first window.
fn read_on(sequence: &Sequence, at: u64, len: u64) -> Option<Range<u64>> {
    let pieces = (at..at + len).step_by(64 << 10);
    pieces.filter_map(|at| read(sequence, at, 64 << 10)).next()
}

#[test]
fn random_reads_are_never_read_ahead() {
    let sequence = Sequence::default();
    for number in 1..100_000 {
        // Far enough apart not to be a sequence with holes.
        let at = (mica_units::random_at(7, number) % 1000) * (16 << 20);
        assert_eq!(read(&sequence, at + 8192 * (number % 2), 4096), None);
    }
}

#[test]
fn window_begins_where_a_sequence_stands_and_doubles_to_its_maximum() {
    let sequence = Sequence::default();
    let (mut at, mut lens) = (1 << 30, Vec::new());
    for _ in 0..2000 {
        if let Some(Range { start, end }) = read(&sequence, at, 64 << 10) {
            let here = at + (64 << 10);
            assert!(start >= here && start - here <= WINDOW_MAX / 2, "{start:#x} at {here:#x}");
            lens.push(end - start);
            sequence.finish(start, end, false);
        }
        at += 64 << 10;
    }
    assert_eq!(lens[..4], [1 << 20, 2 << 20, 4 << 20, 8 << 20]);
    assert!(lens[3..].iter().all(|len| *len == WINDOW_MAX));
}

#[test]
fn one_window_is_under_way_at_a_time() {
    let sequence = Sequence::default();
    let Range { start, end } = read_on(&sequence, 1 << 30, 1 << 20).expect("a window");
    assert_eq!(read_on(&sequence, (1 << 30) + (1 << 20), 64 << 20), None);
    sequence.finish(start, end, false);
    assert!(read_on(&sequence, (1 << 30) + (65 << 20), 1 << 20).is_some());
}

#[test]
fn cached_window_is_followed_by_a_long_rest() {
    let sequence = Sequence::default();
    let Range { start, end } = read_on(&sequence, 1 << 30, 128 << 10).expect("a window");
    sequence.finish(start, end, true);
    let rest = (end + CACHED_STRIDE - WINDOW_MIN / 2) - ((1 << 30) + (128 << 10));
    assert_eq!(read_on(&sequence, (1 << 30) + (128 << 10), rest - (64 << 10)), None);
    let next = read_on(&sequence, (1 << 30) + (128 << 10) + rest - (64 << 10), 1 << 20);
    assert_eq!(next.expect("a window").start, end + CACHED_STRIDE);
}

#[test]
fn sequence_that_was_left_begins_with_a_short_window_elsewhere() {
    let sequence = Sequence::default();
    for base in [1 << 30, 3 << 30, 2 << 30] {
        let Range { start, end } = read_on(&sequence, base, 128 << 10).expect("a window");
        assert_eq!((start, end - start), (base + (128 << 10), WINDOW_MIN));
        sequence.finish(start, end, false);
    }
}

#[test]
fn holes_do_not_end_a_sequence() {
    let sequence = Sequence::default();
    read_on(&sequence, 0, 1 << 20).expect("a window");
    sequence.is_busy.store(false, Ordering::Relaxed);
    sequence.ahead.store(0, Ordering::Relaxed);
    let windows = (2..5_u64).filter_map(|piece| read(&sequence, piece << 20, 256 << 10));
    assert_eq!(windows.count(), 1);
}

#[test]
fn small_reads_far_apart_are_none() {
    let sequence = Sequence::default();
    for stride in [64 << 10, 1 << 20, 4 << 20] {
        let mut reads = (0..10_000).filter_map(|number| read(&sequence, number * stride, 4096));
        assert_eq!(reads.next(), None, "every {stride}");
    }
}

#[test]
fn window_that_ends_late_leaves_the_next_sequence_alone() {
    let sequence = Sequence::default();
    let Range { start, end } = read_on(&sequence, 1 << 40, 128 << 10).expect("a window");
    assert_eq!(read_on(&sequence, 0, 256 << 10), None, "one is under way");
    sequence.finish(start, end, false);
    let next = read_on(&sequence, 256 << 10, 64 << 10).expect("a window");
    assert_eq!(next.end - next.start, WINDOW_MIN);
}
