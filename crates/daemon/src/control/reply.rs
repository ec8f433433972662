//! Answers, and reading the body of a request.

use super::REQUEST_WAIT;
use axum::body::Body;
use axum::http::{HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use mica_block::{Error, ErrorKind};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::time::Duration;

/// Maximum size of a request's body, in bytes.
pub(super) const BODY_BYTES_MAX: usize = 64 << 10;

/// Why a request is refused.
#[derive(Debug)]
pub(super) struct Refusal {
    status: StatusCode,
    message: String,
    /// After which time it may be asked again.
    again: Option<Duration>,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), again: None }
    }

    /// The same, which says `again` after which time it may be asked once more.
    pub(super) fn again(self, again: Option<Duration>) -> Self {
        Self { again, ..self }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let status = match error.kind() {
            ErrorKind::Invalid | ErrorKind::Limit => StatusCode::BAD_REQUEST,
            ErrorKind::Unsupported => StatusCode::NOT_IMPLEMENTED,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Denied => StatusCode::CONFLICT,
            ErrorKind::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.in_one_line())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = json(&json!({ "error": plain(&self.message) }));
        let Some(again) = self.again else { return (self.status, body).into_response() };
        // In whole seconds, and never at once.
        let seconds = again.as_millis().div_ceil(1000).max(1).to_string();
        (self.status, [(header::RETRY_AFTER, seconds)], body).into_response()
    }
}

/// One line of plain text: names come from images and clients.
pub(super) fn plain(text: &str) -> String {
    let plain = |letter: char| if letter.is_control() { '\u{fffd}' } else { letter };
    text.chars().map(plain).collect()
}

/// A JSON answer.
pub(super) fn json(value: &Value) -> Response {
    text("application/json", format!("{value}\n"))
}

/// A text answer that is neither cached nor taken for another type.
pub(super) fn text(kind: &'static str, body: impl Into<Body>) -> Response {
    const NO_SNIFF: (HeaderName, &str) = (header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    const NO_STORE: (HeaderName, &str) = (header::CACHE_CONTROL, "no-store");
    ([(header::CONTENT_TYPE, kind), NO_SNIFF, NO_STORE], body.into()).into_response()
}

/// Reads and parses the body of a request, within [`REQUEST_WAIT`].
///
/// # Errors
/// With the matching status.
pub(super) async fn body<T: DeserializeOwned>(body: Body) -> Result<T, Refusal> {
    let taking = axum::body::to_bytes(body, BODY_BYTES_MAX);
    let Ok(taken) = tokio::time::timeout(REQUEST_WAIT, taking).await else {
        let what = format!("the body did not arrive within {} seconds", REQUEST_WAIT.as_secs());
        return Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, what));
    };
    let bytes = taken.map_err(|_| {
        let what = format!("the body is truncated or longer than {BODY_BYTES_MAX} bytes");
        Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, what)
    })?;
    serde_json::from_slice(&bytes).map_err(|error| {
        Refusal::new(StatusCode::BAD_REQUEST, format!("cannot parse the body: {error}"))
    })
}
