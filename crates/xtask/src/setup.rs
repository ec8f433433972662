//! Installs the foreign programs that tests, benches and the demonstration need.

use anyhow::{Context, Result, bail, ensure};
use mica_tests::bucket;
use mica_tests::machine::parts;
use mica_tests::shell;
use mica_tests::tools::{self, Tool};
use std::process::Command;

/// Where apt's entry for backports goes.
const BACKPORTS_FILE: &str = "/etc/apt/sources.list.d/mica-backports.sources";

/// Installs what is missing; does nothing, and needs no privileges, if nothing is.
pub(crate) fn run() -> Result<()> {
    if is_done() {
        println!("all foreign programs are there");
        return Ok(());
    }
    let missing = missing();
    let names = missing.iter().map(|tool| tool.program);
    let machine = (!parts::are_there()).then_some("a kernel for virtual machines");
    let moto = (!bucket::is_there()).then_some("moto, a server of S3");
    println!("missing: {}", names.chain(machine).chain(moto).collect::<Vec<_>>().join(", "));
    let is_root = rustix::process::geteuid().is_root();
    ensure!(is_root || missing.is_empty(), "to install them, run this as root");
    if is_root {
        shell::run(apt().arg("update"))?;
    }
    for tool in missing {
        install(tool)?;
    }
    if !bucket::is_there() {
        install_moto()?;
    }
    parts::download()
}

/// Debian's Python makes environments only with a package of its own.
fn install_moto() -> Result<()> {
    let python = output(Command::new("python3").args(["-c", "import ensurepip"]));
    if python.is_err() {
        shell::run(install_command().arg("python3-venv"))?;
    }
    bucket::install()
}

/// Whether nothing is missing.
pub(crate) fn is_done() -> bool {
    missing().is_empty() && parts::are_there() && bucket::is_there()
}

/// Programs that are not installed.
pub(crate) fn missing() -> Vec<Tool> {
    tools::ALL.iter().copied().filter(|tool| !tool.is_there()).collect()
}

/// Tries the packages that may have the program until it is present: Debian moved some of them.
fn install(tool: Tool) -> Result<()> {
    for package in tool.packages {
        if tool.is_there() {
            return Ok(());
        }
        // A package of this name need not exist in this release: then the next one may.
        let installed = shell::run(install_command().arg(package)).or_else(|error| {
            // If a part of QEMU is a backport, the rest has to be one, too.
            let Some(suite) = backports(package)? else { return Err(error) };
            shell::run(install_command().args(["--target-release", &suite, package]))
        });
        if let Err(error) = installed {
            println!("{package}: {error}");
        }
    }
    match tool.is_there() {
        true => Ok(()),
        false => bail!("no package has {}: tried {}", tool.program, tool.packages.join(", ")),
    }
}

/// Programs that are already installed must not be removed.
fn install_command() -> Command {
    let mut command = apt();
    command.args(["install", "--yes", "--no-install-recommends", "--no-remove"]);
    command
}

/// The suite of backports, which apt knows from now on, if QEMU's programs here are from there and
/// `package` is one of QEMU's.
fn backports(package: &str) -> Result<Option<String>> {
    let version = output(Command::new("dpkg-query").args(["-W", "-f=${Version}", "qemu-utils"]));
    if !package.starts_with("qemu-") || !version.is_ok_and(|version| version.contains("~bpo")) {
        return Ok(None);
    }
    let release = std::fs::read_to_string("/etc/os-release")?;
    let codename = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let codename = codename.context("/etc/os-release names no release")?;
    let suite = format!("{codename}-backports");
    if output(Command::new("apt-cache").arg("policy"))?.contains(&suite) {
        return Ok(Some(suite));
    }
    let format = "$(CODENAME) $(REPO_URI)";
    let sources = output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        format,
        "Created-By: Packages",
    ]))?;
    let mut of_release =
        sources.lines().filter_map(|line| line.strip_prefix(codename)?.strip_prefix(' '));
    let Some(uri) = of_release.next() else { return Ok(None) };
    let entry = format!("Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: main\n");
    println!("QEMU here is a backport: apt gets to know {suite} ({BACKPORTS_FILE})");
    std::fs::write(BACKPORTS_FILE, entry)?;
    shell::run(apt().arg("update"))?;
    Ok(Some(suite))
}

/// The output of `command`.
fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn apt() -> Command {
    let mut command = Command::new("apt-get");
    command.args(["--quiet", "--quiet"]).env("DEBIAN_FRONTEND", "noninteractive");
    command
}
