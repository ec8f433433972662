//! `mica diff`: which parts of two states of chains differ.

use crate::cursor::Cursor;
use crate::failure::{Failure, tell};
use crate::images::ImageArgs;
use crate::output::{OutputArgs, OutputFormat, human_size, print, print_json};
use crate::plain::plain;
use clap::Args;
use mica_block::{Disk, Extent, Manage, read_whole, wait_for_dead, windows};
use mica_qcow2::snapshots::SnapshotSelector;
use mica_qcow2::{ChainDiff, DiffFormat, DiffState, IndexUse};
use mica_stack::{FileImages, Format};
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};
use serde_json::json;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Bytes that are compared at a time.
const PIECE_BYTES: u64 = 2 << 20;
/// Text that is gathered before it is printed.
const PRINT_BYTES: usize = 64 << 10;

/// Show which parts of two states of chains may differ.
///
/// These are the parts owned by layers that only one of the two has. No data is read, and if these
/// layers are indexed, only the index is. Bytes that were overwritten with the same content are
/// reported too, unless --content is given. If the two have no layer in common, everything that
/// either of them has is reported.
#[derive(Args)]
pub(crate) struct DiffArgs {
    /// Format of the second image.
    #[arg(short = 'F', long, default_value_t, value_name = "FMT")]
    #[arg(hide_default_value = true)]
    second_format: Format,
    /// Show only how much differs, and which layers only one of them has.
    #[arg(short = 's', long)]
    summary: bool,
    /// Read these parts, and show only those whose content differs.
    #[arg(short = 'c', long)]
    content: bool,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    images: ImageArgs,
    /// An image, or with @NAME one of its internal snapshots.
    ///
    /// By ID or name; snapshot.id=ID and snapshot.name=NAME say which of the two it is.
    #[arg(value_name = "IMAGE[@NAME]")]
    first: PathBuf,
    /// Another one.
    #[arg(value_name = "IMAGE[@NAME]")]
    second: PathBuf,
}

/// An image as it was named.
struct Subject {
    path: PathBuf,
    snapshot: Option<SnapshotSelector>,
    args: ImageArgs,
    format: Format,
}

pub(crate) fn run(args: &DiffArgs) -> Result<ExitCode, Failure> {
    let second = args.images.with_format(Some(args.second_format));
    let first = Subject::new(&args.first, args.images.clone())?;
    let second = Subject::new(&args.second, second)?;
    args.images.executor()?.block_on(async {
        let images = [first.files()?, second.files()?];
        let states = [first.state(&images[0]), second.state(&images[1])];
        let diff = wait_for_dead(async || ChainDiff::open(states[0], states[1]).await).await?;
        let mut printer = Printer::new(args);
        printer.begin()?;
        match (diff.are_related(), args.content) {
            (true, false) => by_layers(diff, &mut printer).await?,
            (true, true) => {
                let disks = [first.open().await?, second.open().await?];
                let mut gather = Pieces::new(disks, &mut printer);
                by_layers(diff, &mut gather).await?;
            }
            (false, _) => {
                printer.summary.apart(&diff);
                let disks = [first.open().await?, second.open().await?];
                match args.content {
                    true => {
                        by_allocation(&disks, &mut Pieces::new(disks.clone(), &mut printer)).await?
                    }
                    false => {
                        let what = "they have no layer in common: everything that either has is \
                                    shown; --content compares it";
                        tell(&format!("mica: warning: {what}"));
                        by_allocation(&disks, &mut printer).await?;
                    }
                }
            }
        }
        printer.end()?;
        Ok(ExitCode::SUCCESS)
    })
}

impl Subject {
    /// What `named` means: a file of that name, or else a snapshot of one.
    fn new(named: &Path, args: ImageArgs) -> Result<Self, Failure> {
        let format = args.format();
        let text = named.to_string_lossy();
        let (path, snapshot) = match text.rsplit_once('@') {
            Some((path, name)) if !named.exists() && !path.is_empty() && !name.is_empty() => {
                (PathBuf::from(path), Some(name.parse()?))
            }
            _ => (named.to_owned(), None),
        };
        if format == Format::Null || snapshot.is_some() && format != Format::Qcow2 {
            return Err(Failure::new(format!("{text}: only images of files can be compared")));
        }
        Ok(Self { path, snapshot, args, format })
    }

    fn files(&self) -> Result<FileImages, Failure> {
        Ok(FileImages::new(&self.path, self.args.image_options()?)?)
    }

    fn state<'a>(&'a self, images: &'a FileImages) -> DiffState<'a> {
        let format = match self.format {
            Format::Raw => DiffFormat::Raw,
            Format::Luks => DiffFormat::Luks,
            _ => DiffFormat::Qcow2,
        };
        DiffState { images, path: &self.path, format, snapshot: self.snapshot.as_ref() }
    }

    async fn open(&self) -> Result<Arc<dyn Manage>, Failure> {
        let mut chain = self.args.chain_options(IndexUse::Read)?;
        chain.snapshot.clone_from(&self.snapshot);
        let images = self.args.image_options()?;
        Ok(mica_stack::open(&self.path, self.format, images, &chain).await?)
    }
}

/// Takes the ranges that differ, in order.
trait Take {
    async fn take(&mut self, range: GuestRange) -> Result<(), Failure>;

    /// Is told what the two have in common.
    fn know(&mut self, diff: &ChainDiff);
}

async fn by_layers(mut diff: ChainDiff, to: &mut impl Take) -> Result<(), Failure> {
    to.know(&diff);
    while let Some(ranges) = diff.next().await? {
        for range in ranges {
            to.take(range).await?;
        }
    }
    Ok(())
}

/// What is not zeros in either of them.
async fn by_allocation(disks: &[Arc<dyn Manage>; 2], to: &mut impl Take) -> Result<(), Failure> {
    let mut disks: [Arc<dyn Disk>; 2] = disks.clone().map(|disk| disk as Arc<dyn Disk>);
    disks.sort_by_key(|disk| std::cmp::Reverse(disk.geometry().len));
    let [long, short] = disks;
    let mut cursor = Cursor::new(long, Some(short), PIECE_BYTES, false);
    while let Some(piece) = cursor.next().await? {
        let mut data: Vec<GuestRange> = piece
            .first
            .iter()
            .chain(&piece.second)
            .filter(|extent| !extent.kind.reads_as_zero())
            .map(Extent::range)
            .collect();
        data.sort_by_key(|range| range.start());
        for range in data {
            to.take(range).await?;
        }
    }
    Ok(())
}

/// Reads the ranges, and hands on where the bytes differ.
struct Pieces<'a> {
    disks: [Arc<dyn Manage>; 2],
    printer: &'a mut Printer,
    /// Up to where it was compared: what either has may overlap.
    done: u64,
}

impl<'a> Pieces<'a> {
    fn new(disks: [Arc<dyn Manage>; 2], printer: &'a mut Printer) -> Self {
        Self { disks, printer, done: 0 }
    }

    async fn read(&self, disk: &dyn Manage, range: GuestRange) -> Result<Vec<u8>, Failure> {
        let len = usize::try_from(range.len()).expect("a piece");
        let end = GuestOffset::new(disk.geometry().len).min(range.end());
        let Some(there) = GuestRange::between(range.start(), end).filter(|it| !it.is_empty())
        else {
            return Ok(vec![0; len]);
        };
        let plan = match disk.plan(there, Vec::new()) {
            mica_block::Planned::Ready(plan) => plan?,
            mica_block::Planned::Pending(plan) => plan.await?,
        };
        let mut bytes = read_whole(disk, &plan).await?.to_vec();
        bytes.resize(len, 0);
        Ok(bytes)
    }
}

impl Take for Pieces<'_> {
    async fn take(&mut self, range: GuestRange) -> Result<(), Failure> {
        let start = range.start().max(GuestOffset::new(self.done));
        let Some(range) = GuestRange::between(start, range.end()) else { return Ok(()) };
        for piece in windows(range, PIECE_BYTES) {
            let one = self.read(&*self.disks[0], piece).await?;
            let other = self.read(&*self.disks[1], piece).await?;
            let sector = usize::try_from(SECTOR_BYTES).expect("512");
            let sectors = one.chunks(sector).zip(other.chunks(sector));
            for (number, _) in (0_u64..).zip(sectors).filter(|(_, (one, other))| one != other) {
                let at = piece.start().checked_add(number * SECTOR_BYTES);
                let at = at.unwrap_or(piece.end());
                let len = SECTOR_BYTES.min(piece.end().bytes() - at.bytes());
                self.printer.add(at.bytes(), len)?;
            }
        }
        self.done = range.end().bytes();
        Ok(())
    }

    fn know(&mut self, diff: &ChainDiff) {
        self.printer.know(diff);
    }
}

/// What is said in the end.
#[derive(Default)]
struct Summary {
    lens: [u64; 2],
    layers: [Vec<String>; 2],
    common: Option<String>,
    ranges: u64,
    bytes: u64,
}

impl Summary {
    fn apart(&mut self, diff: &ChainDiff) {
        let shown = |path: &Path| path.display().to_string();
        self.lens = diff.lens();
        self.layers = diff.own_layers().map(|own| own.into_iter().map(shown).collect());
        self.common = diff.common().map(shown);
    }
}

/// Joins ranges and prints them.
struct Printer {
    format: OutputFormat,
    names: [String; 2],
    is_summary: bool,
    pending: Option<(u64, u64)>,
    text: String,
    summary: Summary,
}

impl Take for Printer {
    async fn take(&mut self, range: GuestRange) -> Result<(), Failure> {
        self.add(range.start().bytes(), range.len())
    }

    fn know(&mut self, diff: &ChainDiff) {
        self.summary.apart(diff);
    }
}

impl Printer {
    fn new(args: &DiffArgs) -> Self {
        Self {
            format: args.output.output,
            names: [&args.first, &args.second].map(|path| path.display().to_string()),
            is_summary: args.summary,
            pending: None,
            text: String::new(),
            summary: Summary::default(),
        }
    }

    fn begin(&mut self) -> Result<(), Failure> {
        match (self.is_summary, self.format) {
            (true, _) => {}
            (false, OutputFormat::Human) => self.text.push_str("START             LENGTH\n"),
            (false, OutputFormat::Json) => self.text.push('['),
        }
        Ok(())
    }

    /// Adds a range that starts nowhere before the last one.
    fn add(&mut self, start: u64, len: u64) -> Result<(), Failure> {
        match &mut self.pending {
            Some((first, known)) if *first + *known >= start => {
                *known = (*known).max(start + len - *first);
                Ok(())
            }
            _ => self.flush(Some((start, len))),
        }
    }

    fn flush(&mut self, next: Option<(u64, u64)>) -> Result<(), Failure> {
        let Some((start, len)) = std::mem::replace(&mut self.pending, next) else { return Ok(()) };
        let is_first = self.summary.ranges == 0;
        self.summary.ranges += 1;
        self.summary.bytes += len;
        // Writing to a string does not fail.
        let _ = match (self.is_summary, self.format) {
            (true, _) => Ok(()),
            (false, OutputFormat::Human) => writeln!(self.text, "{start:<16}  {len}"),
            (false, OutputFormat::Json) => {
                let comma = if is_first { "\n" } else { ",\n" };
                write!(self.text, "{comma}    {{ \"start\": {start}, \"length\": {len} }}")
            }
        };
        if self.text.len() > PRINT_BYTES {
            print(&std::mem::take(&mut self.text))?;
        }
        Ok(())
    }

    fn end(mut self) -> Result<(), Failure> {
        self.flush(None)?;
        match (self.is_summary, self.format) {
            (false, OutputFormat::Human) => print(&self.text),
            (false, OutputFormat::Json) => {
                let end = if self.summary.ranges > 0 { "\n]\n" } else { "]\n" };
                print(&(self.text + end))
            }
            (true, OutputFormat::Json) => {
                let side = |at: usize| {
                    json!({
                        "filename": self.names[at],
                        "virtual-size": self.summary.lens[at],
                        "layers": self.summary.layers[at],
                    })
                };
                print_json(&json!({
                    "bytes": self.summary.bytes,
                    "ranges": self.summary.ranges,
                    "common": self.summary.common,
                    "first": side(0),
                    "second": side(1),
                }))
            }
            (true, OutputFormat::Human) => print(&self.said()),
        }
    }

    fn said(&self) -> String {
        let Summary { lens, layers, common, ranges, bytes } = &self.summary;
        let mut text = format!("{} in {ranges} ranges ({bytes} bytes)\n", human_size(*bytes));
        for at in [0, 1] {
            let (name, len) = (plain(&self.names[at]), human_size(lens[at]));
            let count = layers[at].len();
            // As above.
            let _ = writeln!(text, "{name}: {len}, {count} layers that the other does not have");
        }
        match common {
            Some(common) => text + &format!("in common: {} and all beneath\n", plain(common)),
            None => text + "nothing in common\n",
        }
    }
}
