//! Actions that clients asked for and that may take long: a few threads carry them out, so that the
//! control socket answers others meanwhile. They continue when the client is gone; the end of the
//! process waits for them where that matters.
//!
//! Invariants
//! - I1 At most as many run at the same time as there may be threads, and [`ACTIONS_MAX`] run or
//!   wait: they outlive the connections that asked for them, so the limit on connections does not
//!   bound them.
//! - I2 One thread is always there: the system may refuse others to a process that has too many
//!   already, which is when somebody wants to drain it or to take over from it.

use mica_block::{Error, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

pub(super) const ACTIONS_MAX: usize = 16;

type Action = Box<dyn FnOnce() + Send>;

/// The threads. When this is dropped, they end once all actions are done.
pub(super) struct Actions(Arc<Shared>);

/// There are too many already.
#[derive(Debug)]
pub(super) struct TooMany;

struct Shared {
    threads_max: usize,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Action>,
    threads: usize,
    running: usize,
    is_closed: bool,
}

impl Actions {
    /// Starts the first of at most `threads_max` threads.
    ///
    /// # Errors
    /// If the system refuses it.
    pub(super) fn start(threads_max: usize) -> Result<Self> {
        let (queue, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { threads_max, queue, changed });
        start_thread(&shared, &mut shared.lock())
            .map_err(|error| Error::from_io("starting the control socket", error))?;
        Ok(Self(shared))
    }

    /// Carries out `action` as soon as there is a thread for it.
    pub(super) fn run(
        &self,
        action: impl FnOnce() + Send + 'static,
    ) -> std::result::Result<(), TooMany> {
        let mut queue = self.0.lock();
        if queue.running + queue.waiting.len() >= ACTIONS_MAX {
            return Err(TooMany);
        }
        queue.waiting.push_back(Box::new(action));
        let is_short = queue.threads < queue.running + queue.waiting.len();
        if is_short && queue.threads < self.0.threads_max {
            // If it is refused, those that are there do it later.
            let _ = start_thread(&self.0, &mut queue);
        }
        drop(queue);
        self.0.changed.notify_one();
        Ok(())
    }
}

impl Drop for Actions {
    fn drop(&mut self) {
        self.0.lock().is_closed = true;
        self.0.changed.notify_all();
    }
}

fn start_thread(shared: &Arc<Shared>, queue: &mut Queue) -> std::io::Result<()> {
    let body = {
        let shared = Arc::clone(shared);
        move || shared.work()
    };
    std::thread::Builder::new().name("mica-command".to_owned()).spawn(body)?;
    queue.threads += 1;
    Ok(())
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    /// Runs actions; ends when none waits and another thread remains.
    fn work(&self) {
        let mut queue = self.lock();
        loop {
            if let Some(action) = queue.waiting.pop_front() {
                queue.running += 1;
                drop(queue);
                // Whoever waits for it notices that nothing comes.
                let _ = std::panic::catch_unwind(AssertUnwindSafe(action));
                queue = self.lock();
                queue.running -= 1;
            } else if queue.is_closed || queue.threads > 1 {
                queue.threads -= 1;
                return;
            } else {
                self.changed.wait(&mut queue);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn actions_run_side_by_side_up_to_a_limit_and_those_that_panic_harm_no_others() {
        const THREADS_MAX: usize = 4;
        let actions = Actions::start(THREADS_MAX).expect("a thread");
        assert!(actions.run(|| panic!("on purpose")).is_ok());
        let (sender, begun) = mpsc::channel();
        let (ends, hold) = mpsc::channel::<()>();
        let hold = Arc::new(Mutex::new(hold));
        // The one that panics may be counted still.
        let mut admitted = 0;
        for _ in 0..2 * ACTIONS_MAX {
            let (sender, hold) = (sender.clone(), Arc::clone(&hold));
            let action = move || {
                sender.send(()).expect("somebody waits");
                // One after the other, until nobody holds them back.
                let _ = hold.lock().recv();
            };
            admitted += usize::from(actions.run(action).is_ok());
        }
        assert!((ACTIONS_MAX - 1..=ACTIONS_MAX).contains(&admitted), "{admitted}");
        for _ in 0..THREADS_MAX {
            begun.recv_timeout(LIMIT).expect("it begins");
        }
        assert!(begun.try_recv().is_err(), "more threads than there may be");
        drop(ends);
        for _ in THREADS_MAX..admitted {
            begun.recv_timeout(LIMIT).expect("it begins");
        }
        // One stays, and does what comes later.
        let (sender, done) = mpsc::channel();
        assert!(actions.run(move || sender.send(()).expect("somebody waits")).is_ok());
        done.recv_timeout(LIMIT).expect("it is done");
    }
}
