//! One image of a chain: its tables, and what it holds by itself.
//!
//! A layer knows nothing of the layers beneath it. It answers two questions: which bytes of a
//! window it owns ([`Layer::own_runs`]), and what is in a cluster that an index cannot describe
//! ([`Layer::read_deferred`]).
//!
//! Memory is bounded: a small L1 table is kept once it was read, a large one is read as needed, and
//! no L2 table is kept at all: the chain's slices are.

use crate::cipher::LayerCipher;
use crate::decoded::DecodedClusters;
use crate::index::slice::{Entry, EntryKind, Run, Runs};
use crate::l1_place::L1Place;
use crate::live::Live;
use mica_block::{Error, ErrorKind, Identity, ProofSlot, Result, Store, read_exact};
use mica_crypt::SectorCipher;
use mica_qcow2_format::{Compression, L1Entry, L2Entry, L2Format, RawL2Entry};
use mica_rt::Buf;
use mica_units::{GuestCluster, GuestOffset, GuestRange, HostOffset, LayerNumber, SECTOR_BYTES};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// L1 entries that are read at a time.
const L1_SCAN_ENTRIES: u64 = 8192;
/// Largest L1 table that a layer keeps in memory.
const L1_KEPT_BYTES_MAX: usize = 4096;

/// An image of a chain.
pub(crate) struct Layer {
    pub(crate) number: LayerNumber,
    pub(crate) path: Arc<Path>,
    /// The image file: header and tables.
    pub(crate) store: Arc<dyn Store>,
    /// Where data clusters lie: the image file, or its external data file.
    pub(crate) data: Arc<dyn Store>,
    /// Whether an external data file is a device, which keeps its length.
    pub(crate) data_is_device: bool,
    /// How its data is encrypted.
    pub(crate) cipher: Option<LayerCipher>,
    /// The path of its external data file, if it has one.
    pub(crate) data_path: Option<Box<Path>>,
    pub(crate) identity: Identity,
    /// The digest of a seal that fits: it proves the file, should that be opened again.
    pub(crate) content: ProofSlot,
    /// Bytes of the disk that it covers, a multiple of a sector. It grows with a disk that is
    /// extended while it is written.
    pub(crate) len: AtomicU64,
    pub(crate) tables: Option<Tables>,
    /// What its writer publishes, while it has one.
    pub(crate) live: Option<Live>,
    /// Whether its store has the locks of a writer, though it is frozen.
    pub(crate) may_write: AtomicBool,
}

/// The tables of a qcow2 image. A raw image has none.
pub(crate) struct Tables {
    pub(crate) l2: L2Format,
    /// The place of the L1 table; shared with the layer's writer.
    pub(crate) l1_place: Arc<L1Place>,
    pub(crate) compression: Compression,
    /// Whether they are being written: then none of them is cached here.
    pub(crate) is_live: bool,
    l1: OnceLock<Box<[L1Entry]>>,
    /// Whether more clusters are in use than its file occupies; see [`Layer::is_preallocated`].
    preallocated: OnceLock<bool>,
}

impl Tables {
    pub(crate) fn new(
        l2: L2Format,
        l1_offset: HostOffset,
        l1_entries: u32,
        compression: Compression,
    ) -> Self {
        let (l1, preallocated) = (OnceLock::new(), OnceLock::new());
        let l1_place = Arc::new(L1Place::new(l1_offset, l1_entries));
        Self { l2, l1_place, compression, is_live: false, l1, preallocated }
    }

    /// The same tables, for another layer in memory that shares their writer.
    pub(crate) fn twin(&self) -> Self {
        Self {
            l2: self.l2,
            l1_place: Arc::clone(&self.l1_place),
            compression: self.compression,
            is_live: self.is_live,
            l1: OnceLock::new(),
            preallocated: OnceLock::new(),
        }
    }

    /// L1 entries `first..first + count`; those beyond the table name nothing.
    async fn l1_range(&self, store: &dyn Store, first: u64, count: usize) -> Result<Vec<L1Entry>> {
        let (l1_offset, l1_entries) = self.l1_place.get();
        let table_len = u64::from(l1_entries);
        let table_bytes = l1_entries as usize * L1Entry::BYTES;
        let within = usize::try_from(table_len.saturating_sub(first)).unwrap_or(usize::MAX);
        let present = count.min(within);
        let mut entries = if table_bytes <= L1_KEPT_BYTES_MAX && !self.is_live {
            let table = match self.l1.get() {
                Some(table) => table,
                None => {
                    let table = read_l1(store, l1_offset, l1_entries as usize).await?;
                    self.l1.get_or_init(|| table)
                }
            };
            let first = usize::try_from(first).unwrap_or(usize::MAX).min(table.len());
            table[first..first + present].to_vec()
        } else {
            let offset = l1_offset.checked_add(first * L1Entry::BYTES as u64);
            let offset = offset.ok_or_else(|| beyond_64_bits("L1 table"))?;
            read_l1(store, offset, present).await?.into_vec()
        };
        entries.resize(count, L1Entry(0));
        Ok(entries)
    }
}

/// The entries for `part` in `table`, a whole L2 table that covers it.
pub(crate) fn l2_part(l2: L2Format, table: &[u8], part: GuestRange) -> &[u8] {
    let last = GuestOffset::new(part.end().bytes() - 1);
    let entry_bytes = l2.entry_bytes();
    let at = |index: u64| usize::try_from(index).expect("an index in a table") * entry_bytes;
    &table[at(l2.l2_index(part.start()))..at(l2.l2_index(last) + 1)]
}

/// The entries in `bytes`, by their indices there, and their clusters: those that cover `part`.
fn clusters_in(
    l2: L2Format,
    bytes: &[u8],
    part: GuestRange,
) -> impl Iterator<Item = (usize, GuestCluster)> {
    let count = bytes.len() / l2.entry_bytes();
    let first = l2.cluster_bits.guest_cluster(part.start());
    (0..count).zip(first.up_to(first.saturating_add(count as u64)))
}

async fn read_l1(store: &dyn Store, offset: HostOffset, count: usize) -> Result<Box<[L1Entry]>> {
    let bytes = read_exact(store, offset, count * L1Entry::BYTES).await?;
    let chunks = bytes.as_chunks::<{ L1Entry::BYTES }>().0;
    Ok(chunks.iter().map(|entry| L1Entry(u64::from_be_bytes(*entry))).collect())
}

fn beyond_64_bits(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the {what} ends beyond 64 bits"))
}

impl Layer {
    /// Bytes of the disk that it covers, a multiple of a sector.
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    pub(crate) fn set_len(&self, len: u64) {
        self.len.store(len, Ordering::Release);
    }

    /// The format by which a layer above has to name it: by that of another one it would show what
    /// is encrypted as it is stored.
    pub(crate) fn format_name(&self) -> &'static str {
        match (&self.tables, &self.cipher) {
            (Some(_), _) => "qcow2",
            (None, Some(_)) => "luks",
            (None, None) => "raw",
        }
    }

    /// Which bytes of `window` this layer owns, as runs from the window's start. The window starts
    /// and ends at sector boundaries; what lies beyond the layer's end is owned by nobody.
    pub(crate) async fn own_runs(&self, window: GuestRange) -> Result<Runs> {
        self.own_runs_unwrapped(window).await.map_err(|error| self.explain(error))
    }

    /// Puts the layer's name before an error.
    pub(crate) fn explain(&self, error: Error) -> Error {
        error.wrap(self.path.display().to_string())
    }

    async fn own_runs_unwrapped(&self, window: GuestRange) -> Result<Runs> {
        let mut runs = Runs::default();
        let end = window.end().bytes().min(self.len());
        if end <= window.start().bytes() {
            return Ok(runs);
        }
        let Some(tables) = &self.tables else {
            let host = HostOffset::new(window.start().bytes());
            let entry = Entry::at_host(EntryKind::Data, self.number, host);
            runs.push(Run { start: 0, end: sectors(end - window.start().bytes()), entry });
            return Ok(runs);
        };
        let range = GuestRange::between(window.start(), GuestOffset::new(end));
        let range = range.expect("it ends after it starts");
        self.visit_tables(tables, range, |part, table| match table {
            Some(bytes) => {
                self.append_l2_runs(tables, &bytes, part, window.start(), &mut runs);
            }
            // Reading there fails with the reason, as in QEMU; everything else stays readable.
            None => runs.push(self.deferred_run(part, window.start())),
        })
        .await?;
        Ok(runs)
    }

    /// Shows `visitor` the entries of each L2 table that covers a part of `range`, with that part;
    /// `None` for a table that cannot exist: its L1 entry is malformed.
    async fn visit_tables(
        &self,
        tables: &Tables,
        range: GuestRange,
        mut visitor: impl FnMut(GuestRange, Option<Buf>),
    ) -> Result<()> {
        let l2 = tables.l2;
        let first = l2.l1_index(range.start());
        let last = l2.l1_index(GuestOffset::new(range.end().bytes() - 1));
        let count = usize::try_from(last - first + 1).unwrap_or(usize::MAX);
        let l1 = tables.l1_range(&*self.store, first, count).await?;
        for (table_number, l1_entry) in (first..).zip(l1) {
            let from = l2.table_start(table_number).max(range.start());
            let to = l2.table_start(table_number + 1).min(range.end());
            let part = GuestRange::between(from, to).expect("a table's part of the range");
            match l1_entry.decode(l2.cluster_bits) {
                Ok(None) => {}
                Ok(Some(table)) => {
                    visitor(part, Some(self.read_l2_part(tables, table, part).await?));
                }
                Err(_) => visitor(part, None),
            }
        }
        Ok(())
    }

    /// Whether this layer and `other`, which are states of one file, have the same tables for
    /// `range`.
    pub(crate) async fn has_same_tables(&self, other: &Self, range: GuestRange) -> Result<bool> {
        let (Some(one), Some(two)) = (&self.tables, &other.tables) else { return Ok(false) };
        if range.end().bytes() > self.len().min(other.len()) || range.is_empty() {
            return Ok(false);
        }
        let first = one.l2.l1_index(range.start());
        let last = one.l2.l1_index(GuestOffset::new(range.end().bytes() - 1));
        let count = usize::try_from(last - first + 1).unwrap_or(usize::MAX);
        let entries = one.l1_range(&*self.store, first, count).await?;
        let others = two.l1_range(&*other.store, first, count).await?;
        let mut pairs = entries.iter().zip(&others);
        Ok(pairs.all(|(one, other)| one.offset() == other.offset()))
    }

    /// The parts of `range`, which this layer does not own, that lie in clusters that it allocated
    /// for other subclusters, with their places.
    pub(crate) async fn holes_in_clusters(
        &self,
        range: GuestRange,
    ) -> Result<Vec<(GuestRange, HostOffset)>> {
        let mut holes = Vec::new();
        let Some(tables) = self.tables.as_ref().filter(|tables| tables.l2.extended) else {
            return Ok(holes);
        };
        let l2 = tables.l2;
        let visit = |part: GuestRange, table: Option<Buf>| {
            let Some(bytes) = table else { return };
            for (index, cluster) in clusters_in(l2, &bytes, part) {
                let start = l2.cluster_bits.start_of(cluster);
                let entry = l2.raw(&bytes, index).map(|raw| l2.interpret_at(raw, start));
                let Some(Ok(L2Entry::Subclusters { host: Some(host), .. })) = entry else {
                    continue;
                };
                let whole = l2.cluster_bits.range_of(cluster);
                let Some(hole) = whole.and_then(|whole| whole.intersect(part)) else { continue };
                let host = host.checked_add(hole.start().bytes() - start.bytes());
                holes.extend(host.map(|host| (hole, host)));
            }
        };
        let visited = self.visit_tables(tables, range, visit).await;
        visited.map_err(|error| self.explain(error))?;
        Ok(holes)
    }

    /// How far from `at` on, up to `end` at most, the L1 table names no L2 table.
    pub(crate) async fn unowned_until(
        &self,
        at: GuestOffset,
        end: GuestOffset,
    ) -> Result<GuestOffset> {
        let stop = end.bytes().min(self.len());
        if at.bytes() >= stop {
            return Ok(end);
        }
        let Some(tables) = &self.tables else { return Ok(at) };
        let mut index = tables.l2.l1_index(at);
        let last = tables.l2.l1_index(GuestOffset::new(stop - 1));
        while index <= last {
            let count = (last - index + 1).min(L1_SCAN_ENTRIES);
            let count = usize::try_from(count).expect("a piece");
            let entries = tables.l1_range(&*self.store, index, count).await;
            let entries = entries.map_err(|error| self.explain(error))?;
            let used = entries.iter().position(|entry| entry.offset() != HostOffset::ZERO);
            if let Some(used) = used {
                return Ok(tables.l2.table_start(index + used as u64).max(at));
            }
            index += count as u64;
        }
        Ok(end)
    }

    async fn read_l2_part(
        &self,
        tables: &Tables,
        table: HostOffset,
        part: GuestRange,
    ) -> Result<Buf> {
        let l2 = tables.l2;
        let last = GuestOffset::new(part.end().bytes() - 1);
        let first_index = l2.l2_index(part.start());
        let count = l2.l2_index(last) - first_index + 1;
        let entry_bytes = l2.entry_bytes() as u64;
        let offset = table
            .checked_add(first_index * entry_bytes)
            .ok_or_else(|| beyond_64_bits("L2 table"))?;
        let len = usize::try_from(count * entry_bytes).expect("at most a cluster");
        read_exact(&*self.store, offset, len).await
    }

    /// Appends the runs of the entries in `bytes`, which cover `part`.
    pub(crate) fn append_l2_runs(
        &self,
        tables: &Tables,
        bytes: &[u8],
        part: GuestRange,
        window: GuestOffset,
        runs: &mut Runs,
    ) {
        if is_zero(bytes) {
            return;
        }
        let l2 = tables.l2;
        for (index, cluster) in clusters_in(l2, bytes, part) {
            let Some(raw) = l2.raw(bytes, index) else { return };
            let Some(whole) = l2.cluster_bits.range_of(cluster) else { return };
            let start = whole.start();
            let Some(range) = whole.intersect(part) else { continue };
            match l2.interpret_at(raw, start) {
                Ok(L2Entry::Unallocated) => {}
                Ok(L2Entry::Subclusters { host, allocated, zero }) => {
                    let unit_bytes = l2.subcluster_bytes();
                    let shared = self.is_shared(tables, raw);
                    let clusters = Subclusters { start, unit_bytes, host, allocated, zero, shared };
                    self.append_subclusters(clusters, range, window, runs);
                }
                Ok(entry) => {
                    let skipped = range.start().bytes() - start.bytes();
                    let shared = self.is_shared(tables, raw);
                    runs.push(self.run_of((entry, shared), skipped, range, window));
                }
                Err(_) => runs.push(self.deferred_run(range, window)),
            }
        }
    }

    /// Whether a cluster of an active layer that is written must not be written in place: something
    /// else names it too, or the image claims that it overlaps metadata.
    fn is_shared(&self, tables: &Tables, raw: RawL2Entry) -> bool {
        let Some(live) = &self.live else { return false };
        if live.held.has(tables.l2.cluster_bits.host_cluster(raw.offset())) {
            return true;
        }
        if tables.l2.data_file {
            return false;
        }
        !raw.copied() || live.ranges.check(raw.offset(), tables.l2.cluster_bits.bytes()).is_err()
    }

    fn append_subclusters(
        &self,
        clusters: Subclusters,
        range: GuestRange,
        window: GuestOffset,
        runs: &mut Runs,
    ) {
        let bytes = clusters.unit_bytes;
        for index in 0..mica_qcow2_format::SUBCLUSTER_COUNT {
            let start = GuestOffset::new(clusters.start.bytes() + u64::from(index) * bytes);
            let whole = GuestRange::new(start, bytes).expect("within a cluster of the disk");
            let Some(part) = whole.intersect(range) else { continue };
            let bit = 1_u32 << index;
            let skipped = part.start().bytes() - clusters.start.bytes();
            let entry = match clusters.host {
                Some(host) if clusters.allocated & bit != 0 => L2Entry::Data(host),
                Some(host) if clusters.zero & bit != 0 => L2Entry::ZeroAllocated(host),
                None if clusters.zero & bit != 0 => L2Entry::Zero,
                _ => continue,
            };
            runs.push(self.run_of((entry, clusters.shared), skipped, part, window));
        }
    }

    /// The run for `range`, which lies `skipped` bytes into a cluster whose entry is `entry`, and
    /// which may be shared with something else.
    fn run_of(
        &self,
        (entry, shared): (L2Entry, bool),
        skipped: u64,
        range: GuestRange,
        window: GuestOffset,
    ) -> Run {
        let placed = |kind, host: HostOffset| match host.checked_add(skipped) {
            Some(host) => Entry::at_host(kind, self.number, host),
            None => Entry::without_host(EntryKind::Deferred, self.number),
        };
        let entry = match entry {
            L2Entry::Zero => Entry::without_host(EntryKind::Zero, self.number),
            // Where it is on the disk counts for decryption.
            L2Entry::Data(_) if self.old_cipher().is_some() => {
                Entry::without_host(EntryKind::Deferred, self.number)
            }
            L2Entry::ZeroAllocated(host) => placed(EntryKind::ZeroAllocated, host),
            L2Entry::Data(host) if shared => placed(EntryKind::SharedData, host),
            L2Entry::Data(host) => placed(EntryKind::Data, host),
            L2Entry::Compressed(_) | L2Entry::Unallocated | L2Entry::Subclusters { .. } => {
                Entry::without_host(EntryKind::Deferred, self.number)
            }
        };
        run_at(range, window, entry)
    }

    /// Its cipher, if that counts sectors of the disk.
    fn old_cipher(&self) -> Option<&SectorCipher> {
        match &self.cipher {
            Some(LayerCipher::ByGuest(cipher)) => Some(cipher),
            Some(LayerCipher::ByHost(_) | LayerCipher::Payload(_)) | None => None,
        }
    }

    pub(crate) fn deferred_run(&self, range: GuestRange, window: GuestOffset) -> Run {
        run_at(range, window, Entry::without_host(EntryKind::Deferred, self.number))
    }

    /// Whether the image's file occupies clearly less space than its clusters in use would: then
    /// clusters may lie in holes of the file. QEMU uses the same rule, and queries the file only
    /// then.
    pub(crate) async fn is_preallocated(&self) -> bool {
        let Some(tables) = &self.tables else { return false };
        if let Some(known) = tables.preallocated.get() {
            return *known;
        }
        // What cannot be determined is reported as data, which is never wrong.
        let found = crate::preallocated::is_preallocated(&*self.store).await.unwrap_or(false);
        *tables.preallocated.get_or_init(|| found)
    }

    /// Reads what an index cannot describe: consults the layer's own L2 entries.
    pub(crate) async fn read_deferred(
        &self,
        start: GuestOffset,
        buf: Buf,
        decoded: &DecodedClusters,
    ) -> (Result<()>, Buf) {
        let Some(tables) = &self.tables else {
            return (Err(self.explain(changed())), buf);
        };
        let mut rest = buf;
        let mut done = rest.split_to(0);
        while !rest.is_empty() {
            let at = GuestOffset::new(start.bytes() + done.len() as u64);
            let within = tables.l2.cluster_bits.offset_within(at.bytes());
            let left = usize::try_from(tables.l2.cluster_bits.bytes() - within).expect("2 MiB");
            let mut part = rest.split_to(left.min(rest.len()));
            let read = self.read_deferred_part(tables, at, &mut part, decoded).await;
            done.join(part);
            if let Err(error) = read {
                done.join(rest);
                return (Err(self.explain(error)), done);
            }
        }
        (Ok(()), done)
    }

    /// Reads a part of one cluster.
    async fn read_deferred_part(
        &self,
        tables: &Tables,
        at: GuestOffset,
        part: &mut Buf,
        decoded: &DecodedClusters,
    ) -> Result<()> {
        let l2 = tables.l2;
        let cluster_bits = l2.cluster_bits;
        let within = cluster_bits.offset_within(at.bytes());
        let cluster = GuestOffset::new(at.bytes() - within);
        let within = usize::try_from(within).expect("at most 2 MiB");
        if decoded.copy(self.number, cluster, within, part) {
            return Ok(());
        }
        let [l1_entry] = tables.l1_range(&*self.store, l2.l1_index(cluster), 1).await?[..] else {
            unreachable!("one entry was asked for");
        };
        let table = l1_entry.decode(cluster_bits)?.ok_or_else(changed)?;
        let one = GuestRange::new(cluster, 1).ok_or_else(changed)?;
        let bytes = self.read_l2_part(tables, table, one).await?;
        let raw = l2.raw(&bytes, 0).ok_or_else(changed)?;
        match l2.interpret_at(raw, cluster)? {
            L2Entry::Compressed(compressed) => {
                let file_len = self.store.len()?;
                let host = compressed.host;
                let len = compressed.len_max.min(file_len.saturating_sub(host.bytes()));
                let len = usize::try_from(len).expect("at most two clusters");
                let input = read_exact(&*self.store, host, len).await?;
                let mut output = Buf::new(usize::try_from(cluster_bits.bytes()).expect("2 MiB"));
                let unpack =
                    mica_qcow2_format::decompress(tables.compression, &input, output.own_bytes());
                unpack.map_err(|error| {
                    error.wrap(format!("compressed cluster {cluster} at {host}"))
                })?;
                part.copy_from_slice(&output[within..within + part.len()]);
                decoded.keep(self.number, cluster, output);
                Ok(())
            }
            L2Entry::Data(host) if let Some(cipher) = self.old_cipher() => {
                self.read_old_cipher(cipher, (at, host, within), part).await
            }
            L2Entry::Data(host) => {
                let host = host.checked_add(within as u64).ok_or_else(changed)?;
                let bytes = read_exact(&*self.data, host, part.len()).await?;
                part.copy_from_slice(&bytes);
                Ok(())
            }
            L2Entry::Zero | L2Entry::ZeroAllocated(_) => {
                part.fill(0);
                Ok(())
            }
            L2Entry::Unallocated => Err(changed()),
            L2Entry::Subclusters { .. } => {
                let why = match self.old_cipher() {
                    Some(_) => "in an image that is encrypted with the old AES",
                    None => "beyond 16 PiB of the file",
                };
                let context = format!("cluster {cluster} has subclusters {why}");
                Err(Error::new(ErrorKind::Unsupported, context))
            }
        }
    }
}

impl Layer {
    /// Reads a part of one cluster, whose sectors are encrypted by their places on the disk: it is
    /// at `host`, and the part `within` that, and at `at` on the disk.
    async fn read_old_cipher(
        &self,
        cipher: &SectorCipher,
        (at, host, within): (GuestOffset, HostOffset, usize),
        part: &mut Buf,
    ) -> Result<()> {
        // Whole sectors are decrypted: clusters begin and end with one.
        let skip = usize::try_from(at.bytes() % SECTOR_BYTES).expect("less than a sector");
        let host = host.checked_add((within - skip) as u64).ok_or_else(changed)?;
        let sector = usize::try_from(SECTOR_BYTES).expect("512");
        let len = (skip + part.len()).next_multiple_of(sector);
        let mut bytes = read_exact(&*self.data, host, len).await?;
        cipher.decrypt(at.bytes() / SECTOR_BYTES, bytes.own_bytes());
        part.copy_from_slice(&bytes[skip..skip + part.len()]);
        Ok(())
    }
}

/// A cluster whose subclusters differ.
struct Subclusters {
    start: GuestOffset,
    unit_bytes: u64,
    host: Option<HostOffset>,
    allocated: u32,
    zero: u32,
    shared: bool,
}

fn changed() -> Error {
    Error::new(ErrorKind::Corrupt, "the image was changed by another program while it was in use")
}

fn run_at(range: GuestRange, window: GuestOffset, entry: Entry) -> Run {
    let since = |offset: GuestOffset| sectors(offset.bytes() - window.bytes());
    Run { start: since(range.start()), end: since(range.end()), entry }
}

fn sectors(bytes: u64) -> u32 {
    debug_assert!(bytes.is_multiple_of(SECTOR_BYTES));
    u32::try_from(bytes / SECTOR_BYTES).expect("a window has few sectors")
}

/// Whether all of `bytes` are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<64>();
    words.iter().all(|word| word.iter().fold(0, |all, byte| all | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}
