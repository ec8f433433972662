//! What a snapshot names.

use crate::place::Place;
use crate::state::Root;
use mica_block::{Error, ErrorKind, Result};

/// The number of the snapshot whose record is at `at`, and the root of its map.
///
/// # Errors
/// `Corrupt` if `bytes` do not begin with its record.
pub(crate) fn of_snapshot(_bytes: &[u8], at: Place) -> Result<(u64, Root)> {
    let what = format!("a snapshot at {} of {}", at.offset(), at.extent().name());
    Err(Error::new(ErrorKind::Unsupported, what))
}
