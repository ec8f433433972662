//! Long computations beside an executor.

use futures_channel::oneshot;
use mica_block::{Error, Result};
use std::num::NonZeroU32;

/// What takes less than this many iterations, some milliseconds, is computed where it is asked for.
const ITERATIONS_HERE_MAX: u64 = 8 << 10;

/// Computes `work`, which takes about so many iterations of a hash, without keeping other tasks of
/// this executor waiting for long.
///
/// # Errors
/// If the system has no thread for it.
pub(crate) async fn compute<T: Send + 'static>(
    iterations: impl IntoIterator<Item = NonZeroU32>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let iterations: u64 = iterations.into_iter().map(|count| u64::from(count.get())).sum();
    if iterations <= ITERATIONS_HERE_MAX {
        return Ok(work());
    }
    let (sender, receiver) = oneshot::channel();
    let body = move || {
        // Nobody waits any more: nobody wants it.
        let _ = sender.send(work());
    };
    let failed = |error| Error::from_io("starting a thread that derives a key", error);
    std::thread::Builder::new().name("mica-unlock".to_owned()).spawn(body).map_err(failed)?;
    receiver.await.map_err(|_| failed(std::io::Error::other("it ended early")))
}
