//! The verbs of the command line, each of which states its own options. The names are those of
//! qemu-img and qemu-nbd where the task is the same.

use crate::amend::AmendArgs;
use crate::backup::BackupArgs;
use crate::bench::BenchArgs;
use crate::bitmap::BitmapArgs;
use crate::check::CheckArgs;
use crate::clone::CloneArgs;
use crate::commit::CommitArgs;
use crate::compare::CompareArgs;
use crate::convert::ConvertArgs;
use crate::create::CreateArgs;
use crate::ctl::CtlArgs;
use crate::dd::DdArgs;
use crate::diff::DiffArgs;
use crate::generate::GenArgs;
use crate::index::IndexArgs;
use crate::info::InfoArgs;
use crate::manual::ManualArgs;
use crate::map::MapArgs;
use crate::measure::MeasureArgs;
use crate::pipe::{ReadArgs, WriteArgs};
use crate::rebase::RebaseArgs;
use crate::resize::ResizeArgs;
use crate::restore::RestoreArgs;
use crate::sections;
use crate::serve::ServeArgs;
use crate::snapshot::SnapshotArgs;
use crate::survey::SurveyArgs;
use crate::top::TopArgs;
use crate::tree::TreeArgs;
use crate::volume::{self, VolumeArgs};
use clap::{Parser, Subcommand};
use mica_daemon::{HELPER_VERB, LogLevel};

/// Virtual disks whose speed does not depend on how many snapshots lie beneath.
#[derive(Parser)]
#[command(name = "mica", version, max_term_width = 100, after_long_help = sections::MICA)]
pub(crate) struct Cli {
    /// What to log to stderr besides errors.
    #[arg(
        long,
        global = true,
        value_enum,
        default_value = "warn",
        value_name = "LEVEL",
        hide_short_help = true,
        display_order = 900
    )]
    pub(crate) log_level: LogLevel,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// What a verb takes is defined when it is used: to define all of them takes longer than what most
/// verbs do ([`crate::command_for`]).
#[derive(Subcommand)]
#[command(defer = true)]
pub(crate) enum Verb {
    #[command(after_long_help = sections::SERVE)]
    Serve(Box<ServeArgs>),
    #[command(after_long_help = sections::CTL)]
    Ctl(CtlArgs),
    #[command(after_long_help = sections::TOP)]
    Top(TopArgs),
    /// Show an image's size, format, snapshots and backing files.
    #[command(after_long_help = sections::INFO)]
    Info(InfoArgs),
    /// Show which layer owns which bytes of the disk, and where they are.
    #[command(after_long_help = sections::MAP)]
    Map(MapArgs),
    /// Check an image for corruption and leaked clusters.
    ///
    /// Changes nothing, except with -r.
    #[command(after_long_help = sections::CHECK)]
    Check(CheckArgs),
    /// Compare the content of two disks.
    #[command(after_long_help = sections::COMPARE)]
    Compare(CompareArgs),
    #[command(after_long_help = sections::DIFF)]
    Diff(DiffArgs),
    #[command(after_long_help = sections::CREATE)]
    Create(CreateArgs),
    #[command(after_long_help = sections::CLONE)]
    Clone(CloneArgs),
    #[command(after_long_help = sections::SNAPSHOT)]
    Snapshot(SnapshotArgs),
    #[command(after_long_help = sections::CONVERT)]
    #[command(override_usage = "mica convert [OPTIONS] <SOURCE>... <TARGET>")]
    Convert(ConvertArgs),
    #[command(after_long_help = sections::DD)]
    Dd(DdArgs),
    #[command(after_long_help = sections::RESIZE)]
    Resize(ResizeArgs),
    #[command(after_long_help = sections::AMEND)]
    Amend(AmendArgs),
    #[command(after_long_help = sections::BITMAP)]
    Bitmap(BitmapArgs),
    #[command(after_long_help = sections::BACKUP)]
    Backup(Box<BackupArgs>),
    #[command(after_long_help = sections::RESTORE)]
    Restore(RestoreArgs),
    #[command(after_long_help = sections::COMMIT)]
    Commit(CommitArgs),
    #[command(after_long_help = sections::REBASE)]
    Rebase(RebaseArgs),
    #[command(after_long_help = sections::MEASURE)]
    Measure(MeasureArgs),
    #[command(after_long_help = sections::READ)]
    Read(ReadArgs),
    #[command(after_long_help = sections::WRITE)]
    Write(WriteArgs),
    #[command(after_long_help = sections::BENCH)]
    Bench(BenchArgs),
    /// Build, inspect or drop the index of a chain.
    #[command(after_long_help = sections::INDEX)]
    Index(IndexArgs),
    #[command(after_long_help = sections::TREE)]
    Tree(TreeArgs),
    #[command(after_long_help = sections::SURVEY)]
    Survey(SurveyArgs),
    /// Create, list and manage volumes: disks that any host can attach.
    #[command(after_long_help = volume::EXAMPLES)]
    Volume(VolumeArgs),
    /// Generate chains for tests and measurements.
    #[command(after_long_help = sections::GEN)]
    Gen(GenArgs),
    /// Write man pages and completions for shells into a directory.
    #[command(hide = true)]
    Manual(ManualArgs),
    /// Do what a server's sandbox forbids it to do. Only servers start this.
    #[command(hide = true, name = HELPER_VERB)]
    Helper,
}
