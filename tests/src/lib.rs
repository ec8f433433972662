//! What black-box tests and benches share: foreign tools, servers, and our own NBD client.
//!
//! Nothing here knows mica's internals; it is a program that is started, queried and stopped like
//! its peers. Only processes that this crate started are ever signalled.

pub mod bucket;
pub mod clock;
pub mod command;
pub mod flag;
pub mod guest;
pub mod judge;
pub mod kept;
pub mod machine;
pub mod mica;
pub mod mounts;
pub mod nbd;
pub mod net_room;
pub mod power;
pub mod qemu;
pub mod server;
pub mod shell;
pub mod storm;
pub mod takeover;
pub mod tasks;
pub mod tools;
pub mod volume;
pub mod write_log;
