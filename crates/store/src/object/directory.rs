//! Objects as files beneath a directory: `file:///dir`.
//!
//! ```text
//! put     new file in .tmp ─▶ write ─▶ fdatasync ─▶ link ─▶ fsync folders ─▶ unlink in .tmp
//! early                                             link    with the next put in the folder
//! read    open beneath the directory, once ─▶ FileStore, as a layer is read
//! ```
//!
//! Invariants
//! - I1 A name is given by `link`, which fails if there is one: of all puts of a name one is first,
//!   and it is given to a file that is complete and durable.
//! - I2 A file has its name in `.tmp` until its own name is durable, and so have the names of the
//!   folders that it is in. So whoever finds a file with two names makes it durable before it says
//!   that the object is there, whatever became of the process that put it. And whoever finds one
//!   with a single name knows that its folder, and those that it is in, need no sync any more.
//! - I3 No symbolic link is followed beneath the directory, and nothing is an object that is not a
//!   regular file.
//! - I4 What waits for a device is done on the executor's threads ([`mica_rt::on_thread`]), all
//!   of a put in one call. Only a file that was closed for lack of descriptors is opened again as a
//!   layer is ([`crate::Handles`]).

mod early;
mod list;
mod new;
mod requests;
mod reserve;
mod root;

use crate::file::FileStore;
use crate::handles::Handles;
use early::EarlyNames;
use mica_block::{
    EndFuture, Entry, IoFuture, LocalFuture, Object, ObjectName, Objects, PutFuture,
    PutPartsFuture, Result, Store,
};
use mica_rt::{Buf, Parts, on_thread};
use mica_units::HostOffset;
use new::Content;
use requests::Names;
use root::Root;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Objects as files beneath a directory. They are for this user alone. Not for the simulator.
pub struct DirectoryObjects {
    root: Arc<Root>,
    early: Arc<EarlyNames>,
}

impl DirectoryObjects {
    /// The objects beneath the directory at `path`, which exists: a file system that is not mounted
    /// is no empty store. They are read through `handles`.
    ///
    /// # Errors
    /// Any error of the system.
    pub fn open(path: &Path, handles: &Arc<Handles>) -> Result<Self> {
        let early = Arc::new(EarlyNames::new(handles));
        Ok(Self { root: Arc::new(Root::open(path, handles)?), early })
    }

    /// Calls `act` on a thread of the executor, to its end.
    fn on_thread<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Root) -> T + Send + 'static,
    ) -> LocalFuture<'static, T> {
        on_thread_of(&self.root, act)
    }
}

fn on_thread_of<T: Send + 'static>(
    root: &Arc<Root>,
    act: impl FnOnce(&Root) -> T + Send + 'static,
) -> LocalFuture<'static, T> {
    let shared = Arc::clone(root);
    Box::pin(on_thread(root.file(), move |_| act(&shared)))
}

impl Objects for DirectoryObjects {
    fn name(&self) -> String {
        self.root.name()
    }

    fn is_far(&self) -> bool {
        false
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        let (root, name) = (Arc::clone(&self.root), name.clone());
        Arc::new(DirectoryObject { root, name, opened: Arc::default() })
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        let (name, early) = (name.clone(), Arc::clone(&self.early));
        self.on_thread(move |root| {
            (root.put(&name, Content::Whole(&content), Names::Now(&early)), content)
        })
    }

    fn put_parts(&self, name: &ObjectName, content: &Arc<Parts>) -> Option<PutPartsFuture> {
        let (name, early, content) = (name.clone(), Arc::clone(&self.early), Arc::clone(content));
        // The parts come back, so that buffers are freed where they are made.
        let put = self.on_thread(move |root| {
            (root.put(&name, Content::Parts(&content), Names::Now(&early)), content)
        });
        Some(Box::pin(async move { put.await.0 }))
    }

    fn put_early(&self, name: &ObjectName, content: Buf) -> PutFuture {
        let (name, early) = (name.clone(), Arc::clone(&self.early));
        self.on_thread(move |root| {
            (root.put(&name, Content::Whole(&content), Names::Later(&early)), content)
        })
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        let (folder, after) = (folder.cloned(), after.cloned());
        self.on_thread(move |root| root.list(folder.as_ref(), after.as_ref()))
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        let name = name.clone();
        self.on_thread(move |root| root.delete(&name))
    }

    fn give_up_reserve(&self) -> LocalFuture<'static, Result<bool>> {
        self.on_thread(Root::give_up_reserve)
    }

    fn punch(&self, name: &ObjectName, ranges: &[Range<u64>]) -> LocalFuture<'static, Result<u64>> {
        let (name, ranges) = (name.clone(), ranges.to_vec());
        self.on_thread(move |root| root.punch(&name, &ranges))
    }
}

struct DirectoryObject {
    root: Arc<Root>,
    name: ObjectName,
    /// Its file, once it was found. It never changes.
    opened: Arc<OnceLock<Opened>>,
}

struct Opened {
    store: FileStore,
    len: u64,
}

impl DirectoryObject {
    /// Its file, which is looked for if it was not found before.
    fn find(&self) -> LocalFuture<'static, Result<Arc<OnceLock<Opened>>>> {
        let opened = Arc::clone(&self.opened);
        if opened.get().is_some() {
            return Box::pin(std::future::ready(Ok(opened)));
        }
        let name = self.name.clone();
        on_thread_of(&self.root, move |root| {
            let (store, len) = root.find(&name)?;
            // Another read may have found it meanwhile: it is the same file.
            let _ = opened.set(Opened { store, len });
            Ok(opened)
        })
    }
}

impl Opened {
    /// What [`DirectoryObject::find`] found.
    fn of(found: &OnceLock<Self>) -> &Self {
        found.get().expect("it was set when it was found")
    }
}

impl Object for DirectoryObject {
    #[inline]
    fn read_at(&self, buf: Buf, offset: u64) -> IoFuture {
        let offset = HostOffset::new(offset);
        if let Some(opened) = self.opened.get() {
            return opened.store.read_at(buf, offset);
        }
        let finding = self.find();
        IoFuture::boxed(async move {
            match finding.await {
                Ok(found) => Opened::of(&found).store.read_at(buf, offset).await,
                Err(error) => (Err(error), buf),
            }
        })
    }

    fn read_end(&self, buf: Buf) -> EndFuture {
        let finding = self.find();
        Box::pin(async move {
            let found = match finding.await {
                Ok(found) => found,
                Err(error) => return (Err(error), buf),
            };
            let Opened { store, len } = Opened::of(&found);
            let start = HostOffset::new(len.saturating_sub(buf.len() as u64));
            let (result, buf) = store.read_at(buf, start).await;
            (result.map(|()| *len), buf)
        })
    }
}

#[cfg(test)]
mod tests;
