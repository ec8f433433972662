//! A volume that moves between machines, whose processes die.

use crate::history::{History, LEN, SECTORS, read, work};
use crate::machines::{Death, Life, Machines, PATIENCE, Plan, name};
use mica_block::{Error, ErrorKind, Manage, Result};
use mica_sim::crash::until_power_cut;
use mica_sim::scenario;
use mica_volume::{Claimed, Durability, Opening};
use std::cell::{Cell, RefCell};
use std::time::Duration;

/// Who had the volume last, and how that ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Last {
    /// It was closed.
    Closed,
    /// The process on this machine died, and its log has what the store lacks.
    Died { machine: usize, by: Death },
    /// Somebody tried, and it is not known how far that came.
    Unknown,
}

struct Story<'a> {
    machines: &'a Machines,
    history: RefCell<History>,
    last: Cell<Last>,
}

impl Story<'_> {
    fn below(&self, bound: u64) -> u64 {
        self.machines.below(bound)
    }

    fn plan(&self) -> Plan {
        let machine = match self.last.get() {
            Last::Died { machine, .. } if self.below(4) > 0 => machine,
            _ => usize::try_from(self.below(2)).unwrap(),
        };
        Plan::draw(self.machines, machine, 0.05, 1..121)
    }

    /// How many changes must be there if the process that `plan` makes opens the volume, and
    /// whether it needs no force.
    fn owed(&self, plan: &Plan) -> (usize, Claimed) {
        let history = self.history.borrow();
        match self.last.get() {
            Last::Closed => (history.stored, Claimed::Refuse),
            Last::Died { machine, by } if machine == plan.machine && plan.has_log => match by {
                Death::Killed => (history.answered, Claimed::Refuse),
                Death::PowerCut(_) => (history.flushed, Claimed::Refuse),
            },
            _ => (history.stored, Claimed::TakeOver),
        }
    }

    /// One process, from its birth to its end.
    async fn live(&self, plan: &Plan, life: &RefCell<Option<Life>>) -> Result<()> {
        let (owed, claimed) = self.owed(plan);
        let Plan { machine, has_log, durability, .. } = *plan;
        let process = plan.begin(self.machines).await?;
        *life.borrow_mut() = Some(process.life.clone());
        let opening = Opening { durability, ..Opening::from(claimed) };
        let volume = process.open(opening).await?;
        let found = read(&volume, 0..SECTORS).await?;
        self.history.borrow_mut().expect(&found, owed);
        self.last.set(match has_log {
            true => Last::Died { machine, by: plan.death },
            false => Last::Unknown,
        });
        let steps = self.below(40);
        let below = |bound| self.below(bound);
        self.history.borrow_mut().flushes_to_store = durability == Durability::Store;
        work(&volume, &self.history, &below, steps).await?;
        if self.below(3) == 0 {
            volume.close().await?;
            let mut history = self.history.borrow_mut();
            history.stored = history.answered;
            self.last.set(Last::Closed);
        }
        Ok(())
    }

    async fn round(&self) {
        let world = &self.machines.world;
        let plan = self.plan();
        if self.below(2) == 0 && plan.has_log {
            match plan.death {
                Death::Killed => world.kill_after(1 + self.below(60)),
                Death::PowerCut(loss) => world.cut_power_after(1 + self.below(60), loss),
            }
        }
        let life = RefCell::new(None);
        let living = mica_rt::timeout(PATIENCE, self.live(&plan, &life));
        let outcome = until_power_cut(world, living).await;
        world.keep_power();
        let is_same = |machine| machine == plan.machine && plan.has_log;
        match outcome {
            Some(outcome) => self.check_end(&plan, outcome.expect("everything comes to an end")),
            // It died before it had the volume: what its predecessor left may be half taken.
            None => match self.last.get() {
                Last::Died { machine, by } if is_same(machine) => {
                    let by = if by == Death::Killed { plan.death } else { by };
                    self.last.set(Last::Died { machine, by });
                }
                _ => self.last.set(Last::Unknown),
            },
        }
        if let Some(life) = life.take() {
            life.die();
        }
        if self.below(3) == 0 {
            // What was under way arrives.
            mica_rt::sleep(Duration::from_millis(400)).await;
        }
    }

    /// A process ended by itself, or with an error: of the store, which a verb has no patience for.
    fn check_end(&self, plan: &Plan, outcome: Result<()>) {
        match outcome {
            Ok(()) => {}
            Err(error) => {
                assert!(self.is_excused(plan, &error), "{plan:?}: {error:?}");
                self.last.set(Last::Unknown);
            }
        }
    }

    fn is_excused(&self, plan: &Plan, error: &Error) -> bool {
        error.kind() == ErrorKind::Io && plan.faults.refused > 0.0
    }
}

#[test]
fn volume_keeps_a_prefix_with_everything_that_was_promised_wherever_it_is_opened() {
    scenario(200, async |world| {
        let machines = Machines::new(&world, 2);
        let new = machines.kind();
        machines.sound(0, false).await.volumes.create_as(&name(), LEN, new).await.unwrap();
        let history = RefCell::new(History::new());
        let story = Story { machines: &machines, history, last: Cell::new(Last::Closed) };
        for _ in 0..8 {
            story.round().await;
        }
        let found =
            machines.sound(0, false).await.volumes.check(&name(), &mut |_| {}).await.unwrap();
        assert_eq!(found.damaged_count, 0, "{found:?}");
    });
}
