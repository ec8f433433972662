//! Single stories: what a person would be told about each.

use crate::history::{LEN, SECTORS, read};
use crate::machines::{Death, Machines, Process, name};
use mica_block::{Disk, ErrorKind, Manage, Objects};
use mica_rt::{Buf, sleep, spawn, timeout};
use mica_sim::crash::until_power_cut;
use mica_sim::{World, scenario};
use mica_store::object::{FaultyOptions, ObjectOperation};
use mica_units::{GuestOffset, SECTOR_BYTES};
use mica_volume::{Claimed, Durability, Opening, SnapshotPer, Volume};
use std::sync::Arc;
use std::time::Duration;

const HOST: Opening = Opening {
    claimed: Claimed::Refuse,
    seen: None,
    log: None,
    log_place: None,
    durability: Durability::Host,
    snapshot_per: SnapshotPer::Interval,
};
const STORE: Opening = Opening {
    claimed: Claimed::Refuse,
    seen: None,
    log: None,
    log_place: None,
    durability: Durability::Store,
    snapshot_per: SnapshotPer::Interval,
};

fn by_force(opening: Opening) -> Opening {
    Opening { claimed: Claimed::TakeOver, ..opening }
}

async fn machines(world: &World) -> Machines {
    let machines = Machines::new(world, 3);
    let new = machines.kind();
    machines.sound(0, false).await.volumes.create_as(&name(), LEN, new).await.unwrap();
    machines
}

async fn write(volume: &Volume, sector: u64, number: u64) -> mica_block::Result<()> {
    let bytes = number.to_le_bytes().repeat(64);
    volume.write(GuestOffset::new(sector * SECTOR_BYTES), Buf::from_slice(&bytes)).await.0
}

async fn sectors(volume: &Volume, count: usize) -> Vec<u64> {
    read(volume, 0..count).await.unwrap()
}

async fn dies(process: &Process, volume: Arc<Volume>) {
    process.life.die();
    drop(volume);
    sleep(Duration::from_secs(1)).await;
}

/// At every request to the store, the process that replays dies, and the next one begins.
#[test]
fn crashes_at_every_step_of_a_replay_lose_nothing() {
    scenario(4, async |world| {
        let machines = machines(&world).await;
        let process = machines.sound(0, true).await;
        let volume = process.open(HOST).await.unwrap();
        for sector in 0..20 {
            write(&volume, sector, 100 + sector).await.unwrap();
        }
        // Not flushed: it is killed, and the machine lives.
        dies(&process, volume).await;
        let none = FaultyOptions::default();
        for steps in 1.. {
            let attempt = async {
                let mortal = (steps, Death::Killed);
                let process = machines.process(0, true, &none, mortal).await.unwrap();
                let volume = process.open(HOST).await.unwrap();
                (sectors(&volume, 20).await, process, volume)
            };
            let Some((found, process, volume)) = until_power_cut(&world, attempt).await else {
                continue;
            };
            assert_eq!(found, (100..120).collect::<Vec<_>>());
            assert!(steps > 10, "it died often enough");
            process.life.die();
            drop(volume);
            return;
        }
    });
}

/// The machine's log has what another host's take-over went on without.
#[test]
fn log_of_a_writer_that_was_overtaken_is_set_aside_and_said() {
    scenario(4, async |world| {
        let machines = machines(&world).await;
        let first = machines.sound(0, true).await;
        let volume = first.open(HOST).await.unwrap();
        write(&volume, 0, 7).await.unwrap();
        volume.flush().await.unwrap();
        dies(&first, volume).await;
        let other = machines.sound(1, true).await;
        let refused = other.open(HOST).await.err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
        let volume = other.open(by_force(HOST)).await.unwrap();
        assert_eq!(sectors(&volume, 2).await, [0, 0]);
        write(&volume, 1, 8).await.unwrap();
        volume.close().await.unwrap();
        let back = machines.sound(0, true).await;
        let volume = back.open(HOST).await.unwrap();
        assert_eq!(sectors(&volume, 2).await, [0, 8]);
        let weakness = volume.weakness().expect("it is said");
        assert!(weakness.contains("set aside") && weakness.contains("1 writes"), "{weakness}");
        let aside = back.device.as_ref().unwrap().volumes();
        assert!(aside.iter().any(|found| found.is_set_aside), "{aside:?}");
        volume.close().await.unwrap();
        // It is not found again.
        drop(volume);
        back.life.die();
        let again = machines.sound(0, true).await;
        let volume = again.open(STORE).await.unwrap();
        assert_eq!((sectors(&volume, 2).await, volume.weakness()), (vec![0, 8], None));
    });
}

/// The story: the store was put back from a copy while a host was down whose log had more. The next
/// writer had the number of the one before, so that this log was replayed over what it wrote.
#[test]
fn log_of_a_store_that_was_put_back_from_a_copy_is_not_replayed() {
    scenario(8, async |world| {
        let machines = machines(&world).await;
        let copy = machines.memory.contents();
        let first = machines.sound(0, true).await;
        let volume = first.open(HOST).await.unwrap();
        for number in 1..20 {
            write(&volume, 0, number).await.unwrap();
            write(&volume, 8, number).await.unwrap();
        }
        dies(&first, volume).await;
        for name in machines.memory.contents().keys() {
            machines.memory.delete(name).await.unwrap();
        }
        for (name, content) in copy {
            machines.memory.put_if_absent(&name, Buf::from_slice(&content)).await.0.unwrap();
        }
        let second = machines.sound(0, false).await;
        let volume = second.open(STORE).await.unwrap();
        write(&volume, 0, 100).await.unwrap();
        volume.flush().await.unwrap();
        dies(&second, volume).await;
        let third = machines.sound(0, true).await;
        let volume = match third.open(HOST).await {
            Ok(volume) => volume,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
                third.open(by_force(HOST)).await.unwrap()
            }
        };
        assert_eq!(sectors(&volume, 9).await, [100, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert!(volume.weakness().unwrap().contains("set aside"));
    });
}

#[test]
fn fenced_writer_acknowledges_nothing_from_then_on() {
    scenario(20, async |world| {
        let machines = machines(&world).await;
        let first = machines.sound(0, true).await;
        let old = first.open(STORE).await.unwrap();
        write(&old, 0, 1).await.unwrap();
        old.flush().await.unwrap();
        let other = machines.sound(1, false).await;
        let new = other.open(by_force(STORE)).await.unwrap();
        assert_eq!(sectors(&new, 1).await, [1]);
        // It does not know yet.
        write(&old, 0, 2).await.unwrap();
        let error = old.flush().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(error.to_string().contains("host-1"), "{error}");
        assert!(write(&old, 0, 3).await.is_err() && old.close().await.is_err());
        assert!(old.latch().is_some());
        write(&new, 1, 4).await.unwrap();
        new.close().await.unwrap();
        assert_eq!(sectors(&new, 2).await, [1, 4]);
    });
}

/// Minutes without a store: everybody waits, it is said, and nothing is lost or latched.
#[test]
fn store_that_is_away_makes_guests_wait_and_nothing_else() {
    scenario(8, async |world| {
        let machines = machines(&world).await;
        let process = machines.sound(0, true).await;
        let durability = if machines.below(2) == 0 { Durability::Host } else { Durability::Store };
        let volume = process.open(Opening { durability, ..STORE }).await.unwrap();
        process.life.set_down(true);
        // More than the log has room for.
        let guest = {
            let volume = Arc::clone(&volume);
            spawn(async move {
                for number in 1..100 {
                    for sector in 0..SECTORS as u64 {
                        if sector % 8 == number % 8 {
                            write(&volume, sector, number).await.unwrap();
                        }
                    }
                }
                volume.flush().await.unwrap();
            })
        };
        sleep(Duration::from_secs(600)).await;
        let weakness = volume.weakness().expect("it is said");
        assert!(weakness.contains("the store is down"), "{weakness}");
        assert!(volume.latch().is_none());
        process.life.set_down(false);
        timeout(Duration::from_secs(600), guest).await.expect("it goes on");
        assert!(!volume.weakness().is_some_and(|said| said.contains("the store is down")));
        let found = sectors(&volume, SECTORS).await;
        let last = |sector: usize| (1..100).rev().find(|number| number % 8 == sector as u64 % 8);
        assert_eq!(found, (0..SECTORS).map(|sector| last(sector).unwrap()).collect::<Vec<_>>());
        volume.close().await.unwrap();
        let other = machines.sound(1, false).await;
        let volume = other.open(STORE).await.unwrap();
        assert_eq!(sectors(&volume, SECTORS).await, found);
    });
}

/// Puts that are never answered, done or not: the next writer has all that was flushed.
#[test]
fn writer_whose_puts_hang_is_overtaken_without_loss() {
    scenario(40, async |world| {
        let machines = machines(&world).await;
        let faults = FaultyOptions {
            seed: machines.below(1 << 40),
            only: Some(ObjectOperation::Put),
            hung: 0.1,
            ..FaultyOptions::default()
        };
        let mortal = (u64::MAX, Death::Killed);
        let process = machines.process(0, false, &faults, mortal).await.unwrap();
        let mut flushed = 0;
        let guest = async {
            let volume = process.open(STORE).await.unwrap();
            for number in 1.. {
                write(&volume, 0, number).await.unwrap();
                volume.flush().await.unwrap();
                flushed = number;
            }
        };
        timeout(Duration::from_secs(60), guest).await.expect_err("it hangs at last");
        let other = machines.sound(1, false).await;
        let volume = other.open(by_force(STORE)).await.unwrap();
        let found = sectors(&volume, 1).await[0];
        assert!((flushed..=flushed + 1).contains(&found), "{found} after {flushed}");
    });
}

#[test]
fn volume_that_was_handed_over_is_for_one_host() {
    scenario(4, async |world| {
        let machines = machines(&world).await;
        let first = machines.sound(0, true).await;
        let volume = first.open(HOST).await.unwrap();
        write(&volume, 0, 1).await.unwrap();
        assert_eq!(volume.hand_over("").await.unwrap_err().kind(), ErrorKind::Invalid);
        volume.hand_over("host-1").await.unwrap();
        assert!(write(&volume, 0, 2).await.is_err());
        let third = machines.sound(2, false).await;
        let refused = third.open(STORE).await.err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Denied);
        assert!(refused.to_string().contains("host-1"), "{refused}");
        let heir = machines.sound(1, false).await;
        let volume = heir.open(STORE).await.unwrap();
        assert_eq!(sectors(&volume, 1).await, [1]);
        volume.close().await.unwrap();
        heir.volumes.hand_over(&name(), "host-0").await.unwrap();
        let volume = third.open(by_force(STORE)).await.unwrap();
        assert_eq!(sectors(&volume, 1).await, [1]);
    });
}

#[test]
fn volume_that_is_deleted_by_force_takes_no_more_writes() {
    scenario(4, async |world| {
        let machines = machines(&world).await;
        let first = machines.sound(0, false).await;
        let volume = first.open(STORE).await.unwrap();
        let other = machines.sound(1, false).await;
        let refused = other.volumes.delete(&name(), Claimed::Refuse).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Denied);
        other.volumes.delete(&name(), Claimed::TakeOver).await.unwrap();
        write(&volume, 0, 1).await.unwrap();
        let error = volume.flush().await.unwrap_err();
        assert!(error.to_string().contains("deleted"), "{error}");
        other.volumes.create(&name(), LEN).await.unwrap();
        let volume = other.open(STORE).await.unwrap();
        assert_eq!(sectors(&volume, 1).await, [0]);
    });
}

/// A checkpoint every so many extents: who takes over reads few of them.
#[test]
fn writer_of_many_extents_puts_checkpoints() {
    scenario(2, async |world| {
        let machines = machines(&world).await;
        let first = machines.sound(0, false).await;
        let volume = first.open(STORE).await.unwrap();
        for number in 1..=200 {
            write(&volume, number % 8, number).await.unwrap();
            volume.flush().await.unwrap();
        }
        let heads = || {
            let contents = machines.memory.contents();
            contents.keys().filter(|name| name.as_str().starts_with("volumes/web/")).count()
        };
        sleep(Duration::from_secs(1)).await;
        assert_eq!(heads(), 2 + 3, "created, opened, and three checkpoints");
        let info = machines.sound(1, false).await.volumes.info(&name()).await.unwrap();
        assert!(info.state.records >= 180, "{info:?}");
        let other = machines.sound(1, false).await.open(by_force(STORE)).await.unwrap();
        assert_eq!(sectors(&other, 8).await, [200, 193, 194, 195, 196, 197, 198, 199]);
    });
}

/// What waits is put after a second, without a flush, while somebody tends the volume.
#[test]
fn what_was_written_is_put_when_it_is_a_second_old() {
    scenario(4, async |world| {
        let machines = machines(&world).await;
        let first = machines.sound(0, false).await;
        let volume = first.open(STORE).await.unwrap();
        write(&volume, 0, 5).await.unwrap();
        sleep(Duration::from_millis(500)).await;
        assert_eq!(volume.write_stats().groups, 0);
        sleep(Duration::from_millis(700)).await;
        assert_eq!(volume.write_stats().groups, 1);
        first.life.die();
        let other = machines.sound(1, false).await.open(by_force(STORE)).await.unwrap();
        assert_eq!(sectors(&other, 1).await, [5]);
    });
}
