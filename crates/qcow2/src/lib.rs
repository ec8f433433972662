//! qcow2 images and chains of them. Internal crate.
//!
//! ```text
//! Chain ──▶ gate    what is under way
//!       ──▶ map     plans and reads: layers, and one index for all of them
//!       ──▶ writer  writes the uppermost layer of its map; redo: what it has not flushed
//! ```

mod bitmaps;
mod chain;
mod cipher;
mod decoded;
mod diff;
mod gate;
mod header_io;
mod index;
mod l1_place;
mod layer;
mod layers;
mod live;
mod map;
mod open;
mod preallocated;
mod redo;
pub mod snapshots;
mod survey;
#[cfg(test)]
mod testing;
mod unclosed;
mod write;

pub use bitmaps::{Bitmap, find_bitmap, open_bitmap};
pub use chain::{Chain, ChainOptions, IndexUse, Repair, flush_ahead, flush_while_long};
pub use cipher::{needed_passphrase, read_luks_header};
pub use diff::{ChainDiff, DiffFormat, DiffState};
pub use header_io::{open_data_file, read_header, read_header_as};
pub use index::cache::{CACHE_BYTES_DEFAULT, CACHE_BYTES_MIN, MapCache, Sharing};
pub use index::seal::{Seal, SealName};
pub use open::loop_error;
pub use redo::{read_over, replay_redo_log};
pub use write::backing::change_backing;
pub use write::beneath::Settling;
pub use write::bitmaps::settle_bitmaps;
pub use write::grow::check_resizable;
pub use write::offline::FileSpace;
