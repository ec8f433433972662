//! Tasks: futures that run by themselves, and whose panics affect only what waits for them.
//!
//! Invariants
//! - I1 No panic of a task ends its executor, which serves others. A panic that nobody waits for is
//!   logged; under the simulator, where a test would pass in spite of it, `block_on` panics.
//! - I2 A future that panicked is dropped and never polled again: its state may be half changed.

use crate::core::current;
use crate::task_key::LocalFuture;
use futures_util::FutureExt;
use std::any::Any;
use std::cell::RefCell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// The output of a future, or what it panicked with.
type Caught<T> = Result<T, Box<dyn Any + Send>>;

/// Runs `future` to completion in a task of its own on the executor of this thread, even if the
/// [`Task`] is dropped. Only the end of the executor drops it earlier.
///
/// # Panics
/// Outside an executor.
pub fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> Task<T> {
    let shared = Rc::new(RefCell::new(Shared { output: None, waker: None }));
    let of_task = Rc::clone(&shared);
    // No async block around it: that would hold the future twice, and move it once more.
    current().spawn(Box::pin(catch_panic(future).map(move |output| {
        let waker = {
            let mut shared = of_task.borrow_mut();
            shared.output = Some(output);
            shared.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        // If nobody waits, the panic ends here.
        if let Some(shared) = Rc::into_inner(of_task)
            && let Some(Err(panic)) = shared.into_inner().output
        {
            unheard(panic);
        }
    })));
    Task { shared }
}

/// A task that nobody waits for.
pub(crate) fn detached(future: impl Future<Output = ()> + 'static) -> LocalFuture {
    Box::pin(catch_panic(future).map(|output| {
        if let Err(panic) = output {
            unheard(panic);
        }
    }))
}

/// Turns a panic of `future` into an outcome (I2).
pub fn catch_panic<T>(future: impl Future<Output = T>) -> impl Future<Output = Caught<T>> {
    AssertUnwindSafe(future).catch_unwind()
}

/// See I1.
fn unheard(panic: Box<dyn Any + Send>) {
    if current().is_simulated() {
        resume_unwind(panic);
    }
    tracing::error!("a detached task panicked: this is a bug, and its work is lost");
}

/// A task, as a future of its output: awaiting it resumes a panic of the task. Dropping this leaves
/// the task running.
pub struct Task<T> {
    shared: Rc<RefCell<Shared<T>>>,
}

/// The output of a task that has ended, and the waker of what waits for it.
struct Shared<T> {
    output: Option<Caught<T>>,
    waker: Option<Waker>,
}

impl<T> Future for Task<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut shared = self.shared.borrow_mut();
        let replaced = match shared.output.take() {
            Some(Ok(output)) => return Poll::Ready(output),
            Some(Err(panic)) => {
                drop(shared);
                resume_unwind(panic)
            }
            None => shared.waker.replace(context.waker().clone()),
        };
        // Outside of the borrow: dropping a foreign waker may drop tasks.
        drop(shared);
        drop(replaced);
        Poll::Pending
    }
}
