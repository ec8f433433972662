//! `mica commit`: merges an image that is not in use into one beneath it.

use crate::convert::Progress;
use crate::failure::Failure;
use crate::images::ImageArgs;
use crate::merging::Shown;
use crate::output::{OutputFormat, ReportArgs, print, print_json};
use clap::Args;
use mica_block::{ActiveAfter, Merged};
use mica_qcow2::IndexUse;
use mica_stack::merge::Merge;
use mica_stack::{GoneImages, forget_drops, kept_states};
use mica_store::Locking;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Merge an image into one beneath it.
///
/// What the image and the layers between it and BASE own is copied into BASE. Afterwards the image
/// is empty and its backing file is BASE. The images must not be in use; `mica ctl commit` merges
/// layers of a disk that is served. Refused if another image needs one of the layers: one in their
/// folders, or anywhere else if mica put it there; and if one of them but BASE has internal
/// snapshots, which would change.
#[derive(Args)]
pub(crate) struct CommitArgs {
    /// The layer to merge into; by default the image's backing file.
    #[arg(short = 'b', long, value_name = "FILE")]
    base: Option<PathBuf>,
    /// Do not empty the image afterwards.
    #[arg(short = 'd', long, alias = "drop")]
    keep: bool,
    /// Show progress on stderr.
    #[arg(short = 'p', long)]
    progress: bool,
    #[command(flatten)]
    gone: GoneArgs,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    images: ImageArgs,
    /// The image.
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

// What is said of images that are gone. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(crate) struct GoneArgs {
    /// Treat missing images that were overlays of these layers as removed.
    ///
    /// Without this they may have been moved, and so prevent the layers from being changed. With
    /// it, their entries are removed from the records beside the layers (LAYER.mica-overlays).
    #[arg(long)]
    pub(crate) ignore_gone: bool,
}

/// Refuses to merge `changed` layers of the image `above` of which one keeps a state.
fn refuse_kept(above: &Path, changed: &[PathBuf]) -> Result<(), Failure> {
    match kept_states(above, changed).first() {
        None => Ok(()),
        Some((at, state)) => Err(Failure::new(format!(
            "{} keeps the state {state:?}, which the merge would change: name another base with \
             -b, or use `mica rebase`",
            changed[*at].display()
        ))),
    }
}

pub(crate) fn run(args: &CommitArgs) -> Result<ExitCode, Failure> {
    let executor = args.images.executor()?;
    executor.block_on(async {
        let chain = args.images.chain_options(IndexUse::Read)?;
        let (format, options) = (args.images.format(), args.images.image_options()?);
        let has_locks = matches!(options.locking, Locking::On);
        let disk = mica_stack::open_writable(&args.file, format, options, &chain).await?;
        let merged = async {
            if disk.chain().is_none() {
                let what = "has no layers that could be merged: it is not qcow2";
                return Err(Failure::new(format!("{} {what}", args.file.display())));
            }
            let layers = disk.layer_paths();
            let lowest = match &args.base {
                None => layers.len().saturating_sub(2),
                Some(base) => crate::merging::position_of(&layers, base)?,
            };
            let top = layers.len().saturating_sub(1);
            if lowest >= top {
                let file = args.file.display();
                let what = match top {
                    0 => "has no backing file to merge into: a commit needs one",
                    _ => "is not beneath itself: name one of its backing files with -b",
                };
                return Err(Failure::new(format!("{file} {what}")));
            }
            if has_locks {
                mica_stack::remove_abandoned(&layers);
            }
            // Layers that leave the chain are the user's, whatever is left of a drop.
            forget_drops(&layers)?;
            refuse_kept(&layers[top], &layers[lowest..])?;
            let active = if args.keep { ActiveAfter::Kept } else { ActiveAfter::Emptied };
            let gone = GoneImages::new(args.gone.ignore_gone);
            // No other disk is open in this process.
            let merge = Merge::commit(&layers, lowest..=top, active, gone).prepare(|_| Ok(()))?;
            let wanted = args.report.progress(args.progress);
            let shown = Shown::new(Progress::start(disk.geometry().len, wanted));
            let ended = merge.run(&*disk, &shown).await?;
            let _ = shown.finish();
            ended.settled.marks?;
            ended.settled.drops?;
            Ok((ended.merged, layers[lowest].clone()))
        };
        let merged = merged.await;
        let closed = disk.close().await;
        let (merged, base) = merged?;
        closed?;
        let Merged::Done { dropped, copied } = merged else {
            return Err(Failure::new("the merge was cancelled"));
        };
        match args.report.format() {
            Some(OutputFormat::Json) => print_json(&json!({
                "base": base.to_string_lossy(),
                "copied-bytes": copied,
                "dropped": dropped.iter().map(|path| path.to_string_lossy()).collect::<Vec<_>>(),
            }))?,
            Some(OutputFormat::Human) => print("Image committed.\n")?,
            None => {}
        }
        Ok(ExitCode::SUCCESS)
    })
}
