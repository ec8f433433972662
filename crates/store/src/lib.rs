//! Where bytes are stored: files, memory, stores of objects, and wrappers that delay, fail and log.
//! Internal crate.
//!
//! ```text
//!  faulty::{DelayStore, ErrorStore, LogStore} ─▶ … ─▶ FileStore ─▶ Handles ─▶ mica_rt::File
//!                                                     WritableFile ─────────▶ mica_rt::File
//!                                                     MemoryStore
//! ```
//!
//! A [`FileStore`] is read only and owns no descriptor: it asks [`Handles`] for one at each read,
//! so that a chain of a thousand layers does not need a thousand descriptors, and chains above
//! one base share that of it. A [`WritableFile`] keeps its own. Both take QEMU's image locks if
//! requested ([`Locking`]).

mod direct;
mod facts;
pub mod faulty;
mod file;
mod handles;
mod in_place;
mod kind;
mod located;
mod lock;
mod memory;
mod mount_generation;
mod nameless;
mod node;
pub mod object;
mod stamp;
mod writable;

pub use file::{CacheMode, FileStore};
pub use handles::{
    Handles, SetAside, WritesInPlace, enlarge_descriptor_table, open_files_limit,
    raise_open_files_limit,
};
pub use kind::FileKind;
pub use located::Located;
pub use lock::{Holder, LockQuestion, Locking, find_holder, search_holders_with};
pub use memory::MemoryStore;
pub use nameless::NamelessFile;
pub use node::Node;
pub use stamp::{nanoseconds, now_ns};
pub use writable::{WritableFile, WriterName};
