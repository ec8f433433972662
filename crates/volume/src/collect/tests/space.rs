//! How much space an old volume takes.

use super::*;
use crate::properties::{Compression, NewVolume};
use mica_block::Which;
use mica_rt::sync::Signal;
use mica_store::object::ObjectOperation;

/// Blocks of the disk, and of a round of writing.
const DISK: u64 = 12_000;
const ROUND: u64 = 4_000;

/// Random overwrites for many rounds, with a collection and a compaction after each: in the end the
/// store has at most a quarter more than what is alive.
#[test]
fn volume_that_is_overwritten_for_long_takes_a_quarter_more_than_it_has() {
    run(1, age((false, false), kind(0)));
    run(1, age((true, false), kind(0)));
    run(1, age((false, false), kind(1)));
    run(1, age((false, false), kind(3)));
}

/// The same with three snapshots, of which the oldest is dropped in each round: where a store can
/// give back parts of extents.
#[test]
fn snapshots_that_come_and_go_leave_no_holes() {
    run(1, age((true, true), kind(0)));
    run(1, age((true, true), kind(1)));
}

/// The story: a store was full, and what would have made room was refused there, as the store was
/// full: a collection began with an object that it puts.
#[test]
fn store_that_is_full_gets_room_by_a_collection() {
    run(1, async {
        let objects = MemoryObjects::new("memory");
        let volumes = volumes(&objects, "host-1").await;
        for text in ["web", "mail"] {
            volumes.create(&name(text), LEN).await.expect("made");
            let volume = open(&volumes, text).await;
            write(&volume, 0, 1).await;
            volume.close().await.expect("closed");
        }
        volumes.delete(&name("mail"), Claimed::Refuse).await.expect("deleted");
        let full = FaultyOptions {
            only: Some(ObjectOperation::Put),
            refused: 1.0,
            ..FaultyOptions::default()
        };
        let full = FaultyObjects::new(Arc::new(objects.clone()), full);
        let extents = names_in(&objects, "extents").len();
        let beside = collect(&volumes_in(Arc::new(full), "host-2").await).await;
        assert_eq!((beside.freed_extents, beside.freed_claims), (1, 0), "{beside:?}");
        assert_eq!(beside.failed, 1, "no boundary was put");
        assert!(names_in(&objects, "extents").len() < extents);
        assert!(!names_in(&objects, "writers").is_empty(), "their boundary comes first");
        let after = collect(&volumes).await;
        assert!(after.freed_claims > 0 && after.failed == 0, "{after:?}");
        assert!(names_in(&objects, "writers").is_empty());
    });
}

/// The story: what was to make room in a store that was full, and in which nothing was to be
/// collected, was refused, and what to do about it was not said.
#[test]
fn deletion_in_a_full_store_changes_nothing_and_says_what_to_do() {
    run(1, async {
        let objects = MemoryObjects::new("memory");
        let volumes = volumes(&objects, "host-1").await;
        volumes.create(&name("web"), LEN).await.expect("made");
        let first = volumes.take_snapshot(&name("web"), "first").await.expect("taken");
        let full = FaultyOptions {
            only: Some(ObjectOperation::Put),
            refused: 1.0,
            refused_as: Some(ErrorKind::NoSpace),
            ..FaultyOptions::default()
        };
        let full = FaultyObjects::new(Arc::new(objects.clone()), full);
        let full = volumes_in(Arc::new(full), "host-2").await.for_verbs();
        let which = Which::Number(first.number);
        let dropped = full.drop_snapshot(&name("web"), &which).await;
        let deleted = full.delete(&name("web"), Claimed::Refuse).await;
        for refused in [dropped, deleted] {
            let refused = refused.expect_err("there is no room");
            assert_eq!(refused.kind(), ErrorKind::NoSpace);
            let line = refused.in_one_line();
            assert!(line.contains("`mica volume gc` makes room"), "{line}");
        }
        let left = volumes.snapshots(&name("web")).await.expect("it is there");
        assert_eq!(left.len(), 1);
        volumes.drop_snapshot(&name("web"), &which).await.expect("there is room again");
        volumes.delete(&name("web"), Claimed::Refuse).await.expect("there is room again");
    });
}

/// A block that begins with `byte`. It can be compressed to about half, or less, or not at all.
fn content(rng: &mut Rng, byte: u8) -> Vec<u8> {
    let random = usize::try_from(rng.below(5) * 1024).expect("small");
    let mut block = vec![byte; BLOCK_BYTES];
    let random = random.clamp(1, BLOCK_BYTES);
    block[1..random].fill_with(|| u8::try_from(rng.below(256)).expect("a byte"));
    block
}

async fn age((punch, has_snapshots): (bool, bool), new: NewVolume) {
    let objects = MemoryObjects::new("memory");
    let volumes = volumes(&objects, "host-1").await;
    volumes.create_as(&name("web"), DISK * BLOCK, new).await.expect("made");
    let mut rng = Rng::new(9);
    let mut model = blank(DISK);
    let options = CollectOptions { punch, ..CollectOptions::default() };
    let mut written = 0;
    for round in 0..8_u8 {
        let volume = open(&volumes, "web").await;
        for number in 0..if round == 0 { DISK } else { ROUND } {
            let block = if round == 0 { number } else { rng.below(DISK) };
            let bytes = content(&mut rng, round + 1);
            let at = GuestOffset::new(block * BLOCK);
            volume.write(at, Buf::from_slice(&bytes)).await.0.expect("written");
            model[usize::try_from(block).expect("small")] = round + 1;
        }
        volume.close().await.expect("closed");
        if has_snapshots {
            let taken = volumes.take_snapshot(&name("web"), "").await.expect("taken");
            if let Some(old) = taken.number.checked_sub(3).filter(|old| *old > 0) {
                let dropped = volumes.drop_snapshot(&name("web"), &Which::Number(old)).await;
                dropped.expect("dropped");
            }
        }
        let before = volumes.collect(options, &mut |_| ()).await.expect("collected");
        for sparse in &before.sparse {
            if round == 1 {
                gives_up(&volumes, sparse).await;
            }
            written += compacted(&volumes, sparse, &Signal::default()).await;
        }
        let after = volumes.collect(options, &mut |_| ()).await.expect("collected");
        // About half of what is written is random.
        let is_compressed = new.compression == Compression::Zstd;
        let live = if is_compressed { DISK * BLOCK * 2 / 5 } else { DISK * BLOCK };
        let stored = objects.stored_bytes();
        assert!(after.live_bytes >= live);
        assert!(!is_compressed || has_snapshots || after.live_bytes < DISK * BLOCK * 3 / 4);
        println!(
            "{new:?}, punch {punch}, snapshots {has_snapshots}, round {round}: {:.3} of the \
             guest's, {:.3} of what is alive, {written} blocks written again",
            stored as f64 / live as f64,
            stored as f64 / after.live_bytes as f64,
        );
        // What a snapshot shares is not written again, and a frame is freed as a whole: its blocks
        // that were overwritten stay with those that were not.
        let percent = if is_compressed && has_snapshots { 200 } else { 125 };
        assert!(stored * 100 <= after.live_bytes * percent, "{stored} of {}", after.live_bytes);
    }
    let volume = open(&volumes, "web").await;
    assert_eq!(read(&volume, 0, DISK).await, model);
    let found = volumes.scrub(Speed::default(), &mut |_| ()).await.expect("scrubbed");
    assert_eq!(found.damaged, Vec::<String>::new());
}

/// What is written while blocks are written again stays.
#[test]
fn rewriting_changes_nothing_that_a_guest_sees() {
    for seed in 0..40 {
        run(seed, async {
            let objects = MemoryObjects::new("memory").with_latency(Duration::from_millis(1));
            let volumes = volumes(&objects, "host-1").await;
            volumes.create_as(&name("web"), LEN, kind(seed)).await.expect("made");
            let volume = open(&volumes, "web").await;
            let mut rng = Rng::new(seed);
            for block in 0..BLOCKS {
                write(&volume, block, 1).await;
                if rng.percent(20) {
                    volume.flush().await.expect("flushed");
                }
            }
            volume.flush().await.expect("flushed");
            let ids = names_in(&objects, "extents/");
            let ids = ids
                .iter()
                .filter_map(|id| ExtentId::from_name(&ObjectName::new(id).expect("a name")));
            let extents: BTreeSet<ExtentId> = ids.collect();
            let mut model = blank(BLOCKS);
            model.fill(1);
            let volume = Arc::new(volume);
            let rewriting = {
                let volume = Arc::clone(&volume);
                let extents = extents.clone();
                spawn(async move { volume.tidy(&extents, None).await })
            };
            for byte in 2..30 {
                let block = rng.below(BLOCKS);
                write(&volume, block, byte).await;
                model[usize::try_from(block).expect("small")] = byte;
                if rng.percent(30) {
                    volume.flush().await.expect("flushed");
                }
            }
            rewriting.await.expect("rewritten");
            volume.close().await.expect("closed");
            let volumes = self::volumes(&objects, "host-2").await;
            collect(&volumes).await;
            for id in &extents {
                let is_left = objects.contents().contains_key(&id.name());
                assert!(!is_left, "seed {seed}: something is left in {id:?}");
            }
            let volume = open(&volumes, "web").await;
            assert_eq!(read(&volume, 0, BLOCKS).await, model, "seed {seed}");
        });
    }
}

/// Nobody has a volume open whose compaction was given up.
async fn gives_up(volumes: &Volumes, sparse: &Sparse) {
    let given_up = Signal::default();
    given_up.raise();
    assert_eq!(compacted(volumes, sparse, &given_up).await, 0);
    assert_eq!(volumes.info(&sparse.name).await.expect("known").open_on, None);
}

async fn compacted(volumes: &Volumes, sparse: &Sparse, given_up: &Signal) -> u64 {
    let volume = open(volumes, sparse.name.as_str()).await;
    volume.compact(sparse, given_up).await.expect("compacted")
}
