//! Volumes in stores of objects, as the user names them.
//!
//! ```text
//! URL ─▶ Stores ─▶ Store ─▶ mica_volume::Volumes      one per store and process: one cache
//!                     └──▶ lock ─▶ HeldVolume         a volume that this machine has open
//! ```

mod alive;
mod bucket;
mod cloning;
mod collecting;
mod collector;
mod compacting;
mod faults;
mod held;
mod keys;
mod lock;
mod logs;
mod machine;
mod open;
mod promises;
mod receive;
mod stores;
mod url;
mod waiting;

pub use mica_volume::{Durability, Keep, SnapshotPer};

pub use bucket::{bucket_files, bucket_ports};
pub use collecting::Collection;
pub use compacting::Compactor;
pub use faults::StoreFaults;
pub use keys::read_volume_key;
pub use logs::{LOG_BYTES_MIN, LogPlace, NewLog};
pub use machine::MACHINE_ID;
pub use open::{Settled, VolumeAccess, VolumeOptions};
pub use stores::{Patience, Store, Stores};
pub use url::{StoreUrl, VolumeUrl};

#[cfg(test)]
mod tests;
