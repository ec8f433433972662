//! Parts of extents that are held in memory because boots of an image need them, for all volumes
//! of this process that come from it.
//!
//! ```text
//! wanted ─▶ being read ─▶ here        forgotten with the last volume that uses them
//! ```
//!
//! Invariants
//! - I1 A chunk is read once, by whoever comes first: a guest that needs it, or who fetches ahead.
//!   Everybody else waits for that. One whose reading ended without it is wanted again.
//! - I2 There are never more chunks than the budget has room for, nor more of all images than
//!   `ahead` has. Nothing makes way for others: what does not fit is not fetched.
//! - I3 What is here is what was read of the extent, damage included: whoever reads it checks it,
//!   and has it forgotten, so that it is read again.

use crate::ahead::Ahead;
use crate::place::ExtentId;
use mica_block::Result;
use mica_rt::sync::{Signal, Waiters};
use mica_rt::{Buf, join_all};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of a chunk.
const CHUNK_BYTES: u64 = 16 << 10;
/// What is read at once of an extent's nodes.
const NODES_BYTES: u64 = 4 * CHUNK_BYTES;

/// Who reads through chunks.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    pub(crate) role: Role,
    /// Raised when nobody else is waited for any more.
    pub(crate) given_up: &'a Signal,
}

/// What somebody reads through chunks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// A guest: it has what is held.
    Guest,
    /// Who fetches ahead: what it reads is held from then on.
    Ahead,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Chunks {
    inner: Mutex<Inner>,
    ahead: Arc<Ahead>,
    /// Woken when a chunk is not being read any more.
    changed: Waiters,
    /// Whether there are users: looked at by each read.
    is_used: AtomicBool,
    /// Bytes that were read into chunks.
    pub(crate) fetched: AtomicU64,
    /// Bytes that guests had from chunks.
    pub(crate) served: AtomicU64,
}

#[derive(Default)]
struct Inner {
    chunks: HashMap<Key, Chunk>,
    users: usize,
    chunks_max: usize,
}

type Key = (ExtentId, u64);

enum Chunk {
    Wanted,
    BeingRead,
    Here(Arc<Buf>, usize),
}

/// A part of an extent, all of whose chunks are held, or none.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Part {
    bytes: Range<u64>,
    is_held: bool,
}

/// What became of an attempt to have bytes out of chunks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Copied {
    Done,
    /// Somebody has to read, or is reading.
    NotYet,
    /// They are not held any more.
    Gone,
}

impl Chunks {
    /// None yet; those of all images share what `ahead` has.
    pub(crate) fn new(ahead: &Arc<Ahead>) -> Self {
        Self { ahead: Arc::clone(ahead), ..Self::default() }
    }

    /// Holds up to `bytes` until what is returned is dropped, and all others like it.
    pub(crate) fn begin(self: &Arc<Self>, bytes: u64) -> Using {
        let mut inner = self.inner();
        inner.users += 1;
        let count = usize::try_from(bytes / CHUNK_BYTES).unwrap_or(usize::MAX);
        inner.chunks_max = inner.chunks_max.max(count);
        self.is_used.store(true, Ordering::Release);
        drop(inner);
        Using(Arc::clone(self))
    }

    pub(crate) fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Acquire)
    }

    /// Wants these bytes of an extent. Returns false if there is no room for all of them (I2).
    pub(crate) fn want(&self, extent: ExtentId, bytes: &Range<u64>) -> bool {
        let mut inner = self.inner();
        for index in indices(bytes) {
            if inner.chunks.contains_key(&(extent, index)) {
                continue;
            }
            let has_room = inner.users > 0 && inner.chunks.len() < inner.chunks_max;
            if !has_room || !self.ahead.take(CHUNK_BYTES) {
                return false;
            }
            inner.chunks.insert((extent, index), Chunk::Wanted);
        }
        true
    }

    /// `bytes` of an extent as parts that are held, and such that are not.
    fn parts(&self, extent: ExtentId, bytes: &Range<u64>) -> Vec<Part> {
        let inner = self.inner();
        let mut parts: Vec<Part> = Vec::new();
        for index in indices(bytes) {
            let (start, end) = (index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES);
            let bytes = start.max(bytes.start)..end.min(bytes.end);
            let is_held = inner.chunks.contains_key(&(extent, index));
            match parts.last_mut() {
                Some(last) if last.is_held == is_held => last.bytes.end = bytes.end,
                _ => parts.push(Part { bytes, is_held }),
            }
        }
        parts
    }

    /// Takes it on to read the first of these bytes that are wanted, and nobody reads (I1).
    fn claim(&self, extent: ExtentId, bytes: &Range<u64>) -> Option<Claim<'_>> {
        let mut inner = self.inner();
        let mut claimed: Option<Range<u64>> = None;
        for index in indices(bytes) {
            match inner.chunks.get_mut(&(extent, index)) {
                Some(chunk @ Chunk::Wanted) => *chunk = Chunk::BeingRead,
                _ if claimed.is_some() => break,
                _ => continue,
            }
            claimed = Some(claimed.map_or(index, |claimed| claimed.start)..index + 1);
        }
        claimed.map(|indices| Claim { chunks: self, extent, indices })
    }

    /// Puts these bytes of an extent into `buf`, which is as long, if all of them are here.
    fn copy(&self, extent: ExtentId, bytes: &Range<u64>, buf: &mut Buf) -> Copied {
        let mut here = Vec::new();
        let inner = self.inner();
        for index in indices(bytes) {
            match inner.chunks.get(&(extent, index)) {
                Some(Chunk::Here(of, start)) => here.push((index, Arc::clone(of), *start)),
                Some(Chunk::Wanted | Chunk::BeingRead) => return Copied::NotYet,
                None => return Copied::Gone,
            }
        }
        // All guests of the image take the lock.
        drop(inner);
        let mut at = 0;
        for (index, of, start) in here {
            let skipped = small(bytes.start.saturating_sub(index * CHUNK_BYTES));
            let chunk = &of[start..start + small(CHUNK_BYTES)];
            let len = (buf.len() - at).min(chunk.len() - skipped);
            buf.put(at, &chunk[skipped..skipped + len]);
            at += len;
        }
        Copied::Done
    }

    /// Whoever needs these bytes of an extent next reads them again: those that are here are
    /// damaged. Returns false if none is here.
    pub(crate) fn forget(&self, extent: ExtentId, bytes: &Range<u64>) -> bool {
        let (mut inner, mut was_here) = (self.inner(), false);
        for index in indices(bytes) {
            if let Some(chunk @ Chunk::Here(..)) = inner.chunks.get_mut(&(extent, index)) {
                *chunk = Chunk::Wanted;
                was_here = true;
            }
        }
        was_here
    }

    /// Waits until none of these bytes is being read.
    async fn settled(&self, extent: ExtentId, bytes: &Range<u64>) {
        let is_settled = || {
            let inner = self.inner();
            let is_read =
                |index| matches!(inner.chunks.get(&(extent, index)), Some(Chunk::BeingRead));
            (!indices(bytes).any(is_read)).then_some(())
        };
        self.changed.until(is_settled).await;
    }

    /// Fills `buf` with `bytes` of an extent: what is held from here, once `read` has read it into
    /// chunks, and the rest by `read`, which is given a buffer and an offset in the extent. Gives
    /// `buf` back whatever happens.
    pub(crate) async fn read(
        &self,
        (extent, bytes): (ExtentId, Range<u64>),
        mut buf: Buf,
        reader: Reader<'_>,
        read: &impl AsyncFn(Buf, u64) -> (Result<()>, Buf),
    ) -> (Result<()>, Buf) {
        if reader.role == Role::Ahead {
            // It looks places up, and the next nodes are near.
            self.want(extent, &around(&bytes));
        }
        let parts = self.parts(extent, &bytes);
        if let [part] = &parts[..] {
            return self.read_part((extent, part), buf, reader, read).await;
        }
        let reads: Vec<_> = parts
            .iter()
            .map(|part| {
                let room = buf.split_to(small(part.bytes.end - part.bytes.start));
                self.read_part((extent, part), room, reader, read)
            })
            .collect();
        let (mut outcome, mut whole): (_, Option<Buf>) = (Ok(()), None);
        for (result, part) in join_all(reads).await {
            outcome = outcome.and(result);
            match &mut whole {
                None => whole = Some(part),
                Some(front) => front.join(part),
            }
        }
        (outcome, whole.unwrap_or(buf))
    }

    async fn read_part(
        &self,
        (extent, part): (ExtentId, &Part),
        mut buf: Buf,
        reader: Reader<'_>,
        read: &impl AsyncFn(Buf, u64) -> (Result<()>, Buf),
    ) -> (Result<()>, Buf) {
        if !part.is_held {
            return read(buf, part.bytes.start).await;
        }
        loop {
            if let Err(error) = self.load((extent, &part.bytes), read).await {
                return (Err(error), buf);
            }
            match self.copy(extent, &part.bytes, &mut buf) {
                Copied::Done => {
                    if reader.role == Role::Guest {
                        self.served.fetch_add(buf.len() as u64, Ordering::Relaxed);
                    }
                    return (Ok(()), buf);
                }
                // Who is given up asks the store itself, as it would without chunks.
                Copied::NotYet => {
                    let settled = self.settled(extent, &part.bytes);
                    if reader.given_up.unless_raised(settled).await.is_none() {
                        break;
                    }
                }
                Copied::Gone => break,
            }
        }
        read(buf, part.bytes.start).await
    }

    /// Reads those of `bytes` that are wanted, and that nobody else is reading.
    ///
    /// # Errors
    /// As `read`.
    pub(crate) async fn load(
        &self,
        (extent, bytes): (ExtentId, &Range<u64>),
        read: &impl AsyncFn(Buf, u64) -> (Result<()>, Buf),
    ) -> Result<()> {
        let claims = std::iter::from_fn(|| self.claim(extent, bytes));
        let reads = claims.map(async |claim| {
            let (result, content) = read(Buf::new(claim.len()), claim.offset()).await;
            result.map(|()| claim.fill(content))
        });
        join_all(reads).await.into_iter().collect()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }
}

/// The chunks that have some of `bytes`.
fn indices(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / CHUNK_BYTES..bytes.end.div_ceil(CHUNK_BYTES)
}

/// What is read with `bytes`.
fn around(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / NODES_BYTES * NODES_BYTES..bytes.end.next_multiple_of(NODES_BYTES)
}

fn small(count: u64) -> usize {
    usize::try_from(count).expect("extents are small")
}

/// Chunks that are being read; wanted again if it is dropped.
struct Claim<'a> {
    chunks: &'a Chunks,
    extent: ExtentId,
    indices: Range<u64>,
}

impl Claim<'_> {
    /// Where they begin in the extent.
    fn offset(&self) -> u64 {
        self.indices.start * CHUNK_BYTES
    }

    /// Bytes of all of them.
    fn len(&self) -> usize {
        small((self.indices.end - self.indices.start) * CHUNK_BYTES)
    }

    /// They are here.
    fn fill(self, read: Buf) {
        self.chunks.fetched.fetch_add(read.len() as u64, Ordering::Relaxed);
        let of = Arc::new(read);
        let mut inner = self.chunks.inner();
        for (index, at) in self.indices.clone().zip((0..).step_by(small(CHUNK_BYTES))) {
            if let Some(chunk) = inner.chunks.get_mut(&(self.extent, index)) {
                *chunk = Chunk::Here(Arc::clone(&of), at);
            }
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut inner = self.chunks.inner();
        for index in self.indices.clone() {
            if let Some(chunk @ Chunk::BeingRead) = inner.chunks.get_mut(&(self.extent, index)) {
                *chunk = Chunk::Wanted;
            }
        }
        drop(inner);
        self.chunks.changed.wake_all();
    }
}

/// As long as there is one, chunks are held.
pub(crate) struct Using(Arc<Chunks>);

impl Drop for Using {
    fn drop(&mut self) {
        let mut inner = self.0.inner();
        inner.users -= 1;
        if inner.users == 0 {
            self.0.is_used.store(false, Ordering::Release);
            let chunks = mem::take(&mut inner.chunks);
            self.0.ahead.give_back(chunks.len() as u64 * CHUNK_BYTES);
            inner.chunks_max = 0;
        }
        drop(inner);
        self.0.changed.wake_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::Writer;

    const C: u64 = CHUNK_BYTES;

    fn extent() -> ExtentId {
        ExtentId { writer: Writer::new(1).expect("a writer"), sequence: 0 }
    }

    fn filled(chunks: &Chunks, bytes: Range<u64>) {
        while let Some(claim) = chunks.claim(extent(), &bytes) {
            let mut buf = Buf::new(claim.len());
            for at in 0..buf.len() {
                let number = (claim.offset() + at as u64) / C;
                buf.fill_part(at..at + 1, u8::try_from(number).expect("few"));
            }
            claim.fill(buf);
        }
    }

    #[test]
    fn bytes_come_out_of_the_chunks_that_have_them() {
        let chunks = Arc::new(Chunks::default());
        let _using = chunks.begin(8 * C);
        assert!(chunks.want(extent(), &(C + 5..3 * C)));
        let part = |bytes, is_held| Part { bytes, is_held };
        let parts = [part(9..C, false), part(C..3 * C, true), part(3 * C..3 * C + 1, false)];
        assert_eq!(chunks.parts(extent(), &(9..3 * C + 1)), parts);
        let (bytes, mut buf) = (2 * C - 2..2 * C + 3, Buf::zeroed(5));
        assert_eq!(chunks.copy(extent(), &bytes, &mut buf), Copied::NotYet);
        filled(&chunks, bytes.clone());
        assert_eq!(chunks.copy(extent(), &bytes, &mut buf), Copied::Done);
        assert_eq!(buf[..], [1, 1, 2, 2, 2]);
        assert_eq!(chunks.fetched.load(Ordering::Relaxed), 2 * C);
    }

    #[test]
    fn chunk_whose_reading_ended_without_it_is_wanted_again() {
        let chunks = Arc::new(Chunks::default());
        let _using = chunks.begin(8 * C);
        chunks.want(extent(), &(0..3 * C));
        let claim = chunks.claim(extent(), &(C..2 * C)).expect("wanted");
        let other = chunks.claim(extent(), &(0..3 * C)).expect("the first of the rest");
        assert_eq!((other.offset(), other.len() as u64), (0, C), "what is being read is left");
        drop(claim);
        let claim = chunks.claim(extent(), &(0..3 * C)).expect("wanted again");
        assert_eq!((claim.offset(), claim.len() as u64), (C, 2 * C));
    }

    #[test]
    fn budget_bounds_what_is_held_and_the_last_user_ends_it() {
        let chunks = Arc::new(Chunks::default());
        let first = chunks.begin(2 * C);
        assert!(chunks.want(extent(), &(0..2 * C)) && !chunks.want(extent(), &(5 * C..6 * C)));
        assert!(chunks.want(extent(), &(C..2 * C)), "it is there already");
        let second = chunks.begin(3 * C);
        assert!(chunks.want(extent(), &(5 * C..6 * C)), "the largest budget counts");
        drop(first);
        filled(&chunks, 0..C);
        let mut buf = Buf::zeroed(1);
        assert_eq!(chunks.copy(extent(), &(0..1), &mut buf), Copied::Done);
        drop(second);
        assert_eq!(chunks.copy(extent(), &(0..1), &mut buf), Copied::Gone);
        assert!(!chunks.is_used() && !chunks.want(extent(), &(0..1)));
    }

    #[test]
    fn what_is_forgotten_is_wanted_again() {
        let chunks = Arc::new(Chunks::default());
        let _using = chunks.begin(8 * C);
        chunks.want(extent(), &(0..3 * C));
        assert!(!chunks.forget(extent(), &(0..C)), "it is not here yet");
        filled(&chunks, 0..3 * C);
        assert!(chunks.forget(extent(), &(C + 5..C + 6)));
        let claim = chunks.claim(extent(), &(0..3 * C)).expect("wanted");
        assert_eq!((claim.offset(), claim.len() as u64), (C, C));
    }

    /// However many images boot at once.
    #[test]
    fn images_share_one_budget_and_give_back_what_they_had() {
        let ahead = Arc::default();
        let images = [(); 2].map(|()| Arc::new(Chunks::new(&ahead)));
        let [one, other] = &images;
        let using = images.each_ref().map(|chunks| chunks.begin(1 << 30));
        let [first, _second] = using;
        assert!(one.want(extent(), &(0..(1 << 30) - C)) && other.want(extent(), &(0..C)));
        assert!(!other.want(extent(), &(C..2 * C)));
        drop(first);
        assert!(other.want(extent(), &(C..2 * C)));
    }
}
