//! How long a read that is in flight is waited for once whoever reads is given up.

use mica_block::Result;
use mica_rt::sync::Signal;
use mica_rt::{Buf, sleep};
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

/// A store that is well answers within this.
const LAST_ANSWER: Duration = Duration::from_secs(3);

/// What became of a read that is not waited for.
pub(super) const NO_ANSWER: &str = "no answer, and it was given up";

/// What `read` gets; `None` if it has not ended soon after the signal. Only for reads into memory
/// that nobody else has: they may go on when they are dropped.
pub(super) async fn read_unless_given_up(
    given_up: &Signal,
    read: impl Future<Output = (Result<()>, Buf)>,
) -> Option<(Result<()>, Buf)> {
    let too_late = async {
        given_up.raised().await;
        sleep(LAST_ANSWER).await;
    };
    let mut too_late = pin!(too_late);
    let mut read = pin!(read);
    poll_fn(|context| match read.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => too_late.as_mut().poll(context).map(|()| None),
    })
    .await
}
