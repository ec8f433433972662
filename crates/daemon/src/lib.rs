//! A process that serves disks: what it is told, what it shows of itself, how it begins and ends.
//! Internal crate.
//!
//! ```text
//! config     what is served, and how            command line, or a TOML file
//!   └ daemon     all of it, from start to end    signals, control
//!       ├ control    status, figures, and what can be told       a thread of its own
//!       └ served     one disk: image, servers, index
//! ```

mod config;
mod control;
mod daemon;
mod images;
mod indexer;
mod remains;
mod served;
mod stats;
mod tls;

pub use config::{Config, Discards, DiskConfig, IndexMode, OtherUsers};
pub use control::{LogLevel, LogSwitch};
pub use daemon::Daemon;
pub use images::{Aio, Cache, ImageConfig, Size};
pub use tls::{TlsMode, VerifyPeer};
