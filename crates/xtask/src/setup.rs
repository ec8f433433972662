//! Installs the foreign programs that tests, benches and the demonstration need.

use crate::shell;
use anyhow::{Result, bail, ensure};
use mica_tests::tools::{self, Tool};
use std::process::Command;

/// Installs what is missing; does nothing, and needs no rights, if nothing is.
pub(crate) fn run() -> Result<()> {
    let missing = missing();
    if missing.is_empty() {
        println!("all foreign programs are there");
        return Ok(());
    }
    let names: Vec<_> = missing.iter().map(|tool| tool.program).collect();
    println!("missing: {}", names.join(", "));
    ensure!(rustix::process::geteuid().is_root(), "to install them, run this as root");
    shell::run(apt().arg("update"))?;
    for tool in missing {
        install(tool)?;
    }
    Ok(())
}

/// What is not installed.
pub(crate) fn missing() -> Vec<Tool> {
    tools::ALL.iter().copied().filter(|tool| !tool.is_there()).collect()
}

/// Tries the packages that may have the program until it is there: Debian moved some of them.
fn install(tool: Tool) -> Result<()> {
    for package in tool.packages {
        if tool.is_there() {
            return Ok(());
        }
        // A package of this name need not exist in this release: then the next one may.
        let install =
            shell::run(apt().args(["install", "--yes", "--no-install-recommends", package]));
        if let Err(error) = install {
            println!("{package}: {error}");
        }
    }
    match tool.is_there() {
        true => Ok(()),
        false => bail!("no package has {}: tried {}", tool.program, tool.packages.join(", ")),
    }
}

fn apt() -> Command {
    let mut command = Command::new("apt-get");
    command.args(["--quiet", "--quiet"]).env("DEBIAN_FRONTEND", "noninteractive");
    command
}
