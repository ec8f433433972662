//! What snapshots and clones cost, counted.

use crate::heads::Claimed;
use crate::known::Change;
use crate::place::BLOCK_BYTES;
use crate::segment::Cut;
use crate::testing::{memory, name, read, run, volumes, write};
use crate::volume::Volume;
use crate::writing::Step;
use mica_block::{Disk, Manage, Objects, Which};
use mica_store::object::{FaultyObjects, FaultyOptions, MemoryObjects};
use mica_units::Rng;
use std::sync::Arc;

const BLOCK: u64 = BLOCK_BYTES as u64;

fn stored(objects: &MemoryObjects) -> u64 {
    objects.contents().values().map(|content| content.len() as u64).sum()
}

async fn take(volume: &Volume) -> u64 {
    let snapshots = volume.snapshots().expect("a volume has them");
    snapshots.take("").await.expect("taken").number
}

/// Takes a snapshot, which is in the store with the next extent.
async fn begin_snapshot(volume: &Volume) {
    let taken = volume.shared().change(|recorder| {
        let number = recorder.now.next_snapshot();
        let cut = Cut::Take { number, label: String::new(), time_ns: number, origin: None };
        match recorder.record(Change::Cut(cut)) {
            true => Step::Done(()),
            false => Step::Again,
        }
    });
    taken.await.expect("taken");
}

/// A store that counts what is asked of it.
fn counted(memory: &MemoryObjects) -> (FaultyObjects, Arc<dyn Objects>) {
    let objects = FaultyObjects::new(Arc::new(memory.clone()), FaultyOptions::default());
    (objects.clone(), Arc::new(objects))
}

/// The story: each snapshot with a label read all labels that there were, and a hundred a second
/// took longer and longer.
#[test]
fn label_costs_the_same_however_many_there_are() {
    const SNAPSHOTS: u64 = 600;
    run(6, async {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let volumes = volumes(&objects, "host-1").await;
        let web = name("web");
        volumes.create(&web, 1 << 20).await.expect("made");
        let volume = volumes.open_volume(&web, Claimed::Refuse).await.expect("open");
        let snapshots = volume.snapshots().expect("a volume has them");
        for number in 0..SNAPSHOTS {
            snapshots.take(&format!("n{number}")).await.expect("taken");
        }
        let asked = || volume.map_stats().hits + volume.map_stats().misses;
        let before = asked();
        snapshots.list().await.expect("listed");
        let list = asked() - before;
        assert!(list > SNAPSHOTS / 32, "a list goes through all: {list} nodes");
        snapshots.take("n7").await.expect_err("there is one");
        snapshots.take("last").await.expect("taken");
        snapshots.label(&Which::Label("last".to_owned()), "end").await.expect("labelled");
        snapshots.take("last").await.expect("it is free");
        snapshots.remove(&Which::Label("n7".to_owned())).await.expect("dropped");
        snapshots.take("n7").await.expect("it is free");
        let taken = asked() - before - list;
        assert!(taken < list / 2, "{taken} nodes for six changes, {list} for a list");
        volume.close().await.expect("closed");
    });
}

/// Clones share everything: each costs so many requests and its own heads, and a block of the last
/// is read with as many requests as one of the first, and of the source.
#[test]
fn ten_thousand_clones_cost_their_heads_and_are_read_as_the_source_is() {
    const CLONES: u64 = 10_000;
    run(1, async {
        let memory = memory();
        let (counter, objects) = counted(&memory);
        let volumes_of_host = volumes(&objects, "host-1").await;
        let web = name("web");
        volumes_of_host.create(&web, 1 << 40).await.expect("made");
        let source = volumes_of_host.open_volume(&web, Claimed::Refuse).await.expect("open");
        for number in 0..64 {
            write(&source, (number << 30) + BLOCK, &[7; BLOCK_BYTES]).await;
        }
        let which = Which::Number(take(&source).await);
        write(&source, BLOCK, &[8; BLOCK_BYTES]).await;
        source.close().await.expect("closed");

        let before = stored(&memory);
        let mut requests = Vec::new();
        for number in 0..CLONES {
            let asked = counter.requests();
            let target = name(&format!("clone-{number}"));
            volumes_of_host.clone_volume(&web, Some(&which), &target).await.expect("cloned");
            requests.push(counter.requests() - asked);
        }
        // The first one reads the record.
        assert!(requests[1..].iter().all(|asked| *asked == requests[1]), "not constant");
        assert!(requests[1] <= 16, "{} requests for a clone", requests[1]);
        let bytes = (stored(&memory) - before) / CLONES;
        assert_eq!(bytes, 2 * 1280, "two heads for a clone, with what it was made from");

        let mut reads = Vec::new();
        for number in [0, CLONES / 2, CLONES - 1] {
            let volumes = volumes(&objects, "host-2").await;
            let clone = name(&format!("clone-{number}"));
            let clone = volumes.open_readable(&clone).await.expect("open");
            let asked = counter.requests();
            assert_eq!(read(&clone, BLOCK, BLOCK).await, [7; BLOCK_BYTES]);
            reads.push(counter.requests() - asked);
        }
        let volumes = volumes(&objects, "host-3").await;
        let source = volumes.open_readable(&web).await.expect("open");
        let asked = counter.requests();
        assert_eq!(read(&source, BLOCK, BLOCK).await, [8; BLOCK_BYTES]);
        reads.push(counter.requests() - asked);
        assert!(reads.iter().all(|asked| *asked == reads[0]), "{reads:?}");
        println!("a clone: {} requests, {bytes} bytes; a cold read: {}", requests[1], reads[0]);
    });
}

/// How the snapshots of a test are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum How {
    /// Not at all, with a flush in place of each.
    OnlyFlush,
    /// Not at all, with one flush at the end.
    Never,
    /// Each is waited for: an extent each.
    Waited,
    /// Nobody waits until they are in the store, as with durability=host: many are in one extent.
    Joined,
}

/// Bytes that 100 rounds of 8 random writes, and of snapshots, add to a disk with a block in every
/// so many.
async fn rounds(len: u64, every: u64, how: How) -> u64 {
    let memory = memory();
    let objects: Arc<dyn Objects> = Arc::new(memory.clone());
    let volumes = volumes(&objects, "host-1").await;
    volumes.create(&name("web"), len).await.expect("made");
    let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
    if every > 0 {
        for at in (0..len).step_by(usize::try_from(every * BLOCK).expect("small")) {
            write(&volume, at, &[1; BLOCK_BYTES]).await;
        }
    }
    volume.flush().await.expect("flushed");
    let before = stored(&memory);
    let mut rng = Rng::new(5);
    for _ in 0..100 {
        for _ in 0..8 {
            write(&volume, rng.below(len / BLOCK) * BLOCK, &[2; BLOCK_BYTES]).await;
        }
        match how {
            How::OnlyFlush => volume.flush().await.expect("flushed"),
            How::Never => {}
            How::Waited => drop(take(&volume).await),
            How::Joined => begin_snapshot(&volume).await,
        }
    }
    volume.flush().await.expect("flushed");
    // Heads are not counted: how many there are depends on time.
    let contents = memory.contents();
    let heads = contents.keys().filter(|name| name.as_str().starts_with("volumes/")).count();
    let after = stored(&memory) - heads as u64 * 1024;
    after + 1024 - before
}

/// The figure of GOALS.md.
#[test]
fn snapshot_costs_at_most_5_84_kb_over_the_same_writes_without_it() {
    for (what, len, every) in [("empty, 1 TiB", 1 << 40, 0), ("1 GiB, all nodes", 1 << 30, 16)] {
        let cost = |how| run(2, rounds(len, every, how));
        let (flushes, never) = (cost(How::OnlyFlush), cost(How::Never));
        let (waited, joined) = (cost(How::Waited), cost(How::Joined));
        let over = |with: u64, without: u64| with.saturating_sub(without) / 100;
        println!(
            "{what}: {} bytes for a snapshot that is waited for, over a flush; {} for one that is \
             not, over nothing; {} for one that is waited for, over nothing",
            over(waited, flushes),
            over(joined, never),
            over(waited, never)
        );
        let (waited, joined) = (over(waited, flushes), over(joined, never));
        assert!(waited <= 5840 && joined <= 5840, "{what}: {waited}, {joined} bytes");
    }
}

/// With a thousand snapshots a write, a flush and a snapshot cost what they do with a few.
#[test]
fn nothing_grows_with_the_number_of_snapshots_where_a_guest_writes() {
    run(3, async {
        let memory = memory();
        let (counter, objects) = counted(&memory);
        let volumes = volumes(&objects, "host-1").await;
        volumes.create(&name("web"), 1 << 40).await.expect("made");
        let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
        let mut rng = Rng::new(3);
        let mut measure = async |volume: &Volume| {
            let mut cost = (0, 0);
            for _ in 0..8 {
                let (asked, bytes) = (counter.requests(), stored(&memory));
                write(volume, rng.below(1 << 28) * BLOCK, &[3; BLOCK_BYTES]).await;
                volume.flush().await.expect("flushed");
                let of_write = (counter.requests() - asked, stored(&memory) - bytes);
                take(volume).await;
                cost = (cost.0.max(of_write.0), cost.1.max(of_write.1));
            }
            cost
        };
        let few = measure(&volume).await;
        for _ in 0..1000 {
            take(&volume).await;
        }
        let many = measure(&volume).await;
        println!("a write and a flush, with few snapshots and with many: {few:?}, {many:?}");
        // The map has grown by some levels' children; a head may come in between.
        assert!(many.0 <= few.0 + 1 && many.1 <= few.1 + 3 * 1024, "{few:?}, {many:?}");

        let list = volume.snapshots().expect("a volume has them").list().await.expect("listed");
        assert_eq!(list.len(), 1016);
        volume.close().await.expect("closed");
        // Opening it, and reading a block, either.
        let volumes = crate::testing::volumes(&objects, "host-2").await;
        let asked = counter.requests();
        let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
        read(&volume, 0, BLOCK).await;
        assert!(counter.requests() - asked <= 24, "{}", counter.requests() - asked);
    });
}
