//! The contract between servers, formats and stores. Internal crate.
//!
//! A request crosses two traits only:
//!
//! ```text
//! serve ──▶ Disk   guest addresses: plan a request into extents   knows formats, no protocol
//!       ──▶ Store  host addresses: read the bytes                 knows neither
//! ```
//!
//! Writes go the same way: [`Disk::write`] knows where, [`Store::write_at`] acts, and
//! [`Disk::flush`] makes durable what was written.
//!
//! The owner of a disk has it as [`Manage`], which is [`Disk`] and control: servers never see that.
//!
//! A plan is a list of [`Extent`]s, plain values that say where the bytes of a range are. Planning
//! does no data I/O; acting on an extent ([`Disk::read`]) plans nothing, unless the extent says
//! only that something is stored, as those of a volume do.

mod disk;
mod error;
mod extent;
mod held;
mod images;
mod manage;
mod manage_chain;
mod manage_volume;
mod objects;
mod opened;
mod plan;
mod redo;
mod secret;
mod sidecars;
mod snapshot_group;
mod snapshots;
mod store;
mod unmanaged;

pub use disk::{Disk, Geometry, Plan, Planned, Writing, Zeroes, ready};
pub use error::{Error, ErrorKind, Result};
pub use extent::{Extent, ExtentKind};
pub use held::{lock_patience, may_be_released_within, wait_for_dead};
pub use images::{ContentProof, Identity, Images, OpenImage, ProofSlot, Upgradable};
pub use manage::{
    Haste, IndexProgress, Manage, ManageIndex, MapStats, SealState, WriteStats, check_longer,
};
pub use manage_chain::{
    ActiveAfter, CommitLayers, ManageBitmaps, ManageChain, MergeControl, MergeLayers,
    MergeProgress, Merged, NamedBacking, Pushed, RaiseLayers, Renaming, View,
};
pub use manage_volume::{
    BootStats, ClonedFrom, LogStats, ManageVolume, SourceNow, Times, VolumeStats,
};
pub use mica_rt::sync::{InFlight, OwnedInFlight, Requests};
pub use objects::{
    EndFuture, Entry, LIST_MAX, Object, ObjectName, Objects, PROBE_FOLDER, Put, PutFuture,
    PutPartsFuture,
};
pub use opened::OpenedImages;
pub use plan::{Survey, Windows, read_extents, read_extents_by, read_whole, windows};
pub use redo::{NoRedoLogs, RedoLogs, RedoMemory, RedoOrigin};
pub use secret::Passphrase;
pub use sidecars::{NewSidecar, NoSidecars, Sidecars};
pub use snapshot_group::SnapshotGroup;
pub use snapshots::{LABEL_BYTES_MAX, ManageSnapshots, SnapshotInfo, Which, check_label};
pub use store::{
    ChangeFuture, IoFuture, Run, RunKind, Space, Store, StoreIdentity, Witness, read_exact,
    write_all,
};
pub use unmanaged::Unmanaged;

use std::future::Future;
use std::pin::Pin;

/// A future that stays on its thread, as all futures of mica's data path do.
pub type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Flushes that share one sync, and its outcome.
pub type GroupSync = mica_rt::sync::GroupSync<Result<()>>;

/// Largest request that a server hands to a [`Disk`], in bytes. Servers divide what is larger.
pub const REQUEST_BYTES_MAX: u64 = 32 << 20;
