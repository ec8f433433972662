//! Names of tasks, and the futures that they run.

use std::future::Future;
use std::pin::Pin;

pub(crate) type LocalFuture = Pin<Box<dyn Future<Output = ()>>>;

/// Name of a task: its slot, and a generation that tells a stale name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TaskKey {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl TaskKey {
    /// The future that `block_on` runs, which lives in no slot.
    pub(crate) const MAIN: Self = Self { index: u32::MAX, generation: 0 };
}
