//! `mica resize`: grows or shrinks the disk of an image that is not in use.

use crate::create::{open_writable, set_raw_len};
use crate::failure::Failure;
use crate::images::{ImageArgs, size_of};
use crate::output::ReportArgs;
use clap::Args;
use mica_block::{Images, wait_for_dead};
use mica_qcow2_tools::resize::Resizer;
use mica_stack::{FileImages, Format, MayWrite};
use mica_units::SECTOR_BYTES;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// Grow or shrink the disk of an image.
///
/// The image must not be in use; `mica ctl resize` grows a disk that is served.
#[derive(Args)]
pub(crate) struct ResizeArgs {
    /// Allow the disk to shrink.
    ///
    /// Data beyond the new end is lost.
    #[arg(long)]
    shrink: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    images: ImageArgs,
    /// The image.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The new length; with a leading + or -, the difference.
    #[arg(value_name = "[+|-]SIZE", allow_hyphen_values = true)]
    size: String,
}

pub(crate) fn run(args: &ResizeArgs) -> Result<ExitCode, Failure> {
    let executor = args.images.executor()?;
    let format = args.images.format();
    executor.block_on(async {
        let (before, after) = match format {
            Format::Raw => {
                let store = open_writable(&args.file, &args.images).await?;
                let old = store.len()?;
                let new = new_len(args, old)?;
                set_raw_len(&*store, new).await?;
                store.sync().await?;
                (old, new)
            }
            Format::Qcow2 => {
                let options = args.images.image_options()?;
                // A layer above relies on the length, and on what is there.
                let may_write = MayWrite::check(&args.file, &options).await?;
                let images = FileImages::to_write(&args.file, options, may_write)?;
                let images: Arc<dyn Images> = Arc::new(images);
                let open = async || Resizer::open(Arc::clone(&images), &args.file).await;
                let mut resizer = wait_for_dead(open).await?;
                let old = resizer.disk_bytes();
                let new = new_len(args, old)?;
                resizer.resize(new).await?;
                (old, new)
            }
            Format::Luks => {
                let what = "mica does not resize luks images: use `qemu-img resize`, or `mica \
                            convert -n` into a longer one";
                return Err(Failure::new(what));
            }
            Format::Null => return Err(Failure::new("the null format is not an image")),
        };
        let filename = args.file.to_string_lossy();
        let done =
            json!({ "filename": filename, "virtual-size-before": before, "virtual-size": after });
        args.report.print("Image resized.\n", &done)?;
        Ok(ExitCode::SUCCESS)
    })
}

/// The requested length, given the current one.
fn new_len(args: &ResizeArgs, old: u64) -> Result<u64, Failure> {
    let new = match args.size.split_at_checked(1) {
        Some(("+", more)) => old.checked_add(size_of("SIZE", more)?),
        Some(("-", less)) => old.checked_sub(size_of("SIZE", less)?),
        _ => Some(size_of("SIZE", &args.size)?),
    };
    let new = new
        .and_then(|new| new.checked_next_multiple_of(SECTOR_BYTES))
        .filter(|new| *new > 0 && i64::try_from(*new).is_ok())
        .ok_or_else(|| Failure::new("New image size must be positive and below 8 EiB"))?;
    if new < old && !args.shrink {
        return Err(Failure::new(
            "Use the --shrink option to perform a shrink operation: all data beyond the new end of \
             the disk is lost",
        ));
    }
    Ok(new)
}
