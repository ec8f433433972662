//! `mica dd`: copies blocks of a disk into a new image, in the words of `qemu-img dd`.

use crate::convert::{Input, TargetArgs, run_from};
use crate::failure::Failure;
use crate::images::{ImageArgs, size_of};
use crate::output::ReportArgs;
use clap::Args;
use mica_block::Disk;
use mica_qcow2::IndexUse;
use mica_stack::{Window, WindowPlace};
use mica_units::SECTOR_BYTES;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Bytes of a block, if it is not stated.
const BLOCK_BYTES: u64 = 512;

/// Copy blocks of a disk into a new image.
///
/// Like qemu-img dd. if=FILE and of=FILE name the source and the new image; bs=SIZE is the block
/// size, 512 by default; skip=COUNT skips blocks at the start; count=COUNT is where the input ends,
/// counted from its start, so that skip=1 count=3 copies two blocks.
#[derive(Args)]
pub(crate) struct DdArgs {
    /// Format of the new image: raw or qcow2.
    #[arg(short = 'O', long, default_value = "raw", value_name = "FMT")]
    #[arg(hide_default_value = true)]
    output_format: String,
    /// Overwrite an existing file.
    ///
    /// The old one stays until the new one is complete, which gets its mode, owner and attributes:
    /// there must be room for both. One that cannot be replaced (it has a second hard link, or its
    /// folder cannot be written) is overwritten, with a warning.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    images: ImageArgs,
    /// if=, of=, bs=, count= and skip=.
    #[arg(value_name = "KEY=VALUE", required = true)]
    words: Vec<String>,
}

/// What the words say.
#[derive(Default, PartialEq, Eq, Debug)]
struct Wish {
    from: Option<PathBuf>,
    to: Option<PathBuf>,
    block: Option<u64>,
    count: Option<u64>,
    skip: Option<u64>,
}

pub(crate) fn run(args: &DdArgs) -> Result<ExitCode, Failure> {
    let wish = Wish::parse(&args.words)?;
    let (Some(from), Some(to)) = (&wish.from, &wish.to) else {
        return Err(Failure::new("dd needs if=FILE, the source, and of=FILE, the new image"));
    };
    let new = TargetArgs::plain(&args.output_format, args.force, args.report.clone());
    run_from(&from.to_string_lossy(), to.clone(), (new, args.images.clone()), |executor| {
        let disk = executor.block_on(args.images.open_source(from, IndexUse::Read))?;
        let place = wish.place(disk.geometry().len, from)?;
        let part = Window::new(Arc::clone(&disk) as Arc<dyn Disk>, place)?;
        Ok(Input::of(from, disk).with_disk(Arc::new(part)))
    })
}

impl Wish {
    fn parse(words: &[String]) -> Result<Self, Failure> {
        let mut wish = Self::default();
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            let count = || size_of(key, value).map(Some);
            match key {
                "if" => wish.from = Some(value.into()),
                "of" => wish.to = Some(value.into()),
                "bs" => wish.block = count()?,
                "count" => wish.count = count()?,
                "skip" => wish.skip = count()?,
                _ => {
                    let what = "there are if=, of=, bs=, count= and skip=";
                    return Err(Failure::new(format!("dd does not know {word:?}: {what}")));
                }
            }
        }
        Ok(wish)
    }

    /// What is copied of a disk of `len` bytes.
    fn place(&self, len: u64, from: &Path) -> Result<WindowPlace, Failure> {
        let block = self.block.unwrap_or(BLOCK_BYTES);
        if block == 0 {
            return Err(Failure::new("bs=0: a block must have at least one byte"));
        }
        let bytes = |count: u64| count.saturating_mul(block);
        let end = self.count.map_or(len, bytes).min(len);
        let start = self.skip.map_or(0, bytes);
        if start >= end {
            let what = format!("nothing is left to copy from byte {start} to {end}");
            return Err(Failure::new(what).within(from.display()));
        }
        if !start.is_multiple_of(SECTOR_BYTES) || !end.is_multiple_of(SECTOR_BYTES) {
            let what = "an image consists of whole sectors: choose blocks of 512 bytes, or copy \
                        bytes by `mica read IMAGE OFFSET LENGTH > FILE`";
            return Err(Failure::new(what));
        }
        Ok(WindowPlace { start, len: Some(end - start) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_counted_as_qemu_img_counts_them() {
        let place = |words: &[&str]| {
            let words: Vec<_> = words.iter().map(|word| (*word).to_owned()).collect();
            let place = Wish::parse(&words).and_then(|wish| wish.place(1 << 20, Path::new("it")));
            place.ok().map(|place| (place.start, place.len.unwrap_or(0)))
        };
        assert_eq!(place(&[]), Some((0, 1 << 20)));
        assert_eq!(place(&["bs=64k", "count=4", "skip=1"]), Some((64 << 10, 192 << 10)));
        assert_eq!(place(&["count=3", "if=a", "of=b"]), Some((0, 1536)));
        assert_eq!(place(&["bs=1M", "count=100"]), Some((0, 1 << 20)));
        for wrong in ["skip=2048", "count=0", "bs=0", "seek=1", "bs=x", "conv=notrunc"] {
            assert_eq!(place(&[wrong]), None, "{wrong}");
        }
        assert_eq!(place(&["bs=100", "count=1"]), None);
    }
}
