//! mica against its peers: the figures of `GOALS`, each from one run in which the peers take turns;
//! and the demonstration.
//!
//! `cargo xtask bench` and `cargo xtask demo` build and run this. Absolute times belong to the
//! machine; what counts are ratios within a run. A server that dies or answers wrongly is reported,
//! not left out.

mod chain;
mod chains;
mod charts;
mod cost;
mod deep;
mod demo;
mod extent;
mod folders;
mod glance;
mod goal;
mod goals;
mod guest;
mod live;
mod load;
mod machine;
mod measure;
mod merge;
mod nbd;
mod page;
mod parts;
mod peers;
mod places;
mod plots;
mod report;
mod samples;
mod snapshot;
mod turns;
mod volume;
mod write;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Benchmarks mica against its peers.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Measure mica beside its peers.
    Bench {
        #[command(subcommand)]
        what: Bench,
    },
    /// Make a disk with files, let it live through snapshots, and read it all back through mica.
    Demo(demo::Options),
}

/// What can be measured.
#[derive(Subcommand)]
enum Bench {
    /// Reading chains of 1 to 1000 layers: speed, memory, opening, the index. Writes a table, JSON
    /// and plots.
    Chain(chain::Options),
    /// Writing raw and qcow2 images, empty, preallocated and over a base: speed, syncs, bytes
    /// copied and written. Writes a table, JSON and plots.
    Write(write::Options),
    /// Serving machines: the vhost-user-blk device without a guest and under one, restarts. Writes
    /// a table, JSON and plots.
    Guest(guest::Options),
    /// NBD beside its peers, in every cell of loads, connections and requests in flight, and with
    /// an fsync after each write. Writes a table and JSON.
    Nbd(nbd::Options),
    /// Chains of up to 10,000 layers beside one layer: opening, memory, reads, and the verbs that
    /// go through all layers. Writes a table and JSON.
    Deep(deep::Options),
    /// Snapshots of served chains beside qemu-storage-daemon, by the length of the chain and the
    /// size of the disk, and clones beside qemu-img. Writes a table, JSON and plots.
    Snapshot(snapshot::Options),
    /// Merges of a chain under a guest beside qemu-storage-daemon: what the guest notices, and how
    /// long they take, idle, under writes, and beside qemu-img convert. Writes a table and JSON.
    Merge(merge::Options),
    /// Volumes beside a raw file and qcow2, and beside RBD on the same cluster: loads, snapshots,
    /// clones. Writes a table and JSON.
    Volume(volume::Options),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().verb {
        Verb::Bench { what: Bench::Chain(options) } => chain::run(&options),
        Verb::Bench { what: Bench::Write(options) } => write::run(&options),
        Verb::Bench { what: Bench::Guest(options) } => guest::run(&options),
        Verb::Bench { what: Bench::Nbd(options) } => nbd::run(&options),
        Verb::Bench { what: Bench::Deep(options) } => deep::run(&options),
        Verb::Bench { what: Bench::Snapshot(options) } => snapshot::run(&options),
        Verb::Bench { what: Bench::Merge(options) } => merge::run(&options),
        Verb::Bench { what: Bench::Volume(options) } => volume::run(&options),
        Verb::Demo(options) => demo::run(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The causes on one line; a trace of where they passed helps nobody.
            eprintln!("mica-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
