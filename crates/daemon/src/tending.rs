//! The thread of disks that have work of their own: one for all of them.

use mica_block::Manage;
use mica_rt::sync::Signal;
use mica_rt::{Backend, Executor, Handle};
use mica_stack::Stores;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

/// Starts its thread when there is a first disk to tend, and ends it when this is dropped.
#[derive(Default)]
pub(crate) struct Tending {
    executor: Mutex<Option<Handle>>,
    is_collecting: AtomicBool,
    over: Arc<Signal>,
}

impl Tending {
    /// Lets `disk` do its own work until it is closed. All that the disk promises holds without
    /// that, too.
    pub(crate) fn tend(&self, disk: Arc<dyn Manage>) {
        let begun = self.run(move || async move { disk.tend().await });
        if let Err(error) = begun {
            tracing::warn!(%error, "a volume is written only when a client flushes");
        }
    }

    /// Collects what becomes garbage in `stores`, from the first call on.
    pub(crate) fn collect(&self, stores: &Arc<Stores>) {
        if self.is_collecting.swap(true, Ordering::Relaxed) {
            return;
        }
        let stores = Arc::clone(stores);
        let begun = self.run(move || async move { stores.collect_in_background().await });
        if let Err(error) = begun {
            self.is_collecting.store(false, Ordering::Relaxed);
            tracing::warn!(%error, "nothing is collected in the background");
        }
    }

    /// Runs what `make` makes on the thread.
    ///
    /// # Errors
    /// If the system has no thread to spare.
    pub(crate) fn run<F: Future<Output = ()> + 'static>(
        &self,
        make: impl FnOnce() -> F + Send + 'static,
    ) -> std::io::Result<()> {
        let mut executor = self.executor.lock();
        let handle = match &*executor {
            Some(handle) => handle,
            None => executor.insert(start(&self.over)?),
        };
        handle.spawn_with(make);
        Ok(())
    }
}

impl Drop for Tending {
    fn drop(&mut self) {
        self.over.raise();
    }
}

fn start(over: &Arc<Signal>) -> std::io::Result<Handle> {
    let (over, (sender, started)) = (Arc::clone(over), mpsc::channel());
    let body = move || match Executor::new(Backend::Pool) {
        Ok(executor) => {
            // The starter waits for it.
            let _ = sender.send(Ok(executor.handle()));
            executor.block_on(over.raised());
        }
        Err(error) => drop(sender.send(Err(error))),
    };
    std::thread::Builder::new().name("mica-tend".to_owned()).spawn(body)?;
    started.recv().map_err(std::io::Error::other)?
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: a thousand volumes had a thousand threads.
    #[test]
    fn all_disks_share_one_thread_which_ends_with_the_last() {
        let tending = Tending::default();
        let (sender, threads) = mpsc::channel();
        for _ in 0..3 {
            let sender = sender.clone();
            let tell = move || async move {
                sender.send(std::thread::current().id()).expect("heard");
                // It waits, and the others run all the same.
                std::future::pending::<()>().await;
            };
            tending.run(tell).expect("a thread");
        }
        drop(sender);
        let all: Vec<_> = (0..3).map(|_| threads.recv().expect("it runs")).collect();
        assert!(all.iter().all(|thread| *thread == all[0]), "{all:?}");
        assert_ne!(all[0], std::thread::current().id());
        drop(tending);
        assert!(threads.recv().is_err(), "what ran there is dropped");
    }
}
