//! Of which bytes a state is, as far as that is known without reading them, and what a folder keeps
//! of that.

use crate::format::Begin;

/// Of which bytes a state is.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Content {
    /// What stays the same for as long as the state is kept.
    pub lasting: Vec<u8>,
    /// What stays the same for as long as nothing that lies beneath the state is merged; empty if
    /// nobody knows.
    pub beneath: Vec<u8>,
}

impl Content {
    /// Nobody knows what lies beneath.
    pub fn lasting(lasting: impl Into<Vec<u8>>) -> Self {
        Self { lasting: lasting.into(), beneath: Vec::new() }
    }

    /// What a data file is called after: the content, and what of it the step has.
    pub(crate) fn key(&self, begin: &Begin) -> u64 {
        let bytes = Begin { time_ns: 0, ..begin.clone() }.encode();
        let mut hasher = blake3::Hasher::new();
        hasher.update(&bytes).update(&self.lasting).update(&self.beneath);
        let first = hasher.finalize().as_bytes().first_chunk().copied();
        u64::from_le_bytes(first.expect("longer than that"))
    }

    /// What a manifest says of it, whatever becomes of the step. Never 0, which those of an older
    /// mica have.
    pub(crate) fn sum(&self) -> u32 {
        let first = blake3::hash(&self.lasting).as_bytes().first_chunk().copied();
        u32::from_le_bytes(first.expect("longer than that")).max(1)
    }
}
