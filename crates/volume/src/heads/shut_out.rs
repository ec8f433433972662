//! The client of a writer that is fenced: a store that can tell clients apart refuses it.

use super::Heads;
use crate::format::head::Head;
use mica_rt::timeout;
use std::time::Duration;

/// How long a store may take to shut a client out before a volume is taken over without that.
const SHUT_OUT_MAX: Duration = Duration::from_secs(5);

impl Heads {
    /// Has the store refuse what the client of the writer of `before` sends, and has sent, where it
    /// can do that. The fence decides without it, too: that it fails is only said.
    pub(super) async fn shut_out(&self, before: &Head) {
        let Some(client) = before.writer().and(before.client.as_deref()) else { return };
        if self.objects.client().as_deref() == Some(client) {
            return;
        }
        let (volume, host) = (self.name.as_str(), &before.host);
        let shut = timeout(SHUT_OUT_MAX, self.objects.shut_out(client)).await;
        let error = match shut {
            Ok(Ok(())) => {
                tracing::info!(volume, host, client, "the old writer's client is shut out");
                return;
            }
            Ok(Err(error)) => error.in_one_line(),
            Err(_) => format!("the store did not answer for {} s", SHUT_OUT_MAX.as_secs()),
        };
        tracing::warn!(
            volume,
            host,
            client,
            error,
            "the old writer's client is not shut out of the store; its writes are fenced"
        );
    }
}
