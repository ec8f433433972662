//! Listing a folder.
//!
//! RADOS lists names only, and what it lists may not be durable yet. So each object is asked for
//! its length, which waits until it is; and each folder for an object in it, because its marker
//! stays when it is empty. A folder costs [`BUCKETS`] requests, and one for each entry.
//!
//! [`BUCKETS`]: crate::layout::BUCKETS

use crate::ffi::Errno;
use crate::layout::Found;
use crate::lists::THREADS;
use crate::shared::Shared;
use crate::walk::Walk;
use mica_block::{Entry, ErrorKind, LIST_MAX, LocalFuture, ObjectName, Result};
use mica_rt::join_all;
use std::sync::Arc;

/// Entries that are looked at at a time: less than all requests, so that others get through.
const LOOKED_AT: usize = 32;

type Step = std::result::Result<Vec<Found>, Errno>;

impl Shared {
    pub(crate) async fn list(
        self: &Arc<Self>,
        folder: Option<ObjectName>,
        after: Option<ObjectName>,
    ) -> Result<Vec<Entry>> {
        let failed = |errno| self.listing_failed(errno);
        if !self.check_layout().await? {
            return Ok(Vec::new());
        }
        let mut walk = self.lists.walk(folder.as_ref(), after.as_ref()).map_err(failed)?;
        // Most folders are read completely by this.
        let groups = walk.split(THREADS).into_iter().map(|mut group| {
            self.lists.wait(move || {
                let filled = group.fill();
                (group, filled)
            })
        });
        for (group, filled) in join_all(groups).await {
            walk.join(group);
            filled.map_err(failed)?;
        }
        let mut entries = Vec::new();
        while entries.len() < LIST_MAX {
            let wanted = LIST_MAX - entries.len();
            let (walked, names) = self.step(walk, move |walk| walk.next(wanted)).await;
            walk = walked;
            let names = names.map_err(failed)?;
            for some in names.chunks(LOOKED_AT) {
                for entry in join_all(some.iter().map(|found| self.look_at(found))).await {
                    entries.extend(entry?);
                }
            }
            if names.len() < wanted {
                return Ok(entries);
            }
        }
        self.lists.keep(walk);
        Ok(entries)
    }

    /// Takes `walk` a step further, on a thread that waits.
    async fn step(
        &self,
        mut walk: Walk,
        step: impl FnOnce(&mut Walk) -> Step + Send + 'static,
    ) -> (Walk, Step) {
        let walking = self.lists.wait(move || {
            let names = step(&mut walk);
            (walk, names)
        });
        walking.await
    }

    /// The entry for what was found, if it is there.
    async fn look_at(self: &Arc<Self>, found: &Found) -> Result<Option<Entry>> {
        match found {
            Found::Object(name) => match self.len(name).await {
                Ok(len) => Ok(Some(Entry::Object { name: name.clone(), len })),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            },
            Found::Folder(name) => {
                let has_any = self.has_any(name.clone()).await?;
                Ok(has_any.then(|| Entry::Folder(name.clone())))
            }
        }
    }

    /// Whether there is an object in `folder`, or in a folder of it.
    fn has_any(self: &Arc<Self>, folder: ObjectName) -> LocalFuture<'static, Result<bool>> {
        let shared = Arc::clone(self);
        Box::pin(async move {
            let failed = |errno| shared.listing_failed(errno);
            let mut walk = shared.lists.walk(Some(&folder), None).map_err(failed)?;
            loop {
                let (walked, names) = shared.step(walk, Walk::some).await;
                walk = walked;
                let names = names.map_err(failed)?;
                if names.is_empty() {
                    return Ok(false);
                }
                for found in names {
                    if shared.look_at(&found).await?.is_some() {
                        return Ok(true);
                    }
                }
            }
        })
    }
}
