//! `mica volume`: volumes in a directory, a bucket or a pool. One file per verb.

mod check;
mod clone;
mod create;
mod delete;
mod diff;
mod export;
mod gc;
mod handover;
mod import;
mod info;
mod keep;
mod keys;
mod list;
mod live;
mod log;
mod receive;
mod rekey;
mod rows;
mod scrub;
mod sections;
mod send;
mod session;
mod snapshots;
mod stats;
mod tree;

pub(crate) use live::{LiveVerb, run as run_live};
pub(crate) use rows::{SnapshotRow, snapshot_json, snapshot_table};
pub(crate) use tree::DrawnArgs;

use crate::failure::Failure;
use clap::{Args, Subcommand};
use std::process::ExitCode;

/// The examples of the verb itself.
pub(crate) const EXAMPLES: &str = sections::VOLUME;

#[derive(Args)]
pub(crate) struct VolumeArgs {
    #[command(subcommand)]
    verb: VolumeVerb,
}

#[derive(Subcommand)]
enum VolumeVerb {
    #[command(after_long_help = sections::CREATE)]
    Create(create::CreateArgs),
    #[command(after_long_help = sections::LIST)]
    List(list::ListArgs),
    #[command(after_long_help = sections::INFO)]
    Info(info::InfoArgs),
    #[command(after_long_help = sections::DELETE)]
    Delete(delete::DeleteArgs),
    #[command(after_long_help = sections::SNAPSHOT)]
    Snapshot(snapshots::TakeArgs),
    #[command(after_long_help = sections::SNAPSHOTS)]
    Snapshots(snapshots::ListArgs),
    #[command(after_long_help = sections::LABEL)]
    Label(snapshots::LabelArgs),
    #[command(after_long_help = sections::DROP)]
    Drop(snapshots::DropArgs),
    #[command(after_long_help = sections::KEEP)]
    Keep(keep::KeepArgs),
    #[command(after_long_help = sections::ROLLBACK)]
    Rollback(snapshots::RollbackArgs),
    #[command(after_long_help = sections::CLONE)]
    Clone(clone::CloneArgs),
    #[command(after_long_help = sections::DIFF)]
    Diff(diff::DiffArgs),
    #[command(after_long_help = sections::TREE)]
    Tree(tree::TreeArgs),
    #[command(after_long_help = sections::CHECK)]
    Check(check::CheckArgs),
    #[command(after_long_help = sections::SCRUB)]
    Scrub(scrub::ScrubArgs),
    #[command(after_long_help = sections::GC)]
    Gc(gc::GcArgs),
    #[command(after_long_help = sections::STATS)]
    Stats(stats::StatsArgs),
    #[command(after_long_help = sections::LOG)]
    Log(log::LogArgs),
    #[command(after_long_help = sections::HANDOVER)]
    Handover(handover::HandoverArgs),
    #[command(after_long_help = sections::REKEY)]
    Rekey(rekey::RekeyArgs),
    #[command(after_long_help = sections::IMPORT)]
    Import(Box<import::ImportArgs>),
    #[command(after_long_help = sections::EXPORT)]
    Export(export::ExportArgs),
    #[command(after_long_help = sections::SEND)]
    Send(send::SendArgs),
    #[command(after_long_help = sections::RECEIVE)]
    Receive(receive::ReceiveArgs),
}

pub(crate) fn run(args: &VolumeArgs) -> Result<ExitCode, Failure> {
    match &args.verb {
        VolumeVerb::Create(args) => create::run(args),
        VolumeVerb::List(args) => list::run(args),
        VolumeVerb::Info(args) => info::run(args),
        VolumeVerb::Delete(args) => delete::run(args),
        VolumeVerb::Snapshot(args) => snapshots::take(args),
        VolumeVerb::Snapshots(args) => snapshots::list(args),
        VolumeVerb::Label(args) => snapshots::label(args),
        VolumeVerb::Drop(args) => snapshots::drop_one(args),
        VolumeVerb::Keep(args) => keep::run(args),
        VolumeVerb::Log(args) => log::run(args),
        VolumeVerb::Rollback(args) => snapshots::rollback(args),
        VolumeVerb::Clone(args) => clone::run(args),
        VolumeVerb::Diff(args) => diff::run(args),
        VolumeVerb::Tree(args) => tree::run(args),
        VolumeVerb::Check(args) => check::run(args),
        VolumeVerb::Scrub(args) => scrub::run(args),
        VolumeVerb::Gc(args) => gc::run(args),
        VolumeVerb::Stats(args) => stats::run(args),
        VolumeVerb::Handover(args) => handover::run(args),
        VolumeVerb::Rekey(args) => rekey::run(args),
        VolumeVerb::Import(args) => import::run(args),
        VolumeVerb::Export(args) => export::run(args),
        VolumeVerb::Send(args) => send::run(args),
        VolumeVerb::Receive(args) => receive::run(args),
    }
}
