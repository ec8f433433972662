//! Untrusted bytes as each of the things that a store or a sender may hand a volume. For fuzzing,
//! and for the tests that replay what that found.
//!
//! Sums are no obstacle to whoever means harm: each of these also decodes the same bytes with the
//! sums that they should have. Every function returns, whatever the bytes are, or they have found a
//! bug.

use crate::format::boot::BootRecord;
use crate::format::head::Head;
use crate::format::snapshot::Record;
use crate::frames;
use crate::place::{BLOCK_BYTES, ExtentId, FRAME_BLOCKS_MAX, Place, Writer};
use crate::stream;
use mica_map::crc32c;

/// Where everything is that is read here.
const OFFSET: usize = 1 << 20;

/// It is newer than what anything here names.
fn extent() -> ExtentId {
    ExtentId { writer: Writer::new(1 << 39).expect("a number that a writer has"), sequence: 5 }
}

/// A boot record.
///
/// # Panics
/// If what is decoded has a second form.
pub fn boot_record(bytes: &[u8]) {
    let mut mended = bytes.to_vec();
    BootRecord::mend(&mut mended);
    for bytes in [bytes, &mended] {
        if let Ok(record) = BootRecord::decode(bytes) {
            assert_eq!(BootRecord::decode(&record.encode()), Ok(record), "it has one form");
        }
    }
}

/// A head, and what may stand behind it.
///
/// # Panics
/// If what is decoded has a second form.
pub fn head(bytes: &[u8]) {
    let mut mended = bytes.to_vec();
    Head::mend(&mut mended);
    for bytes in [bytes, &mended] {
        if let Ok(head) = Head::decode(bytes) {
            // Of a path that is no text people see what can be shown of it.
            let head = Head { log: None, ..head };
            assert_eq!(Head::decode(&head.encode()), Ok(head), "it has one form");
        }
    }
}

/// The record of a snapshot, as the payload of its node.
///
/// # Panics
/// If what is decoded has a second form, or names what was not there before it.
pub fn snapshot_record(bytes: &[u8]) {
    let at = Place::new(extent(), OFFSET, crc32c(bytes));
    if let Ok(record) = Record::decode(bytes, at) {
        assert_eq!(Record::decode(&record.encode(), at), Ok(record), "it has one form");
    }
}

/// A frame of compressed blocks.
///
/// # Panics
/// If what it has is not as many whole blocks as it says.
pub fn frame(bytes: &[u8]) {
    let Some((part, sum, blocks)) = frames::found(bytes, OFFSET as u64) else { return };
    let at = Place::in_frame(extent(), part, sum);
    let mut room = bytes.to_vec();
    let checked = frames::check(bytes, at);
    if let Ok(content) = frames::open(&mut room, at, None) {
        assert_eq!(checked.ok().map(|blocks| blocks * BLOCK_BYTES), Some(content.len()));
        assert!(blocks <= FRAME_BLOCKS_MAX as u64 && content.len() as u64 / blocks == 4096);
    }
}

/// A stream, which gets the sums that it should have.
pub fn mend_stream(bytes: &mut [u8]) {
    stream::mend(bytes);
}
