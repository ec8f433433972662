//! Waiting for several futures at once.

use std::cell::RefCell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Runs all `futures` side by side; their outputs, in order, when the last is ready.
pub fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> JoinAll<F> {
    let futures = futures.into_iter().map(|future| Joined::Running(Box::pin(future))).collect();
    JoinAll { futures }
}

/// Runs `future` in a task of its own, to its end whatever becomes of who asked, and gives its
/// output to who still waits. Only the end of the executor drops it earlier.
///
/// # Panics
/// Outside an executor. A panic of `future` goes on in who waits for it, and ends nothing else.
pub fn spawn_joined<T: 'static>(future: impl Future<Output = T> + 'static) -> SpawnJoined<T> {
    let shared = Rc::new(RefCell::new((None, None::<Waker>)));
    let of_task = Rc::clone(&shared);
    crate::spawn(async move {
        let output = catch_panic(future).await;
        let waker = {
            let mut shared = of_task.borrow_mut();
            shared.0 = Some(output);
            shared.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    });
    SpawnJoined { shared }
}

/// What a task of its own gave, if it has ended, and who waits for it.
type Shared<T> = (Option<Caught<T>>, Option<Waker>);

/// The future of [`spawn_joined`].
#[must_use]
pub struct SpawnJoined<T> {
    shared: Rc<RefCell<Shared<T>>>,
}

impl<T> Future for SpawnJoined<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut shared = self.shared.borrow_mut();
        match shared.0.take() {
            Some(Ok(output)) => Poll::Ready(output),
            Some(Err(panic)) => {
                drop(shared);
                resume_unwind(panic)
            }
            None => {
                shared.1 = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// What a future gave, or what it panicked with.
type Caught<T> = std::thread::Result<T>;

/// Makes a panic of `future` an outcome. What panicked is dropped and never polled again, so its
/// state, which may be half changed, is never looked at.
pub async fn catch_panic<T>(future: impl Future<Output = T>) -> Caught<T> {
    let mut future = Box::pin(future);
    std::future::poll_fn(move |context| {
        let polled = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context)));
        polled.map_or_else(|panic| Poll::Ready(Err(panic)), |poll| poll.map(Ok))
    })
    .await
}

/// The future of [`join_all`].
#[must_use]
pub struct JoinAll<F: Future> {
    futures: Vec<Joined<F>>,
}

enum Joined<F: Future> {
    Running(Pin<Box<F>>),
    Done(Option<F::Output>),
}

impl<F: Future> Future for JoinAll<F>
where
    F::Output: Unpin,
{
    type Output = Vec<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut running = false;
        for joined in &mut self.futures {
            if let Joined::Running(future) = joined {
                match future.as_mut().poll(context) {
                    Poll::Ready(output) => *joined = Joined::Done(Some(output)),
                    Poll::Pending => running = true,
                }
            }
        }
        if running {
            return Poll::Pending;
        }
        let take = |joined: &mut Joined<F>| match joined {
            Joined::Done(output) => output.take().expect("polled after it was ready"),
            Joined::Running(_) => unreachable!("none is running"),
        };
        Poll::Ready(self.futures.iter_mut().map(take).collect())
    }
}
