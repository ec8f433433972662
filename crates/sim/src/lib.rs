//! The simulated world: files in memory that answer after virtual time, fail on demand, lose what
//! was not synced when the power goes, change behind the reader's back and lie. Internal crate, for
//! tests.
//!
//! ```text
//! scenario(runs, |world| async { .. })      one executor on Backend::Sim per seed
//!    world: files, sidecars, faults, power  ─▶ Images, Store ─▶ the code under test, unchanged
//!    guest: requests ─▶ Disk                                     ◀─┘
//!      └─ model: what a disk may show, and what may be left of it after a crash
//! ```

pub mod crash;
mod guest;
pub mod hostile;
mod model;
mod power;
mod scenario;
mod tiny;
mod world;

pub use guest::{Errors, Guest, Load, read};
pub use model::{ModelDisk, Request, Ticket, Wrong};
pub use power::Loss;
pub use scenario::{FIRST_VARIABLE, RUNS_VARIABLE, SEED_VARIABLE, scenario};
pub use tiny::{TinyImage, TinySpec};
pub use world::{ChangeFault, ENOSPC, Latency, LogCopies, Operation, PowerCut, ReadFault, World};
