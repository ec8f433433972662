//! The directory of persistent bitmaps, and the tables that it names.

use super::extension::BitmapsExtension;
use super::{corrupt, until_nul};
use mica_block::Result;
use mica_units::{ClusterBits, HostOffset};
use std::collections::HashSet;
use std::num::NonZeroU64;
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of an entry of a bitmap's table.
pub const BITMAP_TABLE_ENTRY_BYTES: u64 = 8;

/// Bytes of the clusters with a bitmap's bits at most, as in QEMU.
pub const BITMAP_BYTES_MAX: u64 = 0x2000_0000;

const TABLE_ENTRIES_MAX: u32 = 0x800_0000;
const GRANULARITY_BITS_MIN: u8 = 9;
const GRANULARITY_BITS_MAX: u8 = 31;
const NAME_BYTES_MAX: usize = 1023;
const TYPE_DIRTY_TRACKING: u8 = 1;
const IN_USE: u32 = 1 << 0;
const AUTO: u32 = 1 << 1;
/// Bit 2, `extra_data_compatible`, is among them: QEMU refuses it.
const RESERVED_FLAGS: u32 = !(IN_USE | AUTO);

const TABLE_OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const TABLE_RESERVED: u64 = 0xff00_0000_0000_01fe;
const TABLE_ALL_ONES: u64 = 1;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawBitmap {
    table_offset: U64,
    table_entries: U32,
    flags: U32,
    kind: u8,
    granularity_bits: u8,
    name_len: U16,
    extra_len: U32,
}

const RAW_BYTES: usize = size_of::<RawBitmap>();
const _: () = assert!(RAW_BYTES == 24);

/// A bitmap in the directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BitmapEntry {
    /// Its name.
    pub name: String,
    /// Where its table starts.
    pub table_offset: HostOffset,
    /// Number of entries in its table.
    pub table_entries: u32,
    /// Bytes of the disk covered by a bit, as a power of two.
    pub granularity_bits: u8,
    /// A writer did not save it when it finished: it does not match the data.
    pub in_use: bool,
    /// Writers keep it up to date.
    pub auto: bool,
}

/// An entry of a bitmap's table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BitmapTableEntry {
    /// All bits of this cluster of the bitmap are 0.
    Zeros,
    /// All bits of this cluster of the bitmap are 1.
    Ones,
    /// The bits are in a cluster of the file.
    Data(HostOffset),
}

/// The bitmaps in a directory. `disk_bytes` is the length of the disk that they cover.
///
/// # Errors
/// `Corrupt` if QEMU refuses the directory.
pub fn decode_bitmap_directory(
    directory: &[u8],
    extension: &BitmapsExtension,
    cluster_bits: ClusterBits,
    disk_bytes: u64,
) -> Result<Vec<BitmapEntry>> {
    let mut bitmaps: Vec<BitmapEntry> = Vec::new();
    let mut names = HashSet::new();
    let mut rest = directory;
    while !rest.is_empty() {
        if bitmaps.len() >= extension.count as usize {
            return Err(corrupt(format!(
                "the bitmap directory has more entries than the {} of its extension",
                extension.count
            )));
        }
        let (entry, after) = BitmapEntry::decode(rest, cluster_bits, disk_bytes)?;
        if !names.insert(entry.name.clone()) {
            return Err(corrupt(format!("there are two bitmaps {:?}", entry.name)));
        }
        bitmaps.push(entry);
        rest = after;
    }
    if bitmaps.len() != extension.count as usize {
        return Err(corrupt(format!(
            "the bitmap directory has {} entries instead of the {} of its extension",
            bitmaps.len(),
            extension.count
        )));
    }
    Ok(bitmaps)
}

impl BitmapEntry {
    fn decode(bytes: &[u8], bits: ClusterBits, disk_bytes: u64) -> Result<(Self, &[u8])> {
        let Ok((raw, rest)) = RawBitmap::read_from_prefix(bytes) else {
            return Err(corrupt("the bitmap directory ends within an entry"));
        };
        let (extra_len, name_len) = (raw.extra_len.get() as usize, usize::from(raw.name_len.get()));
        let padded = (RAW_BYTES + extra_len + name_len).next_multiple_of(8);
        let (Some(name), Some(after)) =
            (rest.get(extra_len..).and_then(|rest| rest.get(..name_len)), bytes.get(padded..))
        else {
            return Err(corrupt("the bitmap directory ends within an entry"));
        };
        if extra_len != 0 {
            return Err(corrupt(format!(
                "bitmap entry has {extra_len} bytes of extra data, which the format does not define"
            )));
        }
        let name = until_nul(name);
        let entry = Self {
            name: String::from_utf8_lossy(name).into_owned(),
            table_offset: HostOffset::new(raw.table_offset.get()),
            table_entries: raw.table_entries.get(),
            granularity_bits: raw.granularity_bits,
            in_use: raw.flags.get() & IN_USE != 0,
            auto: raw.flags.get() & AUTO != 0,
        };
        entry.check(&raw, bits, disk_bytes)?;
        Ok((entry, after))
    }

    fn check(&self, raw: &RawBitmap, bits: ClusterBits, disk_bytes: u64) -> Result<()> {
        let data_bytes = u64::from(self.table_entries) * bits.bytes();
        let granularity = GRANULARITY_BITS_MIN..=GRANULARITY_BITS_MAX;
        let problem = if self.table_entries == 0 || self.table_entries > TABLE_ENTRIES_MAX {
            "table size out of range"
        } else if self.table_offset == HostOffset::ZERO
            || !self.table_offset.is_aligned(bits.bytes())
        {
            "table offset not at a cluster"
        } else if !granularity.contains(&self.granularity_bits) {
            "granularity out of range"
        } else if raw.flags.get() & RESERVED_FLAGS != 0 {
            "reserved flags set"
        } else if usize::from(raw.name_len.get()) > NAME_BYTES_MAX {
            "name too long"
        } else if raw.kind != TYPE_DIRTY_TRACKING {
            "unknown type"
        } else if data_bytes > BITMAP_BYTES_MAX {
            "table too large"
        } else if !self.in_use
            && u128::from(disk_bytes) > u128::from(data_bytes * 8) << self.granularity_bits
        {
            "table too small for the disk"
        } else {
            return Ok(());
        };
        Err(corrupt(format!(
            "bitmap {:?}: {problem} (table of {} entries at {}, granularity 2^{}, flags {:#x}, type {})",
            self.name,
            self.table_entries,
            self.table_offset,
            self.granularity_bits,
            raw.flags.get(),
            raw.kind
        )))
    }

    /// Appends the entry, with its padding, to `directory`. The name is cut at 1023 bytes.
    pub fn encode(&self, directory: &mut Vec<u8>) {
        let name: Vec<u8> = self.name.bytes().take(NAME_BYTES_MAX).collect();
        let flags = if self.in_use { IN_USE } else { 0 } | if self.auto { AUTO } else { 0 };
        let raw = RawBitmap {
            table_offset: self.table_offset.bytes().into(),
            table_entries: self.table_entries.into(),
            flags: flags.into(),
            kind: TYPE_DIRTY_TRACKING,
            granularity_bits: self.granularity_bits,
            name_len: u16::try_from(name.len()).unwrap_or(u16::MAX).into(),
            extra_len: 0.into(),
        };
        directory.extend_from_slice(raw.as_bytes());
        directory.extend_from_slice(&name);
        directory.resize(directory.len().next_multiple_of(8), 0);
    }
}

impl BitmapTableEntry {
    /// What an entry says.
    ///
    /// # Errors
    /// `Corrupt` if reserved bits are set or the address is not that of a cluster.
    pub fn decode(entry: u64, cluster_bits: ClusterBits) -> Result<Self> {
        let offset = HostOffset::new(entry & TABLE_OFFSET_MASK);
        let ones = entry & TABLE_ALL_ONES != 0;
        let placed = offset != HostOffset::ZERO;
        if entry & TABLE_RESERVED != 0
            || placed && (ones || !offset.is_aligned(cluster_bits.bytes()))
        {
            return Err(corrupt(format!("bitmap table entry {entry:#018x} is invalid")));
        }
        Ok(match (placed, ones) {
            (true, _) => Self::Data(offset),
            (false, true) => Self::Ones,
            (false, false) => Self::Zeros,
        })
    }

    /// The entry as it is stored in the file.
    pub fn encode(self) -> u64 {
        match self {
            Self::Zeros => 0,
            Self::Ones => TABLE_ALL_ONES,
            Self::Data(offset) => offset.bytes() & TABLE_OFFSET_MASK,
        }
    }
}

/// Bytes that the bits of a bitmap of this granularity take for a disk of `disk_bytes`: whole words
/// of 64 bits, as in QEMU.
pub fn bitmap_bytes(granularity_bits: u8, disk_bytes: u64) -> u64 {
    disk_bytes.div_ceil(1 << granularity_bits).div_ceil(64) * 8
}

/// Entries of the table of a bitmap of this granularity for a disk of `disk_bytes`. One of a disk
/// without bytes, as an image may come with, has an entry that says nothing: the decoder refuses a
/// table without any, and QEMU an image with such a bitmap.
pub fn bitmap_table_entries(
    granularity_bits: u8,
    disk_bytes: u64,
    bits: ClusterBits,
) -> NonZeroU64 {
    let clusters = bits.clusters_for(bitmap_bytes(granularity_bits, disk_bytes));
    NonZeroU64::new(clusters).unwrap_or(NonZeroU64::MIN)
}

/// What is changed of an entry where it stands in the directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BitmapFields {
    /// Where its table starts.
    pub table_offset: HostOffset,
    /// Number of entries in its table.
    pub table_entries: u32,
    /// A writer did not save it when it finished.
    pub in_use: bool,
}

/// Passes the fields of each of the `count` entries of a directory to `change`, with the entry's
/// index, and stores them again; nothing else of the directory changes. Returns whether the whole
/// directory could be walked.
pub fn change_bitmap_directory(
    directory: &mut [u8],
    count: u32,
    mut change: impl FnMut(usize, &mut BitmapFields),
) -> bool {
    let mut rest = directory;
    for index in 0..count as usize {
        let Ok((entry, tail)) = RawBitmap::mut_from_prefix(rest) else { return false };
        let flags = entry.flags.get();
        let mut fields = BitmapFields {
            table_offset: HostOffset::new(entry.table_offset.get()),
            table_entries: entry.table_entries.get(),
            in_use: flags & IN_USE != 0,
        };
        change(index, &mut fields);
        entry.table_offset = fields.table_offset.bytes().into();
        entry.table_entries = fields.table_entries.into();
        entry.flags = U32::new(flags & !IN_USE | if fields.in_use { IN_USE } else { 0 });
        let more = u64::from(entry.extra_len.get()) + u64::from(entry.name_len.get());
        let padded = (more + RAW_BYTES as u64).next_multiple_of(8) - RAW_BYTES as u64;
        let Some(tail) = usize::try_from(padded).ok().and_then(|len| tail.get_mut(len..)) else {
            return false;
        };
        rest = tail;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK_BYTES: u64 = 64 << 20;

    fn bits() -> ClusterBits {
        ClusterBits::new(16).expect("valid")
    }

    fn entry(name: &str) -> BitmapEntry {
        BitmapEntry {
            name: name.to_owned(),
            table_offset: HostOffset::new(0x50000),
            table_entries: 1,
            granularity_bits: 16,
            in_use: false,
            auto: true,
        }
    }

    fn extension(count: u32, directory: &[u8]) -> BitmapsExtension {
        BitmapsExtension {
            count,
            directory_bytes: directory.len() as u64,
            directory_offset: HostOffset::new(0x60000),
        }
    }

    #[test]
    fn directory_round_trips() {
        let mut directory = Vec::new();
        entry("a").encode(&mut directory);
        entry("second").encode(&mut directory);
        let decoded =
            decode_bitmap_directory(&directory, &extension(2, &directory), bits(), DISK_BYTES);
        assert_eq!(decoded.expect("valid"), [entry("a"), entry("second")]);
    }

    #[test]
    fn fields_are_changed_where_they_stand() {
        let mut directory = Vec::new();
        entry("a").encode(&mut directory);
        entry("second").encode(&mut directory);
        let extension = extension(2, &directory);
        let is_whole = change_bitmap_directory(&mut directory, 2, |index, fields| {
            fields.table_entries += u32::try_from(index).expect("two");
            fields.in_use = index == 1;
        });
        assert!(is_whole);
        let changed = BitmapEntry { table_entries: 2, in_use: true, ..entry("second") };
        let decoded = decode_bitmap_directory(&directory, &extension, bits(), DISK_BYTES);
        assert_eq!(decoded.expect("valid"), [entry("a"), changed]);
        assert!(!change_bitmap_directory(&mut directory, 3, |_, _| {}));
    }

    #[test]
    fn directory_with_another_count_than_its_extension_is_corrupt() {
        let mut directory = Vec::new();
        entry("a").encode(&mut directory);
        for count in [0, 2] {
            let extension = extension(count, &directory);
            assert!(decode_bitmap_directory(&directory, &extension, bits(), DISK_BYTES).is_err());
        }
    }

    #[test]
    fn two_bitmaps_of_one_name_are_corrupt() {
        let mut directory = Vec::new();
        entry("a").encode(&mut directory);
        entry("a").encode(&mut directory);
        let extension = extension(2, &directory);
        assert!(decode_bitmap_directory(&directory, &extension, bits(), DISK_BYTES).is_err());
    }

    #[test]
    fn cut_directory_is_corrupt() {
        let mut directory = Vec::new();
        entry("name").encode(&mut directory);
        for len in 1..directory.len() {
            let cut = &directory[..len];
            assert!(decode_bitmap_directory(cut, &extension(1, cut), bits(), DISK_BYTES).is_err());
        }
    }

    #[test]
    fn hostile_lengths_are_refused() {
        let mut directory = Vec::new();
        entry("name").encode(&mut directory);
        directory[20..24].copy_from_slice(&u32::MAX.to_be_bytes());
        let extension = extension(1, &directory);
        assert!(decode_bitmap_directory(&directory, &extension, bits(), DISK_BYTES).is_err());
    }

    #[test]
    fn valid_bitmap_too_small_for_the_disk_is_corrupt_but_one_in_use_is_not() {
        let disk_bytes = 1 << 40;
        for (in_use, fine) in [(false, false), (true, true)] {
            let mut directory = Vec::new();
            BitmapEntry { in_use, ..entry("a") }.encode(&mut directory);
            let extension = extension(1, &directory);
            let decoded = decode_bitmap_directory(&directory, &extension, bits(), disk_bytes);
            assert_eq!(decoded.is_ok(), fine);
        }
    }
}
