//! The program under test.

use crate::command::{self, Finished};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

/// The binary: what `MICA_BIN` names, else the one that cargo builds beside the running test, built
/// first, so that no test ever judges yesterday's program.
///
/// # Panics
/// If it cannot be built.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| std::env::var_os("MICA_BIN").map_or_else(build, Into::into))
}

/// Runs the binary with `args` to its end.
///
/// # Panics
/// If it does not end within two minutes.
#[track_caller]
pub fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Finished {
    command::finish(Command::new(binary()).args(args))
}

fn build() -> PathBuf {
    let test = std::env::current_exe().expect("a running program has a path");
    // target/<profile>/deps/<test>, or target/<profile>/<program>.
    let folder = test
        .ancestors()
        .skip(1)
        .find(|folder| folder.file_name() != Some(OsStr::new("deps")))
        .expect("programs live in folders");
    let profile = match folder.file_name().and_then(OsStr::to_str) {
        Some("debug") | None => "dev",
        Some(profile) => profile,
    };
    let target = folder.parent().expect("a profile's folder lies in the target folder");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--package", "mica", "--profile", profile]);
    cargo.current_dir(env!("CARGO_MANIFEST_DIR")).env("CARGO_TARGET_DIR", target);
    command::finish_within(&mut cargo, Duration::from_secs(1800)).ok();
    folder.join("mica")
}
