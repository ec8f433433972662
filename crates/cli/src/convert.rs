//! `mica convert`: copies a disk, with everything its chain holds, into a new image, onto something
//! that exists, or to standard output.

mod bitmaps;
mod content;
mod engine;
mod existing;
mod input;
mod names;
mod progress;
mod stream;

use crate::create::{
    Device, Existing, NamedBase, NewFile, NewImageOptions, Sources, beside, fill_raw,
    is_any_encrypted, is_block_device, keep_new, new_data_file, no_new_luks, open_backing,
    parse_options, plain_names, refuse_protocol, warn_if_refused, warn_of_plain,
};
use crate::failure::Failure;
use crate::images::{CacheWord, ImageArgs, size_of};
use crate::output::{OutputFormat, ReportArgs, print_json};
use clap::Args;
use content::ContentRules;
use engine::{Job, Target};
pub(crate) use input::Input;
use mica_block::{Disk, Manage, Space, Store};
use mica_qcow2::IndexUse;
use mica_qcow2::snapshots::SnapshotSelector;
use mica_qcow2_format::BitmapEntry;
use mica_qcow2_tools::create::{ImagePlan, ImageWish, Preallocation, Stores, finish};
use mica_qcow2_tools::layout::ImageWriter;
use mica_qcow2_tools::measure::data_bytes;
use mica_rt::Executor;
use mica_stack::{Format, ImageOptions};
use mica_store::CacheMode;
use mica_units::{HostOffset, SECTOR_BYTES};
use names::Names;
use parking_lot::Mutex;
pub(crate) use progress::Progress;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

// What a copy is to be. (A doc comment would become the help of the verb.)
#[derive(Args, Clone, Default)]
pub(crate) struct TargetArgs {
    /// Format of the new image: qcow2 or raw.
    ///
    /// qcow2 by default, raw on a block device.
    #[arg(short = 'O', long, value_name = "FMT", alias = "target-format")]
    output_format: Option<String>,
    /// Options of the new image, see -o help.
    ///
    /// All except size: a copy is as long as its source. Can be repeated.
    #[arg(short = 'o', long, alias = "target-options", value_name = "KEY=VALUE,...")]
    options: Vec<String>,
    /// Compress the clusters.
    #[arg(short = 'c', long)]
    compress: bool,
    /// Length of runs of zeros to leave out; 0 for none.
    ///
    /// Runs of this length in a raw image (rounded up to a power of two, and down to 1M), whole
    /// clusters in a qcow2 image. 0 writes all zeros.
    #[arg(short = 'S', long = "sparse-size", default_value = SPARSE, value_name = "SIZE")]
    #[arg(hide_short_help = true)]
    sparse: String,
    /// Number of pieces to read, compress and write in parallel.
    #[arg(short = 'm', long, alias = "parallel", default_value_t = COROUTINES, value_name = "COUNT")]
    #[arg(hide_short_help = true, help_heading = "Engine")]
    coroutines: usize,
    /// Show progress on stderr.
    ///
    /// On a terminal a bar, elsewhere a line per second, JSON with --output json. SIGUSR1 prints a
    /// line at any time.
    #[arg(short = 'p', long)]
    progress: bool,
    /// Overwrite an existing file.
    ///
    /// The old one stays until the new one is complete, which gets its mode, owner and attributes:
    /// there must be room for both. One that cannot be replaced (it has a second hard link, or its
    /// folder cannot be written) is overwritten, with a warning.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    report: ReportArgs,
}

impl TargetArgs {
    /// A copy without any options of its own.
    pub(crate) fn plain(format: &str, force: bool, report: ReportArgs) -> Self {
        Self {
            output_format: Some(format.to_owned()),
            sparse: SPARSE.to_owned(),
            coroutines: COROUTINES,
            force,
            report,
            ..Self::default()
        }
    }
}

/// Copy a disk, with everything its chain holds, into a new image.
///
/// Several sources are concatenated.
#[derive(Args, Default)]
pub(crate) struct ConvertArgs {
    #[command(flatten)]
    new: TargetArgs,
    /// Copy this internal snapshot.
    ///
    /// By ID or name, or as snapshot.id=ID or snapshot.name=NAME (or both).
    #[arg(short = 'l', long, alias = "source-snapshot", value_name = "NAME")]
    load_snapshot: Option<SnapshotSelector>,
    /// Copy only what differs from this base.
    ///
    /// It becomes the backing file of the new image. Relative names start from its directory.
    #[arg(short = 'B', long, value_name = "BASE")]
    backing: Option<OsString>,
    /// Format of the backing file: qcow2 or raw.
    #[arg(short = 'F', long, value_name = "FMT", hide_short_help = true)]
    backing_format: Option<String>,
    /// Copy the dirty bitmaps too.
    ///
    /// Those of the source itself, not of its backing files.
    #[arg(long, conflicts_with = "load_snapshot")]
    bitmaps: bool,
    /// Skip bitmaps that are inconsistent.
    #[arg(long, requires = "bitmaps", hide_short_help = true)]
    skip_broken_bitmaps: bool,
    /// Limit copying to this many bytes per second.
    #[arg(short = 'r', long, value_name = "SIZE")]
    rate: Option<String>,
    /// How to read the source, same values as qemu-img: writeback, or none (O_DIRECT).
    ///
    /// Same as --cache; the other values of qemu-img mean one of these two.
    #[arg(short = 'T', long, value_name = "MODE", conflicts_with = "cache")]
    #[arg(hide_short_help = true, help_heading = "Engine")]
    source_cache: Option<CacheWord>,
    /// How to write the target, same values as qemu-img: writeback, or none (O_DIRECT).
    ///
    /// In either case it is synced once, at the end.
    #[arg(short = 't', long, value_name = "MODE")]
    #[arg(hide_short_help = true, help_heading = "Engine")]
    target_cache: Option<CacheWord>,
    /// Accepted for compatibility with qemu-img: pieces are always written out of order.
    #[arg(short = 'W', long = "oob-writes", hide_short_help = true, help_heading = "Engine")]
    out_of_order: bool,
    /// Write into TARGET, which must exist.
    ///
    /// It must be at least as long as the source; anything beyond that length stays.
    #[arg(short = 'n', long)]
    #[arg(conflicts_with_all = ["options", "compress", "backing", "backing_format"])]
    no_create: bool,
    /// TARGET reads as zeros already: write no zeros.
    #[arg(long, requires = "no_create", hide_short_help = true)]
    target_is_zero: bool,
    #[command(flatten)]
    images: ImageArgs,
    #[command(flatten)]
    names: Names,
}

/// Zeros to leave out, and pieces in flight, unless stated.
const SPARSE: &str = "4k";
const COROUTINES: usize = 8;
/// Most pieces in flight, as in QEMU.
const COROUTINES_MAX: usize = 16;

pub(crate) fn run(args: &ConvertArgs) -> Result<ExitCode, Failure> {
    let checked = args.check()?;
    let executor = args.images.executor()?;
    let bitmaps = executor.block_on(async {
        let wanted = bitmaps::wanted(args).await?;
        bitmaps::check_free(args, &wanted).await?;
        Ok::<_, Failure>(wanted)
    })?;
    let input = Input { bitmaps, ..executor.block_on(input::open(args))? };
    copy(args, checked, &executor, input)?;
    Ok(ExitCode::SUCCESS)
}

/// Copies what `open` opens, and the user called `source`, as [`run`] does.
pub(crate) fn run_from(
    source: &str,
    target: PathBuf,
    (new, images): (TargetArgs, ImageArgs),
    open: impl FnOnce(&Executor) -> Result<Input, Failure>,
) -> Result<ExitCode, Failure> {
    let sources = vec![PathBuf::from(source)];
    let names = Names { sources, target };
    let args = ConvertArgs { new, images, names, ..ConvertArgs::default() };
    let checked = args.check()?;
    let executor = args.images.executor()?;
    let input = open(&executor)?;
    copy(&args, checked, &executor, input)?;
    Ok(ExitCode::SUCCESS)
}

impl ConvertArgs {
    /// The format of the new image, and the length of runs of zeros that are left out.
    fn check(&self) -> Result<(Format, u64), Failure> {
        if !(1..=COROUTINES_MAX).contains(&self.new.coroutines) {
            let what = format!("-m must be between 1 and {COROUTINES_MAX}");
            return Err(Failure::new(what));
        }
        let sparse = size_of("-S", &self.new.sparse)?;
        if !sparse.is_multiple_of(SECTOR_BYTES) {
            return Err(Failure::new("-S must be a multiple of 512, or 0"));
        }
        let format = match self.new.output_format.as_deref() {
            // qemu-img would make it a raw disk.
            None if !self.no_create && is_block_device(&self.names.target) => {
                let what = "is a block device: say what it becomes, with -O raw or -O qcow2";
                return Err(Failure::new(format!("{} {what}", self.names.target.display())));
            }
            named => named.unwrap_or("qcow2").parse::<Format>()?,
        };
        if format == Format::Null {
            return Err(Failure::new("the null format cannot be created"));
        }
        if format == Format::Luks && !self.no_create {
            return Err(no_new_luks());
        }
        stream::check(self, format)?;
        input::check(self, format)?;
        bitmaps::check(self, format)?;
        self.rate()?;
        Ok((format, sparse))
    }

    /// Bytes of the disk a second; 0 if there is no limit.
    fn rate(&self) -> Result<u64, Failure> {
        self.rate.as_deref().map_or(Ok(0), |rate| size_of("-r", rate))
    }

    /// How sources are opened.
    fn source_options(&self) -> Result<ImageOptions, Failure> {
        let options = self.images.image_options()?;
        let cache = self.source_cache.map_or(options.cache, |CacheWord(cache)| cache);
        Ok(ImageOptions { cache, ..options })
    }

    /// How the target is opened.
    fn target_options(&self) -> Result<ImageOptions, Failure> {
        let cache = self.target_cache.map_or(CacheMode::Writeback, |CacheWord(cache)| cache);
        Ok(ImageOptions { cache, ..self.images.image_options()? })
    }
}

fn copy(
    args: &ConvertArgs,
    (format, sparse): (Format, u64),
    executor: &Executor,
    input: Input,
) -> Result<(), Failure> {
    // Not even with --force is a disk copied over one of its own files.
    let Input { disk: source, files: sources, is_encrypted, spooled: _spooled, bitmaps } = input;
    let len = source.geometry().len;
    let progress = Progress::start(len, args.new.report.progress(args.new.progress));
    if stream::is_stream(&args.names.target) {
        if is_encrypted {
            warn_of_plain(Path::new("the stream"));
        }
        stream::convert(executor, &*source, &progress)?;
    } else if args.no_create || format == Format::Raw && is_block_device(&args.names.target) {
        refuse_creation_options(args)?;
        let job = existing::Onto { args, format, executor, sparse };
        job.convert((source, is_encrypted), &sources, &progress)?;
        executor.block_on(bitmaps::copy(args, bitmaps, None))?;
    } else if format == Format::Raw {
        if is_encrypted {
            warn_of_plain(&args.names.target);
        }
        convert_to_raw(args, executor, source, &sources, (sparse, &progress))?;
    } else {
        let source = (source, is_encrypted, bitmaps);
        convert_to_qcow2(args, executor, source, sources, (sparse, &progress))?;
    }
    let figures = progress.finish();
    if args.new.report.format() == Some(OutputFormat::Json) {
        print_json(&described(args, format, len, figures))?;
    }
    Ok(())
}

/// What was made, and the figures of the copy.
fn described(args: &ConvertArgs, format: Format, len: u64, mut figures: Value) -> Value {
    let mut all = json!({
        "filename": args.names.target.display().to_string(),
        "format": format.name(),
        "virtual-size": len,
    });
    if let (Some(all), Some(figures)) = (all.as_object_mut(), figures.as_object_mut()) {
        let wanted = ["data-bytes", "seconds", "bytes-per-second"];
        all.extend(wanted.iter().filter_map(|name| figures.remove_entry(*name)));
    }
    all
}

/// A block device is as it is.
fn refuse_creation_options(args: &ConvertArgs) -> Result<(), Failure> {
    let has_base = args.backing.is_some() || args.backing_format.is_some();
    if args.new.compress || !args.new.options.is_empty() || has_base {
        let what = "exists and is not created: leave out -c, -o, -B and -F";
        return Err(Failure::new(format!("{} {what}", args.names.target.display())));
    }
    Ok(())
}

fn options_of(args: &ConvertArgs, format: Format) -> Result<NewImageOptions, Failure> {
    let options = parse_options(&args.new.options, format)?;
    if options.size.is_some() {
        let what = "-o size: a copy is as long as its source; `mica resize` changes that";
        return Err(Failure::new(what));
    }
    Ok(options)
}

fn convert_to_raw(
    args: &ConvertArgs,
    executor: &Executor,
    source: Arc<dyn Disk>,
    sources: &Sources,
    (sparse, progress): (u64, &Progress),
) -> Result<(), Failure> {
    if args.new.compress {
        return Err(Failure::new("Compression not supported for this file format"));
    }
    if args.backing.is_some() || args.backing_format.is_some() {
        return Err(Failure::new("Backing file not supported for file format 'raw'"));
    }
    let options = options_of(args, Format::Raw)?;
    let preallocation = options.wish.preallocation.unwrap_or_default();
    let size = source.geometry().len;
    let file = executor.block_on(async {
        let existing = Existing::unless_forced(args.new.force);
        let options = args.target_options()?;
        let file = NewFile::create_with(&args.names.target, existing, sources, options).await?;
        // A fully preallocated image gets its zeros with the data.
        let first = match preallocation {
            Preallocation::Full => Preallocation::Off,
            other => other,
        };
        fill_raw(&**file.store(), size, first).await?;
        Ok::<_, Failure>(file)
    })?;
    let unit = raw_unit(sparse);
    let rules = ContentRules {
        cluster_bytes: unit,
        subcluster_bytes: unit,
        keep_zeros: sparse == 0 || preallocation == Preallocation::Full,
        reserve_zeros: false,
        compress: None,
    };
    let target = Target::Raw(Arc::clone(file.store()));
    let (coroutines, backend) = (args.new.coroutines, args.images.backend());
    let rate = args.rate()?;
    let job = Job { source, backing: None, target, rules, coroutines, backend, rate };
    engine::copy(&job, progress)?;
    executor.block_on(file.store().sync())?;
    file.named()?.keep();
    Ok(())
}

fn convert_to_qcow2(
    args: &ConvertArgs,
    executor: &Executor,
    (source, source_is_encrypted, bitmaps): (Arc<dyn Disk>, bool, Vec<BitmapEntry>),
    mut sources: Sources,
    (sparse, progress): (u64, &Progress),
) -> Result<(), Failure> {
    let NewImageOptions { wish, encrypt, .. } = qcow2_options(args)?;
    let plan = qcow2_plan(args, &wish, source.geometry().len)?;
    let backing = executor.block_on(open_base(args, &plan, &mut sources))?;
    let base_is_encrypted = backing.as_deref().is_some_and(is_any_encrypted);
    let place = (&*args.names.target, base_is_encrypted);
    let plan = encrypt.apply(plan, place, &args.images)?;
    check_encrypted(args, &plan, &bitmaps)?;
    if plan.encryption().is_none() && (base_is_encrypted || source_is_encrypted) {
        warn_of_plain(&args.names.target);
    }
    let keep_zeros = sparse == 0 || plan.preallocation == Preallocation::Full;
    let rules = ContentRules {
        cluster_bytes: 1 << plan.l2.cluster_bits.bits(),
        subcluster_bytes: 1 << plan.l2.subcluster_bits(),
        keep_zeros,
        reserve_zeros: plan.preallocation != Preallocation::Off,
        compress: args.new.compress.then_some(plan.compression),
    };
    let falloc = plan.preallocation == Preallocation::Falloc;
    let device = Device::of(&args.names.target)?;
    let (image, data) = executor.block_on(async {
        let options = args.target_options()?;
        let source = (!args.new.compress).then_some((&*source, keep_zeros));
        let place = (device.as_ref(), &sources, options.clone());
        let image = new_image(args, &plan, (source, &bitmaps), place).await?;
        // The image itself is there by now, and what it replaces is still.
        sources.add_file(image.place());
        sources.add_file(image.path());
        let existing = Existing::unless_forced(args.new.force);
        let data = new_data_file(&image, &plan, existing, &sources, options).await?;
        Ok::<_, Failure>((image, data))
    })?;
    let data_store = data.as_ref().map(|data| Arc::clone(data.store()));
    let target = Target::Qcow2 {
        image: Arc::clone(image.store()),
        data: data_store.clone(),
        writer: Box::new(Mutex::new(ImageWriter::new(plan)?)),
    };
    let (coroutines, backend) = (args.new.coroutines, args.images.backend());
    let backing = backing.map(|backing| backing as Arc<dyn Disk>);
    let rate = args.rate()?;
    let job = Job { source, backing, target, rules, coroutines, backend, rate };
    engine::copy(&job, progress)?;
    let Target::Qcow2 { writer, .. } = job.target else { unreachable!("it was created above") };
    let writer = writer.into_inner();
    let stores = Stores { image: &**image.store(), data: data_store.as_deref() };
    let ended = executor.block_on(async {
        finish(writer, stores).await?;
        // A device has its space.
        if falloc && (device.is_none() || data_store.is_some()) {
            allocate_all(data_store.as_deref().unwrap_or(stores.image)).await?;
        }
        bitmaps::copy(args, bitmaps, Some(&image)).await
    });
    if let Err(failure) = ended {
        return Err(executor.block_on(image.given_up(failure)));
    }
    let base = named_base(args, &wish);
    executor.block_on(keep_new(image, data, base.as_ref()))?;
    warn_if_refused(&args.names.target, &wish, &args.images)
}

/// The base that the new image names, if it names any.
fn named_base(args: &ConvertArgs, wish: &ImageWish) -> Option<NamedBase> {
    let path = beside(&args.names.target, Path::new(wish.backing_name.as_deref()?));
    Some(NamedBase { path, may_be_missing: false })
}

/// The file of the new image, or the `device` that becomes one. How much that needs is known of
/// `source` alone, all of which is data if its zeros are kept: how much of it a base has, and what
/// compression saves, is seen in the end. It gets `bitmaps`, too.
async fn new_image(
    args: &ConvertArgs,
    plan: &ImagePlan,
    (source, bitmaps): (Option<(&dyn Disk, bool)>, &[BitmapEntry]),
    (device, sources, options): (Option<&Device>, &Sources, ImageOptions),
) -> Result<NewFile, Failure> {
    let target = &*args.names.target;
    let Some(device) = device else {
        let existing = Existing::unless_forced(args.new.force);
        return NewFile::create_with(target, existing, sources, options).await;
    };
    let data = match source.filter(|_| plan.backing.is_none()) {
        Some((source, true)) => Some(source.geometry().len),
        Some((source, false)) => Some(data_bytes(source, plan.l2.cluster_bits).await?),
        None => None,
    };
    let most = device.room_for(plan, data, bitmaps)?;
    NewFile::on_device(device, sources, options, most).await
}

fn qcow2_options(args: &ConvertArgs) -> Result<NewImageOptions, Failure> {
    let mut options = options_of(args, Format::Qcow2)?;
    let wish = &mut options.wish;
    if let Some(backing) = &args.backing {
        wish.backing_name = Some(backing.clone());
    }
    if let Some(format) = &args.backing_format {
        wish.backing_format = Some(format.clone());
    }
    plain_names(&args.names.target, wish);
    Ok(options)
}

/// What becomes of a disk of this `size`.
fn qcow2_plan(args: &ConvertArgs, wish: &ImageWish, size: u64) -> Result<ImagePlan, Failure> {
    let plan = wish.plan(size)?;
    if args.new.compress && plan.l2.data_file {
        return Err(Failure::new(
            "Compressed clusters are not possible with an external data file",
        ));
    }
    if args.new.compress && plan.preallocation != Preallocation::Off {
        return Err(Failure::new("Compression and preallocation not supported at the same time"));
    }
    if plan.backing.is_some() && plan.preallocation != Preallocation::Off {
        return Err(Failure::new("-B copies only differences: there is nothing to preallocate"));
    }
    Ok(plan)
}

/// What is known only of a `plan` that says whether the image is encrypted.
fn check_encrypted(
    args: &ConvertArgs,
    plan: &ImagePlan,
    bitmaps: &[BitmapEntry],
) -> Result<(), Failure> {
    if args.new.compress && plan.encryption().is_some() {
        return Err(Failure::new("Compression and encryption not supported at the same time"));
    }
    bitmaps::check_plan(plan, bitmaps)
}

/// Opens the backing file of the new image, if it has one: what is the same there is not copied.
async fn open_base(
    args: &ConvertArgs,
    plan: &ImagePlan,
    sources: &mut Sources,
) -> Result<Option<Arc<dyn Manage>>, Failure> {
    let Some(backing) = &plan.backing else { return Ok(None) };
    refuse_protocol(&backing.name)?;
    let path = beside(&args.names.target, Path::new(&backing.name));
    let opened =
        open_backing(&path, backing.format.as_deref(), IndexUse::Read, &args.images).await?;
    sources.add(&path, &*opened);
    Ok(Some(opened))
}

async fn allocate_all(store: &dyn Store) -> Result<(), Failure> {
    let len = store.len()?;
    store.space(Space::Allocate, HostOffset::ZERO, len).await?;
    Ok(store.sync().await?)
}

/// The unit in which zeros are left out of something that has no clusters.
fn raw_unit(sparse: u64) -> usize {
    let unit = usize::try_from(sparse.clamp(SECTOR_BYTES, 1 << 20).next_power_of_two());
    unit.expect("at most a mebibyte")
}
