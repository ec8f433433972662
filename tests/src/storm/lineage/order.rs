//! Commands that change the layers of disks: which chain each of them leads to, and what it makes
//! of the files.
//!
//! A command that was carried out leads to the one chain, one that was refused to the chain that
//! was there. After one that was cancelled, or whose server was killed or taken over from, either
//! is right, and what a commit may have begun to change is not known any more.

use super::disk::Disk;
use super::frozen::Frozen;
use super::state_in;
use crate::storm::model::{Model, Sent};
use mica_units::Rng;
use std::ops::Range;

/// Rates of merges that can be met while they are under way, in bytes a second.
const RATES: [&str; 3] = ["4M", "16M", "64M"];
/// Rates of merges that are under way still when another server has come up.
const SLOW_RATES: [&str; 2] = ["1M", "4M"];

/// How a merge goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pace {
    Fast,
    /// So slowly that another server comes up while it is under way.
    Slow,
    /// Slowly, and nobody waits for its end.
    Background,
}

/// What a command is about.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum What {
    /// A new active layer.
    Snapshot { file: String },
    /// Layers above the one at `base`, or all, go up into the active one.
    Stream { base: Option<usize>, drops_states: bool },
    /// Layers above the one at `base` up to the one at `top`, or up to the active one, go down.
    Commit { top: Option<usize>, base: usize },
    /// The present state is kept and exported.
    Begin { state: String, since: Option<String> },
    /// The export ends.
    End,
    /// The state at this position is no longer kept.
    Drop { at: usize },
}

/// A command: what is done to which disks, at one instant.
#[derive(Clone, Debug)]
pub(super) struct Order {
    pub(super) disks: Vec<(usize, What)>,
}

/// How a command ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    Done,
    Refused,
    /// Nobody said, or not all of it was done.
    Open,
}

/// What was known of a disk when a command was given, and what clients did meanwhile.
#[derive(Clone, Debug)]
pub(super) struct Before {
    pub(super) model: Model,
    pub(super) sent: Vec<Sent>,
}

impl What {
    /// The chain when it is done, of a disk whose chain is as it was.
    pub(super) fn leads_to(&self, disk: &Disk) -> Vec<String> {
        let mut chain = disk.chain.clone();
        let active = chain.len().saturating_sub(1);
        match self {
            Self::Snapshot { file } => chain.push(file.clone()),
            Self::Stream { base, .. } => drop(chain.drain(base.map_or(0, |base| base + 1)..active)),
            Self::Commit { top: Some(top), base } => drop(chain.drain(base + 1..=*top)),
            Self::Commit { top: None, base } => drop(chain.drain(base + 1..active)),
            Self::Begin { state, .. } => {
                let file = disk.file_of(state);
                if !chain.contains(&file) {
                    chain.insert(active, file);
                }
            }
            Self::End => {}
            Self::Drop { at } => drop(chain.remove(*at)),
        }
        chain
    }

    /// The same command of a chain that was `old` when it was given, and has changed since; `None`
    /// if it does not have the layers any more that are named.
    pub(super) fn of_changed(&self, old: &[String], new: &[String]) -> Option<Self> {
        let moved = |at: usize| new.iter().position(|file| *file == old[at]);
        Some(match self {
            Self::Stream { base, drops_states } => {
                let base = match base {
                    Some(at) => Some(moved(*at)?),
                    None => None,
                };
                Self::Stream { base, drops_states: *drops_states }
            }
            Self::Commit { top, base } => {
                let (top, base) = match top {
                    Some(top) => (Some(moved(*top)?), moved(*base)?),
                    None => (None, moved(*base)?),
                };
                // The active layer may be called by its name.
                let top = top.filter(|top| top + 1 < new.len());
                (base < top.unwrap_or(new.len() - 1)).then_some(Self::Commit { top, base })?
            }
            Self::Drop { at } => Self::Drop { at: moved(*at)? },
            Self::Snapshot { .. } | Self::Begin { .. } | Self::End => self.clone(),
        })
    }

    /// What has become of the files of `disk`, whose chain is still as it was.
    pub(super) fn settle(&self, disk: &mut Disk, before: Before, ending: Ending, is_done: bool) {
        let chain = disk.chain.clone();
        let active = chain.len() - 1;
        if ending == Ending::Refused {
            return;
        }
        if self.is_merge() {
            disk.target.note_merge();
        }
        match self {
            Self::Snapshot { .. } if is_done => {
                let frozen = Frozen::between(before.model, before.sent);
                disk.frozen.insert(chain[active].clone(), frozen);
            }
            Self::Stream { base, .. } if is_done => {
                for file in &chain[base.map_or(0, |base| base + 1)..active] {
                    disk.states.remove(file);
                }
            }
            Self::Commit { top, base } => {
                let content = match top {
                    Some(top) => disk.frozen.get(&chain[*top]).cloned(),
                    None => Some(Frozen::between(before.model, before.sent)),
                };
                commit(disk, *base..top.unwrap_or(active), is_done, content);
                if is_done && let Some(top) = top {
                    disk.frozen.remove(&chain[*top]);
                }
            }
            Self::Begin { state, since } => {
                let file = disk.file_of(state);
                let is_it = |file: &&String| since.is_some() && state_in(file) == since.as_deref();
                disk.since = chain.iter().find(is_it).cloned();
                if is_done && !chain.contains(&file) {
                    let frozen = Frozen::between(before.model, before.sent);
                    disk.frozen.insert(file.clone(), frozen);
                    disk.states.insert(file.clone());
                }
                disk.exported = (ending == Ending::Done).then_some(file);
            }
            Self::End if ending == Ending::Done => {
                disk.exported = None;
            }
            Self::Drop { at } => {
                if is_done {
                    disk.states.remove(&chain[*at]);
                }
                // It goes up, and no other layer shows anything else.
                if is_done {
                    disk.frozen.remove(&chain[*at]);
                }
            }
            Self::Snapshot { .. } | Self::Stream { .. } | Self::End => {}
        }
    }

    /// The arguments of `mica ctl` for it.
    pub(super) fn args(&self, disk: &Disk, socket: &str, rng: &mut Rng, pace: Pace) -> Vec<String> {
        let layer = |at: usize| disk.chain[at].clone();
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let name = &*disk.name;
        let mut args: Vec<String> = match self {
            Self::Snapshot { file } => words(&["snapshot", name, file]),
            Self::Stream { base, drops_states } => {
                let mut args: Vec<String> = words(&["stream", name]);
                args.extend(base.iter().flat_map(|at| ["--base".to_owned(), layer(*at)]));
                args.extend(drops_states.then(|| "--drop-states".to_owned()));
                args
            }
            Self::Commit { top, base } => {
                let base = layer(*base);
                let mut args: Vec<String> = words(&["commit", name, "--base", &base]);
                args.extend(disk.of_gone(rng).map(str::to_owned));
                args.extend(top.iter().flat_map(|at| ["--top".to_owned(), layer(*at)]));
                args
            }
            Self::Begin { state, since } => {
                let mut args: Vec<String> =
                    words(&["backup", "begin", name, "--as", state, "--nbd", socket]);
                args.extend(since.iter().flat_map(|since| ["--since".to_owned(), since.clone()]));
                args
            }
            Self::End => words(&["backup", "end", name]),
            Self::Drop { at } => {
                let state = state_in(&disk.chain[*at]).unwrap_or_default();
                let mut args: Vec<String> = words(&["backup", "drop", name, state]);
                args.extend(disk.of_gone(rng).map(str::to_owned));
                args
            }
        };
        if self.is_merge() {
            let more = match pace {
                Pace::Fast => &[][..],
                Pace::Slow => &["--rate", rng.choose(&SLOW_RATES)],
                Pace::Background => &["--background", "--rate", rng.choose(&RATES)],
            };
            args.extend(more.iter().map(|word| (*word).to_owned()));
        }
        args
    }

    /// The layers of a `chain` that it changes, or whose files it removes: others may not need
    /// them.
    pub(super) fn changed_layers<'a>(&self, chain: &'a [String]) -> &'a [String] {
        match self {
            Self::Commit { top, base } => &chain[*base..=top.unwrap_or(chain.len() - 1)],
            Self::Drop { at } => &chain[*at..=*at],
            Self::Snapshot { .. } | Self::Stream { .. } | Self::Begin { .. } | Self::End => &[],
        }
    }

    /// Whether the disk has other layers when it is done.
    pub(super) fn changes_layers(&self) -> bool {
        !matches!(self, Self::Begin { .. } | Self::End)
    }

    /// Whether it is carried out by a job that takes its time.
    pub(super) fn is_merge(&self) -> bool {
        matches!(self, Self::Stream { .. } | Self::Commit { .. } | Self::Drop { .. })
    }
}

/// What lies above the first of the layers at `below` goes down into that, which holds `content`
/// then, as far as that is known. Before all of it is done nobody knows what any of them show.
fn commit(disk: &mut Disk, below: Range<usize>, is_done: bool, content: Option<Frozen>) {
    let base = disk.chain[below.start].clone();
    // Also if nobody knows what it holds, since a merge into it that was not done.
    let known = disk.lengths.entry(base.clone()).or_default();
    *known = disk.frozen.get(&base).map_or(0, Frozen::len).max(*known);
    let len = *known;
    *disk.merges.entry(base.clone()).or_default() += 1;
    for file in &disk.chain[below] {
        disk.frozen.remove(file);
    }
    if let Some(content) = content.filter(|_| is_done) {
        // A base that is longer stays so.
        disk.frozen.insert(base, content.at_least(len));
    }
}

impl Order {
    /// Something that can be asked for of one of the `disks`, or of all; not all of it will be
    /// done.
    pub(super) fn random(disks: &mut [Disk], rng: &mut Rng, has: &[Asked]) -> Option<Self> {
        if has.is_empty() {
            return None;
        }
        let asked = rng.choose(has);
        let number = usize::try_from(rng.below(disks.len() as u64)).expect("few");
        Self::of(disks, rng, (asked, number))
    }

    /// This, of disk `number`, if it can be asked for.
    pub(super) fn of(
        disks: &mut [Disk],
        rng: &mut Rng,
        (asked, number): (Asked, usize),
    ) -> Option<Self> {
        if asked == Asked::Group && disks.len() > 1 {
            let all = disks.iter_mut().enumerate();
            let all = all.map(|(at, disk)| (at, What::Snapshot { file: disk.new_name("") }));
            return Some(Self { disks: all.collect() });
        }
        let disk = &mut disks[number];
        let frozen = disk.chain.len() - 1;
        let place = |rng: &mut Rng| usize::try_from(rng.below(frozen as u64)).expect("few");
        let states: Vec<_> =
            (0..frozen).filter(|at| disk.states.contains(&disk.chain[*at])).collect();
        let what = match asked {
            Asked::Snapshot | Asked::Group => What::Snapshot { file: disk.new_name("") },
            Asked::Stream => {
                let has_base = frozen > 0 && rng.percent(75);
                let base = has_base.then(|| place(rng));
                What::Stream { base, drops_states: rng.percent(25) }
            }
            Asked::Commit if frozen == 0 => return None,
            Asked::Commit => {
                let base = place(rng);
                let top =
                    base + 1 + usize::try_from(rng.below((frozen - base) as u64)).expect("few");
                What::Commit { top: (top < frozen).then_some(top), base }
            }
            Asked::Backup if disk.exported.is_some() => What::End,
            Asked::Backup => {
                let name = |at: &usize| state_in(&disk.chain[*at]).map(str::to_owned);
                let mut names: Vec<_> = states.iter().filter_map(name).collect();
                // One that a server did not end is begun again.
                let again = if rng.percent(30) { names.pop() } else { None };
                let since = names.pop().filter(|_| rng.percent(70));
                What::Begin { state: again.unwrap_or_else(|| disk.new_state()), since }
            }
            Asked::Drop if states.is_empty() => return None,
            Asked::Drop => What::Drop { at: rng.choose(&states) },
        };
        Some(Self { disks: vec![(number, what)] })
    }
}

/// Kinds of commands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Asked {
    Snapshot,
    Group,
    Stream,
    Commit,
    Backup,
    Drop,
}
