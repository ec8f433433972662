//! The storm's short form: some chains of random shape go through kills, takeovers, QEMU's own
//! writes, full file systems and much else, and every sector is judged. `cargo xtask storm` is the
//! long form, and replays a failing seed.
//!
//! `MICA_STORM_CHAINS` says how many chains, `MICA_STORM_SEED` the seed of the first.

use mica_tests::storm::{self, Kinds, Options, Summary};
use mica_tests::{mica, tools};

const CHAINS: u64 = 24;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn random_chains_hold_what_they_must_whatever_happens_to_them() {
    if !tools::present(&storm::TOOLS) {
        return;
    }
    let keep = std::path::absolute(env!("CARGO_TARGET_TMPDIR")).expect("a folder").join("storm");
    let options = Options {
        binary: mica::binary().to_owned(),
        chains: number("MICA_STORM_CHAINS", CHAINS),
        repeat: 1,
        seed: number("MICA_STORM_SEED", 1),
        limit: None,
        kinds: Kinds::parse(&[], &[]).expect("they are kinds"),
        threads: 2,
        keep,
    };
    let summary = Summary::default();
    storm::run(&options, &summary).expect("it can begin");
    let left_out = summary.left_out.lock().expect("sound").clone();
    left_out.iter().for_each(|what| tools::skip(&format!("part of the storm: {what}")));
    let told: Vec<_> = summary.findings().iter().map(ToString::to_string).collect();
    assert!(told.is_empty(), "{}", told.join("\n"));
    let counts = &summary.counts;
    assert_eq!(counts.chains.get(), options.chains);
    assert!(counts.lives.get() >= options.chains && counts.reads.get() > 0, "{counts:?}");
}
