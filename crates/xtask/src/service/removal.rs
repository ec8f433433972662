//! The package is removed and purged: what people wrote stays, and nothing else.

use super::container::Container;
use super::load::{DISK, IMAGE};
use super::unit::Unit;
use super::upgrades::CONFIGURATION;
use super::{load, step};
use anyhow::{Result, ensure};
use std::collections::BTreeSet;

/// Folders in which a system that runs writes by itself, and those that steps write.
const OTHERS: [&str; 10] = [
    "/dev",
    "/proc",
    "/sys",
    "/root",
    "/tmp",
    "/var/cache",
    "/var/lib/dpkg",
    "/var/lib/systemd/timers",
    "/var/log",
    "/var/tmp",
];
/// What may be new after it: what people wrote, and the copies of files with accounts. The account
/// itself stays, as files could be its.
const STAYS: [&str; 7] = [
    CONFIGURATION,
    "/var/lib/vm",
    "/etc/passwd-",
    "/etc/group-",
    "/etc/shadow-",
    "/etc/gshadow-",
    "/etc/.pwd.lock",
];

/// The files of the container, but for those that have nothing to do with a package.
pub(super) fn files(container: &Container) -> Result<BTreeSet<String>> {
    let pruned: Vec<_> = OTHERS.iter().map(|folder| format!("-path {folder}")).collect();
    let line = format!("find / -xdev \\( {} \\) -prune -o -print", pruned.join(" -o "));
    let disk = container.shell(&line)?;
    // What is about mica in memory; systemd keeps some of units that are gone.
    let memory =
        container.shell("find /run /dev/shm -name '*mica*' -not -path '/run/systemd/*'")?;
    Ok(disk.lines().chain(memory.lines()).map(str::to_owned).collect())
}

/// Starts from a package whose service and socket unit run; `before` are the files from before it
/// was installed.
pub(super) fn run(container: &Container, before: &BTreeSet<String>) -> Result<()> {
    let unit = Unit::new(container);
    step("removal stops it, with its socket units", || {
        unit.main()?;
        container.shell("dpkg --remove mica 2>&1")?;
        unit.has_stopped()?;
        let listens = container.run(["systemctl", "is-active", &format!("mica@{DISK}.socket")])?;
        ensure!(listens.code != 0, "mica@{DISK}.socket is {}", listens.stdout.trim());
        container.shell(&format!("test -e {CONFIGURATION} && test -e {IMAGE}"))?;
        container.shell(&format!("! test -e {}", load::socket().display()))?;
        Ok(())
    })?;
    step("purging leaves the configuration and the images, and nothing else", || {
        container.shell("dpkg --purge mica 2>&1")?;
        let after = files(container)?;
        let new = after.difference(before).map(String::as_str);
        let new: Vec<_> =
            new.filter(|file| !STAYS.iter().any(|known| file.starts_with(known))).collect();
        ensure!(new.is_empty(), "left: {}", new.join(", "));
        let gone: Vec<_> = before.difference(&after).map(String::as_str).collect();
        ensure!(gone.is_empty(), "gone: {}", gone.join(", "));
        container.shell(&format!("test -e {CONFIGURATION} && test -e {IMAGE}"))?;
        Ok(())
    })
}
