//! What an answer of the client means.

use mica_block::{Error, ErrorKind};
use object_store::Error as ClientError;

/// Whether a put was refused because there is an object (B2).
pub(crate) fn says_exists(error: &ClientError) -> bool {
    let ClientError::AlreadyExists { source, .. } = error else { return false };
    matches!(
        source.downcast_ref(),
        Some(ClientError::Precondition { .. } | ClientError::NotModified { .. })
    )
}

/// The error of `doing` something.
pub(crate) fn error_of(doing: String, error: ClientError) -> Error {
    let kind = match &error {
        ClientError::NotFound { .. } => ErrorKind::NotFound,
        ClientError::PermissionDenied { .. } | ClientError::Unauthenticated { .. } => {
            ErrorKind::Denied
        }
        ClientError::InvalidPath { .. } | ClientError::UnknownConfigurationKey { .. } => {
            ErrorKind::Invalid
        }
        ClientError::NotSupported { .. } | ClientError::NotImplemented { .. } => {
            ErrorKind::Unsupported
        }
        // The network, the service, or a conflict: it may pass.
        _ => ErrorKind::Io,
    };
    Error::new(kind, format!("{doing}: {}", in_one_line(&error)))
}

/// Whether a listing failed because there is no bucket. The client has no kind for that.
pub(crate) fn is_missing_bucket(error: &ClientError) -> bool {
    let text = error.to_string();
    matches!(error, ClientError::NotFound { .. }) || text.contains("NoSuchBucket")
}

/// The cause alone: an answer of the service may be a page of XML.
fn in_one_line(error: &ClientError) -> String {
    const CHARS_MAX: usize = 300;
    let text = error.to_string();
    let words: Vec<_> = text.split_whitespace().collect();
    words.join(" ").chars().take(CHARS_MAX).collect()
}
