//! The server is killed and replaced, under load: how long the guest would have stalled, and
//! whether anything is lost.

use super::device::{check, device};
use super::{Context, QUEUES};
use crate::chains::Chain;
use crate::load::ratio;
use crate::load::vhost::{Absence, Access, DiskLoad, Done, run};
use crate::peers::{Peer, Running};
use crate::places::owned_by_active;
use crate::samples::Sample;
use anyhow::{Context as _, Result, anyhow, bail, ensure};
use mica_tests::clock;
use std::time::Duration;

/// Kills in a run.
const KILLS: u32 = 5;
/// How long the load runs before each kill, and after the last.
const BETWEEN: Duration = Duration::from_millis(700);
/// How long an image may stay locked when its writer was killed.
const LOCK_LIMIT: Duration = Duration::from_secs(10);
const LOCK_PAUSE: Duration = Duration::from_millis(1);
/// Requests in flight on each queue.
const DEPTH: usize = 8;

/// Kills and restarts `peer` under random writes to the active layer of `chain`.
///
/// # Errors
/// If the server does not come back, or requests failed, or anything is lost.
pub(super) fn killed(
    context: &Context<'_>,
    peer: &Peer,
    chain: &Chain,
    sample: &mut Sample,
) -> Result<()> {
    let places = owned_by_active(&chain.owners, chain.layers);
    let start = || peer.start(&chain.image, "qcow2", &[]);
    let running = start()?;
    let mut device = device(context, peer, QUEUES)?;
    let load = DiskLoad {
        access: Access::Rewrite(&places),
        depth: DEPTH,
        limit: BETWEEN * (KILLS + 1),
        seed: sample.repeat + 1,
        absence: Absence::IsWaitedFor,
    };
    let (running, done) = std::thread::scope(|scope| {
        let load = scope.spawn(move || run(&mut device, &load));
        let killed = kills(running, start, sample);
        let done = load.join().map_err(|_panic| anyhow!("the load generator panicked"))?;
        anyhow::Ok((killed?, done?))
    })?;
    let Done { outcome, written, absences, queues: _ } = done;
    sample.put("kills", f64::from(KILLS));
    sample.put("absences", f64::from(absences));
    sample.put("longest_stall_ms", outcome.latency.max_us() / 1e3);
    sample.put("writes", ratio(outcome.latency.total(), 1));
    sample.put("failed", ratio(outcome.failed, 1));
    let kept = check(context, peer, &written);
    sample.put("lost", if kept.is_ok() { 0.0 } else { 1.0 });
    kept.context("LOST WRITES")?;
    ensure!(outcome.failed == 0, "{} writes failed", outcome.failed);
    ensure!(absences > 0, "the load generator saw no absence");
    running.stop()?;
    Ok(())
}

/// Kills `running` and its successors; returns the last of them. Records the longest time until the
/// next one served.
fn kills(
    mut running: Running,
    start: impl Fn() -> Result<Running>,
    sample: &mut Sample,
) -> Result<Running> {
    let mut longest = Duration::ZERO;
    for _ in 0..KILLS {
        clock::sleep(BETWEEN);
        let begun = clock::now();
        // SIGKILL.
        drop(running);
        // The kernel finishes a ring's requests in flight after the process has died, and only then
        // frees the locks.
        let mut refusal = None;
        let next = clock::poll(LOCK_LIMIT, LOCK_PAUSE, || {
            start().map_err(|error| refusal = Some(error)).ok()
        });
        running = match (next, refusal) {
            (Some(next), _) => next,
            (None, Some(refusal)) => return Err(refusal.context("it never came back")),
            (None, None) => bail!("it never came back"),
        };
        longest = longest.max(begun.elapsed());
    }
    sample.put("longest_absence_ms", longest.as_secs_f64() * 1e3);
    Ok(running)
}
