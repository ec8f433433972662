//! A lock that either many tasks share or one holds alone, for tasks on any thread; a task that
//! wants to be alone goes first. Sharing costs an atomic addition.
//!
//! Invariants
//! - I1 While an [`Alone`] is granted there is no [`Sharing`], and there are never two [`Alone`].
//! - I2 A task is registered before its last check; whatever makes room wakes all waiting tasks.
//! - I3 Once a task wants to be alone no new one shares: it waits only for those already there.

use super::Waiters;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The lock.
#[derive(Default)]
pub struct SharedLock {
    /// How many share, plus [`ALONE`] if a task is alone or waits to be.
    state: AtomicUsize,
    waiters: Waiters,
}

const ALONE: usize = 1 << (usize::BITS - 1);

/// A share of the lock.
#[must_use = "the lock is released when this is dropped"]
pub struct Sharing<'a>(&'a SharedLock);

/// The lock held alone, or reserved until those that share are done.
#[must_use = "the lock is released when this is dropped"]
pub struct Alone<'a>(&'a SharedLock);

impl SharedLock {
    /// Shares the lock, unless a task is alone.
    #[inline]
    pub fn try_share(&self) -> Option<Sharing<'_>> {
        let sharing = Sharing(self);
        // If it may not share, dropping it restores the count.
        (self.state.fetch_add(1, Ordering::SeqCst) & ALONE == 0).then_some(sharing)
    }

    /// Shares the lock as soon as no task is alone.
    #[inline]
    pub async fn share(&self) -> Sharing<'_> {
        match self.try_share() {
            Some(sharing) => sharing,
            None => self.share_later().await,
        }
    }

    #[cold]
    async fn share_later(&self) -> Sharing<'_> {
        // A failed attempt wakes the waiting tasks, so it is made only if it may succeed.
        let is_open = || self.state.load(Ordering::SeqCst) & ALONE == 0;
        self.waiters.until(|| if is_open() { self.try_share() } else { None }).await
    }

    /// Takes the lock alone, as soon as everybody else is done.
    pub async fn alone(&self) -> Alone<'_> {
        let claim = || {
            let before = self.state.fetch_or(ALONE, Ordering::SeqCst);
            (before & ALONE == 0).then(|| Alone(self))
        };
        let alone = self.waiters.until(claim).await;
        let is_empty = || (self.state.load(Ordering::SeqCst) == ALONE).then_some(());
        self.waiters.until(is_empty).await;
        alone
    }
}

impl Drop for Sharing<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.0.state.fetch_sub(1, Ordering::SeqCst) == ALONE + 1 {
            self.0.waiters.wake_all();
        }
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!ALONE, Ordering::SeqCst);
        self.0.waiters.wake_all();
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Woken;
    use super::*;
    use crate::{Backend, Executor, join_all, yield_now};
    use std::cell::Cell;
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::sync::Arc;
    use std::task::{Context, Poll, Waker};

    #[test]
    fn task_that_waits_to_share_sleeps_until_the_other_is_done() {
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut context = Context::from_waker(&waker);
        let lock = SharedLock::default();
        let mut alone = Box::pin(lock.alone());
        let Poll::Ready(held) = alone.as_mut().poll(&mut context) else { panic!("it is free") };
        let mut sharing = pin!(lock.share());
        for _ in 0..10 {
            assert!(sharing.as_mut().poll(&mut context).is_pending());
        }
        assert_eq!(woken.count(), 0, "nobody made room");
        drop(held);
        assert_eq!(woken.count(), 1);
        assert!(sharing.as_mut().poll(&mut context).is_ready());
    }

    #[test]
    fn alone_excludes_everybody_in_any_order() {
        for seed in 0..50 {
            let lock = SharedLock::default();
            let (sharing, alone, done) = (Cell::new(0), Cell::new(0), Cell::new(0));
            let share = async || {
                let _sharing = lock.share().await;
                sharing.set(sharing.get() + 1);
                yield_now().await;
                assert_eq!(alone.get(), 0);
                sharing.set(sharing.get() - 1);
                done.set(done.get() + 1);
            };
            let be_alone = async || {
                let _alone = lock.alone().await;
                alone.set(alone.get() + 1);
                assert_eq!((sharing.get(), alone.get()), (0, 1));
                yield_now().await;
                assert_eq!((sharing.get(), alone.get()), (0, 1));
                alone.set(alone.get() - 1);
                done.set(done.get() + 1);
            };
            let executor = Executor::new(Backend::Sim { seed }).expect("the simulator");
            executor.block_on(join_all((0..40).map(|index| {
                let future: Pin<Box<dyn Future<Output = ()>>> = match (index + seed) % 3 {
                    0 => Box::pin(be_alone()),
                    _ => Box::pin(share()),
                };
                future
            })));
            assert_eq!(done.get(), 40);
            assert_eq!(lock.state.load(Ordering::SeqCst), 0);
        }
    }

    #[test]
    fn threads_lose_no_wake_up_and_no_update() {
        let lock = SharedLock::default();
        // Read and written back in two steps: an update is lost if two tasks do it at once.
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (lock, sum) = (&lock, &sum);
                scope.spawn(move || {
                    let executor = Executor::new(Backend::Pool).expect("a backend");
                    executor.block_on(async {
                        for turn in 0..200 {
                            if (turn + thread) % 2 == 0 {
                                let _alone = lock.alone().await;
                                let before = sum.load(Ordering::Relaxed);
                                yield_now().await;
                                sum.store(before + 1, Ordering::Relaxed);
                            } else {
                                let _sharing = lock.share().await;
                                yield_now().await;
                            }
                        }
                    });
                });
            }
        });
        assert_eq!(sum.load(Ordering::Relaxed), 400);
    }

    #[test]
    fn task_that_gives_up_waiting_to_be_alone_unblocks_the_others() {
        let lock = SharedLock::default();
        let sharing = lock.try_share();
        {
            let mut alone = pin!(lock.alone());
            let mut context = Context::from_waker(Waker::noop());
            assert!(alone.as_mut().poll(&mut context).is_pending());
            assert!(lock.try_share().is_none());
        }
        assert!(lock.try_share().is_some());
        drop(sharing);
        assert_eq!(lock.state.load(Ordering::SeqCst), 0);
    }
}
