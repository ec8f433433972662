//! Reading a layer's tables, once, for their digest and for the slices of the map that they
//! change.
//!
//! Invariants
//! - I1 Memory is bounded: one L2 table, the directories of the tree, a bounded number of slices,
//!   and the sidecar that is being written. A layer whose L1 table claims more than its file holds
//!   gets none: a small file could ask for a sidecar of any size.
//! - I2 Each slice is written once: what is written cannot be read before the sidecar is in place.

use crate::chain::Chain;
use crate::format::{L1Entry, L2Format};
use crate::index::load::{BadNode, base_slice, sectors_of};
use crate::index::sidecar::HEADER_BYTES;
use crate::index::slice::{Runs, SLICE_BITS, SLICE_BYTES, Slice};
use crate::index::{Tree, raw_base_limit};
use crate::layer::{Layer, Tables, l2_part};
use mica_block::{Error, ErrorKind, Result, read_exact};
use mica_map::{Editor, NodeRef, Root, encode_node};
use mica_units::{GuestOffset, GuestRange, HostOffset};
use std::collections::HashMap;
use std::sync::Arc;

/// Slices that the builder keeps from layer to layer, in bytes.
const KEPT_SLICES_BYTES_MAX: usize = 8 << 20;
/// Piece in which L1 tables are read.
const L1_PIECE_BYTES: u64 = 64 << 10;
/// Bytes of the image's first cluster that the digest covers: the header and its extensions.
const DIGEST_HEADER_BYTES: u64 = 64 << 10;
/// Slices of a layer that malformed L1 entries may speak for: 256 GiB of the disk.
const MALFORMED_SLICES_MAX: u64 = 1 << 16;

/// Why building stopped before the last layer.
#[derive(Debug)]
pub(super) enum Stop {
    /// A layer changed while it was read.
    Changed,
    /// A sidecar below could not be read: it was forgotten, and may have to be written first.
    Useless,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// What the builder carries from layer to layer.
pub(super) struct Builder {
    pub(super) editor: Editor,
    slices: HashMap<u64, (Option<NodeRef>, Arc<Slice>)>,
    slices_bytes: usize,
}

impl Builder {
    pub(super) fn new(root: Root) -> Self {
        Self { editor: Editor::new(root), slices: HashMap::new(), slices_bytes: 0 }
    }

    pub(super) fn restart(&mut self, root: Root) {
        *self = Self::new(root);
    }

    /// Slice `number` of the tree so far.
    async fn slice(
        &mut self,
        chain: &Chain,
        tree: &Tree,
        number: u64,
    ) -> std::result::Result<Arc<Slice>, Stop> {
        self.load_path(chain, tree, number).await?;
        let at = self.editor.leaf(number);
        if let Some((kept_at, slice)) = self.slices.get(&number)
            && *kept_at == at
        {
            return Ok(Arc::clone(slice));
        }
        let covered = &chain.layers[..tree.covered()];
        let slice = match at {
            Some(at) => chain.leaf(tree, at).await.map_err(|bad| useless(chain, bad))?,
            None => base_slice(raw_base_limit(covered), number),
        };
        let slice = Arc::new(slice);
        self.keep(number, at, Arc::clone(&slice));
        Ok(slice)
    }

    /// Feeds the editor the directories on the way to slice `number`.
    async fn load_path(
        &mut self,
        chain: &Chain,
        tree: &Tree,
        number: u64,
    ) -> std::result::Result<(), Stop> {
        while let Some((slot, at)) = self.editor.missing(number) {
            let directory = chain.directory(tree, at).await.map_err(|bad| useless(chain, bad))?;
            self.editor.feed(slot, (*directory).clone());
        }
        Ok(())
    }

    fn keep(&mut self, number: u64, at: Option<NodeRef>, slice: Arc<Slice>) {
        if self.slices_bytes > KEPT_SLICES_BYTES_MAX {
            self.slices.clear();
            self.slices_bytes = 0;
        }
        self.slices_bytes += slice.memory_bytes();
        self.slices.insert(number, (at, slice));
    }
}

fn useless(chain: &Chain, bad: BadNode) -> Stop {
    chain.forget_sidecar(bad);
    Stop::Useless
}

/// What a layer's tables are read for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ScanFor {
    /// To see whether they are the ones that were sealed.
    Digest,
    /// To write the slices that they change, as well.
    Map,
}

/// One pass over a layer's tables.
pub(super) struct Scan {
    /// The sidecar so far: room for the header, then the slices that changed.
    pub(super) content: Vec<u8>,
    pub(super) digest: u64,
}

impl Scan {
    /// Reads the layer's tables; unless only the digest is wanted, writes the slices that the
    /// layer changes and enters them in the builder's tree.
    pub(super) async fn read(
        chain: &Chain,
        layer: &Layer,
        builder: &mut Builder,
        tree: &Tree,
        purpose: ScanFor,
    ) -> std::result::Result<Self, Stop> {
        let mut scan = Self { content: vec![0; HEADER_BYTES], digest: 0 };
        if purpose == ScanFor::Map {
            scan.cut_beyond(chain, layer, builder, tree).await?;
        }
        let Some(tables) = &layer.tables else { return Ok(scan) };
        let mut sum = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
        let cluster_len = usize::try_from(tables.l2.cluster_bits.bytes()).expect("at most 2 MiB");
        let header_bytes = tables.l2.cluster_bits.bytes().min(DIGEST_HEADER_BYTES);
        let header_bytes = usize::try_from(header_bytes).expect("at most 64 KiB");
        sum.update(&explained(layer, HostOffset::ZERO, header_bytes).await?);
        let (l1_at, l1_entries) = tables.l1_place.get();
        let l1_bytes = u64::from(l1_entries) * L1Entry::BYTES as u64;
        let mut pending = PendingSlice::default();
        let mut claims = Claims::new(layer)?;
        let mut done = 0;
        while done < l1_bytes {
            let piece = usize::try_from((l1_bytes - done).min(L1_PIECE_BYTES)).expect("64 KiB");
            let l1_offset = HostOffset::new(l1_at.bytes().saturating_add(done));
            let l1 = explained(layer, l1_offset, piece).await?;
            sum.update(&l1);
            let first = done / L1Entry::BYTES as u64;
            for (l1_index, bytes) in (first..).zip(l1.as_chunks::<{ L1Entry::BYTES }>().0) {
                let entry = L1Entry(u64::from_be_bytes(*bytes));
                let Some(part) = table_part(tables.l2, l1_index, layer.len()) else { continue };
                let table = match entry.decode(tables.l2.cluster_bits) {
                    Ok(Some(at)) if claims.is_in_file(at) => {
                        claims.table(tables.l2)?;
                        let table = explained(layer, at, cluster_len).await?;
                        sum.update(&table);
                        Some(table)
                    }
                    // What lies beyond the end of the file reads as zeros and so names nothing.
                    Ok(_) => continue,
                    Err(_) => {
                        claims.malformed(part)?;
                        None
                    }
                };
                if purpose == ScanFor::Digest {
                    continue;
                }
                for number in slices_of(part) {
                    let end = pending.gather((layer, tables), part, table.as_deref(), number);
                    while let Some((number, own)) = pending.take_complete(end) {
                        scan.add(chain, builder, tree, (layer, number, own)).await?;
                    }
                }
            }
            done += piece as u64;
        }
        while let Some((number, own)) = pending.take_complete(GuestOffset::new(u64::MAX)) {
            scan.add(chain, builder, tree, (layer, number, own)).await?;
        }
        if purpose == ScanFor::Map {
            scan.cut_within(chain, layer, builder, tree).await?;
        }
        scan.digest = sum.finalize();
        Ok(scan)
    }

    /// A layer that ends before the one beneath hides what lies beyond its end: here the slices
    /// that lie there whole.
    async fn cut_beyond(
        &mut self,
        chain: &Chain,
        layer: &Layer,
        builder: &mut Builder,
        tree: &Tree,
    ) -> std::result::Result<(), Stop> {
        if !cuts(chain, layer) {
            return Ok(());
        }
        let first_beyond = layer.len().div_ceil(SLICE_BYTES);
        builder.load_path(chain, tree, first_beyond).await?;
        builder.editor.truncate(first_beyond);
        builder.slices.retain(|number, _| *number < first_beyond);
        Ok(())
    }

    /// And here the slice in which the layer ends. It is the last one, so that if the layer wrote
    /// it already the builder still keeps it: a sidecar that is not in its place cannot be read.
    async fn cut_within(
        &mut self,
        chain: &Chain,
        layer: &Layer,
        builder: &mut Builder,
        tree: &Tree,
    ) -> std::result::Result<(), Stop> {
        if !cuts(chain, layer) || layer.len().is_multiple_of(SLICE_BYTES) {
            return Ok(());
        }
        self.add(chain, builder, tree, (layer, layer.len() >> SLICE_BITS, Runs::default())).await
    }

    /// Writes slice `number` with the layer's `own` runs laid over it, if that changes it.
    async fn add(
        &mut self,
        chain: &Chain,
        builder: &mut Builder,
        tree: &Tree,
        (layer, number, own): (&Layer, u64, Runs),
    ) -> std::result::Result<(), Stop> {
        let old = builder.slice(chain, tree, number).await?;
        let mut below = Runs::default();
        old.append_runs(0, &mut below);
        below.truncate(sectors_of(layer.len().saturating_sub(number << SLICE_BITS)));
        let new = Arc::new(Runs::overlay(&below, &own).slice_at(0));
        if *new == *old {
            return Ok(());
        }
        let at = NodeRef::new(layer.number.as_u16(), self.content.len() as u64);
        let at = at.expect("a sidecar is smaller than 256 TiB");
        encode_node(&mut self.content, at, &new.encode());
        builder.editor.grow_for(number);
        builder.load_path(chain, tree, number).await?;
        builder.editor.set(number, Some(at));
        builder.keep(number, Some(at), new);
        Ok(())
    }
}

async fn explained(layer: &Layer, offset: HostOffset, len: usize) -> Result<mica_rt::Buf> {
    read_exact(&*layer.store, offset, len).await.map_err(|error| layer.explain(error))
}

/// The bytes of the disk that the table of L1 entry `l1_index` speaks for.
fn table_part(l2: L2Format, l1_index: u64, len: u64) -> Option<GuestRange> {
    let start = l1_index.checked_mul(1 << l2.table_bits())?;
    let end = start.checked_add(1 << l2.table_bits())?.min(len);
    let range = GuestRange::between(GuestOffset::new(start), GuestOffset::new(end))?;
    (!range.is_empty()).then_some(range)
}

/// Whether the layer ends before the one beneath.
fn cuts(chain: &Chain, layer: &Layer) -> bool {
    let number = layer.number.index();
    number > 0 && layer.len() < chain.layers[number - 1].len()
}

/// The slices that `part` of the disk, which is not empty, touches.
fn slices_of(part: GuestRange) -> std::ops::RangeInclusive<u64> {
    part.start().bytes() >> SLICE_BITS..=(part.end().bytes() - 1) >> SLICE_BITS
}

/// What a layer's L1 table has claimed so far (I1). No writer names a table twice in it.
struct Claims<'a> {
    layer: &'a Layer,
    file_bytes: u64,
    table_bytes: u64,
    malformed_slices: u64,
}

impl<'a> Claims<'a> {
    fn new(layer: &'a Layer) -> Result<Self> {
        let file_bytes = layer.store.len().map_err(|error| layer.explain(error))?;
        Ok(Self { layer, file_bytes, table_bytes: 0, malformed_slices: 0 })
    }

    fn is_in_file(&self, table: HostOffset) -> bool {
        table.bytes() < self.file_bytes
    }

    fn table(&mut self, l2: L2Format) -> Result<()> {
        let cluster_bytes = l2.cluster_bits.bytes();
        self.table_bytes = self.table_bytes.saturating_add(cluster_bytes);
        if self.table_bytes <= self.file_bytes.saturating_add(cluster_bytes) {
            return Ok(());
        }
        Err(self.refused("its L1 table names more L2 tables than its file holds"))
    }

    fn malformed(&mut self, part: GuestRange) -> Result<()> {
        let slices = slices_of(part);
        self.malformed_slices += slices.end() - slices.start() + 1;
        if self.malformed_slices <= MALFORMED_SLICES_MAX {
            return Ok(());
        }
        Err(self.refused("its L1 table is malformed for more than 256 GiB of the disk"))
    }

    fn refused(&self, why: &str) -> Error {
        let context = format!("{why}: it gets no index, and `mica check` says more");
        self.layer.explain(Error::new(ErrorKind::Corrupt, context))
    }
}

/// Slices whose runs are being gathered: small tables speak for parts of one.
#[derive(Default)]
struct PendingSlice {
    slices: std::collections::VecDeque<(u64, Runs)>,
}

impl PendingSlice {
    /// Takes in what `layer` says of the part of slice `number` that its `table`, which speaks for
    /// `part`, covers; where there is no table, as its L1 entry is malformed, runs that fail when
    /// they are read. Gives up to where the disk is known now.
    fn gather(
        &mut self,
        (layer, tables): (&Layer, &Tables),
        part: GuestRange,
        table: Option<&[u8]>,
        number: u64,
    ) -> GuestOffset {
        let window = GuestOffset::new(number << SLICE_BITS);
        let whole = GuestRange::new(window, SLICE_BYTES).expect("within the disk");
        let part = whole.intersect(part).expect("the table touches the slice");
        let runs = self.runs(number);
        match table {
            Some(table) => {
                let bytes = l2_part(tables.l2, table, part);
                layer.append_l2_runs(tables, bytes, part, window, runs);
            }
            None => runs.push(layer.deferred_run(part, window)),
        }
        part.end()
    }

    /// The runs of slice `number`, which is the last one asked for or a later one.
    fn runs(&mut self, number: u64) -> &mut Runs {
        if self.slices.back().is_none_or(|(last, _)| *last != number) {
            self.slices.push_back((number, Runs::default()));
        }
        &mut self.slices.back_mut().expect("pushed above").1
    }

    /// The next slice that ends at or before `end`, if it has runs.
    fn take_complete(&mut self, end: GuestOffset) -> Option<(u64, Runs)> {
        while let Some((number, _)) = self.slices.front() {
            if (number + 1) << SLICE_BITS > end.bytes() {
                return None;
            }
            let (number, runs) = self.slices.pop_front()?;
            if !runs.is_empty() {
                return Some((number, runs));
            }
        }
        None
    }
}
