//! Snapshots of several volumes at one instant.

use crate::heads::Claimed;
use crate::testing::{memory, name, read, run, volumes, write};
use crate::volume::Volume;
use crate::volumes::Volumes;
use mica_block::{
    Error, ErrorKind, Manage, ManageSnapshots, Objects, Result, SnapshotGroup, SnapshotInfo, Which,
};
use mica_rt::{join_all, sleep, spawn};
use mica_units::Rng;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const NAMES: [&str; 3] = ["logs", "data", "index"];

async fn made(objects: &Arc<dyn Objects>) -> (Volumes, Vec<Arc<Volume>>) {
    let volumes = volumes(objects, "host").await;
    let mut all = Vec::new();
    for text in NAMES {
        volumes.create(&name(text), 1 << 20).await.expect("made");
        let volume = volumes.open_volume(&name(text), Claimed::Refuse).await.expect("open");
        all.push(Arc::new(volume));
    }
    (volumes, all)
}

async fn take(all: &[Arc<Volume>], label: &str) -> Vec<Result<SnapshotInfo>> {
    let group = Arc::new(SnapshotGroup::new(all.len()));
    join_all(all.iter().map(|volume| volume.take_in_group(label, &group))).await
}

async fn number_in(volume: &Volume) -> u64 {
    let bytes = read(volume, 0, 4096).await;
    u64::from_le_bytes(*bytes.first_chunk().expect("a block"))
}

/// Each number goes to one volume after the other: no snapshot of a later one may have a number
/// that that of an earlier one lacks.
#[test]
fn what_followed_something_is_in_no_group_without_it() {
    for seed in 0..60 {
        run(seed, async {
            let objects: Arc<dyn Objects> = Arc::new(memory());
            let (volumes, all) = made(&objects).await;
            let (written, is_over) = (Rc::new(Cell::new(0_u64)), Rc::new(Cell::new(false)));
            let (guests, count, ends) = (all.clone(), Rc::clone(&written), Rc::clone(&is_over));
            let guest = spawn(async move {
                while !ends.get() {
                    let number = count.get() + 1;
                    for volume in &guests {
                        write(volume, 0, &[number.to_le_bytes(); 512].concat()).await;
                    }
                    count.set(number);
                }
            });
            let mut rng = Rng::new(seed);
            let mut before = Vec::new();
            for round in 0..6 {
                sleep(Duration::from_micros(rng.below(3000))).await;
                before.push(written.get());
                let taken = take(&all, &format!("round-{round}")).await;
                taken.into_iter().for_each(|taken| drop(taken.expect("taken")));
            }
            let last = written.get();
            sleep(Duration::from_millis(500)).await;
            assert!(written.get() > last, "the guest goes on");
            is_over.set(true);
            guest.await;
            for volume in &all {
                volume.close().await.expect("closed");
            }
            for (round, before) in before.into_iter().enumerate() {
                let which = Which::Label(format!("round-{round}"));
                let mut numbers = Vec::new();
                for text in NAMES {
                    let snapshot = volumes.open_snapshot(&name(text), &which).await.expect("there");
                    numbers.push(number_in(&snapshot).await);
                }
                let is_ordered = numbers.is_sorted_by(|a, b| a >= b);
                assert!(is_ordered && numbers[0] - numbers[2] <= 1, "{numbers:?}, seed {seed}");
                assert!(numbers[2] >= before, "what was answered before is in it: {numbers:?}");
            }
        });
    }
}

#[test]
fn if_one_fails_there_is_none_and_writers_go_on() {
    run(1, async {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let (_volumes, all) = made(&objects).await;
        all[1].take("monday").await.expect("taken");
        let outcomes = take(&all, "monday").await;
        let kinds: Vec<_> =
            outcomes.iter().map(|outcome| outcome.as_ref().unwrap_err().kind()).collect();
        assert_eq!(kinds, [ErrorKind::Invalid; 3], "the reason is everybody's");
        for outcome in &outcomes {
            let error = outcome.as_ref().unwrap_err().in_one_line();
            assert!(error.starts_with("volume data: there is a snapshot"), "{error}");
        }
        // One of the group never comes.
        let group = Arc::new(SnapshotGroup::new(3));
        let waiting = all[..2].iter().map(|volume| volume.take_in_group("tuesday", &group));
        let guests = all.clone();
        let writing = spawn(async move {
            sleep(Duration::from_millis(1)).await;
            for volume in &guests[..2] {
                write(volume, 0, &[1; 4096]).await;
            }
        });
        let outcomes = join_all(waiting).await;
        writing.await;
        assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
        // Or says that it cannot.
        let group = Arc::new(SnapshotGroup::new(3));
        group.fail(Error::new(ErrorKind::Denied, "it is drained"));
        let waiting = all[..2].iter().map(|volume| volume.take_in_group("tuesday", &group));
        for outcome in join_all(waiting).await {
            assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Denied);
        }
        for (volume, count) in all.iter().zip([0, 1, 0]) {
            assert_eq!(volume.list().await.expect("listed").len(), count);
            write(volume, 0, &[2; 4096]).await;
            volume.close().await.expect("closed");
        }
    });
}
