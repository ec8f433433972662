//! The bytes of a qcow2 image: decode and encode, no I/O, no clock. Internal crate.
//!
//! Every decoder here takes bytes that an attacker may have written. Invariants:
//!
//! - I1. No decoder panics, whatever the bytes are: each length is checked before it is used, and
//!   all arithmetic on values from the image is checked or provably small.
//! - I2. No decoder allocates more than a small multiple of the bytes it was given.
//! - I3. What `qemu-img` opens for reading decodes; what it refuses is refused, for the same
//!   reason. Where we refuse more (protocols in names, raw data files that are encrypted), the
//!   error says so and its kind is [`Unsupported`](mica_block::ErrorKind::Unsupported).
//! - I4. `encode` followed by `decode` gives the same value.
//!
//! The layouts are those of QEMU's `docs/interop/qcow2.rst`; each is declared once, as a struct of
//! big-endian fields whose size is asserted.

mod bitmap;
pub mod bits;
mod compressed;
mod extension;
mod foreign;
mod header;
mod name;
mod refcount;
mod snapshot;
mod table;

pub use bitmap::{
    BITMAP_BYTES_MAX, BITMAP_TABLE_ENTRY_BYTES, BitmapEntry, BitmapFields, BitmapTableEntry,
    bitmap_bytes, bitmap_table_entries, change_bitmap_directory, decode_bitmap_directory,
};
pub use compressed::{CompressedCluster, Compression, Decompressor, decompress};
pub use extension::{BitmapsExtension, Extension, FeatureKind, FeatureName};
pub use header::field;
pub use header::{
    Autoclear, BackingChange, BackingName, Compatible, Encryption, HEADER_READ_BYTES, Header,
    HeaderChange, Incompatible, MAGIC, REFCOUNT_TABLE_BYTES_MAX, Version,
};
pub use name::{ImageName, parse_data_file_name, parse_image_name};
pub use refcount::{RefcountTableEntry, RefcountWidth};
pub use snapshot::{SNAPSHOT_COUNT_MAX, SNAPSHOT_TABLE_BYTES_MAX, SnapshotDecoded, SnapshotEntry};
pub use table::{L1_BYTES_MAX, L1Entry, L2Entry, L2Format, RawL2Entry, SUBCLUSTER_COUNT};

use mica_block::{Error, ErrorKind};

fn corrupt(context: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, context)
}

fn unsupported(context: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unsupported, context)
}

/// The bytes before the first NUL, which is where C strings, and QEMU, end a name.
fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|&byte| byte == 0).next().unwrap_or_default()
}
