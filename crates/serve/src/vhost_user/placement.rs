//! Which workers serve the queues of a device.
//!
//! As few as do. A worker with several queues takes what is there for all of them in one turn,
//! wakes once for it, and has the redo log for itself; a worker of its own leaves a queue with few
//! requests alone with the whole cost of each. So the queues of a device begin on one worker. If
//! that has no time left and finds many requests at a time, they are spread over twice as many
//! workers; if it finds few, that is tried after a while, if a processor of the machine is idle.
//! They are gathered again if it brought nothing, or once the workers find few requests at a time
//! and take processors from others.
//!
//! A queue moves between two requests; see `queue`. Devices begin on different workers.
//!
//! Invariants
//! - I1 `width` is at least 1 and at most the number of workers, and changes by factors of two, or
//!   to that number.
//! - I2 Two changes are at least [`WINDOW`] apart, and a spread that brought nothing is tried again
//!   after twice the time that it took until the last trial.

use crate::idle::IdleTime;
use crate::workers::Workers;
use mica_rt::{Handle, Instant};
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// How often a busy queue reports what it did.
const REPORT: Duration = Duration::from_millis(4);
/// What is judged at a time.
const WINDOW: Duration = Duration::from_millis(20);
/// Over which idle time is measured, which the system counts in hundredths of seconds.
const IDLE_WINDOW: Duration = Duration::from_millis(60);
/// A longer time without a verdict says nothing: the device was idle.
const STALE: Duration = Duration::from_millis(200);
/// From this part of a processor on a worker has no time left: the rest is what others took from
/// it.
const SATURATED: f64 = 0.85;
/// Idle processors from which on there is room for another worker, and below which there is none
/// for those that there are.
const ROOM: f64 = 0.5;
const NO_ROOM: f64 = 0.1;
/// Requests that a turn finds, from which on another worker loses nothing, and below which it
/// does.
const MANY: f64 = 8.0;
const FEW: f64 = 4.0;
/// What a spread has to bring.
const GAIN: f64 = 1.15;
/// Windows of a trial, the first of which does not count.
const TRIAL_WINDOWS: u32 = 3;
/// Windows without time left after which queues are spread that find many requests at a time, and
/// after which that is tried with others: for them it rarely pays.
const SATURATED_WINDOWS: u32 = 2;
const TRIED_AFTER_WINDOWS: u32 = 25;
/// Windows without room after which queues are gathered.
const TIGHT_WINDOWS: u32 = 10;
/// Until a spread that brought nothing is tried again.
const BACKOFF_MIN: Duration = Duration::from_secs(2);
const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// Where the queues of a device are.
pub(super) struct Placement {
    workers: Vec<Handle>,
    idle: Arc<IdleTime>,
    /// The worker of the first queue.
    home: usize,
    /// Over how many workers the queues are spread (I1).
    width: AtomicUsize,
    judge: Mutex<Judge>,
}

impl Placement {
    /// All queues on one worker, which is another one for each device. It does not keep the workers
    /// running: a session must not be what ends them.
    pub(super) fn new(workers: &Workers) -> Self {
        let handles = workers.handles().to_vec();
        Self {
            home: workers.next_home(),
            idle: Arc::clone(workers.idle()),
            width: AtomicUsize::new(1),
            judge: Mutex::new(Judge::new(handles.len())),
            workers: handles,
        }
    }

    /// The worker of queue `index`, by its number.
    #[inline]
    pub(super) fn place_of(&self, index: usize) -> usize {
        (self.home + index % self.width.load(Ordering::Relaxed)) % self.workers.len()
    }

    pub(super) fn worker(&self, place: usize) -> &Handle {
        &self.workers[place]
    }

    /// The first worker of the device, which also takes its connections.
    pub(super) fn home(&self) -> &Handle {
        &self.workers[self.home]
    }

    /// Takes the report of a queue, which runs on the calling thread.
    fn report(&self, place: usize, work: Work, now: Instant) {
        // If another report is under way, this one is due again soon.
        let Some(mut judge) = self.judge.try_lock() else { return };
        judge.note(place, work, (now, thread_time()));
        if judge.is_due(now) {
            self.width.store(judge.judge(now, self.idle.read()), Ordering::Relaxed);
        }
    }

    #[cfg(test)]
    pub(super) fn set_width(&self, width: usize) {
        self.width.store(width, Ordering::Relaxed);
    }
}

/// The processor time of the calling thread.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let (seconds, nanoseconds) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or_default(), nanoseconds.unwrap_or_default())
}

/// What a queue did since it last reported.
#[derive(Clone, Copy, Default)]
struct Work {
    queue: usize,
    requests: u32,
    /// Turns that found some.
    turns: u32,
}

/// A queue's account of its work.
pub(super) struct Account {
    work: Work,
    due_at: Instant,
}

impl Account {
    pub(super) fn new(queue: usize, now: Instant) -> Self {
        Self { work: Work { queue, ..Work::default() }, due_at: now.after(REPORT) }
    }

    /// A turn found requests.
    #[inline]
    pub(super) fn note(&mut self, requests: usize) {
        self.work.requests += u32::try_from(requests).unwrap_or(u32::MAX);
        self.work.turns += 1;
    }

    /// Reports it if that is due. The queue is at `place`, on the calling thread.
    #[inline]
    pub(super) fn report_if_due(&mut self, placement: &Placement, place: usize, now: Instant) {
        if now >= self.due_at {
            let Work { queue, .. } = self.work;
            let work = std::mem::replace(&mut self.work, Work { queue, ..Work::default() });
            self.due_at = now.after(REPORT);
            if work.requests > 0 && placement.workers.len() > 1 {
                placement.report(place, work, now);
            }
        }
    }
}

/// When, and how much processor time a worker had used by then.
type Reading = (Instant, Duration);

/// The changes of width.
struct Judge {
    width: usize,
    workers: Vec<Usage>,
    /// The window: when it began, and what was done in it.
    began: Option<Instant>,
    requests: u64,
    turns: u64,
    /// A bit for each queue that did something.
    active: u64,
    /// When idle time was last measured, and the idle processors over the time before.
    idle_at: Option<(Instant, Duration)>,
    idle: Option<f64>,
    trial: Option<Trial>,
    saturated: u32,
    tight: u32,
    /// No change before that (I2).
    hold: Option<Instant>,
    backoff: Duration,
}

/// The processor time of a worker at the end of the last window, and at its last report.
#[derive(Clone, Copy, Default)]
struct Usage {
    before: Option<Reading>,
    last: Option<Reading>,
}

impl Usage {
    /// The part of a processor that it took in between.
    fn share(&self) -> Option<f64> {
        let (before, last) = (self.before?, self.last?);
        let wall = last.0.saturating_since(before.0).as_secs_f64();
        (wall > 0.0).then(|| last.1.saturating_sub(before.1).as_secs_f64() / wall)
    }
}

/// A spread that is to prove itself.
struct Trial {
    /// Requests per second before it.
    before: f64,
    from: usize,
    windows: u32,
    requests: u64,
    wall: Duration,
}

impl Judge {
    fn new(workers: usize) -> Self {
        Self {
            width: 1,
            workers: vec![Usage::default(); workers],
            began: None,
            requests: 0,
            turns: 0,
            active: 0,
            idle_at: None,
            idle: None,
            trial: None,
            saturated: 0,
            tight: 0,
            hold: None,
            backoff: BACKOFF_MIN,
        }
    }

    fn note(&mut self, place: usize, work: Work, reading: Reading) {
        self.requests += u64::from(work.requests);
        self.turns += u64::from(work.turns);
        self.active |= 1 << (work.queue % 64);
        self.workers[place].last = Some(reading);
    }

    fn is_due(&self, now: Instant) -> bool {
        self.began.is_none_or(|began| now.saturating_since(began) >= WINDOW)
    }

    /// Ends a window. Returns the width from now on.
    fn judge(&mut self, now: Instant, idle: Option<Duration>) -> usize {
        let began = self.began.replace(now);
        let requests = std::mem::take(&mut self.requests);
        let turns = std::mem::take(&mut self.turns).max(1);
        let active = std::mem::take(&mut self.active).count_ones();
        let busiest = self.workers.iter().filter_map(Usage::share).fold(0.0, f64::max);
        for usage in &mut self.workers {
            *usage = Usage { before: usage.last.take(), last: None };
        }
        self.note_idle(now, idle);
        let Some(began) = began else { return self.width };
        let wall = now.saturating_since(began);
        if wall > STALE {
            (self.trial, self.saturated, self.tight) = (None, 0, 0);
            return self.width;
        }
        if self.trial.is_some() {
            self.go_on_trying(requests, wall, now);
            return self.width;
        }
        // At most 2^32 a window.
        #[expect(clippy::cast_precision_loss, reason = "a rate is not exact")]
        let (found, rate) = (requests as f64 / turns as f64, requests as f64 / wall.as_secs_f64());
        let is_tight = found < FEW && self.idle.is_some_and(|idle| idle < NO_ROOM);
        self.tight = if is_tight { self.tight + 1 } else { 0 };
        self.saturated = if busiest >= SATURATED { self.saturated + 1 } else { 0 };
        if self.hold.is_some_and(|hold| now < hold) {
            return self.width;
        }
        // Where the system has no such clock there is room; soon after the start nothing is known.
        let has_room = match self.idle {
            Some(idle) => idle >= ROOM,
            None => idle.is_none(),
        };
        let can_spread = self.width < self.workers.len() && active as usize > self.width;
        let is_due = match found >= MANY {
            true => self.saturated >= SATURATED_WINDOWS,
            false => has_room && self.saturated >= TRIED_AFTER_WINDOWS,
        };
        if can_spread && is_due {
            self.trial = Some(Trial {
                before: rate,
                from: self.width,
                windows: 0,
                requests: 0,
                wall: Duration::ZERO,
            });
            self.width = (self.width * 2).min(self.workers.len());
            self.saturated = 0;
        } else if self.width > 1 && self.tight >= TIGHT_WINDOWS {
            self.gather(self.width.div_ceil(2), now);
        }
        self.width
    }

    fn go_on_trying(&mut self, requests: u64, wall: Duration, now: Instant) {
        let Some(mut trial) = self.trial.take() else { return };
        trial.windows += 1;
        if trial.windows > 1 {
            trial.requests += requests;
            trial.wall += wall;
        }
        if trial.windows < TRIAL_WINDOWS {
            self.trial = Some(trial);
            return;
        }
        #[expect(clippy::cast_precision_loss, reason = "a rate is not exact")]
        let rate = trial.requests as f64 / trial.wall.as_secs_f64();
        if rate < trial.before * GAIN {
            self.gather(trial.from, now);
        } else {
            self.backoff = BACKOFF_MIN;
        }
    }

    fn note_idle(&mut self, now: Instant, idle: Option<Duration>) {
        let Some(idle) = idle else { return };
        let Some((at, before)) = self.idle_at else {
            self.idle_at = Some((now, idle));
            return;
        };
        let wall = now.saturating_since(at);
        if wall >= IDLE_WINDOW {
            self.idle_at = Some((now, idle));
            self.idle = Some(idle.saturating_sub(before).as_secs_f64() / wall.as_secs_f64());
        }
    }

    /// Takes back a spread.
    fn gather(&mut self, width: usize, now: Instant) {
        (self.width, self.saturated, self.tight) = (width, 0, 0);
        self.hold = Some(now.after(self.backoff));
        self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_rt::{Backend, Executor, now, sleep};

    /// What a device does in each window.
    #[derive(Clone, Copy)]
    struct Load {
        queues: usize,
        /// That a turn finds.
        found: u32,
        /// The part of its worker's processor that it takes.
        busy: f64,
        /// Idle processors.
        idle: f64,
    }

    const DEEP: Load = Load { queues: 4, found: 20, busy: 0.99, idle: 0.7 };
    const SHALLOW: Load = Load { queues: 4, found: 1, busy: 0.99, idle: 0.0 };

    struct Run {
        judge: Judge,
        idle: Duration,
        used: Duration,
    }

    impl Run {
        fn new(workers: usize) -> Self {
            Self { judge: Judge::new(workers), idle: Duration::ZERO, used: Duration::ZERO }
        }

        /// Some windows of it; `rate` says how many requests there are at a width.
        async fn windows(&mut self, count: u32, load: Load, rate: impl Fn(usize) -> u32) -> usize {
            for _ in 0..count {
                sleep(WINDOW).await;
                self.idle += WINDOW.mul_f64(load.idle);
                self.used += WINDOW.mul_f64(load.busy);
                for queue in 0..load.queues {
                    let requests = rate(self.judge.width) / 4;
                    let work = Work { queue, requests, turns: requests.div_ceil(load.found) };
                    self.judge.note(queue % self.judge.width, work, (now(), self.used));
                }
                if self.judge.is_due(now()) {
                    self.judge.judge(now(), Some(self.idle));
                }
            }
            self.judge.width
        }
    }

    fn simulated(test: impl AsyncFnOnce()) {
        Executor::new(Backend::Sim { seed: 1 }).unwrap().block_on(test());
    }

    #[test]
    fn queues_spread_while_that_pays() {
        simulated(async || {
            let mut run = Run::new(4);
            let all = |width: usize| 5000 * u32::try_from(width).expect("small");
            assert_eq!(run.windows(4, DEEP, all).await, 2);
            assert_eq!(run.windows(20, DEEP, all).await, 4);
        });
    }

    #[test]
    fn spread_that_brings_nothing_is_taken_back_and_tried_ever_more_seldom() {
        simulated(async || {
            let mut run = Run::new(2);
            assert_eq!(run.windows(4, DEEP, |_| 5000).await, 2);
            assert_eq!(run.windows(TRIAL_WINDOWS, DEEP, |_| 5000).await, 1);
            let mut trials = 0;
            for _ in 0..3000 {
                let before = run.judge.width;
                trials += u32::from(run.windows(1, DEEP, |_| 5000).await > before);
            }
            assert!((3..=5).contains(&trials), "{trials} trials in a minute");
        });
    }

    #[test]
    fn few_requests_at_a_time_take_no_processor_from_others() {
        simulated(async || {
            let mut run = Run::new(2);
            assert_eq!(run.windows(50, SHALLOW, |_| 1500).await, 1);
            // One that was spread is gathered.
            let all = |width: usize| 5000 * u32::try_from(width).expect("small");
            assert_eq!(run.windows(20, DEEP, all).await, 2);
            assert_eq!(run.windows(30, SHALLOW, |_| 1500).await, 1);
        });
    }

    #[test]
    fn few_requests_at_a_time_are_tried_on_more_workers_after_a_while() {
        simulated(async || {
            let mut run = Run::new(2);
            let load = Load { idle: 1.0, ..SHALLOW };
            let all = |width: usize| 1500 * u32::try_from(width).expect("small");
            assert_eq!(run.windows(20, load, all).await, 1);
            assert_eq!(run.windows(40, load, all).await, 2);
        });
    }

    #[test]
    fn one_queue_or_a_worker_with_time_left_stays_where_it_is() {
        simulated(async || {
            let mut run = Run::new(2);
            assert_eq!(run.windows(50, Load { queues: 1, ..DEEP }, |_| 5000).await, 1);
            assert_eq!(run.windows(50, Load { busy: 0.5, ..DEEP }, |_| 5000).await, 1);
        });
    }

    #[test]
    fn width_stays_within_the_workers() {
        simulated(async || {
            let mut run = Run::new(3);
            let all = |width: usize| 5000 * u32::try_from(width).expect("small");
            assert_eq!(run.windows(40, DEEP, all).await, 3);
            assert_eq!(run.windows(400, SHALLOW, |_| 1500).await, 1);
        });
    }
}
