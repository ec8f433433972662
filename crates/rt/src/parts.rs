//! Bytes of several buffers that are written one behind the other, without being copied together.
//!
//! Invariants
//! - I1 Nobody changes the bytes of a part: its buffer is shared, so that no one has it to change,
//!   and it is not foreign.
//! - I2 No part is empty, and what follows in the same buffer is one part.

use crate::buf::Buf;
use crate::file::File;
use crate::file_io::on_thread;
use rustix::fd::AsFd;
use rustix::io::{Errno, pwritev};
use std::future::Future;
use std::io::{self, IoSlice};
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Parts that the system takes in one call.
const CALL_PARTS_MAX: usize = 1024;

/// A part of a buffer that has other users.
#[derive(Clone)]
pub struct Part {
    of: Arc<Buf>,
    range: Range<usize>,
}

impl Part {
    /// The bytes `range` of `of`.
    ///
    /// # Panics
    /// If it does not have them, or they are foreign.
    pub fn new(of: Arc<Buf>, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= of.len(), "{range:?} of {}", of.len());
        assert!(!of.is_foreign(), "its other owner may change it");
        Self { of, range }
    }

    fn is_followed_by(&self, next: &Self) -> bool {
        Arc::ptr_eq(&self.of, &next.of) && self.range.end == next.range.start
    }
}

impl Deref for Part {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.of[self.range.clone()]
    }
}

/// See the module.
#[derive(Default)]
pub struct Parts {
    /// Each with where it ends.
    parts: Vec<(usize, Part)>,
}

impl Parts {
    /// Adds a part at the end.
    pub fn push(&mut self, part: Part) {
        if part.is_empty() {
            return;
        }
        let end = self.len() + part.len();
        match self.parts.last_mut() {
            Some((last_end, last)) if last.is_followed_by(&part) => {
                (*last_end, last.range.end) = (end, part.range.end);
            }
            _ => self.parts.push((end, part)),
        }
    }

    /// How many bytes they are.
    pub fn len(&self) -> usize {
        self.parts.last().map_or(0, |(end, _)| *end)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// The bytes `range`, in pieces.
    pub fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = &[u8]> {
        let first = self.parts.partition_point(|(end, _)| *end <= range.start);
        let parts = self.parts.iter().skip(first);
        let within = parts.map(move |(end, part)| {
            let start = end - part.len();
            let cut = |at: usize| at.clamp(start, *end) - start;
            &part[cut(range.start)..cut(range.end)]
        });
        within.take_while(|piece| !piece.is_empty())
    }

    /// A copy of the bytes `range`.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn to_buf(&self, range: Range<usize>) -> Buf {
        let (mut buf, mut at) = (Buf::new(range.len()), 0);
        for piece in self.pieces(range) {
            buf.put(at, piece);
            at += piece.len();
        }
        assert_eq!(at, buf.len(), "bytes that are not there");
        buf
    }

    /// Writes the bytes `range` at `offset` of `file`, on this thread, and waits for the device if
    /// it has to.
    ///
    /// # Errors
    /// Any error of the system. A part may be written then.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn write(&self, file: impl AsFd, range: Range<usize>, offset: u64) -> io::Result<()> {
        let mut rest = range.clone();
        while !rest.is_empty() {
            let pieces = self.pieces(rest.clone()).map(IoSlice::new);
            let pieces: Vec<_> = pieces.take(CALL_PARTS_MAX).collect();
            assert!(!pieces.is_empty(), "bytes that are not there");
            match pwritev(&file, &pieces, offset + (rest.start - range.start) as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => rest.start += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Writes all of `parts` at `offset` of `file`, on a thread of the executor; goes on if its future
/// is dropped.
///
/// # Panics
/// As [`on_thread`].
pub fn write_parts(
    file: &Arc<File>,
    parts: Parts,
    offset: u64,
) -> impl Future<Output = io::Result<()>> + use<> {
    // They come back, so that buffers are freed where they are made.
    let written = on_thread(file, move |file| (parts.write(file, 0..parts.len(), offset), parts));
    async move { written.await.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek};

    /// Parts of 0, 1, .. bytes, and what they are together.
    fn parts(count: usize) -> (Parts, Vec<u8>) {
        let (mut parts, mut bytes) = (Parts::default(), Vec::new());
        for number in 0..count {
            let content: Vec<u8> =
                (0..number % 7).map(|at| (number * 7 + at).to_le_bytes()[0]).collect();
            let buf = Buf::from_slice(&[&[0xee], &content[..], &[0xee]].concat());
            parts.push(Part::new(Arc::new(buf), 1..1 + content.len()));
            bytes.extend(content);
        }
        (parts, bytes)
    }

    #[test]
    fn parts_of_one_buffer_that_follow_each_other_are_one() {
        let buf = Arc::new(Buf::from_slice(b"abcdef"));
        let mut parts = Parts::default();
        for range in [0..2, 2..2, 2..4, 5..6] {
            parts.push(Part::new(Arc::clone(&buf), range));
        }
        let pieces: Vec<_> = parts.pieces(0..parts.len()).collect();
        assert_eq!(pieces, [&b"abcd"[..], b"f"]);
        assert_eq!(parts.len(), 5);
    }

    #[test]
    fn any_range_is_found_again() {
        let (parts, bytes) = parts(20);
        assert_eq!(parts.len(), bytes.len());
        for start in 0..bytes.len() {
            for end in start..=bytes.len() {
                assert_eq!(*parts.to_buf(start..end), bytes[start..end], "{start}..{end}");
            }
        }
    }

    /// More of them than the system takes at once.
    #[test]
    fn parts_are_written_where_they_belong() {
        let (parts, bytes) = parts(5000);
        let mut file = tempfile::tempfile().expect("made");
        parts.write(&file, 10..parts.len(), 3).expect("written");
        let mut written = Vec::new();
        file.rewind().expect("a file");
        file.read_to_end(&mut written).expect("read");
        assert_eq!(written[..3], [0; 3]);
        assert_eq!(written[3..], bytes[10..]);
    }
}
