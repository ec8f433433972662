//! Builds a disk from what the user named. Internal crate, and the only one that names concrete
//! stores and formats.
//!
//! - [`FileImages`] opens image files and keeps their sidecars; `policy` decides what it may open.
//! - [`RawDisk`] and [`NullDisk`] are the formats that need no crate of their own; [`LayeredRaw`]
//!   is a raw image that gets layers while it is served.
//! - [`ExportDisk`] is what another server exports.
//! - [`Window`], [`Joined`] and [`DetectZeroes`] make disks of disks.
//! - [`Stores`] opens stores of volumes, and volumes in them.
//! - [`merge`] has the steps of a merge of layers, in use or not.
//! - [`forest`] finds the images of folders, and which stands on which.
//! - [`Secrets`] are where the passphrases of encrypted images are.
//! - [`Fault`] is what the user asked to go wrong.

mod abandoned;
mod above;
mod alike;
mod amend_keys;
mod detect_zeroes;
mod dropped;
mod encrypted;
mod export;
mod files;
pub mod forest;
#[cfg(any(test, feature = "fuzzing"))]
pub mod hostile;
mod images;
mod inject;
mod joined;
mod keep;
mod layered_raw;
mod mark;
mod may_write;
pub mod merge;
mod merged;
mod new_layer;
mod no_path;
mod null;
mod open;
mod overlays;
mod partition;
mod policy;
mod raw;
mod redo;
mod secrets;
mod shell_word;
mod sidecars;
mod standing;
mod temporary;
mod volumes;
mod window;
mod written;

pub use abandoned::remove_abandoned;
pub use above::{GoneFiles, has_mark, is_frozen, settle_marks};
pub use alike::make_alike;
pub use amend_keys::{KeyChange, amend_keys};
pub use detect_zeroes::{DetectZeroes, ZeroSpace, is_zero};
pub use dropped::{forget_drops, remove_dropped};
pub use encrypted::{encrypted_as, warn_of_luks};
pub use export::ExportDisk;
pub use files::{base_name, node_of, position_of, sync_folder_of};
pub use images::{FileImages, ImageOptions};
pub use inject::Fault;
pub use joined::Joined;
pub use keep::{Keeping, check_only_state, kept_path, kept_states, settle_names, state_of};
pub use layered_raw::LayeredRaw;
pub use may_write::MayWrite;
pub use merged::refuse_merged;
pub use new_layer::{Beneath, NewLayer, NewLayerWish};
pub use no_path::{is_no_path, refuse_no_path};
pub use null::NullDisk;
pub use open::{Format, open, open_active, open_writable, parse_size};
pub use overlays::{
    ExpectedOverlays, GoneImages, Noting, announce_noted_overlay, announce_overlays,
    expect_overlays, forget_gone, forget_overlays, note_overlay,
};
pub use partition::find_partition;
pub use policy::{Names, allowed_places, looks_like_protocol};
pub use raw::RawDisk;
pub use redo::RedoPlace;
pub use redo::folder::{
    lacks_redo_folder, redo_folder, redo_folder_of_owner, usual_redo_directory, volumes_folder,
};
pub use secrets::{Secret, Secrets};
pub use shell_word::shell_word;
pub use sidecars::SidecarPlace;
pub use standing::standing_allow_paths;
pub use temporary::{
    change_places, is_at as is_file_at, make_unfinished, name_new, remove_unfinished,
    unfinished_place,
};
pub use volumes::{
    Collection, Compactor, Durability, Keep, LOG_BYTES_MIN, LogPlace, MACHINE_ID, NewLog, Patience,
    Settled, SnapshotPer, Store, StoreFaults, StoreUrl, Stores, VolumeAccess, VolumeOptions,
    VolumeUrl, bucket_files, bucket_ports, read_volume_key,
};
pub use window::{Window, WindowPlace};
