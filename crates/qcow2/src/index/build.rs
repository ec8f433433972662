//! Writing the sidecars: layer by layer from the base, each from the tree beneath and what the
//! layer itself says.
//!
//! Invariants
//! - I1 A sidecar is written only for a layer whose file was the same before and after it was read.
//! - I2 Memory is bounded: one L2 table, the directories of the tree, and a bounded number of
//!   slices.
//! - I3 Whoever reads meanwhile is undisturbed: a longer tree is published in one step.

use crate::chain::{Chain, IndexProgress};
use crate::format::{L1Entry, L2Format};
use crate::index::load::{BadNode, base_slice, sectors_of};
use crate::index::sidecar::{HEADER_BYTES, Header};
use crate::index::slice::{Runs, SLICE_BITS, SLICE_BYTES, Slice};
use crate::index::{Tree, raw_base_limit};
use crate::layer::{Layer, Tables, l2_part};
use mica_block::{Result, Store, read_exact};
use mica_map::{Editor, NodeRef, Root, encode_node};
use mica_units::{GuestOffset, GuestRange, HostOffset};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;

/// Layers after which a longer tree is published while more are built.
const PUBLISH_EVERY: usize = 64;
/// Slices that the builder keeps from layer to layer, in bytes.
const KEPT_SLICES_BYTES_MAX: usize = 8 << 20;
/// Piece in which L1 tables are read.
const L1_PIECE_BYTES: u64 = 64 << 10;
/// Bytes of the image's first cluster that the digest covers: the header and its extensions.
const DIGEST_HEADER_BYTES: u64 = 64 << 10;

/// What a look at the seals found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SealState {
    /// Sealed, and the layer is unchanged.
    Sealed,
    /// There is no sidecar, or one of another version or layer.
    Missing,
    /// The sidecar is of another state of the layer, or of another chain beneath.
    Stale,
    /// Timestamps prove nothing: the layer was moved, copied, or changed about when it was sealed.
    Unproven,
}

/// Why building stopped before the last layer.
#[derive(Debug)]
enum Stop {
    /// A layer changed while it was read.
    Changed,
    Failed(mica_block::Error),
}

impl From<mica_block::Error> for Stop {
    fn from(error: mica_block::Error) -> Self {
        Self::Failed(error)
    }
}

impl Chain {
    /// Reads the seals from the base up and takes the tree as far as they hold without reading a
    /// layer. Costs one small read for each layer.
    pub(crate) async fn adopt_sidecars(&self) {
        let generation = self.index.next_generation();
        let mut tree = Tree { generation, ..Tree::default() };
        for layer in self.frozen() {
            if layer.tables.is_none() {
                tree.push_raw_base(layer);
                continue;
            }
            let Some((header, store)) = self.read_seal(layer).await else { break };
            if self.seal_state(layer, &header, tree.id) != SealState::Sealed {
                break;
            }
            tree.push(header.root, header.id, Some(store));
        }
        self.index.publish(tree);
    }

    /// The state of each frozen layer's seal, from the base.
    ///
    /// # Errors
    /// None: what cannot be read counts as missing.
    pub async fn seal_states(&self) -> Vec<(SealState, u64)> {
        let mut states = Vec::new();
        let mut parent = 0;
        for layer in self.frozen() {
            if layer.tables.is_none() {
                parent = raw_base_id(layer);
                states.push((SealState::Sealed, 0));
                continue;
            }
            let (state, len) = match self.read_seal(layer).await {
                Some((header, _)) => {
                    let state = self.seal_state(layer, &header, parent);
                    parent = header.id;
                    (state, header.len)
                }
                None => {
                    parent = 0;
                    (SealState::Missing, 0)
                }
            };
            states.push((state, len));
        }
        states
    }

    /// The seal of a layer's sidecar; `None` too where a node of it was found to be bad.
    async fn read_seal(&self, layer: &Layer) -> Option<(Header, Arc<dyn Store>)> {
        if self.index.is_distrusted(layer.number.as_u16()) {
            return None;
        }
        let store = self.images.open_sidecar(&layer.path).ok().flatten()?;
        let bytes = read_exact(&*store, HostOffset::ZERO, HEADER_BYTES).await.ok()?;
        let header = Header::decode(&bytes)?;
        // A file that was cut loses nodes: its length is part of what was sealed.
        (store.len().ok()? == header.len).then_some((header, store))
    }

    fn seal_state(&self, layer: &Layer, header: &Header, parent: u64) -> SealState {
        let is_base = layer.number.index() == 0;
        let fits = header.layer == layer.number.as_u16()
            && header.layer_len == layer.len
            && header.parent == parent
            && (is_base || parent != 0);
        if !fits {
            SealState::Stale
        } else if header.fits_unread(&layer.identity) {
            SealState::Sealed
        } else if header.identity.len == layer.identity.len {
            SealState::Unproven
        } else {
            SealState::Stale
        }
    }

    /// Brings the sidecars of all frozen layers up to date; how many it wrote. Stops between two
    /// layers when `progress` breaks.
    ///
    /// # Errors
    /// If a layer cannot be read or a sidecar cannot be written. What was written before stays
    /// good.
    pub async fn build_index(
        &self,
        progress: &mut dyn FnMut(IndexProgress) -> ControlFlow<()>,
    ) -> Result<usize> {
        let mut tree = (*self.index.tree()).clone();
        if tree.id == 0 {
            // A damaged sidecar was forgotten, or none was adopted: the seals say where to start.
            self.adopt_sidecars().await;
            tree = (*self.index.tree()).clone();
        }
        // What is written anew below must not be taken for what lay in its place before.
        tree.generation = self.index.next_generation();
        let mut builder = Builder::new(tree.root());
        let total = self.frozen().len();
        let first = tree.covered();
        let mut built = 0;
        for (index, layer) in self.frozen().iter().enumerate().skip(first) {
            if progress(IndexProgress { layer: index, layers: total }).is_break() {
                break;
            }
            match self.extend_tree(&mut builder, &mut tree, layer).await {
                Ok(()) => built += 1,
                Err(Stop::Changed) => {
                    let path = layer.path.display();
                    tracing::warn!(layer = %path, "changed while it was indexed: left for later");
                    break;
                }
                Err(Stop::Failed(error)) => {
                    self.index.publish(tree);
                    return Err(error);
                }
            }
            if built % PUBLISH_EVERY == 0 {
                self.index.publish(tree.clone());
            }
        }
        if built > 0 {
            self.index.publish(tree);
        }
        let _ = progress(IndexProgress { layer: first + built, layers: total });
        Ok(built)
    }

    /// Adds `layer` to the tree: by its sidecar if its content proves it, else by a new one.
    async fn extend_tree(
        &self,
        builder: &mut Builder,
        tree: &mut Tree,
        layer: &Arc<Layer>,
    ) -> std::result::Result<(), Stop> {
        if layer.tables.is_none() {
            tree.push_raw_base(layer);
            return Ok(());
        }
        if let Some((header, store)) = self.read_seal(layer).await
            && let state = self.seal_state(layer, &header, tree.id)
            && matches!(state, SealState::Unproven | SealState::Sealed)
        {
            if state == SealState::Sealed {
                builder.restart(header.root);
                tree.push(header.root, header.id, Some(store));
                return Ok(());
            }
            let found = Scan::read(self, layer, builder, tree, ScanFor::Digest).await?;
            self.require_unchanged(layer)?;
            if header.digest == found.digest {
                let content = self.resealed(layer, &header, &*store).await?;
                self.images.write_sidecar(&layer.path, &content)?;
                builder.restart(header.root);
                return self.adopt_written(layer, tree, &header).await;
            }
        }
        let scan = Scan::read(self, layer, builder, tree, ScanFor::Map).await?;
        self.require_unchanged(layer)?;
        self.write_sidecar(builder, tree, layer, scan).await
    }

    async fn write_sidecar(
        &self,
        builder: &mut Builder,
        tree: &mut Tree,
        layer: &Layer,
        scan: Scan,
    ) -> std::result::Result<(), Stop> {
        let mut content = scan.content;
        let number = layer.number.as_u16();
        let root = builder.editor.write(number, &mut content);
        let nodes = &content[HEADER_BYTES..];
        let header = Header {
            layer: number,
            layer_len: layer.len,
            identity: layer.identity,
            sealed_ns: self.images.now_ns(),
            digest: scan.digest,
            id: Header::id_of(tree.id, scan.digest, layer.len, root, nodes),
            parent: tree.id,
            root,
            len: content.len() as u64,
        };
        content[..HEADER_BYTES].copy_from_slice(&header.encode());
        self.images.write_sidecar(&layer.path, &content)?;
        self.adopt_written(layer, tree, &header).await
    }

    /// Takes a sidecar that was just written into the tree: from the file, as everyone else will.
    async fn adopt_written(
        &self,
        layer: &Layer,
        tree: &mut Tree,
        written: &Header,
    ) -> std::result::Result<(), Stop> {
        self.index.trust(layer.number.as_u16());
        // Another process that serves the same layers may have put its own there meanwhile.
        let seal = self.read_seal(layer).await.filter(|(header, _)| header.id == written.id);
        let (header, store) = seal.ok_or(Stop::Changed)?;
        tree.push(header.root, header.id, Some(store));
        Ok(())
    }

    /// The sidecar's content under a new seal: the layer proved to be the same by what is in it.
    async fn resealed(&self, layer: &Layer, header: &Header, store: &dyn Store) -> Result<Vec<u8>> {
        let len = usize::try_from(header.len).unwrap_or(usize::MAX);
        let mut content = read_exact(store, HostOffset::ZERO, len).await?.to_vec();
        let sealed_ns = self.images.now_ns();
        let header = Header { identity: layer.identity, sealed_ns, ..*header };
        content[..HEADER_BYTES].copy_from_slice(&header.encode());
        Ok(content)
    }

    /// I1: what was read is of the state that the seal will name.
    fn require_unchanged(&self, layer: &Layer) -> std::result::Result<(), Stop> {
        let now = self.images.identify(&layer.path)?;
        if now == layer.identity { Ok(()) } else { Err(Stop::Changed) }
    }
}

impl Tree {
    /// A raw base needs no sidecar: its map is its length.
    fn push_raw_base(&mut self, base: &Layer) {
        self.push(Root::default(), raw_base_id(base), None);
    }
}

fn raw_base_id(base: &Layer) -> u64 {
    Header::id_of(0, 0, base.len, Root::default(), &[])
}

/// What the builder carries from layer to layer.
struct Builder {
    editor: Editor,
    slices: HashMap<u64, (Option<NodeRef>, Arc<Slice>)>,
    slices_bytes: usize,
}

impl Builder {
    fn new(root: Root) -> Self {
        Self { editor: Editor::new(root), slices: HashMap::new(), slices_bytes: 0 }
    }

    fn restart(&mut self, root: Root) {
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
    Stop::Failed(mica_block::Error::new(
        mica_block::ErrorKind::Corrupt,
        "the index is damaged: build it again",
    ))
}

/// What a layer's tables are read for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ScanFor {
    /// To see whether they are the ones that were sealed.
    Digest,
    /// To write the slices that they change, as well.
    Map,
}

/// One pass over a layer's tables.
struct Scan {
    /// The sidecar so far: room for the header, then the slices that changed.
    content: Vec<u8>,
    digest: u64,
}

impl Scan {
    /// Reads the layer's tables; unless only the digest is wanted, writes the slices that the layer
    /// changes and enters them in the builder's tree.
    async fn read(
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
        let header_bytes = tables.l2.cluster_bits.bytes().min(DIGEST_HEADER_BYTES);
        let header_bytes = usize::try_from(header_bytes).expect("at most 64 KiB");
        sum.update(&explained(layer, HostOffset::ZERO, header_bytes).await?);
        let l1_bytes = u64::from(tables.l1_entries) * L1Entry::BYTES as u64;
        let mut pending = PendingSlice::default();
        let mut done = 0;
        while done < l1_bytes {
            let piece = usize::try_from((l1_bytes - done).min(L1_PIECE_BYTES)).expect("64 KiB");
            let l1_offset = HostOffset::new(tables.l1_offset.bytes().saturating_add(done));
            let l1 = explained(layer, l1_offset, piece).await?;
            sum.update(&l1);
            let first = done / L1Entry::BYTES as u64;
            for (l1_index, bytes) in (first..).zip(l1.as_chunks::<{ L1Entry::BYTES }>().0) {
                let entry = L1Entry(u64::from_be_bytes(*bytes));
                let Some(part) = table_part(tables.l2, l1_index, layer.len) else { continue };
                let read = L2Read { layer, tables, entry, part };
                let table = read.table(&mut sum).await?;
                if purpose == ScanFor::Digest {
                    continue;
                }
                read.each_slice(table.as_deref(), &mut pending);
                while let Some((number, own)) = pending.take_complete(part.end()) {
                    scan.add(chain, builder, tree, (layer, number, own)).await?;
                }
            }
            done += piece as u64;
        }
        while let Some((number, own)) = pending.take_complete(GuestOffset::new(u64::MAX)) {
            scan.add(chain, builder, tree, (layer, number, own)).await?;
        }
        scan.digest = sum.finalize();
        Ok(scan)
    }

    /// A layer that ends before the one beneath hides what lies beyond its end.
    async fn cut_beyond(
        &mut self,
        chain: &Chain,
        layer: &Layer,
        builder: &mut Builder,
        tree: &Tree,
    ) -> std::result::Result<(), Stop> {
        let number = layer.number.index();
        if number == 0 || chain.layers[number - 1].len <= layer.len {
            return Ok(());
        }
        let first_beyond = layer.len.div_ceil(SLICE_BYTES);
        let boundary = layer.len >> SLICE_BITS;
        builder.load_path(chain, tree, first_beyond).await?;
        builder.editor.truncate(first_beyond);
        builder.slices.retain(|number, _| *number < boundary);
        if boundary < first_beyond {
            self.add(chain, builder, tree, (layer, boundary, Runs::default())).await?;
        }
        Ok(())
    }

    /// Writes slice `number` with the layer's `own` runs laid over it, if that changes it.
    async fn add(
        &mut self,
        chain: &Chain,
        builder: &mut Builder,
        tree: &Tree,
        (layer, number, own): (&Layer, u64, Runs),
    ) -> std::result::Result<(), Stop> {
        // The layer may have written this slice already, when it cut what lies beyond its end.
        let old = builder.slice(chain, tree, number).await?;
        let mut below = Runs::default();
        old.append_runs(0, &mut below);
        below.truncate(sectors_of(layer.len.saturating_sub(number << SLICE_BITS)));
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

struct L2Read<'a> {
    layer: &'a Layer,
    tables: &'a Tables,
    entry: L1Entry,
    part: GuestRange,
}

impl L2Read<'_> {
    /// The table, if there is one that can be read at all.
    async fn table(&self, sum: &mut crc_fast::Digest) -> Result<Option<mica_rt::Buf>> {
        let Ok(Some(at)) = self.entry.decode(self.tables.l2.cluster_bits) else { return Ok(None) };
        let len = usize::try_from(self.tables.l2.cluster_bits.bytes()).expect("at most 2 MiB");
        let table = explained(self.layer, at, len).await?;
        sum.update(&table);
        Ok(Some(table))
    }

    /// Gives the layer's runs of each slice that the table touches.
    fn each_slice(&self, table: Option<&[u8]>, pending: &mut PendingSlice) {
        let broken = self.entry.decode(self.tables.l2.cluster_bits).is_err();
        if table.is_none() && !broken {
            return;
        }
        let first = self.part.start().bytes() >> SLICE_BITS;
        let last = (self.part.end().bytes() - 1) >> SLICE_BITS;
        for number in first..=last {
            let window = GuestOffset::new(number << SLICE_BITS);
            let whole = GuestRange::new(window, SLICE_BYTES).expect("within the disk");
            let Some(part) = whole.intersect(self.part) else { continue };
            let runs = pending.runs(number);
            match table {
                Some(table) => {
                    let bytes = l2_part(self.tables.l2, table, part);
                    self.layer.append_l2_runs(self.tables, bytes, part, window, runs);
                }
                None => runs.push(self.layer.deferred_run(part, window)),
            }
        }
    }
}

/// Slices whose runs are being gathered: small tables speak for parts of one.
#[derive(Default)]
struct PendingSlice {
    slices: std::collections::VecDeque<(u64, Runs)>,
}

impl PendingSlice {
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
