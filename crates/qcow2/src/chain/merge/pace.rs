//! A merge yields to the guest, and a guest that writes to the merge, as far as that would not end
//! in time otherwise.
//!
//! While a guest only reads, the merge takes a part of the time. While it writes, the merge is to
//! take at most [`DUE_TIMES`] as long as it would alone. How long that is shows in what was copied
//! in the shortest time; so that this is known early under any load, the guest's first writes after
//! the merge began are slowed down. Ahead of that schedule the merge rests. If it falls behind,
//! every change of the disk waits for a moment before it begins, which becomes longer step by step
//! until the merge keeps up, and shorter again after that, or while there is nothing to copy.
//!
//! Invariants
//! - I1 No change waits longer than [`WAIT_MAX`], and none after the merge has ended, or while it
//!   is paused.

use crate::chain::Chain;
use crate::layer::Layer;
use mica_block::{MergeControl, MergeProgress};
use mica_rt::Instant;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// While the guest has requests in flight, the merge rests this many times as long as its last step
/// took: it takes at most a quarter of the time.
const REST_FACTOR: u32 = 3;
/// It never rests longer than this after a step, so that it ends under any load.
const REST_MAX: Duration = Duration::from_millis(50);
/// How many times as long as alone the merge takes while the guest writes: somewhat less than
/// twice, as its end takes time, too.
const DUE_TIMES: f64 = 1.6;
/// Bytes over which it is measured how fast a merge is.
const WINDOW_BYTES: u64 = 4 << 20;
/// For how long a change waits at first, while it is found out how fast the merge is alone, and how
/// long that is tried.
const FIRST_WAIT: Duration = Duration::from_millis(2);
const FIRST_TRIED: Duration = Duration::from_millis(250);
/// For how long a change waits at least, if at all, and at most.
const WAIT_MIN: Duration = Duration::from_micros(50);
const WAIT_MAX: Duration = Duration::from_millis(20);

/// What slows down changes of the disk during a merge.
#[derive(Default)]
pub(in crate::chain) struct Brake {
    /// Asked by every change.
    is_on: AtomicBool,
    wait_us: AtomicU64,
    /// Whether a change came since the merge last looked.
    is_felt: AtomicBool,
}

impl Brake {
    /// How long a change has to wait before it begins.
    #[inline]
    pub(in crate::chain) fn wait(&self) -> Duration {
        match self.is_on.load(Ordering::Relaxed) {
            false => Duration::ZERO,
            true => self.wait_now(),
        }
    }

    #[cold]
    fn wait_now(&self) -> Duration {
        self.is_felt.store(true, Ordering::Relaxed);
        Duration::from_micros(self.wait_us.load(Ordering::Relaxed))
    }

    fn set(&self, wait: Duration) {
        let wait_us = u64::try_from(wait.min(WAIT_MAX).as_micros()).expect("milliseconds");
        self.wait_us.store(wait_us, Ordering::Relaxed);
    }

    fn turn(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Relaxed);
    }

    fn take_felt(&self) -> bool {
        self.is_felt.swap(false, Ordering::Relaxed)
    }
}

/// What a merge has done, and by when it should have.
#[derive(Default)]
struct Schedule {
    copied: u64,
    /// The time for what was done without copying.
    other: Duration,
    /// The present window.
    window: (u64, Duration),
    /// Seconds for a byte, in the fastest window.
    alone: Option<f64>,
    /// For how long it was at work, or rested for a guest that writes.
    elapsed: Duration,
}

impl Schedule {
    /// A step copied so many bytes in this time.
    fn add(&mut self, bytes: u64, took: Duration) {
        self.elapsed += took;
        if bytes == 0 {
            self.other += took;
            return;
        }
        self.copied += bytes;
        self.window.0 += bytes;
        self.window.1 += took;
        if self.window.0 >= WINDOW_BYTES {
            let found = self.pace_of_window();
            self.alone = Some(self.alone.map_or(found, |known| known.min(found)));
            self.window = Default::default();
        }
    }

    fn pace_of_window(&self) -> f64 {
        self.window.1.as_secs_f64() / self.window.0.max(1) as f64
    }

    /// Whether it is not known yet how fast the merge is alone.
    fn is_new(&self) -> bool {
        self.alone.is_none()
    }

    /// By how many seconds the merge is ahead of its schedule; negative if it is behind.
    fn ahead(&self) -> f64 {
        let alone = self.alone.unwrap_or_else(|| self.pace_of_window());
        let due = alone.mul_add(self.copied as f64, self.other.as_secs_f64()) * DUE_TIMES;
        due - self.elapsed.as_secs_f64()
    }

    /// How long changes are to wait, after they waited for `wait`.
    fn wait_after(&self, wait: Duration) -> Duration {
        match self.ahead() {
            _ if self.is_new() && self.elapsed < FIRST_TRIED => FIRST_WAIT,
            ahead if ahead < 0.0 => (wait * 5 / 4).clamp(WAIT_MIN, WAIT_MAX),
            _ => shorter(wait),
        }
    }
}

/// What follows a `wait` that is not needed.
fn shorter(wait: Duration) -> Duration {
    if wait <= WAIT_MIN { Duration::ZERO } else { wait * 4 / 5 }
}

/// The steps of a merge.
pub(super) struct Pace<'a> {
    chain: &'a Chain,
    control: &'a dyn MergeControl,
    began: Option<Instant>,
    /// Whether nothing was done since the step before.
    is_idle: bool,
    /// Bytes that were copied before the present step.
    copied: u64,
    /// As [`MergeProgress::expected`].
    expected: (u64, u64),
    schedule: Schedule,
    wait: Duration,
    /// How long [`Self::ask`] waited since that was last taken.
    rested: Duration,
}

impl<'a> Pace<'a> {
    /// The pace of a merge of these `layers` of `chain` into another one.
    pub(super) fn new(
        chain: &'a Chain,
        layers: &[Arc<Layer>],
        control: &'a dyn MergeControl,
    ) -> Self {
        // Only an estimate rests on it.
        let lens = layers.iter().map(|layer| layer.data.len().unwrap_or(0).min(layer.len()));
        let expected = (lens.clone().max().unwrap_or(0), lens.sum());
        let (schedule, wait) = (Schedule::default(), FIRST_WAIT);
        chain.merging.brake.set(wait);
        chain.merging.brake.turn(true);
        let (began, is_idle) = (None, false);
        let (copied, rested) = (0, Duration::ZERO);
        Self { chain, control, began, is_idle, copied, expected, schedule, wait, rested }
    }

    /// Waits for the guest, after a step that did something, and for whoever controls the merge.
    pub(super) async fn step(&mut self, progress: MergeProgress) -> ControlFlow<()> {
        if let Some(began) = self.began.take() {
            let took = mica_rt::now().saturating_since(began);
            self.schedule.add(progress.copied.saturating_sub(self.copied), took);
            self.yield_to_guest(took).await;
            self.is_idle = false;
        } else if std::mem::replace(&mut self.is_idle, true) {
            // It only looks for what to copy.
            self.set_wait(shorter(self.wait));
        }
        self.copied = progress.copied;
        self.consult(progress).await
    }

    /// Waits for whoever controls the merge, and may have paused it.
    async fn consult(&self, progress: MergeProgress) -> ControlFlow<()> {
        let brake = &self.chain.merging.brake;
        brake.turn(false);
        let told = self.control.step(MergeProgress { expected: self.expected, ..progress }).await;
        brake.turn(true);
        told
    }

    fn set_wait(&mut self, wait: Duration) {
        self.wait = wait;
        self.chain.merging.brake.set(wait);
    }

    async fn yield_to_guest(&mut self, took: Duration) {
        let most = took.saturating_mul(REST_FACTOR).min(REST_MAX);
        self.set_wait(self.schedule.wait_after(self.wait));
        if self.chain.merging.brake.take_felt() {
            let ahead = Duration::try_from_secs_f64(self.schedule.ahead()).unwrap_or_default();
            let rest = ahead.min(most);
            if !rest.is_zero() {
                let start = mica_rt::now();
                mica_rt::sleep(rest).await;
                self.schedule.elapsed += mica_rt::now().saturating_since(start);
            }
        } else if !self.chain.gate.is_quiet() {
            mica_rt::sleep(most).await;
        }
    }

    /// Waits for whoever controls the merge, and not for the guest.
    pub(super) async fn ask(&mut self, progress: MergeProgress) -> ControlFlow<()> {
        self.began = None;
        let asked = mica_rt::now();
        let told = self.consult(progress).await;
        self.rested += mica_rt::now().saturating_since(asked);
        told
    }

    /// How long [`Self::ask`] waited since this was last called: the merge was paused meanwhile.
    pub(super) fn take_rested(&mut self) -> Duration {
        std::mem::take(&mut self.rested)
    }

    /// As [`Self::ask`] when all `copied` bytes, up to `end`, are where they belong: the merge may
    /// still rest, or be cancelled, for as long as the layers are there.
    pub(super) async fn ask_at_end(&mut self, end: u64, copied: u64) -> ControlFlow<()> {
        let all = MergeProgress { done: end, total: end, copied, ..MergeProgress::default() };
        self.ask(MergeProgress { is_ending: true, ..all }).await
    }

    /// The step has done nothing.
    pub(super) fn forget(&mut self) {
        self.began = None;
    }

    /// A step begins that reads or writes.
    pub(super) fn begin(&mut self) {
        self.began = Some(mica_rt::now());
    }
}

impl Drop for Pace<'_> {
    fn drop(&mut self) {
        self.chain.merging.brake.turn(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: u64 = 1 << 20;

    fn millis(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn changes_wait_at_first_until_it_is_known_how_fast_the_merge_is_alone() {
        let mut schedule = Schedule::default();
        assert_eq!(schedule.wait_after(FIRST_WAIT), FIRST_WAIT);
        (0..WINDOW_BYTES / STEP).for_each(|_| schedule.add(STEP, millis(10)));
        assert!(schedule.wait_after(FIRST_WAIT) < FIRST_WAIT);
        // Nor for long if there is nothing to copy.
        let mut schedule = Schedule::default();
        schedule.add(0, FIRST_TRIED);
        assert!(schedule.wait_after(FIRST_WAIT) < FIRST_WAIT);
    }

    #[test]
    fn changes_wait_ever_longer_within_bounds_while_the_merge_is_behind_and_then_less() {
        let mut schedule = Schedule::default();
        (0..4).for_each(|_| schedule.add(STEP, millis(10)));
        assert!(schedule.ahead() > 0.0, "what it has done, it has done in time");
        (0..4).for_each(|_| schedule.add(STEP, millis(100)));
        assert!(schedule.ahead() < 0.0);
        let mut wait = Duration::ZERO;
        for _ in 0..100 {
            let next = schedule.wait_after(wait);
            assert!(next > wait || next == WAIT_MAX);
            wait = next;
        }
        assert_eq!(wait, WAIT_MAX);
        (0..200).for_each(|_| schedule.add(STEP, millis(10)));
        assert!(schedule.ahead() > 0.0, "it caught up");
        (0..100).for_each(|_| wait = schedule.wait_after(wait));
        assert_eq!(wait, Duration::ZERO);
    }
}
