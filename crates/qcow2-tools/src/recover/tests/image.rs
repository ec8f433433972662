//! Images built by hand, and what a guest reads from them.

use super::store::index;
use mica_qcow2_format::{
    Compression, Header, L1Entry, L2Entry, L2Format, RawL2Entry, RefcountTableEntry, RefcountWidth,
    SnapshotEntry, Version,
};
use mica_units::{ClusterBits, HostOffset};

#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) cluster_bits: u32,
    pub(super) refcount_order: u32,
    pub(super) extended: bool,
    /// Clusters of data.
    pub(super) data: u64,
}

/// An image in memory, with where its parts are.
#[derive(Clone)]
pub(super) struct Image {
    pub(super) header: Header,
    pub(super) bytes: Vec<u8>,
    pub(super) blocks_at: u64,
    pub(super) l1_at: u64,
    pub(super) l2_at: u64,
    pub(super) data_at: u64,
    pub(super) data: u64,
}

impl Image {
    /// Data at guest clusters 0.., each filled with its number. The refcounts permitting, a
    /// snapshot shares the L2 table and all that.
    pub(super) fn new(shape: Shape) -> Self {
        let bits = ClusterBits::new(shape.cluster_bits).expect("valid");
        let width = RefcountWidth::from_order(shape.refcount_order).expect("valid");
        let shared = shape.refcount_order > 0;
        let entries = width.block_entries(bits);
        let mut blocks = 1;
        while blocks * entries < 6 + blocks + shape.data {
            blocks += 1;
        }
        let blocks_at = 2;
        let l1_at = blocks_at + blocks;
        let (l2_at, data_at) = (l1_at + 3, l1_at + 4);
        let at = |cluster: u64| HostOffset::new(cluster << shape.cluster_bits);
        let l2 = L2Format {
            cluster_bits: bits,
            version: Version::V3,
            extended: shape.extended,
            data_file: false,
        };
        let header = Header {
            size: shape.data << shape.cluster_bits,
            l1_entries: 1,
            l1_offset: at(l1_at),
            refcount_table_offset: at(1),
            refcount_table_clusters: 1,
            refcount_width: width,
            snapshot_count: u32::from(shared),
            snapshots_offset: if shared { at(l1_at + 2) } else { HostOffset::ZERO },
            feature_names: Vec::new(),
            ..Header::new(l2, Compression::Deflate)
        };
        let clusters = data_at + shape.data;
        let bytes = vec![0; index(clusters << shape.cluster_bits)];
        let mut image = Self { header, bytes, blocks_at, l1_at, l2_at, data_at, data: shape.data };
        image.fill(shared, blocks, clusters);
        image
    }

    fn fill(&mut self, shared: bool, blocks: u64, clusters: u64) {
        let bits = self.header.cluster_bits.bits();
        let users = if shared { 2 } else { 1 };
        for block in 0..blocks {
            let at = HostOffset::new((self.blocks_at + block) << bits);
            self.put((1 << bits) + 8 * block, RefcountTableEntry::encode(at).0);
        }
        for cluster in 0..clusters {
            let unused = !shared && (cluster == self.l1_at + 1 || cluster == self.l1_at + 2);
            let users = if cluster >= self.l2_at { users } else { u64::from(!unused) };
            self.set_refcount(cluster, users);
        }
        let l2 = HostOffset::new(self.l2_at << bits);
        self.put(self.l1_at << bits, L1Entry::encode(l2, !shared).0);
        if shared {
            self.put((self.l1_at + 1) << bits, L1Entry::encode(l2, true).0);
            let mut table = Vec::new();
            snapshot(HostOffset::new((self.l1_at + 1) << bits), self.header.size)
                .encode(&mut table);
            let at = index((self.l1_at + 2) << bits);
            self.bytes[at..at + table.len()].copy_from_slice(&table);
        }
        for number in 0..self.data {
            let at = (self.data_at + number) << bits;
            let entry = self.header.l2_format().encode(L2Entry::Data(HostOffset::new(at)), !shared);
            self.set_l2(number, entry);
            let fill = u8::try_from(number % 250 + 1).expect("small");
            self.bytes[index(at)..index(at + (1 << bits))].fill(fill);
        }
        self.store_header();
    }

    pub(super) fn store_header(&mut self) {
        let header = self.header.encode().expect("fits");
        self.bytes[..header.len()].copy_from_slice(&header);
    }

    pub(super) fn put(&mut self, at: u64, value: u64) {
        self.bytes[index(at)..index(at) + 8].copy_from_slice(&value.to_be_bytes());
    }

    pub(super) fn l2(&self, number: u64) -> RawL2Entry {
        let table = &self.bytes[index(self.l2_at << self.header.cluster_bits.bits())..];
        self.header.l2_format().raw(table, index(number)).expect("in the table")
    }

    pub(super) fn set_l2(&mut self, number: u64, raw: RawL2Entry) {
        let at = index(self.l2_at << self.header.cluster_bits.bits());
        self.header.l2_format().put_raw(&mut self.bytes[at..], index(number), raw);
    }

    pub(super) fn set_refcount(&mut self, cluster: u64, refcount: u64) {
        let bits = self.header.cluster_bits.bits();
        let at = index(self.blocks_at << bits);
        // The blocks follow each other.
        let width = self.header.refcount_width;
        width.set(&mut self.bytes[at..], index(cluster), refcount).expect("fits");
    }

    pub(super) fn cluster_at(&self, cluster: u64) -> u64 {
        cluster << self.header.cluster_bits.bits()
    }
}

pub(super) fn snapshot(l1_offset: HostOffset, size: u64) -> SnapshotEntry {
    SnapshotEntry {
        id: "1".to_owned(),
        name: "one".to_owned(),
        l1_offset,
        l1_entries: 1,
        date_seconds: 0,
        date_nanoseconds: 0,
        vm_clock_nanoseconds: 0,
        vm_state_bytes: 0,
        disk_bytes: Some(size),
        icount: None,
        extra_bytes: 16,
        unknown_extra: Vec::new(),
    }
}

/// What the guest reads, cluster by cluster: `None` where that is an error.
pub(super) fn guest(bytes: &[u8]) -> Vec<Option<Vec<u8>>> {
    let header = super::header_of(bytes);
    let format = header.l2_format();
    let len = index(header.cluster_bits.bytes());
    let read = |at: u64| -> Vec<u8> {
        let there = bytes.get(index(at)..).unwrap_or_default();
        let mut piece = there[..there.len().min(len)].to_vec();
        piece.resize(len, 0);
        piece
    };
    let mut clusters = Vec::new();
    let l1 = read(header.l1_offset.bytes());
    for entry in l1.as_chunks().0.iter().take(header.l1_entries as usize) {
        let Ok(table) = L1Entry(u64::from_be_bytes(*entry)).decode(header.cluster_bits) else {
            clusters.push(None);
            continue;
        };
        let Some(table) = table else { continue };
        let table = read(table.bytes());
        for number in 0..index(format.entries()) {
            let raw = format.raw(&table, number).expect("in the table");
            clusters.push(match format.interpret(raw) {
                Ok(L2Entry::Data(host)) => Some(read(host.bytes())),
                Ok(L2Entry::Compressed(packed)) => Some(read(packed.host.bytes())),
                Ok(other) => Some(format!("{other:?}").into_bytes()[..4].to_vec()),
                Err(_) => None,
            });
        }
    }
    clusters
}
