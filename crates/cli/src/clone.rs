//! `mica clone`: overlays of a layer that nobody writes any more. Of that only the header is read,
//! however many layers are beneath.

use crate::create::{
    EncryptOptions, Existing, NamedBase, NewFile, NewImageOptions, Sources, keep_all,
    parse_options, warn_if_refused,
};
use crate::failure::Failure;
use crate::images::ImageArgs;
use crate::output::{OutputFormat, ReportArgs, print, print_json};
use crate::plain::plain;
use clap::Args;
use mica_block::{Images, wait_for_dead};
use mica_qcow2::read_header;
use mica_qcow2_format::Encryption;
use mica_qcow2_tools::create::{ImageWish, Stores, create};
use mica_stack::{FileImages, Format, base_name, forget_gone, is_frozen};
use mica_units::SECTOR_BYTES;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Most clones that are made at once.
const COUNT_MAX: u32 = 100_000;
/// As many are announced at once.
const TOGETHER: usize = 256;

/// Create an image that starts with the content of another and shares it.
///
/// The clone is a new overlay, created in milliseconds at any depth: only the header of BASE is
/// read. BASE must not be written any more, by anybody; if it is being written, this is refused.
/// The clone has subclusters unless -o says otherwise, as with `mica create -b`.
#[derive(Args)]
pub(crate) struct CloneArgs {
    /// Make this many clones: NEW-1, NEW-2, … before the extension.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(COUNT_MAX)))]
    count: Option<u32>,
    /// Options of the format, see mica create -o help.
    ///
    /// Can be repeated.
    #[arg(short = 'o', value_name = "KEY=VALUE,...")]
    options: Vec<String>,
    /// Treat missing images that were overlays of BASE as removed.
    ///
    /// Each clone in another folder is recorded beside BASE (BASE.mica-overlays). One that is
    /// missing may have been moved, so its entry stays until this option says that it was not.
    #[arg(long)]
    ignore_gone: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    images: ImageArgs,
    /// The image to share: qcow2, or raw with --format raw.
    #[arg(value_name = "BASE")]
    base: PathBuf,
    /// The image to create.
    #[arg(value_name = "NEW")]
    new: PathBuf,
}

pub(crate) fn run(args: &CloneArgs) -> Result<ExitCode, Failure> {
    let executor = args.images.executor()?;
    let format = args.images.format();
    if format == Format::Null {
        return Err(Failure::new("the null format is not an image"));
    }
    executor.block_on(async {
        let NewImageOptions { mut wish, size, encrypt } =
            parse_options(&args.options, Format::Qcow2)?;
        let taken = [wish.backing_name.is_some(), wish.data_file.is_some(), size.is_some()];
        if taken.contains(&true) || wish.preallocation.is_some() {
            let what = "-o: a clone takes backing file and size from its source, and has no data \
                        file";
            return Err(Failure::new(what));
        }
        let (len, base_is_encrypted) = base_facts(args, format).await?;
        if args.ignore_gone {
            forget_gone(&args.base)?;
        }
        wish.backing_format = Some(format.name().to_owned());
        let base = NamedBase { path: args.base.clone(), may_be_missing: false };
        let names = names(args);
        let mut made = 0;
        for some in names.chunks(TOGETHER) {
            let kept = async {
                let mut files = Vec::with_capacity(some.len());
                for name in some {
                    let wishes = (&mut wish, &encrypt, base_is_encrypted);
                    files.push(make(args, name, len, wishes).await?);
                }
                keep_all(files, Some(&base))
            };
            kept.await.map_err(|failure| after(&names[..made], failure))?;
            made += some.len();
        }
        if let Some(first) = names.first() {
            warn_if_refused(first, &wish, &args.images)?;
        }
        report(args, &names, len)?;
        Ok(ExitCode::SUCCESS)
    })
}

/// The length of the disk of the base, which nobody is writing, and whether it is encrypted.
async fn base_facts(args: &CloneArgs, format: Format) -> Result<(u64, bool), Failure> {
    let images = FileImages::new(&args.base, args.images.image_options()?)?;
    let image = wait_for_dead(async || images.open(&args.base)).await?;
    let named = |error: mica_block::Error| error.wrap(args.base.display().to_string());
    if format == Format::Raw {
        return Ok((image.store.len().map_err(named)?.next_multiple_of(SECTOR_BYTES), false));
    }
    if format == Format::Luks {
        let luks = mica_crypt::luks::read_header(&*image.store).await.map_err(named)?;
        let len = image.store.len().map_err(named)?.saturating_sub(luks.payload_offset());
        return Ok((len.next_multiple_of(SECTOR_BYTES), true));
    }
    let header = read_header(&*image.store).await.map_err(named)?;
    let is_in_use = header.incompatible.dirty || header.autoclear.unknown != 0;
    // Whoever was killed while it was frozen has left nothing that is missing from it.
    if is_in_use && !matches!(is_frozen(&args.base, args.images.image_options()?).await, Ok(true)) {
        let what = "was not closed by its writer: open it for writing once, or run `mica check -r \
                    all`, before it is cloned";
        return Err(Failure::new(format!("{} {what}", args.base.display())));
    }
    Ok((header.disk_bytes(), header.encryption != Encryption::None))
}

async fn make(
    args: &CloneArgs,
    new: &Path,
    len: u64,
    (wish, encrypt, base_is_encrypted): (&mut ImageWish, &EncryptOptions, bool),
) -> Result<NewFile, Failure> {
    wish.backing_name = Some(base_name(&args.base, new)?);
    let plan = wish.plan(len).map_err(|error| error.wrap(new.display().to_string()))?;
    let plan = encrypt.apply(plan, (new, base_is_encrypted), &args.images)?;
    let mut sources = Sources::default();
    sources.add_file(&args.base);
    let file = NewFile::create(new, Existing::Stays, &sources, &args.images).await?;
    create(plan, Stores { image: &**file.store(), data: None }).await?;
    Ok(file)
}

/// Why no more clones were made, and which there are.
fn after(made: &[PathBuf], failure: Failure) -> Failure {
    match (made.first(), made.last()) {
        (Some(first), Some(last)) => {
            let (first, last) = (first.display(), last.display());
            let what = format!("{}; the clones {first} to {last} are made", failure.message());
            Failure::new(what)
        }
        _ => failure,
    }
}

/// The names of the clones.
fn names(args: &CloneArgs) -> Vec<PathBuf> {
    let Some(count) = args.count else { return vec![args.new.clone()] };
    let stem = args.new.file_stem().unwrap_or_default();
    let numbered = |number: u32| {
        let mut name = stem.to_owned();
        name.push(format!("-{number}"));
        if let Some(ending) = args.new.extension() {
            name.push(".");
            name.push(ending);
        }
        args.new.with_file_name(name)
    };
    (1..=count).map(numbered).collect()
}

fn report(args: &CloneArgs, names: &[PathBuf], len: u64) -> Result<(), Failure> {
    let described = |name: &PathBuf| {
        json!({
            "filename": name.display().to_string(),
            "virtual-size": len,
            "backing-filename": args.base.display().to_string(),
        })
    };
    match args.report.format() {
        None => Ok(()),
        Some(OutputFormat::Json) => {
            let all: Vec<Value> = names.iter().map(described).collect();
            match (&*all, args.count) {
                ([one], None) => print_json(one),
                (all, _) => print_json(&all),
            }
        }
        Some(OutputFormat::Human) => {
            let shown = |path: &Path| plain(&path.to_string_lossy());
            let base = shown(&args.base);
            let lines = names.iter().map(|name| format!("{}: a clone of {base}\n", shown(name)));
            print(&lines.collect::<String>())
        }
    }
}
