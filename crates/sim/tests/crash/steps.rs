//! A writer is killed after any step: an operation that changes a file, or a change of the memory
//! that outlives it. What it had in flight is done, half done or not. Then another program may
//! write the image and leave the name of its log, as QEMU does when it commits into it.

use crate::chain::ChainSubject;
use crate::random::subject;
use mica_block::Manage;
use mica_sim::crash::{Mode, Subject as _, load_at_random, until_power_cut};
use mica_sim::{ChangeFault, ENOSPC, Errors, Guest, Load, ModelDisk, Operation, World, scenario};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

const SECTOR: usize = 512;
/// Where the autoclear bits are in a header.
const AUTOCLEAR_AT: usize = 88;
/// The most steps that a writer lives.
const STEPS_MAX: u64 = 400;

type Model = Rc<RefCell<ModelDisk>>;

/// A chain whose writer has a log.
fn logged_subject(world: &World) -> ChainSubject {
    loop {
        let subject = subject(world);
        if subject.outlives_the_process() {
            return subject;
        }
    }
}

/// A guest works until its server is killed after some steps.
async fn work_and_die(world: &World, subject: &ChainSubject, model: &Model, errors: Errors) {
    let sectors = subject.shape.initial.len() as u64 / 512;
    do_and_die(world, subject, model, (errors, STEPS_MAX), || Load {
        give_up_one_in: 0,
        ..load_at_random(world, sectors)
    })
    .await;
}

/// The same for the load that `load` makes, at most so many steps.
async fn do_and_die(
    world: &World,
    subject: &ChainSubject,
    model: &Model,
    (errors, steps_max): (Errors, u64),
    load: impl FnOnce() -> Load,
) {
    let disk = subject.open(world, Mode::Write).await.unwrap();
    let guest = Guest::new(world, disk, model, errors);
    guest.settle().await.unwrap();
    world.kill_after(1 + world.random_below(steps_max));
    let load = load();
    let before = world.cuts();
    // A guest that is done earlier is killed with nothing in flight.
    if until_power_cut(world, guest.run(&load)).await.is_some() && world.cuts() == before {
        world.keep_power();
        world.kill();
    }
}

/// Processes that take over are killed, too, at any step.
async fn take_over_and_die(world: &World, subject: &ChainSubject) {
    for _ in 0..world.random_below(3) {
        world.kill_after(1 + world.random_below(24));
        let before = world.cuts();
        let opened = until_power_cut(world, subject.open(world, Mode::Write)).await;
        drop(opened);
        if world.cuts() == before {
            world.keep_power();
            world.kill();
        }
    }
}

async fn open(world: &World, subject: &ChainSubject, mode: Mode) -> Arc<dyn Manage> {
    subject.open(world, mode).await.unwrap()
}

async fn read_all(world: &World, subject: &ChainSubject, mode: Mode) -> Vec<u8> {
    let disk = open(world, subject, mode).await;
    let len = subject.shape.initial.len() as u64;
    let bytes = mica_sim::read(&*disk, crate::plain::range(0, len)).await.unwrap();
    if mode == Mode::Write {
        disk.close().await.unwrap();
    }
    bytes
}

#[test]
fn writer_that_is_killed_after_any_step_has_lost_nothing_that_it_acknowledged() {
    scenario(80, |world| async move {
        let subject = logged_subject(&world);
        let model = Rc::new(RefCell::new(subject.shape.model()));
        for _ in 0..2 {
            work_and_die(&world, &subject, &model, Errors::Unexpected).await;
            model.borrow_mut().die();
            take_over_and_die(&world, &subject).await;
            if world.random_below(2) == 0 {
                let bytes = read_all(&world, &subject, Mode::Read).await;
                model.borrow().clone().settle(0, &bytes).unwrap();
            }
        }
        let bytes = read_all(&world, &subject, Mode::Write).await;
        model.borrow_mut().settle(0, &bytes).unwrap();
        subject.check(&world).await.unwrap_or_else(|error| panic!("{error}"));
    });
}

/// Whoever never flushes fills the log, which is compacted again and again.
#[test]
fn writer_that_is_killed_while_its_log_is_compacted_has_lost_nothing_that_it_acknowledged() {
    scenario(40, |world| async move {
        let subject = loop {
            let subject = logged_subject(&world);
            if subject.shape.cluster_bytes <= 4096 {
                break subject;
            }
        };
        world.set_log_capacity(64 << 10);
        let model = Rc::new(RefCell::new(subject.shape.model()));
        for _ in 0..2 {
            let load = || Load {
                tasks: 1 + world.random_below(4),
                requests: 300,
                sectors_max: 16,
                flush_one_in: [50, 1000][usize::try_from(world.random_below(2)).unwrap()],
                give_up_one_in: 0,
            };
            do_and_die(&world, &subject, &model, (Errors::Unexpected, 3000), load).await;
            model.borrow_mut().die();
            take_over_and_die(&world, &subject).await;
        }
        let bytes = read_all(&world, &subject, Mode::Write).await;
        model.borrow_mut().settle(0, &bytes).unwrap();
        subject.check(&world).await.unwrap_or_else(|error| panic!("{error}"));
    });
}

/// What another program changed in the image, sector by sector.
struct Foreign {
    bytes: Vec<u8>,
    changed: Vec<bool>,
}

/// Another program, which knows nothing of logs, works on the image and closes it; the image keeps
/// the name of the log, and its length.
async fn write_elsewhere(world: &World, subject: &ChainSubject, model: &Model) -> Foreign {
    let elsewhere = World::new(world.random_below(u64::MAX));
    let mut name = [0; 8];
    for (path, mut bytes) in world.files() {
        if path == subject.shape.top {
            let bits = &mut bytes[AUTOCLEAR_AT..AUTOCLEAR_AT + 8];
            name.copy_from_slice(bits);
            bits[..4].fill(0);
        }
        elsewhere.put(path, bytes);
    }
    let its_model = Rc::new(RefCell::new(model.borrow().clone()));
    let disk = open(&elsewhere, subject, Mode::Write).await;
    let guest = Guest::new(&elsewhere, disk, &its_model, Errors::Unexpected);
    guest.settle().await.unwrap();
    let before = its_model.borrow().bytes().expect("what was settled is known");
    let load = load_at_random(world, subject.shape.initial.len() as u64 / 512);
    // Whoever opens the image, and writes nothing, leaves the log what it is.
    let requests = if world.random_below(4) == 0 { 0 } else { load.requests };
    guest.run(&Load { requests, ..load }).await;
    guest.close().await.unwrap();
    its_model.borrow_mut().die();
    let shown = read_all(&elsewhere, subject, Mode::Read).await;
    its_model.borrow_mut().settle(0, &shown).unwrap();
    let bytes = its_model.borrow().bytes().expect("what was flushed is known");
    let sectors = before.chunks(SECTOR).zip(bytes.chunks(SECTOR));
    let changed = sectors.map(|(before, after)| before != after).collect();
    for (path, mut bytes) in elsewhere.files() {
        let is_top = path == subject.shape.top;
        let now = world.files().into_iter().find(|(there, _)| *there == path).map(|(_, now)| now);
        if !is_top && now.as_ref() == Some(&bytes) {
            continue;
        }
        world.change(path, |file| {
            bytes.resize(bytes.len().max(file.len()), 0);
            if is_top {
                bytes[AUTOCLEAR_AT..AUTOCLEAR_AT + 4].copy_from_slice(&name[..4]);
            }
            *file = bytes;
        });
    }
    Foreign { bytes, changed }
}

/// The stories: an empty log freed clusters that another program had allocated meanwhile; a log
/// that dropped clusters was applied over what another program had written into them in place,
/// without changing any table.
#[test]
fn what_another_program_made_durable_outranks_a_log() {
    let applied = RefCell::new([0_u32; 2]);
    scenario(150, |world| {
        let applied = &applied;
        async move {
            let subject = logged_subject(&world);
            let model = Rc::new(RefCell::new(subject.shape.model()));
            work_and_die(&world, &subject, &model, Errors::Unexpected).await;
            model.borrow_mut().crash();
            take_over_and_die(&world, &subject).await;
            let foreign = write_elsewhere(&world, &subject, &model).await;
            take_over_and_die(&world, &subject).await;
            let mode = [Mode::Read, Mode::Write][usize::from(world.random_below(2) == 0)];
            for mode in [mode, Mode::Write] {
                let bytes = read_all(&world, &subject, mode).await;
                let sectors = bytes.chunks(SECTOR).zip(foreign.bytes.chunks(SECTOR));
                let mut is_applied = false;
                let mut its_model = model.borrow().clone();
                for ((number, (shown, theirs)), changed) in (0..).zip(sectors).zip(&foreign.changed)
                {
                    if *changed {
                        assert!(shown == theirs, "sector {number} is not what was made durable");
                        continue;
                    }
                    is_applied |= shown != theirs;
                    its_model.settle(number, shown).unwrap();
                }
                applied.borrow_mut()[usize::from(is_applied)] += 1;
            }
            subject.check(&world).await.unwrap_or_else(|error| panic!("{error}"));
        }
    });
    let [left, put] = *applied.borrow();
    assert!(left > 0 && put > 0, "logs are left ({left}), and put into the image ({put})");
}

/// The same while the file system is full for a while.
#[test]
fn writer_that_is_killed_while_space_is_short_has_lost_nothing_that_it_acknowledged() {
    scenario(60, |world| async move {
        let subject = logged_subject(&world);
        let model = Rc::new(RefCell::new(subject.shape.model()));
        world.inject_change(ChangeFault {
            operation: [Operation::Write, Operation::SetLen, Operation::Space]
                [usize::try_from(world.random_below(3)).unwrap()],
            nth: 1 + world.random_below(40),
            lasting: world.random_below(2) == 0,
            errno: ENOSPC,
        });
        work_and_die(&world, &subject, &model, Errors::ForLackOfSpace).await;
        world.heal_changes();
        model.borrow_mut().die();
        let bytes = read_all(&world, &subject, Mode::Write).await;
        model.borrow_mut().settle(0, &bytes).unwrap();
        subject.check(&world).await.unwrap_or_else(|error| panic!("{error}"));
    });
}
