//! Snapshots of a disk: what there is to know of one, how one is named, and what the disk's owner
//! does with them.

use crate::{Error, ErrorKind, LocalFuture, Result, SnapshotGroup};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Longest label of a snapshot, in bytes.
pub const LABEL_BYTES_MAX: usize = 255;

/// A snapshot: what a disk was at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SnapshotInfo {
    /// Counts the disk's snapshots, from 1. No number is used again.
    pub number: u64,
    /// What people call it; empty if nobody named it. No other snapshot of the disk has it then.
    pub label: String,
    /// When it was taken, in nanoseconds since 1970.
    pub time_ns: u64,
    /// Length of the disk at that time, in bytes.
    pub len: u64,
    /// How many records of what was done to the disk are in it.
    pub records: u64,
}

/// Names a snapshot of a disk.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Which {
    /// The one with this label.
    Label(String),
    /// The one with this number.
    Number(u64),
}

impl Which {
    /// Whether it names this one.
    pub fn is_of(&self, snapshot: &SnapshotInfo) -> bool {
        match self {
            Self::Label(label) => !label.is_empty() && snapshot.label == *label,
            Self::Number(number) => snapshot.number == *number,
        }
    }
}

/// A number if it is all digits: no label is.
impl FromStr for Which {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.is_empty() {
            let what = "a snapshot is named by its label or its number";
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if is_number(text) {
            let number = text.parse().map_err(|_| {
                Error::new(ErrorKind::Invalid, format!("no snapshot has the number {text}"))
            })?;
            return Ok(Self::Number(number));
        }
        check_label(text)?;
        Ok(Self::Label(text.to_owned()))
    }
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Label(label) => write!(f, "{label:?}"),
            Self::Number(number) => write!(f, "number {number}"),
        }
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Checks that a snapshot may have this label, which must not be empty.
///
/// # Errors
/// `Invalid` if it may not.
pub fn check_label(label: &str) -> Result<()> {
    let is_allowed = |char: char| !char.is_control() && char != '@' && char != '/';
    if label.len() <= LABEL_BYTES_MAX && label.chars().all(is_allowed) && !is_number(label) {
        return Ok(());
    }
    let what = format!(
        "{label:?} is no label for a snapshot: at most {LABEL_BYTES_MAX} bytes, without '@', '/' \
         and control characters, and not a number"
    );
    Err(Error::new(ErrorKind::Invalid, what))
}

/// The snapshots of a disk, while it is served.
pub trait ManageSnapshots {
    /// Takes a snapshot of everything that was answered before the call, and of what of the rest
    /// the disk did before: never of a part of what it did, in its order. Requests go on meanwhile.
    /// Answered when the snapshot is as durable as a flush makes a write.
    ///
    /// Errors: `Invalid` if the label is not allowed, or another snapshot has it; `Limit` if the
    /// disk can have no more; otherwise as [`crate::Disk::flush`].
    fn take<'a>(&'a self, label: &'a str) -> LocalFuture<'a, Result<SnapshotInfo>>;

    /// Takes a snapshot at one instant with the other disks of `group`. Writers wait until all are
    /// taken. If another disk cannot take its own, there is none of this one.
    ///
    /// Errors: as [`Self::take`]; why the group has failed.
    fn take_in_group<'a>(
        &'a self,
        label: &'a str,
        group: &'a Arc<SnapshotGroup>,
    ) -> LocalFuture<'a, Result<SnapshotInfo>>;

    /// All snapshots, by number.
    ///
    /// Errors: if they cannot be read.
    fn list(&self) -> LocalFuture<'_, Result<Vec<SnapshotInfo>>>;

    /// Drops a snapshot; answered as [`Self::take`].
    ///
    /// Errors: `NotFound` if there is none; otherwise as [`Self::take`].
    fn remove<'a>(&'a self, which: &'a Which) -> LocalFuture<'a, Result<()>>;

    /// Gives a snapshot another label, or none; answered as [`Self::take`].
    ///
    /// Errors: as [`Self::remove`] and [`Self::take`].
    fn label<'a>(&'a self, which: &'a Which, label: &'a str) -> LocalFuture<'a, Result<()>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_a_number_and_all_else_is_a_label() {
        assert_eq!("17".parse::<Which>().expect("a number"), Which::Number(17));
        for label in ["before the update", "v1.2", "ä", "17a", "-1"] {
            let which = label.parse::<Which>().expect("a label");
            assert_eq!(which, Which::Label(label.to_owned()));
            check_label(label).expect("a label");
        }
        check_label("").expect("no label");
        check_label(&"l".repeat(LABEL_BYTES_MAX)).expect("a long label");
    }

    #[test]
    fn labels_that_could_be_taken_for_something_else_are_refused() {
        let long = "l".repeat(LABEL_BYTES_MAX + 1);
        for bad in ["1", "007", "a@b", "a/b", "a\nb", "\u{1b}[2J", "\u{85}", &long] {
            assert_eq!(check_label(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad:?}");
        }
        for bad in ["", "99999999999999999999", "a@b", &long] {
            assert!(bad.parse::<Which>().is_err(), "{bad:?}");
        }
    }
}
