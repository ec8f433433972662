//! Waiting for several futures at once.

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use std::future::Future;

/// Runs all `futures` concurrently; returns their outputs, in order, when the last is ready. Each
/// future is polled only when it was woken itself.
pub fn join_all<F: Future>(
    futures: impl IntoIterator<Item = F>,
) -> impl Future<Output = Vec<F::Output>> {
    // Collected now: many futures start their work when they are created.
    let futures: Vec<F> = futures.into_iter().collect();
    async move {
        match <[F; 1]>::try_from(futures) {
            Ok([only]) => vec![only.await],
            Err(futures) if futures.is_empty() => Vec::new(),
            // Boxed, so that awaiting a single future stays small.
            Err(futures) => Box::pin(join_many(futures)).await,
        }
    }
}

/// Runs two futures of different kinds concurrently; returns both outputs when the later is ready.
pub fn join_two<A: Future, B: Future>(
    first: A,
    second: B,
) -> impl Future<Output = (A::Output, B::Output)> {
    futures_util::future::join(first, second)
}

async fn join_many<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut outputs: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    let numbered = |(number, future): (usize, F)| async move { (number, future.await) };
    let mut running: FuturesUnordered<_> = futures.into_iter().enumerate().map(numbered).collect();
    while let Some((number, output)) = running.next().await {
        outputs[number] = Some(output);
    }
    outputs.into_iter().map(|output| output.expect("all of them are ready")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, Executor, sleep};
    use std::cell::Cell;
    use std::future::poll_fn;
    use std::pin::pin;
    use std::time::Duration;

    #[test]
    fn future_is_polled_only_when_it_was_woken_itself() {
        const FUTURES: u64 = 100;
        let polls = Cell::new(0);
        let future = async |number: u64| {
            let mut sleeps = pin!(sleep(Duration::from_millis(FUTURES - number)));
            poll_fn(|context| {
                polls.set(polls.get() + 1);
                sleeps.as_mut().poll(context)
            })
            .await;
            number
        };
        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
        let outputs = executor.block_on(join_all((0..FUTURES).map(future)));
        assert_eq!(outputs, (0..FUTURES).collect::<Vec<_>>());
        assert_eq!(polls.get(), 2 * FUTURES, "once to begin and once to end, each");
    }

    #[test]
    fn two_futures_take_as_long_as_the_later() {
        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
        executor.block_on(async {
            let wait = async |seconds: u64| sleep(Duration::from_secs(seconds)).await;
            let begun = crate::now();
            let (first, second) = join_two(async { (wait(2).await, 7) }, wait(3)).await;
            assert_eq!((first, second), (((), 7), ()));
            assert_eq!(crate::now().saturating_since(begun), Duration::from_secs(3));
        });
    }

    #[test]
    fn no_future_and_a_single_one_are_joined_too() {
        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
        executor.block_on(async {
            assert!(join_all(Vec::<std::future::Ready<u8>>::new()).await.is_empty());
            assert_eq!(join_all([std::future::ready(3)]).await, [3]);
        });
    }
}
