//! Requests to a store that come to an end: they are tried again, and what an unclear answer means
//! is found out.
//!
//! Invariants
//! - I1 A put is done only if it was answered so, or if after an unclear answer the object is there
//!   and begins as what was put, with a nonce that nobody else has.
//! - I2 A header is returned only if it is that of the extent it was looked for as.

use crate::format::extent::{HEADER_BYTES, Header};
use crate::place::ExtentId;
use mica_block::{Error, ErrorKind, ObjectName, Objects, Put, Result};
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

    /// Waits before try number `tried` + 1; false if there is none.
    async fn pause(self, tried: u32) -> bool {
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
    let (mut content, mut is_unclear, mut tried) = (content, false, 0);
    loop {
        let (result, buf) = objects.put_if_absent(name, content).await;
        content = buf;
        let error = match result {
            Ok(Put::Exists) if is_unclear => {
                let there = read(objects, name, SIGNED_BYTES, patience).await?;
                let ours = &content[..SIGNED_BYTES.min(content.len())];
                // An object that exists is not taken away while its writer waits.
                let is_ours = there.is_some_and(|there| there[..ours.len()] == *ours);
                return Ok(if is_ours { Put::Done } else { Put::Exists });
            }
            Ok(outcome) => return Ok(outcome),
            Err(error) => error,
        };
        is_unclear = true;
        tried += 1;
        if !may_pass(error.kind()) || !patience.pause(tried).await {
            return Err(error.wrap(format!("putting {name} into {}", objects.name())));
        }
        tracing::warn!(object = %name, error = error.in_one_line(), "a put is tried again");
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
                if !may_pass(error.kind()) || !patience.pause(tried).await {
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
    let Some(bytes) = bytes else { return Ok(None) };
    let header = Header::decode(&bytes).map_err(|why| why.explain(&name, objects))?;
    if header.id != id {
        return Err(elsewhere(&name, objects));
    }
    Ok(Some(header))
}

/// That an object was found which another name, volume or store should have.
pub(crate) fn elsewhere(name: &ObjectName, objects: &dyn Objects) -> Error {
    let what = format!("{name} of {}: it belongs somewhere else", objects.name());
    Error::new(ErrorKind::Corrupt, what)
}
