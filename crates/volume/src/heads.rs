//! Whose a volume is: claims of writers, heads, fences. The only code that puts them.
//!
//! What hosts agree on is decided by put-if-absent alone; no clock decides anything.
//!
//! Invariants
//! - I1 The head with the highest number says what a volume is. Nobody puts one without having read
//!   the one before it, whose number is one less.
//! - I2 A writer that may be alive is fenced before a head is put that goes on without it: its next
//!   free extent is taken, so that its own put there fails and it learns it. What it had put until
//!   then is in the state of the new head: nothing that it was told is durable is lost.
//! - I3 A writer's number is claimed after the head that it goes on from was read, so that it is
//!   greater than those of all writers in that head's state: places name only smaller ones. One
//!   that lost claims another.
//! - I4 A fence is never deleted, and no writer's number is used again.

use crate::environment::Environment;
use crate::format::Id;
use crate::format::extent::{Header, Kind};
use crate::format::head::{HEAD_BYTES, HOST_LEN_MAX, Head, Life};
use crate::names::{self, VolumeName};
use crate::place::{ExtentId, Writer};
use crate::put::{Patience, elsewhere, put, read, read_header};
use crate::state::State;
use mica_block::{Entry, Error, ErrorKind, LIST_MAX, ObjectName, Objects, Put, Result};
use mica_rt::Buf;
use std::sync::Arc;

/// Heads that one call puts against others at most: each that fails means that somebody else made
/// one.
const ROUNDS_MAX: usize = 64;

/// The heads of one volume.
pub(crate) struct Heads {
    pub(crate) objects: Arc<dyn Objects>,
    pub(crate) environment: Environment,
    pub(crate) store: Id,
    pub(crate) name: VolumeName,
}

/// What to do about a volume that another writer has open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Claimed {
    /// Leave it to that writer.
    Refuse,
    /// Fence it: it writes no more, and learns that.
    TakeOver,
}

/// A volume that was opened for writing.
pub(crate) struct Owned {
    pub(crate) head: Head,
    pub(crate) writer: Writer,
}

impl Heads {
    /// The newest head.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume, or no more; `Corrupt` if the head is damaged.
    pub(crate) async fn newest(&self) -> Result<Head> {
        let head = self.newest_of_any_life().await?;
        match head.filter(|head| head.life != Life::Deleted) {
            Some(head) => Ok(head),
            None => {
                let (name, store) = (self.name.as_str(), self.objects.name());
                let what = format!("there is no volume {name} in {store}");
                Err(Error::new(ErrorKind::NotFound, what))
            }
        }
    }

    async fn newest_of_any_life(&self) -> Result<Option<Head>> {
        let Some(last) = last_in(&*self.objects, &self.name.folder()).await? else {
            return Ok(None);
        };
        let damaged = |why: &dyn std::fmt::Display| {
            Error::new(ErrorKind::Corrupt, format!("head {last} of {}: {why}", self.objects.name()))
        };
        let number = names::head_number(&last).ok_or_else(|| damaged(&"no head has this name"))?;
        let bytes = read(&*self.objects, &last, HEAD_BYTES, Patience::VERB).await?;
        let bytes = bytes.ok_or_else(|| damaged(&"it was listed and is gone"))?;
        let head = Head::decode(&bytes).map_err(|why| why.explain(&last, &*self.objects))?;
        if head.number != number || head.store != self.store {
            return Err(elsewhere(&last, &*self.objects));
        }
        Ok(Some(head))
    }

    /// Makes the volume, with nothing in it.
    ///
    /// # Errors
    /// `Invalid` if there is one of this name; otherwise what the store reports.
    pub(crate) async fn create(&self, state: State) -> Result<Head> {
        let before = self.newest_of_any_life().await?;
        let exists = || {
            let (name, store) = (self.name.as_str(), self.objects.name());
            Error::new(ErrorKind::Invalid, format!("there is a volume {name} in {store} already"))
        };
        if before.as_ref().is_some_and(|head| head.life != Life::Deleted) {
            return Err(exists());
        }
        let head = Head {
            number: before.map_or(0, |head| head.number + 1),
            volume: self.environment.random(),
            ..self.head(0, [0; 16], Life::Closed, state)
        };
        match self.put(&head).await? {
            Put::Done => Ok(head),
            Put::Exists => Err(exists()),
        }
    }

    /// Opens the volume for a new writer.
    ///
    /// # Errors
    /// `Denied` if another writer has it and is to be left alone; otherwise what the store reports.
    pub(crate) async fn open(&self, claimed: Claimed) -> Result<Owned> {
        for _ in 0..ROUNDS_MAX {
            let before = self.newest().await?;
            if let (Life::Open { writer, .. }, Claimed::Refuse) = (before.life, claimed) {
                return Err(self.in_use(&before, writer));
            }
            let writer = self.claim(before.volume).await?;
            let state = self.fenced(&before, writer).await?;
            let life = Life::Open { writer, sequence: 0 };
            let head = self.head(before.number + 1, before.volume, life, state);
            // If others went on meanwhile, a head of this number may be gone already.
            if self.put(&head).await? == Put::Done && self.newest().await? == head {
                return Ok(Owned { head, writer });
            }
        }
        let what = format!("others open volume {} all the time", self.name.as_str());
        Err(Error::new(ErrorKind::Io, what))
    }

    /// Deletes the volume. What only it had is found by collection.
    ///
    /// # Errors
    /// `Denied` if a writer has it open.
    pub(crate) async fn delete(&self) -> Result<()> {
        let before = self.newest().await?;
        if let Life::Open { writer, .. } = before.life {
            return Err(self.in_use(&before, writer));
        }
        let head = self.head(before.number + 1, before.volume, Life::Deleted, State::default());
        match self.put(&head).await? {
            Put::Done => Ok(()),
            Put::Exists => {
                let what = format!("volume {} is being opened or changed", self.name.as_str());
                Err(Error::new(ErrorKind::Denied, what))
            }
        }
    }

    /// Ends the life of `owned` with `state`.
    ///
    /// # Errors
    /// `Denied` if somebody else has the volume by now.
    pub(crate) async fn close(&self, owned: &Owned, state: State) -> Result<()> {
        let before = &owned.head;
        let head = self.head(before.number + 1, before.volume, Life::Closed, state);
        match self.put(&head).await? {
            Put::Done => Ok(()),
            Put::Exists => Err(self.lost(owned.writer).await),
        }
    }

    /// Why the extent or head of `writer` could not be put.
    pub(crate) async fn lost(&self, writer: Writer) -> Error {
        let name = self.name.as_str();
        let by = match self.newest_of_any_life().await {
            Ok(Some(head)) => match head.life {
                Life::Open { writer: now, .. } if now != writer => {
                    format!("by {} (writer {})", head.host, now.number())
                }
                Life::Deleted => format!("and deleted by {}", head.host),
                _ => format!("by {}", head.host),
            },
            _ => "by another host".to_owned(),
        };
        let what = format!("volume {name} was taken over {by}: this server writes it no more");
        Error::new(ErrorKind::Denied, what)
    }

    /// The state of `before` and of everything that its writer, if it has one, put since; that one
    /// is fenced (I2).
    async fn fenced(&self, before: &Head, by: Writer) -> Result<State> {
        let Life::Open { writer, mut sequence } = before.life else { return Ok(before.state) };
        let mut state = before.state;
        loop {
            let id = ExtentId { writer, sequence };
            let found = match self.extent(id, before.volume).await? {
                Some(found) => found,
                None => match self.put_fence(id, before.volume, state, by).await? {
                    Put::Done => return Ok(state),
                    // Its writer, or another that fences it, was faster.
                    Put::Exists => continue,
                },
            };
            match found.kind {
                Kind::Fence => return Ok(state),
                Kind::Extent => {
                    state = found.state;
                    let next = sequence.checked_add(1);
                    sequence = next.ok_or_else(|| {
                        Error::new(ErrorKind::Limit, format!("{} has every extent", id.name()))
                    })?;
                }
            }
        }
    }

    async fn put_fence(&self, id: ExtentId, volume: Id, state: State, by: Writer) -> Result<Put> {
        let fence = Header {
            kind: Kind::Fence,
            id,
            store: self.store,
            volume,
            nonce: self.environment.random(),
            state,
            by,
            blocks: 0,
            nodes_len: 0,
            entries: 0,
            table_sum: 0,
        };
        put(&*self.objects, &id.name(), Buf::from_slice(&fence.encode()), Patience::VERB).await
    }

    /// The header of an extent, or of the fence in its place.
    async fn extent(&self, id: ExtentId, volume: Id) -> Result<Option<Header>> {
        let found = read_header(&*self.objects, id).await?;
        let Some(header) = found else { return Ok(None) };
        if header.store != self.store || header.volume != volume {
            return Err(elsewhere(&id.name(), &*self.objects));
        }
        Ok(Some(header))
    }

    /// Claims a number for a writer of `volume`.
    async fn claim(&self, volume: Id) -> Result<Writer> {
        let mut next =
            newest_writer(&*self.objects).await?.map_or(Some(Writer::FIRST), Writer::next);
        for _ in 0..ROUNDS_MAX {
            let writer = next.ok_or_else(|| {
                let what = format!("{} has had every writer", self.objects.name());
                Error::new(ErrorKind::Limit, what)
            })?;
            let claim = self.head(0, volume, Life::Open { writer, sequence: 0 }, State::default());
            let claim = Buf::from_slice(&claim.encode());
            if put(&*self.objects, &writer.claim(), claim, Patience::VERB).await? == Put::Done {
                return Ok(writer);
            }
            next = writer.next();
        }
        let what = format!("others claim numbers in {} all the time", self.objects.name());
        Err(Error::new(ErrorKind::Io, what))
    }

    async fn put(&self, head: &Head) -> Result<Put> {
        let name = self.name.head(head.number);
        put(&*self.objects, &name, Buf::from_slice(&head.encode()), Patience::VERB).await
    }

    fn head(&self, number: u64, volume: Id, life: Life, state: State) -> Head {
        let host: String = self.environment.host().chars().take(HOST_LEN_MAX / 4).collect();
        Head {
            number,
            store: self.store,
            volume,
            nonce: self.environment.random(),
            life,
            state,
            time_ns: self.environment.now_ns(),
            host,
        }
    }

    fn in_use(&self, head: &Head, writer: Writer) -> Error {
        let (name, host, writer) = (self.name.as_str(), &head.host, writer.number());
        let what = format!(
            "volume {name} is open on {host} (writer {writer}); --force takes it over, and that \
             writer can write no more"
        );
        Error::new(ErrorKind::Denied, what)
    }
}

/// The greatest writer that was claimed.
async fn newest_writer(objects: &dyn Objects) -> Result<Option<Writer>> {
    let Some(folder) = last_in(objects, &names::claims()).await? else { return Ok(None) };
    let Some(claim) = last_in(objects, &folder).await? else { return Ok(None) };
    match Writer::from_claim(&claim) {
        Some(writer) => Ok(Some(writer)),
        None => {
            let what = format!("{claim} of {} is no claim of a writer", objects.name());
            Err(Error::new(ErrorKind::Corrupt, what))
        }
    }
}

/// The last of what is directly in `folder`.
async fn last_in(objects: &dyn Objects, folder: &ObjectName) -> Result<Option<ObjectName>> {
    let mut last = None;
    loop {
        let page = objects.list(Some(folder), last.as_ref()).await?;
        let is_full = page.len() >= LIST_MAX;
        if let Some(entry) = page.last() {
            last = Some(Entry::name(entry).clone());
        }
        if !is_full {
            return Ok(last);
        }
    }
}
