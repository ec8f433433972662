//! What a volume needs of the world besides its store: names, times, random numbers.

use crate::format::Id;
use std::fmt;
use std::sync::Arc;

/// The host that a volume is opened on.
#[derive(Clone)]
pub struct Environment {
    host: Arc<str>,
    now_ns: Arc<dyn Fn() -> u64 + Send + Sync>,
    random: Arc<dyn Fn() -> Id + Send + Sync>,
}

impl Environment {
    /// A host of this name, with a clock (nanoseconds since 1970; nothing depends on it but what
    /// people are told, and how long automatic snapshots are kept) and a source of random numbers
    /// that no two hosts share.
    pub fn new(
        host: impl Into<Arc<str>>,
        now_ns: impl Fn() -> u64 + Send + Sync + 'static,
        random: impl Fn() -> Id + Send + Sync + 'static,
    ) -> Self {
        Self { host: host.into(), now_ns: Arc::new(now_ns), random: Arc::new(random) }
    }

    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    pub(crate) fn now_ns(&self) -> u64 {
        (self.now_ns)()
    }

    pub(crate) fn random(&self) -> Id {
        (self.random)()
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Environment").field("host", &self.host).finish_non_exhaustive()
    }
}
