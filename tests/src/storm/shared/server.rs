//! A server of all that the configuration lists: started, taken over from, killed, closed.

use super::fleet::Fleet;
use crate::clock;
use crate::storm::configured::{self, HELD_LIMIT, PAUSE};
use crate::storm::foreign;
use crate::storm::load::Phase;
use crate::storm::parties::{self, Party};
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::takeover::Process;
use mica_units::Rng;
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::time::Duration;

/// A server.
#[derive(Debug)]
pub(super) struct Server {
    process: Process,
    /// Disks of the configuration that it was told by command not to have.
    pub(super) absent_by_command: BTreeSet<String>,
}

/// What is left of a server after something happened to it.
#[derive(Debug)]
pub(super) enum Left {
    Serving(Server),
    Killed,
}

fn begin(fleet: &mut Fleet<'_>, more: &[&str]) -> Outcome<Process> {
    let name = fleet.new_server();
    configured::begin(&fleet.world, &fleet.config, &name, more)
}

impl Server {
    /// Starts one, which has to serve all that the configuration lists, as it has to be.
    pub(super) fn start(fleet: &mut Fleet<'_>) -> Outcome<Self> {
        let start = clock::now();
        loop {
            let mut process = begin(fleet, &[])?;
            if configured::wait_until_it_serves(&fleet.world, &fleet.control, &mut process)? {
                fleet.begins();
                fleet.judge_members("a server that starts")?;
                fleet.judge_disks("a server that starts")?;
                return Ok(Self { process, absent_by_command: BTreeSet::new() });
            }
            let log = process.log();
            if !foreign::is_held(&log) || start.elapsed() > HELD_LIMIT {
                return Err(Fault::new(Wrong::NotServed, log));
            }
            fleet.world.counts.refused.add();
            clock::sleep(PAUSE * 10);
        }
    }

    pub(super) fn log(&self) -> String {
        self.process.log()
    }

    /// It lives, and did not panic.
    pub(super) fn look(&mut self) -> Outcome {
        configured::look(&mut self.process)
    }

    pub(super) fn kill(mut self, fleet: &mut Fleet<'_>) -> Outcome {
        fleet.tell("  killed");
        self.look()?;
        fleet.was_killed();
        configured::kill(&fleet.world, &mut self.process)
    }

    /// Asks it to end; what it served is durable then.
    pub(super) fn close(mut self, fleet: &mut Fleet<'_>) -> Outcome {
        fleet.tell("  closed");
        self.look()?;
        self.process.signal(Signal::TERM);
        if configured::wait(&mut self.process)? != Some(0) {
            return Err(Fault::new(Wrong::Died, self.log()));
        }
        fleet.world.counts.closes.add();
        fleet
            .disks
            .iter_mut()
            .filter(|disk| disk.is_serving())
            .for_each(|disk| disk.model.closed());
        Ok(())
    }

    /// Another one takes over, under clients.
    pub(super) fn take_over(self, fleet: &mut Fleet<'_>, parties: &[Party]) -> Outcome<Self> {
        fleet.moves(parties);
        let (server, ()) = self.take_over_amid(fleet, |_| Ok(()))?;
        Ok(server)
    }

    /// The same while something is said to either of them. Commands that change disks may keep
    /// another one from taking over: then this one goes on.
    pub(super) fn take_over_amid<T>(
        mut self,
        fleet: &mut Fleet<'_>,
        meanwhile: impl FnOnce(&Fleet<'_>) -> Outcome<T>,
    ) -> Outcome<(Self, T)> {
        self.look()?;
        let mut new = begin(fleet, &["--takeover"])?;
        let said = meanwhile(fleet)?;
        let ended = clock::poll(configured::LIMIT, PAUSE, || {
            (!self.process.is_running() || !new.is_running()).then_some(())
        });
        let is_well = ended.is_some() && self.process.is_running() != new.is_running();
        let said_by_new = new.log();
        let is_kept = !new.is_running() && fleet.may_keep_server(&said_by_new);
        if is_well && is_kept {
            fleet.tell(format_args!("  which is refused: {}", said_by_new.trim()));
            return Ok((self, said));
        }
        let is_well =
            is_well && new.is_running() && configured::wait(&mut self.process)? == Some(0);
        if !is_well || !configured::wait_until_it_serves(&fleet.world, &fleet.control, &mut new)? {
            let what = format!("old: {}\nnew: {}", self.process.log(), new.log());
            return Err(Fault::new(Wrong::Takeover, what));
        }
        fleet.world.counts.takeovers.add();
        fleet.was_taken_over(&self.absent_by_command);
        Ok((Self { process: new, absent_by_command: BTreeSet::new() }, said))
    }

    /// Another one begins to take over, and both are killed.
    pub(super) fn killed_in_takeover(
        mut self,
        fleet: &mut Fleet<'_>,
        rng: &mut Rng,
        parties: &[Party],
    ) -> Outcome {
        self.look()?;
        parties::enter(parties, Phase::Ending);
        let mut new = begin(fleet, &["--takeover"])?;
        let pause = Duration::from_micros(rng.below(60_000));
        fleet.was_killed();
        fleet.tell(format_args!("  both are killed after {pause:?}"));
        clock::sleep(pause);
        let mut processes = [&mut self.process, &mut new];
        if rng.percent(50) {
            processes.reverse();
        }
        for process in processes {
            if process.is_running() {
                process.signal(Signal::KILL);
            }
            configured::wait(process)?;
            if process.log().contains("panicked") {
                return Err(Fault::new(Wrong::Panicked, process.log()));
            }
        }
        fleet.world.counts.takeover_kills.add();
        Ok(())
    }
}
