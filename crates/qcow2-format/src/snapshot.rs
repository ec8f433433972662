//! The table of internal snapshots: entries of varying length, each aligned to eight bytes.

use super::corrupt;
use mica_block::Result;
use mica_units::HostOffset;
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Maximum number of internal snapshots that QEMU and mica accept.
pub const SNAPSHOT_COUNT_MAX: u32 = 65536;
/// Longest snapshot table that QEMU and mica accept.
pub const SNAPSHOT_TABLE_BYTES_MAX: u64 = 1024 * 65536;

/// Maximum extra data in an entry that QEMU and mica accept.
const EXTRA_BYTES_MAX: usize = 1024;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawSnapshot {
    l1_offset: U64,
    l1_entries: U32,
    id_len: U16,
    name_len: U16,
    date_seconds: U32,
    date_nanoseconds: U32,
    vm_clock_nanoseconds: U64,
    vm_state_bytes: U32,
    extra_len: U32,
}

const RAW_BYTES: usize = size_of::<RawSnapshot>();
const _: () = assert!(RAW_BYTES == 40);

/// An internal snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SnapshotEntry {
    /// Its ID, as text.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Where its L1 table starts. Not checked: a reader must check it first.
    pub l1_offset: HostOffset,
    /// Number of entries in its L1 table. Not checked either.
    pub l1_entries: u32,
    /// When it was taken: seconds since 1970.
    pub date_seconds: u32,
    /// When it was taken: nanoseconds of the second.
    pub date_nanoseconds: u32,
    /// The guest's clock.
    pub vm_clock_nanoseconds: u64,
    /// Length of the machine's state; 0 if only the disk was kept.
    pub vm_state_bytes: u64,
    /// Length of the disk, if the entry gives it; else that of the image.
    pub disk_bytes: Option<u64>,
    /// Number of executed instructions, if the entry gives it.
    pub icount: Option<u64>,
    /// Length of the extra data; version 3 requires 16.
    pub extra_bytes: u32,
    /// Extra data that mica does not know.
    pub unknown_extra: Vec<u8>,
}

/// What [`SnapshotEntry::decode`] found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SnapshotDecoded {
    /// An entry of `len` bytes; the next one starts at the next multiple of eight.
    Entry {
        /// The entry.
        entry: SnapshotEntry,
        /// Its length without padding.
        len: usize,
    },
    /// The entry needs this many bytes from its start; at most 135 KiB.
    NeedMore(usize),
}

impl SnapshotEntry {
    /// Decodes the entry at the start of `bytes`.
    ///
    /// # Errors
    /// `Corrupt` if it has more extra data than QEMU accepts.
    pub fn decode(bytes: &[u8]) -> Result<SnapshotDecoded> {
        let Ok((raw, rest)) = RawSnapshot::read_from_prefix(bytes) else {
            return Ok(SnapshotDecoded::NeedMore(RAW_BYTES));
        };
        let extra_len = raw.extra_len.get() as usize;
        if extra_len > EXTRA_BYTES_MAX {
            return Err(corrupt(format!(
                "too much extra metadata in a snapshot table entry: {extra_len} bytes, the maximum \
                 is {EXTRA_BYTES_MAX}"
            )));
        }
        let (id_len, name_len) = (usize::from(raw.id_len.get()), usize::from(raw.name_len.get()));
        let len = RAW_BYTES + extra_len + id_len + name_len;
        let Some((extra, rest)) = rest.split_at_checked(extra_len) else {
            return Ok(SnapshotDecoded::NeedMore(len));
        };
        let Some((id, rest)) = rest.split_at_checked(id_len) else {
            return Ok(SnapshotDecoded::NeedMore(len));
        };
        let Some(name) = rest.get(..name_len) else {
            return Ok(SnapshotDecoded::NeedMore(len));
        };
        let number = |at: usize| {
            let bytes = extra.get(at..)?.first_chunk()?;
            Some(u64::from_be_bytes(*bytes))
        };
        let entry = Self {
            id: String::from_utf8_lossy(id).into_owned(),
            name: String::from_utf8_lossy(name).into_owned(),
            l1_offset: HostOffset::new(raw.l1_offset.get()),
            l1_entries: raw.l1_entries.get(),
            date_seconds: raw.date_seconds.get(),
            date_nanoseconds: raw.date_nanoseconds.get(),
            vm_clock_nanoseconds: raw.vm_clock_nanoseconds.get(),
            vm_state_bytes: number(0).unwrap_or(u64::from(raw.vm_state_bytes.get())),
            disk_bytes: number(8),
            icount: number(16),
            extra_bytes: raw.extra_len.get(),
            unknown_extra: extra.get(24..).unwrap_or_default().to_vec(),
        };
        Ok(SnapshotDecoded::Entry { entry, len })
    }

    /// Appends the entry to `table`, after padding `table` to a multiple of eight bytes. The extra
    /// data reaches at least to the disk's length; names are cut at 65535 bytes.
    pub fn encode(&self, table: &mut Vec<u8>) {
        let mut extra = self.vm_state_bytes.to_be_bytes().to_vec();
        if let Some(bytes) = self.disk_bytes {
            extra.extend_from_slice(&bytes.to_be_bytes());
        }
        if let (Some(_), Some(icount)) = (self.disk_bytes, self.icount) {
            extra.extend_from_slice(&icount.to_be_bytes());
            extra.extend_from_slice(&self.unknown_extra);
        }
        let cut = |text: &str| {
            let len = u16::try_from(text.len()).unwrap_or(u16::MAX);
            text.as_bytes().iter().take(usize::from(len)).copied().collect::<Vec<u8>>()
        };
        let len_u16 = |bytes: &[u8]| u16::try_from(bytes.len()).unwrap_or(u16::MAX);
        let (id, name) = (cut(&self.id), cut(&self.name));
        let raw = RawSnapshot {
            l1_offset: self.l1_offset.bytes().into(),
            l1_entries: self.l1_entries.into(),
            id_len: len_u16(&id).into(),
            name_len: len_u16(&name).into(),
            date_seconds: self.date_seconds.into(),
            date_nanoseconds: self.date_nanoseconds.into(),
            vm_clock_nanoseconds: self.vm_clock_nanoseconds.into(),
            // A reader that does not know the 64-bit length takes the snapshot for one of the disk
            // only.
            vm_state_bytes: u32::try_from(self.vm_state_bytes).unwrap_or(0).into(),
            extra_len: u32::try_from(extra.len()).unwrap_or(u32::MAX).into(),
        };
        table.resize(table.len().next_multiple_of(8), 0);
        table.extend_from_slice(raw.as_bytes());
        table.extend_from_slice(&extra);
        table.extend_from_slice(&id);
        table.extend_from_slice(&name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> SnapshotEntry {
        SnapshotEntry {
            id: "1".to_owned(),
            name: "before".to_owned(),
            l1_offset: HostOffset::new(0x50000),
            l1_entries: 4,
            date_seconds: 7,
            date_nanoseconds: 8,
            vm_clock_nanoseconds: 9,
            vm_state_bytes: 1 << 33,
            disk_bytes: Some(1 << 30),
            icount: Some(5),
            extra_bytes: 24,
            unknown_extra: Vec::new(),
        }
    }

    #[test]
    fn snapshot_entry_round_trips() {
        let mut table = Vec::new();
        entry().encode(&mut table);
        let len = table.len();
        let decoded = SnapshotEntry::decode(&table).expect("valid");
        assert_eq!(decoded, SnapshotDecoded::Entry { entry: entry(), len });
    }

    #[test]
    fn cut_entry_says_how_much_it_needs() {
        let mut table = Vec::new();
        entry().encode(&mut table);
        assert_eq!(SnapshotEntry::decode(&[]).expect("cut"), SnapshotDecoded::NeedMore(40));
        for len in 40..table.len() {
            let decoded = SnapshotEntry::decode(&table[..len]).expect("cut");
            assert_eq!(decoded, SnapshotDecoded::NeedMore(table.len()));
        }
    }

    #[test]
    fn extra_data_beyond_the_limit_is_refused() {
        let mut table = Vec::new();
        entry().encode(&mut table);
        table[36..40].copy_from_slice(&1025_u32.to_be_bytes());
        assert!(SnapshotEntry::decode(&table).is_err());
        table[36..40].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(SnapshotEntry::decode(&table).is_err());
    }
}
