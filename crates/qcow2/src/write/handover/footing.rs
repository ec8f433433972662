//! What a log says of the image besides what it changes.

use super::{FOOTING, append_head};

/// Runs of unused clusters that are told; what there is beyond is leaked.
pub(super) const RUNS_MAX: usize = 64;
pub(super) const RUN_BYTES: usize = 16;
/// Numbers before the runs.
const WORDS: usize = 6;

/// A run of host clusters: the first one's number, and how many.
pub(crate) type Run = (u64, u64);

/// What a log says of the file besides what it changes.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Footing {
    /// The file is at least this long.
    pub(crate) reach: u64,
    /// Where the refcount table is: in one of these two places.
    pub(crate) tables: [u64; 2],
    /// The same of the L1 table.
    pub(crate) l1: [u64; 2],
    /// Where the table of snapshots is, and how many it has.
    pub(crate) snapshots: (u64, u64),
    /// Clusters that are counted and that nothing links (I6).
    pub(crate) unused: Vec<Run>,
}

impl Footing {
    /// Appends it as a record.
    pub(super) fn append_to(&self, bytes: &mut Vec<u8>) {
        let runs = &self.unused[..self.unused.len().min(RUNS_MAX)];
        append_head(bytes, self.reach, WORDS * 8 + runs.len() * RUN_BYTES, FOOTING);
        let ([one, other], [l1, next_l1]) = (self.tables, self.l1);
        let words: [u64; WORDS] = [one, other, l1, next_l1, self.snapshots.0, self.snapshots.1];
        for word in words {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        for (first, count) in runs {
            bytes.extend_from_slice(&first.to_le_bytes());
            bytes.extend_from_slice(&count.to_le_bytes());
        }
    }

    /// What a record says; `None` if it is none.
    pub(crate) fn decode(reach: u64, content: &[u8]) -> Option<Self> {
        let (words, []) = content.as_chunks::<8>() else { return None };
        let (words, runs) = words.split_first_chunk::<WORDS>()?;
        let [one, other, l1, next_l1, at, count] = words.map(u64::from_le_bytes);
        let (tables, l1, snapshots) = ([one, other], [l1, next_l1], (at, count));
        Some(Self { reach, tables, l1, snapshots, unused: decode_runs(runs)? })
    }
}

pub(super) fn decode_runs(words: &[[u8; 8]]) -> Option<Vec<Run>> {
    let (pairs, []) = words.as_chunks::<2>() else { return None };
    Some(pairs.iter().map(|pair| pair.map(u64::from_le_bytes).into()).collect())
}
