//! The internal snapshots and bitmaps of an image: reading their tables.

mod selector;

pub use selector::{SnapshotSearch, SnapshotSelector};

use crate::header_io::read_header;
use mica_block::{Error, ErrorKind, Result, Store, read_exact};
use mica_qcow2_format::{
    BitmapEntry, Header, SNAPSHOT_TABLE_BYTES_MAX, SnapshotDecoded, SnapshotEntry,
    decode_bitmap_directory,
};
use mica_units::HostOffset;
use std::path::Path;

/// Size of the pieces in which the snapshot table is read.
const PIECE_BYTES: usize = 64 << 10;
/// How many snapshots an error names.
const NAMED_MAX: usize = 3;

/// The internal snapshots of an image, in the order of its table; at most `limit` of them.
///
/// # Errors
/// If the table is malformed or cannot be read.
pub async fn list(store: &dyn Store, header: &Header, limit: usize) -> Result<Vec<SnapshotEntry>> {
    let mut found = Vec::new();
    visit(store, header, |entry| {
        found.push(entry);
        found.len() < limit
    })
    .await?;
    Ok(found)
}

/// The snapshot that is `wanted`.
pub(crate) async fn find(
    store: &dyn Store,
    header: &Header,
    wanted: &SnapshotSelector,
) -> Result<SnapshotEntry> {
    let mut search = SnapshotSearch::new(wanted);
    visit(store, header, |entry| search.see(&entry)).await?;
    search.end().map(|(_, entry)| entry)
}

/// Makes sure that what lies beneath the image at `path`, whose file is `store`, may change: it
/// shows through the image's internal snapshots, too, wherever these own nothing.
///
/// # Errors
/// `Denied` if the image has internal snapshots; any failure to read them.
pub async fn check_none_stands_on_backing(store: &dyn Store, path: &Path) -> Result<()> {
    let header = read_header(store).await?;
    if header.snapshot_count == 0 {
        return Ok(());
    }
    let some = list(store, &header, NAMED_MAX).await?;
    let mut names: Vec<_> = some.iter().map(|one| format!("{:?}", one.name)).collect();
    if (names.len() as u64) < u64::from(header.snapshot_count) {
        names.push("...".to_owned());
    }
    let what = format!(
        "{} has internal snapshots ({}), which show what lies beneath it, and would change: copy \
         what you need with `mica convert -l`, and delete them with `mica snapshot -d`",
        path.display(),
        names.join(", ")
    );
    Err(Error::new(ErrorKind::Denied, what))
}

/// Shows `visitor` each entry until it has seen enough.
async fn visit(
    store: &dyn Store,
    header: &Header,
    mut visitor: impl FnMut(SnapshotEntry) -> bool,
) -> Result<()> {
    let mut piece_at = header.snapshots_offset.bytes();
    let mut piece = read_exact(store, header.snapshots_offset, 0).await?;
    let mut within = 0;
    let mut seen = 0;
    while seen < header.snapshot_count {
        match SnapshotEntry::decode(piece.get(within..).unwrap_or_default())? {
            SnapshotDecoded::Entry { entry, len } => {
                seen += 1;
                within += len.next_multiple_of(8);
                if !visitor(entry) {
                    return Ok(());
                }
            }
            SnapshotDecoded::NeedMore(needed) => {
                piece_at += within as u64;
                if piece_at - header.snapshots_offset.bytes() > SNAPSHOT_TABLE_BYTES_MAX {
                    let context = "the snapshot table is longer than 64 MiB";
                    return Err(Error::new(ErrorKind::Limit, context));
                }
                let len = needed.max(PIECE_BYTES);
                piece = read_exact(store, HostOffset::new(piece_at), len).await?;
                within = 0;
            }
        }
    }
    Ok(())
}

/// The bitmaps of an image. Those whose writer did not save them, but saw to it that the file has
/// all that was changed, are not taken to be in use.
///
/// # Errors
/// If the directory is malformed or cannot be read.
pub async fn list_bitmaps(store: &dyn Store, header: &Header) -> Result<Vec<BitmapEntry>> {
    let Some(bitmaps) = &header.bitmaps else { return Ok(Vec::new()) };
    let len = usize::try_from(bitmaps.directory_bytes).unwrap_or(usize::MAX);
    let file_len = usize::try_from(store.len()?).unwrap_or(usize::MAX);
    if len > file_len {
        let context = "the bitmap directory is longer than the file";
        return Err(Error::new(ErrorKind::Corrupt, context));
    }
    let directory = read_exact(store, bitmaps.directory_offset, len).await?;
    let mut entries =
        decode_bitmap_directory(&directory, bitmaps, header.cluster_bits, header.disk_bytes())?;
    for (index, entry) in entries.iter_mut().enumerate() {
        entry.in_use &= !header.autoclear.keeps_bitmap(index);
    }
    Ok(entries)
}
