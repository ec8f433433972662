//! The images that are open for writing here.

use mica_block::{Identity, OpenImage, Store};
use mica_store::Located;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Of all images of one chain.
#[derive(Default)]
pub(crate) struct WrittenImages(Mutex<Vec<Written>>);

struct Written {
    device: u64,
    inode: u64,
    store: Weak<dyn Store>,
}

impl WrittenImages {
    /// Remembers `image` for as long as its store is open.
    pub(crate) fn add(&self, image: &OpenImage) {
        let Identity { device, inode, .. } = image.identity;
        let store = Arc::downgrade(&image.store);
        self.lock().push(Written { device, inode, store });
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
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
