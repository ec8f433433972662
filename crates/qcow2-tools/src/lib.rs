//! Operations on qcow2 images that are not in use: checking and repairing them, creating new ones,
//! changing their format, their length, their internal snapshots, and their dirty bitmaps. Internal
//! crate.

pub mod amend;
pub mod bitmaps;
pub mod check;
pub mod create;
mod inspect;
pub mod layout;
pub mod measure;
pub mod recover;
mod references;
pub mod resize;
pub mod snapshots;

pub use inspect::{ImageInfo, SNAPSHOTS_LISTED_MAX, inspect, open_for_check};
