//! Builds a disk from what the user named. Internal crate, and the only one that names concrete
//! stores and formats.
//!
//! - [`FileImages`] opens image files and keeps their sidecars; `policy` decides what it may open.
//! - [`RawDisk`] and [`NullDisk`] are the formats that need no crate of their own.
//! - [`Stores`] opens stores of volumes, and volumes in them.
//! - [`Fault`] is what the user asked to go wrong.

mod images;
mod inject;
mod null;
mod open;
mod overlays;
mod policy;
mod raw;
mod redo;
mod sidecars;
mod standing;
mod volumes;
mod written;

pub use images::{FileImages, ImageOptions};
pub use inject::Fault;
pub use null::NullDisk;
pub use open::{Format, open, open_writable, parse_size, wait_for_dead};
pub use overlays::{Overlay, check_no_overlays, overlays_on};
pub use policy::{Names, allowed_places, looks_like_protocol};
pub use raw::RawDisk;
pub use redo::RedoPlace;
pub use redo::folder::{lacks_redo_folder, redo_folder, redo_folder_of_owner, usual_redo_folder};
pub use sidecars::SidecarPlace;
pub use standing::standing_allow_paths;
pub use volumes::{
    Collection, Durability, Keep, LOG_BYTES_MIN, LogPlace, MACHINE_ID, Patience, Settled,
    SnapshotPer, Store, StoreFaults, StoreUrl, Stores, VolumeAccess, VolumeOptions, VolumeUrl,
    bucket_files, bucket_ports, read_volume_key,
};
