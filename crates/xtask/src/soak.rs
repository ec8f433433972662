//! The long forms of random tests: CI runs them for seconds, this for as long as you like.
//!
//! Each is an ordinary test with one variable for the number of repetitions and another for the
//! start of its random numbers. A round runs each of them as often as suits a night; further rounds
//! start elsewhere.

use crate::setup;
use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use mica_tests::{clock, shell};
use std::path::PathBuf;
use std::time::Duration;

/// How long, and what.
#[derive(Args)]
pub(crate) struct Options {
    /// What to run [default: all of it].
    what: Vec<What>,
    /// Multiplier for the overnight counts; at least 0.1, which is a smoke run.
    #[arg(long, default_value_t = 1.0)]
    times: f64,
    /// Repeat rounds until this many hours have passed; one round by default.
    #[arg(long, default_value_t = 0.0)]
    hours: f64,
    /// Seed of the random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The program to test [default: the release build].
    #[arg(long)]
    program: Option<PathBuf>,
}

/// A random test with a long form.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// Power cuts, kills and failing storage, simulated: runs of each scenario.
    Sim,
    /// Power cuts beneath a real kernel and file system: states of each shape of image.
    Cuts,
    /// SIGKILL under clients that write: kills for each shape of image.
    Kills,
    /// SIGKILL, restart and takeover under a guest: of each kind.
    Guests,
    /// Random requests against a plain copy: requests for each shape of image.
    Fsx,
    /// Images with damaged metadata: copies of each image.
    Mutated,
    /// Backups of disks that are served, with kills: so many full ones, each of which 14
    /// incremental ones follow.
    Backups,
    /// The same of one disk under writes that never pause, by NBD alone.
    BackupsUnderLoad,
    /// Messages of NBD clients and vhost-user front ends that are nearly right.
    Hostile,
}

/// How one of them is run.
struct Soak {
    /// What cargo has to test, and parts of the names of the tests.
    test: &'static [&'static str],
    /// The variable that says how often, and how often in a night.
    count: (&'static str, u64),
    /// The variable that says where random numbers begin, if it can be said.
    seed: Option<&'static str>,
}

impl What {
    fn soak(self) -> Soak {
        match self {
            Self::Sim => simulated(),
            Self::Cuts => Soak {
                test: &["mica-tests", "--test", "kernel", "--", "cuts::shapes"],
                count: ("MICA_CUTS", 340),
                seed: Some("MICA_CUT_SEED"),
            },
            Self::Kills => Soak {
                test: &["mica-tests", "--test", "write", "--", "kill::"],
                count: ("MICA_KILLS", 90),
                seed: Some("MICA_KILL_SEED"),
            },
            Self::Guests => Soak {
                test: &["mica-tests", "--test", "guest", "--", "restart::"],
                count: ("MICA_GUEST_KILLS", 50),
                seed: None,
            },
            Self::Fsx => Soak {
                test: &["mica-tests", "--test", "write", "--", "fsx::"],
                count: ("MICA_FSX_OPS", 10_000),
                seed: Some("MICA_FSX_SEED"),
            },
            Self::Mutated => Soak {
                test: &["mica-tests", "--test", "hostile", "--", "mutated::"],
                count: ("MICA_MUTATED", 3400),
                seed: Some("SEED"),
            },
            Self::Backups => Soak {
                test: &["mica-tests", "--test", "backup", "--", "night::"],
                count: ("MICA_BACKUPS", 64),
                seed: Some("MICA_BACKUP_SEED"),
            },
            Self::BackupsUnderLoad => Soak {
                test: &["mica-tests", "--test", "backup", "--", "under_load::states"],
                count: ("MICA_BACKUPS", 64),
                seed: Some("MICA_BACKUP_SEED"),
            },
            Self::Hostile => Soak {
                test: &["mica-serve", "--lib", "--", "hostile::"],
                count: ("MICA_HOSTILE_INPUTS", 20_000),
                seed: None,
            },
        }
    }
}

/// Everything that the simulator drives: all its tests, but for those that do the same each time.
fn simulated() -> Soak {
    Soak {
        test: &[
            "mica-sim",
            "--test",
            "crash",
            "--test",
            "log",
            "--test",
            "volume",
            "--test",
            "world",
            "--",
            "--skip",
            "exhaustive::",
            "--skip",
            "corpus::",
            // It writes for a second or two.
            "--skip",
            "a_load_that_never_pauses",
        ],
        count: ("MICA_SIM_RUNS", 800),
        seed: Some("MICA_SIM_FIRST"),
    }
}

/// Runs it; all of it, even if something fails.
pub(crate) fn run(options: &Options) -> Result<()> {
    ensure!(options.times > 0.0, "--times is a number above 0");
    setup::run()?;
    let program = match &options.program {
        Some(program) => std::path::absolute(program).context("the program")?,
        None => {
            shell::run(&mut shell::cargo(["build", "--release", "--package", "mica", "--locked"]))?;
            shell::target()?.join("release/mica")
        }
    };
    ensure!(program.is_file(), "{} is no program", program.display());
    let all = What::value_variants();
    let what = if options.what.is_empty() { all } else { &options.what };
    let limit = Duration::from_secs_f64(options.hours * 3600.0);
    let start = clock::now();
    let mut told = Vec::new();
    let mut failed = 0_u32;
    for round in 0.. {
        for what in what {
            let soak = what.soak();
            let (variable, nightly) = soak.count;
            let count = scaled(nightly, options.times);
            let seed = options.seed + round * count;
            let mut test = shell::cargo(["test", "--locked", "--package"]);
            test.args(soak.test).arg("--nocapture");
            // A test that cannot run here fails: nobody would find a note about it in so much
            // output.
            test.env("MICA_BIN", &program).env("CI", "1").env(variable, count.to_string());
            test.envs(soak.seed.map(|variable| (variable, seed.to_string())));
            let since = clock::now();
            let outcome = shell::run(&mut test);
            failed += u32::from(outcome.is_err());
            let end = if outcome.is_ok() { "ok" } else { "FAILED" };
            let from = soak.seed.map_or(String::new(), |variable| format!(" {variable}={seed}"));
            let time = since.elapsed().as_secs();
            told.push(format!("{end:>6}  {time:>6} s  {variable}={count}{from}"));
        }
        if start.elapsed() >= limit {
            break;
        }
    }
    println!("\n{}", told.join("\n"));
    ensure!(failed == 0, "{failed} of {} failed", told.len());
    Ok(())
}

/// `times` as much as `count`, but at least a tenth: some tests require that faults occurred often.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "above 0, and small")]
#[expect(clippy::cast_precision_loss, reason = "numbers of a few digits")]
fn scaled(count: u64, times: f64) -> u64 {
    ((count as f64 * times) as u64).max(count / 10)
}
