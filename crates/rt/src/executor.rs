//! The executor: one thread, its tasks, its timers, its operations.
//!
//! There is one executor per queue. Nothing moves between executors but a wake-up or a new task, so
//! tasks need no locks among themselves. A turn of the loop is: run what is ready, submit what that
//! asked for, take in what completed, fire the timers that are due.
//!
//! Invariants
//! - I1 A task is polled only on its executor's thread, and by one call at a time.
//! - I2 A wake-up is never lost: a task woken while it runs is run again.
//! - I3 The executor ends only after every operation in flight completed or was cancelled, so that
//!   the kernel never writes into freed memory.

use crate::backend::{Backend, Driver};
use crate::op::{Next, OpKey, Ops};
use crate::remote::{Remote, RemoteItem};
use crate::task;
use crate::time::{Clock, Instant, Timers};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

pub(crate) type LocalFuture = Pin<Box<dyn Future<Output = ()>>>;

thread_local! {
    static CURRENT: RefCell<Option<Rc<Core>>> = const { RefCell::new(None) };
}

/// The executor of this thread.
///
/// # Panics
/// Outside an executor.
pub(crate) fn current() -> Rc<Core> {
    CURRENT.with(|current| current.borrow().clone()).expect("called inside an executor")
}

/// A single-threaded executor with its own I/O backend.
pub struct Executor {
    core: Rc<Core>,
}

impl Executor {
    /// Makes an executor on the calling thread.
    ///
    /// # Errors
    /// If the backend that was asked for is refused by the system.
    pub fn new(backend: Backend) -> io::Result<Self> {
        let remote = Arc::new(Remote::new()?);
        let driver = Driver::new(backend, &remote)?;
        let clock = driver.clock();
        let core = Rc::new(Core {
            ops: RefCell::default(),
            driver: RefCell::new(driver),
            tasks: RefCell::default(),
            ready: RefCell::default(),
            timers: RefCell::default(),
            clock,
            remote,
            main_woken: Cell::new(true),
        });
        Ok(Self { core })
    }

    /// A handle with which other threads give this executor work.
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
        let inside = CURRENT.with(|current| current.borrow().is_some());
        assert!(!inside, "an executor inside an executor");
        let _entered = Entered::new(Rc::clone(&self.core));
        let mut future = pin!(future);
        let waker = Waker::from(Arc::new(TaskWaker {
            key: TaskKey::MAIN,
            queued: AtomicBool::new(false),
            remote: Arc::clone(&self.core.remote),
        }));
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
    /// Runs `make` and the future that it returns in a task on the executor's thread. Drops `make`
    /// where the executor has ended.
    pub fn spawn_with<M, F>(&self, make: M)
    where
        M: FnOnce() -> F + Send + 'static,
        F: Future<Output = ()> + 'static,
    {
        self.remote.push(RemoteItem::Spawn(Box::new(|| task::detached(async { make().await }))));
    }

    /// Lets the executor make small writes to the page cache by itself, where a thread of the
    /// kernel would make them. If one waits, for as long as its file system is frozen perhaps, then
    /// all that the executor does waits: this is for executors whose work is one disk's.
    pub fn allow_writes_in_place(&self) {
        self.remote.allow_writes_in_place();
    }

    /// Whether the executor is within such a write, and so does not turn before its file system
    /// lets it.
    pub fn is_writing(&self) -> bool {
        self.remote.is_writing()
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

/// Makes an executor the one of this thread, for as long as it lives.
struct Entered {
    previous: Option<Rc<Core>>,
}

impl Entered {
    fn new(core: Rc<Core>) -> Self {
        Self { previous: CURRENT.with(|current| current.borrow_mut().replace(core)) }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let entered = CURRENT
            .with(|current| std::mem::replace(&mut *current.borrow_mut(), self.previous.take()));
        drop(entered);
    }
}

pub(crate) struct Core {
    pub(crate) ops: RefCell<Ops>,
    driver: RefCell<Driver>,
    tasks: RefCell<Tasks>,
    ready: RefCell<VecDeque<TaskKey>>,
    pub(crate) timers: RefCell<Timers>,
    clock: Clock,
    remote: Arc<Remote>,
    main_woken: Cell<bool>,
}

/// Tasks run between two looks at the backend, so that a busy task does not starve completions.
const TASKS_PER_TURN_MAX: usize = 256;

/// How long an ending executor waits for operations that it cancelled before it gives their memory
/// up for lost.
const DRAIN_MAX: Duration = Duration::from_secs(30);

impl Core {
    pub(crate) fn now(&self) -> Instant {
        self.clock.now()
    }

    pub(crate) fn is_simulated(&self) -> bool {
        matches!(self.clock, Clock::Virtual(_))
    }

    pub(crate) fn submit(&self, key: OpKey) {
        let mut ops = self.ops.borrow_mut();
        self.driver.borrow_mut().submit(key, ops.kind_mut(key));
    }

    pub(crate) fn cancel(&self, key: OpKey) {
        self.driver.borrow_mut().cancel(key);
    }

    /// Starts a task, which catches its panics by itself.
    pub(crate) fn spawn(&self, future: LocalFuture) {
        let key = self.tasks.borrow_mut().insert(future, &self.remote);
        self.ready.borrow_mut().push_back(key);
    }

    fn run_ready(&self) {
        let batch = self.ready.borrow().len().min(TASKS_PER_TURN_MAX);
        for _ in 0..batch {
            let next = {
                let mut ready = self.ready.borrow_mut();
                self.driver.borrow_mut().pick_ready(&mut ready)
            };
            let Some(key) = next else { return };
            self.run_task(key);
        }
    }

    fn run_task(&self, key: TaskKey) {
        let Some((mut future, waker)) = self.tasks.borrow_mut().take(key) else { return };
        waker.queued.store(false, Ordering::Release);
        let task_waker = Waker::from(waker);
        let mut context = Context::from_waker(&task_waker);
        if future.as_mut().poll(&mut context).is_ready() {
            // The future is dropped outside of any borrow: its drop may spawn or wake.
            drop(future);
            self.tasks.borrow_mut().remove(key);
        } else {
            self.tasks.borrow_mut().put_back(key, future);
        }
    }

    /// One look at the backend: waits for something to happen if there is nothing to run.
    fn turn(&self, idle: bool) {
        let wait = if !idle || self.remote.has_items() {
            Some(Duration::ZERO)
        } else {
            let next = self.timers.borrow().next_due();
            next.map(|due| due.saturating_since(self.now()))
        };
        let mut completions = std::mem::take(&mut self.driver.borrow_mut().completions);
        {
            let mut ops = self.ops.borrow_mut();
            self.driver.borrow_mut().turn(wait, &mut ops, &mut completions);
        }
        for (key, code) in completions.drain(..) {
            self.finish(key, code);
        }
        self.driver.borrow_mut().give_back(completions);
        self.take_remote();
        let now = self.now();
        loop {
            let due = self.timers.borrow_mut().pop_due(now);
            match due {
                Some(waker) => waker.wake(),
                None => break,
            }
        }
    }

    fn finish(&self, key: OpKey, code: i32) {
        let mut ops = self.ops.borrow_mut();
        let next = if ops.is_abandoned(key) {
            Next::Complete(code)
        } else {
            ops.kind_mut(key).advance(code)
        };
        match next {
            Next::Again => self.driver.borrow_mut().submit(key, ops.kind_mut(key)),
            Next::Complete(code) => {
                let mut completed = ops.complete(key, code);
                drop(ops);
                let waker = completed.waker.take();
                drop(completed);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
        }
    }

    fn take_remote(&self) {
        for item in self.remote.take() {
            match item {
                RemoteItem::Wake(key) => self.make_ready(key),
                RemoteItem::Spawn(make) => self.spawn(make()),
            }
        }
    }

    fn make_ready(&self, key: TaskKey) {
        if key == TaskKey::MAIN {
            self.main_woken.set(true);
        } else {
            self.ready.borrow_mut().push_back(key);
        }
    }

    fn drop_tasks(&self) {
        loop {
            let tasks = std::mem::take(&mut *self.tasks.borrow_mut());
            if tasks.is_empty() {
                break;
            }
            drop(tasks);
        }
        self.ready.borrow_mut().clear();
    }

    fn drain_ops(self: &Rc<Self>) {
        let keys = self.ops.borrow().keys_in_flight();
        for key in keys {
            self.cancel(key);
        }
        let deadline = self.now().after(DRAIN_MAX);
        while self.ops.borrow().in_flight() > 0 {
            let left = deadline.saturating_since(self.now());
            if left.is_zero() {
                tracing::error!("operations of an ended executor never completed: memory is lost");
                // I3: what the kernel still holds must never be freed, nor its ring closed.
                std::mem::forget(Rc::clone(self));
                return;
            }
            let mut completions = Vec::new();
            {
                let mut ops = self.ops.borrow_mut();
                self.driver.borrow_mut().turn(Some(left), &mut ops, &mut completions);
            }
            for (key, code) in completions {
                self.finish(key, code);
            }
        }
    }
}

/// Name of a task: its slot, and a generation that tells a stale name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TaskKey {
    index: u32,
    generation: u32,
}

impl TaskKey {
    /// The future that `block_on` runs, which lives in no slot.
    const MAIN: Self = Self { index: u32::MAX, generation: 0 };
}

struct TaskSlot {
    generation: u32,
    waker: Option<Arc<TaskWaker>>,
    /// Absent while it runs (I1).
    future: Option<LocalFuture>,
}

#[derive(Default)]
struct Tasks {
    slots: Vec<TaskSlot>,
    free: Vec<u32>,
}

impl Tasks {
    fn is_empty(&self) -> bool {
        self.slots.iter().all(|slot| slot.waker.is_none())
    }

    fn insert(&mut self, future: LocalFuture, remote: &Arc<Remote>) -> TaskKey {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(TaskSlot { generation: 0, waker: None, future: None });
            u32::try_from(self.slots.len() - 1).expect("fewer than 2^32 tasks")
        });
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        let key = TaskKey { index, generation: slot.generation };
        // It starts queued: `spawn` puts it in the ready list.
        let queued = AtomicBool::new(true);
        slot.waker = Some(Arc::new(TaskWaker { key, queued, remote: Arc::clone(remote) }));
        slot.future = Some(future);
        key
    }

    fn slot(&mut self, key: TaskKey) -> Option<&mut TaskSlot> {
        self.slots.get_mut(key.index as usize).filter(|slot| slot.generation == key.generation)
    }

    fn take(&mut self, key: TaskKey) -> Option<(LocalFuture, Arc<TaskWaker>)> {
        let slot = self.slot(key)?;
        let waker = slot.waker.clone()?;
        Some((slot.future.take()?, waker))
    }

    fn put_back(&mut self, key: TaskKey, future: LocalFuture) {
        let slot = self.slot(key).expect("a task that runs keeps its slot");
        slot.future = Some(future);
    }

    fn remove(&mut self, key: TaskKey) {
        let slot = self.slot(key).expect("a task that runs keeps its slot");
        slot.waker = None;
        self.free.push(key.index);
    }
}

struct TaskWaker {
    key: TaskKey,
    /// Whether the task is in a ready list already.
    queued: AtomicBool,
    remote: Arc<Remote>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.key != TaskKey::MAIN && self.queued.swap(true, Ordering::AcqRel) {
            return;
        }
        let local = CURRENT.try_with(|current| {
            let current = current.try_borrow().ok()?;
            let core = current.as_ref()?;
            if !Arc::ptr_eq(&core.remote, &self.remote) {
                return None;
            }
            core.make_ready(self.key);
            Some(())
        });
        if !matches!(local, Ok(Some(()))) {
            self.remote.push(RemoteItem::Wake(self.key));
        }
    }
}
