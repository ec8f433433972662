//! A store as its requests see it: reading an object, and what errors say.

use crate::ffi::{Answer, Errno, Request};
use crate::known::Folders;
use crate::layout::Place;
use crate::lists::Lists;
use crate::outcome::error_of;
use crate::requests::Requests;
use mica_block::{Error, ErrorKind, ObjectName, Result};
use mica_rt::Buf;
use std::fmt::Display;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What requests share.
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) requests: Arc<Requests>,
    pub(crate) folders: Folders,
    pub(crate) lists: Lists,
    /// Whether the cluster has said that it has blocklisted this client.
    pub(crate) is_blocklisted: AtomicBool,
}

impl Shared {
    pub(crate) fn doing(&self, doing: &str, name: impl Display) -> String {
        format!("{doing} {name} of {}", self.name)
    }

    /// The error of `doing` something with the object `name`.
    pub(crate) async fn error(&self, doing: &str, name: impl Display, errno: Errno) -> Error {
        let doing = self.doing(doing, name);
        if errno == Errno(libc::ENOENT) {
            // What is not in a pool that is gone is not missing.
            let (cluster, pool) =
                (Arc::clone(&self.requests.home.cluster), self.requests.home.pool);
            if !self.lists.wait(move || cluster.has_pool(pool)).await {
                let what = format!("{doing}: the pool was deleted");
                return Error::new(ErrorKind::Invalid, what);
            }
        }
        self.noted(&doing, errno)
    }

    /// The error of `doing` something; notes what it says of this client.
    pub(crate) fn noted(&self, doing: &str, errno: Errno) -> Error {
        if errno == Errno(libc::ESHUTDOWN) {
            self.is_blocklisted.store(true, Ordering::Relaxed);
        }
        error_of(doing, errno)
    }

    /// Reads into memory of our own. It begins now.
    pub(crate) fn read(
        self: &Arc<Self>,
        name: &ObjectName,
        buf: Buf,
        offset: u64,
    ) -> impl Future<Output = (Result<Read>, Buf)> + 'static {
        let reading = self.requests.begin(Place::of(name), Request::Read(buf, offset));
        let (shared, name) = (Arc::clone(self), name.clone());
        async move {
            let Answer { result, buf, count, object_len } = reading.await;
            let there = object_len.saturating_sub(offset).min(buf.len() as u64);
            let read = match result {
                Ok(()) if count as u64 == there => Ok(Read { count, object_len }),
                Ok(()) => {
                    let doing = shared.doing("reading", &name);
                    Err(Error::new(ErrorKind::Io, format!("{doing}: the answer is cut off")))
                }
                Err(errno) => Err(shared.error("reading", &name, errno).await),
            };
            (read, buf)
        }
    }

    /// The length of an object.
    pub(crate) async fn len(self: &Arc<Self>, name: &ObjectName) -> Result<u64> {
        let (read, _) = self.read(name, Buf::new(0), 0).await;
        read.map(|read| read.object_len)
    }

    pub(crate) fn listing_failed(&self, errno: Errno) -> Error {
        self.noted(&format!("listing objects of {}", self.name), errno)
    }
}

/// What a read found.
pub(crate) struct Read {
    /// Bytes that were read.
    pub(crate) count: usize,
    /// Bytes that the object has.
    pub(crate) object_len: u64,
}
