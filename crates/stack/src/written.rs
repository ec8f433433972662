//! The images that are open for writing here.

use mica_block::{Identity, OpenImage, Store};
use mica_store::{Located, WriterName};
use parking_lot::{Mutex, MutexGuard};
use std::sync::{Arc, Weak};

/// Of all images of one chain.
#[derive(Default)]
pub(crate) struct WrittenImages(Mutex<Vec<Written>>);

struct Written {
    device: u64,
    inode: u64,
    store: Weak<dyn Store>,
    name: WriterName,
}

impl WrittenImages {
    /// Remembers `image`, which has this `name`, for as long as its store is open.
    pub(crate) fn add(&self, image: &OpenImage, name: WriterName) {
        let Identity { device, inode, .. } = image.identity;
        let store = Arc::downgrade(&image.store);
        self.lock().push(Written { device, inode, store, name });
    }

    /// The name of what was `located`, if it is open for writing here.
    pub(crate) fn name(&self, located: &Located) -> Option<WriterName> {
        let Identity { device, inode, .. } = located.identity(0);
        let written = self.lock();
        let is_it = |image: &&Written| {
            (image.device, image.inode) == (device, inode) && image.store.strong_count() > 0
        };
        written.iter().find(is_it).map(|image| image.name.clone())
    }

    /// Whether what was `located` is open for writing here: then its lock is our own, and opening
    /// it again may reveal that the chain forms a loop.
    pub(crate) fn has(&self, located: &Located) -> bool {
        let Identity { device, inode, .. } = located.identity(0);
        let mut written = self.lock();
        written.retain(|image| image.store.strong_count() > 0);
        written.iter().any(|image| (image.device, image.inode) == (device, inode))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Written>> {
        self.0.lock()
    }
}
