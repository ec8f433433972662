//! Who may write while a part of a sector is written.
//!
//! Disks write whole sectors. A request for a part of one reads the sector, puts its bytes in and
//! writes it back; whoever writes the sector in between would lose what it wrote. Such requests are
//! rare (the end of a file that is copied in), so they simply run **alone**: no other change by the
//! same server is under way meanwhile. Changes of whole sectors **share**, which costs each an
//! atomic addition.
//!
//! Invariants
//! - I1 While an [`Alone`] is complete there is no [`Sharing`], and never are there two [`Alone`].
//! - I2 Who waits put its waker in place before it looked for the last time; whoever makes room
//!   wakes all who wait. So no wake-up is lost.
//! - I3 Once somebody wants to be alone nobody new shares: it waits for those only that were there.

use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

/// The changes under way on one disk.
#[derive(Default)]
pub struct Edges {
    /// How many share, and [`ALONE`] if somebody is alone or waits until it is.
    state: AtomicUsize,
    waiting: Mutex<Vec<Waker>>,
}

const ALONE: usize = 1 << (usize::BITS - 1);

/// Whole sectors are being changed.
pub struct Sharing<'a>(&'a Edges);

/// A part of a sector is being changed, or will be when those who share are done.
pub struct Alone<'a>(&'a Edges);

impl Edges {
    /// Shares, unless somebody is alone.
    #[inline]
    pub fn try_share(&self) -> Option<Sharing<'_>> {
        let sharing = Sharing(self);
        // Dropping it takes the count back where it may not stay.
        (self.state.fetch_add(1, Ordering::SeqCst) & ALONE == 0).then_some(sharing)
    }

    /// Shares as soon as nobody is alone.
    pub async fn share(&self) -> Sharing<'_> {
        poll_fn(|context| self.poll(context, || self.try_share())).await
    }

    /// Waits until everybody else is done.
    pub async fn alone(&self) -> Alone<'_> {
        let claim = || {
            let before = self.state.fetch_or(ALONE, Ordering::SeqCst);
            (before & ALONE == 0).then(|| Alone(self))
        };
        let alone = poll_fn(|context| self.poll(context, claim)).await;
        let is_empty = || (self.state.load(Ordering::SeqCst) == ALONE).then_some(());
        poll_fn(|context| self.poll(context, is_empty)).await;
        alone
    }

    fn poll<T>(&self, context: &Context<'_>, attempt: impl Fn() -> Option<T>) -> Poll<T> {
        if let Some(done) = attempt() {
            return Poll::Ready(done);
        }
        self.lock_waiting().push(context.waker().clone());
        attempt().map_or(Poll::Pending, Poll::Ready)
    }

    fn wake_all(&self) {
        let waiting = std::mem::take(&mut *self.lock_waiting());
        waiting.into_iter().for_each(Waker::wake);
    }

    fn lock_waiting(&self) -> std::sync::MutexGuard<'_, Vec<Waker>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Sharing<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.0.state.fetch_sub(1, Ordering::SeqCst) == ALONE + 1 {
            self.0.wake_all();
        }
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!ALONE, Ordering::SeqCst);
        self.0.wake_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, Executor, join_all, yield_now};
    use std::cell::Cell;
    use std::pin::Pin;

    #[test]
    fn who_is_alone_is_alone_whatever_the_order() {
        for seed in 0..50 {
            let edges = Edges::default();
            let (sharing, alone, done) = (Cell::new(0), Cell::new(0), Cell::new(0));
            let share = async || {
                let _sharing = edges.share().await;
                sharing.set(sharing.get() + 1);
                yield_now().await;
                assert_eq!(alone.get(), 0);
                sharing.set(sharing.get() - 1);
                done.set(done.get() + 1);
            };
            let be_alone = async || {
                let _alone = edges.alone().await;
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
            assert_eq!(edges.state.load(Ordering::SeqCst), 0);
        }
    }

    #[test]
    fn threads_lose_no_wake_up_and_no_update() {
        let edges = Edges::default();
        // Read and written back in two steps: an update is lost if two do it at once.
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (edges, sum) = (&edges, &sum);
                scope.spawn(move || {
                    let executor = Executor::new(Backend::Pool).expect("a backend");
                    executor.block_on(async {
                        for turn in 0..200 {
                            if (turn + thread) % 2 == 0 {
                                let _alone = edges.alone().await;
                                let before = sum.load(Ordering::Relaxed);
                                yield_now().await;
                                sum.store(before + 1, Ordering::Relaxed);
                            } else {
                                let _sharing = edges.share().await;
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
    fn who_gives_up_waiting_to_be_alone_lets_the_others_on() {
        let edges = Edges::default();
        let sharing = edges.try_share();
        {
            let mut alone = std::pin::pin!(edges.alone());
            let mut context = Context::from_waker(Waker::noop());
            assert!(alone.as_mut().poll(&mut context).is_pending());
            assert!(edges.try_share().is_none());
        }
        assert!(edges.try_share().is_some());
        drop(sharing);
        assert_eq!(edges.state.load(Ordering::SeqCst), 0);
    }
}
