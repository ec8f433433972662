//! Requests to a store that come to an end: they are tried again, and what an unclear answer means
//! is found out.
//!
//! Invariants
//! - I1 A put is done only if it was answered so, or if after a refusal the object is there and
//!   begins as what was put, with a nonce that nobody else has. An object that is missing proves
//!   nothing after an unclear answer: the put is repeated.
//! - I2 A header or a head is returned only if it is what it was looked for as.

use crate::format::Id;
use crate::format::extent::{HEADER_BYTES, Header};
use crate::format::head::{HEAD_BYTES, Head, Life};
use crate::names::VolumeName;
use crate::place::ExtentId;
use mica_block::{
    Entry, Error, ErrorKind, LIST_MAX, ObjectName, Objects, PROBE_FOLDER, Put, Result,
};
use mica_map::crc32c;
use mica_rt::{Buf, Instant, Parts, now, sleep, yield_now};
use mica_units::random_at;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of the beginning of an object that make it another one than everybody else's: a header
/// with a nonce, under a checksum.
const SIGNED_BYTES: usize = 512;
/// The first and the longest pause before something is tried again, at most.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// After so many failed tries it is said that a request is still tried.
const SAY_AFTER: u32 = 4;

/// For how long something is tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Patience {
    /// Until the store answers: a guest waits, and must not see an error for an outage.
    Endless,
    /// No new try begins later than this after the first that failed: somebody waits for a verb.
    For(Duration),
}

impl Patience {
    /// That of a verb.
    pub(crate) const VERB: Self = Self::For(Duration::from_secs(15));

    /// Whether trying again can help. Leave that a store denies comes back when credentials are
    /// renewed or a policy is mended, which nobody who waits for a verb wants to wait for.
    fn may_help(self, kind: ErrorKind) -> bool {
        match kind {
            ErrorKind::Io | ErrorKind::NoSpace => true,
            ErrorKind::Denied => self == Self::Endless,
            _ => false,
        }
    }

    /// Whether it is said, before the end, that `error` is in the way: whoever waits for a verb is
    /// told at its end, of a lack of room with what to do about that.
    pub(crate) fn is_said(self, error: &Error) -> bool {
        self == Self::Endless || error.kind() != ErrorKind::NoSpace
    }
}

/// The tries of one request.
pub(crate) struct Tries {
    patience: Patience,
    failed: u32,
    failing_since: Option<Instant>,
}

impl Tries {
    /// None yet.
    pub(crate) fn new(patience: Patience) -> Self {
        Self { patience, failed: 0, failing_since: None }
    }

    /// Waits before the next try, after one that ended with `error`. `doing` is in messages.
    ///
    /// # Errors
    /// `error`, if trying again cannot help, or it was tried for long enough.
    pub(crate) async fn pause(&mut self, error: Error, doing: impl Fn() -> String) -> Result<()> {
        let since = *self.failing_since.get_or_insert_with(now);
        let is_last = match self.patience {
            Patience::Endless => false,
            Patience::For(time) => now().saturating_since(since) >= time,
        };
        if is_last || !self.patience.may_help(error.kind()) {
            let doing = doing();
            return Err(match error.kind() {
                ErrorKind::NoSpace => {
                    error.wrap(format!("{doing}, which is full: make room there"))
                }
                _ => error.wrap(doing),
            });
        }
        self.failed = self.failed.saturating_add(1);
        let doing = doing();
        if self.failed == SAY_AFTER && self.patience.is_said(&error) {
            let error = error.in_one_line();
            tracing::warn!(error, "{doing} failed {SAY_AFTER} times: still trying");
        }
        sleep(pause_len(self.failed, crc32c(doing.as_bytes()))).await;
        Ok(())
    }
}

/// The pause after so many tries: twice as long each time, and up to a half less, so that those who
/// failed at one time do not all return at one time.
fn pause_len(failed: u32, seed: u32) -> Duration {
    let longest = PAUSE_MIN.saturating_mul(1 << failed.saturating_sub(1).min(16)).min(PAUSE_MAX);
    let half = u64::try_from(longest.as_nanos() / 2).unwrap_or(u64::MAX);
    longest - Duration::from_nanos(random_at(seed.into(), failed.into()) % (half + 1))
}

/// When what is put has to be durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Durable {
    /// When the put is answered.
    Now,
    /// When the next object of its folder is: [`Objects::put_early`].
    WithNext,
}

/// What is put.
pub(crate) enum Content {
    Whole(Buf),
    Parts(Arc<Parts>),
}

impl From<Buf> for Content {
    fn from(buf: Buf) -> Self {
        Self::Whole(buf)
    }
}

impl From<Arc<Parts>> for Content {
    fn from(parts: Arc<Parts>) -> Self {
        Self::Parts(parts)
    }
}

/// Bytes that are copied at once.
const BYTES_AT_ONCE: usize = 256 << 10;

/// A copy in one piece.
async fn in_one(parts: &Parts) -> Buf {
    let mut buf = Buf::new(parts.len());
    for start in (0..parts.len()).step_by(BYTES_AT_ONCE) {
        let (mut at, end) = (start, parts.len().min(start + BYTES_AT_ONCE));
        for piece in parts.pieces(start..end) {
            buf.put(at, piece);
            at += piece.len();
        }
        if end < buf.len() {
            yield_now().await;
        }
    }
    buf
}

/// A put that is tried until it is answered.
pub(crate) struct Putting {
    name: ObjectName,
    content: Option<Content>,
    durable: Durable,
}

impl Putting {
    /// Of `content`, whose first bytes nobody else ever puts.
    pub(crate) fn new(name: ObjectName, content: impl Into<Content>) -> Self {
        Self { name, content: Some(content.into()), durable: Durable::Now }
    }

    /// Tries once. [`Put::Exists`] says that somebody else's object is there, or was.
    ///
    /// # Errors
    /// What the store reports: the object may then be there or not, or come to be there later.
    ///
    /// # Panics
    /// If the future of an earlier try was dropped.
    pub(crate) async fn attempt(&mut self, objects: &dyn Objects) -> Result<Put> {
        let content = self.content.take().expect("one try at a time");
        let (result, content) = self.send(objects, content).await;
        let content = self.content.insert(content);
        if result? == Put::Done {
            return Ok(Put::Done);
        }
        // It may be our own, of an earlier try or of one that the store repeated.
        let ours = match content {
            Content::Whole(buf) => Buf::from_slice(&buf[..SIGNED_BYTES.min(buf.len())]),
            Content::Parts(parts) => parts.to_buf(0..SIGNED_BYTES.min(parts.len())),
        };
        match objects.open(&self.name).read_at(Buf::new(ours.len()), 0).await {
            (Ok(()), there) if *there == *ours => Ok(Put::Done),
            (Ok(()), _) => Ok(Put::Exists),
            // It is taken away only if others went on without us.
            (Err(error), _) if error.kind() == ErrorKind::NotFound => Ok(Put::Exists),
            (Err(error), _) => Err(error),
        }
    }

    async fn send(&self, objects: &dyn Objects, content: Content) -> (Result<Put>, Content) {
        let buf = match content {
            Content::Whole(buf) => buf,
            Content::Parts(parts) => {
                if let Some(put) = objects.put_parts(&self.name, &parts) {
                    return (put.await, Content::Parts(parts));
                }
                in_one(&parts).await
            }
        };
        let (result, buf) = match self.durable {
            Durable::Now => objects.put_if_absent(&self.name, buf).await,
            Durable::WithNext => objects.put_early(&self.name, buf).await,
        };
        (result, Content::Whole(buf))
    }
}

/// Puts `content`, whose first bytes nobody else ever puts. [`Put::Exists`] says that somebody
/// else's object is there.
///
/// # Errors
/// What the store reports in the end. The object may then be there or not.
pub(crate) async fn put(
    objects: &dyn Objects,
    name: &ObjectName,
    content: Buf,
    patience: Patience,
) -> Result<Put> {
    put_as(objects, name, (content, Durable::Now), patience).await
}

/// As [`put`], durable when `durable` says.
///
/// # Errors
/// As [`put`].
pub(crate) async fn put_as(
    objects: &dyn Objects,
    name: &ObjectName,
    (content, durable): (Buf, Durable),
    patience: Patience,
) -> Result<Put> {
    let mut putting = Putting { durable, ..Putting::new(name.clone(), content) };
    let mut tries = Tries::new(patience);
    let doing = || format!("putting {name} into {}", objects.name());
    loop {
        match putting.attempt(objects).await {
            Ok(outcome) => return Ok(outcome),
            Err(error) => tries.pause(error, doing).await?,
        }
    }
}

/// What is directly in `folder`, after `after`, as [`Objects::list`] has it.
///
/// # Errors
/// What the store reports in the end.
pub(crate) async fn list(
    objects: &dyn Objects,
    folder: &ObjectName,
    after: Option<&ObjectName>,
    patience: Patience,
) -> Result<Vec<Entry>> {
    let mut tries = Tries::new(patience);
    let doing = || format!("listing {folder} of {}", objects.name());
    loop {
        match objects.list(Some(folder), after).await {
            Ok(page) => return Ok(page),
            Err(error) => tries.pause(error, doing).await?,
        }
    }
}

/// Whether a store has no objects at all, but for what another process may just find out with
/// whether it keeps its promises.
///
/// # Errors
/// What the store reports in the end.
pub(crate) async fn is_empty(objects: &dyn Objects, patience: Patience) -> Result<bool> {
    let mut tries = Tries::new(patience);
    let doing = || format!("listing {}", objects.name());
    loop {
        match objects.list(None, None).await {
            Ok(page) => {
                return Ok(page.iter().all(|entry| entry.name().as_str() == PROBE_FOLDER));
            }
            Err(error) => tries.pause(error, doing).await?,
        }
    }
}

/// The last of what is directly in `folder`.
///
/// # Errors
/// What the store reports in the end.
pub(crate) async fn last_in(
    objects: &dyn Objects,
    folder: &ObjectName,
) -> Result<Option<ObjectName>> {
    let page = list(objects, folder, None, Patience::VERB).await?;
    let Some(last) = page.last().map(|entry| entry.name().clone()) else { return Ok(None) };
    if page.len() < LIST_MAX {
        return Ok(Some(last));
    }
    Ok(last_after(objects, folder, &last).await?.or(Some(last)))
}

/// The last of what is directly in `folder` after `after`.
///
/// # Errors
/// What the store reports in the end.
pub(crate) async fn last_after(
    objects: &dyn Objects,
    folder: &ObjectName,
    after: &ObjectName,
) -> Result<Option<ObjectName>> {
    let mut last: Option<ObjectName> = None;
    loop {
        let from = last.as_ref().unwrap_or(after);
        let page = list(objects, folder, Some(from), Patience::VERB).await?;
        let is_full = page.len() >= LIST_MAX;
        if let Some(entry) = page.last() {
            last = Some(entry.name().clone());
        }
        if !is_full {
            return Ok(last);
        }
    }
}

/// The first `len` bytes of an object, with zeros after its end; `None` if there is none.
///
/// # Errors
/// What the store reports in the end.
pub(crate) async fn read(
    objects: &dyn Objects,
    name: &ObjectName,
    len: usize,
    patience: Patience,
) -> Result<Option<Buf>> {
    let mut tries = Tries::new(patience);
    let doing = || format!("reading {name} of {}", objects.name());
    loop {
        let (result, buf) = objects.open(name).read_at(Buf::new(len), 0).await;
        match result {
            Ok(()) => return Ok(Some(buf)),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => tries.pause(error, doing).await?,
        }
    }
}

/// The header of an extent, or of the fence in its place; `None` if there is neither.
///
/// # Errors
/// `Corrupt` if something else is in its place, `Unsupported` if it has another format; otherwise
/// what the store reports in the end.
pub(crate) async fn read_header(objects: &dyn Objects, id: ExtentId) -> Result<Option<Header>> {
    let name = id.name();
    let bytes = read(objects, &name, HEADER_BYTES, Patience::VERB).await?;
    bytes.map(|bytes| decode_header(objects, id, &bytes)).transpose()
}

/// The header that `bytes`, which were read in the place of extent `id`, begin with.
///
/// # Errors
/// As [`read_header`].
pub(crate) fn decode_header(objects: &dyn Objects, id: ExtentId, bytes: &[u8]) -> Result<Header> {
    let name = id.name();
    let header = Header::decode(bytes).map_err(|why| why.explain(&name, objects))?;
    match header.id == id {
        true => Ok(header),
        false => Err(elsewhere(&name, objects)),
    }
}

/// The head of volume `name` that `bytes`, which were read in the place of head `number`, begin
/// with.
///
/// # Errors
/// As [`read_header`].
pub(crate) async fn decode_head(
    objects: &dyn Objects,
    name: &VolumeName,
    (store, number): (Id, u64),
    bytes: &[u8],
) -> Result<Head> {
    let object = name.head(number);
    let head = Head::decode(bytes).map_err(|why| lost(why.explain(&object, objects), name))?;
    let is_own = (head.store, head.number) == (store, number)
        && match head.name_sum {
            Some(sum) => sum == name.sum(),
            None => follows(objects, name, &head).await?,
        };
    match is_own {
        true => Ok(head),
        false => Err(lost(elsewhere(&object, objects), name)),
    }
}

/// What to do about a head that is damaged. Others of the volume are of no use: its writers went on
/// from this one.
fn lost(error: Error, name: &VolumeName) -> Error {
    if error.kind() != ErrorKind::Corrupt {
        return error;
    }
    let what = format!(
        "{}; restore this head from a copy, or give volume {} up: mica volume delete --force",
        error.in_one_line(),
        name.as_str()
    );
    Error::new(ErrorKind::Corrupt, what)
}

/// Whether a head that does not say whose it is may follow the one before it among those of volume
/// `name`, as far as that is still there: a volume keeps its identity until it is deleted.
async fn follows(objects: &dyn Objects, name: &VolumeName, head: &Head) -> Result<bool> {
    let Some(before) = head.number.checked_sub(1) else { return Ok(true) };
    let bytes = read(objects, &name.head(before), HEAD_BYTES, Patience::VERB).await?;
    let before = bytes.and_then(|bytes| Head::decode(&bytes).ok());
    Ok(before.is_none_or(|before| before.life == Life::Deleted || before.volume == head.volume))
}

/// The error: an object was found that belongs to another name, volume or store.
pub(crate) fn elsewhere(name: &ObjectName, objects: &dyn Objects) -> Error {
    let what = format!("{name} of {}: it belongs somewhere else", objects.name());
    Error::new(ErrorKind::Corrupt, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::run;

    /// The story: a verb on a full store ended with the system's words only.
    #[test]
    fn lack_of_room_is_said_with_what_to_do_about_it() {
        run(1, async {
            let full = Error::new(ErrorKind::NoSpace, "no space left");
            let mut tries = Tries::new(Patience::For(Duration::ZERO));
            let paused = tries.pause(full, || "putting a into b".to_owned()).await;
            let error = paused.expect_err("it was the last try");
            assert_eq!(error.kind(), ErrorKind::NoSpace);
            let line = "putting a into b, which is full: make room there: no space left";
            assert_eq!(error.in_one_line(), line);
        });
    }
}
