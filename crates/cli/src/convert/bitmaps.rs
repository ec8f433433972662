//! The dirty bitmaps of a copy: those of the source, with what they say.

use super::ConvertArgs;
use super::stream::is_stream;
use crate::bitmap::warn_of;
use crate::create::NewFile;
use crate::failure::Failure;
use mica_block::wait_for_dead;
use mica_qcow2::find_bitmap;
use mica_qcow2_format::{BitmapEntry, Version};
use mica_qcow2_tools::bitmaps::{BitmapAction, edit_bitmap};
use mica_qcow2_tools::create::ImagePlan;
use mica_qcow2_tools::inspect;
use mica_stack::{FileImages, Format, ImageOptions, MayWrite};
use mica_store::Locking;
use std::path::Path;

/// # Errors
/// If bitmaps are to be copied that the source or the target cannot have.
pub(super) fn check(args: &ConvertArgs, format: Format) -> Result<(), Failure> {
    if !args.bitmaps {
        return Ok(());
    }
    let is_qcow2 = format == Format::Qcow2 && args.images.format() == Format::Qcow2;
    if !is_qcow2 || is_stream(&args.names.target) {
        return Err(Failure::new("--bitmaps: only qcow2 images have bitmaps"));
    }
    if args.names.sources.len() > 1 {
        return Err(Failure::new("--bitmaps: bitmaps cannot be copied from several sources"));
    }
    Ok(())
}

/// Those that are to be copied, before anything else is.
pub(super) async fn wanted(args: &ConvertArgs) -> Result<Vec<BitmapEntry>, Failure> {
    let source = match (args.bitmaps, args.names.sources.first()) {
        (true, Some(source)) => source,
        _ => return Ok(Vec::new()),
    };
    let images = FileImages::new(source, args.source_options()?)?;
    let info = wait_for_dead(async || inspect(&images, source).await).await?;
    let from = source.display();
    if info.header.stale_bitmaps {
        tracing::warn!(
            "{from}: its bitmaps are left out: a program that does not know them has written it"
        );
    }
    let is_empty = info.header.disk_bytes() == 0;
    let mut wanted = info.bitmaps;
    wanted.retain(|bitmap| {
        let why = match bitmap.in_use {
            _ if is_empty => "a disk of 0 bytes has none",
            true if args.skip_broken_bitmaps => "it is inconsistent, as a writer has not saved it",
            _ => return true,
        };
        tracing::warn!("{from}: the bitmap {:?} is left out: {why}", bitmap.name);
        false
    });
    if let Some(broken) = wanted.iter().find(|bitmap| bitmap.in_use) {
        return Err(Failure::new(format!(
            "{from}: the bitmap {:?} is inconsistent: --skip-broken-bitmaps leaves it out, and `mica \
             bitmap --remove` removes it",
            broken.name
        )));
    }
    Ok(wanted)
}

/// # Errors
/// If the image of `plan` cannot have the `wanted` ones.
pub(super) fn check_plan(plan: &ImagePlan, wanted: &[BitmapEntry]) -> Result<(), Failure> {
    if plan.l2.version == Version::V2 && !wanted.is_empty() {
        let what = "--bitmaps: an image of version 2 has no bitmaps: leave out compat=0.10";
        return Err(Failure::new(what));
    }
    Ok(plan.check_bitmaps(wanted).map_err(|error| error.wrap("--bitmaps"))?)
}

/// Makes sure that a target that exists, and stays, can have the `wanted` ones, and has none of
/// them yet, before it is written.
pub(super) async fn check_free(args: &ConvertArgs, wanted: &[BitmapEntry]) -> Result<(), Failure> {
    if !args.no_create || wanted.is_empty() {
        return Ok(());
    }
    let target = &*args.names.target;
    let images = FileImages::new(target, args.target_options()?)?;
    let there = wait_for_dead(async || inspect(&images, target).await).await?;
    if let Some(source) = args.names.sources.first() {
        let images = FileImages::new(source, args.source_options()?)?;
        let inspected = wait_for_dead(async || inspect(&images, source).await);
        let len = inspected.await?.header.disk_bytes();
        let target_len = there.header.disk_bytes();
        if len != target_len {
            return Err(Failure::new(format!(
                "--bitmaps: {} has a disk of {target_len} bytes, and the source one of {len}: \
                 bitmaps are copied only to a disk of the same length",
                target.display()
            )));
        }
    }
    let possible = there.check_more_bitmaps(wanted).await;
    Ok(possible.map_err(|error| error.wrap(format!("--bitmaps: {}", target.display())))?)
}

/// Adds `bitmaps` to the target, which is complete otherwise: the `new` image, which is locked and
/// has no name yet, or the one that exists.
pub(super) async fn copy(
    args: &ConvertArgs,
    bitmaps: Vec<BitmapEntry>,
    new: Option<&NewFile>,
) -> Result<(), Failure> {
    let Some(source) = args.names.sources.first() else { return Ok(()) };
    for bitmap in bitmaps {
        let copied = copy_one(args, source, &bitmap, new).await;
        copied
            .map_err(|failure| failure.within(format!("copying the bitmap {:?}", bitmap.name)))?;
    }
    Ok(())
}

async fn copy_one(
    args: &ConvertArgs,
    source: &Path,
    bitmap: &BitmapEntry,
    new: Option<&NewFile>,
) -> Result<(), Failure> {
    let from = FileImages::new(source, args.source_options()?)?;
    let found = find_bitmap(&from, &[source.to_owned()], &bitmap.name).await?;
    let mut actions = vec![BitmapAction::Add(Some(1 << bitmap.granularity_bits))];
    if !bitmap.auto {
        actions.push(BitmapAction::Disable);
    }
    actions.push(BitmapAction::MergeFrom(found));
    let options = args.target_options()?;
    let (path, to) = match new {
        // The lock is our own.
        Some(new) => {
            let options = ImageOptions { locking: Locking::Off, ..options };
            (new.place(), FileImages::to_write(new.place(), options, MayWrite::new_file())?)
        }
        None => {
            let path = &*args.names.target;
            let may_write = MayWrite::check(path, &options).await?;
            (path, FileImages::to_write(path, options, may_write)?)
        }
    };
    warn_of(&edit_bitmap(&to, path, &bitmap.name, actions).await?);
    Ok(())
}
