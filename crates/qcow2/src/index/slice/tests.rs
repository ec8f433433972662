//! Runs and slices against an array of one entry for each sector.

use super::*;

const WINDOW: u32 = 2 * SLICE_SECTORS;

fn next(state: &mut u64) -> u32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    u32::try_from(*state >> 33).unwrap()
}

fn random_entry(random: &mut u64) -> Entry {
    let layer = LayerNumber::from_u16(u16::try_from(next(random) % 4).unwrap());
    match next(random) % 4 {
        0 => Entry::without_host(EntryKind::Zero, layer),
        1 => Entry::without_host(EntryKind::Deferred, layer),
        2 => Entry::at_host(EntryKind::ZeroAllocated, layer, HostOffset::new(1 << 20)),
        _ => {
            let host = HostOffset::new(u64::from(next(random) % 64) * SECTOR_BYTES);
            Entry::at_host(EntryKind::Data, layer, host)
        }
    }
}

/// A list of runs and the same as one entry for each sector.
fn random_runs(random: &mut u64) -> (Runs, Vec<Entry>) {
    let mut runs = Runs::default();
    let mut model = vec![Entry::HOLE; WINDOW as usize];
    let mut at = next(random) % 200;
    while at < WINDOW {
        let end = (at + 1 + next(random) % 300).min(WINDOW);
        let entry = random_entry(random);
        runs.push(Run { start: at, end, entry });
        for sector in at..end {
            model[sector as usize] = entry.advanced(sector - at);
        }
        at = end + (next(random) % 3) * (next(random) % 400);
    }
    (runs, model)
}

fn expand(runs: &Runs) -> Vec<Entry> {
    let mut sectors = vec![Entry::HOLE; WINDOW as usize];
    for run in &runs.runs {
        for sector in run.start..run.end {
            sectors[sector as usize] = run.entry.advanced(sector - run.start);
        }
    }
    sectors
}

#[test]
fn overlay_gives_each_sector_its_upper_owner() {
    let mut random = 1;
    for _ in 0..300 {
        let (below, below_model) = random_runs(&mut random);
        let (above, above_model) = random_runs(&mut random);
        let merged = Runs::overlay(&below, &above);
        let expected: Vec<Entry> = above_model
            .iter()
            .zip(&below_model)
            .map(|(above, below)| if *above == Entry::HOLE { *below } else { *above })
            .collect();
        assert!(expand(&merged) == expected);
    }
}

/// A layer held as many sectors beyond the end of a shorter one as the shorter one has in all: the
/// walk took the sum for "nothing is missing" and gave zeros for what the layers beneath hold.
#[test]
fn runs_beyond_the_end_do_not_make_up_for_missing_ones() {
    let mut runs = Runs::default();
    let entry = Entry::without_host(EntryKind::Zero, LayerNumber::BASE);
    runs.push(Run { start: 8, end: 16, entry });
    assert!(!runs.cover(8));
    let mut random = 3;
    for _ in 0..300 {
        let (runs, model) = random_runs(&mut random);
        let missing = model.iter().position(|entry| *entry == Entry::HOLE);
        let covered = u32::try_from(missing.unwrap_or(model.len())).unwrap();
        assert!(runs.cover(covered));
        assert!(covered == WINDOW || !runs.cover(covered + 1));
    }
}

#[test]
fn truncated_runs_own_nothing_beyond() {
    let mut random = 2;
    for _ in 0..100 {
        let (mut runs, mut model) = random_runs(&mut random);
        let at = next(&mut random) % WINDOW;
        runs.truncate(at);
        model[at as usize..].fill(Entry::HOLE);
        assert!(expand(&runs) == model);
    }
}

#[test]
fn slice_of_runs_survives_its_encoding_and_gives_them_back() {
    let mut random = 3;
    for _ in 0..100 {
        let (runs, model) = random_runs(&mut random);
        let mut again = Runs::default();
        for sector in [0, SLICE_SECTORS] {
            let slice = runs.slice_at(sector);
            assert_eq!(Slice::decode(&slice.encode(), 4), Some(slice.clone()));
            assert_eq!(slice.memory_bytes() % 2, 0);
            slice.append_runs(sector, &mut again);
        }
        assert!(expand(&again) == model);
    }
}

#[test]
fn extents_of_any_range_are_exact() {
    let mut random = 4;
    let base = GuestOffset::new(40 * SLICE_BYTES);
    for _ in 0..200 {
        let (runs, model) = random_runs(&mut random);
        let slice = runs.slice_at(0);
        let start = u64::from(next(&mut random)) % SLICE_BYTES;
        let len = 1 + u64::from(next(&mut random)) % (SLICE_BYTES - start);
        let mut extents = Vec::new();
        slice.append_extents(base, base.checked_add(start).unwrap(), len, &mut extents);
        let mut at = base.bytes() + start;
        for extent in &extents {
            assert_eq!(extent.start.bytes(), at);
            let within = at - base.bytes();
            let entry = model[usize::try_from(within / SECTOR_BYTES).unwrap()];
            assert_eq!(extent.kind, entry.extent_kind());
            assert_eq!(extent.layer, entry.layer());
            if entry.has_host() {
                assert_eq!(extent.host.bytes(), entry.host().bytes() + within % SECTOR_BYTES);
            }
            at += extent.len;
        }
        assert_eq!(at, base.bytes() + start + len);
    }
}

#[test]
fn slice_that_lies_is_refused() {
    let runs = Runs {
        runs: vec![Run {
            start: 8,
            end: 16,
            entry: Entry::at_host(EntryKind::Data, LayerNumber::from_u16(3), HostOffset::ZERO),
        }],
    };
    let good = runs.slice_at(0).encode();
    assert!(Slice::decode(&good, 4).is_some());
    assert!(Slice::decode(&good, 3).is_none(), "names a layer that is not there");
    assert!(Slice::decode(&good[..good.len() - 1], 4).is_none());
    assert!(Slice::decode(&[], 4).is_none());
    let mut unsorted = good.clone();
    unsorted.swap(2, 4);
    assert!(Slice::decode(&unsorted, 4).is_none());
    let mut unknown = good;
    unknown[6 + 8 + 5] |= 0xe0;
    assert!(Slice::decode(&unknown, 4).is_none());
}

#[test]
fn host_beyond_the_field_is_left_to_the_layer() {
    let far = HostOffset::new(1 << 55);
    let entry = Entry::at_host(EntryKind::Data, LayerNumber::from_u16(7), far);
    assert_eq!(entry.kind(), EntryKind::Deferred);
    assert_eq!(entry.layer().as_u16(), 7);
}

#[test]
fn a_slice_with_a_few_runs_put_in_is_the_slice_with_them_laid_over() {
    let mut random = 3;
    for _ in 0..300 {
        let slice = random_runs(&mut random).0.slice_at(0);
        let mut above = random_runs(&mut random).0;
        above.truncate(SLICE_SECTORS);
        let first = next(&mut random) as usize % above.runs.len();
        let count = 1 + next(&mut random) as usize % 4;
        above.runs = above.runs.drain(first..).take(count).collect();
        let mut beneath = Runs::default();
        slice.append_runs(0, &mut beneath);
        let expected = Runs::overlay(&beneath, &above).slice_at(0);
        assert_eq!(slice.overlaid(&above), expected);
    }
}
