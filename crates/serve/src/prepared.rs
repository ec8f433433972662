//! A server that a thread of its own runs once it is told to.

use std::sync::mpsc;

/// A server that only has to be told to start.
#[derive(Debug)]
pub struct Prepared<R> {
    /// Dropped first: its thread ends if it is never told.
    start: mpsc::Sender<()>,
    running: R,
}

impl<R> Prepared<R> {
    /// `running` is what its thread serves once `start` says so.
    pub(crate) fn new(start: mpsc::Sender<()>, running: R) -> Self {
        Self { start, running }
    }

    /// Starts serving.
    pub fn start(self) -> R {
        // The thread waits for nothing else.
        let _ = self.start.send(());
        self.running
    }
}
