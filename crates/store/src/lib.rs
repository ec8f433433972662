//! Where bytes lie: files, memory, and stores stacked on stores that delay, fail and log.
//! Internal crate.
//!
//! ```text
//!  faulty::{DelayStore, ErrorStore, LogStore} ─▶ … ─▶ FileStore ─▶ Handles ─▶ mica_rt::File
//!                                                     MemoryStore
//! ```
//!
//! A [`FileStore`] owns no descriptor: it asks [`Handles`] for one at each read, so that a chain of
//! a thousand layers needs no thousand descriptors.

pub mod faulty;
mod file;
mod handles;
mod located;
mod memory;

pub use file::{CacheMode, FileStore};
pub use handles::{Handles, raise_open_files_limit};
pub use located::{FileKind, Located};
pub use memory::MemoryStore;
