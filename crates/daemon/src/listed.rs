//! Which disks the configuration file lists. It is read again only when it has changed: disks are
//! removed by the hundred, one after the other, and each removal asks.
//!
//! Invariants
//! - I1 What is known of a file counts for that file as it was only: the same one, of the same
//!   length, with the same times.
//! - I2 What was read of a file that had just changed is not kept: times are coarse, and another
//!   change may leave the same ones.

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
pub(crate) struct Listed(Option<(Stamp, Names)>);

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
    /// those that `read` finds in it, if it can.
    pub(crate) fn names(
        &mut self,
        stamp: Stamp,
        now: SystemTime,
        read: impl FnOnce() -> Option<BTreeSet<String>>,
    ) -> Option<Names> {
        if let Some((known, names)) = &self.0
            && *known == stamp
        {
            return Some(Arc::clone(names));
        }
        let names = read().map(Arc::new);
        let kept = names.clone().filter(|_| stamp.is_settled(now));
        self.0 = kept.map(|names| (stamp, names));
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: to remove a thousand disks the configuration was read and parsed a thousand
    /// times.
    #[test]
    fn file_is_read_once_until_it_changes() {
        let at = |seconds: i64| Stamp {
            device: 1,
            inode: 2,
            len: 3,
            written: (seconds, 0),
            changed: (seconds, 0),
        };
        let time = |seconds: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let mut listed = Listed::default();
        let mut reads = 0;
        let mut ask = |stamp: Stamp, now: SystemTime| {
            let read = || {
                reads += 1;
                Some(BTreeSet::from(["a".to_owned()]))
            };
            assert!(listed.names(stamp, now, read).expect("read").contains("a"));
            reads
        };
        assert_eq!([ask(at(10), time(20)), ask(at(10), time(30))], [1, 1]);
        let replaced = Stamp { inode: 3, ..at(10) };
        assert_eq!([ask(replaced, time(30)), ask(replaced, time(30))], [2, 2]);
        // It may have been changed again, within the same tick.
        assert_eq!(
            [ask(at(30), time(30)), ask(at(30), time(31)), ask(at(30), time(40))],
            [3, 4, 5]
        );
        assert_eq!(ask(at(30), time(40)), 5);
        // A clock that was set back proves nothing.
        assert_eq!([ask(at(90), time(40)), ask(at(90), time(40))], [6, 7]);
    }

    #[test]
    fn file_that_cannot_be_read_is_asked_again() {
        let stamp = Stamp { device: 1, inode: 2, len: 3, written: (0, 0), changed: (0, 0) };
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(60);
        let mut listed = Listed::default();
        assert!(listed.names(stamp, now, || None).is_none());
        assert!(listed.names(stamp, now, || Some(BTreeSet::new())).is_some());
    }
}
