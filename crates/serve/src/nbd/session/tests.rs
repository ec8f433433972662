//! Whole sessions on disks that are only read.

mod answers;
mod clients;
mod failures;
mod refused;
mod streams;

use super::*;
use crate::nbd::protocol::command;
use crate::nbd::testing::{MIB, PatternDisk};
use std::time::Duration;

const READ: u16 = command::READ;
const STATUS: u16 = command::BLOCK_STATUS;

fn small() -> PatternDisk {
    PatternDisk::data(MIB)
}

fn mixed() -> PatternDisk {
    PatternDisk::mixed(4 * MIB)
}

/// A disk whose reads take a while.
fn slow() -> PatternDisk {
    PatternDisk { latency: Some(Duration::from_millis(10)), ..PatternDisk::data(64 * MIB) }
}
