//! The first, the second, the third operation fails, until a run does not get that far.

use crate::chain::{ChainSubject, Shape};
use crate::plain::{Plain, read, write};
use mica_block::Manage as _;
use mica_qcow2_tools::create::ImageWish;
use mica_sim::crash::{Crashes, Mode, Subject, loss_at_random};
use mica_sim::{ChangeFault, ENOSPC, Errors, Guest, Load, Operation, ReadFault, World, scenario};
use std::cell::RefCell;
use std::rc::Rc;

const EIO: i32 = 5;
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

/// A file system that is full for a single operation: the flush that reports it is retried and
/// makes everything durable.
async fn be_full_once(world: &World, nth: u64, shape: &Shape) -> bool {
    let subject = ChainSubject { shape: shape.clone() };
    shape.put_in(world);
    let model = Rc::new(RefCell::new(shape.model()));
    let disk = subject.open(world, Mode::Write).await.expect("it opens");
    let guest = Guest::new(world, disk, &model, Errors::ForLackOfSpace);
    let load = Load { tasks: 3, requests: 6, sectors_max: 64, flush_one_in: 5, give_up_one_in: 0 };
    // From here on the header says that the image is in use.
    guest.run(&load).await;
    world.inject_change(ChangeFault {
        operation: Operation::Write,
        nth,
        lasting: false,
        errno: ENOSPC,
    });
    guest.run(&load).await;
    if guest.flush().await.is_err() {
        guest.flush().await.expect("there is space again");
    }
    let struck = world.heal_changes();
    guest.run(&load).await;
    guest.close().await.expect("there is space");
    assert!(struck || guest.failed() == 0, "nothing struck");
    let leaks = subject.check(world).await.expect("sound");
    assert_eq!(leaks, 0, "a lack of space leaks nothing");
    let disk = subject.open(world, Mode::Read).await.expect("it opens again");
    Guest::new(world, disk, &model, Errors::Unexpected).read_all().await;
    struck
}

#[test]
fn a_disk_continues_when_there_is_space_again() {
    scenario(16, |world| async move {
        let shape = Shape::random(&world);
        let mut nth = 1;
        while be_full_once(&World::new(world.seed()), nth, &shape).await {
            nth += 1;
        }
    });
}

/// The story: a new refcount block was durable, but the table that was to name it could not be
/// read. The next request found the block where it wanted to put one, and declared the image
/// corrupt.
#[test]
fn refcount_table_that_cannot_be_read_once_harms_no_later_write() {
    let wish = ImageWish { cluster_bytes: Some(512), ..ImageWish::default() };
    scenario(1, |world| {
        let wish = &wish;
        async move {
            for number in 1.. {
                let image = Plain::new(&world, wish, 4 << 20).await;
                let chain = image.open(Mode::Write).await;
                world.inject(Plain::top(), ReadFault::FailNth(number, EIO));
                let failed = write(&chain, 0, 7, 512 << 10).await.is_err();
                world.heal(Plain::top());
                if !failed {
                    assert!(number > 3, "only {number} reads can fail");
                    break;
                }
                write(&chain, 0, 9, 512 << 10).await.unwrap();
                assert!(!image.is_marked_corrupt(), "after read {number} failed");
                chain.close().await.unwrap();
                image.expect_uncorrupted("after a read failed").await;
                let chain = image.open(Mode::Read).await;
                let shown = read(&chain, 0, 512 << 10).await.unwrap();
                assert!(shown.iter().all(|byte| *byte == 9), "after read {number} failed");
            }
        }
    });
}
