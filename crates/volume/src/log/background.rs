//! The background tasks of a log, such as syncing a segment's header.
//!
//! Invariant: once [`Background::over`] returns, no task holds the log's device: whoever closes the
//! log waits for that, so that the device can be opened again at once.

use mica_block::LocalFuture;
use mica_rt::spawn;
use mica_rt::sync::Waiters;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

/// The tasks of a log that nobody waits for.
#[derive(Default)]
pub(super) struct Background {
    count: AtomicUsize,
    waiters: Waiters,
}

impl Background {
    /// Begins `task`. What it has is dropped before it is over.
    pub(super) fn spawn(self: &Arc<Self>, task: impl Future<Output = ()> + 'static) {
        self.count.fetch_add(1, Ordering::AcqRel);
        let one = One(Arc::clone(self));
        drop(spawn(Running(Some((Box::pin(task), one)))));
    }

    /// Waits until all are over: none is begun by then, as nobody writes any more.
    pub(super) async fn over(&self) {
        let is_over = || (self.count.load(Ordering::Acquire) == 0).then_some(());
        self.waiters.until(is_over).await;
    }
}

/// A task, until it is over. If the executor ends before, what it has is dropped in this order.
struct Running(Option<(LocalFuture<'static, ()>, One)>);

impl Future for Running {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if let Some((task, _)) = &mut self.0 {
            ready!(task.as_mut().poll(context));
        }
        self.0 = None;
        Poll::Ready(())
    }
}

/// One of them.
struct One(Arc<Background>);

impl Drop for One {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::AcqRel);
        self.0.waiters.wake_all();
    }
}
