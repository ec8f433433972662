//! What a log records of the image besides its changes: the state that its groups build on.

use super::format::{HEADER, SPACE, append_head};
use mica_qcow2_format::Header;
use mica_units::HostCluster;

/// Runs of unused clusters that are listed; any more are leaked.
pub(super) const RUNS_MAX: usize = 64;
const RUN_BYTES: usize = 16;
const FIELDS_WORDS: usize = 8;

/// A run of host clusters: the first one, and how many.
pub(crate) type Run = (HostCluster, u64);

/// Every field of the header that a writer, or another program, might change, and a number that
/// grows by one with each change by a writer.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct HeaderFields {
    pub(crate) generation: u64,
    /// Length of the disk.
    pub(crate) size: u64,
    /// Where the L1 table is, and its entries.
    pub(crate) l1: (u64, u32),
    /// Where the refcount table is, and its clusters.
    pub(crate) refcount_table: (u64, u32),
    /// Where the snapshot table is, and its entries.
    pub(crate) snapshots: (u64, u32),
}

impl HeaderFields {
    /// The fields of `header`, as generation `generation`.
    pub(crate) fn of(header: &Header, generation: u64) -> Self {
        Self {
            generation,
            size: header.size,
            l1: (header.l1_offset.bytes(), header.l1_entries),
            refcount_table: (header.refcount_table_offset.bytes(), header.refcount_table_clusters),
            snapshots: (header.snapshots_offset.bytes(), header.snapshot_count),
        }
    }

    /// Whether `header` has these fields.
    pub(super) fn is_in(&self, header: &Header) -> bool {
        *self == Self::of(header, self.generation)
    }

    fn words(&self) -> [u64; FIELDS_WORDS] {
        let Self { generation, size, l1, refcount_table, snapshots } = *self;
        [
            generation,
            size,
            l1.0,
            l1.1.into(),
            refcount_table.0,
            refcount_table.1.into(),
            snapshots.0,
            snapshots.1.into(),
        ]
    }

    fn from_words(words: &[u64; FIELDS_WORDS]) -> Option<Self> {
        let small = |word: u64| u32::try_from(word).ok();
        let [generation, size, l1, entries, table, clusters, snapshots, count] = *words;
        Some(Self {
            generation,
            size,
            l1: (l1, small(entries)?),
            refcount_table: (table, small(clusters)?),
            snapshots: (snapshots, small(count)?),
        })
    }
}

/// The fields of the header, and during a change also those that it may already have.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct HeaderState {
    pub(crate) now: HeaderFields,
    pub(crate) next: Option<HeaderFields>,
}

impl HeaderState {
    /// Appends it as a record.
    pub(super) fn append_to(&self, bytes: &mut Vec<u8>) {
        let words = self.now.words().into_iter();
        let words: Vec<u64> = words.chain(self.next.iter().flat_map(HeaderFields::words)).collect();
        append_head(bytes, 0, words.len() * 8, HEADER);
        words.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
    }

    /// Decodes a record; `None` if it is malformed.
    pub(super) fn decode(content: &[u8]) -> Option<Self> {
        let (words, []) = content.as_chunks::<8>() else { return None };
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let (now, next) = words.split_first_chunk::<FIELDS_WORDS>()?;
        let now = HeaderFields::from_words(now)?;
        if next.is_empty() {
            return Some(Self { now, next: None });
        }
        let next = HeaderFields::from_words(next.try_into().ok()?)?;
        let follows = next.generation == now.generation.wrapping_add(1);
        follows.then_some(Self { now, next: Some(next) })
    }

    /// Whether the writer may have left `header`.
    pub(super) fn allows(&self, header: &Header) -> bool {
        self.now.is_in(header) || self.next.is_some_and(|next| next.is_in(header))
    }
}

/// What is known of the file's clusters.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct SpaceState {
    /// The file is at least this long.
    pub(crate) min_file_len: u64,
    /// Clusters that are counted and not linked: the counts are durable, or in the log.
    pub(crate) unused: Vec<Run>,
}

impl SpaceState {
    /// Appends it as a record.
    pub(super) fn append_to(&self, bytes: &mut Vec<u8>) {
        let runs = &self.unused[..self.unused.len().min(RUNS_MAX)];
        append_head(bytes, self.min_file_len, runs.len() * RUN_BYTES, SPACE);
        for (first, count) in runs {
            bytes.extend_from_slice(&first.number().to_le_bytes());
            bytes.extend_from_slice(&count.to_le_bytes());
        }
    }

    /// Decodes a record; `None` if it is malformed.
    pub(super) fn decode(min_file_len: u64, content: &[u8]) -> Option<Self> {
        let (words, []) = content.as_chunks::<8>() else { return None };
        let (pairs, []) = words.as_chunks::<2>() else { return None };
        let runs = pairs.iter().map(|pair| pair.map(u64::from_le_bytes));
        let unused = runs.map(|[first, count]| (HostCluster::new(first), count)).collect();
        Some(Self { min_file_len, unused })
    }
}

/// What the groups of a log build on.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct LogBaseline {
    pub(crate) header: HeaderState,
    pub(crate) space: SpaceState,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(generation: u64) -> HeaderFields {
        HeaderFields {
            generation,
            size: 1 << 40,
            l1: (3 << 16, 7),
            refcount_table: (1 << 16, 2),
            snapshots: (0, 0),
        }
    }

    #[test]
    fn header_state_that_is_appended_decodes_to_itself() {
        for next in [None, Some(fields(6))] {
            let state = HeaderState { now: fields(5), next };
            let mut bytes = Vec::new();
            state.append_to(&mut bytes);
            assert_eq!(HeaderState::decode(&bytes[16..]), Some(state));
            assert_eq!(HeaderState::decode(&bytes[16..bytes.len() - 1]), None);
        }
    }

    #[test]
    fn next_header_that_does_not_follow_the_present_one_is_not_a_record() {
        let mut bytes = Vec::new();
        HeaderState { now: fields(5), next: Some(fields(7)) }.append_to(&mut bytes);
        assert_eq!(HeaderState::decode(&bytes[16..]), None);
    }

    #[test]
    fn space_that_is_appended_decodes_to_itself_as_far_as_runs_are_listed() {
        let unused: Vec<Run> = (0..100).map(|run| (HostCluster::new(run * 10), 3)).collect();
        let state = SpaceState { min_file_len: 77, unused: unused.clone() };
        let mut bytes = Vec::new();
        state.append_to(&mut bytes);
        let decoded = SpaceState::decode(77, &bytes[16..]).expect("a record");
        assert_eq!(decoded.unused, unused[..RUNS_MAX]);
    }
}
