//! Reads the data of states, and finds what of it is damaged, down to the extent.

use crate::folder::Stored;
use crate::format::{BEGIN_BYTES, Begin, Entry, Malformed, PART_BYTES, Part, Total};
use crate::packing::unpack;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::Buf;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// What of a state is damaged.
#[derive(Clone, Debug)]
pub struct Damage {
    /// The extent; `None` if it is the whole state, or what is beside the extents.
    pub extent: Option<Entry>,
    /// What and where, in one line.
    pub error: Error,
}

/// Everything that is wrong with the state's own files: nothing if it is whole. `at` is called with
/// how far on the disk it was read.
pub fn verify_state(state: &Stored, mut at: impl FnMut(u64)) -> Vec<Damage> {
    let whole = |error| vec![Damage { extent: None, error }];
    let manifest = match state.manifest() {
        Ok(manifest) => manifest,
        Err(error) => return whole(error),
    };
    let mut data = match DataFile::open(state) {
        Ok(data) => data,
        Err(error) => return whole(error),
    };
    let mut damage = Vec::new();
    for (entry, sequence) in manifest.entries.iter().zip(0..) {
        if let Err(error) = data.read(entry, sequence) {
            damage.push(Damage { extent: Some(*entry), error });
        }
        at(entry.piece.end());
    }
    if let Err(error) = data.check_frame(&manifest.begin, &manifest.total, manifest.file_bytes) {
        damage.push(Damage { extent: None, error });
    } else if damage.is_empty() && data.total != manifest.total {
        damage.push(Damage { extent: None, error: data.damaged(Malformed::Content) });
    }
    damage
}

/// The data file of a state.
pub(crate) struct DataFile {
    file: File,
    path: PathBuf,
    state: String,
    disk_len: u64,
    /// Up to where was read, and what.
    end: u64,
    total: Total,
}

impl DataFile {
    /// # Errors
    /// `NotFound` naming it if it is missing; why it cannot be opened.
    pub(crate) fn open(state: &Stored) -> Result<Self> {
        let (path, begin) = (state.data_path(), state.begin());
        let name = begin.state.clone();
        let file = File::open(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                let what = format!("the data of the state {name:?} is missing: {}", path.display());
                Error::new(ErrorKind::NotFound, what)
            }
            _ => Error::from_io(format!("opening {}", path.display()), error),
        })?;
        let disk_len = begin.len;
        Ok(Self { file, path, state: name, disk_len, end: 0, total: Total::default() })
    }

    /// The bytes of an entry, which is part number `sequence`; none of zeros.
    pub(crate) fn read(&mut self, entry: &Entry, sequence: u64) -> Result<Buf> {
        let piece = &entry.piece;
        let (head, stored) = self.part(entry)?;
        let checked = self.check_part(entry, (sequence, self.end), &head, &stored);
        self.end = piece.end();
        self.total.add(piece, &head);
        checked?;
        self.unpacked(entry, stored)
    }

    /// What is stored of an entry, which is part number `sequence`; none of zeros. Entries may be
    /// asked for in any order.
    pub(crate) fn stored(&self, entry: &Entry, sequence: u64) -> Result<Buf> {
        let (head, stored) = self.part(entry)?;
        self.check_part(entry, (sequence, 0), &head, &stored)?;
        Ok(stored)
    }

    /// The bytes of an entry of which so much is stored.
    pub(crate) fn unpacked(&self, entry: &Entry, stored: Buf) -> Result<Buf> {
        match entry.piece.is_zeros() {
            true => Ok(stored),
            false => unpack(&entry.piece, stored).map_err(|why| self.damaged_in(entry, why)),
        }
    }

    /// The part of an entry: its head, and what is stored.
    fn part(&self, entry: &Entry) -> Result<([u8; PART_BYTES], Buf)> {
        let mut head = [0; PART_BYTES];
        let mut stored = Buf::new(usize::try_from(entry.piece.stored).expect("bounded"));
        self.fill(&mut head, entry.at, Some(entry))?;
        if !stored.is_empty() {
            self.fill(stored.own_bytes(), entry.at + PART_BYTES as u64, Some(entry))?;
        }
        Ok((head, stored))
    }

    /// Checks that a part is the one that its entry describes: it has this number, and begins after
    /// `from`.
    fn check_part(
        &self,
        entry: &Entry,
        (sequence, from): (u64, u64),
        head: &[u8; PART_BYTES],
        stored: &[u8],
    ) -> Result<()> {
        let announced = Part::announced(head, sequence, from, self.disk_len);
        let checked = announced.and_then(|part| match part == Part::Piece(entry.piece) {
            true => Part::check(head, stored),
            false => Err(Malformed::Content),
        });
        checked.map_err(|why| self.damaged_in(entry, why))
    }

    /// Checks what is before the first part and behind the last.
    fn check_frame(&self, begin: &Begin, total: &Total, file_bytes: u64) -> Result<()> {
        let mut bytes = [0; BEGIN_BYTES];
        self.fill(&mut bytes, 0, None)?;
        let found = Begin::decode(&bytes).map_err(|why| self.damaged(why))?;
        let mut end = [0; PART_BYTES];
        self.fill(&mut end, file_bytes - PART_BYTES as u64, None)?;
        let last = Part::announced(&end, total.parts, self.disk_len, self.disk_len);
        let last = last.and_then(|part| Part::check(&end, &[]).map(|()| part));
        let last = last.map_err(|why| self.damaged(why))?;
        if found != *begin || last != Part::End(*total) {
            return Err(self.damaged(Malformed::Content));
        }
        let failed = |error| Error::from_io(format!("reading {}", self.path.display()), error);
        match self.file.metadata().map_err(failed)?.len().saturating_sub(file_bytes) {
            0 => Ok(()),
            more => Err(self.damaged(Malformed::Longer(more))),
        }
    }

    fn fill(&self, bytes: &mut [u8], at: u64, entry: Option<&Entry>) -> Result<()> {
        self.file.read_exact_at(bytes, at).map_err(|error| {
            if error.kind() == std::io::ErrorKind::UnexpectedEof {
                return match entry {
                    Some(entry) => self.damaged_in(entry, Malformed::Truncated),
                    None => self.damaged(Malformed::Truncated),
                };
            }
            Error::from_io(format!("reading {} at byte {at}", self.path.display()), error)
        })
    }

    fn damaged(&self, why: Malformed) -> Error {
        why.of(format_args!("the state {:?} is damaged: {}", self.state, self.path.display()))
    }

    fn damaged_in(&self, entry: &Entry, why: Malformed) -> Error {
        why.of(format_args!(
            "the state {:?} is damaged in the extent of {} bytes at byte {} of the disk: {}, byte \
             {}",
            self.state,
            entry.len(),
            entry.start(),
            self.path.display(),
            entry.at
        ))
    }
}
