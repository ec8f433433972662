//! Chores of the project as code: style, continuous integration, what both need.
//!
//! `cargo xtask <verb>`. What CI runs is `cargo xtask ci`, nothing else. This program names nothing
//! of mica but what black-box tests share, so that it is built in seconds.

mod bench;
mod ci;
mod deb;
mod service;
mod setup;
mod soak;
mod storm;
mod text_order;
mod tidy;

use clap::{Parser, Subcommand};
use std::ffi::OsString;
use std::process::ExitCode;

/// Chores of the project.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Everything that CI runs: format, lints, style, docs, licences, build, tests.
    Ci(ci::Options),
    /// Check what rustfmt and clippy do not: the style of the house.
    Tidy,
    /// Install the programs that tests and benches need (Debian, as root). Does nothing if all are
    /// there.
    Setup,
    /// Run the long forms of the random tests, for a night or longer.
    Soak(soak::Options),
    /// Make a Debian package of mica.
    Deb(deb::Options),
    /// Install, upgrade, kill and remove the Debian package under a real systemd, while a client
    /// writes (Debian, as root).
    Service(service::Options),
    /// Benchmark mica against its peers.
    #[command(disable_help_flag = true)]
    Bench(Words),
    /// Make a disk with files, take it through snapshots, and read it all back through mica.
    #[command(disable_help_flag = true)]
    Demo(Words),
    /// Put random chains through kills, takeovers, QEMU's own writes and much else, and check every
    /// sector.
    Storm(storm::Options),
    /// Find out which functions servers run, so that they lie side by side in the program.
    TextOrder,
}

/// What another program makes sense of.
#[derive(clap::Args)]
struct Words {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().verb {
        Verb::Ci(options) => ci::run(&options),
        Verb::Tidy => tidy::run(),
        Verb::Setup => setup::run(),
        Verb::Soak(options) => soak::run(&options),
        Verb::Deb(options) => deb::run(&options),
        Verb::Service(options) => service::run(&options),
        Verb::Bench(Words { words }) => bench::bench(&words),
        Verb::Demo(Words { words }) => bench::demo(&words),
        Verb::Storm(options) => storm::run(&options),
        Verb::TextOrder => text_order::run(),
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
