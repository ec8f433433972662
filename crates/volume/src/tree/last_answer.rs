//! How long a read that is in flight is waited for once whoever reads is given up.

use mica_block::{Error, ErrorKind, Result};
use mica_rt::sync::Signal;
use mica_rt::{Buf, sleep};
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

/// A store that is well answers within this.
const LAST_ANSWER: Duration = Duration::from_secs(3);

/// What `read` gets. Only for reads into memory that nobody else has: they may go on when they are
/// dropped.
///
/// # Errors
/// Those of `read`; `Io`, with `what` it is, if it has not ended soon after the signal.
pub(super) async fn read_unless_given_up(
    given_up: &Signal,
    read: impl Future<Output = (Result<()>, Buf)>,
    what: impl FnOnce() -> String,
) -> Result<Buf> {
    let too_late = async {
        given_up.raised().await;
        sleep(LAST_ANSWER).await;
    };
    let mut too_late = pin!(too_late);
    let mut read = pin!(read);
    let ended = poll_fn(|context| match read.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => too_late.as_mut().poll(context).map(|()| None),
    });
    match ended.await {
        Some((result, buf)) => result.map(|()| buf),
        None => {
            let what = format!("{}: no answer, and it was given up", what());
            Err(Error::new(ErrorKind::Io, what))
        }
    }
}
