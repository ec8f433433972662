//! Where an L1 table is.

use mica_qcow2_format::L1Entry;
use mica_units::HostOffset;
use parking_lot::RwLock;

/// The place of an L1 table and its number of entries: for an image that is being written, both
/// change when its disk grows.
pub(crate) struct L1Place(RwLock<(HostOffset, u32)>);

impl L1Place {
    pub(crate) fn new(offset: HostOffset, entries: u32) -> Self {
        Self(RwLock::new((offset, entries)))
    }

    pub(crate) fn get(&self) -> (HostOffset, u32) {
        *self.0.read()
    }

    pub(crate) fn set(&self, offset: HostOffset, entries: u32) {
        *self.0.write() = (offset, entries);
    }
}

/// The bytes of a table of so many entries.
pub(crate) fn table_bytes(entries: u32) -> u64 {
    u64::from(entries) * L1Entry::BYTES as u64
}
