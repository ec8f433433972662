//! Time as the executor sees it: the system's monotonic clock, or the simulator's.

use crate::clock::{Instant, TimerKey};
use crate::core::{Core, current};
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

/// Now, by the clock of this thread's executor.
///
/// # Panics
/// Outside an executor.
pub fn now() -> Instant {
    current().now()
}

/// Waits for `duration`.
///
/// # Panics
/// Outside an executor.
pub fn sleep(duration: Duration) -> Sleep {
    let core = current();
    let due = core.now().after(duration);
    Sleep { core, due, registered: None }
}

/// The time ran out before the future was ready.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Elapsed;

/// Runs `future` for at most `duration`.
///
/// # Errors
/// If the time ran out; the future is dropped then.
pub async fn timeout<F: Future>(duration: Duration, future: F) -> Result<F::Output, Elapsed> {
    let mut future = pin!(future);
    let mut limit = pin!(sleep(duration));
    std::future::poll_fn(move |context| {
        if let Poll::Ready(output) = future.as_mut().poll(context) {
            return Poll::Ready(Ok(output));
        }
        limit.as_mut().poll(context).map(|()| Err(Elapsed))
    })
    .await
}

/// The future of [`sleep`].
#[must_use]
pub struct Sleep {
    core: Rc<Core>,
    due: Instant,
    registered: Option<TimerKey>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.core.now() >= self.due {
            return Poll::Ready(());
        }
        let key = self.registered.take();
        let mut timers = self.core.timers.borrow_mut();
        let (key, replaced) = timers.register(key, self.due, context.waker());
        drop(timers);
        drop(replaced);
        self.registered = Some(key);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.registered {
            let waker = self.core.timers.borrow_mut().remove(key);
            drop(waker);
        }
    }
}
