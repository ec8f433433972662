//! The parts of a thread's executor, and how tasks, timers and operations find it.
//!
//! Invariants
//! - I1 A task is polled only on its executor's thread, and by one call at a time.
//! - I2 A wake-up is never lost: a task woken while it runs is run again.
//! - I3 The executor ends only after every operation in flight completed or was cancelled, so that
//!   the kernel never writes into freed memory.

use crate::backend::{Backend, Driver};
use crate::clock::{Clock, Instant, Timers};
use crate::op::{Next, OpKey, Ops};
use crate::remote::{Remote, RemoteItem};
use crate::task_key::{LocalFuture, TaskKey};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

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

/// Whether this thread runs an executor.
pub(crate) fn in_executor() -> bool {
    CURRENT.with(|current| current.borrow().is_some())
}

/// Makes an executor the current one of this thread, for as long as this lives.
pub(crate) struct Entered {
    previous: Option<Rc<Core>>,
}

impl Entered {
    pub(crate) fn new(core: Rc<Core>) -> Self {
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
    pub(crate) driver: RefCell<Driver>,
    tasks: RefCell<Tasks>,
    pub(crate) ready: RefCell<VecDeque<TaskKey>>,
    pub(crate) timers: RefCell<Timers>,
    clock: Clock,
    pub(crate) remote: Arc<Remote>,
    pub(crate) main_woken: Cell<bool>,
}

/// Tasks run between two polls of the backend, so that a busy task does not starve completions.
const TASKS_PER_TURN_MAX: usize = 256;

/// How long an executor that shuts down waits for operations that it cancelled before it leaks
/// their memory.
const DRAIN_MAX: Duration = Duration::from_secs(30);

impl Core {
    pub(crate) fn new(backend: Backend) -> io::Result<Rc<Self>> {
        let remote = Arc::new(Remote::new()?);
        let driver = Driver::new(backend, &remote)?;
        let clock = driver.clock();
        Ok(Rc::new(Self {
            ops: RefCell::default(),
            driver: RefCell::new(driver),
            tasks: RefCell::default(),
            ready: RefCell::default(),
            timers: RefCell::default(),
            clock,
            remote,
            main_woken: Cell::new(true),
        }))
    }

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

    /// Starts a task, which catches its own panics.
    pub(crate) fn spawn(&self, future: LocalFuture) {
        let key = self.tasks.borrow_mut().insert(future, &self.remote);
        self.ready.borrow_mut().push_back(key);
    }

    pub(crate) fn run_ready(&self) {
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

    /// Polls the backend once; waits for something to happen if there is nothing to run.
    pub(crate) fn turn(&self, idle: bool) {
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

    pub(crate) fn drop_tasks(&self) {
        loop {
            let tasks = std::mem::take(&mut *self.tasks.borrow_mut());
            if tasks.is_empty() {
                break;
            }
            drop(tasks);
        }
        self.ready.borrow_mut().clear();
    }

    pub(crate) fn drain_ops(self: &Rc<Self>) {
        let keys = self.ops.borrow().keys_in_flight();
        for key in keys {
            self.cancel(key);
        }
        let deadline = self.now().after(DRAIN_MAX);
        while self.ops.borrow().in_flight() > 0 {
            let left = deadline.saturating_since(self.now());
            if left.is_zero() {
                tracing::error!(
                    "operations of an ended executor never completed: their memory is leaked"
                );
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

pub(crate) struct TaskWaker {
    key: TaskKey,
    /// Whether the task is already in a ready list.
    queued: AtomicBool,
    remote: Arc<Remote>,
}

impl TaskWaker {
    /// The waker of the future that `block_on` runs.
    pub(crate) fn main(remote: &Arc<Remote>) -> Waker {
        let (key, queued) = (TaskKey::MAIN, AtomicBool::new(false));
        Waker::from(Arc::new(Self { key, queued, remote: Arc::clone(remote) }))
    }
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
