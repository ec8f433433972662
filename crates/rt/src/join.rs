//! Waiting for several futures at once.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Runs all `futures` side by side; their outputs, in order, when the last is ready.
pub fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> JoinAll<F> {
    let futures = futures.into_iter().map(|future| Joined::Running(Box::pin(future))).collect();
    JoinAll { futures }
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
