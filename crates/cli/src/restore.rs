//! `mica restore`: makes an image of a state that `mica backup` wrote.

mod header_last;

use crate::backup::folder_and_state;
use crate::convert::Progress;
use crate::create::{
    Existing, NewFile, NewImageOptions, Sources, fill_raw, is_block_device, no_new_luks,
    parse_options,
};
use crate::failure::Failure;
use crate::images::ImageArgs;
use crate::output::{ReportArgs, human_size};
use clap::Args;
use header_last::HeldStore;
use mica_backup::{Begin, StepReader, Stored, check_state, restore_state, restore_step};
use mica_block::{Error, ErrorKind, Images, Manage, OpenImage, OpenedImages};
use mica_daemon::IoSettings;
use mica_qcow2::{Chain, ChainOptions, IndexUse};
use mica_qcow2_tools::create::{ImagePlan, Preallocation, Stores, create};
use mica_stack::{FileImages, Format, ImageOptions, MayWrite};
use mica_store::Locking;
use serde_json::json;
use std::io::{BufReader, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Create an image from a state that `mica backup` wrote.
///
/// The newest state of the folder, or the one that is named, together with those that it is based
/// on. From a stream, its last state; the stream must begin with a whole state. Every piece is
/// checked against its checksum; the image appears only when all of it is correct.
#[derive(Args)]
pub(crate) struct RestoreArgs {
    /// Format of the image: qcow2 or raw.
    ///
    /// If a kill leaves part of the image where an empty file was, or an old one that could not be
    /// replaced, that is not a valid qcow2 image; of a raw one nothing tells that.
    #[arg(short = 'O', long, default_value = "qcow2", value_name = "FMT")]
    #[arg(hide_default_value = true)]
    output_format: String,
    /// Options of the image, see mica create -o help.
    ///
    /// Can be repeated.
    #[arg(short = 'o', value_name = "KEY=VALUE,...")]
    options: Vec<String>,
    /// The state, like DIR@STATE; for a stream, the last one to restore.
    #[arg(long = "to", value_name = "STATE")]
    state: Option<String>,
    /// Show progress on stderr.
    ///
    /// As `mica convert` does.
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
    #[command(flatten)]
    io: IoSettings,
    /// The folder, with @STATE for one state in it; - for standard input.
    #[arg(value_name = "DIR[@STATE]")]
    source: PathBuf,
    /// The image to create.
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// An image that is filled.
struct Target {
    disk: Arc<dyn Manage>,
    /// What completes an image that is filled under its own name.
    held: Option<Arc<HeldStore>>,
    // Has it locked: another process would take it for left.
    file: NewFile,
    progress: Progress,
}

pub(crate) fn run(args: &RestoreArgs) -> Result<ExitCode, Failure> {
    if let Some(state) = &args.state {
        check_state(state)?;
    }
    let images = ImageArgs::with_io(args.io.clone());
    let executor = images.executor()?;
    let begin = executor.block_on(async {
        if args.source.as_os_str() == "-" {
            let stdin = std::io::stdin();
            if stdin.is_terminal() {
                let what = "standard input is a terminal: name a DIR, or pipe `mica backup` in";
                return Err(Failure::new(what));
            }
            return from_stream(args, &images, BufReader::with_capacity(1 << 20, stdin.lock()))
                .await;
        }
        let (folder, state) = folder_and_state(&args.source)?;
        let state = match (state, &args.state) {
            (Some(one), Some(other)) if one != *other => {
                let what = format!("--to {other}: {one} is named already");
                return Err(Failure::new(what));
            }
            (Some(state), _) => state,
            (None, Some(state)) => state.clone(),
            (None, None) => newest(&folder.states()?.whole, &args.source)?,
        };
        from_folder(args, &images, folder.line(&state)?).await
    })?;
    let (file, format) = (args.file.display().to_string(), &args.output_format);
    let Begin { disk, state, len, .. } = &begin;
    let answer = json!({
        "filename": file,
        "format": format,
        "virtual-size": len,
        "disk": disk,
        "state": state,
    });
    let text = format!("{file}: {disk}@{state}, {}\n", human_size(*len));
    args.report.print(&text, &answer)?;
    Ok(ExitCode::SUCCESS)
}

fn newest(states: &[Stored], folder: &Path) -> Result<String, Failure> {
    let newest = states.last().map(|stored| stored.begin().state.clone());
    newest.ok_or_else(|| Failure::new(format!("there is no state in {}", folder.display())))
}

async fn from_folder(
    args: &RestoreArgs,
    images: &ImageArgs,
    line: Vec<Stored>,
) -> Result<Begin, Failure> {
    let last = line.last().expect("the state itself").begin().clone();
    let total = line.iter().map(|stored| stored.total().data_bytes).sum();
    let target = Target::make(args, images, last.len, total).await?;
    let mut done = 0;
    for stored in &line {
        let filled = restore_state(stored, &*target.disk, |_, bytes| {
            done += bytes;
            target.progress.at(done);
            target.progress.wrote(bytes);
        });
        if let Err(error) = filled.await {
            return Err(target.give_up(error).await);
        }
    }
    target.finish().await?;
    Ok(last)
}

async fn from_stream(
    args: &RestoreArgs,
    images: &ImageArgs,
    source: impl Read,
) -> Result<Begin, Failure> {
    let mut stream = StepReader::new(source);
    // A stream that is empty is none.
    let first = stream.begin()?.expect("the first step, or an error");
    if let Some(base) = &first.base {
        let what = format!(
            "the stream is what changed since {base:?}: put the stream of that before it (cat)"
        );
        return Err(Failure::new(what));
    }
    let target = Target::make(args, images, first.len, first.len).await?;
    match fill(args, &mut stream, first, &target).await {
        Ok(last) => {
            target.finish().await?;
            Ok(last)
        }
        Err(error) => Err(target.give_up(error).await),
    }
}

/// Writes the steps of a stream up to the one that is wanted.
async fn fill(
    args: &RestoreArgs,
    stream: &mut StepReader<impl Read>,
    first: Begin,
    target: &Target,
) -> mica_block::Result<Begin> {
    let mut last = first;
    loop {
        restore_step(stream, &*target.disk, |position, bytes| {
            target.progress.at(position);
            target.progress.wrote(bytes);
        })
        .await?;
        if args.state.as_ref() == Some(&last.state) {
            return Ok(last);
        }
        let Some(next) = stream.begin()? else { break };
        if next.base.as_ref() != Some(&last.state) || next.disk != last.disk {
            let what = format!(
                "the stream continues with {:?} of {:?}, which is not based on {:?} of {:?}",
                next.state, next.disk, last.state, last.disk
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if next.len < last.len {
            let what = format!("the disk is shorter at {:?} than before", next.state);
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        if next.len > last.len {
            target.disk.resize(next.len).await?;
        }
        last = next;
    }
    match &args.state {
        None => Ok(last),
        Some(state) => {
            let what = format!(
                "there is no state {state:?} in the stream, which ends with {:?}",
                last.state
            );
            Err(Error::new(ErrorKind::NotFound, what))
        }
    }
}

impl Target {
    /// A new image of `len` bytes, into which `total` bytes are written.
    async fn make(
        args: &RestoreArgs,
        images: &ImageArgs,
        len: u64,
        total: u64,
    ) -> Result<Self, Failure> {
        let format: Format = args.output_format.parse()?;
        if format == Format::Luks {
            return Err(no_new_luks());
        }
        if format == Format::Null || is_block_device(&args.file) {
            let what = format!("{}: restore into a file", args.file.display());
            return Err(Failure::new(what));
        }
        let NewImageOptions { wish, size, encrypt } = parse_options(&args.options, format)?;
        if encrypt.says_anything() {
            let what = "-o encrypt: what is restored is not encrypted; `mica convert` encrypts it";
            return Err(Failure::new(what));
        }
        let taken = [wish.backing_name.is_some(), wish.data_file.is_some(), size.is_some()];
        if taken.contains(&true) || wish.preallocation.is_some() {
            let what = "-o: the image has the size of the state, and no backing file";
            return Err(Failure::new(what));
        }
        let sources = Sources::default();
        let existing = Existing::unless_forced(args.force);
        let file = NewFile::create(&args.file, existing, &sources, images).await?;
        // The lock is our own.
        let options = crate::create::options_of(images)?;
        let options = ImageOptions { locking: Locking::Off, ..options };
        let chain = images.chain_options(IndexUse::Read)?;
        let is_in_place = file.place() == file.path();
        let (disk, held) = match format {
            Format::Qcow2 if is_in_place => {
                Self::fill_in_place(&file, wish.plan(len)?, options, chain).await?
            }
            _ => {
                match format {
                    Format::Raw => fill_raw(&**file.store(), len, Preallocation::Off).await?,
                    _ => {
                        let stores = Stores { image: &**file.store(), data: None };
                        create(wish.plan(len)?, stores).await?;
                    }
                }
                let disk = mica_stack::open_writable(file.place(), format, options, &chain).await?;
                (disk, None)
            }
        };
        let progress = Progress::start(total, args.report.progress(args.progress));
        Ok(Self { disk, held, file, progress })
    }

    /// Creates and opens an image in the file that has its name: it is one when it is complete.
    async fn fill_in_place(
        file: &NewFile,
        plan: ImagePlan,
        options: ImageOptions,
        chain: ChainOptions,
    ) -> Result<(Arc<dyn Manage>, Option<Arc<HeldStore>>), Failure> {
        let path = file.place();
        let images = FileImages::to_write(path, options, MayWrite::new_file())?;
        let image = images.open_writable(path)?;
        let held = Arc::new(HeldStore::over(image.store));
        let mut images = OpenedImages::new(Arc::new(images));
        images.add(path, OpenImage { store: Arc::clone(&held) as _, ..image });
        create(plan, Stores { image: &*held, data: None }).await?;
        let chain = ChainOptions { writable: true, ..chain };
        let disk = Chain::open(Arc::new(images), path, &chain).await?;
        Ok((Arc::new(disk), Some(held)))
    }

    async fn finish(self) -> Result<(), Failure> {
        self.disk.flush().await?;
        self.disk.close().await?;
        if let Some(held) = &self.held {
            held.complete()
                .await
                .map_err(|error| error.wrap(self.file.path().display().to_string()))?;
        }
        self.file.named()?.keep();
        self.progress.finish();
        Ok(())
    }

    async fn give_up(self, error: Error) -> Failure {
        // The first failure is reported, and the file is removed.
        let _ = self.disk.close().await;
        error.into()
    }
}
