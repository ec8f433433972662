//! A merge yields to the guest.

use crate::chain::Chain;
use mica_block::{MergeControl, MergeProgress};
use mica_rt::Instant;
use std::ops::ControlFlow;
use std::time::Duration;

/// While the guest has requests in flight, the merge rests this many times as long as its last step
/// took: it takes at most a quarter of the time.
const REST_FACTOR: u32 = 3;
/// It never rests longer than this after a step, so that it ends under any load.
const REST_MAX: Duration = Duration::from_millis(50);

/// The steps of a merge.
pub(super) struct Pace<'a> {
    chain: &'a Chain,
    control: &'a dyn MergeControl,
    began: Option<Instant>,
}

impl<'a> Pace<'a> {
    pub(super) fn new(chain: &'a Chain, control: &'a dyn MergeControl) -> Self {
        Self { chain, control, began: None }
    }

    /// Waits for the guest, after a step that did something, and for whoever controls the merge.
    pub(super) async fn step(&mut self, progress: MergeProgress) -> ControlFlow<()> {
        if let Some(began) = self.began.take()
            && !self.chain.gate.is_quiet()
        {
            let rest =
                mica_rt::now().saturating_since(began).saturating_mul(REST_FACTOR).min(REST_MAX);
            mica_rt::sleep(rest).await;
        }
        self.control.step(progress).await?;
        ControlFlow::Continue(())
    }

    /// Waits for whoever controls the merge, and not for the guest.
    pub(super) async fn ask(&mut self, progress: MergeProgress) -> ControlFlow<()> {
        self.began = None;
        self.control.step(progress).await
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
