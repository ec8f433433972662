//! Images of a few clusters, made entry by entry, for tests that need a particular table, including
//! ones that no writer would make. Refcounts are missing: reading does not need them.

use mica_qcow2_format::{L1Entry, L2Entry, L2Format, RawL2Entry, Version};
use mica_units::{ClusterBits, HostOffset};

/// The properties of a [`TinyImage`].
#[derive(Clone, Debug)]
pub struct TinySpec {
    /// Size of a cluster as a power of two, 9 to 21.
    pub cluster_bits: u32,
    /// Version of the format.
    pub version: Version,
    /// Whether its L2 entries are extended; needs version 3 and clusters of 16 KiB.
    pub extended: bool,
    /// Length of the disk.
    pub disk_bytes: u64,
    /// Name of the backing file, and its format.
    pub backing: Option<(String, &'static str)>,
}

/// An image under construction.
#[derive(Clone, Debug)]
pub struct TinyImage {
    l2: L2Format,
    l1_entries: u64,
    bytes: Vec<u8>,
}

const L1_CLUSTER: u64 = 2;

impl TinyImage {
    /// An empty image.
    ///
    /// # Panics
    /// If the format does not allow the spec.
    pub fn new(spec: &TinySpec) -> Self {
        let cluster_bits = ClusterBits::new(spec.cluster_bits).expect("a cluster size of qcow2");
        let l2 = L2Format {
            cluster_bits,
            version: spec.version,
            extended: spec.extended,
            data_file: false,
        };
        let l1_entries = spec.disk_bytes.div_ceil(1 << l2.table_bits());
        let mut this = Self { l2, l1_entries, bytes: Vec::new() };
        let l1_clusters = cluster_bits.clusters_for(l1_entries * L1Entry::BYTES as u64);
        this.grow_to(L1_CLUSTER + l1_clusters);
        this.put(0, &0x5146_49fb_u32.to_be_bytes());
        this.put(4, &if spec.version == Version::V2 { 2_u32 } else { 3 }.to_be_bytes());
        this.put(20, &spec.cluster_bits.to_be_bytes());
        this.put(24, &spec.disk_bytes.to_be_bytes());
        this.put(36, &u32::try_from(l1_entries).expect("a small disk").to_be_bytes());
        this.put(40, &(L1_CLUSTER * cluster_bits.bytes()).to_be_bytes());
        this.put(48, &cluster_bits.bytes().to_be_bytes());
        this.put(56, &1_u32.to_be_bytes());
        let mut end = 72;
        if spec.version == Version::V3 {
            this.put(72, &(u64::from(spec.extended) << 4).to_be_bytes());
            this.put(96, &4_u32.to_be_bytes());
            this.put(100, &104_u32.to_be_bytes());
            end = 104;
        }
        if let Some((name, format)) = &spec.backing {
            let format_len = u32::try_from(format.len()).expect("a short name");
            this.put(end, &0xe279_2aca_u32.to_be_bytes());
            this.put(end + 4, &format_len.to_be_bytes());
            this.put(end + 8, format.as_bytes());
            let at = end + 24;
            this.put(8, &(at as u64).to_be_bytes());
            this.put(16, &u32::try_from(name.len()).expect("a short name").to_be_bytes());
            this.put(at, name.as_bytes());
        }
        this
    }

    /// How its L2 tables are read.
    pub fn l2(&self) -> L2Format {
        self.l2
    }

    /// Entries of its L1 table.
    pub fn l1_entries(&self) -> u64 {
        self.l1_entries
    }

    /// Where L1 entry `index` is in the file.
    pub fn l1_at(&self, index: u64) -> usize {
        let at = L1_CLUSTER * self.l2.cluster_bits.bytes() + index * L1Entry::BYTES as u64;
        usize::try_from(at).expect("a small image")
    }

    /// A new cluster of zeros at the end of the file.
    pub fn allocate(&mut self) -> HostOffset {
        let bits = self.l2.cluster_bits;
        let cluster = bits.clusters_for(self.bytes.len() as u64);
        self.grow_to(cluster + 1);
        HostOffset::new(cluster << bits.bits())
    }

    /// Gives guest cluster `cluster` this L2 entry, in a table that is made if it is missing.
    /// Returns where the entry is in the file.
    pub fn set_raw(&mut self, cluster: u64, raw: RawL2Entry) -> usize {
        let l1_at = self.l1_at(cluster >> self.l2.entries_bits());
        let l1_entry = self.bytes[l1_at..].first_chunk().expect("the table is there");
        let table = match L1Entry(u64::from_be_bytes(*l1_entry)).offset() {
            HostOffset::ZERO => {
                let table = self.allocate();
                self.put(l1_at, &L1Entry::encode(table, true).0.to_be_bytes());
                table
            }
            table => table,
        };
        let index = cluster & (self.l2.entries() - 1);
        let at = table.bytes() + index * self.l2.entry_bytes() as u64;
        let at = usize::try_from(at).expect("a small image");
        self.l2.put_raw(&mut self.bytes[at..], 0, raw);
        at
    }

    /// As [`Self::set_raw`], with a decoded entry.
    pub fn set(&mut self, cluster: u64, entry: L2Entry) -> usize {
        self.set_raw(cluster, self.l2.encode(entry, true))
    }

    /// Writes `bytes` at `at` of the file.
    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// The file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The file, to be changed at will.
    pub fn bytes_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    fn grow_to(&mut self, clusters: u64) {
        let len = clusters << self.l2.cluster_bits.bits();
        self.bytes.resize(usize::try_from(len).expect("a small image"), 0);
    }
}
