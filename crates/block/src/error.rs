//! One error for all of mica: a kind that says what to do, a context that says what and where, and
//! the cause.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Result with mica's error.
pub type Result<T> = std::result::Result<T, Error>;

/// What a caller does about an error. A new kind only if a caller would act differently.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request or the argument makes no sense: correct it and try again.
    Invalid,
    /// Well formed, but mica does not do it.
    Unsupported,
    /// The image's own bytes contradict the format; nothing in it can be trusted any more.
    Corrupt,
    /// There is nothing with this name.
    NotFound,
    /// A policy or the system forbids it.
    Denied,
    /// Beyond a stated maximum.
    Limit,
    /// The device or the quota is full; nothing else is wrong.
    NoSpace,
    /// The device, file system or network failed.
    Io,
}

/// An error: kind, context and cause. `Display` prints the context; the cause is its `source`.
#[derive(Clone)]
pub struct Error {
    inner: Arc<Inner>,
}

struct Inner {
    kind: ErrorKind,
    context: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
    /// The image, or the socket, that somebody else has, if that is what is wrong.
    held: Option<PathBuf>,
}

impl Error {
    /// An error of `kind`; `context` says what was wrong and where, in one line without a full
    /// stop.
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Self {
        Self::with(kind, context.into(), None)
    }

    /// The operation that `context` describes failed. The kind follows from the system's error.
    pub fn from_io(context: impl Into<String>, source: io::Error) -> Self {
        let kind = match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => ErrorKind::NotFound,
            io::ErrorKind::PermissionDenied => ErrorKind::Denied,
            io::ErrorKind::InvalidInput => ErrorKind::Invalid,
            io::ErrorKind::Unsupported => ErrorKind::Unsupported,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
            _ => ErrorKind::Io,
        };
        Self::with(kind, context.into(), Some(source.into()))
    }

    /// Somebody else has the image, or the socket, at `path`, as `context` says. The kind is
    /// `Denied`.
    pub fn of_held(path: &Path, context: impl Into<String>, source: Option<io::Error>) -> Self {
        let (context, source) = (context.into(), source.map(Into::into));
        let held = Some(path.to_owned());
        Self { inner: Arc::new(Inner { kind: ErrorKind::Denied, context, source, held }) }
    }

    /// The same kind with a wider context; `self` becomes the cause.
    #[must_use]
    pub fn wrap(self, context: impl Into<String>) -> Self {
        let kind = self.kind();
        Self::with(kind, context.into(), Some(Box::new(self)))
    }

    fn with(
        kind: ErrorKind,
        context: String,
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self { inner: Arc::new(Inner { kind, context, source, held: None }) }
    }

    /// What to do about it.
    pub fn kind(&self) -> ErrorKind {
        self.inner.kind
    }

    /// What went wrong with all its causes, in one line.
    pub fn in_one_line(&self) -> String {
        let mut line = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            line = format!("{line}: {error}");
            cause = error.source();
        }
        line
    }

    /// The image, or the socket, that somebody else has, if that is what is wrong.
    pub fn held(&self) -> Option<&Path> {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(self);
        while let Some(error) = cause {
            let held = error.downcast_ref::<Self>().and_then(|error| error.inner.held.as_deref());
            if held.is_some() {
                return held;
            }
            cause = error.source();
        }
        None
    }

    /// The system's errno at the root of the causes, if there is one.
    pub fn raw_os_error(&self) -> Option<i32> {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(self);
        while let Some(error) = cause {
            if let Some(error) = error.downcast_ref::<io::Error>() {
                return error.raw_os_error();
            }
            cause = error.source();
        }
        None
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.inner.context)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.inner.kind, self.inner.context)?;
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.inner.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_that_is_held_is_known_in_whatever_context_and_from_no_words() {
        let image = Path::new("/d/a.qcow2");
        let cause = io::Error::from(io::ErrorKind::PermissionDenied);
        let held = Error::of_held(image, "/d/a.qcow2: another process has it", Some(cause));
        let wrapped = held.wrap("opening /d/b.qcow2").wrap("disk \"b\"");
        assert_eq!((wrapped.held(), wrapped.kind()), (Some(image), ErrorKind::Denied));
        let words = Error::new(ErrorKind::Denied, "/d/a.qcow2: another process has it");
        assert_eq!(words.held(), None);
    }
}
