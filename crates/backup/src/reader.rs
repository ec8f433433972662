//! Reads steps, one after the other. Nothing that is read is handed on before its sum was compared.

use crate::format::{BEGIN_BYTES, Begin, DATA_BYTES_MAX, Malformed, PART_BYTES, Part, Piece};
use crate::packing::unpack;
use crate::writer::Written;
use mica_block::{Error, Result};
use mica_rt::Buf;
use std::io::{ErrorKind, Read};

/// A stream that is read.
pub struct StepReader<R> {
    source: R,
    /// Bytes that were read.
    position: u64,
    step: Option<Step>,
}

/// The step whose parts are read.
struct Step {
    disk_len: u64,
    read: Written,
    with_entries: bool,
    is_over: bool,
}

impl<R: Read> StepReader<R> {
    /// Of a stream that begins here.
    pub fn new(source: R) -> Self {
        Self { source, position: 0, step: None }
    }

    /// What the next step begins with; `None` at the end of the stream. The parts of the step
    /// before must have been read.
    ///
    /// # Errors
    /// `Corrupt` if there is something else; `Unsupported` if a newer mica wrote it; why the stream
    /// cannot be read.
    ///
    /// # Panics
    /// If the step before is not over.
    pub fn begin(&mut self) -> Result<Option<Begin>> {
        assert!(self.step.as_ref().is_none_or(|step| step.is_over), "step by step");
        let (at, is_first) = (self.position, self.step.is_none());
        let mut bytes = [0; BEGIN_BYTES];
        let read = self.read(&mut bytes)?;
        if read == 0 && !is_first {
            return Ok(None);
        }
        let begin = Begin::decode(&bytes[..read]).map_err(|why| of_stream(why, at))?;
        let read = Written::default();
        self.step = Some(Step { disk_len: begin.len, read, with_entries: false, is_over: false });
        Ok(Some(begin))
    }

    /// Where the parts are is remembered.
    pub(crate) fn keep_entries(&mut self) {
        self.step.iter_mut().for_each(|step| step.with_entries = true);
    }

    /// How many parts were read of this step.
    pub(crate) fn parts(&self) -> u64 {
        self.step.as_ref().map_or(0, |step| step.read.total.parts)
    }

    /// The parts that were read of this step.
    pub(crate) fn into_read(self) -> Option<Written> {
        self.step.map(|step| step.read)
    }

    /// Whether the end of a step was read.
    pub fn is_at_end(&self) -> bool {
        self.step.as_ref().is_some_and(|step| step.is_over)
    }

    /// The next piece of the step and its bytes (none of zeros), both checked; `None` at the end.
    pub(crate) fn next_piece(&mut self) -> Result<Option<(Piece, Buf)>> {
        let at = self.position;
        let mut head = [0; PART_BYTES];
        self.read_whole(&mut head, at)?;
        let step = self.step.as_ref().expect("a step was begun");
        assert!(!step.is_over, "it has a next part");
        let (sequence, from) = (step.read.total.parts, step.read.end);
        let part = Part::announced(&head, sequence, from, step.disk_len);
        let piece = match part.map_err(|why| of_stream(why, at))? {
            Part::Piece(piece) => piece,
            Part::End(total) => {
                Part::check(&head, &[]).map_err(|why| of_stream(why, at))?;
                if total != step.read.total {
                    return Err(of_stream(Malformed::Content, at));
                }
                self.step.iter_mut().for_each(|step| step.is_over = true);
                return Ok(None);
            }
        };
        assert!(u64::from(piece.stored) <= DATA_BYTES_MAX, "what was announced is bounded");
        let mut stored = Buf::new(usize::try_from(piece.stored).expect("bounded"));
        if !stored.is_empty() {
            self.read_whole(stored.own_bytes(), at)?;
        }
        Part::check(&head, &stored).map_err(|why| of_stream(why, at))?;
        let bytes = match piece.is_zeros() {
            true => stored,
            false => unpack(&piece, stored).map_err(|why| of_stream(why, at))?,
        };
        self.step.iter_mut().for_each(|step| step.read.add(piece, &head, step.with_entries));
        Ok(Some((piece, bytes)))
    }

    /// Reads the next part; `None` at the end of the step. Returns where it begins on the disk.
    ///
    /// # Errors
    /// As [`Self::begin`].
    ///
    /// # Panics
    /// If no step was begun, or it is over.
    #[expect(clippy::should_implement_trait, reason = "it may fail, and goes on after a step")]
    pub fn next(&mut self) -> Result<Option<u64>> {
        Ok(self.next_piece()?.map(|(piece, _)| piece.start))
    }

    /// Reads as much as there is, up to all of `bytes`; returns how much.
    fn read(&mut self, bytes: &mut [u8]) -> Result<usize> {
        let mut read = 0;
        while read < bytes.len() {
            match self.source.read(&mut bytes[read..]) {
                Ok(0) => break,
                Ok(more) => read += more,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::from_io("reading the backup", error)),
            }
        }
        self.position += read as u64;
        Ok(read)
    }

    fn read_whole(&mut self, bytes: &mut [u8], at: u64) -> Result<()> {
        match self.read(bytes)? == bytes.len() {
            true => Ok(()),
            false => Err(of_stream(Malformed::Truncated, at)),
        }
    }
}

/// As an error of a stream, in what begins at byte `at` of it.
fn of_stream(why: Malformed, at: u64) -> Error {
    match (why, at) {
        (Malformed::Truncated, _) => why.of("the stream of a backup"),
        (Malformed::Magic, 0) => why.of("no stream of a backup"),
        _ => why.of(format_args!("the stream of a backup, at byte {at}")),
    }
}
