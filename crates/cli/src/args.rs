//! The verbs of the command line, each of which states its own options. The names are those of
//! qemu-img and qemu-nbd where the task is the same.

use crate::check::CheckArgs;
use crate::compare::CompareArgs;
use crate::convert::ConvertArgs;
use crate::create::CreateArgs;
use crate::ctl::CtlArgs;
use crate::dd::{ReadArgs, WriteArgs};
use crate::examples;
use crate::generate::GenArgs;
use crate::index::IndexArgs;
use crate::info::InfoArgs;
use crate::map::MapArgs;
use crate::measure::MeasureArgs;
use crate::resize::ResizeArgs;
use crate::serve::ServeArgs;
use crate::top::TopArgs;
use clap::{Parser, Subcommand};
use mica_daemon::{HELPER_VERB, LogLevel};

/// Virtual disks whose speed, memory and snapshot cost do not depend on the number of snapshots
/// beneath.
#[derive(Parser)]
#[command(name = "mica", version, max_term_width = 100)]
pub(crate) struct Cli {
    /// What to log to stderr besides errors.
    #[arg(
        long,
        global = true,
        value_enum,
        default_value = "warn",
        value_name = "LEVEL",
        hide_short_help = true,
        help_heading = "Engine"
    )]
    pub(crate) log_level: LogLevel,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Subcommand)]
pub(crate) enum Verb {
    Serve(Box<ServeArgs>),
    Ctl(CtlArgs),
    Top(TopArgs),
    /// Show an image's size, format, snapshots and backing files.
    #[command(after_long_help = examples::INFO)]
    Info(InfoArgs),
    /// Show which layer owns which bytes of the disk, and where they are.
    #[command(after_long_help = examples::MAP)]
    Map(MapArgs),
    /// Check an image for corruption and leaked clusters. Changes nothing, except with -r.
    ///
    /// Exit code, after repairs if there are any: 0 nothing found, 1 the check failed, 2
    /// corruption, 3 leaks only, 63 the format has no check.
    #[command(after_long_help = examples::CHECK)]
    Check(CheckArgs),
    /// Compare the content of two disks.
    ///
    /// Exit code: 0 identical, 1 different, 2 an image could not be opened, 3 or more other errors.
    #[command(after_long_help = examples::COMPARE)]
    Compare(CompareArgs),
    #[command(after_long_help = examples::CREATE)]
    Create(CreateArgs),
    #[command(after_long_help = examples::CONVERT)]
    Convert(ConvertArgs),
    #[command(after_long_help = examples::RESIZE)]
    Resize(ResizeArgs),
    #[command(after_long_help = examples::MEASURE)]
    Measure(MeasureArgs),
    #[command(after_long_help = examples::READ)]
    Read(ReadArgs),
    #[command(after_long_help = examples::WRITE)]
    Write(WriteArgs),
    /// Build, inspect or drop the index of a chain.
    Index(IndexArgs),
    /// Generate chains for tests and measurements.
    Gen(GenArgs),
    /// Do for a server what its sandbox forbids. Only servers start this.
    #[command(hide = true, name = HELPER_VERB)]
    Helper,
}
