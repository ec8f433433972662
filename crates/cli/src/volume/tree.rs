//! `mica volume tree`.

use super::rows::{SnapshotRow, snapshot_json};
use super::session::{
    SessionArgs, Subject, described, described_unread, exit_code_of, source_json, source_text,
    state_text, time_text,
};
use crate::failure::Failure;
use crate::output::{human_size, print, print_json};
use crate::plain::plain;
use crate::svg::{DrawnRow, draw_rows};
use clap::{Args, ValueEnum};
use mica_block::{ClonedFrom, Error, ErrorKind, SourceNow};
use mica_stack::Store;
use mica_volume::{Listed, Origin, VolumeInfo};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::process::ExitCode;

/// Show the volumes of a store with their snapshots, and what clones were made from.
#[derive(Args)]
pub(super) struct TreeArgs {
    /// How to print it: human, json, dot or svg.
    ///
    /// dot is for graphviz, svg is a picture.
    #[arg(long, value_enum, default_value = "human", value_name = "FORMAT")]
    #[arg(hide_possible_values = true, hide_default_value = true)]
    pub(super) output: TreeFormat,
    #[command(flatten)]
    pub(super) drawn: DrawnArgs,
    #[command(flatten)]
    pub(super) session: SessionArgs,
    /// The store, or one volume.
    #[arg(value_name = "URL")]
    pub(super) url: String,
}

// Short for formats that are for other programs. (A doc comment would become the help of the verb.)
#[derive(Args, Clone, Copy, Default)]
pub(crate) struct DrawnArgs {
    /// The same as --output dot.
    #[arg(long, conflicts_with_all = ["output", "svg"])]
    dot: bool,
    /// The same as --output svg.
    #[arg(long, conflicts_with = "output")]
    svg: bool,
}

impl DrawnArgs {
    fn format(self, output: TreeFormat) -> TreeFormat {
        match self {
            Self { dot: true, .. } => TreeFormat::Dot,
            Self { svg: true, .. } => TreeFormat::Svg,
            Self { .. } => output,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum TreeFormat {
    Human,
    Json,
    Dot,
    Svg,
}

/// Whether volumes are shown besides the one that cannot be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Others {
    None,
    Shown,
}

/// A volume, and its snapshots by number.
struct Branch {
    volume: VolumeInfo,
    from: Option<ClonedFrom>,
    snapshots: Vec<SnapshotRow>,
}

impl Branch {
    /// What is said of the volume behind its name.
    fn detail(&self) -> String {
        let (size, state) = (human_size(self.volume.state.len), state_text(&self.volume));
        let from = self.from.as_ref().map(|from| format!(", cloned from {}", source_text(from)));
        format!("{size}, {state}{}", from.unwrap_or_default())
    }
}

pub(super) fn run(args: &TreeArgs) -> Result<ExitCode, Failure> {
    let session = args.session.start()?;
    let (store, branches, listed) = session.executor.block_on(async {
        let (store, mut listed, others) = match session.subject(&args.url, "volume tree").await? {
            Subject::Volume(store, name) => {
                let info = store.volumes().info(&name).await?;
                (store, Listed { volumes: vec![info], ..Listed::default() }, Others::None)
            }
            Subject::Store(store) => {
                let all = store.volumes().list_with_damaged().await?;
                (store, all, Others::Shown)
            }
        };
        let mut branches = branches(&store, &mut listed, others).await?;
        match &mut *branches {
            [one] if others == Others::None => {
                one.from = store.volumes().cloned_from(&one.volume).await;
            }
            all => find_sources(all, &listed),
        }
        Ok::<_, Failure>((store, branches, listed))
    })?;
    match args.drawn.format(args.output) {
        TreeFormat::Human => print(&human(&store, &branches))?,
        TreeFormat::Json => {
            let mut all = json(&store, &branches);
            let unread = described_unread(store.url(), &listed);
            all.extend(unread.into_iter().map(Value::Object));
            print_json(&all)?;
        }
        TreeFormat::Dot => print(&dot(&branches))?,
        TreeFormat::Svg => print(&picture(&store, &branches))?,
    }
    Ok(exit_code_of(&listed))
}

/// The volumes in `listed`, which has from then on those whose snapshots cannot be read among the
/// others that cannot be.
async fn branches(
    store: &Store,
    listed: &mut Listed,
    others: Others,
) -> Result<Vec<Branch>, Error> {
    let mut branches = Vec::new();
    for volume in std::mem::take(&mut listed.volumes) {
        let found = match volume.is_ready {
            true => store.volumes().snapshots(&volume.name).await,
            // Nobody can do anything with them yet.
            false => Ok(Vec::new()),
        };
        match found {
            Ok(found) => {
                let snapshots = found.into_iter().map(SnapshotRow::from).collect();
                branches.push(Branch { volume, from: None, snapshots });
            }
            Err(error) if others == Others::None => return Err(error),
            Err(error) => match error.kind() {
                ErrorKind::Corrupt => listed.damaged.push((volume.name, error)),
                ErrorKind::Unsupported => listed.newer.push((volume.name, error)),
                // Somebody has deleted it meanwhile.
                ErrorKind::NotFound => {}
                _ => return Err(error),
            },
        }
    }
    for unread in [&mut listed.damaged, &mut listed.newer] {
        unread.sort_by(|(one, _), (other, _)| one.cmp(other));
    }
    Ok(branches)
}

/// Finds what clones were made from among all volumes of their store.
fn find_sources(branches: &mut [Branch], listed: &Listed) {
    let found: Vec<_> = {
        let by_id: HashMap<_, _> =
            branches.iter().map(|branch| (branch.volume.volume, branch)).collect();
        let source_now = |origin: &Origin| match (by_id.get(&origin.volume), origin.snapshot) {
            (Some(source), Some(number)) => {
                let at = source.snapshots.binary_search_by_key(&number, |found| found.number);
                let label = at.map(|at| source.snapshots[at].label.clone());
                label.map_or(SourceNow::SnapshotDropped, |label| SourceNow::There { label })
            }
            (Some(_), None) => SourceNow::There { label: String::new() },
            (None, _) if is_unread(listed, origin) => SourceNow::Unknown,
            (None, _) => SourceNow::VolumeDeleted,
        };
        let from = |branch: &Branch| {
            let origin = branch.volume.origin.as_ref()?;
            Some(origin.with(source_now(origin)))
        };
        branches.iter().map(from).collect()
    };
    for (branch, from) in branches.iter_mut().zip(found) {
        branch.from = from;
    }
}

/// Whether the volume of this name cannot be read.
fn is_unread(listed: &Listed, origin: &Origin) -> bool {
    listed.damaged.iter().chain(&listed.newer).any(|(name, _)| *name == origin.name)
}

fn human(store: &Store, branches: &[Branch]) -> String {
    let mut text = format!("{}\n", store.url());
    // Writing to a string does not fail.
    for (at, found) in branches.iter().enumerate() {
        let is_last = at + 1 == branches.len();
        let (branch, trunk) = if is_last { ("└─", "  ") } else { ("├─", "│ ") };
        let (name, snapshots) = (found.volume.name.as_str(), &found.snapshots);
        let _ = writeln!(text, "{branch} {name}  {}", found.detail());
        for (at, snapshot) in snapshots.iter().enumerate() {
            let branch = if at + 1 == snapshots.len() { "└─" } else { "├─" };
            let (label, taken) = (plain(&snapshot.label), time_text(snapshot.time_ns));
            let _ = writeln!(text, "{trunk} {branch} @{label}  {}, {taken}", snapshot.number);
        }
    }
    text
}

/// A row for each volume, and beneath it one for each snapshot.
fn picture(store: &Store, branches: &[Branch]) -> String {
    let mut rows: Vec<DrawnRow> = Vec::new();
    for branch in branches {
        let at = rows.len();
        let bytes = None;
        rows.push(DrawnRow {
            parent: None,
            is_straight: false,
            class: "active",
            name: branch.volume.name.as_str().to_owned(),
            detail: branch.detail(),
            bytes,
        });
        rows.extend(branch.snapshots.iter().map(|snapshot| DrawnRow {
            parent: Some(at),
            is_straight: false,
            class: "frozen",
            name: format!("@{}", plain(&snapshot.label)),
            detail: format!("{}, {}", snapshot.number, time_text(snapshot.time_ns)),
            bytes,
        }));
    }
    let url = store.url();
    let title = match branches {
        [one] => format!("volume {} of {url} and its snapshots", one.volume.name.as_str()),
        all => format!("{} volumes of {url} and their snapshots", all.len()),
    };
    draw_rows(&title, &rows)
}

fn json(store: &Store, branches: &[Branch]) -> Vec<Value> {
    let one = |Branch { volume, from, snapshots }: &Branch| {
        let mut all = described(store.url(), volume);
        all.insert("cloned-from".to_owned(), source_json(from.as_ref()));
        let snapshots = snapshots.iter().map(snapshot_json).collect::<Vec<_>>();
        all.insert("snapshots".to_owned(), snapshots.into());
        Value::Object(all)
    };
    branches.iter().map(one).collect()
}

/// Snapshots in the order in which they were taken, with the volume at the end. What a clone was
/// made from points at the first of them.
fn dot(branches: &[Branch]) -> String {
    let mut text = "digraph volumes {\n  rankdir=LR;\n  node [shape=box];\n".to_owned();
    let drawn: HashSet<_> = branches.iter().map(|branch| branch.volume.volume).collect();
    for Branch { volume, from, snapshots } in branches {
        let name = volume.name.as_str();
        let mut before: Option<String> = None;
        let first = snapshots.first().map(|first| format!("{name}@{}", first.number));
        if let Some((from, origin)) = from.as_ref().zip(volume.origin.as_ref()) {
            let is_drawn =
                drawn.contains(&origin.volume) && matches!(from.now, SourceNow::There { .. });
            // No volume is called so.
            let source = if is_drawn { source_node(from) } else { format!("/{name}") };
            let first = first.unwrap_or_else(|| name.to_owned());
            let (source, first) = (quoted(&[source]), quoted(&[first]));
            if !is_drawn {
                let label = quoted(&[source_text(from)]);
                let _ = writeln!(text, "  {source} [label={label}, style=dashed];");
            }
            let _ = writeln!(text, "  {source} -> {first} [style=dashed];");
        }
        let ends = std::iter::once((name.to_owned(), [name.to_owned(), state_text(volume)]));
        let taken = snapshots.iter().map(|snapshot| {
            let label = [format!("@{}", snapshot.label), time_text(snapshot.time_ns)];
            (format!("{name}@{}", snapshot.number), label)
        });
        for (id, label) in taken.chain(ends) {
            let (id, label) = (quoted(&[id]), quoted(&label));
            let _ = writeln!(text, "  {id} [label={label}];");
            if let Some(before) = before.replace(id.clone()) {
                let _ = writeln!(text, "  {before} -> {id};");
            }
        }
    }
    text + "}\n"
}

/// What a clone was made from, as it is called where it is drawn.
fn source_node(from: &ClonedFrom) -> String {
    match from.snapshot {
        Some(number) => format!("{}@{number}", from.volume),
        None => from.volume.clone(),
    }
}

/// A string of DOT with these lines.
fn quoted(lines: &[String]) -> String {
    let escaped = |line: &String| plain(line).replace('\\', "\\\\").replace('"', "\\\"");
    let lines: Vec<_> = lines.iter().map(escaped).collect();
    format!("\"{}\"", lines.join("\\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_mean_nothing_to_graphviz() {
        let lines = ["a\\N\"".to_owned(), "b".to_owned()];
        assert_eq!(quoted(&lines), r#""a\\N\"\nb""#);
    }
}
