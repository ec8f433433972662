//! `mica compare`: whether two disks hold the same bytes.

use crate::failure::Failure;
use crate::images::ImageArgs;
use crate::output::{OutputFormat, ReportArgs, print, print_json, progress_bar};
use clap::Args;
use mica_block::{Detail, Disk, Extent, Plan, Result, read_extents};
use mica_qcow2::IndexUse;
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Bytes compared at a time: the minimum where there is data, growing where there is none.
const PIECE_BYTES_MIN: u64 = 2 << 20;
const PIECE_BYTES_MAX: u64 = 1 << 52;

/// The exit code if an image cannot be opened, as qemu-img's.
const EXIT_NOT_OPENED: u8 = 2;
/// The exit code of all other failures: 1 would be a verdict.
pub(crate) const EXIT_FAILED: u8 = 3;

#[derive(Args)]
pub(crate) struct CompareArgs {
    /// Format of the second image.
    #[arg(short = 'F', long, default_value = "qcow2", value_name = "FORMAT")]
    second_format: String,
    /// Treat disks of different lengths as different, even if the rest is zeros.
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
        let first = args.images.open(&args.first, IndexUse::Read).await.map_err(not_opened)?;
        let mut second = args.images.clone();
        second.settings.format.clone_from(&args.second_format);
        let second = second.open(&args.second, IndexUse::Read).await.map_err(not_opened)?;
        let (short, long): (&dyn Disk, &dyn Disk) = if first.geometry().len <= second.geometry().len
        {
            (&*first, &*second)
        } else {
            (&*second, &*first)
        };
        let sizes = (first.geometry().len, second.geometry().len);
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
    short: &dyn Disk,
    long: &dyn Disk,
    mut progress: impl FnMut(u64),
) -> Result<Difference> {
    let (common, end) = (short.geometry().len, long.geometry().len);
    let mut at = 0;
    let mut piece = PIECE_BYTES_MIN;
    while at < end {
        progress(at);
        let boundary = if at < common { common } else { end };
        let len = piece.min(boundary - at);
        let range = GuestRange::new(GuestOffset::new(at), len).expect("within the disk");
        let theirs = plan(long, range).await?;
        let ours = if at < common { plan(short, range).await? } else { None };
        if theirs.is_none() && ours.is_none() {
            piece = (piece * 2).min(PIECE_BYTES_MAX);
        } else if len > PIECE_BYTES_MIN {
            piece = PIECE_BYTES_MIN;
            continue;
        } else {
            let theirs = read(long, theirs).await?;
            let ours = read(short, ours).await?;
            if let Some(skip) = first_difference(ours.as_deref(), theirs.as_deref()) {
                return Ok(Difference::At(at + skip));
            }
        }
        at += len;
    }
    Ok(Difference::None)
}

/// The plan of `range`, or `None` if the map says that it reads as zeros.
async fn plan(disk: &dyn Disk, range: GuestRange) -> Result<Option<Plan<'_>>> {
    let plan = disk.plan(range, Detail::Allocation, Vec::new()).finish().await?;
    let is_zero = plan.iter().all(|extent| extent.kind.reads_as_zero());
    Ok((!is_zero).then_some(plan))
}

/// The bytes of a plan.
async fn read(disk: &dyn Disk, plan: Option<Plan<'_>>) -> Result<Option<Buf>> {
    let Some(plan) = plan else { return Ok(None) };
    let total = usize::try_from(Extent::total_len(&plan)).expect("a piece");
    read_extents(disk, &plan, Buf::new(total)).await.map(Some)
}

fn first_difference(ours: Option<&[u8]>, theirs: Option<&[u8]>) -> Option<u64> {
    let at = match (ours, theirs) {
        (None, None) => None,
        (Some(bytes), None) | (None, Some(bytes)) => bytes.iter().position(|byte| *byte != 0),
        (Some(ours), Some(theirs)) if ours == theirs => None,
        (Some(ours), Some(theirs)) => ours.iter().zip(theirs).position(|(a, b)| a != b),
    };
    at.map(|at| at as u64)
}

fn report(args: &CompareArgs, outcome: &Difference) -> std::result::Result<ExitCode, Failure> {
    let (identical, offset, text) = match outcome {
        Difference::None => (true, None, "Images are identical.\n".to_owned()),
        Difference::Length => (false, None, "Strict mode: Image size mismatch!\n".to_owned()),
        Difference::At(at) => (false, Some(*at), format!("Content mismatch at offset {at}!\n")),
    };
    match args.report.format() {
        None => {}
        Some(OutputFormat::Human) => print(&text)?,
        Some(OutputFormat::Json) => {
            print_json(&json!({ "identical": identical, "offset": offset }))?;
        }
    }
    Ok(if identical { ExitCode::SUCCESS } else { ExitCode::from(1) })
}
