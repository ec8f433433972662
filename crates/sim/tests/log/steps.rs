//! A power cut after every single change of the file, in every way.

use crate::model::{Chances, Life, Model};
use mica_block::Result;
use mica_sim::crash::until_power_cut;
use mica_sim::{Loss, World, scenario};
use mica_volume::{Log, NotPushed};

/// Pushes `count` records and waits until they are written.
async fn push(model: &Model, log: &Log, which: usize, count: usize) -> Result<()> {
    let volume = &model.volumes[which];
    let mut last = None;
    for _ in 0..count {
        let (seed, made) = model.make();
        let ticket = loop {
            match log.push(made.record()) {
                Ok(ticket) => break ticket,
                Err(NotPushed::Failed(error)) => return Err(error),
                Err(NotPushed::NoRoom) => {
                    free(model, log, which, 0);
                    log.has_room().await?;
                }
            }
        };
        volume.borrow_mut().records.push(seed);
        last = Some(ticket);
    }
    log.written(last.expect("some were pushed")).await?;
    let mut volume = volume.borrow_mut();
    volume.written = volume.next();
    Ok(())
}

async fn sync(model: &Model, log: &Log, which: usize) -> Result<()> {
    log.sync().await?;
    let mut volume = model.volumes[which].borrow_mut();
    volume.durable = volume.next();
    Ok(())
}

/// All records but the last `behind` are in extents.
fn free(model: &Model, log: &Log, which: usize, behind: u64) {
    let mut volume = model.volumes[which].borrow_mut();
    volume.stored = volume.stored.max(volume.next() - behind);
    log.free(volume.stored);
}

const CHANCES: Chances = Chances { set_aside: 0, start: 100 };

/// Two volumes in eight segments: each begins several, frees some, and one ends.
async fn story(model: &Model) -> Result<()> {
    {
        let logs = model.open(CHANCES).await?;
        let [Some(one), Some(two)] = &logs[..] else { panic!("there is room for both") };
        for turn in 0..4 {
            push(model, one, 0, 5).await?;
            push(model, two, 1, 2).await?;
            if turn % 2 == 1 {
                sync(model, one, 0).await?;
                free(model, one, 0, 3);
            }
            free(model, two, 1, 1);
        }
        sync(model, two, 1).await?;
        push(model, one, 0, 3).await?;
    }
    // The next process, while the first has died.
    let mut logs = model.open(CHANCES).await?;
    let two = logs.remove(1).expect("there is room for both");
    let one = logs.remove(0).expect("there is room for both");
    free(model, &one, 0, 0);
    for _ in 0..3 {
        push(model, &one, 0, 4).await?;
        sync(model, &one, 0).await?;
        free(model, &one, 0, 2);
    }
    model.volumes[1].borrow_mut().life = Life::Unsure;
    free(model, &two, 1, 0);
    two.end().await?;
    model.volumes[1].borrow_mut().life = Life::None;
    for _ in 0..4 {
        push(model, &one, 0, 6).await?;
        free(model, &one, 0, 1);
    }
    sync(model, &one, 0).await
}

/// What is found after the cut is right, and so it is once more.
async fn judge(world: &World, model: &Model) {
    model.crash();
    for _ in 0..2 {
        let logs = model.open(CHANCES).await.expect("the log opens after the cut");
        if let Some(one) = &logs[0] {
            free(model, one, 0, 0);
            push(model, one, 0, 3).await.expect("the log goes on");
        }
        drop(logs);
        world.cut_power(Loss::Torn);
        model.crash();
    }
}

#[test]
fn power_cut_at_any_step_leaves_a_prefix() {
    let mut steps = 0;
    for at in 1.. {
        let finished = std::cell::Cell::new(false);
        for loss in Loss::ALL {
            scenario(1, async |world| {
                let model = Model::new(&world, 8, 2);
                world.cut_power_after(at, loss);
                if let Some(done) = until_power_cut(&world, story(&model)).await {
                    done.expect("nothing fails");
                    finished.set(true);
                    world.cut_power(loss);
                }
                judge(&world, &model).await;
            });
        }
        steps = at;
        if finished.get() {
            break;
        }
    }
    assert!(steps > 40, "the story has {steps} steps");
}
