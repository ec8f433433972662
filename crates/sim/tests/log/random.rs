//! Volumes that work at random on one device, until the power goes, the process dies, or a change
//! of the file fails.

use crate::model::{Chances, Life, Model, Volume};
use mica_block::Result;
use mica_sim::crash::{loss_at_random, until_power_cut};
use mica_sim::{ChangeFault, Operation, World, scenario};
use mica_volume::{Log, NotPushed};
use std::cell::RefCell;
use std::time::Duration;

/// A log that does not answer within this simulated time never will.
const PATIENCE: Duration = Duration::from_secs(600);

struct Work<'a> {
    model: &'a Model,
    logs: &'a [Option<Log>],
    steps: u64,
}

impl Work<'_> {
    fn below(&self, bound: u64) -> u64 {
        self.model.world.random_below(bound)
    }

    /// One task of volume `which`.
    async fn run(&self, which: usize) -> Result<()> {
        let Some(log) = &self.logs[which] else { return Ok(()) };
        let volume = &self.model.volumes[which];
        for _ in 0..self.steps {
            match self.below(12) {
                0..=5 => self.push(log, volume).await?,
                6..=8 => Self::sync(log, volume).await?,
                9 => {
                    let stored = {
                        let mut volume = volume.borrow_mut();
                        volume.stored += self.below(volume.next() - volume.stored + 1);
                        volume.stored
                    };
                    log.free(stored - self.below(3).min(stored));
                }
                _ => mica_rt::sleep(Duration::from_micros(self.below(200))).await,
            }
        }
        Self::sync(log, volume).await
    }

    async fn sync(log: &Log, volume: &RefCell<Volume>) -> Result<()> {
        let next = log.next();
        log.sync().await?;
        let mut volume = volume.borrow_mut();
        volume.durable = volume.durable.max(next);
        volume.written = volume.written.max(next);
        Ok(())
    }

    /// A few records, then perhaps waits for them.
    async fn push(&self, log: &Log, volume: &RefCell<Volume>) -> Result<()> {
        let mut last = None;
        for _ in 0..1 + self.below(6) {
            let (seed, made) = self.model.make();
            loop {
                match log.push(made.record()) {
                    Ok(ticket) => {
                        let mut volume = volume.borrow_mut();
                        assert_eq!(ticket.number(), volume.next());
                        volume.records.push(seed);
                        last = Some(ticket);
                        break;
                    }
                    Err(NotPushed::Failed(error)) => return Err(error),
                    Err(NotPushed::NoRoom) => {
                        // What others push meanwhile has to be stored, too.
                        self.store_all();
                        let patience = Duration::from_millis(1);
                        mica_rt::timeout(patience, log.has_room()).await.unwrap_or(Ok(()))?;
                    }
                }
            }
        }
        if self.below(3) > 0
            && let Some(ticket) = last
        {
            log.written(ticket).await?;
            let mut volume = volume.borrow_mut();
            volume.written = volume.written.max(ticket.number() + 1);
        }
        Ok(())
    }

    /// Everything that was done is in extents.
    fn store_all(&self) {
        for (volume, log) in self.model.volumes.iter().zip(self.logs) {
            let Some(log) = log else { continue };
            let mut volume = volume.borrow_mut();
            volume.stored = volume.next();
            log.free(volume.stored);
        }
    }
}

/// Opens, works, and perhaps ends some logs.
async fn work(model: &Model, steps: u64) -> Result<()> {
    let chances = Chances { set_aside: 6, start: 80 };
    let mut logs = model.open(chances).await?;
    let all = Work { model, logs: &logs, steps };
    let tasks = (0..logs.len()).flat_map(|which| [which, which]);
    let worked = mica_rt::join_all(tasks.map(|which| all.run(which))).await;
    worked.into_iter().collect::<Result<()>>()?;
    for (volume, log) in model.volumes.iter().zip(&mut logs) {
        if model.world.random_below(8) == 0
            && let Some(log) = log.take()
        {
            volume.borrow_mut().life = Life::Unsure;
            log.end().await?;
            volume.borrow_mut().life = Life::None;
        }
    }
    Ok(())
}

async fn round(world: &World, model: &Model) {
    let (operations, loss) = (1 + world.random_below(80), loss_at_random(world));
    let (mut may_fail, mut may_die) = (false, false);
    match world.random_below(8) {
        0..=3 => world.cut_power_after(operations, loss),
        4..=5 => {
            world.kill_after(operations);
            may_die = true;
        }
        6 => {
            let kinds = [Operation::Write, Operation::Sync];
            let operation = kinds[usize::try_from(world.random_below(2)).unwrap()];
            let lasting = world.random_below(2) == 0;
            world.inject_change(ChangeFault { operation, nth: operations, lasting, errno: 5 });
            may_fail = true;
        }
        _ => {}
    }
    let before = world.steps_completed();
    let all = mica_rt::timeout(PATIENCE, work(model, 2 + world.random_below(25)));
    let outcome = until_power_cut(world, all).await;
    let outcome = outcome.map(|in_time| in_time.expect("the log answers"));
    world.keep_power();
    let struck = world.heal_changes();
    match outcome {
        // Killed: what was written is there. Otherwise only what is durable.
        None if may_die => {}
        None => model.crash(),
        Some(Ok(())) => {
            assert!(!struck, "nobody noticed that a change failed");
            // What a call that was given up has begun ends by itself.
            mica_rt::sleep(Duration::from_millis(50)).await;
        }
        Some(Err(error)) => {
            assert!(may_fail && struck, "{}", error.in_one_line());
            world.cut_power(loss);
            model.crash();
        }
    }
    assert!(world.steps_completed() > before, "something was done");
}

#[test]
fn log_keeps_a_prefix_with_everything_that_was_promised() {
    scenario(300, async |world| {
        let segments = usize::try_from(3 + world.random_below(9)).unwrap();
        let volumes = u8::try_from(1 + world.random_below(3)).unwrap();
        let model = Model::new(&world, segments, volumes);
        for _ in 0..6 {
            round(&world, &model).await;
        }
    });
}

/// One volume, the shortest log: every record overwrites what an earlier one left.
#[test]
fn shortest_log_goes_around_many_times() {
    scenario(20, async |world| {
        let model = Model::new(&world, 3, 1);
        for _ in 0..4 {
            let all = mica_rt::timeout(PATIENCE, work(&model, 120));
            all.await.expect("the log answers").expect("nothing fails");
            world.cut_power(loss_at_random(&world));
            model.crash();
        }
    });
}
