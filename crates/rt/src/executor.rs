//! The executor: one thread, its tasks, its timers, its operations.
//!
//! There is one executor per queue. Nothing moves between executors but a wake-up or a new task, so
//! tasks need no locks among themselves. A turn of the loop is: run what is ready, submit what that
//! asked for, reap what completed, fire the timers that are due.

use crate::backend::Backend;
use crate::core::{Core, Entered, TaskWaker, current, in_executor};
use crate::looking::{Looking, note_ran_dry};
use crate::remote::{Remote, RemoteItem};
use crate::task;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

/// A single-threaded executor with its own I/O backend.
pub struct Executor {
    core: Rc<Core>,
}

impl Executor {
    /// Creates an executor on the calling thread.
    ///
    /// # Errors
    /// If the backend that was asked for is refused by the system.
    pub fn new(backend: Backend) -> io::Result<Self> {
        Ok(Self { core: Core::new(backend)? })
    }

    /// A handle through which other threads give this executor work.
    pub fn handle(&self) -> Handle {
        Handle { remote: Arc::clone(&self.core.remote) }
    }

    /// The name of the backend in use: `uring`, `pool` or `sim`.
    pub fn backend_name(&self) -> &'static str {
        self.core.driver.borrow().name()
    }

    /// Runs `future` and every task spawned meanwhile, until `future` is ready. Tasks that are not
    /// done by then are dropped.
    ///
    /// # Panics
    /// Inside another executor, or under `sim` when nothing can ever happen again.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        assert!(!in_executor(), "an executor inside an executor");
        let _entered = Entered::new(Rc::clone(&self.core));
        let mut future = pin!(future);
        let waker = TaskWaker::main(&self.core.remote);
        let mut context = Context::from_waker(&waker);
        self.core.main_woken.set(true);
        let output = loop {
            if self.core.main_woken.replace(false)
                && let Poll::Ready(output) = future.as_mut().poll(&mut context)
            {
                break output;
            }
            self.core.run_ready();
            let idle = !self.core.main_woken.get() && self.core.ready.borrow().is_empty();
            self.core.turn(idle);
        };
        self.core.drop_tasks();
        output
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        let _entered = Entered::new(Rc::clone(&self.core));
        self.core.remote.close();
        self.core.drop_tasks();
        self.core.drain_ops();
    }
}

/// Gives an executor work from any thread.
#[derive(Clone)]
pub struct Handle {
    remote: Arc<Remote>,
}

impl Handle {
    /// That of the executor which runs the caller.
    ///
    /// # Panics
    /// Outside an executor.
    pub fn current() -> Self {
        Self { remote: Arc::clone(&current().remote) }
    }

    /// Whether its executor runs the caller.
    pub fn is_current(&self) -> bool {
        in_executor() && Arc::ptr_eq(&self.remote, &current().remote)
    }

    /// Runs `make` and the future that it returns in a task on the executor's thread. Drops `make`
    /// if the executor has ended.
    pub fn spawn_with<M, F>(&self, make: M)
    where
        M: FnOnce() -> F + Send + 'static,
        F: Future<Output = ()> + 'static,
    {
        self.remote.push(RemoteItem::Spawn(Box::new(|| task::detached(async { make().await }))));
    }

    /// Whether the executor is within a write or a sync that it does by itself
    /// ([`crate::File::write_in_place`]), and so makes no progress until the file system lets it.
    pub fn is_writing(&self) -> bool {
        self.remote.is_writing()
    }
}

/// The right of the current executor to poll instead of sleeping, for a part of it that has nothing
/// to do; `None` if enough others poll.
///
/// # Panics
/// Outside an executor.
pub fn look() -> Option<Looking> {
    note_ran_dry();
    // A simulated one takes no processor, and what it does must not depend on others.
    if current().is_simulated() { Some(Looking::uncounted()) } else { Looking::begin() }
}

/// Lets the other tasks that are ready run first, if there are any.
///
/// # Panics
/// Outside an executor.
pub async fn yield_to_ready() {
    let has_ready = !current().ready.borrow().is_empty();
    if has_ready {
        yield_now().await;
    }
}

/// Lets the other tasks that are ready run first.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
