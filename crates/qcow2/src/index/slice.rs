//! A slice of the map of a chain: who owns which bytes of 4 MiB of the disk.
//!
//! A slice is a sorted list of runs. A run covers as many sectors as one owner holds in one place,
//! so one form serves clusters of every size, subclusters, layers that end in the middle of a
//! cluster, and the vast hole: a slice has as many runs as its owners require, and no more.
//!
//! Invariants
//! - I1 The runs of a slice cover it exactly: the first starts at sector 0, each ends where the
//!   next starts, the last ends with the slice.
//! - I2 No two neighbours could be one run.
//! - I3 A host offset is a multiple of a sector.

use mica_block::{Extent, ExtentKind};
use mica_units::{GuestOffset, HostOffset, LayerNumber, SECTOR_BYTES};

/// Bytes of the disk that one slice maps, as a power of two.
pub(crate) const SLICE_BITS: u32 = 22;
/// Bytes of the disk that one slice maps.
pub(crate) const SLICE_BYTES: u64 = 1 << SLICE_BITS;
/// Sectors of the disk that one slice maps.
pub(crate) const SLICE_SECTORS: u32 = 8192;

const _: () = assert!(SLICE_SECTORS as u64 * SECTOR_BYTES == SLICE_BYTES);

/// Size of a run, in memory and in a sidecar.
pub(crate) const RUN_BYTES: usize = 10;

/// The owner of a sector, and its place: 16 bits of layer (its number, in a sidecar its position),
/// 3 of kind, 45 of host sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Entry(u64);

/// The meaning of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EntryKind {
    /// No layer holds anything.
    Hole,
    /// Zeros recorded by the layer, without a cluster.
    Zero,
    /// Zeros recorded by the layer, with a cluster.
    ZeroAllocated,
    /// At the host sector.
    Data,
    /// At the host sector, which something else may name too: it is not written in place. Only in
    /// memory, for an active layer that is being written.
    SharedData,
    /// Only the layer's own L2 entry has the rest: compressed, beyond 16 PiB, or malformed.
    Deferred,
}

const HOST_BITS: u32 = 45;
const HOST_MASK: u64 = (1 << HOST_BITS) - 1;
const LAYER_SHIFT: u32 = 48;

impl Entry {
    pub(crate) const HOLE: Self = Self(0);

    /// An entry without a place.
    pub(crate) fn without_host(kind: EntryKind, layer: LayerNumber) -> Self {
        let code = match kind {
            EntryKind::Hole => return Self::HOLE,
            EntryKind::Zero => 1,
            EntryKind::Deferred => 4,
            EntryKind::ZeroAllocated | EntryKind::Data | EntryKind::SharedData => {
                unreachable!("these have a place")
            }
        };
        Self(u64::from(layer.as_u16()) << LAYER_SHIFT | code << HOST_BITS)
    }

    /// An entry at `host`; deferred to the layer if that does not fit.
    pub(crate) fn at_host(kind: EntryKind, layer: LayerNumber, host: HostOffset) -> Self {
        let code: u64 = match kind {
            EntryKind::ZeroAllocated => 2,
            EntryKind::Data => 3,
            EntryKind::SharedData => 5,
            _ => unreachable!("these have no place"),
        };
        let sector = host.bytes() / SECTOR_BYTES;
        // A run of a slice must not leave the field either, wherever it ends.
        let fits = sector <= HOST_MASK - u64::from(SLICE_SECTORS) * 64;
        if !fits || !host.is_aligned(SECTOR_BYTES) {
            return Self::without_host(EntryKind::Deferred, layer);
        }
        Self(u64::from(layer.as_u16()) << LAYER_SHIFT | code << HOST_BITS | sector)
    }

    pub(crate) fn kind(self) -> EntryKind {
        match self.0 >> HOST_BITS & 7 {
            0 => EntryKind::Hole,
            1 => EntryKind::Zero,
            2 => EntryKind::ZeroAllocated,
            3 => EntryKind::Data,
            5 => EntryKind::SharedData,
            _ => EntryKind::Deferred,
        }
    }

    pub(crate) fn layer(self) -> LayerNumber {
        LayerNumber::from_u16((self.0 >> LAYER_SHIFT).try_into().expect("16 bits are left"))
    }

    fn renamed(self, mut name: impl FnMut(LayerNumber) -> Option<LayerNumber>) -> Option<Self> {
        if self.kind() == EntryKind::Hole {
            return Some(self);
        }
        let layer = u64::from(name(self.layer())?.as_u16());
        Some(Self(layer << LAYER_SHIFT | self.0 & ((1 << LAYER_SHIFT) - 1)))
    }

    pub(crate) fn host(self) -> HostOffset {
        HostOffset::new((self.0 & HOST_MASK) * SECTOR_BYTES)
    }

    /// Whether the entry, by itself, says the same as one of another layer that is a state of the
    /// same file.
    pub(crate) fn says_the_same(self, other: Self) -> bool {
        let is_known = self.kind() != EntryKind::Deferred;
        is_known && self.kind() == other.kind() && self.host() == other.host()
    }

    fn has_host(self) -> bool {
        use EntryKind::{Data, SharedData, ZeroAllocated};
        matches!(self.kind(), Data | SharedData | ZeroAllocated)
    }

    /// The meaning of the run that starts with `self`, `sectors` sectors further on.
    pub(crate) fn advanced(self, sectors: u32) -> Self {
        if self.has_host() { Self(self.0 + u64::from(sectors)) } else { self }
    }

    /// The entry with these bits, or `None` if no entry has them.
    fn from_bits(bits: u64, layers: usize) -> Option<Self> {
        let this = Self(bits);
        let code = bits >> HOST_BITS & 7;
        let host_is_right = if matches!(code, 2 | 3) {
            (bits & HOST_MASK) <= HOST_MASK - u64::from(SLICE_SECTORS)
        } else {
            bits & HOST_MASK == 0
        };
        let is_known = code <= 4 && (code != 0 || bits == 0);
        (is_known && host_is_right && this.layer().index() < layers).then_some(this)
    }

    fn extent_kind(self) -> ExtentKind {
        match self.kind() {
            EntryKind::Hole => ExtentKind::Hole,
            EntryKind::Zero => ExtentKind::Zero,
            EntryKind::ZeroAllocated => ExtentKind::ZeroAllocated,
            EntryKind::Data | EntryKind::SharedData => ExtentKind::Data,
            EntryKind::Deferred => ExtentKind::Encoded,
        }
    }
}

/// Sectors of a window, counted from its start, that one entry covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    pub(crate) start: u32,
    pub(crate) end: u32,
    pub(crate) entry: Entry,
}

/// Runs of a window, sorted and disjoint; the sectors between them have no owner yet.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Runs {
    runs: Vec<Run>,
}

impl Runs {
    /// Appends a run, which starts at or after the end of the last; joins it if it continues that.
    pub(crate) fn push(&mut self, run: Run) {
        if run.start >= run.end || run.entry == Entry::HOLE {
            return;
        }
        if let Some(last) = self.runs.last_mut() {
            assert!(last.end <= run.start, "runs are appended in order");
            if last.end == run.start && last.entry.advanced(last.end - last.start) == run.entry {
                last.end = run.end;
                return;
            }
        }
        self.runs.push(run);
    }

    /// Whether the layer's own entries have to be consulted for a part of it.
    pub(crate) fn any_deferred(&self) -> bool {
        self.runs.iter().any(|run| run.entry.kind() == EntryKind::Deferred)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Its runs, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Run> {
        self.runs.iter()
    }

    /// The entry of `sector`, as it is there, if it has an owner.
    pub(crate) fn entry_at(&self, sector: u32) -> Option<Entry> {
        let after = self.runs.partition_point(|run| run.start <= sector);
        let run = self.runs.get(after.checked_sub(1)?)?;
        (sector < run.end).then(|| run.entry.advanced(sector - run.start))
    }

    /// Forgets the owners that are not `wanted`.
    pub(crate) fn retain_layers(&mut self, mut wanted: impl FnMut(LayerNumber) -> bool) {
        self.runs.retain(|run| wanted(run.entry.layer()));
    }

    /// Whether each of the first `sectors` sectors has an owner. Later ones may have one too:
    /// sectors that an upper layer holds beyond the end of a shorter one.
    pub(crate) fn cover(&self, sectors: u32) -> bool {
        let mut end = 0;
        for run in &self.runs {
            if run.start > end {
                break;
            }
            end = run.end;
        }
        end >= sectors
    }

    /// Forgets all owners from `sector` on.
    pub(crate) fn truncate(&mut self, sector: u32) {
        self.runs.retain(|run| run.start < sector);
        if let Some(last) = self.runs.last_mut() {
            last.end = last.end.min(sector);
        }
    }

    /// Merges both lists; where they overlap, `above` owns.
    pub(crate) fn overlay(below: &Self, above: &Self) -> Self {
        let mut merged = Self { runs: Vec::with_capacity(below.runs.len() + above.runs.len()) };
        let mut beneath = below.runs.iter().copied().peekable();
        for upper in &above.runs {
            while let Some(lower) = beneath.peek_mut() {
                if lower.start >= upper.start {
                    break;
                }
                merged.push(Run { end: lower.end.min(upper.start), ..*lower });
                if lower.end > upper.start {
                    break;
                }
                beneath.next();
            }
            merged.push(*upper);
            while let Some(lower) = beneath.peek_mut() {
                if lower.end > upper.end {
                    if lower.start < upper.end {
                        lower.entry = lower.entry.advanced(upper.end - lower.start);
                        lower.start = upper.end;
                    }
                    break;
                }
                beneath.next();
            }
        }
        beneath.for_each(|lower| merged.push(lower));
        merged
    }

    /// The part in the slice that starts at `sector` of the window.
    pub(crate) fn slice_at(&self, sector: u32) -> Slice {
        let end = sector + SLICE_SECTORS;
        let mut builder = SliceBuilder::default();
        for run in &self.runs {
            let start = run.start.max(sector);
            let stop = run.end.min(end);
            if start < stop {
                let entry = run.entry.advanced(start - run.start);
                builder.push(start - sector, stop - sector, entry);
            }
        }
        builder.finish()
    }
}

#[derive(Default)]
struct SliceBuilder {
    starts: Vec<u16>,
    entries: Vec<Entry>,
    end: u32,
}

impl SliceBuilder {
    fn push(&mut self, start: u32, end: u32, entry: Entry) {
        if self.end < start {
            self.push_run(self.end, Entry::HOLE);
        }
        self.push_run(start, entry);
        self.end = end;
    }

    fn push_run(&mut self, start: u32, entry: Entry) {
        if let (Some(last), Some(last_start)) = (self.entries.last(), self.starts.last())
            && last.advanced(start - u32::from(*last_start)) == entry
        {
            return;
        }
        self.starts.push(u16::try_from(start).expect("a slice has 8192 sectors"));
        self.entries.push(entry);
    }

    fn finish(mut self) -> Slice {
        if self.end < SLICE_SECTORS {
            self.push_run(self.end, Entry::HOLE);
        }
        Slice { starts: self.starts.into(), entries: self.entries.into() }
    }
}

/// A slice, ready for look-ups.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Slice {
    starts: Box<[u16]>,
    entries: Box<[Entry]>,
}

impl Slice {
    /// Bytes of memory that it uses, including its allocations.
    pub(crate) fn memory_bytes(&self) -> usize {
        const ALLOCATIONS: usize = 3 * 16;
        size_of::<Self>() + ALLOCATIONS + self.starts.len() * RUN_BYTES
    }

    fn run_end(&self, index: usize) -> u32 {
        self.starts.get(index + 1).map_or(SLICE_SECTORS, |start| u32::from(*start))
    }

    /// Where `len` bytes at `at` of the disk are, if all of them lie in one run of `layer` that
    /// nothing else names.
    #[inline]
    pub(crate) fn own_place(
        &self,
        at: GuestOffset,
        len: u64,
        layer: LayerNumber,
    ) -> Option<HostOffset> {
        let within = at.bytes() & (SLICE_BYTES - 1);
        let sector = u16::try_from(within / SECTOR_BYTES).expect("a slice has 8192 sectors");
        let index = self.starts.partition_point(|start| *start <= sector) - 1;
        let entry = self.entries[index];
        let end = u64::from(self.run_end(index)) * SECTOR_BYTES;
        let is_own = entry.kind() == EntryKind::Data && entry.layer() == layer;
        if !is_own || within + len > end {
            return None;
        }
        entry.host().checked_add(within - u64::from(self.starts[index]) * SECTOR_BYTES)
    }

    /// Appends the extents of `len` bytes from `offset`, which lie in the slice that starts at
    /// `base`. This is the look-up: a binary search, then a walk along the runs.
    pub(crate) fn append_extents(
        &self,
        base: GuestOffset,
        offset: GuestOffset,
        len: u64,
        extents: &mut Vec<Extent>,
    ) {
        let within = offset.checked_since(base).expect("an offset in the slice");
        assert!(within + len <= SLICE_BYTES, "a range in the slice");
        let sector = u16::try_from(within / SECTOR_BYTES).expect("a slice has 8192 sectors");
        let mut index = self.starts.partition_point(|start| *start <= sector) - 1;
        let mut at = within;
        let end = within + len;
        while at < end {
            let start = u64::from(self.starts[index]) * SECTOR_BYTES;
            let stop = (u64::from(self.run_end(index)) * SECTOR_BYTES).min(end);
            let entry = self.entries[index];
            let host = if entry.has_host() {
                entry.host().checked_add(at - start).expect("the field is checked")
            } else {
                HostOffset::ZERO
            };
            let extent = Extent {
                start: base.checked_add(at).expect("within the disk"),
                len: stop - at,
                kind: entry.extent_kind(),
                layer: entry.layer(),
                host,
            };
            Extent::push_joined(extents, extent);
            at = stop;
            index += 1;
        }
    }

    /// The slice in which `above` owns the sectors it covers.
    pub(crate) fn overlaid(&self, above: &Runs) -> Self {
        /// Up to this many runs it is cheaper to insert each than to rebuild the slice.
        const FEW_RUNS: usize = 4;
        if let [first, rest @ ..] = &above.runs[..]
            && rest.len() < FEW_RUNS
        {
            return rest.iter().fold(self.with_run(*first), |slice, run| slice.with_run(*run));
        }
        let mut beneath = Runs::default();
        self.append_runs(0, &mut beneath);
        Runs::overlay(&beneath, above).slice_at(0)
    }

    /// The slice in which `run` owns the sectors it covers.
    fn with_run(&self, run: Run) -> Self {
        let end = run.end.min(SLICE_SECTORS);
        let at = |sector: u32| self.starts.partition_point(|start| u32::from(*start) <= sector) - 1;
        let first = at(run.start);
        let mut builder = SliceBuilder {
            starts: Vec::with_capacity(self.starts.len() + 2),
            entries: Vec::with_capacity(self.entries.len() + 2),
            end: 0,
        };
        builder.starts.extend_from_slice(&self.starts[..first]);
        builder.entries.extend_from_slice(&self.entries[..first]);
        if u32::from(self.starts[first]) < run.start {
            builder.push_run(u32::from(self.starts[first]), self.entries[first]);
        }
        builder.push_run(run.start, run.entry);
        if end < SLICE_SECTORS {
            let last = at(end);
            let skipped = end - u32::from(self.starts[last]);
            builder.push_run(end, self.entries[last].advanced(skipped));
            builder.starts.extend_from_slice(&self.starts[last + 1..]);
            builder.entries.extend_from_slice(&self.entries[last + 1..]);
        }
        Self { starts: builder.starts.into(), entries: builder.entries.into() }
    }

    /// The slice's runs with an owner, shifted to start at `sector` of a window.
    pub(crate) fn append_runs(&self, sector: u32, runs: &mut Runs) {
        for (index, entry) in self.entries.iter().enumerate() {
            let start = sector + u32::from(self.starts[index]);
            runs.push(Run { start, end: sector + self.run_end(index), entry: *entry });
        }
    }

    /// Whether every layer that it names is one that `allows` allows.
    pub(crate) fn names_only(&self, allows: impl Fn(LayerNumber) -> bool) -> bool {
        let is_allowed = |entry: &Entry| entry.kind() == EntryKind::Hole || allows(entry.layer());
        self.entries.iter().all(is_allowed)
    }

    /// The same with other names for the layers; `None` if a layer has none.
    pub(crate) fn renamed(
        &self,
        mut name: impl FnMut(LayerNumber) -> Option<LayerNumber>,
    ) -> Option<Self> {
        let entries: Option<_> =
            self.entries.iter().map(|entry| entry.renamed(&mut name)).collect();
        Some(Self { starts: self.starts.clone(), entries: entries? })
    }

    /// As encoded in a sidecar: the starts, then the entries, little-endian.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.starts.len() * RUN_BYTES);
        for start in &self.starts {
            bytes.extend_from_slice(&start.to_le_bytes());
        }
        for entry in &self.entries {
            bytes.extend_from_slice(&entry.0.to_le_bytes());
        }
        bytes
    }

    /// Decodes these bytes as a slice of the index of a chain of `layers` layers; `None` if they
    /// break an invariant.
    pub(crate) fn decode(bytes: &[u8], layers: usize) -> Option<Self> {
        if bytes.is_empty() || !bytes.len().is_multiple_of(RUN_BYTES) {
            return None;
        }
        let (starts, entries) = bytes.split_at(bytes.len() / RUN_BYTES * 2);
        let starts: Box<[u16]> =
            starts.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect();
        let entries: Option<Box<[Entry]>> = entries
            .as_chunks()
            .0
            .iter()
            .map(|bytes| Entry::from_bits(u64::from_le_bytes(*bytes), layers))
            .collect();
        let rises = starts.windows(2).all(|pair| pair[0] < pair[1]);
        let in_slice = starts.last().is_some_and(|last| u32::from(*last) < SLICE_SECTORS);
        let this = Self { starts, entries: entries? };
        (rises && in_slice && this.starts.first() == Some(&0)).then_some(this)
    }
}

#[cfg(test)]
mod tests;
