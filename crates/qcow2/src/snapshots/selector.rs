//! Which internal snapshot is meant: by its ID, by its name, or by either.
//!
//! The name of one snapshot may be the ID of another. A plain word that fits two is refused: to
//! pick one of them could delete or copy what nobody asked for.

use mica_block::{Error, ErrorKind, Result};
use mica_qcow2_format::SnapshotEntry;
use std::fmt;
use std::str::FromStr;

/// What parameters begin with, as qemu-img takes them.
const ID: &str = "snapshot.id=";
const NAME: &str = "snapshot.name=";

/// Which snapshot of an image is meant.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SnapshotSelector {
    /// The one with this ID or name, if these are not two.
    Any(String),
    /// The one with this ID.
    Id(String),
    /// The first one with this name.
    Name(String),
    /// The one with this ID and this name.
    Both {
        /// Its ID.
        id: String,
        /// Its name.
        name: String,
    },
}

impl SnapshotSelector {
    /// The ID or name that was stated; the name if both were.
    #[must_use]
    pub fn word(&self) -> &str {
        match self {
            Self::Any(word) | Self::Id(word) | Self::Name(word) => word,
            Self::Both { name, .. } => name,
        }
    }
}

impl FromStr for SnapshotSelector {
    type Err = Error;

    /// `snapshot.id=ID`, `snapshot.name=NAME`, both of them with a comma in between, or a plain ID
    /// or name. A comma within a parameter is doubled, as in QEMU.
    fn from_str(text: &str) -> Result<Self> {
        if !text.starts_with(ID) && !text.starts_with(NAME) {
            return Ok(Self::Any(text.to_owned()));
        }
        let (mut id, mut name) = (None, None);
        for parameter in split_parameters(text) {
            let (place, value) = match (parameter.strip_prefix(ID), parameter.strip_prefix(NAME)) {
                (Some(value), _) => (&mut id, value),
                (_, Some(value)) => (&mut name, value),
                _ => {
                    let what = format!("{parameter:?} is neither {ID}ID nor {NAME}NAME");
                    return Err(Error::new(ErrorKind::Invalid, what));
                }
            };
            if place.replace(value.to_owned()).is_some() {
                let what = format!("{text:?} states the same parameter twice");
                return Err(Error::new(ErrorKind::Invalid, what));
            }
        }
        Ok(match (id, name) {
            (Some(id), Some(name)) => Self::Both { id, name },
            (Some(id), None) => Self::Id(id),
            (None, name) => Self::Name(name.unwrap_or_default()),
        })
    }
}

impl fmt::Display for SnapshotSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any(word) => write!(f, "{word:?}"),
            Self::Id(id) => write!(f, "with ID {id:?}"),
            Self::Name(name) => write!(f, "called {name:?}"),
            Self::Both { id, name } => write!(f, "with ID {id:?} called {name:?}"),
        }
    }
}

/// Finds a snapshot among entries that it is shown one after the other.
pub struct SnapshotSearch<'a> {
    wanted: &'a SnapshotSelector,
    seen: usize,
    by_id: Option<Found>,
    by_name: Option<Found>,
}

/// A snapshot, and its position in the table.
type Found = (usize, SnapshotEntry);

impl<'a> SnapshotSearch<'a> {
    /// Nothing was seen yet.
    #[must_use]
    pub fn new(wanted: &'a SnapshotSelector) -> Self {
        Self { wanted, seen: 0, by_id: None, by_name: None }
    }

    /// Looks at the next entry; returns whether those behind it matter, too.
    pub fn see(&mut self, entry: &SnapshotEntry) -> bool {
        let (fits_id, fits_name) = match self.wanted {
            SnapshotSelector::Any(word) => (entry.id == *word, entry.name == *word),
            SnapshotSelector::Id(id) => (entry.id == *id, false),
            SnapshotSelector::Name(name) => (false, entry.name == *name),
            SnapshotSelector::Both { id, name } => (entry.id == *id && entry.name == *name, false),
        };
        for (fits, place) in [(fits_id, &mut self.by_id), (fits_name, &mut self.by_name)] {
            if fits && place.is_none() {
                *place = Some((self.seen, entry.clone()));
            }
        }
        self.seen += 1;
        match self.wanted {
            SnapshotSelector::Any(_) => self.by_id.is_none() || self.by_name.is_none(),
            _ => self.by_id.is_none() && self.by_name.is_none(),
        }
    }

    /// The position of the snapshot that was found, and its entry.
    ///
    /// # Errors
    /// `NotFound` if there is none; `Invalid` if there are two.
    pub fn end(self) -> Result<(usize, SnapshotEntry)> {
        let wanted = self.wanted;
        match (self.by_id, self.by_name) {
            (Some((_, by_id)), Some((_, by_name))) if by_id.id != by_name.id => {
                let word = wanted.word();
                let what = format!(
                    "{word:?} is the ID of snapshot {:?}, and the name of the one with ID {}: \
                     choose with {ID}{word} or {NAME}{word}",
                    by_id.name, by_name.id
                );
                Err(Error::new(ErrorKind::Invalid, what))
            }
            (Some(found), _) | (None, Some(found)) => Ok(found),
            (None, None) => {
                let what = format!(
                    "the image has no snapshot {wanted}: `mica snapshot -l` lists its snapshots"
                );
                Err(Error::new(ErrorKind::NotFound, what))
            }
        }
    }
}

/// Splits at commas that are not doubled, and makes doubled ones single.
fn split_parameters(text: &str) -> Vec<String> {
    let mut parameters = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(char) = chars.next() {
        match parameters.last_mut() {
            Some(last) if char != ',' || chars.next_if_eq(&',').is_some() => last.push(char),
            _ => parameters.push(String::new()),
        }
    }
    parameters
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_units::HostOffset;

    fn entry(id: &str, name: &str) -> SnapshotEntry {
        SnapshotEntry {
            id: id.to_owned(),
            name: name.to_owned(),
            l1_offset: HostOffset::ZERO,
            l1_entries: 0,
            date_seconds: 0,
            date_nanoseconds: 0,
            vm_clock_nanoseconds: 0,
            vm_state_bytes: 0,
            disk_bytes: None,
            icount: None,
            extra_bytes: 0,
            unknown_extra: Vec::new(),
        }
    }

    fn find(wanted: &str) -> Result<usize> {
        let wanted: SnapshotSelector = wanted.parse()?;
        let mut search = SnapshotSearch::new(&wanted);
        for entry in [entry("1", "2"), entry("2", "3"), entry("4", "a,b"), entry("7", "7")] {
            if !search.see(&entry) {
                break;
            }
        }
        search.end().map(|(position, _)| position)
    }

    #[test]
    fn snapshots_are_selected_as_qemu_img_takes_them() {
        let cases = [
            ("1", 0),
            ("3", 1),
            ("7", 3),
            ("a,b", 2),
            ("snapshot.id=2", 1),
            ("snapshot.name=2", 0),
            ("snapshot.name=a,,b", 2),
            ("snapshot.id=2,snapshot.name=3", 1),
            ("snapshot.name=2,snapshot.id=1", 0),
        ];
        for (said, meant) in cases {
            assert_eq!(find(said).expect(said), meant, "{said}");
        }
        for missing in ["5", "snapshot.id=3", "snapshot.name=1", "snapshot.id=1,snapshot.name=3"] {
            assert_eq!(find(missing).expect_err(missing).kind(), ErrorKind::NotFound, "{missing}");
        }
        for malformed in ["snapshot.id=1,name=2", "snapshot.id=1,snapshot.id=1"] {
            assert_eq!(find(malformed).expect_err(malformed).kind(), ErrorKind::Invalid);
        }
    }

    /// The story: the ID was tried first, so that `mica snapshot -d 2` deleted snapshot "3".
    #[test]
    fn word_that_fits_two_snapshots_is_refused() {
        let refused = find("2").expect_err("it fits two");
        assert_eq!(refused.kind(), ErrorKind::Invalid);
        let text = refused.to_string();
        assert!(text.contains("\"3\"") && text.contains("ID 1"), "{text}");
        assert!(text.contains("snapshot.id=2 or snapshot.name=2"), "{text}");
    }
}
