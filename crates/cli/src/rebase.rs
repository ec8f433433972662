//! `mica rebase`: gives an image that is not in use another backing file.

use crate::convert::Progress;
use crate::create::{plain_backing, refuse_protocol, warn_of_names, warn_of_plain};
use crate::failure::Failure;
use crate::images::ImageArgs;
use crate::merging::{Shown, position_of};
use crate::output::{OutputFormat, ReportArgs, print, print_json};
use clap::Args;
use mica_block::{
    Error, ErrorKind, Extent, Images, Manage, Merged, NamedBacking, read_extents, wait_for_dead,
};
use mica_qcow2::snapshots::check_none_stands_on_backing;
use mica_qcow2::{IndexUse, change_backing, read_header, replay_redo_log};
use mica_qcow2_format::{BackingName, parse_image_name};
use mica_rt::Buf;
use mica_stack::merge::Merge;
use mica_stack::{
    FileImages, Format, GoneFiles, MayWrite, Noting, announce_noted_overlay, forget_drops,
    forget_overlays, note_overlay, refuse_merged, settle_marks,
};
use mica_units::{GuestOffset, GuestRange, LayerNumber, SECTOR_BYTES};
use serde_json::json;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::slice;
use std::sync::Arc;

/// Bytes that are compared at a time.
const STEP_BYTES: u64 = 1 << 20;

/// Change the backing file of an image.
///
/// The content of the disk does not change: where the new backing file differs from the present
/// one, the bytes are copied into the image first. With -u only the name changes. The images must
/// not be in use; `mica ctl stream` does this for a disk that is served. An image with internal
/// snapshots is only renamed: they show the present backing file.
#[derive(Args)]
pub(crate) struct RebaseArgs {
    /// The new backing file, as the image names it; '' for none.
    #[arg(short = 'b', long, alias = "backing", value_name = "FILE", required = true)]
    base: OsString,
    /// The format of the new backing file: qcow2 or raw.
    #[arg(short = 'F', long, alias = "backing-format", value_name = "FORMAT")]
    base_format: Option<Format>,
    /// Change only the name.
    ///
    /// The new file must have the content of the present one, which may be missing.
    #[arg(short = 'u', long, alias = "backing-unsafe")]
    unsafe_mode: bool,
    /// Show progress on stderr.
    #[arg(short = 'p', long)]
    progress: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    images: ImageArgs,
    /// The image.
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// The new backing file.
struct Base {
    name: BackingName,
    path: PathBuf,
    format: Format,
}

impl Base {
    /// Its name, as the image has it.
    fn named(&self) -> NamedBacking<'_> {
        NamedBacking { name: &self.name.name, format: self.name.format.as_deref() }
    }
}

pub(crate) fn run(args: &RebaseArgs) -> Result<ExitCode, Failure> {
    if args.images.format() != Format::Qcow2 {
        return Err(Failure::new("only a qcow2 image has a backing file"));
    }
    let executor = args.images.executor()?;
    let written = executor.block_on(async {
        let base = args.new_base()?;
        if let Some(base) = &base {
            args.check_no_loop(base).await?;
        }
        if args.unsafe_mode {
            let there = base.as_ref().filter(|base| base.path.exists());
            let there = there.map(|base| (base, note_overlay(&base.path, &args.file)));
            args.rename(base.as_ref()).await?;
            if let Some(base) = &base {
                warn_of_names(&args.file, &[&base.name.name], &args.images)?;
            }
            if let Some((base, noted)) = there {
                args.announce(base, noted)?;
            }
            return Ok::<u64, Failure>(0);
        }
        args.rebase(base.as_ref()).await
    })?;
    match args.report.format() {
        Some(OutputFormat::Json) => print_json(&json!({ "copied-bytes": written }))?,
        Some(OutputFormat::Human) => print("Image rebased.\n")?,
        None => {}
    }
    Ok(ExitCode::SUCCESS)
}

impl RebaseArgs {
    fn new_base(&self) -> Result<Option<Base>, Failure> {
        if self.base.is_empty() {
            return Ok(None);
        }
        let Some(format) = self.base_format else {
            return Err(Failure::new(
                "-F is required: it states the format of the new backing file",
            ));
        };
        if format == Format::Null {
            return Err(Failure::new("a backing file is a qcow2 or a raw image"));
        }
        let folder = self.file.parent().unwrap_or(std::path::Path::new(""));
        let path = folder.join(&self.base);
        let mut name = self.base.clone();
        plain_backing(&self.file, &mut name);
        if !self.unsafe_mode {
            refuse_protocol(&name)?;
        }
        let name = BackingName { name, format: Some(format.name().to_owned()) };
        Ok(Some(Base { name, path, format }))
    }

    /// Writes into the image what the new base lacks, and names it.
    async fn rebase(&self, base: Option<&Base>) -> Result<u64, Failure> {
        if let Some(base) = base {
            refuse_merged(&base.path)?;
        }
        let chain = self.images.chain_options(IndexUse::Read)?;
        let options = self.images.image_options()?;
        let may_change = self.check_snapshots().await?;
        let disk = mica_stack::open_writable(&self.file, Format::Qcow2, options, &chain).await?;
        let layers = disk.layer_paths();
        let keeps_base =
            |base: &Base| position_of(&layers, &base.path).is_ok_and(|at| at + 2 == layers.len());
        let moved = async {
            if !base.is_some_and(keeps_base) {
                may_change?;
            }
            // Layers that leave the chain are the user's, whatever is left of a drop.
            forget_drops(&layers)?;
            self.move_to(&*disk, base).await
        };
        let moved = moved.await;
        let new_base = base.filter(|_| moved.is_ok());
        // Whoever merges the base finds the image, whatever becomes of this process.
        let named = new_base.map(|base| (base, note_overlay(&base.path, &self.file)));
        let closed = match named {
            Some((base, _)) => self.close_on(&*disk, base).await,
            None => disk.close().await,
        };
        drop(disk);
        let (copied, new) = moved?;
        closed?;
        if let Some((base, noted)) = named {
            follow(&layers, base)?;
            // It shows what it did so far.
            self.announce(base, noted)?;
        }
        // Nobody has merged the base since it was read.
        drop(new);
        if let (Some(base), [.., old, file]) = (base, &*layers)
            && position_of(slice::from_ref(old), &base.path).is_err()
        {
            forget_overlays(old, slice::from_ref(file));
        }
        Ok(copied)
    }

    /// Names the `base`, which shows all that the image of this `disk` lacks, and closes it. It is
    /// locked all the while: who wrote to it before it has the name would have written to a disk
    /// that it does not show then.
    async fn close_on(&self, disk: &dyn Manage, base: &Base) -> mica_block::Result<()> {
        disk.chain().ok_or_else(cannot_be_written)?.close_on(base.named()).await
    }

    /// Makes sure that whoever merges the `base`, which the image names, finds it.
    fn announce(&self, base: &Base, noted: Noting) -> Result<(), Failure> {
        announce_noted_overlay(&base.path, &self.file, noted)
            .map_err(|error| Failure::from(error).within("rebase it once more"))
    }

    /// Makes the image independent of what the new base does not show. Returns how many bytes were
    /// written, and the new base, open; without one the image names none already.
    async fn move_to(
        &self,
        disk: &dyn Manage,
        base: Option<&Base>,
    ) -> Result<(u64, Option<Arc<dyn Manage>>), Failure> {
        if disk.chain().is_none() {
            return Err(cannot_be_written().into());
        }
        let progress = Progress::start(disk.geometry().len, self.report.progress(self.progress));
        let layers = disk.layer_paths();
        let Some(base) = base else {
            let shown = Shown::new(progress);
            let ended = Merge::stream(&layers, None).prepare(|_| Ok(()))?.run(disk, &shown).await?;
            let _ = shown.finish();
            ended.settled.marks?;
            ended.settled.drops?;
            return Ok((copied_by(&ended.merged), None));
        };
        let chain = self.images.chain_options(IndexUse::Read)?;
        let options = self.images.image_options()?;
        let new = mica_stack::open(&base.path, base.format, options, &chain).await?;
        // A header without room for the name is better refused before than after.
        disk.chain().ok_or_else(cannot_be_written)?.check_name(base.named()).await?;
        let active = disk.layer_count() - 1;
        if !disk.is_encrypted(active) && (0..active).any(|layer| disk.is_encrypted(layer)) {
            warn_of_plain(&self.file);
        }
        let copied = copy_differences(disk, &*new, &progress).await?;
        let _ = progress.finish();
        Ok((copied, Some(new)))
    }

    /// Whether the image could stand on `base`. As far as that cannot be read, it is not known.
    ///
    /// # Errors
    /// If the image would lie beneath itself: nothing could open it any more.
    async fn check_no_loop(&self, base: &Base) -> Result<(), Failure> {
        let refuse = |what: &str| {
            let (file, base) = (self.file.display(), base.path.display());
            Err(Failure::new(format!("{file}: {base} {what}: name another backing file with -b")))
        };
        let is_own = |path: &PathBuf| mica_stack::position_of(slice::from_ref(path), &self.file);
        if is_own(&base.path).is_some() {
            return refuse("is the image itself");
        }
        let options = self.images.image_options()?;
        let Ok(images) = FileImages::new(&base.path, options) else { return Ok(()) };
        let mut next = Some(base.path.clone()).filter(|_| base.format == Format::Qcow2);
        for _ in 0..LayerNumber::COUNT_MAX {
            let Some(path) = next.take() else { break };
            let Ok(image) = images.open(&path) else { break };
            let Ok(header) = read_header(&*image.store).await else { break };
            let Some(backing) = &header.backing else { break };
            let Ok(name) = parse_image_name(&backing.name) else { break };
            let Ok(below) = images.resolve(&path, &name.path) else { break };
            if is_own(&below).is_some() {
                return refuse("stands on the image itself");
            }
            let format = backing.format.as_deref().or(name.format.as_deref());
            next = Some(below).filter(|_| format == Some(Format::Qcow2.name()));
        }
        Ok(())
    }

    /// Whether what lies beneath the image may change.
    ///
    /// # Errors
    /// If the image cannot be read.
    async fn check_snapshots(&self) -> Result<Result<(), Failure>, Failure> {
        let images = FileImages::new(&self.file, self.images.image_options()?)?;
        let image = wait_for_dead(async || images.open(&self.file)).await?;
        Ok(check_none_stands_on_backing(&*image.store, &self.file).await.map_err(|error| {
            let cure = "or, if the new backing file has the content of the present one, add -u";
            Failure::new(format!("{}; {cure}", Failure::from(error).message()))
        }))
    }

    /// Names the new base, and changes nothing else: with `-u`.
    async fn rename(&self, base: Option<&Base>) -> Result<(), Failure> {
        let options = self.images.image_options()?;
        let may_write = MayWrite::check(&self.file, &options).await?;
        let images = FileImages::to_write(&self.file, options, may_write)?;
        let image = wait_for_dead(async || images.open_writable(&self.file)).await?.store;
        replay_redo_log(&images, &self.file, &*image).await?;
        change_backing(&*image, base.map(|base| &base.name)).await?;
        Ok(())
    }
}

/// The image stands on `base` now, which was one of the `layers` of its chain, perhaps. If the
/// writing of their disk goes on in the image, the mark of the base, which named a layer between
/// the two, names the image. Of a clone nothing is marked.
fn follow(layers: &[PathBuf], base: &Base) -> Result<(), Failure> {
    let Ok(at) = position_of(layers, &base.path) else { return Ok(()) };
    if let Some((image, between)) = layers[at + 1..].split_last() {
        // Marks further below may name one between, too.
        let now = [&layers[..=at], std::slice::from_ref(image)].concat();
        settle_marks(&now, between, GoneFiles::Stay)?;
    }
    Ok(())
}

fn cannot_be_written() -> Error {
    Error::new(ErrorKind::Denied, "the image cannot be written")
}

fn copied_by(merged: &Merged) -> u64 {
    match merged {
        Merged::Done { copied, .. } => *copied,
        Merged::Cancelled => 0,
    }
}

/// Writes into the active layer of `disk` what shows through it and `new` does not show. Returns
/// how many bytes.
async fn copy_differences(
    disk: &dyn Manage,
    new: &dyn Manage,
    progress: &Progress,
) -> Result<u64, Failure> {
    let active = disk.layer_count() - 1;
    let (len, new_len) = (disk.geometry().len, new.geometry().len);
    let (mut at, mut copied) = (0, 0);
    while at < len {
        progress.at(at);
        let step = GuestRange::new(GuestOffset::new(at), STEP_BYTES.min(len - at)).expect("on it");
        let extents: Vec<Extent> = {
            let plan = disk.plan(step, Vec::new()).finish().await?;
            plan.iter().copied().collect()
        };
        for extent in extents.iter().filter(|extent| {
            !extent.kind.is_present() || disk.layer_position(extent.layer) != active
        }) {
            copied += copy_difference(disk, (new, new_len), extent.range(), progress).await?;
        }
        at += step.len();
    }
    Ok(copied)
}

async fn copy_difference(
    disk: &dyn Manage,
    (new, new_len): (&dyn Manage, u64),
    range: GuestRange,
    progress: &Progress,
) -> Result<u64, Failure> {
    let shown = read(disk, range).await?;
    let mut there = Buf::zeroed(shown.len());
    let end = range.end().min(GuestOffset::new(new_len));
    if let Some(part) = GuestRange::between(range.start(), end).filter(|part| !part.is_empty()) {
        there.put(0, &read(new, part).await?);
    }
    let sector = usize::try_from(SECTOR_BYTES).expect("512");
    let differs = |at: usize| shown[at..at + sector] != there[at..at + sector];
    let (mut at, mut copied) = (0, 0);
    while at < shown.len() {
        if !differs(at) {
            at += sector;
            continue;
        }
        let mut stop = at + sector;
        while stop < shown.len() && differs(stop) {
            stop += sector;
        }
        let start = range.start().checked_add(at as u64).expect("on the disk");
        disk.write(start, Buf::from_slice(&shown[at..stop])).await.0?;
        progress.wrote((stop - at) as u64);
        copied += (stop - at) as u64;
        at = stop;
    }
    Ok(copied)
}

async fn read(disk: &dyn Manage, range: GuestRange) -> Result<Buf, Failure> {
    let plan = disk.plan(range, Vec::new()).finish().await?;
    let buf = Buf::new(usize::try_from(range.len()).expect("a step"));
    Ok(read_extents(disk, &plan, buf).await?)
}

#[cfg(test)]
mod tests {
    use crate::args::{Cli, Verb};
    use clap::Parser;
    use mica_rt::{Backend, Executor};
    use mica_store::{CacheMode, Handles, Located, WritableFile};
    use std::time::Duration;

    fn run(verb: &[&str]) {
        let cli = Cli::try_parse_from([&["mica"], verb].concat()).expect("it is understood");
        let done = match cli.verb {
            Verb::Create(args) => crate::create::run(&args),
            Verb::Rebase(args) => super::run(&args),
            _ => panic!("another verb"),
        };
        done.unwrap_or_else(|failure| panic!("{}", failure.message()));
    }

    /// The story: all verbs waited until an image was let go of, but not one that changes only the
    /// name of what is beneath.
    #[test]
    fn image_that_somebody_has_for_a_moment_gets_its_name_then() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("disk.qcow2");
        let image = path.to_str().expect("UTF-8");
        run(&["create", "-q", "-f", "qcow2", image, "1M"]);
        let mut located = Located::find(&path).expect("there");
        let alone = WritableFile::open_alone(&mut located, CacheMode::Writeback, &Handles::new(4));
        let alone = alone.expect("nobody has it");
        let holder = std::thread::spawn(move || {
            let executor = Executor::new(Backend::Pool).expect("an executor");
            executor.block_on(async { mica_rt::sleep(Duration::from_millis(500)).await });
            drop(alone);
        });
        run(&["rebase", "-q", "-u", "-b", "", image]);
        holder.join().expect("it let go");
    }
}
