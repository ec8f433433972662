//! Volumes in a world of machines: processes that die at any step, power cuts of the logs, stores
//! that lose answers, hosts that take a volume from each other. Judged by a model of what a guest
//! did.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot continue")]

mod cases;
mod history;
mod linear;
mod machines;
mod random;
