//! What several clients at once see of a volume, while hosts die, and take it from each other also
//! if they live, is linearizable for each block; nothing that was promised is lost.

use crate::history::{LEN, read};
use crate::machines::{Death, Machines, PATIENCE, Plan, Process, name};
use mica_block::Disk;
use mica_gen::linear::{self, Act, OPERATIONS_MAX, Operation};
use mica_rt::{Buf, sleep, spawn, timeout};
use mica_sim::crash::until_power_cut;
use mica_sim::scenario;
use mica_units::{GuestOffset, SECTOR_BYTES};
use mica_volume::{Claimed, Durability, Opening, Volume};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const BLOCKS: usize = 3;
const BLOCK_SECTORS: usize = 8;
const CLIENTS: u64 = 3;
const ERAS: u64 = 5;
/// A flush that was answered: when it was called.
type Flushes = Vec<u64>;

/// What was done in the time of one server.
#[derive(Default)]
struct Era {
    blocks: [Vec<Operation>; BLOCKS],
    flushes: Flushes,
    flushes_to_store: bool,
}

/// What outlives an era.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Owed {
    Answered,
    Flushed,
    /// What was flushed, if that promises the store.
    Stored,
}

impl Era {
    fn operations(&self, block: usize, owed: Owed) -> Vec<Operation> {
        let last_flush = match owed {
            Owed::Stored if !self.flushes_to_store => None,
            _ => self.flushes.iter().max().copied(),
        };
        let owes = |operation: &Operation| {
            let is_flushed = |at: u64| last_flush.is_some_and(|flush| at < flush);
            match operation.act {
                Act::Read(_) => false,
                Act::Write(_) => {
                    operation.answered.is_some_and(|at| owed == Owed::Answered || is_flushed(at))
                }
            }
        };
        let all = self.blocks[block].iter();
        all.map(|operation| Operation { is_owed: owes(operation), ..*operation }).collect()
    }
}

struct Story {
    machines: Machines,
    clock: Cell<u64>,
    last_write: Cell<u64>,
}

impl Story {
    fn tick(&self) -> u64 {
        self.clock.set(self.clock.get() + 1);
        self.clock.get()
    }

    fn below(&self, bound: u64) -> u64 {
        self.machines.below(bound)
    }

    /// A client, until its disk fails or it has done enough.
    async fn client(self: Rc<Self>, volume: Arc<Volume>, era: Rc<RefCell<Era>>) {
        for _ in 0..4 + self.below(10) {
            let block = usize::try_from(self.below(BLOCKS as u64)).unwrap();
            let called = self.tick();
            let outcome = match self.below(8) {
                0..4 => {
                    let value = self.last_write.get() + 1;
                    self.last_write.set(value);
                    self.act(&volume, &era, (block, Act::Write(value), called)).await
                }
                4..7 => self.act(&volume, &era, (block, Act::Read(0), called)).await,
                _ => volume.flush().await.map(|()| era.borrow_mut().flushes.push(called)),
            };
            if outcome.is_err() {
                return;
            }
            if self.below(3) == 0 {
                sleep(Duration::from_millis(self.below(60))).await;
            }
        }
    }

    async fn act(
        &self,
        volume: &Volume,
        era: &RefCell<Era>,
        (block, act, called): (usize, Act, u64),
    ) -> mica_block::Result<()> {
        let at = {
            let operations = &mut era.borrow_mut().blocks[block];
            if operations.len() == OPERATIONS_MAX {
                return Ok(());
            }
            operations.push(Operation { act, called, answered: None, is_owed: false });
            operations.len() - 1
        };
        let first = block * BLOCK_SECTORS;
        let act = match act {
            Act::Write(value) => {
                let bytes = Buf::from_slice(&value.to_le_bytes().repeat(512));
                let offset = GuestOffset::new(first as u64 * SECTOR_BYTES);
                volume.write(offset, bytes).await.0?;
                act
            }
            Act::Read(_) => {
                let seen = read(volume, first..first + BLOCK_SECTORS).await?;
                assert!(seen.iter().all(|value| *value == seen[0]), "a block is torn: {seen:?}");
                Act::Read(seen[0])
            }
        };
        let answered = Some(self.tick());
        era.borrow_mut().blocks[block][at] = Operation { act, called, answered, is_owed: false };
        Ok(())
    }

    /// A process that opens the volume, and its clients, for a while. `None` if it does not get to
    /// serve.
    async fn serve(self: &Rc<Self>, plan: &Plan, claimed: Claimed) -> Option<Served> {
        let process = plan.begin(&self.machines).await.ok()?;
        let opening = Opening { durability: plan.durability, ..Opening::from(claimed) };
        let volume = match process.open(opening).await {
            Ok(volume) => volume,
            Err(_) => {
                process.life.die();
                return None;
            }
        };
        let flushes_to_store = plan.durability == Durability::Store;
        let era = Rc::new(RefCell::new(Era { flushes_to_store, ..Era::default() }));
        for _ in 0..CLIENTS {
            drop(spawn(Rc::clone(self).client(Arc::clone(&volume), Rc::clone(&era))));
        }
        Some(Served { process, era })
    }
}

struct Served {
    process: Process,
    era: Rc<RefCell<Era>>,
}

/// One history of a volume, from its creation on.
async fn history(story: &Rc<Story>) {
    let world = &story.machines.world;
    let mut eras: Vec<(Rc<RefCell<Era>>, Owed)> = Vec::new();
    let mut machine = 0;
    for _ in 0..ERAS {
        let plan = Plan::draw(&story.machines, machine, 0.0, 20..120);
        if let Some((_, owed)) = eras.last_mut().filter(|_| !plan.has_log) {
            // It goes on without the log, if it gets that far.
            *owed = Owed::Stored;
        }
        // By force each process gets it; a log of its own goes on nevertheless.
        let serving = timeout(PATIENCE, story.serve(&plan, Claimed::TakeOver));
        let served = until_power_cut(world, serving).await;
        world.keep_power();
        let is_elsewhere = match served.map(|served| served.expect("it comes to an end")) {
            Some(Some(Served { process, era })) => {
                let moment = sleep(Duration::from_millis(story.below(400)));
                // It may die before.
                let _ = until_power_cut(world, moment).await;
                world.keep_power();
                // Another host takes it, while this one may go on.
                let is_elsewhere = story.below(2) == 0;
                if !is_elsewhere || story.below(2) == 0 {
                    process.life.die();
                }
                let is_killed = plan.death == Death::Killed;
                let owed = match (is_elsewhere, plan.has_log) {
                    (true, _) | (_, false) => Owed::Stored,
                    (false, true) if is_killed => Owed::Answered,
                    (false, true) => Owed::Flushed,
                };
                eras.push((era, owed));
                is_elsewhere
            }
            // What its predecessor left may be taken half.
            _ => {
                if let Some((_, owed)) = eras.last_mut() {
                    let has_same_log = plan.has_log && *owed != Owed::Stored;
                    *owed = match (has_same_log, plan.death) {
                        (true, Death::Killed) => *owed,
                        (true, Death::PowerCut(_)) => Owed::Flushed,
                        (false, _) => Owed::Stored,
                    };
                }
                false
            }
        };
        if is_elsewhere {
            machine = 1 - machine;
        }
    }
    // Whoever lives yet loses it now.
    if let Some((_, owed)) = eras.last_mut() {
        *owed = Owed::Stored;
    }
    let last = story.machines.sound(2, false).await;
    let opening = Opening::from(Claimed::TakeOver);
    let volume = last.open(opening).await.unwrap();
    sleep(Duration::from_secs(5)).await;
    for block in 0..BLOCKS {
        let first = block * BLOCK_SECTORS;
        let seen = read(&volume, first..first + BLOCK_SECTORS).await.unwrap()[0];
        let eras = eras.iter();
        let known = eras.map(|(era, owed)| era.borrow().operations(block, *owed));
        let known: Vec<_> = known.collect();
        let left = linear::explain(&BTreeSet::from([0]), &known);
        assert!(
            left.contains(&seen),
            "block {block} has {seen}, not one of {left:?}, after {known:#?}"
        );
    }
    assert_eq!(last.volumes.check(&name(), &mut |_| {}).await.unwrap().damaged_count, 0);
}

#[test]
fn clients_see_one_register_per_block_whoever_serves_it() {
    scenario(300, async |world| {
        let machines = Machines::new(&world, 3);
        machines.sound(0, false).await.volumes.create(&name(), LEN).await.unwrap();
        let (clock, last_write) = (Cell::new(0), Cell::new(0));
        let story = Rc::new(Story { machines, clock, last_write });
        history(&story).await;
    });
}
