//! `mica compare`: whether two disks hold the same bytes.

use crate::cursor::Cursor;
use crate::failure::Failure;
use crate::images::ImageArgs;
use crate::output::{OutputFormat, ReportArgs, print, progress_bar};
use clap::Args;
use mica_block::{Disk, Result, read_whole};
use mica_qcow2::IndexUse;
use mica_stack::Format;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// Bytes compared at a time.
const PIECE_BYTES: u64 = 2 << 20;

/// The exit code if an image cannot be opened, as qemu-img's.
const EXIT_NOT_OPENED: u8 = 2;
/// The exit code of all other failures: 1 would be a verdict.
pub(crate) const EXIT_FAILED: u8 = 3;

#[derive(Args)]
pub(crate) struct CompareArgs {
    /// Format of the second image.
    #[arg(short = 'F', long, value_name = "FMT")]
    second_format: Option<Format>,
    /// Treat disks of different lengths as different.
    ///
    /// Even if the rest is zeros.
    #[arg(short = 's', long)]
    strict: bool,
    /// Show progress.
    #[arg(short = 'p', long)]
    progress: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    images: ImageArgs,
    /// The first image.
    #[arg(value_name = "IMAGE1")]
    first: PathBuf,
    /// The second image.
    #[arg(value_name = "IMAGE2")]
    second: PathBuf,
}

pub(crate) fn run(args: &CompareArgs) -> std::result::Result<ExitCode, Failure> {
    let failed = |failure: Failure| failure.with_code(EXIT_FAILED);
    let not_opened = |failure: Failure| failure.with_code(EXIT_NOT_OPENED);
    let executor = args.images.executor().map_err(failed)?;
    executor.block_on(async {
        let first =
            args.images.open_source(&args.first, IndexUse::Read).await.map_err(not_opened)?;
        let second = args.images.with_format(args.second_format);
        let second = second.open_source(&args.second, IndexUse::Read).await.map_err(not_opened)?;
        let sizes = (first.geometry().len, second.geometry().len);
        let (short, long) = if sizes.0 <= sizes.1 { (first, second) } else { (second, first) };
        if args.strict && sizes.0 != sizes.1 {
            return report(args, &Difference::Length).map_err(failed);
        }
        let bar = progress_bar(long.geometry().len, "bytes");
        let bar = if args.progress { bar } else { indicatif::ProgressBar::hidden() };
        let outcome = compare(short, long, |at| bar.set_position(at)).await;
        bar.finish_and_clear();
        let outcome = outcome.map_err(Failure::from).map_err(failed)?;
        if sizes.0 != sizes.1 && args.report.format() == Some(OutputFormat::Human) {
            print("Warning: Image size mismatch!\n").map_err(failed)?;
        }
        report(args, &outcome).map_err(failed)
    })
}

enum Difference {
    None,
    Length,
    At(u64),
}

/// Finds the first byte that differs; the rest of the longer disk must be zeros.
async fn compare(
    short: Arc<dyn Disk>,
    long: Arc<dyn Disk>,
    mut progress: impl FnMut(u64),
) -> Result<Difference> {
    let (of_long, of_short) = (Arc::clone(&long), Arc::clone(&short));
    let mut cursor = Cursor::new(of_long, Some(of_short), PIECE_BYTES, false);
    while let Some(piece) = cursor.next().await? {
        progress(piece.start);
        let theirs = read_whole(&*long, &piece.first).await?;
        let ours = read_whole(&*short, &piece.second).await?;
        if let Some(skip) = first_difference(&ours, &theirs) {
            return Ok(Difference::At(piece.start + skip as u64));
        }
    }
    Ok(Difference::None)
}

/// Where `ours`, which may be shorter and goes on with zeros, differs from `theirs`.
fn first_difference(ours: &[u8], theirs: &[u8]) -> Option<usize> {
    let (common, rest) = theirs.split_at(ours.len());
    if ours != common {
        return ours.iter().zip(common).position(|(a, b)| a != b);
    }
    rest.iter().position(|byte| *byte != 0).map(|skip| ours.len() + skip)
}

fn report(args: &CompareArgs, outcome: &Difference) -> std::result::Result<ExitCode, Failure> {
    let (identical, offset, text) = match outcome {
        Difference::None => (true, None, "Images are identical.\n".to_owned()),
        Difference::Length => (false, None, "Strict mode: Image size mismatch!\n".to_owned()),
        Difference::At(at) => (false, Some(*at), format!("Content mismatch at offset {at}!\n")),
    };
    args.report.print(&text, &json!({ "identical": identical, "offset": offset }))?;
    Ok(if identical { ExitCode::SUCCESS } else { ExitCode::from(1) })
}
