//! Stores of objects: [`mica_block::Objects`].
//!
//! ```text
//!  RetryObjects ─▶ FaultyObjects ─▶ DirectoryObjects ─▶ FileStore ─▶ Handles
//!                                   MemoryObjects
//! ```
//!
//! [`probe()`] finds out whether a store keeps the promise that volumes rest on. [`testing`] checks
//! all that is promised.

mod directory;
mod faulty;
mod memory;
mod probe;
mod retry;
pub mod testing;

pub use directory::DirectoryObjects;
pub use faulty::{FaultyObjects, FaultyOptions, Lie, ObjectOperation, Throttle};
pub use memory::MemoryObjects;
pub use probe::probe;
pub use retry::{RetryObjects, RetryOptions};
