//! `mica bitmap`: changes the dirty bitmaps of an image that is not in use.

use crate::failure::Failure;
use crate::images::{ImageArgs, size_of};
use crate::output::{OutputFormat, print_json};
use clap::error::Error as ClapError;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use mica_block::{Error, ErrorKind, Result, wait_for_dead};
use mica_daemon::ImageSettings;
use mica_qcow2::find_bitmap;
use mica_qcow2_tools::bitmaps::{BitmapAction, Ended, edit_bitmap};
use mica_qcow2_tools::inspect;
use mica_stack::{FileImages, Format, MayWrite};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Add, remove and change dirty bitmaps of an image.
///
/// The image must not be in use. Actions are applied in the order given, either all of them or
/// none.
#[derive(Args)]
pub(crate) struct BitmapArgs {
    #[command(flatten)]
    actions: Actions,
    /// Bytes per bit of a new bitmap.
    ///
    /// By default the size of a cluster, within 4k to 64k.
    #[arg(short, long, value_name = "SIZE")]
    granularity: Option<String>,
    /// Take the bitmaps to merge from this image.
    ///
    /// By default they are in the same image.
    #[arg(short = 'b', long, value_name = "FILE")]
    source_file: Option<PathBuf>,
    /// The format of that image: qcow2, as no other has bitmaps.
    #[arg(
        short = 'F',
        long,
        value_name = "FORMAT",
        requires = "source_file",
        hide_short_help = true
    )]
    source_format: Option<Format>,
    /// How to print the result: human (nothing) or json.
    #[arg(long, value_enum, default_value = "human", value_name = "FORMAT")]
    #[arg(hide_possible_values = true, hide_default_value = true)]
    output: OutputFormat,
    #[command(flatten)]
    images: ImageArgs,
    /// The image.
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// The bitmap.
    #[arg(value_name = "NAME")]
    name: String,
}

/// What is done, in the order of the command line.
#[derive(Clone)]
struct Actions(Vec<Action>);

#[derive(Clone)]
enum Action {
    Add,
    Remove,
    Clear,
    Enable,
    Disable,
    Merge(String),
}

/// The actions without a value: their names, and what they do.
const PLAIN: [(&str, &str, Action); 5] = [
    ("add", "Add a bitmap, which is enabled", Action::Add),
    ("remove", "Remove the bitmap, even if it is inconsistent", Action::Remove),
    ("clear", "Nothing is dirty any more", Action::Clear),
    ("enable", "Writers keep the bitmap true from now on", Action::Enable),
    ("disable", "Writers leave the bitmap as it is from now on", Action::Disable),
];
const MERGE: &str = "merge";

impl Args for Actions {
    fn augment_args(command: Command) -> Command {
        let command = PLAIN.iter().fold(command, |command, (name, help, _)| {
            command.arg(Arg::new(*name).long(*name).help(*help).action(ArgAction::SetTrue))
        });
        let merge = Arg::new(MERGE).long(MERGE).value_name("SOURCE").action(ArgAction::Append);
        command.arg(merge.help("Also mark what this bitmap has; can be repeated"))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Actions {
    fn from_arg_matches(matches: &ArgMatches) -> std::result::Result<Self, ClapError> {
        let mut found: Vec<(usize, Action)> = Vec::new();
        for (name, _, action) in &PLAIN {
            if matches.get_flag(name) {
                let at = matches.index_of(name).unwrap_or_default();
                found.push((at, action.clone()));
            }
        }
        let sources = matches.get_many::<String>(MERGE).into_iter().flatten();
        let places = matches.indices_of(MERGE).into_iter().flatten();
        found.extend(places.zip(sources).map(|(at, from)| (at, Action::Merge(from.clone()))));
        found.sort_by_key(|(at, _)| *at);
        Ok(Self(found.into_iter().map(|(_, action)| action).collect()))
    }

    fn update_from_arg_matches(
        &mut self,
        matches: &ArgMatches,
    ) -> std::result::Result<(), ClapError> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

pub(crate) fn run(args: &BitmapArgs) -> std::result::Result<ExitCode, Failure> {
    let has = |is_it: fn(&Action) -> bool| args.actions.0.iter().any(is_it);
    let usage = |what: &str| Err(Failure::new(what));
    if args.actions.0.is_empty() {
        return usage(
            "say what is to be done: --add, --remove, --clear, --enable, --disable or --merge",
        );
    }
    if args.granularity.is_some() && !has(|action| matches!(action, Action::Add)) {
        return usage("-g is for bitmaps that are added: add --add, or leave it out");
    }
    if args.source_file.is_some() && !has(|action| matches!(action, Action::Merge(_))) {
        return usage("-b is for bitmaps that are merged: add --merge, or leave it out");
    }
    let source = args.source_format.unwrap_or(Format::Qcow2);
    if args.images.format() != Format::Qcow2 || source != Format::Qcow2 {
        return Err(Failure::new("only qcow2 images have dirty bitmaps"));
    }
    let executor = args.images.executor()?;
    executor.block_on(async {
        wait_for_dead(async || edit(args).await).await?;
        if args.output == OutputFormat::Json {
            let images = FileImages::new(&args.image, args.images.image_options()?)?;
            let info = wait_for_dead(async || inspect(&images, &args.image).await).await?;
            let bitmaps = info.bitmaps.iter().map(crate::info::bitmap_json);
            print_json(&json!({
                "filename": args.image.to_string_lossy(),
                "bitmaps": bitmaps.collect::<Vec<_>>(),
            }))?;
        }
        Ok(ExitCode::SUCCESS)
    })
}

async fn edit(args: &BitmapArgs) -> Result<()> {
    let options = || args.images.settings.image_options(ImageSettings::handles());
    let granularity = args.granularity.as_deref().map(|text| size_of("-g", text)).transpose();
    let granularity =
        granularity.map_err(|failure| Error::new(ErrorKind::Invalid, failure.message()))?;
    let mut actions = Vec::new();
    for action in &args.actions.0 {
        actions.push(match (action, &args.source_file) {
            (Action::Add, _) => BitmapAction::Add(granularity),
            (Action::Remove, _) => BitmapAction::Remove,
            (Action::Clear, _) => BitmapAction::Clear,
            (Action::Enable, _) => BitmapAction::Enable,
            (Action::Disable, _) => BitmapAction::Disable,
            (Action::Merge(source), None) => BitmapAction::Merge(source.clone()),
            (Action::Merge(source), Some(file)) => {
                let images = FileImages::new(file, options()?)?;
                let found = find_bitmap(&images, std::slice::from_ref(file), source).await?;
                BitmapAction::MergeFrom(found)
            }
        });
    }
    let options = options()?;
    let may_write = MayWrite::check(&args.image, &options).await?;
    let images = FileImages::to_write(&args.image, options, may_write)?;
    warn_of(&edit_bitmap(&images, &args.image, &args.name, actions).await?);
    Ok(())
}

/// Says what a change ended that nobody asked for.
pub(crate) fn warn_of(Ended { also, may_leak }: &Ended) {
    if !also.is_empty() {
        let names = also.join(", ");
        tracing::warn!("other inconsistent bitmaps are removed, too, as QEMU does: {names}");
    }
    if *may_leak {
        tracing::warn!(
            "clusters of inconsistent bitmaps may leak: `mica check -r leaks` frees them"
        );
    }
}
