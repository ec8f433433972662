//! Writes a step: what it begins with, its parts, its end.

use crate::format::{BEGIN_BYTES, Begin, Entry, PART_BYTES, Part, Piece, Total};
use mica_block::{Error, Result};
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
    /// What `out` reports.
    pub fn new(mut out: W, begin: Begin) -> Result<Self> {
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

    pub(crate) fn push(&mut self, piece: Piece, stored: &[u8]) -> Result<()> {
        assert_eq!(stored.len(), usize::try_from(piece.stored).expect("a piece"), "its bytes");
        assert!(piece.start >= self.written.end && piece.end() <= self.begin.len, "in order");
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
