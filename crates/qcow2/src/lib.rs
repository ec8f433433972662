//! qcow2 images and chains of them. Internal crate.
//!
//! ```text
//! Chain ──▶ index   one map for the whole chain: slices in a cache, a tree in sidecars
//!       ──▶ layers  one image each: its tables, its data
//!               └─▶ format  the bytes, pure
//! ```

mod chain;
pub mod check;
mod crc32c;
pub mod create;
mod decoded;
mod detail;
mod gate;
mod header_io;
mod index;
mod inspect;
mod l1_place;
mod layer;
mod layers;
mod live;
mod map;
pub mod measure;
mod open;
mod preallocated;
pub mod recover;
mod redo;
pub mod resize;
pub mod snapshots;
mod write;
pub mod writer;

pub use chain::{CACHE_BYTES_DEFAULT, CACHE_BYTES_MIN, Chain, ChainOptions, IndexUse};
pub use inspect::{ImageInfo, SNAPSHOTS_LISTED_MAX, inspect, loop_error, open_for_check};
