//! Whether every disk serves, for load balancers and monitors that only look at the status.

use super::reply::{plain, text};
use crate::shared::Shared;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

/// `/healthz`: 200, or 503 with a line that says why. A disk that somebody drained is no failure.
pub(super) fn health(shared: &Shared) -> Response {
    let disks = shared.disks.all();
    let ill = disks.iter().filter_map(|served| {
        let name = &served.name;
        match (served.failure(), served.image_figures().latch) {
            (Some(error), _) => Some(format!("disk {name} is not served: {}", error.in_one_line())),
            (None, Some(error)) => {
                Some(format!("disk {name} accepts no more writes: {}", error.in_one_line()))
            }
            (None, None) => None,
        }
    });
    let mut ill: Vec<_> = ill.collect();
    if shared.is_stopping() {
        ill.insert(0, "the server is stopping".to_owned());
    }
    let (status, said) = match &*ill {
        [] => (StatusCode::OK, "ok".to_owned()),
        [only] => (StatusCode::SERVICE_UNAVAILABLE, only.clone()),
        [first, others @ ..] => {
            let said = format!("{first} (and {} more, see `mica ctl status`)", others.len());
            (StatusCode::SERVICE_UNAVAILABLE, said)
        }
    };
    (status, text("text/plain; charset=utf-8", plain(&said) + "\n")).into_response()
}
