//! How much a bench measures: the options that all benches have.

use crate::folders::Folders;
use clap::Args;
use std::time::Duration;

// (Words for rustdoc would become the help of the bench.)
#[derive(Args)]
pub(super) struct Extent {
    /// Runs of each, of which the median counts.
    #[arg(long)]
    repeats: Option<u32>,
    /// Seconds of each load, at most.
    #[arg(long)]
    seconds: Option<f64>,
    /// GiB of the disks.
    #[arg(long)]
    gib: Option<u64>,
    /// Few runs, short loads: a smoke run, not a result.
    #[arg(long)]
    pub(super) quick: bool,
    #[command(flatten)]
    pub(super) folders: Folders,
}

/// What an option is if it is not stated: for a result, and for a smoke run.
#[derive(Clone, Copy)]
pub(super) struct Usual<T> {
    pub(super) result: T,
    pub(super) quick: T,
}

impl<T> Usual<T> {
    pub(super) const fn new(result: T, quick: T) -> Self {
        Self { result, quick }
    }
}

impl Extent {
    /// What is usual for this kind of run.
    pub(super) fn pick<T>(&self, usual: Usual<T>) -> T {
        if self.quick { usual.quick } else { usual.result }
    }

    /// At least one.
    pub(super) fn repeats(&self, usual: Usual<u32>) -> u32 {
        self.repeats.unwrap_or(self.pick(usual)).max(1)
    }

    /// Of each load.
    pub(super) fn time(&self, usual: Usual<f64>) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(self.pick(usual)))
    }

    /// At least one.
    pub(super) fn gib(&self, usual: Usual<u64>) -> u64 {
        self.gib.unwrap_or(self.pick(usual)).max(1)
    }
}
