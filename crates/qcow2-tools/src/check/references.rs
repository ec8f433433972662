//! The references to each cluster of the file, counted with the image's own refcount width.

use mica_qcow2_format::RefcountWidth;

const CHUNK_BYTES: usize = 1 << 15;
const CHUNK_BITS_EXPONENT: u32 = 18;

/// References to clusters. Kept in chunks that exist only once something in them is counted, so
/// that the holes of a sparse file cost nothing.
pub(crate) struct References {
    width: RefcountWidth,
    chunks: Vec<Option<Box<[u8; CHUNK_BYTES]>>>,
    cluster_count: u64,
}

impl References {
    pub(super) fn new(width: RefcountWidth, cluster_count: u64) -> Self {
        Self { width, chunks: Vec::new(), cluster_count }
    }

    /// Clusters of the file, plus one if its last one was found to be in use beyond the end.
    pub(crate) fn cluster_count(&self) -> u64 {
        self.cluster_count
    }

    /// Counts `times` more references; returns how many of them exceed the highest refcount. The
    /// caller keeps `cluster` within the file.
    pub(super) fn add(&mut self, cluster: u64, times: u64) -> u64 {
        self.cluster_count = self.cluster_count.max(cluster + 1);
        let (chunk, index) = self.place(cluster);
        if self.chunks.len() <= chunk {
            self.chunks.resize(chunk + 1, None);
        }
        let Some(slot) = self.chunks.get_mut(chunk) else { return 0 };
        let chunk = slot.get_or_insert_with(|| Box::new([0; CHUNK_BYTES]));
        let before = self.width.get(&chunk[..], index).unwrap_or(0);
        let after = before.saturating_add(times).min(self.width.max());
        let set = self.width.set(&mut chunk[..], index, after);
        debug_assert!(set.is_some(), "the index lies in the chunk, the value below the maximum");
        times - (after - before)
    }

    pub(crate) fn get(&self, cluster: u64) -> u64 {
        let (chunk, index) = self.place(cluster);
        match self.chunks.get(chunk) {
            Some(Some(chunk)) => self.width.get(&chunk[..], index).unwrap_or(0),
            _ => 0,
        }
    }

    /// The first cluster from `cluster` on in a chunk where something is counted.
    pub(crate) fn next_counted(&self, cluster: u64) -> Option<u64> {
        let (chunk, _) = self.place(cluster);
        let first = self.chunks.iter().skip(chunk).position(Option::is_some)? + chunk;
        Some(cluster.max((first as u64) << self.chunk_entries_bits()))
    }

    fn chunk_entries_bits(&self) -> u32 {
        CHUNK_BITS_EXPONENT - self.width.order()
    }

    fn place(&self, cluster: u64) -> (usize, usize) {
        let bits = self.chunk_entries_bits();
        // Checked files have at most 2^31 clusters.
        let narrow = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        (narrow(cluster >> bits), narrow(cluster & ((1 << bits) - 1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_beyond_the_width_are_told() {
        let mut references = References::new(RefcountWidth::from_order(1).expect("valid"), 1 << 20);
        assert_eq!(references.add(1 << 19, 2), 0);
        assert_eq!(references.add(1 << 19, 2), 1);
        assert_eq!(references.get(1 << 19), 3);
        assert_eq!(references.get(0), 0);
        assert_eq!(references.cluster_count(), 1 << 20);
    }

    #[test]
    fn chunks_without_references_are_skipped() {
        let mut references = References::new(RefcountWidth::DEFAULT, 1 << 20);
        assert_eq!(references.next_counted(0), None);
        references.add(40_000, 1);
        let first = references.next_counted(0).expect("counted");
        assert!(first <= 40_000 && first > 30_000);
        assert_eq!(references.next_counted(39_999), Some(39_999));
        assert_eq!(references.next_counted(1 << 19), None);
    }
}
