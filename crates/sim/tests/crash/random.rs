//! Chains of random shape under random load, with and without crashes.

use crate::chain::{ChainSubject, Shape};
use mica_rt::{Backend, Executor};
use mica_sim::crash::{Crashes, Cut, Ending, cut_at_random, load_at_random};
use mica_sim::{Load, Loss, World, scenario};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// One run in this many is judged by QEMU, too.
const FOREIGN_ONE_IN: u64 = 20;

pub(crate) fn subject(world: &World) -> ChainSubject {
    let shape = Shape::random(world);
    shape.put_in(world);
    ChainSubject { shape }
}

#[test]
fn chain_that_is_closed_is_clean_and_shows_what_was_written() {
    scenario(30, |world| async move {
        let subject = subject(&world);
        let mut crashes = Crashes::new(&world, &subject, subject.shape.model());
        for _ in 0..2 {
            let load = load_at_random(&world, subject.shape.initial.len() as u64 / 512);
            let work = async |guest: &mica_sim::Guest| {
                guest.run(&load).await;
                guest.read_all().await;
            };
            let ending = crashes.round(Cut::Never, Loss::Nothing, work).await;
            assert_eq!(ending, Ending::Closed);
        }
        if world.random_below(FOREIGN_ONE_IN) == 0 {
            crashes.judge_elsewhere();
        }
    });
}

#[test]
fn chain_survives_power_cuts() {
    scenario(50, |world| async move { crash(&world, 0).await });
}

/// A server that is killed under a running guest and replaced, repeatedly: everything acknowledged
/// to the guest is there, flushed or not.
#[test]
fn killed_writer_has_lost_nothing_that_it_acknowledged() {
    scenario(30, |world| async move {
        let subject = subject(&world);
        let mut crashes = Crashes::new(&world, &subject, subject.shape.model());
        for _ in 0..3 {
            let mut load = load_at_random(&world, subject.shape.initial.len() as u64 / 512);
            load.give_up_one_in = 0;
            let cut = Cut::KillAt(Duration::from_micros(1 + world.random_below(20_000)));
            crashes.round(cut, Loss::Nothing, async |guest| guest.run(&load).await).await;
        }
    });
}

/// The scenario has to notice when syncs do nothing.
#[test]
fn missing_syncs_are_noticed() {
    let noticed = (0..40).filter(|seed| {
        let run = AssertUnwindSafe(|| {
            let executor = Executor::new(Backend::Sim { seed: *seed }).unwrap();
            let world = World::new(*seed);
            world.ignore_syncs(1);
            executor.block_on(crash(&world, 0));
        });
        catch_unwind(run).is_err()
    });
    let noticed = noticed.count();
    assert!(noticed >= 10, "only {noticed} of 40 runs notice");
}

/// A client that goes away drops its requests, wherever they are.
#[test]

fn abandoned_requests_do_no_harm() {
    scenario(30, |world| async move { crash(&world, 10).await });
}

/// Rounds that end in power cuts, and one that does not. One write in `give_up_one_in` is dropped
/// halfway, unless that is zero.
async fn crash(world: &World, give_up_one_in: u64) {
    let subject = subject(world);
    let mut crashes = Crashes::new(world, &subject, subject.shape.model());
    let foreign = world.random_below(FOREIGN_ONE_IN) == 0;
    for _ in 0..1 + world.random_below(4) {
        let load = load_at_random(world, subject.shape.initial.len() as u64 / 512);
        let load = Load { give_up_one_in, ..load };
        let (cut, loss) = cut_at_random(world, 150);
        crashes.round(cut, loss, async |guest| guest.run(&load).await).await;
        if foreign {
            crashes.judge_elsewhere();
        }
    }
    let load = load_at_random(world, subject.shape.initial.len() as u64 / 512);
    let load = Load { give_up_one_in, ..load };
    let work = async |guest: &mica_sim::Guest| {
        guest.run(&load).await;
        guest.read_all().await;
    };
    crashes.round(Cut::Never, Loss::Nothing, work).await;
    if foreign {
        crashes.judge_elsewhere();
    }
}
