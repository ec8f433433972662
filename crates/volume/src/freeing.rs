//! A store as those see it who free space in it: objects are immutable, so a deletion is recorded
//! by more objects, which need room before anything is freed. If there is none, the store gives up
//! what it has in reserve.
//!
//! Invariant: every request and answer passes through unchanged, but puts that fail for lack of
//! room, once there was something to give up: these are tried again, by who had sent them, so that
//! a change of several objects goes on where it is.

use mica_block::{
    Entry, Error, ErrorKind, LocalFuture, Object, ObjectName, Objects, Put, PutFuture,
    PutPartsFuture, Result,
};
use mica_rt::{Buf, Parts};
use std::ops::Range;
use std::sync::Arc;

/// The store.
pub(crate) struct Freeing(pub(crate) Arc<dyn Objects>);

/// A put that is done once more.
type PutBy = fn(&dyn Objects, &ObjectName, Buf) -> PutFuture;

impl Freeing {
    fn put(&self, name: &ObjectName, content: Buf, put_by: PutBy) -> PutFuture {
        let (inner, name) = (Arc::clone(&self.0), name.clone());
        Box::pin(async move {
            let (done, content) = put_by(&*inner, &name, content).await;
            match makes_room(&*inner, &done).await {
                true => put_by(&*inner, &name, content).await,
                false => (done, content),
            }
        })
    }
}

/// Whether something was given up because of what a put came to.
async fn makes_room(objects: &dyn Objects, done: &Result<Put>) -> bool {
    let is_full = done.as_ref().is_err_and(|error| error.kind() == ErrorKind::NoSpace);
    is_full
        && objects.give_up_reserve().await.unwrap_or_else(|error| {
            tracing::warn!(error = error.in_one_line(), "what was in reserve cannot be given up");
            false
        })
}

impl Objects for Freeing {
    fn name(&self) -> String {
        self.0.name()
    }

    fn is_far(&self) -> bool {
        self.0.is_far()
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        self.0.open(name)
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        self.put(name, content, |objects, name, content| objects.put_if_absent(name, content))
    }

    fn put_parts(&self, name: &ObjectName, content: &Arc<Parts>) -> Option<PutPartsFuture> {
        let put = self.0.put_parts(name, content)?;
        let (inner, name, content) = (Arc::clone(&self.0), name.clone(), Arc::clone(content));
        Some(Box::pin(async move {
            let done = put.await;
            match makes_room(&*inner, &done).await {
                true => match inner.put_parts(&name, &content) {
                    Some(again) => again.await,
                    None => done,
                },
                false => done,
            }
        }))
    }

    fn put_early(&self, name: &ObjectName, content: Buf) -> PutFuture {
        self.put(name, content, |objects, name, content| objects.put_early(name, content))
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        self.0.list(folder, after)
    }

    fn list_all(
        &self,
        folder: &ObjectName,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        self.0.list_all(folder, after)
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        self.0.delete(name)
    }

    fn punch(&self, name: &ObjectName, ranges: &[Range<u64>]) -> LocalFuture<'static, Result<u64>> {
        self.0.punch(name, ranges)
    }

    fn give_up_reserve(&self) -> LocalFuture<'static, Result<bool>> {
        self.0.give_up_reserve()
    }

    fn client(&self) -> Option<String> {
        self.0.client()
    }

    fn shut_out(&self, client: &str) -> LocalFuture<'static, Result<()>> {
        self.0.shut_out(client)
    }
}

/// The error of what would free space, in a store that is full and has nothing in reserve.
pub(crate) fn needs_room(error: Error) -> Error {
    if error.kind() != ErrorKind::NoSpace {
        return error;
    }
    let what = "this takes a few KiB before it frees any: `mica volume gc` makes room if the store \
                has something that no volume needs; else remove another file of that file system, \
                or raise the quota";
    error.wrap(what)
}
