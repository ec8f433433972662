//! The bytes of what a volume keeps in a store: encode and decode, no I/O.
//!
//! Nothing that is decoded here is trusted: lengths are bounded before anything is done with them,
//! and whoever reads compares what an object says of itself with the name that it was found by.

pub(crate) mod boot;
pub(crate) mod extent;
pub(crate) mod frame;
pub(crate) mod head;
pub(crate) mod origin;
#[cfg(test)]
pub(crate) mod page;
pub(crate) mod snapshot;
pub(crate) mod store;

/// An identity: of a store, a volume, a put.
pub type Id = [u8; 16];
