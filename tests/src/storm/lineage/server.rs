//! A server of the disks: started by the names of their first images, taken over from, killed,
//! closed.

use super::fleet::Fleet;
use crate::clock;
use crate::storm::configured::{self, HELD_LIMIT, PAUSE};
use crate::storm::load::Phase;
use crate::storm::parties::{self, Party};
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::text;
use crate::takeover::Process;
use mica_units::Rng;
use std::time::Duration;

/// Why another server may be kept from taking over: commands, backups, and that a merge took the
/// image out that the configuration names.
const KEPT: [&str; 3] = [configured::DISKS_CHANGE, "has the backup", NAME_LEFT];
/// How a server says that an image is no layer of its disk any more.
const NAME_LEFT: &str = "is no longer based on it";

/// How it says that it may be another process's soon.
const TAKING_OVER: &str = "another process is taking over: try again";

/// A server.
#[derive(Debug)]
pub(super) struct Server(Process);

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
    /// Starts one, which has to serve all as it has to be.
    pub(super) fn start(fleet: &mut Fleet<'_>) -> Outcome<Self> {
        let start = clock::now();
        loop {
            let mut process = begin(fleet, &[])?;
            if configured::wait_until_it_serves(&fleet.world, &fleet.control, &mut process)? {
                fleet.judge_start()?;
                return Ok(Self(process));
            }
            let log = process.log();
            // Who was killed over a merge may have done what a user has to follow.
            if log.contains(NAME_LEFT) && fleet.follow_merge()? {
                continue;
            }
            if !crate::storm::foreign::is_held(&log) || start.elapsed() > HELD_LIMIT {
                return Err(Fault::new(Wrong::NotServed, log));
            }
            fleet.world.counts.refused.add();
            clock::sleep(PAUSE * 10);
        }
    }

    /// It lives, and did not panic.
    pub(super) fn look(&mut self) -> Outcome {
        configured::look(&mut self.0)
    }

    /// What it has said.
    pub(super) fn log(&self) -> String {
        self.0.log()
    }

    pub(super) fn kill(mut self, fleet: &mut Fleet<'_>, parties: &[Party]) -> Outcome {
        fleet.tell("  killed");
        self.look()?;
        parties::enter(parties, Phase::Ending);
        configured::kill(&fleet.world, &mut self.0)?;
        fleet.note_losses()
    }

    /// Asks it to end; what it served is durable then.
    pub(super) fn close(mut self, fleet: &mut Fleet<'_>) -> Outcome {
        fleet.tell("  closed");
        self.look()?;
        configured::close(&fleet.world, &mut self.0)?;
        fleet.disks.iter_mut().for_each(|disk| disk.model.closed());
        Ok(())
    }

    /// Another one takes over, under clients.
    pub(super) fn take_over(mut self, fleet: &mut Fleet<'_>, parties: &[Party]) -> Outcome<Self> {
        self.look()?;
        parties::enter(parties, Phase::Moving);
        let mut new = begin(fleet, &["--takeover"])?;
        let old = &mut self.0;
        let ended = clock::poll(configured::LIMIT, PAUSE, || {
            (!old.is_running() || !new.is_running()).then_some(())
        });
        let is_well = ended.is_some() && old.is_running() != new.is_running();
        if is_well && !new.is_running() && KEPT.iter().any(|why| new.log().contains(why)) {
            fleet.tell(format_args!("  which is refused: {}", new.log().trim()));
            wait_for_takeover(fleet)?;
            return Ok(self);
        }
        let is_well = is_well && new.is_running() && configured::wait(old)? == Some(0);
        let (world, control) = (&fleet.world, &fleet.control);
        if !is_well || !configured::wait_until_it_serves(world, control, &mut new)? {
            let what = format!("old: {}\nnew: {}", old.log(), new.log());
            return Err(Fault::new(Wrong::Takeover, what));
        }
        world.counts.takeovers.add();
        for disk in &mut fleet.disks {
            disk.exported = None;
        }
        Ok(Self(new))
    }

    /// Another one takes over, and one of the two is killed while it does: in `new_percent` of all
    /// cases the new one. The other one serves, or ends; never does it do neither.
    pub(super) fn take_over_and_kill(
        mut self,
        fleet: &mut Fleet<'_>,
        rng: &mut Rng,
        (parties, new_percent): (&[Party], u64),
    ) -> Outcome<Left> {
        self.look()?;
        parties::enter(parties, Phase::Ending);
        let mut new = begin(fleet, &["--takeover"])?;
        let most = rng.choose(&[5_000, 50_000, 150_000, 500_000]);
        let pause = Duration::from_micros(rng.below(most));
        let is_new_killed = rng.percent(new_percent);
        let name = if is_new_killed { "the new one" } else { "the old one" };
        fleet.tell(format_args!("  {name} is killed after {pause:?}"));
        clock::sleep(pause);
        let (killed, mut left) = match is_new_killed {
            true => (&mut new, self.0),
            false => (&mut self.0, new),
        };
        // It may have ended.
        if killed.is_running() {
            configured::kill(&fleet.world, killed)?;
            fleet.world.counts.takeover_kills.add();
        }
        let serves = configured::wait_until_it_serves(&fleet.world, &fleet.control, &mut left)?;
        let log = left.log();
        if log.contains("panicked") {
            return Err(Fault::new(Wrong::Panicked, log));
        }
        for disk in &mut fleet.disks {
            disk.exported = None;
        }
        fleet.tell(format_args!("  the other one serves: {serves}"));
        if !serves {
            fleet.note_losses()?;
            return Ok(Left::Killed);
        }
        wait_for_takeover(fleet)?;
        Ok(Left::Serving(Self(left)))
    }
}

/// Waits until a server has worked off a takeover that failed: until then it refuses commands, and
/// says why.
fn wait_for_takeover(fleet: &Fleet<'_>) -> Outcome {
    let Some(disk) = fleet.disks.first() else { return Ok(()) };
    // It is served, so that this changes nothing.
    let args = ["ctl", "--control", text(&fleet.control)?, "undrain", &disk.name];
    let over = clock::poll(configured::LIMIT, PAUSE, || match fleet.world.mica(&args) {
        Ok(said) if said.stderr.contains(TAKING_OVER) => None,
        said => Some(said.map(drop)),
    });
    over.unwrap_or_else(|| Err(Fault::new(Wrong::Hang, "a takeover is not worked off")))
}
