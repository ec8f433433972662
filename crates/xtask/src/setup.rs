//! Installs the foreign programs that tests, benches and the demonstration need.

use anyhow::{Result, bail, ensure};
use mica_tests::machine::parts;
use mica_tests::shell;
use mica_tests::tools::{self, Tool};
use std::process::Command;

/// Installs what is missing; does nothing, and needs no rights, if nothing is.
pub(crate) fn run() -> Result<()> {
    if is_done() {
        println!("all foreign programs are there");
        return Ok(());
    }
    let missing = missing();
    let names = missing.iter().map(|tool| tool.program);
    let machine = (!parts::are_there()).then_some("a kernel for virtual machines");
    println!("missing: {}", names.chain(machine).collect::<Vec<_>>().join(", "));
    let is_root = rustix::process::geteuid().is_root();
    ensure!(is_root || missing.is_empty(), "to install them, run this as root");
    if is_root {
        shell::run(apt().arg("update"))?;
    }
    for tool in missing {
        install(tool)?;
    }
    parts::download()
}

/// Whether nothing is missing.
pub(crate) fn is_done() -> bool {
    missing().is_empty() && parts::are_there()
}

/// Programs that are not installed.
pub(crate) fn missing() -> Vec<Tool> {
    tools::ALL.iter().copied().filter(|tool| !tool.is_there()).collect()
}

/// Tries the packages that may have the program until it is there: Debian moved some of them.
fn install(tool: Tool) -> Result<()> {
    for package in tool.packages {
        if tool.is_there() {
            return Ok(());
        }
        // A package of this name need not exist in this release: then the next one may. Where
        // QEMU comes from elsewhere, Debian's own must not push it out.
        let options = ["install", "--yes", "--no-install-recommends", "--no-remove", package];
        let install = shell::run(apt().args(options));
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
