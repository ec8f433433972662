//! Makes a forest of what images stand on, and counts in it. No step recurses by layer.

use super::{Below, Forest, ImageId, Lost, Outcome, Problem};

/// How far an image has been looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mark {
    New,
    /// On the way down that is being followed.
    OnPath,
    Done,
}

/// Cuts each loop once.
pub(super) fn cut_loops(forest: &mut Forest) {
    let mut marks = vec![Mark::New; forest.images.len()];
    let mut path = Vec::new();
    for first in 0..forest.images.len() {
        let mut at = ImageId::new(first);
        while marks[at.index()] == Mark::New {
            marks[at.index()] = Mark::OnPath;
            path.push(at);
            let Below::Image(below) = forest.get(at).below else { break };
            if marks[below.index()] == Mark::OnPath {
                cut(forest, at);
            }
            at = below;
        }
        path.drain(..).for_each(|done| marks[done.index()] = Mark::Done);
    }
}

fn cut(forest: &mut Forest, at: ImageId) {
    let image = &mut forest.images[at.index()];
    let backing = image.qcow2.as_ref().and_then(|facts| facts.backing.as_ref());
    let name = backing.map(|backing| backing.name.clone()).unwrap_or_default();
    let what = format!("it stands on {}, which stands on it: a loop", name.display());
    image.below = Below::Lost { name, why: Lost::Loop };
    let (path, outcome) = (image.path().to_owned(), Outcome::Odd);
    forest.problems.push(Problem { path, what, outcome });
}

/// Counts what stands on what.
pub(super) fn measure(forest: &mut Forest) {
    let count = forest.images.len();
    let mut by_name: Vec<ImageId> = (0..count).map(ImageId::new).collect();
    by_name.sort_by(|one, other| forest.get(*one).path().cmp(forest.get(*other).path()));
    for id in by_name {
        match forest.get(id).below {
            Below::Image(below) => forest.images[below.index()].overlays.push(id),
            _ => forest.roots.push(id),
        }
    }
    // Each after what it stands on.
    let mut order = forest.roots.clone();
    let mut next = 0;
    while let Some(id) = order.get(next).copied() {
        next += 1;
        let (depth, bytes) = match forest.get(id).below {
            Below::Image(below) => (forest.get(below).depth + 1, forest.get(below).chain_bytes),
            _ => (0, 0),
        };
        let image = &mut forest.images[id.index()];
        image.depth = depth;
        image.chain_bytes = bytes + image.disk_bytes;
        order.extend_from_slice(&image.overlays);
    }
    for id in order.into_iter().rev() {
        let above = &forest.get(id).overlays;
        let chains: usize = above.iter().map(|above| forest.get(*above).chains).sum();
        forest.images[id.index()].chains = chains.max(1);
    }
}
