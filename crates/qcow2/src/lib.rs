//! qcow2 images and chains. Internal crate.

pub mod format;
