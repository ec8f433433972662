//! Writing the sidecars: layer by layer from the base, each from the tree beneath and the layer's
//! own tables.
//!
//! Invariants
//! - I1 A sidecar is written only for a layer whose file was the same before and after it was read.
//! - I2 Concurrent readers are undisturbed: a longer tree is published in one step.

use crate::index::scan::{Builder, Scan, Stop, append_node};
use crate::index::sidecar::{HEADER_BYTES, Header, SidecarId};
use crate::index::stage::Stage;
use crate::index::tables::{SealedTables, TableSource};
use crate::index::{Root, Sidecar, Tree};
use crate::layer::Layer;
use crate::map::Map;
use mica_block::{Error, ErrorKind, IndexProgress, Result, SealState, Store, read_exact};
use mica_units::HostOffset;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Number of layers after which a longer tree is published while more are built.
const PUBLISH_EVERY: usize = 64;

/// Seals that are read concurrently: on a cold device they take as long as the slowest.
const SEALS_PER_BATCH: usize = 32;

/// Rounds of a build that encounters unreadable sidecars; each rewrites them or retries once.
const ROUNDS_MAX: usize = 16;
/// Largest sidecar that is read whole to be sealed again; a larger one is rebuilt.
const RESEALED_BYTES_MAX: u64 = 1 << 30;

impl Map {
    /// Reads the seals from the base up and adopts the tree as far as they hold without reading a
    /// layer. Costs one small read per layer.
    pub(crate) async fn adopt_sidecars(&self) {
        let generation = self.index.next_generation();
        let mut tree = Tree { generation, ..Tree::default() };
        'layers: for batch in self.layers().frozen().chunks(SEALS_PER_BATCH) {
            let seals = mica_rt::join_all(batch.iter().map(|layer| self.read_seal(layer))).await;
            for (layer, seal) in batch.iter().zip(seals) {
                if layer.tables.is_none() {
                    tree.push_raw_base(layer);
                    continue;
                }
                let Some((header, store)) = seal else { break 'layers };
                if self.seal_state(layer, &header, tree.id) != SealState::Sealed {
                    break 'layers;
                }
                adopt(layer, &mut tree, &header, store);
            }
        }
        self.index.publish(tree);
    }

    /// The state of each frozen layer's seal, from the base.
    ///
    /// # Errors
    /// None: a seal that cannot be read counts as missing.
    pub(crate) async fn seal_states(&self) -> Vec<(SealState, u64)> {
        let mut states = Vec::new();
        let mut parent = None;
        for layer in self.layers().frozen() {
            if layer.tables.is_none() {
                parent = Some(raw_base_id(layer));
                states.push((SealState::Sealed, 0));
                continue;
            }
            let (state, len) = match self.read_seal(layer).await {
                Some((header, _)) => {
                    let state = self.seal_state(layer, &header, parent);
                    parent = Some(header.id);
                    (state, header.len)
                }
                None => {
                    parent = None;
                    (SealState::Missing, 0)
                }
            };
            states.push((state, len));
        }
        states
    }

    /// The name of `layer` in sidecars.
    pub(crate) fn position_of(&self, layer: &Layer) -> u16 {
        let position = self.layers().position(layer.number);
        u16::try_from(position).expect("bounded by the chain's length")
    }

    /// The seal of a layer's sidecar; `None` also if one of its nodes was found to be bad.
    pub(super) async fn read_seal(&self, layer: &Layer) -> Option<(Header, Arc<dyn Store>)> {
        if layer.tables.is_none() || self.index.is_distrusted(self.position_of(layer)) {
            return None;
        }
        let store = self.images.sidecars().open(&layer.path).ok().flatten()?;
        let bytes = read_exact(&*store, HostOffset::ZERO, HEADER_BYTES).await.ok()?;
        let header = Header::decode(&bytes)?;
        // A truncated file loses nodes: its length is part of what was sealed.
        (store.len().ok()? == header.len).then_some((header, store))
    }

    fn seal_state(&self, layer: &Layer, header: &Header, parent: Option<SidecarId>) -> SealState {
        let position = self.layers().position(layer.number);
        header.state((position, layer.len()), &layer.identity, parent)
    }

    /// Removes the sidecars of all frozen layers.
    ///
    /// # Errors
    /// Any error of the system; the others are removed all the same.
    pub(crate) fn drop_index(&self) -> Result<()> {
        self.index.publish(Tree::default());
        let mut outcome = Ok(());
        for layer in self.layers().frozen() {
            let removed = self.images.sidecars().remove(&layer.path);
            outcome = outcome.and(removed);
        }
        outcome
    }

    /// Brings the sidecars of all frozen layers up to date; returns how many it wrote. Stops
    /// between two layers when `progress` breaks.
    ///
    /// # Errors
    /// If a layer cannot be read or a sidecar cannot be written. What was written before stays
    /// valid.
    pub(crate) async fn build_index(
        &self,
        progress: &mut dyn FnMut(IndexProgress) -> ControlFlow<()>,
    ) -> Result<usize> {
        let mut built = 0;
        let _indexing = self.indexing.lock().await;
        // Whoever holds the index calls for it when it is done.
        if self.is_index_held.load(Ordering::SeqCst) {
            return Ok(built);
        }
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
        let context = "sidecars cannot be read back, though they were rewritten";
        Err(Error::new(ErrorKind::Io, context))
    }

    /// Extends the tree as far as possible, and publishes it.
    async fn build_round(
        &self,
        progress: &mut dyn FnMut(IndexProgress) -> ControlFlow<()>,
        built: &mut usize,
    ) -> std::result::Result<(), Stop> {
        let mut tree = (*self.index.tree()).clone();
        if tree.id.is_none() {
            // A damaged sidecar was forgotten, or none was adopted: the seals show where to start.
            self.adopt_sidecars().await;
            tree = (*self.index.tree()).clone();
        }
        // A sidecar rewritten below must not be confused with the one that it replaces.
        tree.generation = self.index.next_generation();
        let mut builder = Builder::new(tree.root());
        let all = self.layers();
        let layers = all.frozen().len();
        let first = tree.covered();
        let mut stage = Stage::default();
        let mut outcome = Ok(());
        for (position, layer) in all.frozen().iter().enumerate().skip(first) {
            let is_held = self.is_index_held.load(Ordering::SeqCst);
            if is_held || progress(IndexProgress { layer: position, layers }).is_break() {
                break;
            }
            outcome = self.extend_tree(&mut builder, (&mut tree, &mut stage), layer).await;
            let is_due = (tree.covered() - first).is_multiple_of(PUBLISH_EVERY);
            if outcome.is_ok() && (is_due || stage.is_full()) {
                outcome = self.write_staged(&mut stage, &mut tree).await;
            }
            if outcome.is_err() {
                break;
            }
            if is_due {
                self.index.publish(tree.clone());
            }
        }
        // What was built before something failed is as good as ever.
        let written = self.write_staged(&mut stage, &mut tree).await;
        outcome = outcome.and(written);
        *built += tree.covered().saturating_sub(first);
        let layer = tree.covered();
        if layer > first {
            self.index.publish(tree);
        }
        let _ = progress(IndexProgress { layer, layers });
        outcome
    }

    /// Adds `layer` to the tree: through its sidecar if its content proves it, else through a new
    /// one.
    async fn extend_tree(
        &self,
        builder: &mut Builder,
        (tree, stage): (&mut Tree, &mut Stage),
        layer: &Arc<Layer>,
    ) -> std::result::Result<(), Stop> {
        let (Some(source), Some(tables)) = (TableSource::of(layer), &layer.tables) else {
            tree.push_raw_base(layer);
            return Ok(());
        };
        if let Some((header, store)) = self.read_seal(layer).await
            && let state = self.seal_state(layer, &header, tree.id)
            && matches!(state, SealState::Unproven | SealState::Sealed)
        {
            if state == SealState::Sealed {
                builder.restart(header.root);
                adopt(layer, tree, &header, store);
                return Ok(());
            }
            let digest = source.read::<Error>(&*layer.store, async |_, _| Ok(())).await?;
            self.require_unchanged(layer)?;
            if header.digest == digest
                && let Some(content) = self.resealed(layer, &header, &*store).await
            {
                builder.restart(header.root);
                // If stamps never prove anything, a new seal proves no more than the old one.
                match layer.identity.has_stamps() {
                    true => stage.push(tree, layer, header, content),
                    false => adopt(layer, tree, &header, store),
                }
                return Ok(());
            }
        }
        let scan = Scan::read(self, layer, builder, tree, (&source, tables)).await?;
        self.require_unchanged(layer)?;
        self.stage_sidecar(builder, (tree, stage), layer, scan);
        Ok(())
    }

    fn stage_sidecar(
        &self,
        builder: &mut Builder,
        (tree, stage): (&mut Tree, &mut Stage),
        layer: &Arc<Layer>,
        scan: Scan,
    ) {
        let mut content = scan.content;
        let position = self.position_of(layer);
        let root = builder
            .editor
            .write(|directory| append_node(&mut content, position, &directory.encode()));
        let nodes = &content[HEADER_BYTES..];
        let header = Header {
            layer: position,
            layer_len: layer.len(),
            identity: layer.identity,
            sealed_ns: self.images.now_ns(),
            digest: scan.digest,
            id: Header::id_of(tree.id, Some(scan.digest), layer.len(), root, nodes),
            parent: tree.id,
            root,
            len: content.len() as u64,
        };
        content[..HEADER_BYTES].copy_from_slice(&header.encode());
        stage.push(tree, layer, header, content);
    }

    /// The sidecar's content under a new seal: that content proved the layer to be the same. `None`
    /// if it is not what was sealed, or cannot be read.
    async fn resealed(&self, layer: &Layer, header: &Header, store: &dyn Store) -> Option<Vec<u8>> {
        // The length cannot be trusted: a file can be sparse.
        if header.len > RESEALED_BYTES_MAX {
            return None;
        }
        let len = usize::try_from(header.len).ok()?;
        let mut content = read_exact(store, HostOffset::ZERO, len).await.ok()?.to_vec();
        let nodes = content.get(HEADER_BYTES..)?;
        let digest = Some(header.digest);
        let id = Header::id_of(header.parent, digest, layer.len(), header.root, nodes);
        if id != header.id {
            return None;
        }
        let sealed_ns = self.images.now_ns();
        let header = Header { identity: layer.identity, sealed_ns, ..*header };
        content[..HEADER_BYTES].copy_from_slice(&header.encode());
        Some(content)
    }

    /// I1: what was read belongs to the state that the seal will name.
    fn require_unchanged(&self, layer: &Layer) -> std::result::Result<(), Stop> {
        let now = self.images.identify(&layer.path)?;
        if now == layer.identity { Ok(()) } else { Err(Stop::Changed) }
    }
}

/// Adds the sidecar of `layer`, which is in `store`, to the tree.
fn adopt(layer: &Layer, tree: &mut Tree, header: &Header, store: Arc<dyn Store>) {
    tree.push(header.root, header.id, Some(Sidecar::Kept(store)));
    SealedTables::prove(layer, header.digest);
}

impl Tree {
    /// A raw base needs no sidecar: its map is its length.
    fn push_raw_base(&mut self, base: &Layer) {
        self.push(Root::default(), raw_base_id(base), None);
    }
}

fn raw_base_id(base: &Layer) -> SidecarId {
    Header::id_of_raw_base(base.len())
}
