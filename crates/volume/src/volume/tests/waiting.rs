//! Requests over a store that is slow or away, and what others do to the volume meanwhile.

use super::*;
use crate::collect::CollectOptions;
use mica_rt::{join_two, sleep, timeout};

const SECOND: Duration = Duration::from_secs(1);
/// A disk whose last block is whole: to write all of it nothing has to be read.
const WHOLE: u64 = 40 * 4096;

/// `memory`, where a read takes ten seconds.
fn slow(memory: &MemoryObjects) -> Arc<dyn Objects> {
    let options = FaultyOptions {
        only: Some(ObjectOperation::Read),
        slow: 1.0,
        slow_by: 10 * SECOND,
        ..FaultyOptions::default()
    };
    Arc::new(FaultyObjects::new(Arc::new(memory.clone()), options))
}

/// `memory`, of which nothing can be read.
fn down(memory: &MemoryObjects) -> Arc<dyn Objects> {
    let only = Some(ObjectOperation::Read);
    let options = FaultyOptions { only, refused: 1.0, ..FaultyOptions::default() };
    Arc::new(FaultyObjects::new(Arc::new(memory.clone()), options))
}

/// A volume with ones in it that keeps nothing of its map in memory but what its builder holds.
async fn forgetful(objects: Arc<dyn Objects>) -> Volume {
    let volumes = Volumes::open_or_make(objects, environment("host-1"), 1).await;
    let volumes = volumes.expect("a store");
    volumes.create(&name("web"), WHOLE).await.expect("made");
    let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
    write(&volume, 0, &vec![1; bytes(WHOLE)]).await.expect("written");
    volume.flush().await.expect("flushed");
    volume
}

/// Everything is written again, a head says so, and what had it before is collected.
async fn replaced(volume: &Volume, memory: &MemoryObjects, byte: u8) {
    write(volume, 0, &vec![byte; bytes(WHOLE)]).await.expect("written");
    volume.flush().await.expect("flushed");
    let cut = crate::segment::Cut::Take {
        number: byte.into(),
        label: String::new(),
        time_ns: 1,
        origin: None,
    };
    volume.shared.change_once(Change::Cut(cut)).await.expect("taken");
    volume.flush().await.expect("flushed");
    volume.shared.at_rest().await.expect("no head is under way");
    let volumes = volumes(memory, "host-2").await;
    let collected = volumes.collect(CollectOptions::default(), &mut |_| ()).await;
    assert!(collected.expect("collected").freed_extents > 0, "something was garbage");
}

#[test]
fn read_of_what_was_collected_meanwhile_finds_what_is_there_now() {
    run(1, async {
        let memory = objects();
        let volume = forgetful(Arc::new(memory.clone())).await;
        let plan = volume.plan(range(0, WHOLE), Vec::new()).finish().await.expect("planned");
        let mut buf = Buf::new(bytes(WHOLE));
        buf.fill(0);
        // It knows where it reads from now on.
        let reading = volume.read_by_view(plan[0].range(), buf);
        replaced(&volume, &memory, 2).await;
        let (result, buf) = reading.await;
        result.expect("read");
        assert_eq!(*buf, vec![2; bytes(WHOLE)]);
    });
}

#[test]
fn walks_of_a_map_that_was_collected_meanwhile_go_on_in_the_one_of_now() {
    run(1, async {
        let memory = objects();
        let volume = forgetful(slow(&memory)).await;
        let extents: std::collections::BTreeSet<_> =
            memory.contents().keys().filter_map(crate::place::ExtentId::from_name).collect();
        let survey = volume.survey(range(0, WHOLE));
        let plan = async { volume.plan(range(0, 512), Vec::new()).finish().await };
        let part = async { write(&volume, 512, &[3; 512]).await };
        let rewrite = volume.tidy(&extents, None);
        let replaced = async {
            sleep(SECOND).await;
            replaced(&volume, &memory, 2).await;
        };
        let ((survey, plan), (part, rewrite), ()) =
            join3(join_two(survey, plan), join_two(part, rewrite), replaced).await;
        assert!(Extent::covers(&survey.expect("surveyed"), range(0, WHOLE)));
        drop(plan.expect("planned"));
        part.expect("written");
        rewrite.expect("rewritten");
        let mut model = vec![2; 4096];
        model[512..1024].fill(3);
        assert_eq!(read(&volume, 0, 4096).await, model);
    });
}

/// The guest that writes all the time does not touch the block of the one that has to read.
#[test]
fn write_of_a_part_of_a_block_is_not_starved_by_writes_of_others() {
    run(1, async {
        let memory = objects();
        let volume = {
            let volumes = Volumes::open_or_make(slow(&memory), environment("host-1"), 1 << 20);
            let volumes = volumes.await.expect("a store");
            volumes.create(&name("web"), LEN).await.expect("made");
            volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open")
        };
        write(&volume, 0, &vec![1; bytes(LEN)]).await.expect("written");
        volume.flush().await.expect("flushed");
        let others = async {
            for _ in 0.. {
                write(&volume, 8192, &[2; 4096]).await.expect("written");
                volume.flush().await.expect("flushed");
                sleep(SECOND).await;
            }
        };
        let part = timeout(60 * SECOND, write(&volume, 0, &[3; 512]));
        let mut others = std::pin::pin!(others);
        let mut part = std::pin::pin!(part);
        let written = std::future::poll_fn(|context| {
            let others = others.as_mut().poll(context);
            assert!(others.is_pending());
            part.as_mut().poll(context)
        });
        written.await.expect("in time").expect("written");
    });
}

/// A guest waits for as long as it takes. A verb ends, also where both want the same node.
#[test]
fn verb_ends_while_the_store_is_away_and_a_guest_waits() {
    run(1, async {
        let memory = objects();
        let volume = made(&memory, LEN).await;
        write(&volume, 0, &[1; 4096]).await.expect("written");
        volume.snapshots().expect("has them").take("").await.expect("taken");
        volume.close().await.expect("closed");
        let all = volumes(&memory, "host-2").await;
        // It is away from now on.
        let tree = Arc::new(Tree::new(down(&memory), 1 << 20));
        let heads = || all.heads(&name("web"));
        let state = heads().newest().await.expect("a head").state;
        let guest = Volume::readable(tree.with_patience(Patience::Endless), heads(), state);
        let verb = Volume::readable(tree.with_patience(Patience::VERB), heads(), state);
        let waits = async { guest.plan(range(0, 512), Vec::new()).finish().await.map(drop) };
        let ends = async {
            sleep(SECOND).await;
            let planned = verb.plan(range(0, 512), Vec::new()).finish().await;
            assert_eq!(planned.err().expect("away").kind(), ErrorKind::Io);
            let weakness = guest.weakness().expect("it is said");
            assert!(weakness.contains("1 reads wait"), "{weakness}");
            let listed = guest.snapshots().expect("has them").list().await;
            assert_eq!(listed.unwrap_err().kind(), ErrorKind::Io);
        };
        let (waits, ends) =
            join_two(timeout(600 * SECOND, waits), timeout(100 * SECOND, ends)).await;
        assert!(waits.is_err(), "it waits");
        ends.expect("in time");
    });
}

/// A store with a volume that somebody wrote and closed, and its volumes as another host sees them.
async fn written_elsewhere() -> (MemoryObjects, Volumes) {
    let memory = objects();
    let volume = made(&memory, LEN).await;
    write(&volume, 0, &[1; 4096]).await.expect("written");
    volume.close().await.expect("closed");
    let all = volumes(&memory, "host-2").await;
    (memory, all)
}

/// The story: a volume was given up when its server ended, and waited on for a node that another
/// one, which nobody gave up, was reading.
#[test]
fn reader_that_is_given_up_waits_for_no_other_reader_of_the_same_node() {
    run(1, async {
        let (memory, all) = written_elsewhere().await;
        let heads = || all.heads(&name("web"));
        let state = heads().newest().await.expect("a head").state;
        let tree = Arc::new(Tree::new(down(&memory), 1 << 20));
        let trees = [0; 2].map(|_| tree.with_patience(Patience::Endless));
        let [first, second] =
            [&trees[0], &trees[1]].map(|tree| Volume::readable(Arc::clone(tree), heads(), state));
        let reads = async { first.plan(range(0, 512), Vec::new()).finish().await.map(drop) };
        let waits = async {
            sleep(SECOND).await;
            second.plan(range(0, 512), Vec::new()).finish().await.map(drop)
        };
        let gives_up = async {
            sleep(2 * SECOND).await;
            trees[1].give_up();
        };
        let (reads, waits) = (timeout(600 * SECOND, reads), timeout(100 * SECOND, waits));
        let (reads, waits, ()) = join3(reads, waits, gives_up).await;
        assert!(reads.is_err(), "the other one is not given up");
        let error = waits.expect("in time").expect_err("it is away");
        assert_eq!(error.kind(), ErrorKind::Io);
    });
}

/// The story: a store took requests and answered none, and a server that was to end within seconds
/// waited for as long as a request may take, as only the pause before another try was cut off.
#[test]
fn node_that_is_being_read_from_a_store_that_hangs_is_not_waited_for_when_that_is_given_up() {
    run(1, async {
        let (memory, all) = written_elsewhere().await;
        let heads = all.heads(&name("web"));
        let state = heads.newest().await.expect("a head").state;
        let options = FaultyOptions { hung: 1.0, ..FaultyOptions::default() };
        let hangs = Arc::new(FaultyObjects::new(Arc::new(memory.clone()), options));
        let tree = Tree::new(hangs, 1 << 20).with_patience(Patience::Endless);
        let volume = Volume::readable(Arc::clone(&tree), heads, state);
        let reads = async { volume.plan(range(0, 512), Vec::new()).finish().await.map(drop) };
        let gives_up = async {
            sleep(2 * SECOND).await;
            tree.give_up();
        };
        let (reads, ()) = join_two(timeout(10 * SECOND, reads), gives_up).await;
        let error = reads.expect("in time").expect_err("nothing is answered");
        assert_eq!(error.kind(), ErrorKind::Io);
    });
}

/// The story: the same, of what a guest reads: its memory was in the hands of the request, which a
/// bucket gives up after a minute, and a server that was told to end waited for that.
#[test]
fn guest_is_answered_once_a_far_store_that_hangs_is_given_up_and_its_memory_stays_as_it_is() {
    run(1, async {
        let (memory, all) = written_elsewhere().await;
        let map = all.heads(&name("web")).newest().await.expect("a head").state.map;
        let place = all.tree.look_up(map, 0).await.expect("found").expect("it was written");
        let slow = memory.clone().with_exact_latency(20 * SECOND);
        let tree = Tree::new(Arc::new(slow), 1 << 20).with_patience(Patience::Endless);
        let guest = |byte: u8| Buf::from_slice(&[byte; 4096]).into_foreign();
        let guest_memory = tree.begin_plain(place, guest(5)).err().expect("it is not lent");
        let reads = tree.fill_blocks(place, [place], guest_memory);
        let gives_up = async {
            sleep(2 * SECOND).await;
            tree.give_up();
        };
        let (read, ()) = join_two(timeout(10 * SECOND, reads), gives_up).await;
        let (result, guest_memory) = read.expect("in time");
        let error = result.expect_err("nothing was answered yet");
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.in_one_line().ends_with("no answer, and it was given up"), "{error:?}");
        // The store answers at last.
        sleep(60 * SECOND).await;
        assert_eq!(*guest_memory, [5; 4096]);
        let (result, read) = all.tree.fill_blocks(place, [place], guest(5)).await;
        result.expect("read");
        assert_ne!(*read, [5; 4096]);
    });
}

/// `memory`, which denies requests of a kind as `throttle` says.
fn denying(memory: &MemoryObjects, only: ObjectOperation, throttle: Throttle) -> Arc<dyn Objects> {
    let options = FaultyOptions {
        only: Some(only),
        throttle: Some(throttle),
        refused_as: Some(ErrorKind::Denied),
        ..FaultyOptions::default()
    };
    Arc::new(FaultyObjects::new(Arc::new(memory.clone()), options))
}

/// The story: the credentials of a bucket had expired and were renewed a minute later, and each
/// volume that had put something meanwhile took no writes before its server was restarted.
#[test]
fn put_that_the_store_denies_for_a_while_is_done_when_it_allows_it_again() {
    run(1, async {
        let memory = objects();
        volumes(&memory, "host-1").await.create(&name("web"), LEN).await.expect("made");
        // Opening it puts a claim and a head.
        let throttle = Throttle { served: 2, refused: 20 };
        let objects = denying(&memory, ObjectOperation::Put, throttle);
        let all = Volumes::open(objects, environment("host-1"), 1 << 20).await.expect("a store");
        let volume = all.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
        write(&volume, 0, &[7; 4096]).await.expect("written");
        let flushed = timeout(600 * SECOND, volume.flush());
        let told = async {
            sleep(SECOND).await;
            volume.weakness()
        };
        let (flushed, told) = join_two(flushed, told).await;
        let told = told.expect("it is said meanwhile");
        assert!(told.contains("slow down"), "{told}");
        flushed.expect("in time").expect("it is in the store");
        assert!(volume.latch().is_none());
        assert!(!volume.weakness().is_some_and(|said| said.contains("slow down")));
        // Who waits for a verb is told at once.
        let throttle = Throttle { served: 2, refused: 1 << 40 };
        let objects = denying(&memory, ObjectOperation::Put, throttle);
        let all = Volumes::open(objects, environment("host-1"), 1 << 20).await.expect("a store");
        let all = all.for_verbs();
        let volume = all.open_volume(&name("web"), Claimed::TakeOver).await;
        let error = match volume {
            Ok(volume) => {
                write(&volume, 0, &[8; 4096]).await.expect("written");
                timeout(SECOND, volume.flush()).await.expect("at once").expect_err("denied")
            }
            Err(error) => error,
        };
        assert_eq!(error.kind(), ErrorKind::Denied);
    });
}

#[test]
fn read_that_the_store_denies_for_a_while_is_done_for_a_guest_and_fails_a_verb() {
    run(1, async {
        let (memory, all) = written_elsewhere().await;
        let heads = || all.heads(&name("web"));
        let state = heads().newest().await.expect("a head").state;
        let throttle = Throttle { served: 0, refused: 20 };
        let after = Throttle { served: 1 << 40, refused: 0 };
        for (patience, throttle, wanted) in [
            (Patience::VERB, throttle, Err(ErrorKind::Denied)),
            (Patience::Endless, Throttle { served: 1, ..throttle }, Ok(())),
            (Patience::Endless, after, Ok(())),
        ] {
            let objects = denying(&memory, ObjectOperation::Read, throttle);
            let tree = Arc::new(Tree::new(objects, 1)).with_patience(patience);
            let volume = Volume::readable(tree, heads(), state);
            let read = async {
                let plan = volume.plan(range(0, 4096), Vec::new()).finish().await?;
                read_whole(&volume, &plan).await.map(drop)
            };
            let read = timeout(600 * SECOND, read).await.expect("in time");
            assert_eq!(read.map_err(|error| error.kind()), wanted, "{patience:?}");
        }
    });
}

/// Zeros over the end of a disk that grows meanwhile leave what is written behind it.
#[test]
fn zeros_at_the_end_of_a_disk_that_grows_stay_within_it() {
    run(1, async {
        let memory = objects();
        let len = 2 * 4096 + 512;
        let volume = {
            let volumes = Volumes::open_or_make(slow(&memory), environment("host-1"), 1 << 20);
            let volumes = volumes.await.expect("a store");
            volumes.create(&name("web"), len).await.expect("made");
            volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open")
        };
        write(&volume, 0, &vec![1; bytes(len)]).await.expect("written");
        volume.flush().await.expect("flushed");
        // What is left of the first block has to be read.
        let zeroes =
            volume.write_zeroes(range(512, len - 512), Zeroes { may_unmap: true, fast: false });
        let grown = async {
            sleep(SECOND).await;
            volume.resize(LEN).await.expect("grown");
            write(&volume, 8192, &[2; 4096]).await.expect("written");
        };
        let (zeroed, ()) = join_two(zeroes, grown).await;
        zeroed.expect("zeroed");
        assert_eq!(read(&volume, len, 3584).await, [2; 3584]);
        assert_eq!(read(&volume, 0, 512).await, [1; 512]);
        assert_eq!(read(&volume, 512, 8192 - 512).await, [0; 8192 - 512]);
    });
}

async fn join3<A, B, C>(
    a: impl Future<Output = A>,
    b: impl Future<Output = B>,
    c: impl Future<Output = C>,
) -> (A, B, C) {
    let ((a, b), c) = join_two(join_two(a, b), c).await;
    (a, b, c)
}
