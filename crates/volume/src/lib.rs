//! Volumes: disks in a store of objects, which any host can attach. Internal crate.
//!
//! A volume is a persistent radix tree over blocks of 4 KiB (Parallax, chapters 3 and 4). What is
//! written becomes extents: immutable objects with the blocks, and the nodes of the tree that
//! changed. A snapshot is a root that is kept; a clone is a volume that begins with one.
//!
//! ```text
//! writes ─▶ extents ─▶ heads     numbered records; the highest says what the volume is
//! reads  ─▶ map ─▶ place: extent, offset, sum ─▶ block
//! ```
//!
//! | to know | see |
//! |---|---|
//! | what names what | `place`, `state` |
//! | the bytes | `format`, docs/formats/extent.md and head.md |
//! | the objects of a store | `names` |
//! | in which stage of its life an open volume is | `stage` |
//! | who writes a volume, how hosts agree on it | model/README.md; `heads`, `claims`, `tenure` |
//! | what a write does, and what a flush waits for | `writing`, `shared` |
//! | what is put, and when | `known`, `destage` |
//! | how a read of what is cached stays cheap | `plans`, `volume::direct`, `tree::shortcuts` |
//! | what blocks become in an extent | `packing`, `frames` |
//! | what is encrypted, and how | `crypt` |
//! | what an opening does with a log that it finds | `opening` |
//! | what outlives a power cut before it is in the store | `log`, docs/formats/log.md |
//! | what boots read first, and how it is fetched ahead | `boot`, `booting`, docs/formats/boot.md |
//! | how a snapshot gets into another store | `stream`, docs/formats/stream.md |

mod ahead;
mod boot;
mod booting;
mod build;
mod check;
mod chunks;
mod claims;
mod collect;
mod compact;
mod crypt;
mod destage;
mod environment;
mod format;
mod frames;
mod freeing;
mod hasten;
mod heads;
pub mod hostile;
mod keep;
mod known;
mod labels;
mod log;
mod meter;
mod names;
mod opening;
mod origin;
mod packing;
mod place;
mod plans;
mod properties;
mod put;
mod reader;
mod recent;
mod scrub;
mod segment;
mod shared;
mod snapshots;
mod stage;
mod state;
mod stream;
mod tenure;
#[cfg(test)]
mod testing;
mod tree;
mod turn;
mod usage;
mod volume;
mod volumes;
mod writing;

pub use boot::BootInfo;
pub use check::Findings;
pub use collect::{Bytes, CollectOptions, Collected, Progress, Sparse, Speed, Step};
pub use crypt::{KeyName, VolumeKey};
pub use environment::Environment;
pub use format::Id;
pub use format::origin::Origin;
pub use heads::{Claimed, Seen};
pub use keep::{Keep, SnapshotPer};
pub use log::{DropLog, Found, Log, LogDevice, LogSummary, NotPushed, Record, Room, Ticket};
pub use mica_block::{SnapshotInfo, Which};
pub use names::VolumeName;
pub use opening::Opening;
pub use place::{BLOCK_BYTES, ExtentId, Place, Writer};
pub use properties::{Compression, Encryption, NewVolume, Properties};
pub use shared::Durability;
pub use state::{Root, State};
pub use stream::{ReceiveOptions, Received, Sent};
pub use usage::{Held, SnapshotUsage, Usage, VolumeUsage};
pub use volume::Volume;
pub use volumes::{Listed, VolumeInfo, Volumes, check_len};
