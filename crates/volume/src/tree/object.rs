//! Reads of one object, which are tried again, and into whose memory they go (I7 of `tree.rs`).

use super::Tree;
use super::last_answer::{NO_ANSWER, read_unless_given_up};
use crate::place::ExtentId;
use crate::put::Tries;
use mica_block::{Error, ErrorKind, Object, Result};
use mica_rt::Buf;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts a read that is tried again, until it is dropped.
struct Failing<'a>(&'a AtomicU64);

impl<'a> Failing<'a> {
    fn new(count: &'a AtomicU64) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Failing<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Tree {
    /// Fills `buf` from `offset` of an extent on.
    pub(super) async fn read_object(
        &self,
        extent: ExtentId,
        mut buf: Buf,
        offset: u64,
    ) -> (Result<()>, Buf) {
        let object = self.object(extent);
        let objects = &self.shared.objects;
        let mut tries = Tries::new(self.patience);
        let mut failing = None;
        loop {
            let (result, back) = match self.shared.is_far {
                true => self.read_apart(&*object, buf, offset).await,
                false => object.read_at(buf, offset).await,
            };
            buf = back;
            let Err(error) = result else { return (Ok(()), buf) };
            let name = extent.name();
            // The map names it, so it has to be there.
            if error.kind() == ErrorKind::NotFound {
                let what = format!("{name} is missing from {}", objects.name());
                return (Err(Error::new(ErrorKind::Corrupt, what)), buf);
            }
            failing.get_or_insert_with(|| Failing::new(&self.shared.failing));
            let doing = || format!("reading {name} of {}", objects.name());
            let last = error.clone();
            match self.given_up.unless_raised(tries.pause(error, doing)).await {
                Some(Ok(())) => {}
                Some(Err(error)) => return (Err(error), buf),
                None => return (Err(last.wrap(doing())), buf),
            }
        }
    }

    /// Fills `buf` by way of memory of its own (I7); gives it back in any case.
    async fn read_apart(
        &self,
        object: &dyn Object,
        mut buf: Buf,
        offset: u64,
    ) -> (Result<()>, Buf) {
        let read = object.read_at(Buf::new(buf.len()), offset);
        match read_unless_given_up(&self.given_up, read).await {
            Some((Ok(()), own)) => {
                buf.put(0, &own);
                (Ok(()), buf)
            }
            Some((Err(error), _)) => (Err(error), buf),
            None => (Err(Error::new(ErrorKind::Io, NO_ANSWER)), buf),
        }
    }
}
