//! Encryption of disks: ciphers of sectors, the headers that hold their keys, and a store that lies
//! over another and encrypts. Internal crate; it knows no format of images.
//!
//! - [`SectorCipher`] encrypts sectors by their numbers; [`Xts`] is the mode beneath most of them.
//! - [`luks`] reads, makes and changes headers of LUKS version 1, and unlocks what they protect.
//! - [`CryptStore`] shows the plain bytes of a store that has encrypted ones.
//!
//! Invariants
//! - I1 A key is never written in plain form, shown or logged, and is erased when it is dropped.
//! - I2 A header is untrusted input: lengths, places and iterations are bounded before they are
//!   used.

mod aes_cbc;
mod compute;
mod hash;
pub mod luks;
mod sector;
mod store;
mod xts;

pub use hash::Hash;
pub use sector::{CipherName, SectorCipher};
pub use store::CryptStore;
pub use xts::{UNIT_BYTES, XTS_AES256_KEY_BYTES, Xts};
