//! `mica check`: checks and repairs one image, with qemu-img's wording and exit codes.

use crate::failure::{Failure, tell};
use crate::images::{CacheWord, ImageArgs};
use crate::output::{ReportArgs, progress_bar};
use clap::{Args, ValueEnum};
use indicatif::ProgressBar;
use mica_block::wait_for_dead;
use mica_qcow2_tools::check::{CheckReport, Finding, Observer, Progress, check};
use mica_qcow2_tools::open_for_check;
use mica_qcow2_tools::recover::{RepairMode, Repaired, open_for_repair, repair};
use mica_stack::{FileImages, Format, ImageOptions, MayWrite};
use serde_json::{Map, Value};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// Most findings that are shown; all are counted.
const FINDINGS_SHOWN_MAX: u64 = 1000;
/// qemu-img's exit code for formats that have no check.
const EXIT_NO_CHECK: u8 = 63;

/// What `-r` repairs.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RepairChoice {
    /// Space that nothing uses.
    Leaks,
    /// Everything that can be repaired.
    All,
}

#[derive(Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    images: ImageArgs,
    /// Repair: leaks only, or all that can be repaired.
    #[arg(short = 'r', long, value_enum, value_name = "WHAT", hide_possible_values = true)]
    // Of several the last counts, as with qemu-img.
    #[arg(overrides_with = "repair")]
    repair: Option<RepairChoice>,
    /// How to read the image, same values as qemu-img: writeback, or none (O_DIRECT).
    ///
    /// Same as --cache; the other values of qemu-img mean one of these two.
    #[arg(short = 'T', value_name = "MODE", conflicts_with = "cache")]
    #[arg(hide_short_help = true, help_heading = "Engine")]
    cache_mode: Option<CacheWord>,
    /// The image. Its backing files are not checked.
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
}

pub(crate) fn run(args: &CheckArgs) -> Result<ExitCode, Failure> {
    if args.images.format() != Format::Qcow2 {
        let what = "only qcow2 images can be checked";
        return Err(Failure::new(what).with_code(EXIT_NO_CHECK));
    }
    let executor = args.images.executor()?;
    executor.block_on(async {
        let options = args.images.image_options()?;
        let cache = args.cache_mode.map_or(options.cache, |CacheWord(cache)| cache);
        let options = ImageOptions { cache, ..options };
        let images = match args.repair {
            None => FileImages::new(&args.image, options)?,
            Some(_) => FileImages::to_write(&args.image, options, MayWrite::to_repair())?,
        };
        let mut printer = FindingPrinter { shown: 0, bar: progress_bar(0, "tables") };
        let done = match args.repair {
            None => {
                let open = async || open_for_check(&images, &args.image).await;
                let (image, header) = wait_for_dead(open).await?;
                let report = check(image.store, &header, &mut printer).await;
                report.map(|report| (report, Repaired::default()))
            }
            Some(choice) => {
                let open = async || open_for_repair(&images, &args.image).await;
                let (image, header) = wait_for_dead(open).await?;
                let repair = repair(image.store, &header, choice.mode(), &mut printer).await;
                repair.map(|repair| (repair.after, repair.repaired))
            }
        };
        printer.bar.finish_and_clear();
        if printer.shown > FINDINGS_SHOWN_MAX {
            let more = printer.shown - FINDINGS_SHOWN_MAX;
            tell(&format!("({more} more findings are not shown)"));
        }
        let (report, repaired) =
            done.map_err(|error| error.wrap(args.image.display().to_string()))?;
        let text = human_repaired(repaired) + &human(&report);
        args.report.print(&text, &json(args, &report, repaired))?;
        Ok(ExitCode::from(report.verdict().exit_status()))
    })
}

impl RepairChoice {
    fn mode(self) -> RepairMode {
        match self {
            Self::Leaks => RepairMode::Leaks,
            Self::All => RepairMode::All,
        }
    }
}

struct FindingPrinter {
    shown: u64,
    bar: ProgressBar,
}

impl Observer for FindingPrinter {
    fn finding(&mut self, finding: Finding) {
        self.shown += 1;
        if self.shown <= FINDINGS_SHOWN_MAX {
            self.bar.suspend(|| tell(&finding.to_string()));
        }
    }

    fn progress(&mut self, progress: Progress) {
        self.bar.set_length(progress.total);
        self.bar.set_position(progress.done);
    }
}

fn human_repaired(repaired: Repaired) -> String {
    if repaired == Repaired::default() {
        return String::new();
    }
    let Repaired { leaks, corruptions } = repaired;
    format!(
        "The following inconsistencies were found and repaired:\n\n    {leaks} leaked clusters\n    \
         {corruptions} corruptions\n\nDouble checking the fixed image now...\n"
    )
}

fn human(report: &CheckReport) -> String {
    let mut text = String::new();
    let CheckReport { corruptions, leaks, check_errors, .. } = *report;
    // Writing to a string does not fail.
    if corruptions == 0 && leaks == 0 && check_errors == 0 {
        text.push_str("No errors were found on the image.\n");
    }
    if corruptions > 0 {
        let _ = write!(
            text,
            "\n{corruptions} errors were found on the image.\n\
             Data may be corrupted, or further writes to the image may corrupt it.\n"
        );
    }
    if leaks > 0 {
        let _ = write!(
            text,
            "\n{leaks} leaked clusters were found on the image.\n\
             This means waste of disk space, but no harm to data.\n"
        );
    }
    if check_errors > 0 {
        let _ = write!(text, "\n{check_errors} internal errors have occurred during the check.\n");
    }
    let (allocated, total) = (report.allocated_clusters, report.total_clusters);
    if total != 0 && allocated != 0 {
        let _ = writeln!(
            text,
            "{allocated}/{total} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
            percent(allocated, total),
            percent(report.fragmented_clusters, allocated),
            percent(report.compressed_clusters, allocated),
        );
    }
    if report.image_end_offset > 0 {
        let _ = writeln!(text, "Image end offset: {}", report.image_end_offset);
    }
    text
}

fn percent(part: u64, whole: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "two digits are shown")]
    let ratio = part as f64 / whole as f64;
    ratio * 100.0
}

fn json(args: &CheckArgs, report: &CheckReport, repaired: Repaired) -> Value {
    let mut object = Map::new();
    let mut set = |name: &str, value: Value| object.insert(name.to_owned(), value);
    set("image-end-offset", report.image_end_offset.into());
    set("total-clusters", report.total_clusters.into());
    set("check-errors", report.check_errors.into());
    // As in QEMU, counts of zero are left out.
    let counts = [
        ("corruptions", report.corruptions),
        ("leaks", report.leaks),
        ("corruptions-fixed", repaired.corruptions),
        ("leaks-fixed", repaired.leaks),
        ("allocated-clusters", report.allocated_clusters),
        ("fragmented-clusters", report.fragmented_clusters),
        ("compressed-clusters", report.compressed_clusters),
    ];
    for (name, count) in counts {
        if count > 0 {
            set(name, count.into());
        }
    }
    set("filename", args.image.display().to_string().into());
    set("format", "qcow2".into());
    Value::Object(object)
}
