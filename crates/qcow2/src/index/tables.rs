//! Reading a layer's tables once, in order, with their digest.
//!
//! The digest covers everything that determines the map of a layer: the header with its extensions,
//! the L1 table, and each L2 table that lies in the file. It is collision-resistant, so that it
//! proves a layer even against its owner.

use crate::layer::Layer;
use mica_block::{ContentProof, Error, ErrorKind, LocalFuture, Result, Store, read_exact};
use mica_qcow2_format::{L1Entry, L2Format};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, HostOffset};
use std::path::Path;
use std::sync::Arc;

use super::slice::SLICE_BITS;

/// A digest of a layer's tables.
pub(crate) type TablesDigest = blake3::Hash;

/// Separates the digests of tables from everything else that is digested.
pub(super) const CONTEXT: &str = "mica sidecar 2: tables of a layer";
/// Size of the pieces in which L1 tables are read.
const L1_PIECE_BYTES: u64 = 64 << 10;
/// Bytes of the image's first cluster that the digest covers: the header and its extensions.
const DIGEST_HEADER_BYTES: u64 = 64 << 10;
/// Slices of a layer that malformed L1 entries may cover: 256 GiB of the disk.
const MALFORMED_SLICES_MAX: u64 = 1 << 16;

/// Where the tables of a layer are.
#[derive(Clone)]
pub(crate) struct TableSource {
    l2: L2Format,
    l1_at: HostOffset,
    l1_entries: u32,
    /// Bytes of the disk that the layer covers.
    len: u64,
    path: Arc<Path>,
}

impl TableSource {
    /// Those of `layer`; `None` if it is a raw image.
    pub(crate) fn of(layer: &Layer) -> Option<Self> {
        let tables = layer.tables.as_ref()?;
        let (l1_at, l1_entries) = tables.l1_place.get();
        let (l2, len, path) = (tables.l2, layer.len(), Arc::clone(&layer.path));
        Some(Self { l2, l1_at, l1_entries, len, path })
    }

    /// Reads them from `store` and shows `visitor` each L2 table, with the part of the disk that it
    /// covers; `None` instead of a table whose L1 entry is malformed. Returns their digest.
    ///
    /// # Errors
    /// Any error of reading or of `visitor`; `Corrupt` if the L1 table claims more than the file
    /// holds.
    pub(crate) async fn read<E: From<Error>>(
        &self,
        store: &dyn Store,
        mut visitor: impl AsyncFnMut(GuestRange, Option<&[u8]>) -> std::result::Result<(), E>,
    ) -> std::result::Result<TablesDigest, E> {
        let mut digest = blake3::Hasher::new_derive_key(CONTEXT);
        let cluster_bytes = self.l2.cluster_bits.bytes();
        let header_bytes = cluster_bytes.min(DIGEST_HEADER_BYTES);
        digest.update(&self.piece(store, HostOffset::ZERO, header_bytes).await?);
        let file_bytes = store.len().map_err(|error| self.explain(error))?;
        let mut claims = Claims { source: self, file_bytes, table_bytes: 0, malformed_slices: 0 };
        let l1_bytes = u64::from(self.l1_entries) * L1Entry::BYTES as u64;
        let mut done = 0;
        while done < l1_bytes {
            let piece = (l1_bytes - done).min(L1_PIECE_BYTES);
            let l1_offset = HostOffset::new(self.l1_at.bytes().saturating_add(done));
            let l1 = self.piece(store, l1_offset, piece).await?;
            digest.update(&l1);
            let first = done / L1Entry::BYTES as u64;
            for (l1_index, bytes) in (first..).zip(l1.as_chunks::<{ L1Entry::BYTES }>().0) {
                let entry = L1Entry(u64::from_be_bytes(*bytes));
                let Some(part) = self.part(l1_index) else { continue };
                match entry.decode(self.l2.cluster_bits) {
                    Ok(Some(at)) if at.bytes() < file_bytes => {
                        claims.table()?;
                        let table = self.piece(store, at, cluster_bytes).await?;
                        digest.update(&table);
                        visitor(part, Some(&table)).await?;
                    }
                    // Entries beyond the end of the file read as zeros and so name nothing.
                    Ok(_) => {}
                    Err(_) => {
                        claims.malformed(part)?;
                        visitor(part, None).await?;
                    }
                }
            }
            done += piece;
        }
        Ok(digest.finalize())
    }

    /// The bytes of the disk that the table of L1 entry `l1_index` covers.
    fn part(&self, l1_index: u64) -> Option<GuestRange> {
        let start = l1_index.checked_mul(self.l2.table_bytes())?;
        let end = start.checked_add(self.l2.table_bytes())?.min(self.len);
        let range = GuestRange::between(GuestOffset::new(start), GuestOffset::new(end))?;
        (!range.is_empty()).then_some(range)
    }

    async fn piece(&self, store: &dyn Store, at: HostOffset, len: u64) -> Result<Buf> {
        let len = usize::try_from(len).expect("at most 2 MiB");
        read_exact(store, at, len).await.map_err(|error| self.explain(error))
    }

    fn explain(&self, error: Error) -> Error {
        error.wrap(self.path.display().to_string())
    }
}

/// The slices that `part` of the disk, which is not empty, touches.
pub(super) fn slices_of(part: GuestRange) -> std::ops::RangeInclusive<u64> {
    part.start().bytes() >> SLICE_BITS..=(part.end().bytes() - 1) >> SLICE_BITS
}

/// What a layer's L1 table has claimed so far. No writer names a table in it twice.
struct Claims<'a> {
    source: &'a TableSource,
    file_bytes: u64,
    table_bytes: u64,
    malformed_slices: u64,
}

impl Claims<'_> {
    fn table(&mut self) -> Result<()> {
        let cluster_bytes = self.source.l2.cluster_bits.bytes();
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
        let context = format!("{why}: it gets no index; `mica check` has details");
        self.source.explain(Error::new(ErrorKind::Corrupt, context))
    }
}

/// Evidence that a layer's tables are those of a seal that fitted it.
pub(crate) struct SealedTables {
    source: Arc<TableSource>,
    digest: TablesDigest,
}

impl SealedTables {
    /// Makes the `digest` of its sidecar prove `layer`, should its file be opened again.
    pub(super) fn prove(layer: &Layer, digest: TablesDigest) {
        if let Some(source) = TableSource::of(layer) {
            layer.content.set(Arc::new(Self { source: Arc::new(source), digest }));
        }
    }
}

impl ContentProof for SealedTables {
    fn holds(&self, store: Arc<dyn Store>) -> LocalFuture<'static, Result<bool>> {
        let (source, digest) = (Arc::clone(&self.source), self.digest);
        Box::pin(async move {
            let found = source.read::<Error>(&*store, async |_, _| Ok(())).await?;
            Ok(found == digest)
        })
    }
}
