//! The figures of a fleet, from its forest: nothing is read for them.
//!
//! A chain is an image on which nothing stands, with all beneath it. Times are those of files: when
//! a layer was created, or when the one beneath it was last written, where the file is a copy whose
//! creation says nothing.

use mica_stack::forest::{Below, Forest, ForestImage, ImageId};
use std::collections::BTreeMap;

/// Length from which on a chain is long: where clouds begin to merge layers.
pub(super) const LONG: u64 = 30;
/// Chains that are named as suffering.
const SUFFERING_MAX: usize = 20;

/// How often each value occurs.
pub(super) type Counts = BTreeMap<u64, u64>;

/// How long after the layer before a snapshot was taken.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Elapsed {
    Hour,
    Day,
    Week,
    Month,
    Year,
    Longer,
}

impl Elapsed {
    pub(super) const ALL: [Self; 6] =
        [Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year, Self::Longer];

    fn of(nanoseconds: i128) -> Self {
        const HOUR: i128 = 3600 * 1_000_000_000;
        match nanoseconds {
            ..HOUR => Self::Hour,
            ns if ns < 24 * HOUR => Self::Day,
            ns if ns < 7 * 24 * HOUR => Self::Week,
            ns if ns < 30 * 24 * HOUR => Self::Month,
            ns if ns < 365 * 24 * HOUR => Self::Year,
            _ => Self::Longer,
        }
    }

    /// In a word, for people and programs.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
            Self::Year => "year",
            Self::Longer => "longer",
        }
    }
}

/// A chain that costs its readers, or its host, more than it has to.
pub(super) struct Suffering {
    pub(super) id: ImageId,
    pub(super) length: u64,
    pub(super) shared: u64,
    pub(super) disk_bytes: u64,
    pub(super) is_indexed: bool,
    pub(super) why: Vec<&'static str>,
}

/// What merging layers that only one chain has would give back.
#[derive(Default)]
pub(super) struct Streaming {
    pub(super) chains: u64,
    /// Files that would not be needed any more.
    pub(super) files: u64,
    /// Bytes that are surely overwritten: more is allocated than the disk has.
    pub(super) bytes_min: u64,
    /// All but the largest layer of each.
    pub(super) bytes_max: u64,
}

/// The figures of a fleet.
#[derive(Default)]
pub(super) struct Figures {
    pub(super) active: u64,
    pub(super) frozen: u64,
    pub(super) raw: u64,
    pub(super) luks: u64,
    pub(super) disk_bytes: u64,
    pub(super) virtual_bytes: u64,
    /// Lengths of disks, of active and of frozen images.
    pub(super) sizes: [Counts; 2],
    /// Lengths of chains, over chains and over files.
    pub(super) lengths: [Counts; 2],
    /// The longest chain at moments at which it grew, in seconds since the epoch.
    pub(super) longest: Vec<(u64, u64)>,
    /// Chains by their length and how many of their frozen layers others have, too.
    pub(super) sharing: BTreeMap<(u64, u64), u64>,
    /// Files by how many chains have them.
    pub(super) sharers: Counts,
    /// Snapshots by position and time since the one before.
    pub(super) snapshots: BTreeMap<(u64, Elapsed), u64>,
    pub(super) streaming: Streaming,
    pub(super) suffering: Vec<Suffering>,
    /// How many chains suffer in all.
    pub(super) suffering_count: u64,
}

impl Figures {
    pub(super) fn of(forest: &Forest) -> Self {
        let mut this = Self::default();
        let longest = longest_chains(forest);
        for (image, length) in forest.images().iter().zip(&longest) {
            this.add_image(image, *length);
            this.add_snapshot(forest, image);
        }
        for id in forest.active() {
            this.add_chain(forest, id);
        }
        this.longest = growth(forest);
        this.suffering_count = this.suffering.len() as u64;
        this.suffering.sort_by_key(|one| {
            std::cmp::Reverse((!one.is_indexed, one.length, one.shared, one.disk_bytes))
        });
        this.suffering.truncate(SUFFERING_MAX);
        this
    }

    fn add_image(&mut self, image: &ForestImage, length: u64) {
        self.disk_bytes += image.disk_bytes;
        let is_other = image.qcow2.is_none();
        self.luks += u64::from(is_other && image.is_luks);
        self.raw += u64::from(is_other && !image.is_luks);
        let kind = usize::from(!image.is_active());
        *[&mut self.active, &mut self.frozen][kind] += 1;
        *self.sizes[kind].entry(image.virtual_bytes).or_default() += 1;
        *self.lengths[1].entry(length).or_default() += 1;
        *self.sharers.entry(image.chains as u64).or_default() += 1;
    }

    /// Counts what froze `image`, if its time is known.
    fn add_snapshot(&mut self, forest: &Forest, image: &ForestImage) {
        let uppers = image.overlays.iter().filter_map(|upper| created(forest, forest.get(*upper)));
        let (Some(frozen), Some(began)) = (uppers.min(), created(forest, image)) else { return };
        let elapsed = Elapsed::of(frozen - began);
        *self.snapshots.entry((image.depth as u64 + 1, elapsed)).or_default() += 1;
    }

    fn add_chain(&mut self, forest: &Forest, id: ImageId) {
        let top = forest.get(id);
        let length = top.depth as u64 + 1;
        self.virtual_bytes += top.virtual_bytes;
        *self.lengths[0].entry(length).or_default() += 1;
        let frozen = || forest.chain(id).skip(1).map(|layer| forest.get(layer));
        let shared = frozen().filter(|layer| layer.chains > 1).count() as u64;
        *self.sharing.entry((length, shared)).or_default() += 1;
        // The layers that only this chain has are its uppermost ones.
        let own = || frozen().take_while(|layer| layer.chains == 1);
        if own().nth(1).is_some() {
            let bytes: u64 = own().map(|layer| layer.disk_bytes).sum();
            let largest = own().map(|layer| layer.disk_bytes).max().unwrap_or(0);
            self.streaming.chains += 1;
            self.streaming.files += own().count() as u64 - 1;
            self.streaming.bytes_min += bytes.saturating_sub(top.virtual_bytes);
            self.streaming.bytes_max += bytes - largest;
        }
        // The index covers what is frozen.
        let is_indexed = frozen().next().is_none_or(|below| below.is_indexed);
        let mut why = Vec::new();
        if length >= LONG {
            why.push("long");
            if !is_indexed {
                why.push("no index");
            }
            if shared >= LONG {
                why.push("shared deeply");
            }
        }
        if matches!(bottom(forest, id).below, Below::Lost { .. }) {
            why.push("base not found");
        }
        if !why.is_empty() {
            let disk_bytes = top.chain_bytes;
            self.suffering.push(Suffering { id, length, shared, disk_bytes, is_indexed, why });
        }
    }

    /// How many chains there are.
    pub(super) fn chains(&self) -> u64 {
        self.lengths[0].values().sum()
    }

    /// How many files there are.
    pub(super) fn files(&self) -> u64 {
        self.active + self.frozen
    }

    /// The length of the longest chain.
    pub(super) fn longest_now(&self) -> u64 {
        self.lengths[0].last_key_value().map_or(0, |(length, _)| *length)
    }
}

fn bottom(forest: &Forest, id: ImageId) -> &ForestImage {
    forest.get(forest.chain(id).last().unwrap_or(id))
}

/// For each image the length of the longest chain that has it.
fn longest_chains(forest: &Forest) -> Vec<u64> {
    let mut longest = vec![0; forest.images().len()];
    for id in forest.active() {
        let length = forest.get(id).depth as u64 + 1;
        for layer in forest.chain(id) {
            let known = &mut longest[layer.index()];
            if *known >= length {
                // So do all beneath it.
                break;
            }
            *known = length;
        }
    }
    longest
}

/// When an image was created, in nanoseconds since the epoch, as far as anything says so.
fn created(forest: &Forest, image: &ForestImage) -> Option<i128> {
    let (written, _) = image.changed_ns;
    if let Some(created) = image.created_ns.filter(|created| *created <= written) {
        return Some(created);
    }
    // A copy: the one beneath was written until then.
    match image.below {
        Below::Image(below) => Some(forest.get(below).changed_ns.0),
        _ => None,
    }
}

/// How the longest chain grew, as far as its layers are still there.
fn growth(forest: &Forest) -> Vec<(u64, u64)> {
    let mut made: Vec<(u64, u64)> = forest
        .images()
        .iter()
        .filter_map(|image| {
            let seconds = created(forest, image)? / 1_000_000_000;
            Some((u64::try_from(seconds).ok()?, image.depth as u64 + 1))
        })
        .collect();
    made.sort_unstable();
    let mut longest = 0;
    made.retain(|(_, length)| {
        let grew = *length > longest;
        longest = longest.max(*length);
        grew
    });
    made
}
