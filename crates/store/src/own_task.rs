//! Futures that go on when nobody waits for them any more.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::task::{Poll, Waker};

/// Runs `future` in a task of its own, from the first poll of what this gives. Dropping that leaves
/// the task alone.
pub(crate) async fn in_own_task<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    let outcome = Rc::new(Outcome { value: RefCell::new(None), waker: RefCell::new(None) });
    let given = Rc::clone(&outcome);
    mica_rt::spawn(async move {
        let value = future.await;
        given.value.replace(Some(value));
        let waker = given.waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    });
    poll_fn(move |context| {
        if let Some(value) = outcome.value.take() {
            return Poll::Ready(value);
        }
        let replaced = outcome.waker.replace(Some(context.waker().clone()));
        drop(replaced);
        Poll::Pending
    })
    .await
}

struct Outcome<T> {
    value: RefCell<Option<T>>,
    waker: RefCell<Option<Waker>>,
}
