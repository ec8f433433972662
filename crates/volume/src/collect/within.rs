//! All objects of a folder of folders: extents, heads and boot records are in such.
//!
//! It is listed for its folders, and then these are: each by itself or, where the store lists what
//! is in all of them at once ([`Objects::list_all`]), in ranges of many.
//!
//! Invariants
//! - W1 What was there when this began, and still is when it ends, is found. What is not found came
//!   or went meanwhile: collectors rely on nothing else. So ranges leave no gap, although folders
//!   come to be between them.
//!
//! [`Objects::list_all`]: mica_block::Objects::list_all

use super::client::{Client, InFlight};
use mica_block::{Entry, ErrorKind, LIST_MAX, ObjectName, Result};
use std::collections::VecDeque;

/// Folders of a range: with more of them fewer requests are under way at once, and with fewer there
/// are more requests.
pub(super) const FOLDERS_OF_RANGE: usize = 256;

/// What is listed by one request after the other.
enum Part {
    Folder(ObjectName),
    Range(Range),
}

/// Some of the folders in `folder`, and what is between them, in the order of what is in them.
struct Range {
    folder: ObjectName,
    /// The first; `None` if it begins with whatever is there.
    first: Option<ObjectName>,
    /// The first that is not among them; `None` if it ends with whatever is there.
    end: Option<ObjectName>,
}

impl Client {
    /// What `pick` makes of all objects in `folder` and in its folders, in no order. `progress`
    /// gets how many that are by now.
    ///
    /// # Errors
    /// As `pick`; what the store reports.
    pub(crate) async fn within<T: 'static>(
        &self,
        folder: &ObjectName,
        pick: impl Fn(Entry) -> Result<Option<T>> + Clone + 'static,
        mut progress: impl FnMut(u64),
    ) -> Result<Vec<T>> {
        let (mut all, mut folders) = (Vec::new(), Vec::new());
        for entry in self.list(folder).await? {
            match entry {
                Entry::Folder(name) => folders.push(name),
                object @ Entry::Object { .. } => all.extend(pick(object)?),
            }
        }
        let mut parts = VecDeque::new();
        if folders.len() > 1 {
            parts = ranges(folder, &mut folders);
            // The first shows whether the store can do that.
            let first = parts.pop_front().expect("there are folders");
            match self.part(first, pick.clone()).await {
                Err(error) if error.kind() == ErrorKind::Unsupported => parts.clear(),
                found => {
                    all.extend(found?);
                    progress(all.len() as u64);
                    folders.clear();
                }
            }
        }
        parts.extend(folders.into_iter().map(Part::Folder));
        let mut in_flight = InFlight::new();
        for part in parts {
            let (client, pick) = (self.clone(), pick.clone());
            if let Some(found) = in_flight.push(async move { client.part(part, pick).await }).await
            {
                all.extend(found?);
                progress(all.len() as u64);
            }
        }
        while let Some(found) = in_flight.next().await {
            all.extend(found?);
            progress(all.len() as u64);
        }
        Ok(all)
    }

    async fn part<T>(
        &self,
        part: Part,
        pick: impl Fn(Entry) -> Result<Option<T>>,
    ) -> Result<Vec<T>> {
        let range = match part {
            Part::Folder(folder) => {
                let entries = self.list(&folder).await?.into_iter();
                return entries.filter_map(|entry| pick(entry).transpose()).collect();
            }
            Part::Range(range) => range,
        };
        let (mut all, mut after) = (Vec::new(), range.first.clone());
        loop {
            let page = self.list_all(&range.folder, after.as_ref()).await?;
            after = page.last().map(|entry| entry.name().clone());
            let is_over = after.as_ref().is_none_or(|last| range.ends_before(last));
            let is_last = is_over || page.len() < LIST_MAX;
            for entry in page.into_iter().filter(|entry| range.has(entry.name())) {
                all.extend(pick(entry)?);
            }
            if is_last {
                return Ok(all);
            }
        }
    }
}

impl Range {
    fn has(&self, name: &ObjectName) -> bool {
        let begins_after = self.first.as_ref().is_some_and(|first| is_before(name, first));
        !begins_after && !self.ends_before(name)
    }

    fn ends_before(&self, name: &ObjectName) -> bool {
        self.end.as_ref().is_some_and(|end| !is_before(name, end))
    }
}

/// All of `folder`, of which these are the folders, in ranges.
fn ranges(folder: &ObjectName, folders: &mut [ObjectName]) -> VecDeque<Part> {
    folders.sort_by(|one, other| inside(one).cmp(inside(other)));
    let firsts: Vec<_> = folders.iter().step_by(FOLDERS_OF_RANGE).skip(1).cloned().collect();
    let begins = std::iter::once(None).chain(firsts.iter().cloned().map(Some));
    let ends = firsts.iter().cloned().map(Some).chain([None]);
    let range = |(first, end)| Part::Range(Range { folder: folder.clone(), first, end });
    begins.zip(ends).map(range).collect()
}

/// Whether the object `name` comes before all that is in `folder`.
fn is_before(name: &ObjectName, folder: &ObjectName) -> bool {
    name.as_str().bytes().lt(inside(folder))
}

/// What the names of all that is in `folder` begin with: `web-1/` comes before `web/`.
fn inside(folder: &ObjectName) -> impl Iterator<Item = u8> {
    folder.as_str().bytes().chain([b'/'])
}
