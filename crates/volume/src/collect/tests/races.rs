//! Collectors beside everything else that is done in a store.

use super::*;
use mica_block::Which;

/// Seeds that are tried: `MICA_COLLECT_SEEDS` for more.
fn seeds() -> u64 {
    std::env::var("MICA_COLLECT_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(60)
}

/// A store that lists each folder by itself, or all of them at once.
fn store(seed: u64) -> MemoryObjects {
    let memory = MemoryObjects::new("memory").with_latency(Duration::from_millis(2));
    if seed.is_multiple_of(2) { memory } else { memory.by_folder() }
}

/// Volumes that are written, taken over, closed, deleted and made again, each by one task that
/// knows what has to be there; two collectors all the time, which hurry or are slow.
#[test]
fn nothing_that_is_needed_is_ever_missing() {
    for seed in 0..seeds() {
        run(seed, async {
            let memory = store(seed);
            drop(volumes(&memory, "first").await);
            let is_done = Arc::new(AtomicBool::new(false));
            let collectors: Vec<_> = (0..2_u64)
                .map(|number| {
                    let options = FaultyOptions {
                        seed: seed * 2 + number,
                        slow: 0.3 * (number as f64),
                        slow_by: Duration::from_millis(40),
                        ..FaultyOptions::default()
                    };
                    let objects = FaultyObjects::new(Arc::new(memory.clone()), options);
                    spawn(keep_collecting(Arc::new(objects), Arc::clone(&is_done)))
                })
                .collect();
            let drivers: Vec<_> = ["a", "b", "c"]
                .into_iter()
                .zip(0..)
                .map(|(text, number)| spawn(drive(memory.clone(), text, seed * 3 + number)))
                .collect();
            mica_rt::join_all(drivers).await;
            is_done.store(true, Ordering::Relaxed);
            let freed: u64 = mica_rt::join_all(collectors).await.into_iter().sum();
            assert!(freed > 0, "seed {seed}: nothing was ever deleted");
            let volumes = volumes(&memory, "judge").await;
            let found = volumes.scrub(Speed::default(), &mut |_| ()).await.expect("scrubbed");
            assert_eq!(found.damaged, Vec::<String>::new(), "seed {seed}");
        });
    }
}

async fn keep_collecting(objects: Arc<dyn Objects>, is_done: Arc<AtomicBool>) -> u64 {
    let volumes = volumes_in(objects, "collector").await;
    let mut freed = 0;
    while !is_done.load(Ordering::Relaxed) {
        match volumes.collect(CollectOptions::default(), &mut |_| ()).await {
            Ok(collected) => {
                assert_eq!(collected.failed, 0, "{collected:?}");
                freed += collected.freed_extents;
            }
            // It may have begun again too often, but never finds damage.
            Err(error) => assert_eq!(error.kind(), ErrorKind::Io, "{error:?}"),
        }
        sleep(Duration::from_millis(5)).await;
    }
    freed
}

/// Lives through the volumes that one name has.
async fn drive(memory: MemoryObjects, text: &'static str, seed: u64) {
    let mut rng = Rng::new(seed);
    for life in 0..2 {
        let volumes = volumes(&memory, "driver").await;
        volumes.create_as(&name(text), LEN, kind(seed)).await.expect("made");
        let mut model = blank(BLOCKS);
        let mut last: Option<Volume> = None;
        let mut snapshots: Vec<(u64, Vec<u8>)> = Vec::new();
        for round in 0..4 {
            // A cache of its own: what is read is in the store.
            let volumes = self::volumes(&memory, "driver").await;
            let volume = open(&volumes, text).await;
            if let Some(last) = last.take() {
                // It was taken over, and does not know yet.
                write(&last, 0, 255).await;
                assert!(last.flush().await.is_err(), "seed {seed}: two writers");
            }
            assert_eq!(read(&volume, 0, BLOCKS).await, model, "seed {seed}, life {life}");
            for _ in 0..3 {
                for _ in 0..1 + rng.below(5) {
                    let block = rng.below(BLOCKS);
                    let byte = u8::try_from(1 + rng.below(200)).expect("a byte");
                    write(&volume, block, byte).await;
                    model[usize::try_from(block).expect("small")] = byte;
                }
                volume.flush().await.expect("flushed");
                sleep(Duration::from_millis(rng.below(30))).await;
            }
            let volumes = self::volumes(&memory, "reader").await;
            let found = volumes.check(&name(text), &mut |_| ()).await.expect("checked");
            assert_eq!(found.damaged, Vec::<String>::new(), "seed {seed}, round {round}");
            if rng.percent(70) {
                volume.close().await.expect("closed");
                cut(&volumes, text, &mut rng, &mut model, &mut snapshots).await;
            } else {
                last = Some(volume);
            }
        }
        if life == 0 {
            volumes.delete(&name(text), Claimed::TakeOver).await.expect("deleted");
        }
    }
}

/// Takes and drops snapshots of a volume that is closed, rolls it back, and clones it, at random;
/// all snapshots have what they had.
async fn cut(
    volumes: &Volumes,
    text: &str,
    rng: &mut Rng,
    model: &mut Vec<u8>,
    snapshots: &mut Vec<(u64, Vec<u8>)>,
) {
    let name = name(text);
    if rng.percent(70) {
        let taken = volumes.take_snapshot(&name, "").await.expect("taken");
        snapshots.push((taken.number, model.clone()));
    }
    if rng.percent(40) && !snapshots.is_empty() {
        let (number, content) = snapshots[index(rng, snapshots.len())].clone();
        volumes.rollback(&name, &Which::Number(number)).await.expect("rolled back");
        *model = content;
    }
    if rng.percent(50) && !snapshots.is_empty() {
        let (number, content) = snapshots[index(rng, snapshots.len())].clone();
        let copy = self::name(&format!("{text}-copy"));
        let which = Which::Number(number);
        volumes.clone_volume(&name, Some(&which), &copy).await.expect("cloned");
        if rng.percent(50) {
            volumes.drop_snapshot(&name, &which).await.expect("dropped");
            snapshots.retain(|(other, _)| *other != number);
        }
        sleep(Duration::from_millis(rng.below(60))).await;
        let volume = open(volumes, copy.as_str()).await;
        assert_eq!(read(&volume, 0, BLOCKS).await, content, "a clone of {text}@{number}");
        write(&volume, 0, 3).await;
        volume.flush().await.expect("flushed");
        volumes.delete(&copy, Claimed::TakeOver).await.expect("deleted");
    }
    if rng.percent(30) && !snapshots.is_empty() {
        let (number, _) = snapshots.remove(index(rng, snapshots.len()));
        volumes.drop_snapshot(&name, &Which::Number(number)).await.expect("dropped");
    }
    for (number, content) in snapshots {
        let snapshot = volumes.open_snapshot(&name, &Which::Number(*number)).await.expect("open");
        assert_eq!(read(&snapshot, 0, BLOCKS).await, *content, "{text}@{number}");
    }
}

/// A store with answers that are lost, and changes that are done after they failed.
fn unsteady(memory: &MemoryObjects, seed: u64) -> Arc<dyn Objects> {
    let options = FaultyOptions {
        seed,
        refused: 0.02,
        lost: 0.05,
        late: 0.03,
        slow: 0.1,
        slow_by: Duration::from_millis(40),
        ..FaultyOptions::default()
    };
    Arc::new(FaultyObjects::new(Arc::new(memory.clone()), options))
}

/// Writers that take, label and drop snapshots while they write, each of which calls for a
/// checkpoint, over a store that loses answers; whoever takes over finds all that was answered. Two
/// collectors all the time, to which the same happens.
#[test]
fn checkpoints_and_lost_answers_leave_what_was_answered() {
    let mut all_freed = 0;
    for seed in 0..seeds() {
        all_freed += run(seed, async {
            let memory = store(seed);
            drop(volumes(&memory, "first").await);
            let is_done = Arc::new(AtomicBool::new(false));
            let collectors: Vec<_> = (0..2_u64)
                .map(|number| {
                    let objects = unsteady(&memory, seed * 8 + number);
                    spawn(keep_collecting(objects, Arc::clone(&is_done)))
                })
                .collect();
            let drivers: Vec<_> = ["a", "b"]
                .into_iter()
                .zip(2..)
                .map(|(text, number)| spawn(serve(memory.clone(), text, seed * 8 + number)))
                .collect();
            mica_rt::join_all(drivers).await;
            is_done.store(true, Ordering::Relaxed);
            let freed: u64 = mica_rt::join_all(collectors).await.into_iter().sum();
            let volumes = volumes(&memory, "judge").await;
            let found = volumes.scrub(Speed::default(), &mut |_| ()).await.expect("scrubbed");
            assert_eq!(found.damaged, Vec::<String>::new(), "seed {seed}");
            freed
        });
    }
    assert!(all_freed > seeds(), "{all_freed} extents were deleted");
}

/// Serves one volume, by one host after the other, most of which die.
async fn serve(memory: MemoryObjects, text: &'static str, seed: u64) {
    let mut rng = Rng::new(seed);
    let wanted = name(text);
    volumes(&memory, "maker").await.create(&wanted, LEN).await.expect("made");
    let mut model = blank(BLOCKS);
    let mut snapshots: Vec<(u64, Vec<u8>)> = Vec::new();
    for life in 0..5 {
        let objects = unsteady(&memory, seed ^ rng.below(1 << 40));
        let volumes = volumes_in(objects, "server").await;
        let volume = open(&volumes, text).await;
        assert_eq!(read(&volume, 0, BLOCKS).await, model, "seed {seed}, life {life}");
        let listed = volume.snapshots().expect("it has some").list().await.expect("listed");
        let listed: Vec<_> = listed.iter().map(|snapshot| snapshot.number).collect();
        let known: Vec<_> = snapshots.iter().map(|(number, _)| *number).collect();
        assert_eq!(listed, known, "seed {seed}, life {life}");
        for (number, content) in &snapshots {
            let which = Which::Number(*number);
            let snapshot = volumes.open_snapshot(&wanted, &which).await.expect("open");
            assert_eq!(read(&snapshot, 0, BLOCKS).await, *content, "{text}@{number}");
        }
        for _ in 0..6 {
            for _ in 0..1 + rng.below(5) {
                let block = rng.below(BLOCKS);
                let byte = u8::try_from(1 + rng.below(200)).expect("a byte");
                write(&volume, block, byte).await;
                model[usize::try_from(block).expect("small")] = byte;
            }
            let manage = volume.snapshots().expect("it has some");
            match rng.below(5) {
                0 | 1 => {
                    let taken = manage.take("").await.expect("taken");
                    snapshots.push((taken.number, model.clone()));
                }
                2 if !snapshots.is_empty() => {
                    let (number, _) = snapshots.remove(index(&mut rng, snapshots.len()));
                    manage.remove(&Which::Number(number)).await.expect("dropped");
                }
                _ => volume.flush().await.expect("flushed"),
            }
            sleep(Duration::from_millis(rng.below(60))).await;
        }
        // Everything is in the store now.
        volume.flush().await.expect("flushed");
        if rng.percent(30) {
            volume.close().await.expect("closed");
        }
    }
}

fn index(rng: &mut Rng, len: usize) -> usize {
    usize::try_from(rng.below(len as u64)).expect("small")
}
