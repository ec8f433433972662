//! What can be said of a process, of its disks and of their images: each option once.
//!
//! A field is an option of the command line and, by the same name, a key of a configuration; what
//! is said of it is the help of the one, its default that of both.

mod choices;
mod disk;
mod image;
mod ineffective;
mod process;
mod size;

pub use choices::{Aio, Cache, Discards, IndexMode, OtherUsers, SandboxMode, TlsMode, VerifyPeer};
pub use disk::DiskSettings;
pub use image::ImageSettings;
pub use process::{IoSettings, ProcessSettings, StatsSettings};
pub use size::Size;
