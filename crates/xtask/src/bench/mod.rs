//! mica beside its peers: the figures of `GOALS`, each from one run in which the peers take turns.
//!
//! Absolute times belong to the machine; what counts are ratios within a run. A server that dies or
//! answers wrongly is reported, not left out.

mod bars;
mod chain;
mod folders;
pub(crate) mod glance;
mod goal;
mod goals;
mod guest;
mod machine;
mod measure;
mod page;
mod parts;
mod peers;
mod plots;
mod report;
mod samples;
mod svg;
mod turns;
mod write;

use anyhow::Result;
use clap::Subcommand;

/// What can be measured.
#[derive(Subcommand)]
pub(crate) enum Bench {
    /// Reading chains of 1 to 1000 layers: speed, memory, opening, the index. Writes a table, JSON
    /// and plots.
    Chain(chain::Options),
    /// Writing raw and qcow2 images, empty, preallocated and over a base: speed, syncs, bytes
    /// copied and written. Writes a table, JSON and plots.
    Write(write::Options),
    /// Serving machines: the vhost-user-blk device without a guest and under one, restarts. Writes
    /// a table, JSON and plots.
    Guest(guest::Options),
}

impl Bench {
    /// Measures it.
    pub(crate) fn run(&self) -> Result<()> {
        match self {
            Self::Chain(options) => chain::run(options),
            Self::Write(options) => write::run(options),
            Self::Guest(options) => guest::run(options),
        }
    }
}
