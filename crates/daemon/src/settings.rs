//! The settings of a process, of its disks and of their images: every option is stated here, once.
//!
//! A field is an option of the command line and, under the same name, a key of a configuration. Its
//! documentation is the help text; its default applies to both.

mod choices;
mod disk;
mod image;
mod ineffective;
mod keep;
mod memory;
mod one_or_many;
mod place;
mod process;
mod size;
mod volume;

pub use choices::{
    Aio, Cache, Discards, FlushDurability, GcMode, IndexMode, OtherUsers, SandboxMode,
    SnapshotAfter, TlsMode, VerifyPeer, ZeroDetection,
};
pub use disk::DiskSettings;
pub(crate) use image::DESCRIPTORS_RESERVE;
pub use image::ImageSettings;
pub(crate) use image::NO_REDO_LOGS;
pub use keep::KeepRules;
pub(crate) use memory::MapBudgets;
use one_or_many::one_or_many;
pub use place::NbdPlace;
pub use process::{IoSettings, ProcessSettings, StatsSettings};
pub use size::Size;
pub use volume::VolumeSettings;
