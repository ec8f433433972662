//! Waiting for several futures at once.

use std::cell::RefCell;
use std::future::Future;
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
/// Outside an executor.
pub fn spawn_joined<T: 'static>(future: impl Future<Output = T> + 'static) -> SpawnJoined<T> {
    let shared = Rc::new(RefCell::new((None, None::<Waker>)));
    let of_task = Rc::clone(&shared);
    crate::spawn(async move {
        let output = future.await;
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

/// The future of [`spawn_joined`].
#[must_use]
pub struct SpawnJoined<T> {
    shared: Rc<RefCell<(Option<T>, Option<Waker>)>>,
}

impl<T> Future for SpawnJoined<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut shared = self.shared.borrow_mut();
        match shared.0.take() {
            Some(output) => Poll::Ready(output),
            None => {
                shared.1 = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
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
