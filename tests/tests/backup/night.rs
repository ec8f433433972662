//! Backups night after night, under load and kills: oVirt's own run has 64 full and 896 incremental
//! ones, without kills.
//!
//! `MICA_BACKUPS` is how many full backups there are, each of a disk of its own; `MICA_BACKUP_SEED`
//! is where random numbers begin.

use crate::restored::restored;
use mica_tests::kept::World;
use mica_tests::{clock, judge, mica};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Incremental backups after each full one: of a few disks, and of many.
const INCREMENTAL: [usize; 2] = [6, 14];
/// So many are many.
const MANY: u64 = 16;

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
}

/// Each disk is backed up in full and then what changed, into one folder, while its guest writes;
/// readers and the server are killed. Each state is given back as it was.
#[test]
fn night_after_night_every_state_is_given_back() {
    let (disks, seed) = (variable("MICA_BACKUPS", 4), variable("MICA_BACKUP_SEED", 1));
    let incrementals = INCREMENTAL[usize::from(disks >= MANY)];
    let (mut full, mut incremental, mut kills) = (0, 0, 0);
    for number in 0..disks {
        let Some(mut world) = World::new(seed + number, &[]) else { return };
        let mut states = Vec::new();
        for night in 0..=incrementals {
            let state = format!("n{night}");
            let (wanted, killed) = back_up(&mut world, night, &state);
            kills += killed;
            match night {
                0 => full += 1,
                _ => incremental += 1,
            }
            states.push((state, wanted));
            let mut guest = world.guest();
            (0..5).for_each(|_| world.change(&mut guest));
        }
        let folder = world.path("web").display().to_string();
        mica::run(["backup", "verify", "-q", &folder]).ok();
        // All of them of the first disk, of the others some.
        let step = if number == 0 { 1 } else { 5 };
        for (state, wanted) in states.iter().rev().step_by(step) {
            let given = restored(world.dir.path(), "web", state, "raw");
            judge::same_bytes(&format!("seed {}, {state}", seed + number), &given, wanted);
        }
        world.stop();
    }
    eprintln!("{full} full and {incremental} incremental backups, {kills} kills, 0 wrong");
}

/// Changes the disk, and backs its state up. Returns that, and how often something was killed.
fn back_up(world: &mut World, night: usize, state: &str) -> (Vec<u8>, u32) {
    let mut guest = world.guest();
    (0..1 + world.draw(25)).for_each(|_| world.change(&mut guest));
    let since = night.checked_sub(1).map(|before| format!("n{before}"));
    world.begin(since.as_deref(), state).ok();
    let wanted = world.model.clone();
    let target = world.path("web").display().to_string();
    let image = format!("{}@{state}", world.path("disk.qcow2").display());
    let mut kills = 0;
    // Over NBD, or from the file; and compressed, or not.
    let (by_nbd, packed) = (world.draw(3) > 0, world.draw(2) == 0);
    let source = if by_nbd { world.uri() } else { image };
    let mut args = vec!["backup", "-q", "--since-last"];
    args.extend(packed.then_some("--compress"));
    args.extend([&*source, &target]);
    for _ in 0..world.draw(3) {
        let mut reader = Command::new(mica::binary());
        reader.args(&args).stderr(Stdio::null()).stdin(Stdio::null());
        let mut reader = reader.spawn().expect("started");
        // The guest goes on.
        (0..1 + world.draw(5)).for_each(|_| world.change(&mut guest));
        clock::sleep(Duration::from_micros(world.draw(8000) as u64));
        reader.kill().expect("ended");
        reader.wait().expect("ended");
        kills += 1;
        if world.draw(4) == 0 {
            world.kill();
            world.start();
            guest = world.guest();
            world.begin(since.as_deref(), state).ok();
            kills += 1;
        }
    }
    mica::run(&args).ok();
    world.ctl(&["backup", "end", "disk"]).ok();
    judge::same_bytes("the state, by QEMU", &world.state(state), &wanted);
    (wanted, kills)
}
