//! `mica read` and `mica write`: copy bytes of a disk to and from a pipe, for scripts.

use crate::failure::Failure;
use crate::images::{ImageArgs, size_of};
use crate::output::{OutputFormat, print_json};
use clap::Args;
use mica_block::{Disk, read_whole};
use mica_qcow2::IndexUse;
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};
use serde_json::json;
use std::io::{Read as _, Write as _};
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;

/// Bytes read or written at a time.
const PIECE_BYTES: u64 = 1 << 20;

// An image and an offset. (A doc comment would become the help of the verb.)
#[derive(Args)]
struct PlaceArgs {
    #[command(flatten)]
    images: ImageArgs,
    /// The image.
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Offset of the first byte on the disk (suffixes k, M, G, T or KiB, MiB, …).
    #[arg(value_name = "OFFSET")]
    offset: String,
}

/// Read bytes of a disk to stdout.
#[derive(Args)]
pub(crate) struct ReadArgs {
    #[command(flatten)]
    place: PlaceArgs,
    /// Number of bytes; up to the end of the disk by default.
    #[arg(value_name = "LENGTH")]
    length: Option<String>,
}

/// Write bytes from stdin to a disk and make them durable.
#[derive(Args)]
pub(crate) struct WriteArgs {
    /// How to print the result: human (nothing) or json.
    #[arg(long, value_enum, default_value = "human", value_name = "FORMAT")]
    #[arg(hide_possible_values = true, hide_default_value = true)]
    output: OutputFormat,
    #[command(flatten)]
    place: PlaceArgs,
}

pub(crate) fn read(args: &ReadArgs) -> Result<ExitCode, Failure> {
    let PlaceArgs { images, image, offset } = &args.place;
    let offset = size_of("OFFSET", offset)?;
    let length = args.length.as_deref().map(|length| size_of("LENGTH", length)).transpose()?;
    let executor = images.executor()?;
    executor.block_on(async {
        let disk = images.open_source(image, IndexUse::Read).await?;
        let len = disk.geometry().len;
        let end = length.map_or(Some(len), |length| offset.checked_add(length));
        let end =
            end.filter(|end| offset <= *end && *end <= len).ok_or_else(|| beyond_end(&*disk))?;
        copy_out(&*disk, offset..end, |_, _| {}).await?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Writes `range` of `disk` to stdout; after each piece `progress` is called with the position and
/// the length of the piece.
pub(crate) async fn copy_out(
    disk: &dyn Disk,
    range: Range<u64>,
    progress: impl Fn(u64, u64),
) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    let mut at = range.start;
    while at < range.end {
        let piece = read_piece(disk, at, (range.end - at).min(PIECE_BYTES)).await?;
        stdout.write_all(&piece).map_err(Failure::of_stdout)?;
        at += piece.len() as u64;
        progress(at, piece.len() as u64);
    }
    stdout.flush().map_err(Failure::of_stdout)
}

pub(crate) fn write(args: &WriteArgs) -> Result<ExitCode, Failure> {
    let PlaceArgs { images, image, offset } = &args.place;
    let offset = size_of("OFFSET", offset)?;
    let executor = images.executor()?;
    let bytes = executor.block_on(async {
        let (format, chain) = (images.format(), images.chain_options(IndexUse::Read)?);
        let images = images.image_options()?;
        let disk = mica_stack::open_writable(image, format, images, &chain).await?;
        let written = write_all(&*disk, offset).await;
        // What was written before an error is made durable nevertheless.
        let closed = disk.close().await;
        let bytes = written?;
        closed?;
        Ok::<_, Failure>(bytes)
    })?;
    if args.output == OutputFormat::Json {
        let filename = image.to_string_lossy();
        print_json(&json!({ "filename": filename, "offset": offset, "written-bytes": bytes }))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes what stdin has, and returns how many bytes that is.
async fn write_all(disk: &dyn Disk, offset: u64) -> Result<u64, Failure> {
    let mut stdin = std::io::stdin().lock();
    let mut at = offset;
    loop {
        // The first piece ends at an aligned offset, so that all others are whole.
        let mut piece = Vec::new();
        stdin.by_ref().take(PIECE_BYTES - at % PIECE_BYTES).read_to_end(&mut piece)?;
        if piece.is_empty() {
            return Ok(at - offset);
        }
        let end = at.checked_add(piece.len() as u64);
        if end.is_none_or(|end| end > disk.geometry().len) {
            return Err(beyond_end(disk));
        }
        write_piece(disk, at, &piece).await?;
        at += piece.len() as u64;
    }
}

/// Writes `piece` at `at`; partially covered sectors are read first.
async fn write_piece(disk: &dyn Disk, at: u64, piece: &[u8]) -> Result<(), Failure> {
    let end = at + piece.len() as u64;
    let (start, stop) = (at - at % SECTOR_BYTES, end.next_multiple_of(SECTOR_BYTES));
    let within = usize::try_from(at - start).expect("less than a sector");
    let mut buf = match (at, end) == (start, stop) {
        true => Buf::new(piece.len()),
        false => read_piece(disk, start, stop - start).await?,
    };
    buf.put(within, piece);
    let (result, _) = disk.write(GuestOffset::new(start), buf).await;
    Ok(result?)
}

/// The `len` bytes at `at`.
async fn read_piece(disk: &dyn Disk, at: u64, len: u64) -> Result<Buf, Failure> {
    let sectors_start = at - at % SECTOR_BYTES;
    let sectors_end = (at + len).next_multiple_of(SECTOR_BYTES);
    let range = GuestRange::new(GuestOffset::new(sectors_start), sectors_end - sectors_start);
    let range = range.ok_or_else(|| beyond_end(disk))?;
    let plan = disk.plan(range, Vec::new()).finish().await?;
    let mut bytes = read_whole(disk, &plan).await?;
    bytes.advance(usize::try_from(at - sectors_start).expect("less than a sector"));
    bytes.truncate(usize::try_from(len).expect("a piece"));
    Ok(bytes)
}

fn beyond_end(disk: &dyn Disk) -> Failure {
    Failure::new(format!(
        "the disk ends at byte {}, before the end of the range",
        disk.geometry().len
    ))
}
