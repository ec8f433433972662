//! The first client that connects to a socket unit starts the service, which serves that socket.

use super::container::Container;
use super::load::{DISK, Load, Written};
use super::packages::Packages;
use super::step;
use super::unit::Unit;
use super::upgrades::replace;
use anyhow::{Context, Result, ensure};

/// Starts from a service that is stopped; leaves one that runs, and a socket unit that listens.
pub(super) fn run(container: &Container, packages: &Packages, written: Written) -> Result<Written> {
    let unit = Unit::new(container);
    let socket = format!("/run/mica-{DISK}.nbd");
    let named = format!("mica@{DISK}.socket");
    step("a socket unit listens without a server", || {
        container.ok(["systemctl", "enable", "--now", &named])?;
        ensure!(unit.state()?.main().is_none(), "the service runs");
        Ok(())
    })?;
    let load = Load::start(container, &socket, written);
    step("the first client starts it", || {
        let main = unit.runs_again(None)?;
        load.gets_further()?;
        Ok(format!("process {main}"))
    })?;
    step("activated: downgrade", || replace(&unit, &load, || packages.old.install(container)))?;
    step("activated: kill -9", || {
        replace(&unit, &load, || {
            container.ok(["systemctl", "kill", "--kill-who=main", "--signal=KILL", "mica"])
        })
    })?;
    step("activated: reload", || {
        replace(&unit, &load, || container.ok(["systemctl", "reload", "mica"]))
    })?;
    step("activated: stop; the next client starts it", || {
        replace(&unit, &load, || container.ok(["systemctl", "stop", "mica"]))
    })?;
    let written = step("the second client ends", || load.end())?;
    let state = container.ok(["systemctl", "show", "--property=ActiveState", &named])?;
    let state = state.trim().strip_prefix("ActiveState=").context("a socket unit has a state")?;
    ensure!(state == "active", "service: {named} is {state}");
    Ok(written)
}
