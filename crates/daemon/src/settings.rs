//! What can be said of a process, of its disks and of their images.

mod choices;
mod image;
mod ineffective;
mod size;

pub use choices::{Aio, Cache, Discards, IndexMode, OtherUsers, SandboxMode, TlsMode, VerifyPeer};
pub use image::ImageConfig;
pub(crate) use image::{is_word, shared_memory};
pub use size::Size;
