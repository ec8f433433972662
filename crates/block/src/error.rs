//! One error for all of mica: a kind that says what to do, a context that says what and where, and
//! the cause.

use std::fmt;
use std::io;
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
}

impl Error {
    /// An error of `kind`; `context` says what was wrong and where, in one line without a full
    /// stop.
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Self {
        Self { inner: Arc::new(Inner { kind, context: context.into(), source: None }) }
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
        let source = Some(source.into());
        Self { inner: Arc::new(Inner { kind, context: context.into(), source }) }
    }

    /// The same kind with a wider context; `self` becomes the cause.
    #[must_use]
    pub fn wrap(self, context: impl Into<String>) -> Self {
        let kind = self.kind();
        let source = Some(Box::new(self) as Box<_>);
        Self { inner: Arc::new(Inner { kind, context: context.into(), source }) }
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
