//! The simulated world: files in memory that answer after virtual time, fail when told to, change
//! behind the reader's back and lie. Internal crate, for tests.
//!
//! ```text
//! scenario(runs, |world| async { .. })      one executor on Backend::Sim per seed
//!    world: files, sidecars, faults  ─▶ Images, Store ─▶ the code under test, unchanged
//! ```

pub mod hostile;
mod scenario;
mod tiny;
mod world;

pub use scenario::{RUNS_VARIABLE, SEED_VARIABLE, scenario};
pub use tiny::{TinyImage, TinySpec};
pub use world::{Latency, ReadFault, World};
