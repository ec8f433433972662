//! Stores that wrap another store and misbehave, for tests and for users who want to see what
//! happens: each takes its options in a struct of its own and leaves everything else alone.

mod delay;
mod error;
mod log;
mod operation;

pub use delay::{DelayOptions, DelayStore};
pub use error::{ErrorOptions, ErrorStore, When};
pub use log::{LogOptions, LogStore, Sink};
pub use operation::{Operation, Operations};
