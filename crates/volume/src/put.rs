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
use crate::format::head::Head;
use crate::place::ExtentId;
use mica_block::{Entry, Error, ErrorKind, LIST_MAX, ObjectName, Objects, Put, Result};
use mica_rt::{Buf, sleep};
use std::time::Duration;

/// Bytes of the beginning of an object that make it another one than everybody else's: a header
/// with a nonce, under a checksum.
const SIGNED_BYTES: usize = 512;
/// The first and the longest pause before something is tried again.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// How often something is tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Patience {
    /// Until the store answers: a guest waits, and must not see an error for an outage.
    Endless,
    /// So often: somebody waits for a verb.
    Tries(u32),
}

impl Patience {
    /// That of a verb.
    pub(crate) const VERB: Self = Self::Tries(6);

    /// Waits before the next try, after `tried` that ended with `error`; false if there is none.
    pub(crate) async fn bears(self, error: &Error, tried: u32) -> bool {
        if !may_pass(error.kind()) {
            return false;
        }
        if let Self::Tries(tries) = self
            && tried >= tries
        {
            return false;
        }
        let pause = PAUSE_MIN.saturating_mul(1 << tried.saturating_sub(1).min(16));
        sleep(pause.min(PAUSE_MAX)).await;
        true
    }
}

/// Whether trying again can help.
pub(crate) fn may_pass(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Io | ErrorKind::NoSpace)
}

/// A put that is tried until it is answered.
pub(crate) struct Putting {
    name: ObjectName,
    content: Option<Buf>,
}

impl Putting {
    /// Of `content`, whose first bytes nobody else ever puts.
    pub(crate) fn new(name: ObjectName, content: Buf) -> Self {
        Self { name, content: Some(content) }
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
        let (result, content) = objects.put_if_absent(&self.name, content).await;
        let content = self.content.insert(content);
        if result? == Put::Done {
            return Ok(Put::Done);
        }
        // It may be our own, of an earlier try or of one that the store repeated.
        let ours = &content[..SIGNED_BYTES.min(content.len())];
        match objects.open(&self.name).read_at(Buf::new(ours.len()), 0).await {
            (Ok(()), there) if *there == *ours => Ok(Put::Done),
            (Ok(()), _) => Ok(Put::Exists),
            // It is taken away only if others went on without us.
            (Err(error), _) if error.kind() == ErrorKind::NotFound => Ok(Put::Exists),
            (Err(error), _) => Err(error),
        }
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
    let mut putting = Putting::new(name.clone(), content);
    let mut tried = 0;
    loop {
        let error = match putting.attempt(objects).await {
            Ok(outcome) => return Ok(outcome),
            Err(error) => error,
        };
        tried += 1;
        if !patience.bears(&error, tried).await {
            return Err(error.wrap(format!("putting {name} into {}", objects.name())));
        }
        tracing::warn!(object = %name, error = error.in_one_line(), "a put is tried again");
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
    let mut tried = 0;
    loop {
        match objects.list(Some(folder), after).await {
            Ok(page) => return Ok(page),
            Err(error) => {
                tried += 1;
                if !patience.bears(&error, tried).await {
                    return Err(error.wrap(format!("listing {folder} of {}", objects.name())));
                }
            }
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
    let mut last = None;
    loop {
        let page = list(objects, folder, last.as_ref(), Patience::VERB).await?;
        let is_full = page.len() >= LIST_MAX;
        if let Some(entry) = page.last() {
            last = Some(Entry::name(entry).clone());
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
    let mut tried = 0;
    loop {
        let (result, buf) = objects.open(name).read_at(Buf::new(len), 0).await;
        match result {
            Ok(()) => return Ok(Some(buf)),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                tried += 1;
                if !patience.bears(&error, tried).await {
                    return Err(error.wrap(format!("reading {name} of {}", objects.name())));
                }
            }
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

/// The head that `bytes`, which were read in the place of head `number` as `name`, begin with.
///
/// # Errors
/// As [`read_header`].
pub(crate) fn decode_head(
    objects: &dyn Objects,
    name: &ObjectName,
    (store, number): (Id, u64),
    bytes: &[u8],
) -> Result<Head> {
    let head = Head::decode(bytes).map_err(|why| why.explain(name, objects))?;
    match (head.store, head.number) == (store, number) {
        true => Ok(head),
        false => Err(elsewhere(name, objects)),
    }
}

/// That an object was found which another name, volume or store should have.
pub(crate) fn elsewhere(name: &ObjectName, objects: &dyn Objects) -> Error {
    let what = format!("{name} of {}: it belongs somewhere else", objects.name());
    Error::new(ErrorKind::Corrupt, what)
}
