//! Chains that are written while power is cut and operations fail: what is left is judged by the
//! model, by our check and, on a sample, by QEMU.
//!
//! `MICA_SIM_SEED=n` replays one run, `MICA_SIM_RUNS=n` makes it n runs, `MICA_SIM_TRACE=1` prints
//! each request and each operation.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot continue")]

mod amend;
mod attacks;
mod beside;
mod bitmaps;
mod blocks;
mod chain;
mod exhaustive;
mod faults;
mod foreign;
mod growing;
mod in_place;
mod internal;
mod keeping;
mod kept;
mod killed;
mod lies;
mod luks;
mod merging;
mod plain;
mod pushing;
mod qemu;
mod raising;
mod random;
mod resize;
mod scattered;
mod steps;
mod together;
mod turns;
mod unclosed;
mod unreadable;
mod unwritten;
