//! Offsets of the fixed fields of a header (specification, section "Header").

/// Length of the disk: u64.
pub const SIZE: usize = 24;
/// Entries of the L1 table: u32; its offset follows.
pub const L1_ENTRIES: usize = 36;
/// Offset of the L1 table: u64.
pub const L1_OFFSET: usize = 40;
/// Offset of the refcount table: u64; its length in clusters follows, u32.
pub const REFCOUNT_TABLE: usize = 48;
/// Number of internal snapshots: u32.
pub const SNAPSHOT_COUNT: usize = 60;
/// Offset of the snapshot table: u64.
pub const SNAPSHOT_TABLE: usize = 64;
/// Incompatible feature bits, from version 3 on: u64.
pub const INCOMPATIBLE: usize = 72;
/// Autoclear feature bits, from version 3 on: u64.
pub const AUTOCLEAR: usize = 88;
