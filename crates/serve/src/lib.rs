//! Servers: they know protocols and guest addresses, and no format. Internal crate.

pub mod nbd;
