//! An export of an NBD server as a disk, for reading.
//!
//! Only a user names one: names in images are never taken for URIs (`policy`). Nothing is known of
//! the server; what it says is checked by its client.

use crate::raw::check_range;
use mica_block::{
    Disk, Extent, ExtentKind, Geometry, IoFuture, LocalFuture, Plan, Planned, Result, Unmanaged,
    ready,
};
use mica_rt::Buf;
use mica_serve::nbd::client::{BASE_ALLOCATION, Client, Greeting, HOLE, Part, Uri, ZERO};
use mica_units::{GuestOffset, GuestRange, HostOffset, SECTOR_BYTES};
use std::sync::Arc;

/// An export of another server.
pub struct ExportDisk {
    client: Arc<Client>,
    name: String,
    geometry: Geometry,
    /// Whether the server tells what is allocated.
    has_status: bool,
}

impl ExportDisk {
    /// The export that the user `named` by a URI. Waits for the server on this thread.
    ///
    /// # Errors
    /// If this is no URI, or there is no such export.
    pub fn open(named: &str) -> Result<Self> {
        let uri: Uri = named.parse()?;
        Self::connect(&uri, named).map_err(|error| error.wrap(named))
    }

    fn connect(uri: &Uri, named: &str) -> Result<Self> {
        let mut greeting = Greeting::connect(uri)?;
        let has_status = greeting.has_contexts() && greeting.select(&[BASE_ALLOCATION])?.is_none();
        if !has_status {
            tracing::warn!(
                "{named}: the server does not report what is allocated: reading all of it"
            );
        }
        let client = greeting.go()?;
        // As the bytes past the end of a raw image.
        let len = client.export().len.next_multiple_of(SECTOR_BYTES);
        let geometry = Geometry { len, preferred_bytes: 4096 };
        Ok(Self { client: Arc::new(client), name: named.to_owned(), geometry, has_status })
    }

    /// What the server calls it for people; often empty.
    pub fn description(&self) -> &str {
        &self.client.export().description
    }

    /// Its length in bytes, which need not be whole sectors.
    pub fn exported_len(&self) -> u64 {
        self.client.export().len
    }

    /// Whether nobody writes to it through this server.
    pub fn is_read_only(&self) -> bool {
        self.client.export().is_read_only()
    }

    /// The sectors that `range` touches, of those that the export has as a whole: of the bytes
    /// behind them no status is asked.
    fn known(&self, range: GuestRange) -> Option<GuestRange> {
        let len = self.client.export().len;
        let start = range.start().bytes() / SECTOR_BYTES * SECTOR_BYTES;
        let end = range.end().bytes().next_multiple_of(SECTOR_BYTES);
        let end = end.min(len - len % SECTOR_BYTES);
        GuestRange::between(GuestOffset::new(start), GuestOffset::new(end))
            .filter(|known| !known.is_empty() && !range.is_empty())
    }
}

/// As `qemu-img map` has it.
fn kind_of(part: &Part) -> ExtentKind {
    match (part.allocation & ZERO != 0, part.allocation & HOLE != 0) {
        (true, true) => ExtentKind::ZeroAllocated,
        (true, false) => ExtentKind::DataInHole,
        (false, _) => ExtentKind::Data,
    }
}

/// What is in `range` of `parts`, which begin with `known`.
fn extents_within(range: GuestRange, known: GuestRange, parts: &[Part]) -> Vec<Extent> {
    let (mut extents, mut at) = (Vec::new(), known.start());
    for part in parts {
        let end = GuestOffset::new(at.bytes() + part.len);
        let there = GuestRange::between(at.max(range.start()), end.min(range.end()));
        if let Some(there) = there.filter(|there| !there.is_empty()) {
            Extent::push_joined(&mut extents, extent_at(there, kind_of(part)));
        }
        at = end;
    }
    extents
}

fn extent_at(range: GuestRange, kind: ExtentKind) -> Extent {
    Extent { host: HostOffset::new(range.start().bytes()), ..Extent::unplaced(range, kind) }
}

impl Disk for ExportDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn plan(&self, range: GuestRange, mut extents: Vec<Extent>) -> Planned<'_> {
        if let Err(error) = check_range(range, self.geometry) {
            return Planned::Ready(Err(error));
        }
        if !range.is_empty() {
            extents.push(extent_at(range, ExtentKind::Data));
        }
        Planned::Ready(Ok(Plan::untracked(extents)))
    }

    /// Asks the server.
    fn survey(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            check_range(range, self.geometry)?;
            let Some(known) = self.known(range).filter(|_| self.has_status) else {
                let all = (!range.is_empty()).then(|| extent_at(range, ExtentKind::Data));
                return Ok(all.into_iter().collect());
            };
            let parts = self.client.status(known).await;
            let parts = parts.map_err(|error| error.wrap(&*self.name))?;
            Ok(extents_within(range, known, &parts))
        })
    }

    fn read(&self, extent: &Extent, mut buf: Buf) -> IoFuture {
        if extent.kind.reads_as_zero() {
            buf.fill(0);
            return ready(Ok(()), buf);
        }
        let (client, name) = (Arc::clone(&self.client), self.name.clone());
        let at = extent.start.bytes();
        IoFuture::boxed(async move {
            let there = client.export().len.saturating_sub(at);
            let there = usize::try_from(there).unwrap_or(usize::MAX).min(buf.len());
            let head = buf.split_to(there);
            let (result, mut head) = client.read(at, head).await;
            if !buf.is_empty() {
                buf.fill(0);
                head.join(buf);
            }
            (result.map_err(|error| error.wrap(name)), head)
        })
    }
}

impl Unmanaged for ExportDisk {
    const LENGTH: &'static str = "the length of an export is its server's";
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, len: u64) -> GuestRange {
        GuestRange::new(GuestOffset::new(start), len).expect("small")
    }

    /// The story: a map of the first 1000 bytes of an export had 1024, and ended with a panic.
    #[test]
    fn a_survey_has_what_was_asked_for_and_not_all_of_its_sectors() {
        let part = |len, allocation| Part { len, allocation, bitmap: 0 };
        let parts = [part(512, ZERO | HOLE), part(512, 0), part(512, 0), part(1024, ZERO)];
        let told = |asked: GuestRange, parts: &[Part]| {
            let extents = extents_within(asked, range(512, 2560), parts);
            let extents = extents.iter().map(|extent| {
                let Extent { start, len, kind, host, .. } = *extent;
                assert_eq!(start.bytes(), host.bytes());
                (start.bytes(), len, kind)
            });
            extents.collect::<Vec<_>>()
        };
        let zero = ExtentKind::ZeroAllocated;
        assert_eq!(
            told(range(600, 2000), &parts),
            [(600, 424, zero), (1024, 1024, ExtentKind::Data), (2048, 552, ExtentKind::DataInHole)]
        );
        assert_eq!(told(range(600, 2000), &parts[..1]), [(600, 424, zero)]);
        assert_eq!(told(range(1000, 10), &parts), [(1000, 10, zero)]);
    }
}
