//! The slices of the map that a layer changes, from one pass over its tables.
//!
//! Invariants
//! - I1 Memory is bounded: one L2 table, the directories of the tree, a bounded number of slices,
//!   and the sidecar that is being written. A layer whose L1 table claims more than its file holds
//!   gets none: otherwise a small file could demand a sidecar of any size.
//! - I2 Each slice is written once: a written slice cannot be read before the sidecar is staged.

use crate::index::load::{BadNode, sectors_of};
use crate::index::node_ref::NodeRef;
use crate::index::sidecar::HEADER_BYTES;
use crate::index::slice::{Runs, SLICE_BITS, SLICE_BYTES, Slice};
use crate::index::tables::{TableSource, TablesDigest, slices_of};
use crate::index::{Root, Tree};
use crate::layer::{Layer, Tables, l2_part};
use crate::map::Map;
use mica_block::Error;
use mica_map::{Editor, encode_node};
use mica_units::{GuestOffset, GuestRange, LayerNumber};
use std::collections::HashMap;
use std::sync::Arc;

/// Directories that the builder keeps from layer to layer: a few MiB.
const KEPT_DIRECTORIES_MAX: usize = 16 << 10;
/// Slices that the builder keeps from layer to layer, in bytes.
const KEPT_SLICES_BYTES_MAX: usize = 8 << 20;

/// Why building stopped before the last layer.
#[derive(Debug)]
pub(super) enum Stop {
    /// A layer changed while it was read.
    Changed,
    /// A sidecar below could not be read: it was forgotten, and may have to be rewritten first.
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
    pub(super) editor: Editor<NodeRef>,
    slices: HashMap<u64, (Option<NodeRef>, Arc<Slice>)>,
    slices_bytes: usize,
}

impl Builder {
    pub(super) fn new(root: Root) -> Self {
        let editor = Editor::new(root, KEPT_DIRECTORIES_MAX);
        Self { editor, slices: HashMap::new(), slices_bytes: 0 }
    }

    pub(super) fn restart(&mut self, root: Root) {
        *self = Self::new(root);
    }

    /// Slice `number` of the tree so far.
    async fn slice(
        &mut self,
        map: &Map,
        tree: &Tree,
        number: u64,
    ) -> std::result::Result<Arc<Slice>, Stop> {
        self.load_path(map, tree, number).await?;
        let at = self.editor.leaf(number);
        if let Some((kept_at, slice)) = self.slices.get(&number)
            && *kept_at == at
        {
            return Ok(Arc::clone(slice));
        }
        let slice = match at {
            Some(at) => map.leaf(tree, at).await.map_err(|bad| useless(map, bad))?,
            None => map.base_slice(tree, number),
        };
        let slice = Arc::new(slice);
        self.keep(number, at, Arc::clone(&slice));
        Ok(slice)
    }

    /// Feeds the editor the directories on the way to slice `number`.
    async fn load_path(
        &mut self,
        map: &Map,
        tree: &Tree,
        number: u64,
    ) -> std::result::Result<(), Stop> {
        while let Some((slot, at)) = self.editor.missing(number) {
            let directory = map.directory(tree, at).await.map_err(|bad| useless(map, bad))?;
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

fn useless(map: &Map, bad: BadNode) -> Stop {
    map.forget_sidecar(bad);
    Stop::Useless
}

/// One pass over a layer's tables.
pub(super) struct Scan {
    /// The sidecar so far: room for the header, then the slices that changed.
    pub(super) content: Vec<u8>,
    pub(super) digest: TablesDigest,
}

impl Scan {
    /// Reads the layer's tables, writes the slices that the layer changes and enters them in the
    /// builder's tree.
    pub(super) async fn read(
        map: &Map,
        layer: &Layer,
        builder: &mut Builder,
        tree: &Tree,
        (source, tables): (&TableSource, &Tables),
    ) -> std::result::Result<Self, Stop> {
        let mut content = SidecarContent { bytes: vec![0; HEADER_BYTES] };
        content.cut_beyond(map, layer, builder, tree).await?;
        let mut pending = PendingSlice::default();
        let visit = async |part: GuestRange, table: Option<&[u8]>| {
            for number in slices_of(part) {
                let end = pending.gather((layer, tables), part, table, number);
                while let Some((number, own)) = pending.take_complete(end) {
                    content.add(map, builder, tree, (layer, number, own)).await?;
                }
            }
            Ok::<(), Stop>(())
        };
        let digest = source.read(&*layer.store, visit).await?;
        while let Some((number, own)) = pending.take_complete(GuestOffset::new(u64::MAX)) {
            content.add(map, builder, tree, (layer, number, own)).await?;
        }
        content.cut_within(map, layer, builder, tree).await?;
        Ok(Self { content: content.bytes, digest })
    }
}

/// Appends a node to the sidecar of layer `number`, whose present contents are `content`.
pub(super) fn append_node(content: &mut Vec<u8>, number: u16, payload: &[u8]) -> NodeRef {
    let at = NodeRef::new(number, content.len() as u64);
    let at = at.expect("a sidecar is smaller than 256 TiB");
    encode_node(content, at, payload);
    at
}

/// A sidecar under construction.
struct SidecarContent {
    bytes: Vec<u8>,
}

impl SidecarContent {
    /// A layer that ends before the one beneath hides everything beyond its end: this handles the
    /// slices that lie there as a whole.
    async fn cut_beyond(
        &mut self,
        map: &Map,
        layer: &Layer,
        builder: &mut Builder,
        tree: &Tree,
    ) -> std::result::Result<(), Stop> {
        if !cuts(map, layer) {
            return Ok(());
        }
        let first_beyond = layer.len().div_ceil(SLICE_BYTES);
        builder.load_path(map, tree, first_beyond).await?;
        builder.editor.clear(first_beyond..=u64::MAX);
        builder.slices.retain(|number, _| *number < first_beyond);
        Ok(())
    }

    /// And this the slice in which the layer ends. It is the last one, so that if the layer already
    /// wrote it the builder still keeps it: a sidecar that is not staged yet cannot be read.
    async fn cut_within(
        &mut self,
        map: &Map,
        layer: &Layer,
        builder: &mut Builder,
        tree: &Tree,
    ) -> std::result::Result<(), Stop> {
        if !cuts(map, layer) || layer.len().is_multiple_of(SLICE_BYTES) {
            return Ok(());
        }
        self.add(map, builder, tree, (layer, layer.len() >> SLICE_BITS, Runs::default())).await
    }

    /// Writes slice `number` with the layer's `own` runs laid over it, if that changes it.
    async fn add(
        &mut self,
        map: &Map,
        builder: &mut Builder,
        tree: &Tree,
        (layer, number, own): (&Layer, u64, Runs),
    ) -> std::result::Result<(), Stop> {
        let old = builder.slice(map, tree, number).await?;
        let mut below = Runs::default();
        old.append_runs(0, &mut below);
        below.truncate(sectors_of(layer.len().saturating_sub(number << SLICE_BITS)));
        let new = Arc::new(Runs::overlay(&below, &own).slice_at(0));
        if *new == *old {
            return Ok(());
        }
        let layers = map.layers();
        let named = match layers.are_positions_numbers() {
            true => new.encode(),
            false => new
                .renamed(|number| LayerNumber::new(layers.position(number)))
                .expect("there are as many positions as layers")
                .encode(),
        };
        let at = append_node(&mut self.bytes, map.position_of(layer), &named);
        builder.editor.grow_for(number);
        builder.load_path(map, tree, number).await?;
        builder.editor.set(number, Some(at));
        builder.keep(number, Some(at), new);
        Ok(())
    }
}

/// Whether the layer ends before the one beneath.
fn cuts(map: &Map, layer: &Layer) -> bool {
    let layers = map.layers();
    let position = layers.position(layer.number);
    position > 0 && layer.len() < layers.all()[position - 1].len()
}

/// Slices whose runs are being gathered: small tables cover only parts of one.
#[derive(Default)]
struct PendingSlice {
    slices: std::collections::VecDeque<(u64, Runs)>,
}

impl PendingSlice {
    /// Takes in what `layer` has in the part of slice `number` that its `table`, which covers
    /// `part`, covers; without a table, as its L1 entry is malformed, runs that fail when they are
    /// read. Returns up to where the disk is now known.
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

    /// The runs of slice `number`, which is the latest one requested or a later one.
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
