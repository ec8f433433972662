//! Lays out a new image in one go, from the start of the disk to its end. Pure: it determines which
//! bytes go where, and does no I/O.
//!
//! ```text
//! header | L1 | LUKS | data and L2 tables in the order of the disk | refcount blocks
//! refcount table
//! ```
//!
//! Invariants
//! - I1 Clusters are taken one after the other and never given back: all from 0 to the end are in
//!   use, once, except those that compressed clusters share.
//! - I2 Clusters of the disk are passed in ascending order, so that one L2 table is open at a time.
//! - I3 No cluster is shared by more users than its refcount can count.
//!
//! [`ImageWriter::end`] produces what follows the data, and the header at the very end.

mod compress;
mod ending;
mod refcounts;

pub use compress::{CompressionLevel, Compressor};
pub use ending::Ending;
pub use refcounts::{RefcountArea, refcount_area};

use crate::create::{ImagePlan, Preallocation};
use crate::references::References;
use mica_block::{Error, ErrorKind, Result};
use mica_qcow2_format::{CompressedCluster, L1Entry, L2Entry, Version};
use mica_rt::Buf;
use mica_units::{ClusterBits, GuestOffset, HostCluster, HostOffset, SECTOR_BYTES};
use std::ops::Range;

/// The file that bytes go to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// The image.
    Image,
    /// The file that holds its data.
    DataFile,
}

/// Bytes to be written.
#[derive(Debug)]
pub struct Write {
    /// Which file.
    pub place: Place,
    /// Where in it.
    pub at: HostOffset,
    /// What.
    pub bytes: Buf,
}

/// The contents of one cluster of the disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Content {
    /// Nothing: what lies beneath shows.
    Unallocated,
    /// Bytes throughout.
    Data,
    /// Bytes in some subclusters, zeros in others; those in neither set show what lies beneath.
    /// Without subclusters there is one: bit 0.
    Parts {
        /// Subclusters with bytes.
        allocated: u32,
        /// Subclusters of zeros.
        zero: u32,
    },
    /// Bytes, compressed to these.
    Packed(Vec<u8>),
    /// A place that was never written, so that it reads as zeros.
    Reserved,
}

/// What [`ImageWriter::reserve_table`] allocated.
#[derive(Debug)]
pub struct Reserved {
    /// The place of the clusters that were allocated, and their total length.
    pub data: Option<(Place, HostOffset, u64)>,
    /// What is to be written.
    pub writes: Vec<Write>,
}

/// Writes an image from the start of its disk to the end.
#[derive(Debug)]
pub struct ImageWriter {
    plan: ImagePlan,
    l1: Vec<u8>,
    /// The L2 table that is being filled, with its index in the L1 table.
    table: Option<(u64, Vec<u8>)>,
    /// L2 tables that were reserved, for [`Self::reserve_table`].
    tables_reserved: u64,
    /// First cluster that is not taken.
    next: HostCluster,
    /// The bytes behind the last compressed cluster that the next one may use.
    tail: Range<u64>,
    /// How often clusters are counted more than once (I1): of a compressed image that may be most
    /// of them, so that a map of them has no bound.
    shared: References,
}

/// A run of bytes waiting to be written.
enum Source {
    /// A range of the piece that is being placed.
    Piece(Range<usize>),
    /// Bytes of their own.
    Own(Vec<u8>),
}

impl Source {
    fn len(&self) -> usize {
        match self {
            Self::Piece(range) => range.len(),
            Self::Own(bytes) => bytes.len(),
        }
    }
}

impl ImageWriter {
    /// A writer of an empty image.
    ///
    /// # Errors
    /// `Limit` if this machine has no room for its L1 table.
    pub fn new(plan: ImagePlan) -> Result<Self> {
        let bits = plan.l2.cluster_bits;
        let l1_bytes = plan.l1_entries() * L1Entry::BYTES as u64;
        let l1_len = usize::try_from(l1_bytes)
            .map_err(|_| Error::new(ErrorKind::Limit, "the L1 table does not fit this machine"))?;
        let luks = plan.luks_place().map_or(0, |(_, len)| bits.clusters_for(len));
        let next = HostCluster::new(1 + plan.l1_clusters() + luks);
        let shared = References::new(plan.refcount_width, HostCluster::ZERO);
        Ok(Self {
            plan,
            l1: vec![0; l1_len],
            table: None,
            tables_reserved: 0,
            next,
            tail: 0..0,
            shared,
        })
    }

    /// What is being written.
    pub fn plan(&self) -> &ImagePlan {
        &self.plan
    }

    /// Allocates the clusters of the disk from `start` on: `contents` describes what they hold, and
    /// `piece` has their bytes, whole clusters, even for those without any, in memory of our own.
    ///
    /// # Errors
    /// `Limit` if the file becomes longer than the format allows.
    pub fn place(
        &mut self,
        start: GuestOffset,
        piece: Buf,
        contents: Vec<Content>,
    ) -> Result<Vec<Write>> {
        let cluster_len = self.cluster_len();
        assert_eq!(piece.len(), contents.len() * cluster_len, "whole clusters");
        let mut segments = Vec::new();
        for (number, content) in contents.into_iter().enumerate() {
            let guest = GuestOffset::new(start.bytes() + (number * cluster_len) as u64);
            let within = number * cluster_len..(number + 1) * cluster_len;
            self.place_cluster(guest, content, within, &mut segments)?;
        }
        let piece = self.encrypted(&segments, piece);
        Ok(gather(segments, piece))
    }

    /// The bytes of a piece as they are written to the places in `segments`.
    fn encrypted(&self, segments: &[(Place, u64, Source)], mut piece: Buf) -> Buf {
        let Some(luks) = &self.plan.encryption else { return piece };
        for (_, at, source) in segments {
            if let Source::Piece(range) = source {
                let bytes = &mut piece.own_bytes()[range.clone()];
                luks.cipher().encrypt(at / SECTOR_BYTES, bytes);
            }
        }
        piece
    }

    fn place_cluster(
        &mut self,
        guest: GuestOffset,
        content: Content,
        within: Range<usize>,
        segments: &mut Vec<(Place, u64, Source)>,
    ) -> Result<()> {
        let entry = match content {
            Content::Unallocated => return Ok(()),
            Content::Parts { allocated: 0, zero: 0 } => return Ok(()),
            Content::Parts { allocated: 0, zero } if self.plan.l2.extended => {
                L2Entry::Subclusters { host: None, allocated: 0, zero }
            }
            // Version 2 has no zero clusters: they are data.
            Content::Parts { allocated: 0, .. } if self.plan.l2.version == Version::V3 => {
                L2Entry::Zero
            }
            Content::Packed(packed) => {
                let cluster = self.take_packed(packed.len() as u64)?;
                segments.push((Place::Image, cluster.host.bytes(), Source::Own(packed)));
                L2Entry::Compressed(cluster)
            }
            Content::Reserved => {
                let (_, host) = self.take_clusters(guest, 1);
                self.reserved(host)
            }
            Content::Data | Content::Parts { .. } => {
                let (place, host) = self.take_clusters(guest, 1);
                segments.push((place, host.bytes(), Source::Piece(within)));
                match content {
                    Content::Parts { allocated, zero } if self.plan.l2.extended => {
                        L2Entry::Subclusters { host: Some(host), allocated, zero }
                    }
                    _ => L2Entry::Data(host),
                }
            }
        };
        if let Some((at, table)) = self.open_table(self.plan.l2.l1_index(guest)) {
            segments.push((Place::Image, at, Source::Own(table)));
        }
        self.put_entry(guest, entry);
        Ok(())
    }

    /// Allocates every cluster of the next L2 table, if the plan wants them preallocated; `None`
    /// when no table is left.
    ///
    /// # Errors
    /// `Limit` if the file becomes longer than the format allows.
    pub fn reserve_table(&mut self) -> Result<Option<Reserved>> {
        let l2 = self.plan.l2;
        if self.plan.preallocation == Preallocation::Off
            || self.tables_reserved == self.plan.l1_entries()
        {
            return Ok(None);
        }
        let bits = l2.cluster_bits;
        let first = l2.first_of_table(self.tables_reserved);
        let count = l2.entries().min(self.plan.clusters() - first.number());
        let table = self.open_table(self.tables_reserved);
        self.tables_reserved += 1;
        let (place, host) = self.take_clusters(bits.start_of(first), count);
        for number in 0..count {
            let guest = bits.start_of(first.saturating_add(number));
            let host = HostOffset::new(host.bytes() + bits.bytes_of(number));
            self.put_entry(guest, self.reserved(host));
        }
        let segments = table.map(|(at, table)| (Place::Image, at, Source::Own(table)));
        let writes = gather(segments.into_iter().collect(), Buf::new(0));
        Ok(Some(Reserved { data: Some((place, host, bits.bytes_of(count))), writes }))
    }

    /// Ends the L2 table that is open. Nothing is allocated afterwards.
    ///
    /// # Errors
    /// `Limit` if the file becomes longer than the format allows.
    pub fn take_last_table(&mut self) -> Result<Vec<Write>> {
        let table = self.close_table();
        let segments = table.map(|(at, table)| (Place::Image, at, Source::Own(table)));
        Ok(gather(segments.into_iter().collect(), Buf::new(0)))
    }

    /// Required length of the data file, if there is one: that of the disk, for programs that read
    /// it alone.
    pub fn data_file_len(&self) -> Option<u64> {
        self.plan.data_file.as_ref().map(|_| self.plan.size)
    }

    /// What follows the data.
    ///
    /// # Errors
    /// `Limit` if the refcount table would be longer than QEMU reads.
    pub fn end(self) -> Result<Ending> {
        assert!(self.table.is_none(), "the last table was taken");
        Ending::new(self.plan, self.l1, self.next, self.shared)
    }

    fn cluster_bits(&self) -> ClusterBits {
        self.plan.l2.cluster_bits
    }

    fn cluster_len(&self) -> usize {
        1 << self.cluster_bits().bits()
    }

    /// Makes table number `index` the one being filled; returns the previous one, if it ends here.
    fn open_table(&mut self, index: u64) -> Option<(u64, Vec<u8>)> {
        match &self.table {
            Some((open, _)) if *open == index => return None,
            Some((open, _)) => assert!(*open < index, "clusters come in ascending order (I2)"),
            None => {}
        }
        let closed = self.close_table();
        self.table = Some((index, vec![0; self.cluster_len()]));
        closed
    }

    /// Allocates the open table.
    fn close_table(&mut self) -> Option<(u64, Vec<u8>)> {
        let (index, table) = self.table.take()?;
        let at = self.take(1);
        let entry = L1Entry::encode(at, true).0.to_be_bytes();
        let within = usize::try_from(index).expect("the table is in memory") * L1Entry::BYTES;
        self.l1[within..within + L1Entry::BYTES].copy_from_slice(&entry);
        Some((at.bytes(), table))
    }

    /// The entry of a cluster that has a place and no bytes yet. A raw data file has its bytes from
    /// the start; elsewhere what lies beneath shows until a subcluster is written. What was never
    /// written reads as zeros, unless it is decrypted.
    fn reserved(&self, host: HostOffset) -> L2Entry {
        if self.plan.encryption.is_some() && !self.plan.l2.extended {
            return L2Entry::ZeroAllocated(host);
        }
        match self.plan.l2.extended && !self.plan.has_raw_data_file() {
            true => L2Entry::Subclusters { host: Some(host), allocated: 0, zero: 0 },
            false => L2Entry::Data(host),
        }
    }

    fn put_entry(&mut self, guest: GuestOffset, entry: L2Entry) {
        let l2 = self.plan.l2;
        let index = usize::try_from(l2.l2_index(guest)).expect("below the entries of a table");
        let (_, table) = self.table.as_mut().expect("its table is open");
        l2.put_raw(table, index, l2.encode(entry, true));
    }

    /// Takes `count` contiguous clusters for those of the disk from `guest` on.
    fn take_clusters(&mut self, guest: GuestOffset, count: u64) -> (Place, HostOffset) {
        if self.plan.l2.data_file {
            return (Place::DataFile, HostOffset::new(guest.bytes()));
        }
        (Place::Image, self.take(count))
    }

    /// Takes the next `count` clusters of the file.
    fn take(&mut self, count: u64) -> HostOffset {
        let first = self.next;
        self.next = first.saturating_add(count);
        self.cluster_bits().start_of(first)
    }

    /// Takes `len` bytes, less than a cluster, for a compressed cluster: directly after the
    /// previous one if the two may share a cluster.
    fn take_packed(&mut self, len: u64) -> Result<CompressedCluster> {
        let bits = self.cluster_bits();
        let next = bits.start_of(self.next).bytes();
        let shared = bits.host_cluster(HostOffset::new(self.tail.start));
        let count = 1 + self.shared.get(shared);
        let may_share = !self.tail.is_empty() && count < self.plan.refcount_width.max();
        let fits = self.tail.start + len <= self.tail.end;
        let goes_on = self.tail.end == next;
        let at = match may_share && (fits || goes_on) {
            true => {
                self.shared.add(shared, 1);
                self.tail.start
            }
            false => next,
        };
        let end = at + len;
        if end > CompressedCluster::host_max(bits).bytes() {
            let what = "the file is too long for compressed clusters of this size";
            return Err(Error::new(ErrorKind::Limit, what));
        }
        let after = bits.host_cluster_up(HostOffset::new(end));
        self.next = self.next.max(after);
        self.tail = end..bits.start_of(after).bytes();
        Ok(CompressedCluster { host: HostOffset::new(at), len_max: len })
    }
}

/// Joins adjacent segments; a piece that is written unchanged is not copied.
fn gather(segments: Vec<(Place, u64, Source)>, piece: Buf) -> Vec<Write> {
    let mut runs: Vec<(Place, u64, usize, Vec<Source>)> = Vec::new();
    for (place, at, source) in segments {
        let len = source.len();
        match runs.last_mut() {
            Some((last, start, total, sources))
                if *last == place && *start + *total as u64 == at =>
            {
                *total += len;
                match (sources.last_mut(), source) {
                    (Some(Source::Piece(before)), Source::Piece(range))
                        if before.end == range.start =>
                    {
                        before.end = range.end;
                    }
                    (_, source) => sources.push(source),
                }
            }
            _ => runs.push((place, at, len, vec![source])),
        }
    }
    if let [(place, at, len, sources)] = runs.as_slice()
        && matches!(sources.as_slice(), [Source::Piece(_)])
        && *len == piece.len()
    {
        return vec![Write { place: *place, at: HostOffset::new(*at), bytes: piece }];
    }
    let joined = |(place, at, len, sources): (Place, u64, usize, Vec<Source>)| {
        let mut bytes = Buf::new(len);
        let mut done = 0;
        for source in sources {
            let from = match &source {
                Source::Piece(range) => &piece[range.clone()],
                Source::Own(bytes) => bytes.as_slice(),
            };
            bytes.put(done, from);
            done += from.len();
        }
        Write { place, at: HostOffset::new(at), bytes }
    };
    runs.into_iter().map(joined).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::create::ImageWish;

    /// The story: each cluster that two compressed ones share had an entry in a map, which is half
    /// a gigabyte for a terabyte of them.
    #[test]
    fn shared_clusters_of_a_compressed_image_cost_two_bytes_each() {
        const COUNT: u64 = 1_000_000;
        let plan = ImageWish::default().plan(1 << 40).expect("a plan");
        let mut writer = ImageWriter::new(plan).expect("a writer");
        for _ in 0..COUNT {
            writer.take_packed(40_000).expect("there is room");
        }
        let clusters = writer.next.number();
        let shared = HostCluster::ZERO.up_to(writer.next);
        let shared = shared.filter(|cluster| writer.shared.get(*cluster) > 0).count() as u64;
        assert!(shared > clusters * 9 / 10, "{shared} of {clusters} are shared");
        let bytes = writer.shared.bytes() as u64;
        assert!(bytes < 2 * clusters + (64 << 10), "{bytes} bytes for {clusters} clusters");
    }
}
