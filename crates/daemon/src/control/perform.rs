//! How a request for disks is done: an action that may take long, on a thread of its own.

use super::actions::{Actions, TooMany};
use super::reply::Refusal;
use super::sources::Sources;
use crate::no_disk::no_disk;
use crate::served::Served;
use crate::shared::Shared;
use axum::http::StatusCode;
use axum::response::Response;
use std::sync::Arc;
use tokio::sync::oneshot;

pub(super) type Answer = Result<Response, Refusal>;

/// The disk called `name`.
pub(super) fn find(shared: &Shared, name: &str) -> Result<Arc<Served>, Refusal> {
    shared.disks.named(name).ok_or_else(|| {
        let all = shared.disks.all();
        let there: Vec<_> = all.iter().map(|served| served.name.clone()).collect();
        let what = no_disk(name, &there);
        Refusal::new(StatusCode::NOT_FOUND, what)
    })
}

/// Begins an action that may take long. It completes even if the client goes away.
pub(super) fn begin(
    actions: &Actions,
    action: impl FnOnce() + Send + 'static,
) -> Result<(), Refusal> {
    actions.run(action).map_err(|TooMany| {
        let what = "too many actions are in progress: try again later";
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, what)
    })
}

/// Performs an action on disks, while which nothing is handed over to another process.
pub(super) async fn perform_held<T: Send + 'static>(
    sources: &Sources,
    action: impl FnOnce(&Shared) -> mica_block::Result<T> + Send + 'static,
) -> Result<T, Refusal> {
    let shared = Arc::clone(&sources.shared);
    let held = move || {
        let _held = shared.hold()?;
        action(&shared)
    };
    Ok(perform(&sources.actions, held).await??)
}

/// Asks for something that keeps nothing from being handed over to another process, and that
/// changes nothing if it is denied.
pub(super) async fn asked<T: Send + 'static>(
    sources: &Sources,
    ask: impl Fn() -> mica_block::Result<T> + Send + 'static,
) -> Result<T, Refusal> {
    let shared = Arc::clone(&sources.shared);
    Ok(perform(&sources.actions, move || shared.ask(ask)).await??)
}

/// Performs such an action, and waits for it.
pub(super) async fn perform<T: Send + 'static>(
    actions: &Actions,
    action: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Refusal> {
    let (sender, done) = oneshot::channel();
    begin(actions, move || drop(sender.send(action())))?;
    done.await.map_err(failed_inside)
}

/// The answer if the thread that performed an action died without a result.
pub(super) fn failed_inside(_: oneshot::error::RecvError) -> Refusal {
    Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "the action failed inside the server")
}
