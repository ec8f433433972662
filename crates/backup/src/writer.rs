//! Writes a step: what it begins with, its parts, its end.

use crate::format::{BEGIN_BYTES, Begin, ENTRIES_MAX, Entry, PART_BYTES, Part, Piece, Total};
use mica_block::{Error, ErrorKind, Result};
use std::io::Write;

/// A step that is written.
pub struct StepWriter<W> {
    out: W,
    begin: Begin,
    /// The parts that were written.
    pub(crate) written: Written,
    /// Whether it remembers the parts.
    with_entries: bool,
}

/// The parts of a step that were written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Written {
    pub(crate) total: Total,
    /// Up to where they reach on the disk.
    pub(crate) end: u64,
    /// Bytes of the step.
    pub(crate) position: u64,
    pub(crate) entries: Vec<Entry>,
}

impl Default for Written {
    fn default() -> Self {
        let position = BEGIN_BYTES as u64;
        Self { total: Total::default(), end: 0, position, entries: Vec::new() }
    }
}

impl Written {
    pub(crate) fn add(&mut self, piece: Piece, head: &[u8; PART_BYTES], with_entry: bool) {
        self.total.add(&piece, head);
        if with_entry {
            self.entries.push(Entry { piece, at: self.position });
        }
        self.end = piece.end();
        self.position += PART_BYTES as u64 + u64::from(piece.stored);
    }
}

impl<W: Write> StepWriter<W> {
    /// Writes what the step `begin` begins with to `out`.
    ///
    /// # Errors
    /// `Invalid` if `begin` has a name or a length that nothing in a backup can have; what `out`
    /// reports.
    pub fn new(mut out: W, begin: Begin) -> Result<Self> {
        begin.check()?;
        out.write_all(&begin.encode()).map_err(failed)?;
        Ok(Self { out, begin, written: Written::default(), with_entries: false })
    }

    /// Goes on with a step of which some parts are written: `out` is behind them.
    pub(crate) fn resumed(out: W, begin: Begin, written: Written) -> Self {
        Self { out, begin, written, with_entries: true }
    }

    /// What the step makes of what.
    pub fn begin(&self) -> &Begin {
        &self.begin
    }

    /// Writes a piece, behind those before it. Nothing is written that a reader refuses.
    ///
    /// # Errors
    /// `Invalid` if it is none of this disk, or not of whole sectors; `Limit` if a manifest would
    /// have too many; what `out` reports.
    pub(crate) fn push(&mut self, piece: Piece, stored: &[u8]) -> Result<()> {
        assert_eq!(stored.len(), usize::try_from(piece.stored).expect("a piece"), "its bytes");
        if !piece.is_sound(self.written.end, self.begin.len) {
            let what = format!(
                "{} bytes at byte {} are no part of a backup of a disk of {} bytes, of which {} \
                 are written: it has whole sectors, in order",
                piece.len, piece.start, self.begin.len, self.written.end
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        // A stream alone has no manifest.
        if self.with_entries && self.written.total.parts >= ENTRIES_MAX {
            let what = format!(
                "the state has more than {ENTRIES_MAX} parts, which is the most that a folder \
                 keeps of one: write it as a stream"
            );
            return Err(Error::new(ErrorKind::Limit, what));
        }
        let head = Part::Piece(piece).encode(self.written.total.parts, stored);
        self.out.write_all(&head).map_err(failed)?;
        self.out.write_all(stored).map_err(failed)?;
        self.written.add(piece, &head, self.with_entries);
        Ok(())
    }

    /// Writes the end. Returns what the step had.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn finish(self) -> Result<Total> {
        Ok(self.into_finished()?.1.total)
    }

    pub(crate) fn into_finished(mut self) -> Result<(W, Written)> {
        let mut written = self.written;
        let end = Part::End(written.total).encode(written.total.parts, &[]);
        self.out.write_all(&end).and_then(|()| self.out.flush()).map_err(failed)?;
        written.position += PART_BYTES as u64;
        Ok((self.out, written))
    }
}

fn failed(error: std::io::Error) -> Error {
    Error::from_io("writing the backup", error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(state: &str) -> Begin {
        let (disk, state) = ("web".to_owned(), state.to_owned());
        Begin { disk, state, base: None, len: 1 << 30, time_ns: 1 }
    }

    fn zeros(start: u64, len: u64) -> Piece {
        Piece { start, len, stored: 0, sum: 0 }
    }

    /// A manifest with more entries is refused, and so would be the state for ever.
    #[test]
    fn parts_that_no_manifest_can_have_are_refused_before_they_are_written() {
        let total = Total { parts: ENTRIES_MAX - 1, ..Total::default() };
        let written = Written { total, ..Written::default() };
        let mut writer = StepWriter::resumed(Vec::new(), begin("mon"), written);
        writer.push(zeros(0, 512), &[]).unwrap();
        assert_eq!(writer.push(zeros(512, 512), &[]).unwrap_err().kind(), ErrorKind::Limit);
        assert_eq!(writer.out.len(), PART_BYTES);
        assert_eq!(writer.written.total.parts, ENTRIES_MAX);
        // A stream has none.
        writer.with_entries = false;
        writer.push(zeros(512, 512), &[]).unwrap();
    }

    #[test]
    fn pieces_that_a_reader_refuses_are_refused() {
        let mut writer = StepWriter::new(Vec::new(), begin("mon")).unwrap();
        writer.push(zeros(4096, 512), &[]).unwrap();
        let len = writer.out.len();
        for (start, len) in [(5000, 512), (8192, 100), (8192, 0), (0, 512), (1 << 30, 512)] {
            let refused = writer.push(zeros(start, len), &[]).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Invalid, "{len} bytes at {start}");
        }
        assert_eq!(writer.out.len(), len);
    }

    #[test]
    fn step_that_a_reader_refuses_is_not_begun() {
        let long = "x".repeat(201);
        let of_disk = |disk: &str| Begin { disk: disk.to_owned(), ..begin("mon") };
        let since = |base: &str| Begin { base: Some(base.to_owned()), ..begin("mon") };
        for bad in [
            begin(&long),
            begin("a\nb"),
            of_disk(&long),
            of_disk(&long.repeat(2)),
            of_disk("a\u{1b}[2J"),
            of_disk(""),
            since(&long),
            since(".tue"),
            since("mon"),
            Begin { len: 1000, ..begin("mon") },
        ] {
            let mut out = Vec::new();
            let refused = StepWriter::new(&mut out, bad.clone()).err();
            assert_eq!(refused.map(|error| error.kind()), Some(ErrorKind::Invalid), "{bad:?}");
            assert!(out.is_empty());
        }
        StepWriter::new(Vec::new(), since("tue")).unwrap();
    }
}
