//! A process that serves disks: its configuration, its control socket, its life cycle. Internal
//! crate.
//!
//! ```text
//! daemon      the process from start to end: signals, order of start and shutdown
//!   ├ control     status, figures and commands over HTTP, on a thread of its own
//!   ├ takeover    sockets and disks pass from one process to the next
//!   ├ membership  disks come and go
//!   │   └ certificates  renewed while clients are served
//!   └ shared      state that these share
//!       └ disks       the set of disks, which may change while it serves
//!           └ served      one disk: opened, served, suspended, resumed, closed
//!               ├ ephemeral   the overlay of a disk whose changes are thrown away
//!               ├ contexts    what NBD clients can ask of it besides where data is
//!               ├ opening     its image; tending: the work that it has of its own
//!               ├ addresses   where NBD clients connect, which disks share
//!               └ servers     NBD, vhost-user, FUSE, and the index thread
//! sandbox     what the process may still do; helper: a process that does the rest for it
//! new_logs    files that it makes before, and removes if its start is refused
//! own_process what the kernel reports of this process
//! systemd     readiness, watchdog, sockets inherited and stored
//! signals     those that end the process, or are heard otherwise
//! sockets     which inherited socket belongs where; held: the sockets this process holds
//! places      which disk may be served where; address: where clients connect, as a value
//! rehearsal   checks a configuration
//! config      what is served, from the command line or a TOML file
//!   └ settings    every option, stated once; overlay: the file of an ephemeral disk's changes
//! ```

mod address;
mod addresses;
mod certificates;
mod config;
mod contexts;
mod control;
mod daemon;
mod descriptors;
mod disks;
mod ephemeral;
mod held;
mod helper;
mod indexer;
mod jobs;
mod listed;
mod membership;
mod messages;
mod needed;
mod new_logs;
mod no_disk;
mod one_by_one;
mod opened;
mod opening;
mod overlay;
mod own_process;
mod places;
mod rehearsal;
mod retry;
mod sandbox;
mod served;
mod servers;
mod settings;
mod shared;
mod signals;
mod sockets;
mod stats;
mod systemd;
mod takeover;
mod tending;
mod tls;

pub use config::{Config, DiskConfig};
pub use control::{LogLevel, LogSwitch};
pub use daemon::Daemon;
pub use helper::{HELPER_VERB, run_helper};
pub use no_disk::no_disk;
pub use rehearsal::check_config;
pub use served::SERVING;
pub use settings::{
    Aio, Cache, Discards, DiskSettings, FlushDurability, GcMode, ImageSettings, IndexMode,
    IoSettings, KeepRules, NbdPlace, OtherUsers, ProcessSettings, SandboxMode, Size, SnapshotAfter,
    StatsSettings, TlsMode, VerifyPeer, VolumeSettings, ZeroDetection,
};
pub use systemd::has_inherited_sockets;
