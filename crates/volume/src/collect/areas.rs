//! Reads the nodes of extents: those of one extent together, and of the next ones ahead.
//!
//! An extent's nodes are near its end. How much of the end is read at first is what the last ones
//! needed, so that most extents take one request.

use super::client::{Client, IN_FLIGHT_MAX};
use crate::format::extent::{Entry, HEADER_BYTES, table_at_end};
use crate::format::snapshot::FRAMED_BYTES_MAX;
use crate::place::{ExtentId, Place};
use crate::put::decode_header;
use mica_block::{Error, ErrorKind, Result};
use mica_map::directory_bytes_max;
use mica_rt::{Buf, Task, spawn};
use std::collections::BTreeMap;

/// Bytes of an end that are read at first, at least.
const END_MIN: usize = 32 << 10;

/// The end of an extent.
struct Area {
    start: u64,
    bytes: Buf,
}

/// See the module.
pub(crate) struct Areas {
    client: Client,
    ahead: BTreeMap<ExtentId, Task<Result<Area>>>,
    current: Option<(ExtentId, Result<Area>)>,
    /// Bytes of an end that are read at first.
    guess: usize,
    /// Bytes that the extent needs that is read.
    needed: usize,
}

impl Areas {
    pub(crate) fn new(client: Client) -> Self {
        Self { client, ahead: BTreeMap::new(), current: None, guess: 4 * END_MIN, needed: 0 }
    }

    /// Whether `id` is what is being read.
    pub(crate) fn has(&self, id: ExtentId) -> bool {
        self.current.as_ref().is_some_and(|(current, _)| *current == id)
    }

    /// Begins to read `first`, and some of `others`.
    pub(crate) fn read_ahead(&mut self, first: ExtentId, others: impl Iterator<Item = ExtentId>) {
        for id in std::iter::once(first).chain(others).take(IN_FLIGHT_MAX) {
            // Those that are read already are among the newest, so these are not many.
            self.ahead.entry(id).or_insert_with(|| {
                let (client, len) = (self.client.clone(), self.guess);
                spawn(async move { read_area(&client, id, len).await })
            });
        }
    }

    /// The table of an extent with frames; nothing if it is damaged or missing, as that keeps
    /// nobody from what its places name.
    ///
    /// # Errors
    /// What the store reports.
    pub(crate) async fn table_of_frames(&mut self, id: ExtentId) -> Result<Vec<Entry>> {
        if !self.has(id) {
            let area = self.load(id).await;
            self.current = Some((id, area));
        }
        let area = self.current.as_ref().map(|(_, area)| area);
        let area = match area.expect("it was just set") {
            Ok(area) => area,
            Err(error) if is_loss(error) => return Ok(Vec::new()),
            Err(error) => return Err(error.clone()),
        };
        match table_at_end(&area.bytes) {
            Ok(Ok(table)) => Ok(table),
            Err(_) => Ok(Vec::new()),
            Ok(Err(len)) => match read_area(&self.client, id, len).await {
                Ok(area) => {
                    let table = table_at_end(&area.bytes).ok().and_then(|table| table.ok());
                    Ok(table.unwrap_or_default())
                }
                Err(error) if is_loss(&error) => Ok(Vec::new()),
                Err(error) => Err(error),
            },
        }
    }

    async fn load(&mut self, id: ExtentId) -> Result<Area> {
        match self.ahead.remove(&id) {
            Some(reading) => reading.await,
            None => read_area(&self.client, id, self.guess).await,
        }
    }

    /// The bytes from `at` on: a node's, and what follows it.
    ///
    /// # Errors
    /// `NotFound` if the extent is not there; what the store reports.
    pub(crate) async fn bytes(&mut self, at: Place) -> Result<&[u8]> {
        let id = at.extent();
        if !self.has(id) {
            let area = self.load(id).await;
            self.guess = self.needed.max(self.guess - self.guess / 8).max(END_MIN);
            self.needed = 0;
            self.current = Some((id, area));
        }
        let Some((_, area)) = &mut self.current else { unreachable!("it was just set") };
        if let Ok(found) = area
            && found.start > at.offset()
        {
            *area = extend(&self.client, id, found, at.offset()).await;
        }
        let area = area.as_ref().map_err(Clone::clone)?;
        let start = usize::try_from(at.offset() - area.start).expect("an extent is small");
        let rest = area.bytes.get(start..).unwrap_or_default();
        self.needed = self.needed.max(area.bytes.len() - start.min(area.bytes.len()));
        Ok(&rest[..rest.len().min(directory_bytes_max::<Place>().max(FRAMED_BYTES_MAX))])
    }
}

/// Whether something is gone, or is not what it was.
fn is_loss(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt)
}

async fn read_area(client: &Client, id: ExtentId, len: usize) -> Result<Area> {
    let (start, bytes) = client.read_end(&id.name(), len).await?;
    Ok(Area { start, bytes })
}

/// `area` with the nodes before it, one of which is at `offset`.
async fn extend(client: &Client, id: ExtentId, area: &Area, offset: u64) -> Result<Area> {
    let name = id.name();
    let bytes = client.read(&name, 0, HEADER_BYTES).await?;
    let header = decode_header(&*client.objects, id, &bytes)?;
    // Whoever can lengthen an object must not decide how much memory is taken for it.
    let len = area.start.saturating_add(area.bytes.len() as u64);
    if len != header.len() as u64 {
        let (objects, wanted) = (client.objects.name(), header.len());
        let what = format!("{name} of {objects} has {len} bytes, and its header says {wanted}");
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    let start = header.nodes_at() as u64;
    if start > offset {
        let what = format!("{name} of {}: it has no node at {offset}", client.objects.name());
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    let missing = usize::try_from(area.start - start).expect("an extent is small");
    let front = client.read(&name, start, missing).await?;
    let mut bytes = Buf::new(missing + area.bytes.len());
    bytes.put(0, &front);
    bytes.put(missing, &area.bytes);
    Ok(Area { start, bytes })
}
