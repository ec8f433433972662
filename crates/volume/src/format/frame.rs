//! What the objects of a store have in common: they begin with a magic and a version, and a sum of
//! that and of what follows ends what is known by its layout.

use mica_block::{Error, ErrorKind, ObjectName, Objects};
use mica_map::crc32c;
use std::fmt;

const VERSION_AT: usize = 8;
const SUM_BYTES: usize = 4;

/// One kind of object.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    pub(crate) magic: [u8; VERSION_AT],
    pub(crate) version: u32,
    /// Bytes that the sum covers, and the sum.
    pub(crate) len: usize,
}

impl Frame {
    /// Puts the sum in its place.
    pub(crate) fn seal(&self, bytes: &mut [u8]) {
        let (summed, sum) = bytes[..self.len].split_at_mut(self.len - SUM_BYTES);
        sum.copy_from_slice(&crc32c(summed).to_le_bytes());
    }

    /// The part of `bytes` that is in the frame.
    ///
    /// # Errors
    /// If they do not begin with such an object.
    pub(crate) fn open<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], Malformed> {
        match self.open_any(bytes)? {
            (framed, version) if version == self.version => Ok(framed),
            (_, version) => Err(Malformed::Version(version)),
        }
    }

    /// As [`Self::open`], of this version or the next one; returns which.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub(crate) fn open_with_next<'a>(&self, bytes: &'a [u8]) -> Result<(&'a [u8], u32), Malformed> {
        match self.open_any(bytes)? {
            (framed, version) if (self.version..=self.version + 1).contains(&version) => {
                Ok((framed, version))
            }
            (_, version) => Err(Malformed::Version(version)),
        }
    }

    fn open_any<'a>(&self, bytes: &'a [u8]) -> Result<(&'a [u8], u32), Malformed> {
        let framed = bytes.get(..self.len).ok_or(Malformed::Truncated)?;
        if !framed.starts_with(&self.magic) {
            // What is read beyond the end of an object is zeros.
            let is_empty = framed.iter().all(|byte| *byte == 0);
            return Err(if is_empty { Malformed::Empty } else { Malformed::Magic });
        }
        let (summed, sum) = framed.split_at(self.len - SUM_BYTES);
        if *sum != crc32c(summed).to_le_bytes() {
            return Err(Malformed::Checksum);
        }
        let version = framed[VERSION_AT..].first_chunk().expect("longer than that");
        Ok((framed, u32::from_le_bytes(*version)))
    }
}

/// Why bytes are not what they were taken for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Malformed {
    /// They end too early.
    Truncated,
    /// There are none, or only zeros.
    Empty,
    /// They are something else.
    Magic,
    /// Written by a version of mica that has another format.
    Version(u32),
    /// They were changed.
    Checksum,
    /// They contradict themselves.
    Content,
}

impl Malformed {
    /// As an error of object `name`.
    pub(crate) fn explain(self, name: &ObjectName, objects: &dyn Objects) -> Error {
        let kind = match self {
            Self::Version(_) => ErrorKind::Unsupported,
            _ => ErrorKind::Corrupt,
        };
        Error::new(kind, format!("{name} of {}: {self}", objects.name()))
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => f.write_str("it is truncated"),
            Self::Empty => f.write_str("it is empty"),
            Self::Magic => f.write_str("it is something else"),
            Self::Version(version) => {
                write!(f, "it has version {version} of the format, which a newer mica reads")
            }
            Self::Checksum => f.write_str("its checksum does not match"),
            Self::Content => f.write_str("it contradicts itself"),
        }
    }
}
