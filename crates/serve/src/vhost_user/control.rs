//! How the session changes the settings of a running queue, and waits for the queue's end.
//!
//! Invariants
//! - I1 A queue checks `version` on every turn and adopts any change before it does anything else;
//!   every change wakes it.
//! - I2 `ended` is set once, when the queue's task is gone: from then on it touches nothing. It is
//!   set by the drop of `Ending`, which belongs to the task from before it exists, so that it is
//!   set even if the executor ends first or never runs the task.

use super::log::DirtyLog;
use super::memory::Memory;
use mica_rt::Doorbell;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use std::time::Duration;

/// The settings of a queue.
#[derive(Clone)]
pub(super) struct QueueSettings {
    /// The version of this copy.
    seen: u64,
    pub(super) enabled: bool,
    pub(super) stop: bool,
    pub(super) memory: Arc<Memory>,
    /// Where written pages are marked, while the machine migrates.
    pub(super) log: Option<Arc<DirtyLog>>,
    /// Where the used ring is, for the log.
    pub(super) used_log_at: Option<u64>,
    call: Option<Arc<Doorbell>>,
    error: Option<Arc<Doorbell>>,
}

impl QueueSettings {
    pub(super) fn new(memory: Arc<Memory>) -> Self {
        Self {
            seen: 0,
            enabled: false,
            stop: false,
            memory,
            log: None,
            used_log_at: None,
            call: None,
            error: None,
        }
    }

    pub(super) fn set_call(&mut self, call: Option<Arc<Doorbell>>) {
        self.call = call;
    }

    pub(super) fn set_error(&mut self, error: Option<Arc<Doorbell>>) {
        self.error = error;
    }

    /// Adopts any change.
    #[inline]
    pub(super) fn refresh(&mut self, control: &Control) {
        if control.version.load(Ordering::Acquire) != self.seen {
            let before = std::mem::replace(self, control.settings());
            let is_same = match (&before.call, &self.call) {
                (Some(before), Some(now)) => Arc::ptr_eq(before, now),
                (before, now) => before.is_none() == now.is_none(),
            };
            // Earlier completions went to the old descriptor, which nobody may listen to now.
            if !is_same {
                self.call();
            }
        }
    }

    /// Notifies the driver that requests have ended.
    pub(super) fn call(&self) {
        if let Some(call) = &self.call {
            call.ring();
        }
    }

    /// Notifies the front end that the queue is broken.
    pub(super) fn report_error(&self) {
        if let Some(error) = &self.error {
            error.ring();
        }
    }
}

/// The session's end of a queue.
pub(super) struct Control {
    version: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    settings: QueueSettings,
    waker: Option<Waker>,
    ended: bool,
    base: Option<u16>,
}

impl Control {
    pub(super) fn new(settings: QueueSettings) -> Arc<Self> {
        let state = State { settings, waker: None, ended: false, base: None };
        Arc::new(Self {
            version: AtomicU64::new(0),
            state: Mutex::new(state),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Changes the settings of the queue (I1).
    pub(super) fn update(&self, change: impl FnOnce(&mut QueueSettings)) {
        let waker = {
            let mut state = self.lock();
            change(&mut state.settings);
            state.settings.seen += 1;
            self.version.store(state.settings.seen, Ordering::Release);
            state.waker.clone()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(super) fn settings(&self) -> QueueSettings {
        self.lock().settings.clone()
    }

    /// Sets the waker that changes wake.
    pub(super) fn set_waker(&self, waker: &Waker) {
        let mut state = self.lock();
        match &mut state.waker {
            Some(known) if known.will_wake(waker) => {}
            known => *known = Some(waker.clone()),
        }
    }

    /// The queue stopped before request `base`.
    pub(super) fn stopped(&self, base: u16) {
        self.lock().base = Some(base);
    }

    /// The queue's task is gone.
    fn ended(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    /// Stops the queue and waits until it has, for as long as its disk takes for what is in flight:
    /// guest memory is in the hands of the kernel until then. Gives the index of the first request
    /// that was not begun, if it ended properly.
    pub(super) fn stop(&self) -> Option<u16> {
        self.update(|settings| settings.stop = true);
        let mut state = self.lock();
        while !state.ended {
            let waited = self.changed.wait_for(&mut state, STOP_WARNING);
            if waited.timed_out() && !state.ended {
                tracing::warn!("a queue still waits for requests in flight before it stops");
            }
        }
        state.base
    }
}

/// How long a stop takes before that is worth a word, and again after that.
const STOP_WARNING: Duration = Duration::from_secs(10);

/// Dropping this signals the end of the queue (I2).
pub(super) struct Ending(pub(super) Arc<Control>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.ended();
    }
}
