//! Numbers for tests that try many things.

/// Numbers that follow from a seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        mica_units::next_random(&mut self.0)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// The number of something in a list of `len`.
    pub(crate) fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).expect("less than a length")
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }

    /// A number that is often at a border.
    pub(crate) fn number(&mut self) -> u32 {
        let interesting = [0, 1, 4, 28, 511, 4096, 4097, 1 << 16, 1 << 20, 1 << 25, 1 << 31];
        match self.below(3) {
            0 => interesting[self.index(11)],
            1 => u32::MAX - u32::from(self.byte()),
            _ => u32::from(self.byte()),
        }
    }
}
