//! Headers of LUKS version 1, on a disk of their own or in a qcow2 image.
//!
//! ```text
//! header, 592 bytes | key material of slot 0 | … | of slot 7 | payload
//! ```
//!
//! A random **master key** encrypts the payload. Each active **key slot** has it, split into very
//! many stripes of which none may be missing, and encrypted with a key that is derived from one
//! passphrase: what wipes a part of a slot's material makes its passphrase useless for ever.

mod format;
mod header;
mod keys;
mod payload;
mod split;
mod unlock;

pub use format::{NewLuks, NewSlot, Wish};
pub use header::{HEADER_BYTES, KeySlot, LuksHeader, MAGIC, SLOTS};
pub use keys::{Slot, add_key, remove_keys};
pub use payload::{Payload, read_header};
pub use unlock::{HeaderPlace, MasterKey, Unlocked, unlock};
