//! The verbs of the command line. Each states its own options; the words are qemu-img's and
//! qemu-nbd's where the job is.

use crate::check::CheckArgs;
use crate::compare::CompareArgs;
use crate::convert::ConvertArgs;
use crate::create::CreateArgs;
use crate::ctl::CtlArgs;
use crate::dd::{ReadArgs, WriteArgs};
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

/// Virtual disks whose speed, memory and snapshot cost do not depend on how many snapshots lie
/// beneath.
#[derive(Parser)]
#[command(name = "mica", version, max_term_width = 100)]
pub(crate) struct Cli {
    /// What goes to stderr besides errors.
    #[arg(long, global = true, value_enum, default_value = "warn", value_name = "LEVEL")]
    pub(crate) log_level: LogLevel,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Subcommand)]
pub(crate) enum Verb {
    Serve(Box<ServeArgs>),
    Ctl(CtlArgs),
    Top(TopArgs),
    /// Tell about an image: size, format, snapshots, backing files.
    Info(InfoArgs),
    /// Tell which layer owns which bytes of the disk, and where they are.
    Map(MapArgs),
    /// Check an image for corruption and leaked clusters. Changes nothing.
    ///
    /// Exit code: 0 nothing found, 1 the check could not be made, 2 corruption, 3 leaks only.
    Check(CheckArgs),
    /// Compare the content of two disks.
    ///
    /// Exit code: 0 the same, 1 different, 2 an image could not be opened, 3 or more another error.
    Compare(CompareArgs),
    Create(CreateArgs),
    Convert(ConvertArgs),
    Resize(ResizeArgs),
    Measure(MeasureArgs),
    Read(ReadArgs),
    Write(WriteArgs),
    /// Build, look at or drop the index of a chain.
    Index(IndexArgs),
    /// Make chains for tests and measurements.
    Gen(GenArgs),
    /// Do for a server what its sandbox refuses it. Started by servers alone.
    #[command(hide = true, name = HELPER_VERB)]
    Helper,
}
