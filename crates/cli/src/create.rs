//! `mica create`: creates an image, with qemu-img's options.

mod begin;
mod device;
mod encryption;
mod names;
mod new_file;
mod new_name;
pub(crate) mod options;
mod replaced;
mod second_name;
mod sources;
mod spoiled;

pub(crate) use begin::Existing;
pub(crate) use device::{Device, claim, is_block_device};
pub(crate) use encryption::{EncryptOptions, warn_of_plain};
pub(crate) use names::{
    plain_backing, plain_names, refuse_protocol, warn_if_refused, warn_of_names,
};
pub(crate) use new_file::{NewFile, open_writable, options_of};
pub(crate) use options::{NewImageOptions, help as options_help, parse as parse_options};
pub(crate) use sources::Sources;

use crate::failure::Failure;
use crate::images::{ImageArgs, size_of};
use crate::output::{OutputFormat, ReportArgs, print, print_json};
use crate::plain::plain;
use clap::Args;
use mica_block::{Manage, Space, Store};
use mica_qcow2::IndexUse;
use mica_qcow2_format::{Compression, Version};
use mica_qcow2_tools::create::{ImagePlan, Preallocation, Stores};
use mica_stack::{
    ExpectedOverlays, Format, ImageOptions, announce_overlays, expect_overlays, note_overlay,
};
use mica_units::{HostOffset, SECTOR_BYTES};
use second_name::SecondName;
use serde_json::{Map, Value};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Create an image.
///
/// An overlay (-b) gets subclusters of 4 KiB unless -o says otherwise (extended_l2=on,
/// cluster_size=128k), so that small writes copy nothing. Some readers do not support them: QEMU
/// before 5.2, cloud-hypervisor, imago and libkrun, qcow2-rs, crosvm. For those, and with
/// compat=0.10, use -o extended_l2=off.
#[derive(Args)]
pub(crate) struct CreateArgs {
    /// The image's backing file.
    ///
    /// Relative names start from the directory of the image.
    #[arg(short = 'b', long, value_name = "BASE")]
    pub(crate) backing: Option<OsString>,
    /// Format of the backing file: qcow2, raw or luks.
    #[arg(short = 'F', long, value_name = "FMT")]
    pub(crate) backing_format: Option<String>,
    /// Do not open the backing file; SIZE is required.
    #[arg(short = 'u', long, alias = "backing-unsafe")]
    pub(crate) unsafe_backing: bool,
    /// Options of the format, see -o help.
    ///
    /// Can be repeated.
    #[arg(short = 'o', long, value_name = "KEY=VALUE,...")]
    pub(crate) options: Vec<String>,
    /// Overwrite an existing file.
    ///
    /// Or a block device, with -f qcow2. The old file stays until the new one is complete, which
    /// gets its mode, owner and attributes: there must be room for both. One that cannot be
    /// replaced (it has a second hard link, or its folder cannot be written) is overwritten, with
    /// a warning.
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) report: ReportArgs,
    #[command(flatten)]
    pub(crate) images: ImageArgs,
    /// The image to create.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Length of its disk; by default that of the backing file.
    #[arg(value_name = "SIZE")]
    pub(crate) size: Option<String>,
}

pub(crate) fn run(args: &CreateArgs) -> Result<ExitCode, Failure> {
    let executor = args.images.executor()?;
    let format = args.images.format();
    let mut options = parse_options(&args.options, format)?;
    if let Some(backing) = &args.backing {
        options.wish.backing_name = Some(backing.clone());
    }
    if let Some(format) = &args.backing_format {
        options.wish.backing_format = Some(format.clone());
    }
    if args.unsafe_backing && options.wish.backing_name.is_none() {
        return Err(Failure::new("-u: there is no backing file; -b names one"));
    }
    if let Some(size) = &args.size {
        let size = size_of("SIZE", size)?;
        if options.size.is_some_and(|other| other != size) {
            return Err(Failure::new("SIZE and -o size= differ: leave one of them out"));
        }
        options.size = Some(size);
    }
    executor.block_on(async {
        match format {
            Format::Qcow2 => create_qcow2(args, options).await?,
            Format::Raw => create_raw(args, options).await?,
            Format::Luks => return Err(no_new_luks()),
            Format::Null => return Err(Failure::new("the null format cannot be created")),
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// The error: LUKS images are not created.
pub(crate) fn no_new_luks() -> Failure {
    Failure::new(
        "mica reads and writes luks images but does not create them: `qemu-img create -f luks` \
         does, and `mica create -o encrypt.format=luks` makes a qcow2 image that is encrypted the \
         same way",
    )
}

async fn create_qcow2(args: &CreateArgs, mut options: NewImageOptions) -> Result<(), Failure> {
    let named = |failure: Failure| failure.within(args.file.display());
    plain_names(&args.file, &mut options.wish);
    // Contradictory options are reported before any file is opened.
    options.wish.plan(0).map_err(Failure::from).map_err(named)?;
    let mut base_is_encrypted = false;
    let mut sources = Sources::default();
    if let Some(backing) = &options.wish.backing_name {
        let path = beside(&args.file, Path::new(backing));
        if args.unsafe_backing {
            backing_format(options.wish.backing_format.as_deref()).map_err(named)?;
            sources.add_file(&path);
        } else {
            refuse_protocol(backing).map_err(named)?;
            let format = options.wish.backing_format.as_deref();
            let opened = open_backing(&path, format, IndexUse::Ignore, &args.images).await;
            let opened = opened.map_err(|failure| failure.within("the backing file"))?;
            sources.add(&path, &*opened);
            base_is_encrypted = is_any_encrypted(&*opened);
            options.size.get_or_insert(opened.geometry().len);
        }
    }
    let size = options.size.ok_or_else(|| {
        Failure::new("Image creation needs a size parameter: give SIZE, or a backing file")
    })?;
    let plan = options.wish.plan(size).map_err(Failure::from).map_err(named)?;
    let place = (&*args.file, base_is_encrypted);
    let mut plan = options.encrypt.apply(plan, place, &args.images)?;
    if base_is_encrypted && plan.encryption().is_none() {
        warn_of_plain(&args.file);
    }
    let fields = describe_qcow2(&args.file, &plan);
    let images = options_of(&args.images)?;
    let device = Device::of(&args.file)?;
    let existing = Existing::unless_forced(args.force);
    let image = match &device {
        None => NewFile::create(&args.file, existing, &sources, &args.images).await?,
        Some(_) if !args.force => {
            let what = "is a block device: --force overwrites what it holds";
            return Err(Failure::new(format!("{} {what}", args.file.display())));
        }
        Some(device) => {
            let most = device.room_for(&plan, None, &[])?;
            NewFile::on_device(device, &sources, images.clone(), most).await?
        }
    };
    if device.is_some() && plan.preallocation == Preallocation::Falloc && plan.data_file.is_none() {
        // It has its space, which reads as zeros now.
        plan.preallocation = Preallocation::Metadata;
    }
    // The image itself is there by now, and what it replaces is still.
    sources.add_file(image.place());
    sources.add_file(image.path());
    let data = new_data_file(&image, &plan, existing, &sources, images).await?;
    let stores =
        Stores { image: &**image.store(), data: data.as_ref().map(|data| &**data.store()) };
    if let Err(error) = mica_qcow2_tools::create::create(plan, stores).await {
        return Err(image.given_up(error.into()).await);
    }
    let base = options.wish.backing_name.as_deref().map(|name| NamedBase {
        path: beside(&args.file, Path::new(name)),
        may_be_missing: args.unsafe_backing,
    });
    keep_new(image, data, base.as_ref()).await?;
    warn_if_refused(&args.file, &options.wish, &args.images)?;
    report(args, fields)
}

/// What a new image stands on.
pub(crate) struct NamedBase {
    pub(crate) path: PathBuf,
    /// Whether it need not be there, nor be free for a new image.
    pub(crate) may_be_missing: bool,
}

/// Keeps a new image, which is complete, and its data file, if it has one, as [`keep_all`] does. A
/// device is no image if that fails.
pub(crate) async fn keep_new(
    image: NewFile,
    data: Option<NewFile>,
    base: Option<&NamedBase>,
) -> Result<(), Failure> {
    let device = image.device();
    match (keep_new_file(image, data, base).await, device) {
        (Err(failure), Some(device)) => Err(device.given_up(failure).await),
        (kept, _) => kept,
    }
}

async fn keep_new_file(
    image: NewFile,
    data: Option<NewFile>,
    base: Option<&NamedBase>,
) -> Result<(), Failure> {
    let Some(data) = data else { return keep_all(vec![image], base) };
    if data.is_made_aside()
        && image.takes_data_of_old(data.path()).await
        && let Some(second) = SecondName::give(&image, &data).await?
    {
        return keep_by_second_name((image, data), second, base).await;
    }
    // Whoever is killed between the two leaves no image that shows what is another one's.
    let spoiled = image.spoil_old(data.path()).await?;
    let (place, path) = (data.path().to_owned(), image.path().to_owned());
    let before = node_at(&place);
    let Err(failure) = keep_together(vec![image], Some(data), base) else { return Ok(()) };
    let Some(spoiled) = spoiled else { return Err(failure) };
    if node_at(&place) != before {
        // The file system could not keep what the old image is about.
        let (path, place) = (path.display(), place.display());
        return Err(
            failure.and(format!("{path} has lost its data file, {place}, and opens no more"))
        );
    }
    spoiled.mend().await;
    Err(failure)
}

/// As [`keep_new_file`], for an image that names its data file by its `second` name until both have
/// their places.
async fn keep_by_second_name(
    (image, data): (NewFile, NewFile),
    second: SecondName,
    base: Option<&NamedBase>,
) -> Result<(), Failure> {
    let (mut images, mut data) = (vec![image], data);
    let unnamed = match name_noted(&mut images, (First::Image, Some(&mut data)), base) {
        Ok(()) => match second.restore().await {
            Ok(()) => {
                drop(second);
                images.into_iter().chain([data]).for_each(NewFile::keep);
                return Ok(());
            }
            Err(error) => Unnamed { failure: error.into(), expected: None },
        },
        Err(unnamed) => unnamed,
    };
    let Unnamed { mut failure, expected } = unnamed;
    if data.stays() {
        // The old image would show what is in the new data file.
        second.stay();
        images.into_iter().chain([data]).for_each(NewFile::keep);
        return Err(failure);
    }
    let stays = images.iter().any(NewFile::stays);
    if stays {
        let second = second.path().display();
        failure = failure.and(format!("its data file is {second}"));
    }
    // As long as the new image has the name its data file is there.
    drop(data);
    drop(images);
    match stays {
        true => second.stay(),
        false => drop(second),
    }
    expected.into_iter().for_each(ExpectedOverlays::forget);
    Err(failure)
}

/// Which file has a name, if one has.
fn node_at(path: &Path) -> Option<(u64, u64)> {
    path.metadata().ok().map(|file| (file.dev(), file.ino()))
}

/// Keeps new images, which are complete: they get their names. Whoever merges the `base` finds each
/// as soon as it has its.
pub(crate) fn keep_all(images: Vec<NewFile>, base: Option<&NamedBase>) -> Result<(), Failure> {
    keep_together(images, None, base)
}

/// As [`keep_all`], for images, one of which may have this `data` file, which gets its name first.
fn keep_together(
    mut images: Vec<NewFile>,
    mut data: Option<NewFile>,
    base: Option<&NamedBase>,
) -> Result<(), Failure> {
    match name_noted(&mut images, (First::Data, data.as_mut()), base) {
        Ok(()) => {
            images.into_iter().chain(data).for_each(NewFile::keep);
            Ok(())
        }
        Err(Unnamed { failure, expected }) => {
            drop((images, data));
            expected.into_iter().for_each(ExpectedOverlays::forget);
            Err(failure)
        }
    }
}

/// Why files did not all get their names, and what was noted of them.
struct Unnamed {
    failure: Failure,
    expected: Option<ExpectedOverlays>,
}

/// Which file of an image gets its name first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum First {
    Image,
    Data,
}

/// Gives the images, and the data file that one of them may have, their names, and notes the images
/// beside the `base`.
fn name_noted(
    images: &mut [NewFile],
    (first, mut data): (First, Option<&mut NewFile>),
    base: Option<&NamedBase>,
) -> Result<(), Unnamed> {
    let paths: Vec<_> = images.iter().map(|image| image.path().to_owned()).collect();
    let paths: Vec<_> = paths.iter().map(PathBuf::as_path).collect();
    let base = base.filter(|base| !base.may_be_missing || base.path.exists());
    let expected = base.map(|base| expect_overlays(&base.path, &paths));
    let named = name_all(images, (first, data.as_deref_mut())).and_then(|()| match base {
        Some(base) if base.may_be_missing => {
            for path in &paths {
                note_overlay(&base.path, path);
            }
            Ok(())
        }
        Some(base) => Ok(announce_overlays(&base.path, &paths)?),
        None => Ok(()),
    });
    named.map_err(|failure| {
        let files = images.iter().chain(data.as_deref());
        let failure = files.fold(failure, |failure, file| file.say_if_it_stays(failure));
        Unnamed { failure, expected }
    })
}

/// Gives the images and the `data` file their names, all durably.
fn name_all(
    images: &mut [NewFile],
    (first, data): (First, Option<&mut NewFile>),
) -> Result<(), Failure> {
    let name_data = || match data {
        Some(data) => data.name().and_then(|()| data.sync_name()),
        None => Ok(()),
    };
    match first {
        First::Data => name_data().and_then(|()| name_images(images)),
        First::Image => name_images(images).and_then(|()| name_data()),
    }
}

fn name_images(images: &mut [NewFile]) -> Result<(), Failure> {
    images.iter_mut().try_for_each(NewFile::name)?;
    let mut synced = None;
    for image in images {
        // Many are in one folder.
        let folder = image.path().parent().map(Path::to_owned);
        if synced.as_ref() != Some(&folder) {
            image.sync_name()?;
        }
        synced = Some(folder);
    }
    Ok(())
}

/// Whether any layer of a disk is encrypted.
pub(crate) fn is_any_encrypted(disk: &dyn Manage) -> bool {
    (0..disk.layer_count()).any(|position| disk.is_encrypted(position))
}

/// Creates the external data file of a new `image`, if the plan has one.
pub(crate) async fn new_data_file(
    image: &NewFile,
    plan: &ImagePlan,
    existing: Existing,
    sources: &Sources,
    images: ImageOptions,
) -> Result<Option<NewFile>, Failure> {
    match &plan.data_file {
        None => Ok(None),
        Some(data) => {
            let path = beside(image.path(), Path::new(&data.name));
            let made = NewFile::create_data(&path, (existing, image), sources, images).await;
            Ok(Some(made?))
        }
    }
}

/// The path of the file that the image at `file` calls `name`.
pub(crate) fn beside(file: &Path, name: &Path) -> PathBuf {
    file.parent().unwrap_or(Path::new("")).join(name)
}

/// Opens a new image's backing file, which must be readable as `format`.
pub(crate) async fn open_backing(
    path: &Path,
    format: Option<&str>,
    index: IndexUse,
    images: &ImageArgs,
) -> Result<Arc<dyn Manage>, Failure> {
    let format = backing_format(format)?;
    images.with_format(Some(format)).open(path, index).await
}

/// The stated format of a backing file, if a chain can have it there.
fn backing_format(stated: Option<&str>) -> Result<Format, Failure> {
    match stated.unwrap_or_default().parse()? {
        Format::Null => {
            let what = "the null format is no backing file's: it is qcow2, raw or luks";
            Err(Failure::new(format!("-F null: {what}")))
        }
        format => Ok(format),
    }
}

async fn create_raw(args: &CreateArgs, options: NewImageOptions) -> Result<(), Failure> {
    if args.backing.is_some() || args.backing_format.is_some() {
        return Err(Failure::new("Backing file not supported for file format 'raw'"));
    }
    let size = options.size.ok_or_else(|| Failure::new("Image creation needs a size parameter"))?;
    let size = raw_len(size)?;
    let preallocation = options.wish.preallocation.unwrap_or_default();
    let sources = Sources::default();
    let existing = Existing::unless_forced(args.force);
    let file = NewFile::create(&args.file, existing, &sources, &args.images).await?;
    let filled = fill_raw(&**file.store(), size, preallocation).await;
    filled.map_err(|failure| failure.within(args.file.display()))?;
    file.store().sync().await?;
    file.named()?.keep();
    let mut fields = Map::new();
    fields.insert("filename".into(), args.file.display().to_string().into());
    fields.insert("format".into(), "raw".into());
    fields.insert("virtual-size".into(), size.into());
    fields.insert("preallocation".into(), preallocation.name().into());
    report(args, fields)
}

/// Length of the longest raw image: the largest offset in a file, in whole sectors.
const RAW_BYTES_MAX: u64 = i64::MAX as u64 / SECTOR_BYTES * SECTOR_BYTES;

/// The length of a raw image for a disk of `size` bytes, which is one of whole sectors.
pub(crate) fn raw_len(size: u64) -> Result<u64, Failure> {
    let len = size.checked_next_multiple_of(SECTOR_BYTES).filter(|len| *len <= RAW_BYTES_MAX);
    len.ok_or_else(|| {
        Failure::new(format!(
            "a length of {size} bytes: a raw image has at most {RAW_BYTES_MAX} bytes, 8 EiB less a \
             sector"
        ))
    })
}

/// Gives a raw file another length, which its file system may not have room for.
pub(crate) async fn set_raw_len(store: &dyn Store, len: u64) -> Result<(), Failure> {
    store.set_len(len).await.map_err(|error| explain_length(error, len))
}

/// Says of an error whether the file system, and not the format, has no files of `len` bytes.
fn explain_length(error: mica_block::Error, len: u64) -> Failure {
    let is_too_long = error.raw_os_error() == Some(rustix::io::Errno::FBIG.raw_os_error());
    let failure = Failure::from(error);
    if !is_too_long {
        return failure;
    }
    failure.and(format!("its file system has no files of {len} bytes: choose another one"))
}

/// Gives an empty raw file its length and preallocation.
pub(crate) async fn fill_raw(
    store: &dyn Store,
    size: u64,
    preallocation: Preallocation,
) -> Result<(), Failure> {
    let start = HostOffset::ZERO;
    match preallocation {
        Preallocation::Off | Preallocation::Metadata => {}
        Preallocation::Falloc => {
            let allocated = store.space(Space::Allocate, start, size).await;
            allocated.map_err(|error| explain_length(error, size))?;
        }
        Preallocation::Full => mica_qcow2_tools::create::write_zeros(store, start, size).await?,
    }
    set_raw_len(store, size).await
}

fn describe_qcow2(file: &Path, plan: &ImagePlan) -> Map<String, Value> {
    let mut fields = Map::new();
    let mut set = |name: &str, value: Value| {
        fields.insert(name.to_owned(), value);
    };
    set("filename", file.display().to_string().into());
    set("format", "qcow2".into());
    set("virtual-size", plan.size.into());
    set("cluster-size", plan.l2.cluster_bits.bytes().into());
    let is_v2 = plan.l2.version == Version::V2;
    set("compat", if is_v2 { "0.10" } else { "1.1" }.into());
    set("extended-l2", plan.l2.extended.into());
    let zlib = plan.compression == Compression::Deflate;
    set("compression-type", if zlib { "zlib" } else { "zstd" }.into());
    set("lazy-refcounts", plan.lazy_refcounts.into());
    set("refcount-bits", plan.refcount_width.bits().into());
    set("preallocation", plan.preallocation.name().into());
    if let Some(backing) = &plan.backing {
        set("backing-filename", backing.name.to_string_lossy().into());
        set("backing-filename-format", backing.format.clone().into());
    }
    if let Some(luks) = plan.encryption() {
        set("encrypt.format", "luks".into());
        let header = luks.header();
        let bits = header.cipher.aes_bits(header.key_bytes).unwrap_or_default();
        set("encrypt.cipher-alg", format!("aes-{bits}").into());
        set("encrypt.cipher-mode", header.cipher.name().into());
    }
    if let Some(data) = &plan.data_file {
        set("data-file", data.name.to_string_lossy().into());
        set("data-file-raw", data.raw.into());
    }
    fields
}

fn report(args: &CreateArgs, fields: Map<String, Value>) -> Result<(), Failure> {
    match args.report.format() {
        None => return Ok(()),
        Some(OutputFormat::Json) => return print_json(&fields),
        Some(OutputFormat::Human) => {}
    }
    let mut text = format!("Formatting '{}', fmt=", plain(&args.file.to_string_lossy()));
    for (name, value) in fields.iter().filter(|(name, _)| *name != "filename") {
        let value = match value {
            Value::String(text) => plain(text),
            Value::Bool(on) => if *on { "on" } else { "off" }.to_owned(),
            other => other.to_string(),
        };
        match name.as_str() {
            "format" => text.push_str(&value),
            "virtual-size" => text.push_str(&format!(" size={value}")),
            name => text.push_str(&format!(" {}={value}", name.replace('-', "_"))),
        }
    }
    print(&(text + "\n"))
}
