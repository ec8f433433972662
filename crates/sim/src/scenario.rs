//! Runs a scenario from many seeds and reports how to replay the one that fails.

use crate::World;
use mica_rt::{Backend, Executor};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// When set, scenarios run from this seed alone.
pub const SEED_VARIABLE: &str = "MICA_SIM_SEED";

/// When set, scenarios run from this many seeds: for overnight runs.
pub const RUNS_VARIABLE: &str = "MICA_SIM_RUNS";

/// When set, the first of these seeds.
pub const FIRST_VARIABLE: &str = "MICA_SIM_FIRST";

/// Runs `body` in a world and an executor of its own for each of `runs` seeds. If one fails, prints
/// the command that replays it.
///
/// # Panics
/// As `body` does.
pub fn scenario<F: Future<Output = ()>>(runs: u64, body: impl Fn(World) -> F) {
    let number = |variable| {
        let text = std::env::var(variable).ok()?;
        Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{variable} is a number, not {text:?}")))
    };
    let seeds = match number(SEED_VARIABLE) {
        Some(seed) => seed..seed.saturating_add(1),
        None => {
            let first = number(FIRST_VARIABLE).unwrap_or(0);
            first..first + number(RUNS_VARIABLE).unwrap_or(runs)
        }
    };
    for seed in seeds {
        let run = AssertUnwindSafe(|| {
            let executor =
                Executor::new(Backend::Sim { seed }).expect("the simulator needs one eventfd");
            executor.block_on(body(World::new(seed)));
        });
        if let Err(panic) = catch_unwind(run) {
            eprintln!("failed from seed {seed}; to replay it:\n  {}", replay_command(seed));
            resume_unwind(panic);
        }
    }
}

fn replay_command(seed: u64) -> String {
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_else(|_| "<package>".to_owned());
    let thread = std::thread::current();
    let test = thread.name().filter(|name| *name != "main").unwrap_or("<test>");
    format!("{SEED_VARIABLE}={seed} cargo test -p {package} {test} -- --exact --nocapture")
}
