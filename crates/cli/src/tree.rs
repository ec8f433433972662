//! `mica tree`: the forest of chains in folders, without opening one of them.

mod graph;
mod picture;
mod rows;
mod text;

use crate::failure::Failure;
use crate::folders::{FoldersArgs, format_name, tell_problems};
use crate::output::{print, print_json};
use clap::{Args, ValueEnum};
use mica_stack::forest::{Below, Forest, ForestImage, Problem};
use rows::{Fold, rows};
use serde_json::{Value, json};
use std::process::ExitCode;

/// Show which images are based on which.
///
/// Reads headers only, also of images that are in use. An image is drawn beneath its backing file.
/// Runs of layers that each have only one overlay are folded. Backing files that are missing, or
/// that are not in these folders, are marked.
#[derive(Args)]
pub(crate) struct TreeArgs {
    /// How to print it: human, json, dot or svg.
    ///
    /// dot is for graphviz, svg is a picture.
    #[arg(long, value_enum, default_value = "human", value_name = "FORMAT")]
    #[arg(hide_possible_values = true, hide_default_value = true)]
    output: TreeFormat,
    /// The same as --output dot.
    #[arg(long, conflicts_with_all = ["output", "svg"])]
    dot: bool,
    /// The same as --output svg.
    #[arg(long, conflicts_with = "output")]
    svg: bool,
    /// Draw every layer.
    #[arg(short = 'a', long)]
    all: bool,
    #[command(flatten)]
    folders: FoldersArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TreeFormat {
    Human,
    Json,
    Dot,
    Svg,
}

pub(crate) fn run(args: &TreeArgs) -> Result<ExitCode, Failure> {
    let forest = args.folders.scan()?;
    let format = match args {
        TreeArgs { dot: true, .. } => TreeFormat::Dot,
        TreeArgs { svg: true, .. } => TreeFormat::Svg,
        _ => args.output,
    };
    let drawn = || rows(&forest, if args.all { Fold::Nothing } else { Fold::Runs });
    let shown = |image: &ForestImage| args.folders.shown(image.path());
    match format {
        TreeFormat::Json => return print_json(&whole(&forest)).map(|()| ExitCode::SUCCESS),
        TreeFormat::Human => print(&text::draw(&forest, &drawn(), shown))?,
        TreeFormat::Dot => print(&graph::draw(&forest, &drawn(), shown))?,
        TreeFormat::Svg => print(&picture::draw(&forest, &drawn(), shown))?,
    }
    tell_problems(forest.problems());
    args.folders.tell_if_empty(&forest);
    Ok(ExitCode::SUCCESS)
}

fn whole(forest: &Forest) -> Value {
    let images: Vec<_> = forest.images().iter().map(|image| one(forest, image)).collect();
    json!({ "images": images, "problems": problems_json(forest.problems()) })
}

fn one(forest: &Forest, image: &ForestImage) -> Value {
    let mut value = json!({
        "filename": image.path().display().to_string(),
        "format": format_name(image),
        "virtual-size": image.virtual_bytes,
        "actual-size": image.disk_bytes,
        "depth": image.depth,
        "overlays": image.overlays.len(),
        "chains": image.chains,
        "chain-actual-size": image.chain_bytes,
        "indexed": image.is_indexed,
    });
    let Some(object) = value.as_object_mut() else { return value };
    let mut set = |name: &str, value: Value| drop(object.insert(name.to_owned(), value));
    if image.names.len() > 1 {
        let names = image.names[1..].iter().map(|name| name.display().to_string());
        set("other-names", names.collect::<Vec<_>>().into());
    }
    if let Some(facts) = &image.qcow2 {
        set("snapshots", facts.snapshots.into());
        set("encrypted", facts.is_encrypted.into());
        if let Some(backing) = &facts.backing {
            set("backing-filename", backing.name.to_string_lossy().into());
        }
    }
    match &image.below {
        Below::Nothing => {}
        Below::Image(below) => {
            set("full-backing-filename", forest.get(*below).path().display().to_string().into());
        }
        Below::Lost { why, .. } => set("backing-problem", why.text().into()),
    }
    value
}

/// What was left out, and what is odd.
pub(crate) fn problems_json(problems: &[Problem]) -> Value {
    let one = |Problem { path, what, .. }: &Problem| json!({ "filename": path.display().to_string(), "problem": what });
    problems.iter().map(one).collect()
}
