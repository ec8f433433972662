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

mod clone;
mod counting;
mod highest;
mod rekey;
mod seen;
mod shut_out;
mod take_back;
#[cfg(test)]
mod tests;

use crate::environment::Environment;
use crate::format::Id;
use crate::format::extent::{Header, Kind};
use crate::format::head::{HEAD_READ_BYTES, HOST_LEN_MAX, Head, Life};
use crate::names::VolumeName;
use crate::place::{ExtentId, Writer};
use crate::properties::Properties;
use crate::put::{Durable, Patience, decode_head, elsewhere, put, put_as, read, read_header};
use crate::state::State;
use mica_block::{Error, ErrorKind, ObjectName, Objects, Put, Result};
use mica_rt::{Buf, join_two};
use std::sync::Arc;

pub use seen::Seen;

/// Heads that one call puts against others at most: each that fails means that somebody else made
/// one.
pub(crate) const ROUNDS_MAX: usize = 64;

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
    /// Leave it to that writer. What was handed over to this host is opened.
    Refuse,
    /// The same, but what was handed over is left to its heir, also if that is this host: only what
    /// has the volume from then on may end a hand-over, and not what closes it at once.
    OnlyIfClosed,
    /// Fence it: it writes no more, and learns that.
    TakeOver,
    /// Fence it if it is this one, which is known to be dead. Another is left alone.
    TakeOverOf(Writer),
    /// The same of the writer that the head with this number names, if it names one. Once there is
    /// a newer head the volume is left alone, also if nobody has it open, and so it is if it was
    /// handed over.
    AsOf(u64),
    /// The same, where it is known that nobody has written: this volume was just made, unfinished.
    /// Another of its name is left alone, and so is this one once it is whole.
    JustMade(Id),
}

impl Claimed {
    /// What this means for a volume with this head: who has it may change at any time.
    fn at(self, head: &Head) -> Self {
        match self {
            Self::TakeOverOf(dead) if head.writer() == Some(dead) => Self::TakeOver,
            Self::AsOf(number) if (head.number, head.writer().is_some()) == (number, true) => {
                Self::TakeOver
            }
            Self::AsOf(_) => Self::OnlyIfClosed,
            Self::TakeOverOf(_) => Self::Refuse,
            Self::JustMade(_) if self.is_gone(head) => Self::Refuse,
            Self::Refuse | Self::OnlyIfClosed | Self::TakeOver | Self::JustMade(_) => self,
        }
    }

    /// Whether the volume that was made is not the one with this head: somebody has deleted it, and
    /// made another.
    fn is_gone(self, head: &Head) -> bool {
        matches!(self, Self::JustMade(made) if made != head.volume || !head.is_unfinished)
    }

    /// Checks that the volume with this head is still what is claimed.
    fn check_still(self, name: &VolumeName, head: &Head) -> Result<()> {
        let what = match self {
            Self::JustMade(_) if self.is_gone(head) => "deleted and re-created",
            Self::AsOf(number) if head.number != number => "opened or changed",
            _ => return Ok(()),
        };
        let what = format!("volume {} was {what} by someone else", name.as_str());
        Err(Error::new(ErrorKind::Denied, what))
    }
}

/// A volume that was opened for writing.
#[derive(Clone)]
pub(crate) struct Owned {
    /// The newest head of its writer.
    pub(crate) head: Head,
    pub(crate) writer: Writer,
}

/// Who names a writer besides heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Named {
    /// Nobody.
    Nowhere,
    /// A log, which is replayed where the head has the same number.
    ByLog,
}

/// What the last process that had the volume on this machine left there.
pub(crate) trait LocalLog {
    /// Checks that a volume with this head may be opened, before anything is done about it.
    async fn admit(&mut self, head: &Head) -> Result<()>;

    /// Whether it is of the writer that `head` names, so that the volume is not another's.
    fn is_of(&self, head: &Head) -> bool;

    /// Whether a log will name the next writer.
    fn names(&self) -> Named;

    /// Where the log of the next writer is, if it has one.
    fn place(&self) -> Option<String>;

    /// Called before a head is put that goes on from `head` under `writer` with `state`: once more
    /// if that is lost.
    async fn settle(&mut self, head: &Head, writer: Writer, state: &State) -> Result<()>;
}

/// How a writer's time ends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// Whoever wants it has the volume next.
    Closed,
    /// This host has it next.
    HandedTo(String),
    /// Nobody has it: it is deleted.
    Deleted,
}

impl Heads {
    /// Those of another volume in the store.
    pub(crate) fn of(&self, name: &VolumeName) -> Self {
        Self {
            objects: Arc::clone(&self.objects),
            environment: self.environment.clone(),
            store: self.store,
            name: name.clone(),
        }
    }

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
        for _ in 0..ROUNDS_MAX {
            let Some(last) = self.highest().await? else { return Ok(None) };
            let number = self.number_of(&last)?;
            // It is deleted as soon as there are others above it.
            let read = read(&*self.objects, &last, HEAD_READ_BYTES, Patience::VERB);
            let Some(bytes) = read.await? else { continue };
            let head =
                decode_head(&*self.objects, &self.name, (self.store, number), &bytes).await?;
            return Ok(Some(head));
        }
        Err(self.too_busy())
    }

    /// Makes the volume, with nothing in it.
    ///
    /// # Errors
    /// `Invalid` if there is one of this name; otherwise what the store reports.
    pub(crate) async fn create(&self, state: State, properties: Properties) -> Result<Head> {
        let head = self.head(0, self.environment.random(), Life::Closed, state);
        self.begin(async || Ok(Head { properties, ..head.clone() })).await
    }

    /// As [`Self::create`], of a volume whose content follows: it is open from the beginning, under
    /// a number that nobody writes with. Whoever writes the content takes it over.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub(crate) async fn create_unfinished(
        &self,
        state: State,
        properties: Properties,
    ) -> Result<Head> {
        let volume = self.environment.random();
        let first = async || {
            let writer = self.claim(volume, Named::Nowhere).await?;
            let head = self.head(0, volume, Life::Open { writer, sequence: 0 }, state);
            Ok(Head { properties, is_unfinished: true, ..head })
        };
        self.begin(first).await
    }

    /// Makes the volume with what `first` makes as its first head, which gets a number. That is
    /// asked only once the name is known to be free: it may put something.
    async fn begin(&self, first: impl AsyncFn() -> Result<Head>) -> Result<Head> {
        self.begin_and(first, async || ()).await.map(|(head, ())| head)
    }

    /// As [`Self::begin`]; does `act` once the head is put, and while it is looked whether it is
    /// the highest.
    async fn begin_and<T>(
        &self,
        first: impl AsyncFn() -> Result<Head>,
        act: impl AsyncFn() -> T,
    ) -> Result<(Head, T)> {
        for _ in 0..ROUNDS_MAX {
            let before = self.newest_of_any_life().await?;
            if before.as_ref().is_some_and(|head| head.life != Life::Deleted) {
                let (name, store) = (self.name.as_str(), self.objects.name());
                let what = format!("there is a volume {name} in {store} already");
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            let mut head = first().await?;
            head.number = before.map_or(Ok(0), |head| self.number_after(&head))?;
            // Of a put that lost nobody must take the next one for it.
            head.nonce = self.environment.random();
            if self.put_next(&head).await? == Put::Exists {
                continue;
            }
            let (is_highest, done) = join_two(self.is_highest(&head), act()).await;
            if is_highest? {
                return Ok((head, done));
            }
        }
        Err(self.too_busy())
    }

    /// Opens the volume for a new writer, going on from `seen` if that is its newest head.
    ///
    /// # Errors
    /// `Denied` if another writer has it, or it is meant for another host, and it is to be left;
    /// otherwise what `log` or the store reports.
    pub(crate) async fn open(
        &self,
        claimed: Claimed,
        mut seen: Option<Head>,
        log: &mut impl LocalLog,
    ) -> Result<Owned> {
        if let Some(head) = &seen
            && self.admitted(claimed, head, log).await.is_err()
        {
            seen = None;
        }
        for _ in 0..ROUNDS_MAX {
            // Only claims have to be looked at after the head was (I3).
            let (before, boundary) = match seen.take() {
                Some(head) => (head, self.seen_boundary().await),
                None => {
                    let (head, boundary) = join_two(self.newest(), self.seen_boundary()).await;
                    let head = head?;
                    self.admitted(claimed, &head, log).await?;
                    (head, boundary)
                }
            };
            let claimed = claimed.at(&before);
            let writer = self.claim_above(boundary?, before.volume, log.names()).await?;
            if claimed == Claimed::TakeOver {
                self.shut_out(&before).await;
            }
            let state = self.fenced(&before, writer).await?;
            log.settle(&before, writer, &state).await?;
            let head = self.after(&before, Life::Open { writer, sequence: 0 }, state)?;
            let head = Head { log: log.place(), ..head };
            if self.put_highest(&head).await? {
                return Ok(Owned { head, writer });
            }
        }
        Err(self.too_busy())
    }

    /// Checks that the volume may be opened as long as it has this head.
    async fn admitted(&self, claimed: Claimed, head: &Head, log: &mut impl LocalLog) -> Result<()> {
        claimed.check_still(&self.name, head)?;
        let claimed = claimed.at(head);
        if !matches!(claimed, Claimed::JustMade(_)) || head.life == Life::Pinned {
            self.check_ready(head)?;
        }
        if !log.is_of(head) {
            self.check_claim(claimed, head)?;
        }
        log.admit(head).await
    }

    /// Deletes the volume. What only it had is found by collection.
    ///
    /// # Errors
    /// `Denied` if it is open, or was handed over, and that is to be left.
    pub(crate) async fn delete(&self, claimed: Claimed) -> Result<()> {
        for _ in 0..ROUNDS_MAX {
            let before = match self.newest().await {
                Err(error)
                    if claimed == Claimed::TakeOver && error.kind() == ErrorKind::Corrupt =>
                {
                    self.in_place_of_damaged(error).await?
                }
                newest => newest?,
            };
            claimed.check_still(&self.name, &before)?;
            match claimed.at(&before) {
                // Not even its heir deletes it by accident.
                Claimed::Refuse => self.check_closed(&before)?,
                claimed => self.check_claim(claimed, &before)?,
            }
            if self.put_deleted(&before).await? {
                return Ok(());
            }
        }
        Err(self.too_busy())
    }

    /// Fences the writer of `before`, if it has one, and puts the head that says that the volume is
    /// deleted; false if somebody else has put the next head.
    async fn put_deleted(&self, before: &Head) -> Result<bool> {
        let state = match before.writer() {
            // Only a number of our own may fence.
            Some(_) => {
                self.shut_out(before).await;
                let by = self.claim(before.volume, Named::Nowhere).await?;
                self.fenced(before, by).await?
            }
            None => before.state,
        };
        self.put_highest(&self.after(before, Life::Deleted, state)?).await
    }

    /// What a head that cannot be read may have been, for one that deletes the volume: only its
    /// number counts for that. `error` is what is wrong with it.
    async fn in_place_of_damaged(&self, error: Error) -> Result<Head> {
        let number = match self.highest().await? {
            Some(last) => self.number_of(&last)?,
            None => return Err(error),
        };
        let what = error.in_one_line();
        tracing::warn!(volume = self.name.as_str(), error = what, "what is deleted is damaged");
        Ok(self.head(number, self.environment.random(), Life::Closed, State::default()))
    }

    /// Deletes a volume that was just made, unless somebody has put a head after `made`, its first.
    ///
    /// # Errors
    /// What the store reports.
    pub(crate) async fn delete_just_made(&self, made: &Head) -> Result<bool> {
        self.put_highest(&self.after(made, Life::Deleted, made.state)?).await
    }

    /// Deletes what `writer`, of this process, has not closed of a volume that was just made. One
    /// that it did close, or that others have by now, stays.
    ///
    /// # Errors
    /// What the store reports; `Corrupt` if the newest head is damaged.
    pub(crate) async fn delete_unclosed(&self, volume: Id, writer: Writer) -> Result<()> {
        let is_its = |head: &Head| (head.volume, head.writer()) == (volume, Some(writer));
        self.delete_if(is_its).await.map(drop)
    }

    /// Deletes `volume` if it is a part of what it is to have, whoever writes it. One that was
    /// closed stays, and what others made of its name; returns whether there is the former.
    ///
    /// # Errors
    /// As [`Self::delete_unclosed`].
    pub(crate) async fn delete_unfinished(&self, volume: Id) -> Result<bool> {
        let is_part = |head: &Head| head.volume == volume && head.is_unfinished;
        let left = self.delete_if(is_part).await?;
        Ok(left.is_some_and(|head| head.volume == volume))
    }

    /// Deletes the volume as long as its newest head is ours; returns one that is not.
    async fn delete_if(&self, is_ours: impl Fn(&Head) -> bool) -> Result<Option<Head>> {
        for _ in 0..ROUNDS_MAX {
            let before = match self.newest().await {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                newest => newest?,
            };
            if !is_ours(&before) {
                return Ok(Some(before));
            }
            if self.put_deleted(&before).await? {
                return Ok(None);
            }
        }
        Err(self.too_busy())
    }

    /// The head that says that `owned` has `state`, with the extents before `sequence`, all of
    /// which are answered.
    ///
    /// # Errors
    /// `Limit` if there is no number for it.
    pub(crate) fn checkpoint(&self, owned: &Owned, state: State, sequence: u32) -> Result<Head> {
        let life = Life::Open { writer: owned.writer, sequence };
        self.after(&owned.head, life, state)
    }

    /// The head that ends the life of `owned`, which has `state`. Once it is sent, its writer puts
    /// no more extents.
    ///
    /// # Errors
    /// As [`Self::checkpoint`].
    pub(crate) fn last_head(&self, owned: &Owned, state: State, end: &End) -> Result<Head> {
        let (life, heir) = match end {
            End::Closed => (Life::Closed, String::new()),
            End::HandedTo(host) => (Life::HandedOver, host.clone()),
            End::Deleted => (Life::Deleted, String::new()),
        };
        Ok(Head { heir, ..self.after(&owned.head, life, state)? })
    }

    /// Puts the last head of a writer; false if somebody else has the volume by now.
    ///
    /// # Errors
    /// What the store reports: then only this same head may be put again.
    pub(crate) async fn end(&self, head: &Head) -> Result<bool> {
        self.put_highest(head).await
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
            frames_len: 0,
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

    /// The name and the bytes of a head.
    pub(crate) fn as_object(&self, head: &Head) -> (ObjectName, Buf) {
        (self.name.head(head.number), Buf::from_slice(&head.encode()))
    }

    /// Puts a head; false if it is not the highest then. Others may have gone on meanwhile so far
    /// that the head of this number was collected: ours means nothing then.
    async fn put_highest(&self, head: &Head) -> Result<bool> {
        if self.put_next(head).await? == Put::Exists {
            return Ok(false);
        }
        self.is_highest(head).await
    }

    /// Puts a head, which may not be the highest then.
    async fn put_next(&self, head: &Head) -> Result<Put> {
        let (name, content) = self.as_object(head);
        let durable = match head.life {
            // See `clone`.
            Life::Pinned => Durable::WithNext,
            _ => Durable::Now,
        };
        put_as(&*self.objects, &name, (content, durable), Patience::VERB).await
    }

    /// A head that follows `before`.
    ///
    /// # Errors
    /// `Limit` if there is no number for it: nobody puts so many, but a hostile store may have one.
    fn after(&self, before: &Head, life: Life, state: State) -> Result<Head> {
        // Who deletes an encrypted volume wants its secret gone, and the last head of a name stays.
        let properties = match life {
            Life::Deleted => Properties::default(),
            _ => before.properties,
        };
        let image = before.image;
        let origin = before.origin.clone().filter(|_| life != Life::Deleted);
        let is_unfinished = before.is_unfinished && matches!(life, Life::Open { .. });
        let head = self.head(self.number_after(before)?, before.volume, life, state);
        // A checkpoint is of the same writer.
        let log = before.log.clone().filter(|_| matches!(life, Life::Open { .. }));
        Ok(Head { properties, image, origin, is_unfinished, log, ..head })
    }

    fn number_after(&self, before: &Head) -> Result<u64> {
        before.number.checked_add(1).ok_or_else(|| {
            let what = format!("volume {} has no head numbers left", self.name.as_str());
            Error::new(ErrorKind::Limit, what)
        })
    }

    pub(crate) fn head(&self, number: u64, volume: Id, life: Life, state: State) -> Head {
        Head {
            number,
            store: self.store,
            volume,
            nonce: self.environment.random(),
            life,
            is_unfinished: false,
            state,
            properties: Properties::default(),
            image: None,
            origin: None,
            client: match life {
                Life::Open { .. } => self.objects.client(),
                _ => None,
            },
            log: None,
            name_sum: Some(self.name.sum()),
            time_ns: self.environment.now_ns(),
            host: host_name(self.environment.host()),
            heir: String::new(),
        }
    }

    /// Checks that what is claimed may be had while the volume has this head.
    fn check_claim(&self, claimed: Claimed, head: &Head) -> Result<()> {
        match claimed {
            Claimed::Refuse => self.check_free(head),
            Claimed::OnlyIfClosed => self.check_closed(head),
            Claimed::TakeOver
            | Claimed::TakeOverOf(_)
            | Claimed::AsOf(_)
            | Claimed::JustMade(_) => Ok(()),
        }
    }

    /// Checks that no host has the volume open, and that it is not meant for another one.
    pub(crate) fn check_free(&self, head: &Head) -> Result<()> {
        let is_ours = head.heir == host_name(self.environment.host());
        if head.life == Life::HandedOver && is_ours { Ok(()) } else { self.check_closed(head) }
    }

    /// Checks that no host has the volume open, and that it is meant for none.
    pub(crate) fn check_closed(&self, head: &Head) -> Result<()> {
        match head.life {
            Life::Open { .. } if head.is_unfinished => self.check_ready(head),
            Life::Open { writer, .. } => Err(self.in_use(head, writer)),
            Life::HandedOver => {
                let (name, heir) = (self.name.as_str(), &head.heir);
                let back = match head.host == host_name(self.environment.host()) {
                    true => ", take it back here with mica volume handover --cancel",
                    false => "",
                };
                let what = format!(
                    "volume {name} was handed over to {heir}, which has not opened it: serve it \
                     there first{back}, or take it with --force"
                );
                Err(Error::new(ErrorKind::Denied, what))
            }
            Life::Closed | Life::Deleted | Life::Pinned => Ok(()),
        }
    }

    fn too_busy(&self) -> Error {
        let what = format!(
            "other hosts keep opening or changing volume {}: try again",
            self.name.as_str()
        );
        Error::new(ErrorKind::Io, what)
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

/// Checks that a host can have this name.
///
/// # Errors
/// `Invalid` if none can.
pub(crate) fn check_host(host: &str) -> Result<()> {
    if host.is_empty() || host != host_name(host) {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("{host:?} is not a valid name of a host"),
        ));
    }
    Ok(())
}

/// A host's name as heads have it.
pub(crate) fn host_name(host: &str) -> String {
    host.chars().take(HOST_LEN_MAX / 4).collect()
}
