//! Makes loops that never wait yield to other tasks.

use crate::executor::yield_now;

/// Counts the steps of a loop whose length a request or an image decides, and lets the other tasks
/// of the executor run every so many steps. It reads no clock: each step is bounded work.
#[derive(Debug)]
pub struct Pace {
    every: u64,
    done: u64,
}

impl Pace {
    /// Yields every `every` steps.
    ///
    /// # Panics
    /// If `every` is zero.
    pub fn new(every: u64) -> Self {
        assert!(every > 0, "it would yield forever");
        Self { every, done: 0 }
    }

    /// Accounts for `steps` steps.
    pub async fn steps(&mut self, count: u64) {
        self.done = self.done.saturating_add(count);
        if self.done >= self.every {
            self.done = 0;
            yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::{Context, Waker};

    #[test]
    fn others_run_every_so_many_steps() {
        let mut work = pin!(async {
            let mut pace = Pace::new(4);
            for _ in 0..40 {
                pace.steps(1).await;
            }
            // One step may count for many.
            pace.steps(100).await;
        });
        let mut context = Context::from_waker(Waker::noop());
        let turns = (0..100).take_while(|_| work.as_mut().poll(&mut context).is_pending()).count();
        assert_eq!(turns, 11);
    }
}
