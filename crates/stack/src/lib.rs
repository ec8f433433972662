//! Builds a disk from what the user named. Internal crate, and the only one that names concrete
//! stores and formats.
//!
//! - [`FileImages`] opens image files and keeps their sidecars; `policy` decides what it may open.
//! - [`RawDisk`] and [`NullDisk`] are the formats that need no crate of their own.
//! - [`Fault`] is what the user asked to go wrong.

mod handover;
mod images;
mod inject;
mod null;
mod open;
mod policy;
mod raw;
mod sidecars;

pub use handover::HandoverPlace;
pub use handover::folder::{handover_folder, handover_folder_of_owner, usual_handover_folder};
pub use images::{FileImages, ImageOptions};
pub use inject::Fault;
pub use null::NullDisk;
pub use open::{Format, OpenDisk, open, open_writable, parse_size};
pub use policy::{Names, allowed_places};
pub use raw::RawDisk;
pub use sidecars::SidecarPlace;
