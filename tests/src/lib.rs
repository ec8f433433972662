//! What black-box tests and benches share: foreign tools, servers, and an NBD client of our own.
//!
//! Nothing here knows what mica looks like inside; it is a program that is started, asked and
//! stopped like its peers. Only processes that this crate started are ever signalled.

pub mod clock;
pub mod command;
pub mod guest;
pub mod judge;
pub mod machine;
pub mod mica;
pub mod mounts;
pub mod nbd;
pub mod qemu;
pub mod server;
pub mod shell;
pub mod storm;
pub mod takeover;
pub mod tools;
pub mod write_log;
