//! Which disks the configuration file lists. It is parsed again only when it has changed: disks are
//! removed by the hundred, one after the other, and each removal asks.
//!
//! Invariants
//! - I1 What is known of a file counts for that file as it was only: the same one, of the same
//!   length, with the same times; or for the same text.
//! - I2 Of a file that had just changed only the text counts: times are coarse, and another change
//!   may leave the same ones. It is read again, and compared: whoever removes many disks saves that
//!   now and then, and would have all of it parsed for each of them.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The time after which a change leaves another time, on any file system.
const COARSEST: Duration = Duration::from_secs(3);

/// The names of the disks that a configuration file lists.
pub(crate) type Names = Arc<BTreeSet<String>>;

/// What is known of the configuration file.
#[derive(Default)]
pub(crate) struct Listed(Option<Known>);

struct Known {
    stamp: Stamp,
    names: Names,
    /// What they were found in, as long as another change may leave the same stamp (I2).
    text: Option<String>,
}

/// Which file it is, and as of when.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    len: u64,
    /// Times of the last write and the last change: seconds, nanoseconds.
    written: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    pub(crate) fn of(found: &Metadata) -> Self {
        Self {
            device: found.dev(),
            inode: found.ino(),
            len: found.len(),
            written: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        }
    }

    /// Whether whoever changes it from `now` on leaves another stamp.
    fn is_settled(&self, now: SystemTime) -> bool {
        let seconds = u64::try_from(self.changed.0.max(self.written.0)).unwrap_or(0);
        let last = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        now.duration_since(last).is_ok_and(|age| age > COARSEST)
    }
}

impl Listed {
    /// The names in the file that has this `stamp` at the time `now`: those that are known, or
    /// those that `parse` finds in what was `read`, if either can be done.
    pub(crate) fn names(
        &mut self,
        stamp: Stamp,
        now: SystemTime,
        read: impl FnOnce() -> Option<String>,
        parse: impl FnOnce(&str) -> Option<BTreeSet<String>>,
    ) -> Option<Names> {
        let known = match self.0.take() {
            Some(known) if known.stamp == stamp && known.text.is_none() => known,
            known => {
                let text = read()?;
                let same = known.filter(|known| known.text.as_ref() == Some(&text));
                let names = match same {
                    Some(known) => known.names,
                    None => Arc::new(parse(&text)?),
                };
                let text = Some(text).filter(|_| !stamp.is_settled(now));
                Known { stamp, names, text }
            }
        };
        let names = Arc::clone(&known.names);
        self.0 = Some(known);
        Some(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Stamp {
        let written = (seconds, 0);
        Stamp { device: 1, inode: 2, len: 3, written, changed: written }
    }

    fn time(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    /// Files that are read, and what is parsed of them.
    #[derive(Default)]
    struct Asked {
        listed: Listed,
        reads: u32,
        parses: u32,
    }

    impl Asked {
        /// How often a file was read and parsed after one more asked, whose only disk is `text`.
        fn after(&mut self, stamp: Stamp, now: SystemTime, text: &str) -> (u32, u32) {
            let Self { listed, reads, parses } = self;
            let read = || {
                *reads += 1;
                Some(text.to_owned())
            };
            let parse = |text: &str| {
                *parses += 1;
                Some(BTreeSet::from([text.to_owned()]))
            };
            let names = listed.names(stamp, now, read, parse).expect("read");
            assert_eq!(names.iter().collect::<Vec<_>>(), [text]);
            (self.reads, self.parses)
        }
    }

    /// The story: to remove a thousand disks the configuration was read and parsed a thousand
    /// times.
    #[test]
    fn file_is_read_once_until_it_changes() {
        let mut asked = Asked::default();
        assert_eq!(asked.after(at(10), time(20), "a"), (1, 1));
        assert_eq!(asked.after(at(10), time(30), "a"), (1, 1));
        let replaced = Stamp { inode: 3, ..at(10) };
        assert_eq!(asked.after(replaced, time(30), "b"), (2, 2));
        assert_eq!(asked.after(replaced, time(30), "b"), (2, 2));
    }

    /// The story: the same, with `--save`, which leaves another file after some of them.
    #[test]
    fn file_that_has_just_changed_is_parsed_again_only_if_its_text_is_another() {
        let mut asked = Asked::default();
        assert_eq!(asked.after(at(30), time(30), "a"), (1, 1));
        assert_eq!(asked.after(at(30), time(31), "a"), (2, 1));
        // It was changed again, within the same tick.
        assert_eq!(asked.after(at(30), time(31), "b"), (3, 2));
        assert_eq!(asked.after(at(30), time(40), "b"), (4, 2));
        assert_eq!(asked.after(at(30), time(40), "b"), (4, 2));
        // A clock that was set back proves nothing.
        assert_eq!(asked.after(at(90), time(40), "b"), (5, 3));
        assert_eq!(asked.after(at(90), time(40), "b"), (6, 3));
    }

    #[test]
    fn file_that_cannot_be_read_or_parsed_is_asked_again() {
        let (stamp, now) = (at(0), time(60));
        let mut listed = Listed::default();
        let text = || Some(String::new());
        assert!(listed.names(stamp, now, || None, |_| Some(BTreeSet::new())).is_none());
        assert!(listed.names(stamp, now, text, |_| None).is_none());
        assert!(listed.names(stamp, now, text, |_| Some(BTreeSet::new())).is_some());
    }
}
