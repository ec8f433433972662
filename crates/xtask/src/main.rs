//! Chores of the project as code: style, continuous integration, benches, the demonstration.
//!
//! `cargo xtask <verb>`. What CI runs is `cargo xtask ci`, nothing else.

mod bench;
mod ci;
mod demo;
mod load;
mod setup;
mod shell;
mod storm;
mod tidy;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Chores of the project.
#[derive(Parser)]
#[command(name = "xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Everything that CI runs: format, lints, style, docs, licences, build, tests.
    Ci,
    /// Check what rustfmt and clippy do not: the style of the house.
    Tidy,
    /// Install the programs that tests and benches need (Debian, as root). Does nothing if all are
    /// there.
    Setup,
    /// Measure mica beside its peers.
    Bench {
        #[command(subcommand)]
        what: bench::Bench,
    },
    /// Make a disk with files, let it live through snapshots, and read it all back through mica.
    Demo(demo::Options),
    /// Let random chains live through kills, take-overs, QEMU's own writes and much else, and judge
    /// every sector.
    Storm(storm::Options),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().verb {
        Verb::Ci => ci::run(),
        Verb::Tidy => tidy::run(),
        Verb::Setup => setup::run(),
        Verb::Bench { what } => what.run(),
        Verb::Demo(options) => demo::run(&options),
        Verb::Storm(options) => storm::run(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The causes on one line; a trace of where they passed helps nobody.
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
