//! A process that serves disks: what it is told, what it shows of itself, how it begins and ends.
//! Internal crate.
//!
//! ```text
//! config     what is served, and how            command line, or a TOML file
//!   └ daemon     all of it, from start to end    signals, control
//!       ├ control    status, figures, and what can be told       a thread of its own
//!       ├ sandbox    what the process may still do
//!       ├ helper     a process that does what this one may not do any more
//!       ├ systemd    readiness, watchdog, sockets that come along and are stored
//!       ├ takeover   sockets and disks go from one process to the next
//!       └ served     one disk: image, servers, index
//! ```

mod config;
mod control;
mod daemon;
mod disks;
mod held;
mod helper;
mod indexer;
mod messages;
mod opened;
mod retry;
mod sandbox;
mod served;
mod servers;
mod settings;
mod shared;
mod sockets;
mod stats;
mod systemd;
mod takeover;
mod tls;
mod ublk;

pub use config::{Config, DiskConfig};
pub use control::{LogLevel, LogSwitch};
pub use daemon::Daemon;
pub use helper::{HELPER_VERB, run_helper};
pub use settings::{
    Aio, Cache, Discards, DiskSettings, ImageSettings, IndexMode, IoSettings, OtherUsers,
    ProcessSettings, SandboxMode, Size, StatsSettings, TlsMode, VerifyPeer,
};
pub use systemd::has_inherited_sockets;
