//! Reads of a plan's extents into buffers that are divided otherwise.

use mica_block::{Disk, Error, ErrorKind, Extent, Result};
use mica_rt::Buf;
use mica_units::GuestRange;

/// Reads `extents` into `bufs`, which are as long together; gives the parts that were read.
pub(crate) async fn read_parts(
    disk: &dyn Disk,
    extents: &[Extent],
    bufs: Vec<Buf>,
) -> Result<Vec<Buf>> {
    let mut reads = Vec::new();
    let mut bufs = bufs.into_iter();
    let mut buf = Buf::new(0);
    for extent in extents {
        let mut at = extent.start;
        let end = extent.range().end();
        while at < end {
            if buf.is_empty() {
                buf = bufs.next().ok_or_else(too_short)?;
            }
            let count = (buf.len() as u64).min(end.bytes() - at.bytes());
            let part = GuestRange::new(at, count).and_then(|range| extent.within(range));
            let part = part.ok_or_else(too_short)?;
            reads.push(
                disk.read(&part, buf.split_to(usize::try_from(count).expect("within a buffer"))),
            );
            at = part.range().end();
        }
    }
    let parts = mica_rt::join_all(reads).await;
    parts.into_iter().map(|(result, part)| result.map(|()| part)).collect()
}

/// A request and the memory for it contradict each other.
pub(crate) fn too_short() -> Error {
    Error::new(ErrorKind::Invalid, "a request and its buffer differ in length")
}
