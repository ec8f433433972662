//! The runtime from outside: the duties of every backend, and what the simulator adds.

#![expect(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

mod common;
mod drop;
mod ends;
mod reads;
mod refused;
mod simulated;
mod streams;
mod tasks;
mod thread;
mod writes;
