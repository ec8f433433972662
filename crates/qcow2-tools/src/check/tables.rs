//! L1 and L2 tables: the references in them, and the flags of their entries.
//!
//! L1 tables are read first and show which L2 tables are mentioned, and how often. Each L2 table is
//! then read once, in the order of the file.

use super::refcounts::One;
use super::{Checker, Finding, READ_BYTES_MAX, Snapshots, UNALIGNED_BYTES_MIN};
use mica_block::{Error, ErrorKind, Result};
use mica_qcow2_format::{CompressedCluster, L1Entry, L2Format, RawL2Entry};
use mica_units::{HostCluster, HostOffset};
use std::collections::BTreeMap;

/// Maximum number of L2 tables that are remembered before they are read.
const TABLES_MAX: usize = 1 << 18;

/// How often something is mentioned.
#[derive(Clone, Copy, Default)]
struct Mentions {
    /// By the disk's own tables.
    active: u64,
    /// By those of snapshots.
    snapshots: u64,
}

impl Mentions {
    const ACTIVE: Self = Self { active: 1, snapshots: 0 };

    fn all(self) -> u64 {
        self.active.saturating_add(self.snapshots)
    }
}

/// L2 tables waiting to be read, by their place.
#[derive(Default)]
pub(super) struct Tables {
    waiting: BTreeMap<u64, Mentions>,
    /// Bytes of tables so far that are not at clusters: those can overlap.
    unaligned_bytes: u64,
}

/// A flag that must be compared with a refcount that is not in memory.
struct Question {
    /// Where the entry is.
    at: u64,
    entry: u64,
    cluster: HostCluster,
}

impl Checker<'_> {
    /// Counts all references from the active L1 table and those of `snapshots`.
    pub(super) async fn refer_l1_tables(&mut self, snapshots: &Snapshots) -> Result<()> {
        let header = self.header;
        self.refer_l1(header.l1_offset, header.l1_entries, Mentions::ACTIVE).await?;
        for &(offset, entries, times) in &snapshots.l1_tables {
            self.refer_l1(offset, entries, Mentions { active: 0, snapshots: times }).await?;
        }
        self.read_waiting().await
    }

    async fn refer_l1(&mut self, at: HostOffset, entries: u32, mentions: Mentions) -> Result<()> {
        let bytes = u64::from(entries) * L1Entry::BYTES as u64;
        self.refer_place(at.bytes(), bytes, mentions.all())?;
        let mut at = at.bytes();
        // Beyond the end of the file are zeros: no tables.
        let end = at.saturating_add(bytes).min(self.file_bytes);
        let mut index = 0;
        while at < end {
            let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(READ_BYTES_MAX);
            let piece = self.read(at, len).await?;
            for (number, &entry) in piece.as_chunks::<{ L1Entry::BYTES }>().0.iter().enumerate() {
                let entry = L1Entry(u64::from_be_bytes(entry));
                if entry.0 != 0 {
                    let entry_at = at + (number * L1Entry::BYTES) as u64;
                    self.refer_l2(index, entry_at, entry, mentions).await?;
                }
                index += 1;
            }
            self.apply_to_l1().await?;
            at += len as u64;
        }
        Ok(())
    }

    async fn refer_l2(
        &mut self,
        index: u64,
        entry_at: u64,
        entry: L1Entry,
        mentions: Mentions,
    ) -> Result<()> {
        let bits = self.header.cluster_bits;
        let offset = entry.offset();
        if entry.has_reserved_bits() {
            self.corruption(Finding::L1ReservedBits { entry: entry.0 }, mentions.all());
        }
        self.refer(offset.bytes(), bits.bytes(), mentions.all())?;
        if !offset.is_aligned(bits.bytes()) {
            self.corruption(Finding::L2TableUnaligned { offset }, mentions.all());
        }
        if mentions.active > 0 && offset != HostOffset::ZERO {
            let cluster = bits.host_cluster(offset);
            if self.is_one(cluster, entry.copied()) == Flag::Ask
                && let Some(refcount) = self.refcount(cluster).await?
                && (refcount == 1) != entry.copied()
            {
                let finding = Finding::CopiedL2 { index, entry: entry.0, refcount };
                self.wrong_flag(finding, entry_at, entry.0, mentions.active);
            }
        }
        if offset.bytes() < self.file_bytes {
            if !offset.is_aligned(bits.bytes()) {
                self.count_unaligned(offset)?;
            }
            let waiting = self.tables.waiting.entry(offset.bytes()).or_default();
            waiting.active = waiting.active.saturating_add(mentions.active);
            waiting.snapshots = waiting.snapshots.saturating_add(mentions.snapshots);
        }
        if self.tables.waiting.len() >= TABLES_MAX {
            // Reading tables uses patches of its own.
            self.apply_to_l1().await?;
            self.read_waiting().await?;
        }
        Ok(())
    }

    /// Counts an L2 table that is not at a cluster, if it is to be read (I2).
    fn count_unaligned(&mut self, offset: HostOffset) -> Result<()> {
        if self.tables.waiting.contains_key(&offset.bytes()) {
            return Ok(());
        }
        self.tables.unaligned_bytes += self.header.cluster_bits.bytes();
        let bytes = self.tables.unaligned_bytes;
        if bytes <= self.file_bytes.max(UNALIGNED_BYTES_MIN) {
            return Ok(());
        }
        let what = format!("L2 tables of {bytes} bytes and more are not at clusters, and overlap");
        Err(Error::new(ErrorKind::Corrupt, what))
    }

    async fn read_waiting(&mut self) -> Result<()> {
        let waiting = std::mem::take(&mut self.tables.waiting);
        self.expect_more(waiting.len() as u64);
        let cluster_bytes = self.header.cluster_bits.bytes();
        let mut rest = waiting.into_iter().peekable();
        let mut together = Vec::new();
        while let Some((at, mentions)) = rest.next() {
            together.push(mentions);
            let mut len = self.cluster_len();
            while len + self.cluster_len() <= READ_BYTES_MAX
                && let Some((_, mentions)) =
                    rest.next_if(|(next, _)| *next == at + together.len() as u64 * cluster_bytes)
            {
                together.push(mentions);
                len += self.cluster_len();
            }
            let bytes = self.read(at, len).await?;
            let cluster_len = self.cluster_len();
            for (number, (table, mentions)) in
                bytes.chunks(cluster_len).zip(together.drain(..)).enumerate()
            {
                let table_at = at + number as u64 * cluster_bytes;
                let mut questions = self.check_l2(table_at, table, mentions)?;
                // So that each refcount block is read once.
                questions.sort_by_key(|question| question.cluster);
                for question in questions {
                    self.answer(question, mentions).await?;
                }
                self.apply_to_l2(table_at).await?;
                self.went_on(1);
            }
        }
        Ok(())
    }

    /// Counts the references in an L2 table and judges its entries. Returns the flags that need a
    /// closer look.
    fn check_l2(&mut self, at: u64, table: &[u8], mentions: Mentions) -> Result<Vec<Question>> {
        let format = self.header.l2_format();
        let mut questions = Vec::new();
        let mut follows = None;
        for (index, bytes) in table.chunks(format.entry_bytes()).enumerate() {
            let Some(raw) = format.raw(bytes, 0) else { continue };
            if raw == RawL2Entry::default() {
                continue;
            }
            let entry_at = at + (index * format.entry_bytes()) as u64;
            let kind = Kind::of(raw, format);
            if kind != Kind::Compressed && raw.has_reserved_bits() {
                self.corruption(Finding::L2ReservedBits { entry: raw.entry }, mentions.all());
            }
            match kind {
                Kind::Compressed => self.refer_compressed(index, raw, mentions)?,
                Kind::Placed => {
                    // The table at offset 0 is not a table; QEMU does not look at its flags.
                    if mentions.active > 0 && at != 0 {
                        questions.extend(self.question(raw, format, entry_at));
                    }
                    self.mend_unaligned(raw, format, entry_at);
                    self.refer_cluster(raw, format, &mut follows, mentions)?;
                }
                Kind::Unallocated => {
                    if raw.allocated() != 0 {
                        self.corruption(Finding::UnallocatedSubclusters, mentions.all());
                    }
                }
                Kind::Zero => {}
            }
        }
        Ok(questions)
    }

    fn refer_compressed(
        &mut self,
        index: usize,
        raw: RawL2Entry,
        mentions: Mentions,
    ) -> Result<()> {
        let times = mentions.all();
        let index = index as u64;
        let compressed = CompressedCluster::from_entry(raw.entry, self.header.cluster_bits);
        if raw.copied() {
            self.corruption(Finding::CompressedCopied { offset: compressed.host }, times);
        }
        // QEMU shows the entry without the flag it has just complained about.
        let entry = raw.entry & !(1 << 63);
        if self.header.incompatible.external_data_file {
            self.corruption(Finding::CompressedWithDataFile { index, entry }, times);
            return Ok(());
        }
        if raw.bitmap != 0 {
            self.corruption(Finding::CompressedWithSubclusters { index, entry }, times);
            return Ok(());
        }
        self.refer(compressed.host.bytes(), compressed.len_max, times)?;
        self.report.allocated_clusters += mentions.active;
        self.report.compressed_clusters += mentions.active;
        self.report.fragmented_clusters += mentions.active;
        Ok(())
    }

    fn refer_cluster(
        &mut self,
        raw: RawL2Entry,
        format: L2Format,
        follows: &mut Option<u64>,
        mentions: Mentions,
    ) -> Result<()> {
        let offset = raw.offset();
        let cluster_bytes = format.cluster_bits.bytes();
        if raw.allocated() & raw.zero() != 0 {
            self.corruption(Finding::SubclustersContradict { offset }, mentions.all());
        }
        if !offset.is_aligned(cluster_bytes) {
            let has_data = has_data(raw, format);
            self.corruption(Finding::ClusterUnaligned { offset, has_data }, mentions.all());
        }
        self.report.allocated_clusters += mentions.active;
        if follows.is_some_and(|follows| follows != 0 && follows != offset.bytes()) {
            self.report.fragmented_clusters += mentions.active;
        }
        *follows = Some(offset.bytes() + cluster_bytes);
        if !format.data_file {
            self.refer(offset.bytes(), cluster_bytes, mentions.all())?;
        }
        Ok(())
    }

    /// What has to be checked about the flag of a cluster with a place, if anything.
    fn question(&self, raw: RawL2Entry, format: L2Format, at: u64) -> Option<Question> {
        let cluster = format.cluster_bits.host_cluster(raw.offset());
        let ask = match format.data_file {
            // In a data file nothing is shared.
            true => !raw.copied(),
            false => self.is_one(cluster, raw.copied()) == Flag::Ask,
        };
        ask.then_some(Question { at, entry: raw.entry, cluster })
    }

    async fn answer(&mut self, question: Question, mentions: Mentions) -> Result<()> {
        let Question { at, entry, cluster } = question;
        let refcount = match self.header.incompatible.external_data_file {
            true => Some(1),
            false => self.refcount(cluster).await?,
        };
        let copied = RawL2Entry { entry, bitmap: 0 }.copied();
        if let Some(refcount) = refcount
            && (refcount == 1) != copied
        {
            let finding = Finding::CopiedData { entry, refcount };
            self.wrong_flag(finding, at, entry, mentions.active);
        }
        Ok(())
    }

    /// Whether the flag "the refcount is one" has to be compared with the refcount.
    fn is_one(&self, cluster: HostCluster, copied: bool) -> Flag {
        match (self.refcounts.is_one(cluster), copied) {
            (One::Yes, true) | (One::No, false) | (One::Unreadable, _) => Flag::Fine,
            (One::Yes, false) | (One::No, true) | (One::Unknown, _) => Flag::Ask,
        }
    }
}

/// Whether any part of a cluster with a place has data.
pub(super) fn has_data(raw: RawL2Entry, format: L2Format) -> bool {
    if format.extended { raw.allocated() != 0 } else { !raw.zero_flag() }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flag {
    Fine,
    Ask,
}

/// The result of QEMU's `qcow2_get_cluster_type`, without any verdict.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Unallocated,
    Zero,
    /// Data, or zeros with a place.
    Placed,
    Compressed,
}

impl Kind {
    fn of(raw: RawL2Entry, format: L2Format) -> Self {
        let placed = raw.offset() != HostOffset::ZERO;
        if raw.compressed() {
            Self::Compressed
        } else if raw.zero_flag() && !format.extended {
            if placed { Self::Placed } else { Self::Zero }
        } else if placed || format.data_file && raw.copied() {
            Self::Placed
        } else {
            Self::Unallocated
        }
    }
}
