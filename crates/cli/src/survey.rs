//! `mica survey`: what a fleet of images is like, after section 3 of "Virtual Disk Snapshot
//! Management at Scale", whose figures 4 to 9 it draws.

mod chart;
mod figures;
mod page;

use crate::failure::Failure;
use crate::folders::{FoldersArgs, tell_problems};
use crate::output::{OutputArgs, OutputFormat, human_size, print, print_json};
use crate::table::table;
use crate::tree::problems_json;
use crate::unfinished::Unfinished;
use clap::Args;
use figures::{Counts, Elapsed, Figures, Streaming, Suffering};
use mica_stack::forest::Forest;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs::{File, FileType, Metadata};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Show statistics of a fleet of images: sizes, chains, sharing.
///
/// Reads headers only, also of images that are in use. Each image that is not the backing file of
/// another counts as a chain. --html writes the figures of a published survey, drawn from these
/// images. When snapshots were taken is estimated from the timestamps of the files, which is right
/// as far as these were not copied.
#[derive(Args)]
pub(crate) struct SurveyArgs {
    /// Also write a page with the figures to this file, which is new, empty or an earlier page.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    folders: FoldersArgs,
}

pub(crate) fn run(args: &SurveyArgs) -> Result<ExitCode, Failure> {
    let forest = args.folders.scan()?;
    let figures = Figures::of(&forest);
    let shown = |one: &Suffering| args.folders.shown(forest.get(one.id).path());
    if let Some(file) = &args.html {
        let folders = args.folders.given().iter().map(|folder| folder.display().to_string());
        let folders = folders.collect::<Vec<_>>().join(", ");
        let page = page::page(&figures, &folders, suffering_rows(&figures, shown));
        write_page(file, &page)
            .map_err(|error| error.within(format!("writing {}", file.display())))?;
    }
    if args.output.output == OutputFormat::Json {
        print_json(&whole(&forest, &figures))?;
        return Ok(ExitCode::SUCCESS);
    }
    print(&text(&figures, suffering_rows(&figures, shown)))?;
    tell_problems(forest.problems());
    args.folders.tell_if_empty(&forest);
    Ok(ExitCode::SUCCESS)
}

/// Writes the `page` to `file`, in the place of another page at most.
fn write_page(file: &Path, page: &str) -> Result<(), Failure> {
    let found = match file.metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        found => Some(found?),
    };
    if found.as_ref().is_some_and(is_stdout) {
        return print(page);
    }
    let is_stream = |kind: FileType| kind.is_char_device() || kind.is_fifo();
    if found.as_ref().is_some_and(|found| is_stream(found.file_type())) {
        return Ok(std::fs::write(file, page)?);
    }
    // A link stays one.
    let path = if found.is_some() { file.canonicalize()? } else { file.to_owned() };
    if found.as_ref().is_some_and(|found| !is_replaceable(&path, found)) {
        return Err(Failure::new("it is there and is no page of a survey: name another file"));
    }
    let (unfinished, mut new) = Unfinished::create_beside(&path)?;
    if let Some(found) = &found {
        new.set_permissions(found.permissions())?;
    }
    new.write_all(page.as_bytes())?;
    new.sync_all()?;
    unfinished.finish(&path, found.map(|found| (found.dev(), found.ino())))
}

/// Whether what was `found` is where the text goes, whatever name it has.
fn is_stdout(found: &Metadata) -> bool {
    let stdout = rustix::fs::fstat(std::io::stdout());
    stdout.is_ok_and(|stdout| (stdout.st_dev, stdout.st_ino) == (found.dev(), found.ino()))
}

/// Whether the file at `path`, which was `found` there, is empty, or may be an earlier page.
fn is_replaceable(path: &Path, found: &Metadata) -> bool {
    let is_page = || {
        let mut start = [0; page::START.len()];
        let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
        read.is_ok() && start == *page::START.as_bytes()
    };
    found.is_file() && (found.len() == 0 || is_page())
}

fn whole(forest: &Forest, figures: &Figures) -> Value {
    let pairs = |counts: &Counts, [key, value]: [&str; 2]| -> Value {
        counts.iter().map(|(at, count)| json!({ key: at, value: count })).collect()
    };
    let kinds = |[one, other]: &[Counts; 2], names: [&str; 2], keys: [&str; 2]| json!({ names[0]: pairs(one, keys), names[1]: pairs(other, keys) });
    let sharing = figures.sharing.iter().map(|((length, shared), chains)| {
        json!({ "length": length, "shared": shared, "chains": chains })
    });
    let snapshots = figures.snapshots.iter().map(|((position, elapsed), count)| {
        json!({ "position": position, "elapsed": elapsed.name(), "count": count })
    });
    let longest =
        figures.longest.iter().map(|(at, length)| json!({ "time": at, "length": length }));
    let suffering = figures.suffering.iter().map(|one| {
        json!({
            "filename": forest.get(one.id).path().display().to_string(),
            "length": one.length,
            "shared": one.shared,
            "actual-size": one.disk_bytes,
            "indexed": one.is_indexed,
            "why": one.why,
        })
    });
    let Streaming { chains, files, bytes_min, bytes_max } = figures.streaming;
    json!({
        "files-seen": forest.files_seen(),
        "images": figures.files(),
        "active": figures.active,
        "frozen": figures.frozen,
        "raw": figures.raw,
        "luks": figures.luks,
        "chains": figures.chains(),
        "longest": figures.longest_now(),
        "virtual-size": figures.virtual_bytes,
        "actual-size": figures.disk_bytes,
        "sizes": kinds(&figures.sizes, ["active", "frozen"], ["virtual-size", "count"]),
        "lengths": kinds(&figures.lengths, ["chains", "files"], ["length", "count"]),
        "longest-over-time": longest.collect::<Value>(),
        "sharing": sharing.collect::<Value>(),
        "sharers": pairs(&figures.sharers, ["chains", "files"]),
        "snapshots": snapshots.collect::<Value>(),
        "streaming": {
            "chains": chains,
            "files": files,
            "bytes-min": bytes_min,
            "bytes-max": bytes_max,
        },
        "suffering-chains": figures.suffering_count,
        "suffering": suffering.collect::<Value>(),
        "problems": problems_json(forest.problems()),
    })
}

fn suffering_rows(figures: &Figures, shown: impl Fn(&Suffering) -> String) -> Vec<Vec<String>> {
    let row = |one: &Suffering| {
        vec![
            shown(one),
            one.length.to_string(),
            one.shared.to_string(),
            human_size(one.disk_bytes),
            one.why.join(", "),
        ]
    };
    figures.suffering.iter().map(row).collect()
}

/// What merging would free, in a sentence.
fn streaming_text(streaming: &Streaming) -> String {
    let Streaming { chains, files, bytes_min, bytes_max } = streaming;
    format!(
        "If no old state has to be kept, merging the layers that only one chain has would do \
         without {files} files in {chains} chains, and free {} to {}.",
        human_size(*bytes_min),
        human_size(*bytes_max),
    )
}

/// Bounds of the groups in which text shows values.
const LENGTH_BOUNDS: [u64; 7] = [1, 5, 10, 29, 35, 99, u64::MAX];
const SIZE_BOUNDS: [u64; 6] = [10 << 30, 50 << 30, 100 << 30, 500 << 30, 1 << 40, u64::MAX];

/// How much of all lies in each group, in percent.
fn groups(counts: &Counts, bounds: &[u64]) -> Vec<String> {
    let all: u64 = counts.values().sum();
    let mut from = 0;
    let mut share = |bound: &u64| {
        let count: u64 = counts.range(from..=*bound).map(|(_, count)| count).sum();
        from = bound.saturating_add(1);
        #[expect(clippy::cast_precision_loss, reason = "a tenth of a percent is shown")]
        let percent = count as f64 * 100.0 / all.max(1) as f64;
        format!("{percent:.1}%")
    };
    bounds.iter().map(&mut share).collect()
}

fn grouped(
    title: &str,
    bounds: (&[u64], fn(u64) -> String),
    kinds: [(&str, &Counts); 2],
) -> String {
    let (bounds, shown) = bounds;
    let mut names = vec![title.to_owned()];
    for (at, bound) in bounds.iter().enumerate() {
        names.push(match *bound {
            u64::MAX => format!("over {}", shown(bounds[at.saturating_sub(1)])),
            bound => format!("to {}", shown(bound)),
        });
    }
    let head: Vec<&str> = names.iter().map(String::as_str).collect();
    let row = |(name, counts): (&str, &Counts)| {
        std::iter::once(name.to_owned()).chain(groups(counts, bounds)).collect()
    };
    let numbers: Vec<usize> = (1..head.len()).collect();
    table(&head, &numbers, kinds.map(row).into_iter().collect())
}

fn text(figures: &Figures, suffering: Vec<Vec<String>>) -> String {
    let luks = match figures.luks {
        0 => String::new(),
        luks => format!(", {luks} LUKS"),
    };
    let mut text = format!(
        "{} images in {} chains: {} active, {} frozen, {} of them raw{luks}\n\
         {} of disks take {} on disk; the longest chain has {} layers\n\n",
        figures.files(),
        figures.chains(),
        figures.active,
        figures.frozen,
        figures.raw,
        human_size(figures.virtual_bytes),
        human_size(figures.disk_bytes),
        figures.longest_now(),
    );
    let number = |number: u64| number.to_string();
    let [active, frozen] = &figures.sizes;
    let kinds = [("active", active), ("frozen", frozen)];
    text += &grouped("DISK LENGTH", (&SIZE_BOUNDS, human_size), kinds);
    let [chains, files] = &figures.lengths;
    text += "\n";
    text += &grouped("LAYERS", (&LENGTH_BOUNDS, number), [("chains", chains), ("files", files)]);
    let shared: u64 = figures.sharers.range(2..).map(|(_, files)| files).sum();
    let most = figures.sharers.last_key_value().map_or(0, |(chains, _)| *chains);
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "\n{shared} files are shared by several chains, one of them by {most}\n{}\n",
        streaming_text(&figures.streaming)
    );
    text += &snapshot_table(figures);
    if !suffering.is_empty() {
        let _ = writeln!(text, "\n{} chains suffer:", figures.suffering_count);
        let head = ["IMAGE", "LENGTH", "SHARED", "ON DISK", "WHY"];
        text += &table(&head, &[1, 2, 3], suffering);
    }
    text
}

fn snapshot_table(figures: &Figures) -> String {
    let row = |name: &str, from: u64, to: u64| {
        let count = |elapsed: Elapsed| {
            let counts = figures.snapshots.iter();
            let counts = counts
                .filter(|((position, one), _)| (from..=to).contains(position) && *one == elapsed);
            counts.map(|(_, count)| count).sum::<u64>().to_string()
        };
        std::iter::once(name.to_owned()).chain(Elapsed::ALL.map(count)).collect()
    };
    let rows =
        vec![row("position to 10", 0, 10), row("to 35", 11, 35), row("over 35", 36, u64::MAX)];
    let head = ["SNAPSHOTS, IN A", "HOUR", "DAY", "WEEK", "MONTH", "YEAR", "LONGER"];
    table(&head, &[1, 2, 3, 4, 5, 6], rows)
}
