use super::range;
use super::ranges::Ranges;
use crate::index::slice::{Entry, EntryKind, Run, Runs};
use mica_units::{HostOffset, LayerNumber, Rng, SECTOR_BYTES};

fn random_runs(rng: &mut Rng, sectors: u32) -> Runs {
    let mut runs = Runs::default();
    let mut at = 0;
    while at < sectors {
        let end = at + 1 + u32::try_from(rng.below(9)).expect("small");
        let host = HostOffset::new((rng.below(3) * 1000 + u64::from(at)) * SECTOR_BYTES);
        let entry = match rng.below(5) {
            0 => None,
            1 => Some(Entry::without_host(EntryKind::Zero, LayerNumber::BASE)),
            2 => Some(Entry::without_host(EntryKind::Deferred, LayerNumber::BASE)),
            3 => Some(Entry::at_host(EntryKind::ZeroAllocated, LayerNumber::BASE, host)),
            _ => Some(Entry::at_host(EntryKind::Data, LayerNumber::BASE, host)),
        };
        if let Some(entry) = entry {
            runs.push(Run { start: at, end: end.min(sectors), entry });
        }
        at = end;
    }
    runs
}

/// Sector by sector, as it is said.
#[test]
fn states_of_one_file_differ_where_their_entries_do() {
    const SECTORS: u32 = 64;
    let window = range(1 << 20, (1 << 20) + u64::from(SECTORS) * SECTOR_BYTES);
    for seed in 0..500 {
        let mut rng = Rng::new(seed);
        let (one, other) = (random_runs(&mut rng, SECTORS), random_runs(&mut rng, SECTORS));
        let mut ranges = Ranges::default();
        ranges.add_difference(&one, &other);
        let found = ranges.finish(window);
        for pair in found.windows(2) {
            assert!(pair[0].end() < pair[1].start(), "seed {seed}: in order and joined");
        }
        for sector in 0..SECTORS {
            let at = window.start().bytes() + u64::from(sector) * SECTOR_BYTES;
            let is_in = |range: &mica_units::GuestRange| {
                (range.start().bytes()..range.end().bytes()).contains(&at)
            };
            let entry = |runs: &Runs| runs.entry_at(sector);
            let is_deferred =
                |entry: Option<Entry>| entry.is_some_and(|it| it.kind() == EntryKind::Deferred);
            let differs = entry(&one) != entry(&other) || is_deferred(entry(&one));
            assert_eq!(found.iter().any(is_in), differs, "seed {seed}, sector {sector}");
        }
    }
}

#[test]
fn what_overlaps_is_joined_and_ends_with_the_window() {
    let window = range(0, 10 * SECTOR_BYTES);
    let mut ranges = Ranges::default();
    for (start, end) in [(4, 6), (0, 2), (5, 9), (2, 3)] {
        ranges.add_range(range(start * SECTOR_BYTES, end * SECTOR_BYTES), window);
    }
    let entry = Entry::without_host(EntryKind::Zero, LayerNumber::BASE);
    let mut runs = Runs::default();
    runs.push(Run { start: 9, end: 40, entry });
    ranges.add(&runs);
    let found: Vec<_> = ranges
        .finish(window)
        .iter()
        .map(|range| (range.start().bytes() / SECTOR_BYTES, range.end().bytes() / SECTOR_BYTES))
        .collect();
    assert_eq!(found, [(0, 3), (4, 10)]);
}
