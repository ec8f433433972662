//! Chains of qcow2 images made directly, without QEMU, whose every byte can be verified.
//!
//! A chain is planned first (which layer holds which part of the disk, and in which of the ways
//! that qcow2 has), then written layer by layer from the base up. Beside the layers is `owner.i32`,
//! which says for each unit of the disk which layer owns it; the content follows from the address
//! and the owner ([`content`]), so a reader can be checked without a second copy of the disk.
//!
//! What must never happen here: an image that `qemu-img check` finds fault with, or content that
//! depends on anything but the [`ChainSpec`]. The same spec makes the same bytes on every machine.
//! [`generate_fleet`] makes many chains of which only the headers matter. [`linear`] judges what
//! clients saw of a disk that was served meanwhile.
//!
//! ```text
//! ChainSpec ─▶ plan: LayerShape, plan clusters per layer     no I/O
//!           ─▶ expand: entries of one layer, owners          no I/O
//!           ─▶ image: one qcow2 file                         the only code that writes layers
//! ```

mod chain;
pub mod content;
mod expand;
mod fleet;
mod image;
pub mod linear;
mod manifest;
pub mod owner;
mod plan;

mod sink;
mod spec;

pub use chain::generate;
pub use fleet::{Fleet, FleetSpec, generate_fleet};
pub use manifest::{LayerEntry, Manifest};
pub use mica_units::Rng;
pub use spec::{ChainSpec, DataMode, Distribution, Feature, Features};
