//! A folder's names, in order, from its buckets. Waits for the cluster: not for an executor.

use crate::ffi::{Context, Cursor, Errno};
use crate::layout::{BUCKETS, Found, decode, hash_of, locator};
use mica_block::ObjectName;
use std::collections::VecDeque;
use std::sync::Arc;

/// Names that are asked for at a time, of one bucket.
const CHUNK: usize = 64;
/// The same, where they are only skipped.
const SKIPPED_CHUNK: usize = 1000;

/// A folder that is walked through.
pub(crate) struct Walk {
    folder: Option<ObjectName>,
    after: Option<ObjectName>,
    buckets: Vec<Bucket>,
}

/// A part of a folder, from some name on.
struct Bucket {
    locator: String,
    /// Where the names in `found` were looked for.
    from: Option<Cursor>,
    /// Where to look for more.
    next: Option<Cursor>,
    end: Cursor,
    /// In order; all of them are after the name that the walk has reached.
    found: VecDeque<Found>,
}

impl Walk {
    /// Begins a walk through what `folder` has after the name `after`.
    pub(crate) fn new(
        context: &Arc<Context>,
        namespace: &str,
        folder: Option<ObjectName>,
        after: Option<ObjectName>,
    ) -> Result<Self, Errno> {
        let buckets = (0..BUCKETS).map(|bucket| {
            let locator = locator(folder.as_ref().map(ObjectName::as_str), bucket);
            let (next, end) = Cursor::range(context, hash_of(namespace, &locator))?;
            Ok(Bucket { locator, from: None, next: Some(next), end, found: VecDeque::new() })
        });
        let buckets = buckets.collect::<Result<_, Errno>>()?;
        Ok(Self { folder, after, buckets })
    }

    /// Whether this walk has come to `after` in `folder`.
    pub(crate) fn is_at(&self, folder: Option<&ObjectName>, after: Option<&ObjectName>) -> bool {
        self.folder.as_ref() == folder && self.after.as_ref() == after
    }

    /// Takes out all buckets, in `count` groups, which may be filled at the same time.
    pub(crate) fn split(&mut self, count: usize) -> Vec<Group> {
        let mut groups: Vec<_> =
            (0..count).map(|_| Group { after: self.after.clone(), buckets: Vec::new() }).collect();
        for (at, bucket) in self.buckets.drain(..).enumerate() {
            groups[at % count].buckets.push(bucket);
        }
        groups
    }

    /// Takes back a group.
    pub(crate) fn join(&mut self, group: Group) {
        self.buckets.extend(group.buckets);
    }

    /// The next `count` names, and fewer only if there are no more.
    pub(crate) fn next(&mut self, count: usize) -> Result<Vec<Found>, Errno> {
        let mut names = Vec::new();
        while names.len() < count {
            for bucket in &mut self.buckets {
                bucket.fill(self.after.as_ref())?;
            }
            let fronts = self.buckets.iter_mut().filter(|bucket| !bucket.found.is_empty());
            let first = fronts.min_by(|one, other| one.front().cmp(&other.front()));
            let Some(found) = first.and_then(|bucket| bucket.found.pop_front()) else { break };
            self.after = Some(found.name().clone());
            names.push(found);
        }
        Ok(names)
    }

    /// Some of the names, in no order; none only if there are no more. Asks for less than `next`.
    pub(crate) fn some(&mut self) -> Result<Vec<Found>, Errno> {
        for bucket in &mut self.buckets {
            bucket.fill(None)?;
            if !bucket.found.is_empty() {
                return Ok(std::mem::take(&mut bucket.found).into());
            }
        }
        Ok(Vec::new())
    }

    /// Forgets names that it has not returned: they are looked for again, as others may have come
    /// or gone by then.
    pub(crate) fn pause(&mut self) {
        for bucket in &mut self.buckets {
            bucket.found.clear();
            if let Some(from) = bucket.from.take() {
                bucket.next = Some(from);
            }
        }
    }
}

/// Some buckets of a walk.
pub(crate) struct Group {
    after: Option<ObjectName>,
    buckets: Vec<Bucket>,
}

impl Group {
    /// Looks for the first names of each bucket.
    pub(crate) fn fill(&mut self) -> Result<(), Errno> {
        self.buckets.iter_mut().try_for_each(|bucket| bucket.fill(self.after.as_ref()))
    }
}

impl Bucket {
    fn front(&self) -> Option<&ObjectName> {
        self.found.front().map(Found::name)
    }

    /// Looks for names after `after`, if none is left and there may be more.
    fn fill(&mut self, after: Option<&ObjectName>) -> Result<(), Errno> {
        let mut count = CHUNK;
        while self.found.is_empty()
            && let Some(from) = self.next.take()
        {
            let (listed, next) = match from.list(&self.end, count) {
                Ok(listed) => listed,
                Err(errno) => {
                    self.next = Some(from);
                    return Err(errno);
                }
            };
            // What has the same hash by chance is another folder's.
            let own = listed.iter().filter(|listed| listed.locator == self.locator.as_bytes());
            let named = own.filter_map(|listed| decode(&listed.name));
            self.found = named.filter(|found| after.is_none_or(|at| found.name() > at)).collect();
            (self.from, self.next) = (Some(from), next);
            count = SKIPPED_CHUNK;
        }
        Ok(())
    }
}
