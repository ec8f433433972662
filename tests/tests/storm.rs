//! The storm's short form: some chains of random shape go through kills, takeovers, QEMU's own
//! writes, full file systems and much else, and every sector is judged. `cargo xtask storm` is the
//! long form, and replays a failing seed.
//!
//! `MICA_STORM_CHAINS` says how many chains, `MICA_STORM_SEED` the seed of the first; volumes have
//! a test of their own, and `MICA_STORM_VOLUMES` says how many of these seeds; so have disks whose
//! layers come and go, with `MICA_STORM_LINEAGES`, and chains at rest, with `MICA_STORM_VERBS`.

use mica_tests::storm::{self, Kinds, Options, Summary};
use mica_tests::{mica, tools};
use std::time::Duration;

const CHAINS: u64 = 14;
const VOLUMES: u64 = 8;
const LINEAGES: u64 = 3;
const VERBS: u64 = 4;
/// No seed about volumes is begun after this.
const VOLUMES_LIMIT: Duration = Duration::from_secs(25);

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().expect("a number"))
}

fn options(chains: u64, limit: Option<Duration>, kinds: Kinds) -> Options {
    let keep = std::path::absolute(env!("CARGO_TARGET_TMPDIR")).expect("a folder").join("storm");
    let (binary, seed) = (mica::binary().to_owned(), number("MICA_STORM_SEED", 1));
    Options { binary, chains, repeat: 1, seed, limit, kinds, threads: 2, keep }
}

/// Runs it, and says what was left out.
#[track_caller]
fn found_nothing(options: &Options) -> Summary {
    let summary = Summary::default();
    storm::run(options, &summary).expect("it can begin");
    let left_out = summary.left_out.lock().clone();
    left_out.iter().for_each(|what| tools::skip(&format!("part of the storm: {what}")));
    let told: Vec<_> = summary.findings().iter().map(ToString::to_string).collect();
    assert!(told.is_empty(), "{}", told.join("\n"));
    summary
}

#[test]
fn random_chains_hold_what_they_must_whatever_happens_to_them() {
    if !tools::present(&storm::TOOLS) {
        return;
    }
    let others = ["volume", "lineage", "verbs"].map(str::to_owned);
    let kinds = Kinds::parse(&[], &others).expect("they are kinds");
    let options = options(number("MICA_STORM_CHAINS", CHAINS), None, kinds);
    let summary = found_nothing(&options);
    let counts = &summary.counts;
    assert_eq!(counts.chains.get(), options.chains);
    assert!(counts.lives.get() >= options.chains && counts.reads.get() > 0, "{counts:?}");
}

#[test]
fn layers_that_come_and_go_hold_what_they_must() {
    if !tools::present(&storm::TOOLS) {
        return;
    }
    let kinds = Kinds::parse(&["lineage".to_owned()], &[]).expect("it is a kind");
    let summary = found_nothing(&options(number("MICA_STORM_LINEAGES", LINEAGES), None, kinds));
    let counts = &summary.counts;
    assert!(counts.lineages.get() > 0 && counts.lives.get() > counts.lineages.get(), "{counts:?}");
    let layers = counts.layers.get() + counts.states.get() + counts.merges.get();
    assert!(layers > 0 && counts.checks.get() > 0, "{counts:?}");
}

#[test]
fn verbs_that_are_killed_leave_chains_as_they_may() {
    if !tools::present(&storm::TOOLS) {
        return;
    }
    let kinds = Kinds::parse(&["verbs".to_owned()], &[]).expect("it is a kind");
    let summary = found_nothing(&options(number("MICA_STORM_VERBS", VERBS), None, kinds));
    let counts = &summary.counts;
    assert!(counts.at_rest.get() > 0 && counts.verbs_at_rest.get() > 0, "{counts:?}");
    assert!(counts.verbs_at_rest_killed.get() > 0 && counts.checks.get() > 0, "{counts:?}");
}

#[test]
fn random_volumes_hold_what_they_must_whatever_happens_to_them() {
    if !tools::present(&storm::TOOLS) {
        return;
    }
    let kinds = Kinds::parse(&["volume".to_owned()], &[]).expect("it is a kind");
    let limit = Some(VOLUMES_LIMIT);
    let summary = found_nothing(&options(number("MICA_STORM_VOLUMES", VOLUMES), limit, kinds));
    let counts = &summary.counts;
    assert!(counts.volumes.get() > 0 && counts.lives.get() > counts.volumes.get(), "{counts:?}");
    assert!(counts.kills.get() > 0 && counts.requests.get() > 0, "{counts:?}");
}
