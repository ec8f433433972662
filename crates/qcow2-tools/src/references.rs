//! The references to each cluster of the file, counted with the image's own refcount width.

use mica_qcow2_format::RefcountWidth;
use mica_units::HostCluster;

const CHUNK_BYTES: usize = 1 << 15;
const CHUNK_BITS_EXPONENT: u32 = 18;

/// References to clusters, or those besides the first one. Kept in chunks that exist only once
/// something in them is counted, so that the holes of a sparse file cost nothing.
#[derive(Debug)]
pub(crate) struct References {
    width: RefcountWidth,
    chunks: Vec<Option<Box<[u8; CHUNK_BYTES]>>>,
    end: HostCluster,
}

impl References {
    pub(crate) fn new(width: RefcountWidth, end: HostCluster) -> Self {
        Self { width, chunks: Vec::new(), end }
    }

    /// Where the file ends, or one cluster after that if its last one was found to be in use beyond
    /// the end.
    pub(crate) fn end(&self) -> HostCluster {
        self.end
    }

    /// Counts `times` more references; returns how many of them exceed the highest refcount. The
    /// caller keeps `cluster` within the file.
    pub(crate) fn add(&mut self, cluster: HostCluster, times: u64) -> u64 {
        self.end = self.end.max(cluster.saturating_add(1));
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

    pub(crate) fn get(&self, cluster: HostCluster) -> u64 {
        let (chunk, index) = self.place(cluster);
        match self.chunks.get(chunk) {
            Some(Some(chunk)) => self.width.get(&chunk[..], index).unwrap_or(0),
            _ => 0,
        }
    }

    /// The first cluster from `cluster` on in a chunk where something is counted.
    pub(crate) fn next_counted(&self, cluster: HostCluster) -> Option<HostCluster> {
        let (chunk, _) = self.place(cluster);
        let first = self.chunks.iter().skip(chunk).position(Option::is_some)? + chunk;
        Some(cluster.max(HostCluster::new((first as u64) << self.chunk_entries_bits())))
    }

    /// Bytes of the counts.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        let chunks = self.chunks.iter().flatten().count();
        chunks * CHUNK_BYTES + self.chunks.len() * size_of::<Option<Box<[u8; CHUNK_BYTES]>>>()
    }

    fn chunk_entries_bits(&self) -> u32 {
        CHUNK_BITS_EXPONENT - self.width.order()
    }

    fn place(&self, cluster: HostCluster) -> (usize, usize) {
        let (number, bits) = (cluster.number(), self.chunk_entries_bits());
        // Checked files have at most 2^31 clusters.
        let narrow = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        (narrow(number >> bits), narrow(number & ((1 << bits) - 1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_beyond_the_width_are_reported() {
        let (cluster, end) = (HostCluster::new(1 << 19), HostCluster::new(1 << 20));
        let mut references = References::new(RefcountWidth::from_order(1).expect("valid"), end);
        assert_eq!(references.add(cluster, 2), 0);
        assert_eq!(references.add(cluster, 2), 1);
        assert_eq!(references.get(cluster), 3);
        assert_eq!(references.get(HostCluster::ZERO), 0);
        assert_eq!(references.end(), end);
    }

    #[test]
    fn chunks_without_references_are_skipped() {
        let mut references = References::new(RefcountWidth::DEFAULT, HostCluster::new(1 << 20));
        assert_eq!(references.next_counted(HostCluster::ZERO), None);
        references.add(HostCluster::new(40_000), 1);
        let next = |cluster| references.next_counted(HostCluster::new(cluster));
        let first = next(0).expect("counted").number();
        assert!(first <= 40_000 && first > 30_000);
        assert_eq!(next(39_999), Some(HostCluster::new(39_999)));
        assert_eq!(next(1 << 19), None);
    }
}
