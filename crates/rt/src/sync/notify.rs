//! A notification from any thread that a task can wait for.

use super::Waiters;
use std::sync::atomic::{AtomicBool, Ordering};

/// Holds one notification for one waiter.
#[derive(Default)]
pub struct Notify {
    is_set: AtomicBool,
    waiters: Waiters,
}

impl Notify {
    /// Leaves a notification, unless there is already one.
    pub fn set(&self) {
        self.is_set.store(true, Ordering::SeqCst);
        self.waiters.wake_all();
    }

    /// Waits for the next notification, and takes it.
    pub async fn wait(&self) {
        self.waiters.until(|| self.is_set.swap(false, Ordering::SeqCst).then_some(())).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, Executor, timeout};
    use std::time::Duration;

    #[test]
    fn untaken_notifications_are_merged() {
        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
        executor.block_on(async {
            let (notify, pause) = (Notify::default(), Duration::from_millis(1));
            notify.set();
            notify.set();
            notify.wait().await;
            assert!(timeout(pause, notify.wait()).await.is_err(), "there was only one");
        });
    }

    #[test]
    fn every_notification_from_another_thread_arrives() {
        let (asked, answered) = (Notify::default(), Notify::default());
        let run = |first: &Notify, then: &Notify| {
            let executor = Executor::new(Backend::Pool).expect("a backend");
            executor.block_on(async {
                for _ in 0..1000 {
                    first.wait().await;
                    then.set();
                }
            });
        };
        std::thread::scope(|scope| {
            scope.spawn(|| run(&asked, &answered));
            asked.set();
            scope.spawn(|| run(&answered, &asked));
        });
    }
}
