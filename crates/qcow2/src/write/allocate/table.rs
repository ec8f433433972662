//! The refcount table in memory.

/// The entries of the table. It has at least a cluster of them, of which a disk uses a few: what
/// follows the last that names a block takes no memory.
pub(super) struct RefcountTable {
    used: Vec<u64>,
    len: usize,
}

impl RefcountTable {
    /// The table of `entries`.
    pub(super) fn new(
        entries: impl ExactSizeIterator<Item = u64> + DoubleEndedIterator + Clone,
    ) -> Self {
        let (len, last) = (entries.len(), entries.clone().rposition(|entry| entry != 0));
        Self { used: entries.take(last.map_or(0, |last| last + 1)).collect(), len }
    }

    /// How many entries it has.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The entry at `index`; `None` beyond its end.
    pub(super) fn get(&self, index: usize) -> Option<u64> {
        (index < self.len).then(|| self.used.get(index).copied().unwrap_or(0))
    }

    /// Sets an entry.
    ///
    /// # Panics
    /// If it is beyond the end.
    pub(super) fn set(&mut self, index: usize, entry: u64) {
        assert!(index < self.len, "within the table");
        if index >= self.used.len() {
            if entry == 0 {
                return;
            }
            self.used.resize(index + 1, 0);
        }
        self.used[index] = entry;
    }

    /// All entries.
    pub(super) fn to_vec(&self) -> Vec<u64> {
        let mut all = self.used.clone();
        all.resize(self.len, 0);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_behind_the_last_block_take_no_memory_and_read_as_none() {
        let mut table = RefcountTable::new([7, 0, 9, 0, 0, 0].into_iter());
        assert_eq!((table.len(), table.used.len()), (6, 3));
        let entries: Vec<_> = (0..7).map(|index| table.get(index)).collect();
        let expected = [Some(7), Some(0), Some(9), Some(0), Some(0), Some(0), None];
        assert_eq!(entries, expected);
        table.set(4, 5);
        table.set(5, 0);
        assert_eq!(table.to_vec(), [7, 0, 9, 0, 5, 0]);
        assert_eq!(table.used.len(), 5);
    }
}
