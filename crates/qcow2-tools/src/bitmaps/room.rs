//! Whether an image can have a bitmap that it does not have yet.
//!
//! Invariants
//! - I1 What is accepted here is not refused when it is done: whoever copies a disk first, and its
//!   bitmaps last, asks the same functions that add them ([`new_entry`], [`directory`],
//!   [`check_header`]). But for want of space, or if somebody else changes the image meanwhile.
//! - I2 Nothing is written, and what a name, a granularity or a header makes of the tables' length
//!   is bounded before anything is allocated for it.

use super::{
    BITMAP_BYTES_MAX, COUNT_MAX, DIRECTORY_BYTES_MAX, GRANULARITY_BITS, GRANULARITY_DEFAULT,
    NAME_BYTES_MAX, invalid,
};
use crate::create::{ImagePlan, TablePlaces};
use crate::inspect::ImageInfo;
use mica_block::{Error, ErrorKind, Result, read_exact};
use mica_qcow2_format::{
    BitmapEntry, BitmapsExtension, Header, HeaderChange, Version, bitmap_table_entries,
};
use mica_units::{HostCluster, HostOffset};

impl ImageInfo {
    /// Whether the image can get `more` bitmaps.
    ///
    /// # Errors
    /// As [`edit_bitmap`], which adds them.
    ///
    /// [`edit_bitmap`]: super::edit_bitmap
    pub async fn check_more_bitmaps(&self, more: &[BitmapEntry]) -> Result<()> {
        let len = usize::try_from(self.header.cluster_bits.bytes()).expect("at most 2 MiB");
        let first_cluster = read_exact(&*self.image.store, HostOffset::ZERO, len).await?;
        check_more(&self.header, &first_cluster, self.bitmaps.clone(), more)
    }
}

impl ImagePlan {
    /// Whether the new image can get `bitmaps`.
    ///
    /// # Errors
    /// As [`edit_bitmap`], which adds them.
    ///
    /// [`edit_bitmap`]: super::edit_bitmap
    pub fn check_bitmaps(&self, bitmaps: &[BitmapEntry]) -> Result<()> {
        // Wherever the tables are: the header is as long.
        let place = |number| self.l2.cluster_bits.start_of(HostCluster::new(number));
        let header = self.header(TablePlaces {
            l1: place(2),
            l1_entries: 1,
            refcount_table: place(1),
            refcount_table_clusters: 1,
        });
        let mut first_cluster = header.encode()?;
        let len = usize::try_from(self.l2.cluster_bits.bytes()).expect("at most 2 MiB");
        first_cluster.resize(len, 0);
        check_more(&header, &first_cluster, Vec::new(), bitmaps)
    }
}

fn check_more(
    header: &Header,
    first_cluster: &[u8],
    mut there: Vec<BitmapEntry>,
    more: &[BitmapEntry],
) -> Result<()> {
    if more.is_empty() {
        return Ok(());
    }
    check_version(header)?;
    for entry in more {
        let granularity = Some(1 << entry.granularity_bits);
        there.push(new_entry(header, &there, &entry.name, granularity)?);
    }
    directory(&there)?;
    check_header(header, first_cluster)
}

pub(super) fn check_version(header: &Header) -> Result<()> {
    if header.version == Version::V2 {
        let context = "images of version 2 have no bitmaps: `mica convert` makes one of version 3";
        return Err(Error::new(ErrorKind::Unsupported, context));
    }
    Ok(())
}

/// A bitmap of the image of `header`, beside those that are `there`.
pub(super) fn new_entry(
    header: &Header,
    there: &[BitmapEntry],
    name: &str,
    granularity: Option<u64>,
) -> Result<BitmapEntry> {
    if there.iter().any(|entry| entry.name == name) {
        return invalid(format!(
            "it has a bitmap {name:?} already: `mica bitmap --remove` removes it"
        ));
    }
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return invalid(format!("a bitmap's name has 1 to {NAME_BYTES_MAX} bytes"));
    }
    if there.len() >= COUNT_MAX {
        return invalid(format!("an image has at most {COUNT_MAX} bitmaps"));
    }
    if header.disk_bytes() == 0 {
        // QEMU opens no image of such a disk that has a bitmap.
        let what = "a disk of 0 bytes has no bitmaps: `mica resize` makes it longer";
        return invalid(what.to_owned());
    }
    let [least, most] = GRANULARITY_DEFAULT;
    let bytes = granularity.unwrap_or_else(|| header.cluster_bits.bytes().clamp(least, most));
    let bits = bytes.trailing_zeros();
    if !bytes.is_power_of_two() || !GRANULARITY_BITS.contains(&bits) {
        return invalid(format!(
            "a granularity of {bytes} bytes: it must be a power of two from 512 to 2G"
        ));
    }
    let mut entry = BitmapEntry {
        name: name.to_owned(),
        table_offset: HostOffset::ZERO,
        table_entries: 0,
        granularity_bits: u8::try_from(bits).expect("checked above"),
        in_use: false,
        auto: true,
    };
    entry.table_entries = table_entries_for(header, &entry, header.disk_bytes())?;
    Ok(entry)
}

/// Entries of the table of a bitmap like `entry` in the image of `header`, if its disk has
/// `disk_bytes`.
pub(super) fn table_entries_for(
    header: &Header,
    entry: &BitmapEntry,
    disk_bytes: u64,
) -> Result<u32> {
    let bits = header.cluster_bits;
    let entries = bitmap_table_entries(entry.granularity_bits, disk_bytes, bits).get();
    if bits.bytes_of(entries) > BITMAP_BYTES_MAX {
        return invalid(format!(
            "the bitmap {:?} would be too large: use a larger granularity",
            entry.name
        ));
    }
    Ok(u32::try_from(entries).unwrap_or(u32::MAX))
}

/// The bytes of the directory of `entries`.
pub(super) fn directory(entries: &[BitmapEntry]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    entries.iter().for_each(|entry| entry.encode(&mut bytes));
    if bytes.len() > DIRECTORY_BYTES_MAX {
        return invalid("the directory of bitmaps would be too long".to_owned());
    }
    Ok(bytes)
}

/// Whether `header`, which is in `first_cluster`, can name bitmaps, too.
///
/// # Errors
/// As [`HeaderChange::plan`].
pub(super) fn check_header(header: &Header, first_cluster: &[u8]) -> Result<()> {
    let any = BitmapsExtension {
        count: 1,
        directory_bytes: 1,
        directory_offset: header.cluster_bits.start_of(HostCluster::new(1)),
    };
    let mut next = header.clone();
    next.bitmaps = Some(next.bitmaps.unwrap_or(any));
    HeaderChange::plan(first_cluster, &next).map(drop)
}
