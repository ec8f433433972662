//! A store of objects: bytes under names, put once, never changed, and deleted only by collection.
//!
//! A volume is kept in one. What several hosts agree on is decided by [`Objects::put_if_absent`]
//! alone, so that a directory, a pool of RADOS and a bucket are equally good, as long as they keep
//! that promise under a race.

use crate::{Error, ErrorKind, IoFuture, LocalFuture, Result};
use mica_rt::{Buf, Parts};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// The name of an object: parts of lower-case letters, digits, `-`, `_` and `.`, with `/` between
/// them. No part is empty or begins with a dot. In byte order, which is the order of a listing.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ObjectName(Arc<str>);

impl ObjectName {
    /// Longest name, in bytes: S3 has 1024, of which a store may need some for itself.
    pub const LEN_MAX: usize = 512;
    /// Longest part, in bytes: file systems have 255, of which a store may need some for itself.
    pub const PART_LEN_MAX: usize = 200;

    /// The name `text`, which may come from outside.
    ///
    /// # Errors
    /// `Invalid` if it is none.
    pub fn new(text: &str) -> Result<Self> {
        let is_good = !text.is_empty() && text.len() <= Self::LEN_MAX;
        if is_good && text.split('/').all(is_part) {
            Ok(Self(text.into()))
        } else {
            let what = format!(
                "{text:?} is no name of an object: parts of a-z, 0-9, '-', '_' and '.' with '/' \
                 between them, none beginning with a dot"
            );
            Err(Error::new(ErrorKind::Invalid, what))
        }
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether `text` may be a part of a name.
fn is_part(text: &str) -> bool {
    let is_allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.');
    !text.is_empty()
        && text.len() <= ObjectName::PART_LEN_MAX
        && !text.starts_with('.')
        && text.bytes().all(is_allowed)
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What became of a put.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Put {
    /// The object is there, durable, with these bytes.
    Done,
    /// There was an object with this name already; it is unchanged.
    Exists,
}

/// A put in flight. Resolves to the outcome and the buffer, so that it can be tried again. The put
/// goes on if this is dropped.
pub type PutFuture = LocalFuture<'static, (Result<Put>, Buf)>;

/// As [`PutFuture`], of what several buffers have.
pub type PutPartsFuture = LocalFuture<'static, Result<Put>>;

/// A read of an object's end in flight. Resolves to the object's length and the buffer.
pub type EndFuture = LocalFuture<'static, (Result<u64>, Buf)>;

/// What a listing finds.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Entry {
    /// An object.
    Object {
        /// Its name.
        name: ObjectName,
        /// Its length in bytes.
        len: u64,
    },
    /// More names begin with this one and a `/`.
    Folder(ObjectName),
}

impl Entry {
    /// The name of the object or of the folder.
    pub fn name(&self) -> &ObjectName {
        match self {
            Self::Object { name, .. } | Self::Folder(name) => name,
        }
    }
}

/// The folder in which whoever finds out whether a store keeps its promises puts objects for a
/// moment: nothing that a store has.
pub const PROBE_FOLDER: &str = "probe";
/// Entries of one listing, at most.
pub const LIST_MAX: usize = 1000;

/// An object that is read.
pub trait Object: Send + Sync {
    /// Fills `buf` from `offset` on. What is beyond the end reads as zeros: whoever reads knows
    /// from sums what has to be there.
    ///
    /// Errors: `NotFound` if there is no object of this name.
    fn read_at(&self, buf: Buf, offset: u64) -> IoFuture;

    /// Fills `buf` with the last bytes of the object, in one request, and says how long the object
    /// is. All of a shorter one is at the beginning of `buf`, and what follows is unspecified.
    ///
    /// Errors: as [`Object::read_at`].
    fn read_end(&self, buf: Buf) -> EndFuture;
}

/// A store of objects. Shared by all threads; each call runs on the executor of the calling thread,
/// and begins before it is awaited.
///
/// No name is both that of an object and that of a folder. Who names objects sees to that: a
/// directory cannot do it, and nobody checks it in a bucket.
///
/// Only what few stores can do has a default, which is that they cannot, or that they do more than
/// is asked: a wrapper that forgot to forward any other call would silently change what a store
/// promises.
pub trait Objects: Send + Sync {
    /// The store's name in messages: its URL without secrets.
    fn name(&self) -> String;

    /// Whether answers come over a network, from a service that may hang, into memory that a copy
    /// puts in its place. Of a read that is not answered in time, whoever asked for it may then be
    /// answered without it, if it has memory of its own. Otherwise the system itself writes into
    /// that memory, at any time before it answers.
    fn is_far(&self) -> bool;

    /// The object `name`, to be read. Does no I/O: whether it exists shows when it is read.
    fn open(&self, name: &ObjectName) -> Arc<dyn Object>;

    /// Puts an object with all of `content`, unless there is one with this name. Of any number of
    /// puts of one name, by whatever hosts, exactly one is [`Put::Done`], as long as nobody deletes
    /// the object. Readers see all of an object or nothing of it, also after a power cut; what was
    /// answered is durable: also what was there already, and what is read or listed.
    ///
    /// `content` may be empty. It is not a guest's memory: nobody changes it meanwhile. No two
    /// writers put the same bytes under one name: whose they are decides who was first if an answer
    /// is lost.
    ///
    /// Errors: what the store reports. The object may then be there or not, or come to be there
    /// later: only reading it, or a put of one's own that is answered, decides.
    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture;

    /// As [`Objects::put_if_absent`], of content in several buffers, which are not copied together;
    /// `None` if the store takes it in one piece only.
    fn put_parts(&self, _name: &ObjectName, _content: &Arc<Parts>) -> Option<PutPartsFuture> {
        None
    }

    /// As [`Objects::put_if_absent`], of an object that is of no use without another, which the
    /// same process puts into the same folder next: all see it at once, and it is durable when that
    /// one is. A power cut before may leave nothing of it.
    fn put_early(&self, name: &ObjectName, content: Buf) -> PutFuture {
        self.put_if_absent(name, content)
    }

    /// What is directly in `folder` (everything at the top if it is `None`), by name, from the
    /// first whose name is greater than `after` on: at most [`LIST_MAX`], and fewer only if there
    /// are no more. A folder without objects does not exist. An object that was put or deleted
    /// while the listing ran may be in it or not.
    ///
    /// Errors: what the store reports.
    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>>;

    /// All objects in `folder` and in its folders, however deep, by name, and otherwise as
    /// [`Objects::list`]: for stores where that costs a request for each page, and not one for each
    /// folder.
    ///
    /// Errors: `Unsupported`, at once, if folders have to be listed one by one; otherwise what the
    /// store reports.
    fn list_all(
        &self,
        _folder: &ObjectName,
        _after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        let what = format!("{} lists each folder by itself", self.name());
        Box::pin(std::future::ready(Err(Error::new(ErrorKind::Unsupported, what))))
    }

    /// Deletes an object. It is not an error if there is none. Those who opened it before may go on
    /// reading it; after a power cut it may be there again.
    ///
    /// Errors: what the store reports; the object may then be there or not.
    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>>;

    /// Gives the space of `ranges` of an object back, which nobody needs again: each page of them
    /// has zeros from now on, or what it had; all the rest stays as it is, its length too. Says how
    /// many bytes that gave, about. It is not an error if there is no such object, or if there are
    /// no ranges, which shows whether a store can do it.
    ///
    /// Errors: `Unsupported` if the store cannot; otherwise what it reports.
    fn punch(
        &self,
        _name: &ObjectName,
        _ranges: &[Range<u64>],
    ) -> LocalFuture<'static, Result<u64>> {
        let what = format!("{} gives back no parts of objects", self.name());
        Box::pin(std::future::ready(Err(Error::new(ErrorKind::Unsupported, what))))
    }

    /// Gives up the space that the store keeps for itself, so that what records a deletion can be
    /// put when it is full. Says whether there was any.
    ///
    /// Errors: what the store reports.
    fn give_up_reserve(&self) -> LocalFuture<'static, Result<bool>> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// What the store calls this client, if it can tell clients apart and shut one out. It may be
    /// another one later.
    fn client(&self) -> Option<String> {
        None
    }

    /// Shuts `client` out, which [`Objects::client`] said elsewhere: what it sent and is not done
    /// when this ends is never done. Nothing depends on it: put-if-absent decides who is first.
    ///
    /// Errors: `Unsupported` if the store cannot, `Denied` if this client may not; otherwise what
    /// it reports.
    fn shut_out(&self, client: &str) -> LocalFuture<'static, Result<()>> {
        let what = format!("{} cannot shut out client {client}", self.name());
        Box::pin(std::future::ready(Err(Error::new(ErrorKind::Unsupported, what))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_a_folder_or_differ_between_stores_are_refused() {
        for good in ["format", "extents/0000000a/00000001", "volumes/web-1.old_2/0"] {
            assert_eq!(ObjectName::new(good).expect("a name").as_str(), good);
        }
        let long = "a".repeat(ObjectName::PART_LEN_MAX + 1);
        let deep = "a/".repeat(ObjectName::LEN_MAX / 2) + "a";
        let bad = ["", "/", "a/", "/a", "a//b", "..", "a/../b", ".a", "A", "a b", "a\0", "ä"];
        for bad in bad.into_iter().chain([long.as_str(), deep.as_str()]) {
            assert_eq!(ObjectName::new(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad:?}");
        }
    }
}
