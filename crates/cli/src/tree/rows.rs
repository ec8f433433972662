//! The rows of a drawing of a forest, whatever it is drawn with. No step recurses by layer.

use crate::folders::format_name;
use crate::output::human_size;
use crate::plain::plain;
use mica_stack::forest::{Below, Forest, ForestImage, ImageId};

/// What is folded.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fold {
    Nothing,
    /// Layers on each of which only the next one stands.
    Runs,
}

/// Layers of a run from which on it is folded; with fewer, all of them are shown.
const RUN_MIN: usize = 6;

/// A row, which comes after that of what it stands on.
pub(super) struct Row {
    /// The row of what it stands on.
    pub(super) parent: Option<usize>,
    pub(super) what: What,
    /// Whether it is the last of those that stand on the same.
    pub(super) is_last: bool,
    /// Whether it belongs to a long run, so that it is drawn below its parent and not beside it.
    pub(super) is_straight: bool,
}

/// What a row shows.
pub(super) enum What {
    Image(ImageId),
    /// Layers that are not shown.
    Folded {
        count: usize,
        disk_bytes: u64,
    },
}

/// The rows of `forest`.
pub(super) fn rows(forest: &Forest, fold: Fold) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let mut next: Vec<(ImageId, Option<usize>, bool)> = Vec::new();
    let push = |next: &mut Vec<_>, ids: &[ImageId], parent| {
        let last = ids.last().copied();
        next.extend(ids.iter().rev().map(|id| (*id, parent, Some(*id) == last)));
    };
    push(&mut next, forest.roots(), None);
    while let Some((id, parent, is_last)) = next.pop() {
        rows.push(Row { parent, what: What::Image(id), is_last, is_straight: false });
        let mut at = rows.len() - 1;
        let run = run_above(forest, id);
        let (Some((top, middle)), true) = (run.split_last(), run.len() >= RUN_MIN) else {
            push(&mut next, &forest.get(id).overlays, Some(at));
            continue;
        };
        let (first, rest) = middle.split_first().expect("RUN_MIN is more than one");
        let mut add = |what, is_straight| {
            rows.push(Row { parent: Some(at), what, is_last: true, is_straight });
            at = rows.len() - 1;
        };
        add(What::Image(*first), false);
        match fold {
            Fold::Runs => {
                let disk_bytes = rest.iter().map(|id| forest.get(*id).disk_bytes).sum();
                add(What::Folded { count: rest.len(), disk_bytes }, false);
                add(What::Image(*top), false);
            }
            Fold::Nothing => {
                rest.iter().for_each(|id| add(What::Image(*id), true));
                add(What::Image(*top), true);
            }
        }
        push(&mut next, &forest.get(*top).overlays, Some(at));
    }
    rows
}

/// The layers above `id` up to the first one on which not exactly one image stands.
fn run_above(forest: &Forest, id: ImageId) -> Vec<ImageId> {
    let only = |id: &ImageId| match forest.get(*id).overlays[..] {
        [only] => Some(only),
        _ => None,
    };
    std::iter::successors(only(&id), only).collect()
}

/// What is said of an image behind its name.
pub(super) fn detail(image: &ForestImage) -> String {
    let mut parts =
        vec![human_size(image.virtual_bytes), format!("{} on disk", human_size(image.disk_bytes))];
    match format_name(image) {
        "qcow2" => {}
        "luks" => parts.push("LUKS".to_owned()),
        other => parts.push(other.to_owned()),
    }
    if let count @ 2.. = image.overlays.len() {
        parts.push(format!("{count} overlays"));
    }
    if image.chains > 1 {
        parts.push(format!("shared by {} chains", image.chains));
    }
    if let Some(facts) = &image.qcow2 {
        if let count @ 1.. = facts.snapshots {
            parts.push(format!("{count} internal snapshot{}", if count == 1 { "" } else { "s" }));
        }
        if facts.is_encrypted {
            parts.push("encrypted".to_owned());
        }
    }
    if image.is_active() && image.depth > 0 {
        parts.push(format!("chain of {}", image.depth + 1));
    }
    if image.is_indexed && image.qcow2.is_some() {
        parts.push("indexed".to_owned());
    }
    if let count @ 1.. = image.names.len() - 1 {
        parts.push(format!("{count} more name{}", if count == 1 { "" } else { "s" }));
    }
    parts.join(", ") + &lost(image)
}

/// What is said of a base that is not there.
fn lost(image: &ForestImage) -> String {
    match &image.below {
        Below::Lost { name, why } => {
            format!("; stands on {} ({})", plain(&name.to_string_lossy()), plain(why.text()))
        }
        _ => String::new(),
    }
}

/// What is said of layers that are not shown.
pub(super) fn folded(count: usize, disk_bytes: u64) -> String {
    format!("... {count} more, {} on disk", human_size(disk_bytes))
}
