//! A qcow2 layer. See [`super`] for the layout and its invariants.

use super::Image;
use super::refcounts::Refcounts;
use crate::content::{self, POISON};
use crate::expand::{Content, Entry};
use crate::plan::{DataFile, Qcow2Shape};
use crate::sink::Sink;
use crate::spec::DataMode;
use mica_block::{Error, ErrorKind, Result};
use mica_qcow2_format::{
    Autoclear, BackingName, CompressedCluster, Header, L1Entry, L2Entry, SUBCLUSTER_COUNT,
};
use mica_qcow2_tools::layout::{CompressionLevel, Compressor, refcount_area};
use mica_units::Rng;
use mica_units::{GuestOffset, HostOffset, SECTOR_BYTES};

/// Maximum number of clusters that one compressed cluster takes, with space left free before it.
const COMPRESSED_CLUSTERS_MAX: u64 = 2;

/// Writes the layer's file, and its data file if it has one.
pub(super) fn write(image: &Image<'_>, shape: &Qcow2Shape) -> Result<()> {
    let layout = Layout::new(shape, image.shape.len, image.entries);
    let mut sink = Sink::create(&image.dir.join(&image.names.file))?;
    let data_file = image.names.qcow2.as_ref().and_then(|names| names.data_file.as_ref());
    let data_file = data_file.map(|name| Sink::create(&image.dir.join(name))).transpose()?;

    let mut refcounts = Refcounts::new(shape.l2.cluster_bits, shape.refcount, layout.clusters);
    refcounts.add_reference(&(0..layout.data));
    let rng = image.order.clone().unwrap_or_else(|| Rng::new(image.shape.number.index() as u64));
    let compressor = Compressor::new(shape.compression, CompressionLevel::Fast)?;
    let mut data = Data { image, shape, refcounts, next: layout.data, rng, compressor, data_file };

    let mut l1 = vec![0; layout.l1_entries * L1Entry::BYTES];
    let per_table = |entry: &Entry| entry.cluster >> shape.l2.entries_bits();
    let tables = image.entries.chunk_by(|a, b| per_table(a) == per_table(b));
    // Tables are kept until the data is out, so that each of the two is written in order.
    let mut l2 = Vec::new();
    for (number, entries) in (0_u64..).zip(tables) {
        let at = layout.l2 + (number << shape.l2.cluster_bits.bits());
        let index = usize::try_from(per_table(&entries[0])).unwrap_or(usize::MAX);
        let entry = L1Entry::encode(HostOffset::new(at), true).0.to_be_bytes();
        l1[index * L1Entry::BYTES..][..L1Entry::BYTES].copy_from_slice(&entry);
        l2.push((at, data.table(&mut sink, entries)?));
    }
    for (at, table) in l2 {
        sink.write(at, &table)?;
    }
    sink.write(layout.l1, &l1)?;
    data.refcounts.write(&mut sink, layout.refcount_table, layout.refcount_blocks)?;
    sink.write(0, &header(image, shape, &layout)?)?;
    sink.finish(data.next)?;
    data.data_file.map_or(Ok(()), |file| file.finish(image.shape.len))
}

fn header(image: &Image<'_>, shape: &Qcow2Shape, layout: &Layout) -> Result<Vec<u8>> {
    let data_file = image.names.qcow2.as_ref().and_then(|names| names.data_file.as_ref());
    let backing = image.below.map(|below| BackingName {
        name: below.file.clone().into(),
        format: Some(below.format.clone()),
    });
    let narrow = |count: u64| {
        u32::try_from(count)
            .map_err(|_| Error::new(ErrorKind::Limit, format!("{count} does not fit the header")))
    };
    Header {
        size: image.shape.len,
        l1_entries: narrow(layout.l1_entries as u64)?,
        l1_offset: HostOffset::new(layout.l1),
        refcount_table_offset: HostOffset::new(layout.refcount_table),
        refcount_table_clusters: narrow(layout.refcount_table_clusters)?,
        refcount_width: shape.refcount,
        autoclear: Autoclear {
            raw_external: shape.data_file == DataFile::ExternalRaw,
            ..Autoclear::default()
        },
        backing,
        data_file_name: data_file.map(Into::into),
        ..Header::new(shape.l2, shape.compression)
    }
    .encode()
}

/// Where the parts of the file are, in bytes.
struct Layout {
    refcount_table: u64,
    refcount_table_clusters: u64,
    refcount_blocks: u64,
    l1: u64,
    l1_entries: usize,
    l2: u64,
    data: u64,
    /// Maximum number of clusters that the file can have.
    clusters: u64,
}

impl Layout {
    fn new(shape: &Qcow2Shape, len: u64, entries: &[Entry]) -> Self {
        let bits = shape.l2.cluster_bits;
        let l1_entries = len.div_ceil(1 << shape.l2.table_bits());
        let l1_clusters = bits.clusters_for(l1_entries * L1Entry::BYTES as u64);
        let l2_tables = entries
            .chunk_by(|a, b| {
                a.cluster >> shape.l2.entries_bits() == b.cluster >> shape.l2.entries_bits()
            })
            .count() as u64;
        let data_clusters: u64 =
            entries.iter().map(|entry| clusters_max(entry.content, shape)).sum();
        let others = 1 + l1_clusters + l2_tables + data_clusters;

        let area = refcount_area(shape.refcount, bits, others);
        let clusters = others + area.clusters();

        let at = |clusters: u64| clusters << bits.bits();
        let refcount_table = at(1);
        let refcount_blocks = refcount_table + at(area.table);
        let l1 = refcount_blocks + at(area.blocks);
        let l2 = l1 + at(l1_clusters);
        Self {
            refcount_table,
            refcount_table_clusters: area.table,
            refcount_blocks,
            l1,
            l1_entries: usize::try_from(l1_entries).unwrap_or(usize::MAX),
            l2,
            data: l2 + at(l2_tables),
            clusters,
        }
    }
}

/// Maximum number of clusters of the image that `content` takes.
fn clusters_max(content: Content, shape: &Qcow2Shape) -> u64 {
    match content {
        _ if shape.data_file != DataFile::Internal => 0,
        Content::Zero | Content::Subclusters { placed: false, .. } => 0,
        Content::Compressed => COMPRESSED_CLUSTERS_MAX,
        _ => 1,
    }
}

/// The data of an image that is being made.
struct Data<'a> {
    image: &'a Image<'a>,
    shape: &'a Qcow2Shape,
    refcounts: Refcounts,
    /// First byte of the image that is free.
    next: u64,
    rng: Rng,
    compressor: Compressor,
    data_file: Option<Sink>,
}

impl Data<'_> {
    /// Places the data of `entries`, which share an L2 table, and returns that table.
    fn table(&mut self, sink: &mut Sink, entries: &[Entry]) -> Result<Vec<u8>> {
        let format = self.shape.l2;
        let mut table = vec![0; 1 << format.cluster_bits.bits()];
        let mut order: Vec<&Entry> = entries.iter().collect();
        if self.image.order.is_some() {
            self.rng.shuffle(&mut order);
        }
        for entry in order {
            let guest = entry.cluster << format.cluster_bits.bits();
            let says = self.place(sink, guest, entry.content)?;
            let index = usize::try_from(format.l2_index(GuestOffset::new(guest)));
            format.put_raw(&mut table, index.unwrap_or(usize::MAX), format.encode(says, true));
        }
        Ok(table)
    }

    /// Writes the content of the cluster at `guest` and returns its entry.
    fn place(&mut self, sink: &mut Sink, guest: u64, content: Content) -> Result<L2Entry> {
        let all = u32::MAX;
        Ok(match content {
            Content::Zero => L2Entry::Zero,
            Content::Subclusters { allocated, zero, placed: false } => {
                L2Entry::Subclusters { host: None, allocated, zero }
            }
            Content::Data => L2Entry::Data(self.place_cluster(sink, guest, all)?),
            Content::ZeroAllocated => L2Entry::ZeroAllocated(self.place_cluster(sink, guest, 0)?),
            Content::Subclusters { allocated, zero, placed: true } => {
                let host = Some(self.place_cluster(sink, guest, allocated)?);
                L2Entry::Subclusters { host, allocated, zero }
            }
            Content::Compressed => match self.compress(guest)? {
                Some(packed) => L2Entry::Compressed(self.place_compressed(sink, &packed)?),
                None => L2Entry::Data(self.place_cluster(sink, guest, all)?),
            },
        })
    }

    /// Writes an uncompressed cluster, with data in its `allocated` subclusters and garbage in the
    /// others.
    fn place_cluster(&mut self, sink: &mut Sink, guest: u64, allocated: u32) -> Result<HostOffset> {
        let bits = self.shape.l2.cluster_bits;
        let (sink, host, len) = match &mut self.data_file {
            // The file ends where the disk ends.
            Some(file) => (file, guest, bits.bytes().min(self.image.shape.len - guest)),
            None => {
                let host = self.next.next_multiple_of(bits.bytes());
                self.next = host + bits.bytes();
                self.refcounts.add_reference(&(host..self.next));
                (sink, host, bits.bytes())
            }
        };
        if self.image.data == DataMode::Written {
            let room = sink.room(host, usize::try_from(len).unwrap_or(usize::MAX))?;
            fill(room, guest, self.image, self.shape, allocated);
        }
        Ok(HostOffset::new(host))
    }

    /// The cluster at `guest` compressed; `None` if it cannot be or need not be.
    fn compress(&mut self, guest: u64) -> Result<Option<Vec<u8>>> {
        if self.image.data == DataMode::Holes {
            return Ok(None);
        }
        let mut cluster = vec![0; 1 << self.shape.l2.cluster_bits.bits()];
        content::fill(&mut cluster, guest, self.image.shape.number);
        let mut packed = self.compressor.compress(&cluster)?;
        // Real data compresses less well: some are made longer, which both formats allow.
        if let Some(packed) = packed.as_mut().filter(|_| self.rng.percent(20)) {
            let more = self.rng.below((cluster.len() - packed.len()) as u64);
            packed.resize(packed.len() + usize::try_from(more).unwrap_or(0), POISON);
        }
        Ok(packed)
    }

    /// Puts `packed` after the last compressed cluster, at any byte; sometimes across a cluster's
    /// end.
    fn place_compressed(&mut self, sink: &mut Sink, packed: &[u8]) -> Result<CompressedCluster> {
        let bits = self.shape.l2.cluster_bits;
        let len = packed.len() as u64;
        let mut host = self.next;
        if self.rng.percent(10) {
            host = host.max((host + 1).next_multiple_of(bits.bytes()) - len / 2);
        }
        // The entry knows the length to a sector only, and all of it is counted.
        let named = |host: u64| host..(host + len).next_multiple_of(SECTOR_BYTES);
        if !self.refcounts.can_add_reference(&named(host)) {
            host = self.next.next_multiple_of(bits.bytes());
        }
        self.refcounts.add_reference(&named(host));
        sink.write(host, packed)?;
        self.next = host + len;
        Ok(CompressedCluster { host: HostOffset::new(host), len_max: len })
    }
}

fn fill(room: &mut [u8], guest: u64, image: &Image<'_>, shape: &Qcow2Shape, allocated: u32) {
    if allocated == u32::MAX {
        return content::fill(room, guest, image.shape.number);
    }
    // Other readers of a raw data file also see what is where nothing is allocated.
    room.fill(if shape.data_file == DataFile::ExternalRaw { 0 } else { POISON });
    let bytes = (1_usize << shape.l2.cluster_bits.bits()) / SUBCLUSTER_COUNT as usize;
    for (number, part) in (0_u64..).zip(room.chunks_mut(bytes)) {
        if allocated >> number & 1 == 1 {
            content::fill(part, guest + number * bytes as u64, image.shape.number);
        }
    }
}
