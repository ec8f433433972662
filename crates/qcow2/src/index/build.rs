//! Writing the sidecars: layer by layer from the base, each from the tree beneath and what the
//! layer itself says.
//!
//! Invariants
//! - I1 A sidecar is written only for a layer whose file was the same before and after it was read.
//! - I2 Memory is bounded: one L2 table, the directories of the tree, a bounded number of slices,
//!   and the sidecar that is being written. A layer whose L1 table claims more than its file holds
//!   gets none: a small file could ask for a sidecar of any size.
//! - I3 Whoever reads meanwhile is undisturbed: a longer tree is published in one step.

use crate::chain::{Chain, IndexProgress};
use crate::format::{L1Entry, L2Format};
use crate::index::load::{BadNode, base_slice, sectors_of};
use crate::index::sidecar::{HEADER_BYTES, Header};
use crate::index::slice::{Runs, SLICE_BITS, SLICE_BYTES, Slice};
use crate::index::{Tree, raw_base_limit};
use crate::layer::{Layer, Tables, l2_part};
use mica_block::{Error, ErrorKind, Result, Store, read_exact};
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

/// Rounds of a build that finds sidecars on its way that cannot be read; each writes them anew or
/// tries once more.
const ROUNDS_MAX: usize = 16;
/// Slices of a layer that malformed L1 entries may speak for: 256 GiB of the disk.
const MALFORMED_SLICES_MAX: u64 = 1 << 16;
/// Largest sidecar that is read whole to be sealed again; a larger one is made anew.
const RESEALED_BYTES_MAX: u64 = 1 << 30;

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
    /// A sidecar below could not be read: it was forgotten, and may have to be written first.
    Useless,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
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
        let mut built = 0;
        for _ in 0..ROUNDS_MAX {
            match self.build_round(progress, &mut built).await {
                Ok(()) => return Ok(built),
                Err(Stop::Useless) => {}
                Err(Stop::Changed) => {
                    tracing::warn!("a layer changed while it was indexed: left for later");
                    return Ok(built);
                }
                Err(Stop::Failed(error)) => return Err(error),
            }
        }
        let context = "sidecars cannot be read back, though they were written anew";
        Err(Error::new(ErrorKind::Io, context))
    }

    /// Extends the tree as far as it goes, and publishes it.
    async fn build_round(
        &self,
        progress: &mut dyn FnMut(IndexProgress) -> ControlFlow<()>,
        built: &mut usize,
    ) -> std::result::Result<(), Stop> {
        let mut tree = (*self.index.tree()).clone();
        if tree.id == 0 {
            // A damaged sidecar was forgotten, or none was adopted: the seals say where to start.
            self.adopt_sidecars().await;
            tree = (*self.index.tree()).clone();
        }
        // What is written anew below must not be taken for what lay in its place before.
        tree.generation = self.index.next_generation();
        let mut builder = Builder::new(tree.root());
        let layers = self.frozen().len();
        let first = tree.covered();
        let mut outcome = Ok(());
        for (number, layer) in self.frozen().iter().enumerate().skip(first) {
            if progress(IndexProgress { layer: number, layers }).is_break() {
                break;
            }
            outcome = self.extend_tree(&mut builder, &mut tree, layer).await;
            if outcome.is_err() {
                break;
            }
            *built += 1;
            if (tree.covered() - first).is_multiple_of(PUBLISH_EVERY) {
                self.index.publish(tree.clone());
            }
        }
        let layer = tree.covered();
        if layer > first {
            self.index.publish(tree);
        }
        let _ = progress(IndexProgress { layer, layers });
        outcome
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
            if header.digest == found.digest
                && let Some(content) = self.resealed(layer, &header, &*store).await
            {
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
    /// `None` if the content is not what was sealed, or cannot be read.
    async fn resealed(&self, layer: &Layer, header: &Header, store: &dyn Store) -> Option<Vec<u8>> {
        // The length may be an enemy's word: a file can be sparse.
        if header.len > RESEALED_BYTES_MAX {
            return None;
        }
        let len = usize::try_from(header.len).ok()?;
        let mut content = read_exact(store, HostOffset::ZERO, len).await.ok()?.to_vec();
        let nodes = content.get(HEADER_BYTES..)?;
        let id = Header::id_of(header.parent, header.digest, layer.len, header.root, nodes);
        if id != header.id {
            return None;
        }
        let sealed_ns = self.images.now_ns();
        let header = Header { identity: layer.identity, sealed_ns, ..*header };
        content[..HEADER_BYTES].copy_from_slice(&header.encode());
        Some(content)
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
    Stop::Useless
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
        let cluster_len = usize::try_from(tables.l2.cluster_bits.bytes()).expect("at most 2 MiB");
        let header_bytes = tables.l2.cluster_bits.bytes().min(DIGEST_HEADER_BYTES);
        let header_bytes = usize::try_from(header_bytes).expect("at most 64 KiB");
        sum.update(&explained(layer, HostOffset::ZERO, header_bytes).await?);
        let l1_bytes = u64::from(tables.l1_entries) * L1Entry::BYTES as u64;
        let mut pending = PendingSlice::default();
        let mut claims = Claims::new(layer)?;
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

    /// A layer that ends before the one beneath hides what lies beyond its end: here the slices that
    /// lie there whole.
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
        let first_beyond = layer.len.div_ceil(SLICE_BYTES);
        builder.load_path(chain, tree, first_beyond).await?;
        builder.editor.truncate(first_beyond);
        builder.slices.retain(|number, _| *number < first_beyond);
        Ok(())
    }

    /// And here the slice in which the layer ends. It is the last one, so that if the layer wrote it
    /// already the builder still keeps it: a sidecar that is not in its place cannot be read.
    async fn cut_within(
        &mut self,
        chain: &Chain,
        layer: &Layer,
        builder: &mut Builder,
        tree: &Tree,
    ) -> std::result::Result<(), Stop> {
        if !cuts(chain, layer) || layer.len.is_multiple_of(SLICE_BYTES) {
            return Ok(());
        }
        self.add(chain, builder, tree, (layer, layer.len >> SLICE_BITS, Runs::default())).await
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

/// Whether the layer ends before the one beneath.
fn cuts(chain: &Chain, layer: &Layer) -> bool {
    let number = layer.number.index();
    number > 0 && layer.len < chain.layers[number - 1].len
}

/// The slices that `part` of the disk, which is not empty, touches.
fn slices_of(part: GuestRange) -> std::ops::RangeInclusive<u64> {
    part.start().bytes() >> SLICE_BITS..=(part.end().bytes() - 1) >> SLICE_BITS
}

/// What a layer's L1 table has claimed so far (I2). No writer names a table twice in it.
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
