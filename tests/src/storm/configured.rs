//! Servers of a configuration: started, waited for.

use super::story::{Fault, Outcome, Wrong};
use super::world::{World, text};
use crate::clock;
use crate::takeover::Process;
use rustix::process::Signal;
use std::path::Path;
use std::time::Duration;

/// How long a server may take until it serves, or to end.
pub(super) const LIMIT: Duration = Duration::from_secs(40);
pub(super) const PAUSE: Duration = Duration::from_micros(500);
/// How long the kernel may take to let go of a killed server's files.
pub(super) const HELD_LIMIT: Duration = Duration::from_secs(10);
/// Why another server may be kept from taking over.
pub(super) const DISKS_CHANGE: &str = "disks are being changed";

/// Starts one that is called `name`, with `more` options.
pub(super) fn begin(
    world: &World<'_>,
    config: &Path,
    name: &str,
    more: &[&str],
) -> Outcome<Process> {
    let mut options = vec!["--config", text(config)?, "--strict"];
    for folder in [&world.images, &world.log] {
        options.extend(["--disks-in", text(folder)?]);
    }
    options.extend(more);
    world.story.tell(format_args!("  {name} {options:?}"));
    Ok(Process::start_binary(world.binary, &world.run, name, &options))
}

/// Waits until its control socket answers, which it does when all is served; not if it has ended.
pub(super) fn wait_until_it_serves(
    world: &World<'_>,
    control: &Path,
    process: &mut Process,
) -> Outcome<bool> {
    let control = text(control)?;
    let pid = process.pid();
    let served = clock::poll(LIMIT, PAUSE * 4, || {
        if !process.is_running() {
            return Some(Ok(false));
        }
        let args = ["ctl", "--control", control, "--output", "json", "status"];
        let said = match world.mica(&args) {
            Ok(said) => said,
            Err(fault) => return Some(Err(fault)),
        };
        let status = serde_json::from_str::<serde_json::Value>(&said.stdout).ok()?;
        let is_it = said.status.success() && status["pid"] == pid;
        let mut disks = status["disks"].as_array().into_iter().flatten();
        let is_all = disks.all(|disk| disk["state"] == "serving" || disk["state"] == "drained");
        (is_it && is_all).then_some(Ok(true))
    });
    served.unwrap_or_else(|| Err(Fault::new(Wrong::Hang, format!("no start: {}", process.log()))))
}

/// Waits until it has ended; its exit code.
pub(super) fn wait(process: &mut Process) -> Outcome<Option<i32>> {
    match clock::poll(LIMIT, PAUSE, || (!process.is_running()).then_some(())) {
        Some(()) => Ok(process.ended()),
        None => Err(Fault::new(Wrong::Hang, format!("no end: {}", process.log()))),
    }
}

/// It lives, and did not panic.
pub(super) fn look(process: &mut Process) -> Outcome {
    let log = process.log();
    if log.contains("panicked") {
        return Err(Fault::new(Wrong::Panicked, log));
    }
    match process.is_running() {
        true => Ok(()),
        false => Err(Fault::new(Wrong::Died, log)),
    }
}

/// Kills one, which is well.
pub(super) fn kill(world: &World<'_>, process: &mut Process) -> Outcome {
    process.signal(Signal::KILL);
    wait(process)?;
    world.counts.kills.add();
    Ok(())
}

/// Asks one to end, which is well; what it served is durable then.
pub(super) fn close(world: &World<'_>, process: &mut Process) -> Outcome {
    process.signal(Signal::TERM);
    if wait(process)? != Some(0) {
        return Err(Fault::new(Wrong::Died, process.log()));
    }
    world.counts.closes.add();
    Ok(())
}
