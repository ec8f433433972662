//! A Debian package of mica: the program, its man pages and completions, units for systemd.
//!
//! `dpkg-deb` makes it from a folder that is put together here. The same program and commit make
//! the same package, byte for byte: nothing in it is younger than the commit, and nothing depends
//! on whose account or machine it is.

mod control;
mod stage;
mod third_party;

use anyhow::{Context, Result, ensure};
use mica_tests::shell;
use stage::Stage;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What packagers set, if they know the time of their sources.
const EPOCH: &str = "SOURCE_DATE_EPOCH";
/// Files of the project that have a place in the package.
const FILES: [(&str, &str); 5] = [
    ("docs/mica.service", "usr/lib/systemd/system/mica.service"),
    ("docs/mica@.socket", "usr/lib/systemd/system/mica@.socket"),
    ("packaging/debian/sysusers.conf", "usr/lib/sysusers.d/mica.conf"),
    ("README.md", "usr/share/doc/mica/README.md"),
    ("CHANGELOG.md", "usr/share/doc/mica/NEWS.md"),
];
/// What the documentation has besides units of systemd, by the ends of names.
const DOCS: [&str; 3] = ["md", "yml", "json"];
/// What is used as it is, and so not compressed.
const PLAIN: [&str; 3] = ["copyright", "alerts.yml", "dashboard.json"];
/// What dpkg runs.
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];

/// What is packaged, and where to.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The program; by default it is built for release.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// The directory for the package; target/debian by default.
    #[arg(long, value_name = "DIRECTORY")]
    into: Option<PathBuf>,
    /// How dpkg-deb compresses it.
    #[arg(long, value_name = "xz|gzip|none", default_value = "xz")]
    compression: String,
}

impl Options {
    /// For a package of `program` that is installed once, from `into`.
    pub(crate) fn for_one_installation(program: Option<PathBuf>, into: PathBuf) -> Self {
        Self { program, into: Some(into), compression: "none".into() }
    }
}

/// Makes the package; the last line of output names it.
pub(crate) fn run(options: &Options) -> Result<()> {
    println!("{}", make(options)?.display());
    Ok(())
}

/// Makes the package, and returns where it is.
pub(crate) fn make(options: &Options) -> Result<PathBuf> {
    let target = shell::target()?;
    let program = match &options.program {
        Some(program) => program.canonicalize().with_context(|| program.display().to_string())?,
        None => {
            shell::run(&mut shell::cargo(["build", "--release", "--locked", "--package", "mica"]))?;
            target.join("release/mica")
        }
    };
    let into = options.into.clone().unwrap_or_else(|| target.join("debian"));
    let epoch = epoch()?;
    let stage = Stage::new()?;
    fill(&stage, &program, &epoch)?;

    let architecture = output(Command::new("dpkg").arg("--print-architecture"))?;
    let version = version(&program)?;
    stage.write("DEBIAN/control", control::control(&stage, &program, &version, &architecture)?)?;
    stage.write("DEBIAN/md5sums", stage.sums()?)?;
    for name in SCRIPTS {
        stage.copy(&Path::new("packaging/debian").join(name), &format!("DEBIAN/{name}"))?;
    }
    stage.set_modes(&SCRIPTS.map(|name| format!("DEBIAN/{name}")))?;

    std::fs::create_dir_all(&into).with_context(|| into.display().to_string())?;
    let package = into.join(format!("mica_{version}_{architecture}.deb"));
    let mut build = Command::new("dpkg-deb");
    build.env(EPOCH, &epoch).args(["--root-owner-group", "-Z"]).arg(&options.compression);
    shell::run(build.arg("--build").arg(stage.root()).arg(&package))?;
    Ok(package)
}

/// Puts everything that is installed in its place.
fn fill(stage: &Stage, program: &Path, epoch: &str) -> Result<()> {
    let strip = ["--strip-unneeded", "--remove-section=.comment", "--remove-section=.note", "-o"];
    let installed = stage.place("usr/bin/mica")?;
    shell::run(Command::new("strip").args(strip).arg(&installed).arg(program))?;
    let share = stage.place("usr/share/man")?;
    let share = share.parent().context("no folder")?;
    shell::run(Command::new(program).arg("manual").arg(share).env(EPOCH, epoch))?;
    // Debian's place for completions that packages bring.
    stage.rename("usr/share/zsh/site-functions", "usr/share/zsh/vendor-completions")?;
    for (from, to) in FILES {
        stage.copy(Path::new(from), to)?;
    }
    // The README names them by these paths.
    stage.copy_folder(Path::new("docs"), "usr/share/doc/mica/docs", &DOCS)?;
    stage.write("usr/share/doc/mica/copyright", control::copyright()?)?;
    stage.write("usr/share/doc/mica/third-party", third_party::licences()?)?;
    stage.write("usr/share/doc/mica/changelog", control::changelog(&version(program)?, epoch)?)?;
    stage.compress(&["usr/share/man/man1", "usr/share/doc/mica"], &PLAIN)
}

/// The version that the program says it has.
fn version(program: &Path) -> Result<String> {
    let said = output(Command::new(program).arg("--version"))?;
    let version = said.strip_prefix("mica ").map(str::to_owned);
    version.with_context(|| format!("{}: no version of mica: {said}", program.display()))
}

/// The time of the sources.
fn epoch() -> Result<String> {
    if let Ok(told) = std::env::var(EPOCH) {
        return Ok(told);
    }
    let mut log = Command::new("git");
    log.args(["log", "-1", "--format=%ct"]).current_dir(shell::root());
    output(&mut log).with_context(|| format!("there is no commit: set {EPOCH}"))
}

/// What `command` says on its standard output, without the end of the line.
fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("starting {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}: {}", output.status, said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
