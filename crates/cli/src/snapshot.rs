//! `mica snapshot`: the internal snapshots of an image that is not in use, with qemu-img's letters.

use crate::failure::Failure;
use crate::images::ImageArgs;
use crate::info::{snapshot_json, snapshot_lines};
use crate::output::{OutputFormat, ReportArgs, print, print_json};
use clap::Args;
use mica_block::{Images, wait_for_dead};
use mica_qcow2::snapshots::SnapshotSelector;
use mica_qcow2_tools::snapshots::{SnapshotEditor, list};
use mica_stack::{FileImages, Format, MayWrite};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Create, apply, delete or list the internal snapshots of an image.
///
/// The image must not be in use; `mica ctl snapshot` takes a snapshot of a disk that is served, as
/// a layer of its own. Without another option the snapshots are listed. An image with internal
/// snapshots is written without a redo log.
#[derive(Args)]
#[group(id = "deed", multiple = false, args = ["list", "create", "apply", "delete"])]
pub(crate) struct SnapshotArgs {
    /// List the snapshots.
    #[arg(short = 'l', long)]
    list: bool,
    /// Take a snapshot of the disk as it is.
    #[arg(short = 'c', long, value_name = "NAME")]
    create: Option<String>,
    /// Revert the disk to this snapshot.
    ///
    /// By ID or name, as -d takes it. Anything written since is lost, unless another snapshot has
    /// it.
    #[arg(short = 'a', long, value_name = "NAME")]
    apply: Option<String>,
    /// Delete this snapshot, by ID or name.
    ///
    /// What is the ID of one snapshot and the name of another is refused: snapshot.id=ID and
    /// snapshot.name=NAME say which is meant.
    #[arg(short = 'd', long, value_name = "NAME")]
    delete: Option<String>,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    images: ImageArgs,
    /// The image.
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
}

/// What is done to an image.
#[derive(Clone, Copy)]
enum Deed<'a> {
    Create(&'a str),
    Apply(&'a str),
    Delete(&'a str),
}

pub(crate) fn run(args: &SnapshotArgs) -> Result<ExitCode, Failure> {
    if args.images.format() != Format::Qcow2 {
        return Err(Failure::new("only a qcow2 image has snapshots"));
    }
    let SnapshotArgs { create, apply, delete, .. } = args;
    let deed = create.as_deref().map(Deed::Create);
    let deed = deed.or(apply.as_deref().map(Deed::Apply));
    let deed = deed.or(delete.as_deref().map(Deed::Delete));
    let executor = args.images.executor()?;
    executor.block_on(async {
        match deed {
            None => show(args).await?,
            Some(deed) => change(args, deed).await?,
        }
        Ok(ExitCode::SUCCESS)
    })
}

async fn show(args: &SnapshotArgs) -> Result<(), Failure> {
    let images = FileImages::new(&args.image, args.images.image_options()?)?;
    let all = list(&images, &args.image).await?;
    match args.report.format() {
        Some(OutputFormat::Json) => print_json(&all.iter().map(snapshot_json).collect::<Vec<_>>()),
        _ if all.is_empty() => Ok(()),
        _ => print(&(snapshot_lines(&all).join("\n") + "\n")),
    }
}

async fn change(args: &SnapshotArgs, deed: Deed<'_>) -> Result<(), Failure> {
    let options = args.images.image_options()?;
    let may_write = MayWrite::check(&args.image, &options).await?;
    let images = FileImages::to_write(&args.image, options, may_write)?;
    let open = async || SnapshotEditor::open(&images, &args.image).await;
    let mut editor = wait_for_dead(open).await?;
    let changed = match deed {
        Deed::Create(name) => editor.create(name, images.now_ns()).await,
        Deed::Apply(name) => editor.apply(&name.parse::<SnapshotSelector>()?).await,
        Deed::Delete(name) => editor.delete(&name.parse::<SnapshotSelector>()?).await,
    };
    changed.map_err(|error| Failure::from(error).within(args.image.display()))?;
    let (verb, name) = match deed {
        Deed::Create(name) => ("created", name),
        Deed::Apply(name) => ("applied", name),
        Deed::Delete(name) => ("deleted", name),
    };
    match args.report.format() {
        None => Ok(()),
        Some(OutputFormat::Json) => print_json(&json!({ verb: name })),
        Some(OutputFormat::Human) => print(&format!("Snapshot {name}: {verb}.\n")),
    }
}
