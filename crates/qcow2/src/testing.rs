//! What the models beside the modules share.

mod folder;

pub(crate) use folder::{CLUSTER_BYTES, Folder, REFCOUNTS_AT};

use futures_util::FutureExt;
use mica_block::Error;
use std::cell::RefCell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// When set, models run from this seed alone.
const SEED_VARIABLE: &str = "MICA_MODEL_SEED";

/// When set, models run from this many seeds: for overnight runs.
const RUNS_VARIABLE: &str = "MICA_MODEL_RUNS";

/// Runs `body` from each of `runs` seeds. If one fails, prints the command that replays it.
pub(crate) fn from_seeds(runs: u64, body: impl Fn(u64)) {
    let number = |variable| {
        let text = std::env::var(variable).ok()?;
        Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{variable} is a number, not {text:?}")))
    };
    let seeds = match number(SEED_VARIABLE) {
        Some(seed) => seed..seed.saturating_add(1),
        None => 0..number(RUNS_VARIABLE).unwrap_or(runs),
    };
    for seed in seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| body(seed))) {
            let thread = std::thread::current();
            let test = thread.name().unwrap_or("<test>");
            eprintln!(
                "failed from seed {seed}; to replay it:\n  {SEED_VARIABLE}={seed} cargo test \
                 -p mica-qcow2 --lib {test} -- --exact --nocapture"
            );
            resume_unwind(panic);
        }
    }
}

/// The output of a future that waits for nothing.
pub(crate) fn at_once<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().expect("it waits for nothing")
}

/// As [`at_once`], for one that succeeds.
pub(crate) fn done_at_once<T>(future: impl Future<Output = Result<T, Error>>) -> T {
    at_once(future).expect("nothing fails here")
}

type Watcher = Box<dyn FnMut(&'static str)>;

thread_local! {
    static WATCHER: RefCell<Option<Watcher>> = const { RefCell::new(None) };
}

/// The code under test is between two steps that other threads may come between: whoever watches
/// this thread is told, and told nothing of what it does itself.
pub(crate) fn pass(step: &'static str) {
    if let Some(mut watcher) = WATCHER.take() {
        watcher(step);
        WATCHER.set(Some(watcher));
    }
}

/// Runs `body`, and has `watcher` told what it passes.
pub(crate) async fn watched<T>(
    watcher: impl FnMut(&'static str) + 'static,
    body: impl Future<Output = T>,
) -> T {
    WATCHER.set(Some(Box::new(watcher)));
    let output = body.await;
    WATCHER.set(None);
    output
}
