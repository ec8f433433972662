//! The package under a real systemd: installed, upgraded, killed, reloaded and removed in a Debian
//! that is booted in a container, while a client writes.
//!
//! Tests with a systemd of our own find what we know of it; this finds the rest. Each step is one
//! line of output; the first that fails ends it. The container always ends with this program.
//!
//! - `root`: the Debian, kept in target/service, and the copy that a run changes
//! - `container`: boots it, and runs commands in it
//! - `unit`: mica's service, as systemd sees it
//! - `load`: the client
//! - `upgrades`, `activation`, `removal`: the steps

mod activation;
mod container;
mod load;
mod packages;
mod removal;
mod root;
mod unit;
mod upgrades;

use crate::deb;
use anyhow::{Context, Result};
use container::Container;
use mica_tests::shell;
use packages::Packages;
use std::path::PathBuf;

/// What is tested, and in what.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The program; by default it is built for release.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Where debootstrap gets Debian from, the first time [default: debootstrap's own].
    #[arg(long, value_name = "URL")]
    mirror: Option<String>,
}

/// Runs all steps.
pub(crate) fn run(options: &Options) -> Result<()> {
    root::check_tools()?;
    let folder = root::Folder::lock(shell::target()?.join("service"))?;
    let deb = deb::Options::for_one_installation(options.program.clone(), folder.path().into());
    let first = deb::make(&deb)?;
    folder.make_base(options.mirror.as_deref())?;
    let root = folder.copy_of_base()?;
    let packages = Packages::new(&first, &root)?;

    let container = Container::boot(&root, &folder.path().join("console.log"))?;
    step("boots", || container.version())?;
    let before = removal::files(&container)?;
    upgrades::install(&container, &packages)?;
    let written = upgrades::run(&container, &packages)?;
    let written = activation::run(&container, &packages, written)?;
    removal::run(&container, &before)?;
    step("every write that was answered is there", || written.judge(&container))?;
    step("the container ends", || container.end())
}

/// Runs one step, and shows what it says.
fn step<T>(name: &str, step: impl FnOnce() -> Result<T>) -> Result<T>
where
    T: Outcome,
{
    let outcome = step().with_context(|| format!("service: {name}"))?;
    println!("ok   {name}{}", outcome.note());
    Ok(outcome)
}

/// What a step hands to those after it, or only says.
trait Outcome {
    /// What is shown of it.
    fn note(&self) -> String {
        String::new()
    }
}

impl Outcome for () {}

impl Outcome for String {
    fn note(&self) -> String {
        if self.is_empty() { String::new() } else { format!(": {self}") }
    }
}
