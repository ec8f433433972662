//! The first, the second, the third operation fails, until a run does not get that far.

use crate::chain::{ChainSubject, Shape};
use mica_sim::crash::{Crashes, loss_at_random};
use mica_sim::{ChangeFault, Load, Operation, World, scenario};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const EOPNOTSUPP: i32 = 95;

/// Fails one operation after the other of the same work on the same chain.
async fn fail_each(world: &World, operation: Operation, errnos: [i32; 2]) {
    let subject = ChainSubject { shape: Shape::random(world) };
    let lasting = world.random_below(2) == 0;
    let errno = errnos[usize::try_from(world.random_below(2)).unwrap()];
    let load = Load { tasks: 2, requests: 4, sectors_max: 32, flush_one_in: 4, give_up_one_in: 0 };
    let step = 1 + world.random_below(3);
    let mut nth = 1;
    loop {
        // The same seed: the same work.
        let world = World::new(world.seed());
        world.trace(|| format!("{operation:?} {nth} fails with {errno}, lasting: {lasting}"));
        subject.shape.put_in(&world);
        let mut crashes = Crashes::new(&world, &subject, subject.shape.model());
        let fault = ChangeFault { operation, nth, lasting, errno };
        let loss = (world.random_below(4) > 0).then(|| loss_at_random(&world));
        if !crashes.fault_round(fault, loss, async |guest| guest.run(&load).await).await {
            return;
        }
        nth += step;
    }
}

#[test]
fn every_failing_write_is_survived() {
    scenario(16, |world| async move {
        fail_each(&world, Operation::Write, [EIO, ENOSPC]).await;
    });
}

#[test]
fn every_failing_sync_is_survived() {
    scenario(16, |world| async move {
        fail_each(&world, Operation::Sync, [EIO, ENOSPC]).await;
    });
}

#[test]
fn every_failing_change_of_space_is_survived() {
    scenario(16, |world| async move {
        fail_each(&world, Operation::Space, [EIO, EOPNOTSUPP]).await;
    });
}

#[test]
fn every_failing_change_of_length_is_survived() {
    scenario(16, |world| async move {
        fail_each(&world, Operation::SetLen, [EIO, ENOSPC]).await;
    });
}
