//! Which segments of a log count, and how far. No I/O.
//!
//! A process that goes on with a log begins a segment where what it found ends, whatever else is
//! there: in older segments, records from the first of a newer one on do not count. Where records
//! are missing between two segments that count, the log ends: what is behind was not durable, for a
//! sync makes durable all that was written before.
//!
//! Older segments may be damaged because they are being used again. That does not matter: it
//! happens only to those without a record that the volume needs, and it says from which on it does.

use super::format::{Kind, SegmentHeader};
use crate::format::Id;

/// A segment of a log, and which of its records count: those from `first` on and below `limit`, as
/// far as they are there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Part {
    pub(super) slot: usize,
    pub(super) number: u64,
    pub(super) session: Id,
    pub(super) first: u64,
    pub(super) limit: u64,
}

/// The parts of a log with these `segments`, which are in the order of their numbers, that may have
/// records from `from` on; none if the log begins later.
pub(super) fn parts<'a>(
    segments: impl DoubleEndedIterator<Item = (usize, &'a SegmentHeader)>,
    from: u64,
) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut limit = u64::MAX;
    for (slot, header) in segments.rev() {
        if header.first >= limit || header.kind != Kind::Records {
            continue;
        }
        let SegmentHeader { number, session, first, .. } = *header;
        parts.push(Part { slot, number, session, first, limit });
        if first <= from {
            parts.reverse();
            return parts;
        }
        limit = first;
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::Writer;

    fn header((number, first): (u64, u64)) -> SegmentHeader {
        let [device, session, store, volume] = [[0; 16]; 4];
        let (kind, writers) = (Kind::Records, vec![Writer::FIRST]);
        let (root, oldest, freed, durable) = (1, 1, 0, 0);
        SegmentHeader {
            kind,
            device,
            session,
            store,
            volume,
            number,
            root,
            oldest,
            first,
            freed,
            durable,
            writers,
        }
    }

    /// The (first, limit) of the parts of a log of segments (number, first), from `from` on.
    fn parts_of(segments: &[(u64, u64)], from: u64) -> Vec<(u64, u64)> {
        let headers: Vec<_> = segments.iter().copied().map(header).collect();
        let found = parts(headers.iter().enumerate(), from);
        found.iter().map(|part| (part.first, part.limit)).collect()
    }

    const END: u64 = u64::MAX;

    #[test]
    fn log_counts_from_the_segment_with_the_record_that_is_needed() {
        let segments = [(1, 0), (2, 10), (5, 20)];
        assert_eq!(parts_of(&segments, 0), [(0, 10), (10, 20), (20, END)]);
        assert_eq!(parts_of(&segments, 9), [(0, 10), (10, 20), (20, END)]);
        assert_eq!(parts_of(&segments, 10), [(10, 20), (20, END)]);
        assert_eq!(parts_of(&segments, 99), [(20, END)]);
    }

    #[test]
    fn newer_segment_cuts_off_what_older_ones_have_from_its_first_record_on() {
        // Segment 3 was lost for good when 4 went on after record 14; 2 was empty.
        let segments = [(1, 0), (2, 15), (3, 30), (4, 15)];
        assert_eq!(parts_of(&segments, 3), [(0, 15), (15, END)]);
        assert_eq!(parts_of(&segments, 40), [(15, END)]);
    }

    #[test]
    fn log_that_begins_later_has_no_parts() {
        assert_eq!(parts_of(&[(1, 5), (2, 9)], 4), []);
        assert_eq!(parts_of(&[], 0), []);
    }
}
