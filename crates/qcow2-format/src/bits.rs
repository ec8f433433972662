//! Single bits of headers and tables, for code that changes them where they are stored.

/// Of incompatible features: refcounts may be wrong.
pub const DIRTY: u64 = 1 << 0;
/// Of incompatible features: the image must not be written.
pub const CORRUPT: u64 = 1 << 1;
/// Of autoclear features: the bitmaps match the data.
pub const BITMAPS_CONSISTENT: u64 = 1 << 0;
/// Of autoclear features: the data file by itself is a raw disk.
pub const RAW_EXTERNAL: u64 = 1 << 1;
/// Of entries of L1 and L2 tables: the refcount of what it names is one.
pub const COPIED: u64 = 1 << 63;
