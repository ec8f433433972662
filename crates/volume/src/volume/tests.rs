mod bad_days;
mod destage;
mod handed;
mod kinds;
mod life;
mod requests;
mod waiting;

use super::*;
use crate::heads::Claimed;
use crate::names::VolumeName;
use crate::properties::NewVolume;
use crate::put::Patience;
use crate::segment::WEIGHT_MAX;
use crate::testing::{environment, key, kind};
use crate::volumes::Volumes;
use mica_block::{Objects, read_whole};
use mica_rt::{Backend, Executor, SharedMemory, join_all};
use mica_store::object::{FaultyObjects, FaultyOptions, MemoryObjects, ObjectOperation, Throttle};
use mica_units::{Rng, SECTOR_BYTES};
use std::sync::atomic::AtomicU64;
use std::time::Duration;

const LEN: u64 = 300 * SECTOR_BYTES;

fn objects() -> MemoryObjects {
    MemoryObjects::new("memory")
}

async fn volumes(objects: &MemoryObjects, host: &str) -> Volumes {
    let objects: Arc<dyn Objects> = Arc::new(objects.clone());
    let opened = Volumes::open_or_make(objects, environment(host), 1 << 20).await;
    opened.expect("a store").with_key(Some(key()))
}

fn name(text: &str) -> VolumeName {
    VolumeName::new(text).expect("a name")
}

fn run<T>(seed: u64, test: impl Future<Output = T>) -> T {
    Executor::new(Backend::Sim { seed }).expect("a simulator").block_on(test)
}

async fn made(objects: &MemoryObjects, len: u64) -> Volume {
    made_as(objects, len, NewVolume::default()).await
}

async fn made_as(objects: &MemoryObjects, len: u64, new: NewVolume) -> Volume {
    let volumes = volumes(objects, "host-1").await;
    volumes.create_as(&name("web"), len, new).await.expect("made");
    volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open")
}

fn range(start: u64, len: u64) -> GuestRange {
    GuestRange::new(GuestOffset::new(start), len).expect("on the disk")
}

async fn write(volume: &Volume, at: u64, bytes: &[u8]) -> Result<()> {
    volume.write(GuestOffset::new(at), Buf::from_slice(bytes)).await.0
}

async fn read(volume: &Volume, at: u64, len: u64) -> Vec<u8> {
    let plan = volume.plan(range(at, len), Vec::new()).finish().await.expect("planned");
    assert!(Extent::covers(&plan, range(at, len)));
    read_whole(volume, &plan).await.expect("read").to_vec()
}

/// Random requests against a disk that is a list of bytes; the volume is closed or lost, and opened
/// again by another host.
#[test]
fn volume_is_a_disk_through_flushes_closes_and_takeovers() {
    for seed in 0..40 {
        run(seed, async {
            let objects = objects();
            let mut volume = made_as(&objects, LEN, kind(seed)).await;
            let (mut rng, mut model) = (Rng::new(seed), vec![0; bytes(LEN)]);
            for step in 0..300 {
                let start = rng.below(LEN / SECTOR_BYTES);
                let sectors = (1 + rng.below(40)).min(LEN / SECTOR_BYTES - start);
                let (at, len) = (start * SECTOR_BYTES, sectors * SECTOR_BYTES);
                let there = bytes(at)..bytes(at + len);
                match rng.below(12) {
                    0..5 => {
                        let values = [1, 3, 256][index(&mut rng, 3)];
                        let new: Vec<u8> =
                            there.clone().map(|_| byte_below(&mut rng, values)).collect();
                        write(&volume, at, &new).await.expect("written");
                        model[there].copy_from_slice(&new);
                    }
                    5..7 => {
                        let zeroes = Zeroes { may_unmap: rng.percent(50), fast: false };
                        volume.write_zeroes(range(at, len), zeroes).await.expect("zeroed");
                        model[there].fill(0);
                    }
                    7 => volume.flush().await.expect("flushed"),
                    8 => {
                        volume.flush().await.expect("flushed");
                        if rng.percent(50) {
                            volume.close().await.expect("closed");
                        }
                        let host = format!("host-{step}");
                        let volumes = volumes(&objects, &host).await;
                        let opened = volumes.open_volume(&name("web"), Claimed::TakeOver).await;
                        volume = opened.expect("open");
                    }
                    _ => assert_eq!(read(&volume, at, len).await, model[there], "step {step}"),
                }
            }
            assert_eq!(read(&volume, 0, LEN).await, model, "seed {seed}");
        });
    }
}

fn byte(rng: &mut Rng) -> u8 {
    byte_below(rng, 256)
}

fn byte_below(rng: &mut Rng, values: u64) -> u8 {
    u8::try_from(rng.below(values)).expect("a byte")
}

fn index(rng: &mut Rng, len: u64) -> usize {
    usize::try_from(rng.below(len)).expect("small")
}

fn bytes(count: u64) -> usize {
    usize::try_from(count).expect("small")
}

/// A discard takes whole blocks, and leaves what is beside them.
#[test]
fn discard_frees_blocks_and_leaves_the_rest() {
    run(1, async {
        let volume = made(&objects(), LEN).await;
        write(&volume, 0, &vec![7; bytes(LEN)]).await.expect("written");
        volume.flush().await.expect("flushed");
        volume.discard(range(512, 3 * 4096)).await.expect("discarded");
        let mut model = vec![7; bytes(LEN)];
        model[4096..3 * 4096].fill(0);
        assert_eq!(read(&volume, 0, LEN).await, model);
        volume.discard(range(0, LEN)).await.expect("discarded");
        assert_eq!(read(&volume, 0, LEN).await, vec![0; bytes(LEN)]);
        let survey = volume.survey(range(0, LEN)).await.expect("surveyed");
        assert_eq!(survey.len(), 1);
        assert_eq!(survey[0].kind, ExtentKind::Hole);
    });
}

/// What a lost server had flushed is there; what it had not may be gone.
#[test]
fn takeover_finds_everything_that_was_flushed() {
    run(2, async {
        let objects = objects();
        let lost = made(&objects, LEN).await;
        write(&lost, 0, &[1; 4096]).await.expect("written");
        lost.flush().await.expect("flushed");
        write(&lost, 4096, &[2; 4096]).await.expect("written");
        let other = volumes(&objects, "host-2").await;
        let refused = other.open_volume(&name("web"), Claimed::Refuse).await.err().expect("in use");
        assert_eq!(refused.kind(), ErrorKind::Denied);
        assert!(refused.to_string().contains("host-1"), "{refused}");
        let taken = other.open_volume(&name("web"), Claimed::TakeOver).await.expect("open");
        assert_eq!(read(&taken, 0, 4096).await, [1; 4096]);
        assert_eq!(read(&taken, 4096, 4096).await, [0; 4096]);
        // The lost one wakes up: it learns what happened, and changes nothing.
        let fenced = lost.flush().await.expect_err("fenced");
        assert_eq!(fenced.kind(), ErrorKind::Denied);
        assert!(fenced.to_string().contains("host-2"), "{fenced}");
        assert!(lost.latch().is_some() && lost.close().await.is_err());
        assert!(write(&lost, 0, &[3; 4096]).await.is_err());
        write(&taken, 0, &[4; 512]).await.expect("written");
        taken.close().await.expect("closed");
        let again = other.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
        assert_eq!(read(&again, 0, 512).await, [4; 512]);
        assert_eq!(read(&again, 512, 512).await, [1; 512]);
    });
}

/// Hosts that take a volume from each other all the time, over a store that answers late, loses
/// answers and refuses. Each has a block that only it writes: what it was told is durable is there
/// in the end, or something that it wrote later.
#[test]
fn hosts_that_race_for_a_volume_lose_nothing_that_was_flushed() {
    for seed in 0..60 {
        run(seed, async {
            let memory = objects().with_latency(Duration::from_millis(2));
            let made = made(&memory, LEN).await;
            made.close().await.expect("closed");
            let hosts = (0..3_u64).map(|host| {
                let options = FaultyOptions {
                    seed: seed * 10 + host,
                    refused: 0.05,
                    lost: 0.1,
                    late: 0.05,
                    slow: 0.2,
                    slow_by: Duration::from_millis(30),
                    ..FaultyOptions::default()
                };
                spawn(contend(FaultyObjects::new(Arc::new(memory.clone()), options), host))
            });
            let flushed = mica_rt::join_all(hosts.collect::<Vec<_>>()).await;
            let volumes = volumes(&memory, "judge").await;
            let volume = volumes.open_volume(&name("web"), Claimed::TakeOver).await.expect("open");
            for (host, flushed) in flushed.into_iter().enumerate() {
                let block = read(&volume, host as u64 * 4096, 4096).await;
                assert!(block.iter().all(|byte| *byte == block[0]), "seed {seed}: torn");
                assert!(block[0] >= flushed, "seed {seed}: {} after {flushed}", block[0]);
            }
            let found = volumes.check(&name("web"), &mut |_| ()).await.expect("checked");
            assert_eq!(found.damaged_count, 0, "seed {seed}: {found:?}");
        });
    }
}

/// A writer that nobody fences sees nothing of answers that are lost or late.
#[test]
fn lone_writer_goes_on_through_answers_that_are_lost() {
    for seed in 0..20 {
        run(seed, async {
            let memory = objects();
            made(&memory, LEN).await.close().await.expect("closed");
            let options = FaultyOptions {
                seed,
                only: Some(ObjectOperation::Put),
                refused: 0.1,
                lost: 0.3,
                late: 0.1,
                slow_by: Duration::from_millis(30),
                ..FaultyOptions::default()
            };
            let objects: Arc<dyn Objects> = Arc::new(FaultyObjects::new(Arc::new(memory), options));
            let volumes = Volumes::open(objects, environment("host-1"), 1 << 20).await;
            let volumes = volumes.expect("a store");
            let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
            for number in 0..20 {
                write(&volume, 0, &[number; 4096]).await.expect("written");
                volume.flush().await.expect("flushed");
            }
            volume.close().await.expect("closed");
        });
    }
}

/// Writes numbers into the block of `host`, whoever else has the volume in between; returns the
/// last one that was flushed.
async fn contend(objects: FaultyObjects, host: u64) -> u8 {
    let objects: Arc<dyn Objects> = Arc::new(objects);
    let environment = environment(&format!("host-{host}"));
    let mut flushed = 0;
    let mut number = 0;
    for _ in 0..6 {
        let opened = async {
            let volumes = Volumes::open(Arc::clone(&objects), environment.clone(), 1 << 20).await?;
            volumes.open_volume(&name("web"), Claimed::TakeOver).await
        };
        // A verb gives up after some errors; the next one begins again.
        let Ok(volume) = opened.await else { continue };
        for _ in 0..4 {
            number += 1;
            if write(&volume, host * 4096, &[number; 4096]).await.is_err() {
                break;
            }
            match volume.flush().await {
                Ok(()) => flushed = number,
                Err(_) => break,
            }
        }
    }
    flushed
}

#[test]
fn each_bit_of_an_extent_that_is_damaged_is_noticed_when_it_is_read() {
    run(3, async {
        let objects = objects();
        let volume = made(&objects, LEN).await;
        write(&volume, 0, &[1; 8192]).await.expect("written");
        volume.close().await.expect("closed");
        let contents = objects.contents();
        let (extent, good) = contents
            .iter()
            .find(|(name, _)| name.as_str().starts_with("extents/"))
            .expect("an extent");
        let header = crate::format::extent::Header::decode(good).expect("a header");
        let mut rng = Rng::new(3);
        for _ in 0..200 {
            let at = 4096 + bytes(rng.below((header.table_at() - 4096) as u64));
            let mut bad = good.to_vec();
            bad[at] ^= 1 << rng.below(8);
            let damaged = changed(&contents, |name, content| {
                if name == extent.as_str() {
                    content.clone_from(&bad);
                }
            });
            let damaged = damaged.await;
            let volumes = volumes(&damaged, "host-2").await;
            let volume = volumes.open_readable(&name("web")).await.expect("open");
            let plan = volume.plan(range(0, 8192), Vec::new()).finish().await;
            let outcome = match plan {
                Ok(plan) => read_whole(&volume, &plan).await.map(|buf| buf.to_vec()),
                Err(error) => Err(error),
            };
            match outcome {
                // Between nodes there are zeros that nobody reads.
                Ok(read) => assert_eq!(read, [1; 8192]),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
                    assert!(error.to_string().contains(extent.as_str()), "{error}");
                }
            }
        }
    });
}

/// The story: a guest whose reads in flight went to the same page got I/O errors, as the sums of
/// all but one were compared with what another read had put there.
#[test]
fn reads_into_the_same_memory_of_a_guest_all_succeed() {
    for seed in 0..4 {
        run(seed, async {
            let latency = Duration::from_millis(1);
            let objects = objects().with_latency(latency);
            let volume = made_as(&objects, 64 << 10, kind(seed)).await;
            for block in 0..6 {
                write(&volume, block * 8192, &[byte_of(block); 4096]).await.expect("written");
            }
            volume.close().await.expect("closed");
            let volumes = volumes(&objects, "host-2").await;
            let volume = volumes.open_readable(&name("web")).await.expect("open");
            let guest = SharedMemory::zeroed(4096);
            let one = async |block: u64| {
                let plan = volume.plan(range(block * 8192, 4096), Vec::new()).finish().await;
                let plan = plan.expect("planned");
                volume.read(&plan[0], guest.buf(0, 4096).expect("all of it")).await.0
            };
            // The first ones read what is on the way, and others what is planned.
            for _ in 0..2 {
                for result in join_all((0..6).map(one)).await {
                    result.expect("read");
                }
            }
            let left = guest.buf(0, 4096).expect("all of it");
            assert!((0..6).any(|block| *left == [byte_of(block); 4096]), "what one of them read");
        });
    }
}

fn byte_of(block: u64) -> u8 {
    u8::try_from(block + 1).expect("small")
}

/// `contents` with `change` applied to each object's bytes.
async fn changed(
    contents: &std::collections::BTreeMap<mica_block::ObjectName, Arc<[u8]>>,
    change: impl Fn(&str, &mut Vec<u8>),
) -> MemoryObjects {
    let objects = MemoryObjects::new("damaged");
    for (name, content) in contents {
        let mut content = content.to_vec();
        change(name.as_str(), &mut content);
        if !content.is_empty() {
            let put = objects.put_if_absent(name, Buf::from_slice(&content)).await;
            put.0.expect("put");
        }
    }
    objects
}

/// The story: an export named an object of the store and a place in that, and nobody could say
/// which file of the guest it was.
#[test]
fn read_of_what_is_damaged_names_volume_snapshot_and_place() {
    run(8, async {
        let objects = objects();
        let volume = made(&objects, LEN).await;
        write(&volume, 0, &[1; 16 * 4096]).await.expect("written");
        volume.snapshots().expect("a volume").take("a").await.expect("taken");
        volume.close().await.expect("closed");
        let contents = objects.contents();
        let at = |content: &[u8], byte: u8| content.windows(4096).position(|b| b == [byte; 4096]);
        let bad = changed(&contents, |name, content| {
            if name.starts_with("extents")
                && let Some(first) = at(content, 1)
            {
                content[first + 5 * 4096 + 7] ^= 1;
            }
        });
        let volumes = volumes(&bad.await, "host-2").await;
        let (web, old) = (name("web"), mica_block::Which::Label("a".to_owned()));
        let snapshot = volumes.open_snapshot(&web, &old);
        for (disk, what) in [
            (snapshot.await.expect("there"), "web@a: 4096 bytes at 20480 of the disk"),
            (volumes.open_readable(&web).await.expect("there"), "web: 4096 bytes at 20480"),
        ] {
            let whole = GuestRange::new(GuestOffset::ZERO, 16 * 4096).expect("in the disk");
            let plan = disk.plan(whole, Vec::new()).finish().await.expect("the map is whole");
            let error = read_whole(&disk, &plan).await.map(drop).expect_err("damaged");
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            assert!(error.in_one_line().starts_with(what), "{}", error.in_one_line());
        }
    });
}

/// The story: each read over a damaged block asked the store for every block before that once more,
/// one after the other.
#[test]
fn damaged_block_is_found_by_few_requests() {
    const BLOCKS: u64 = 256;
    run(8, async {
        let objects = objects();
        let volume = made(&objects, BLOCKS * 4096).await;
        write(&volume, 0, &vec![1; bytes(BLOCKS * 4096)]).await.expect("written");
        volume.close().await.expect("closed");
        let contents = objects.contents();
        for (damaged, part) in [(201, 0..256), (201, 201..202), (255, 3..256), (0, 0..2)] {
            let bad = changed(&contents, |name, content| {
                let first = content.windows(4096).position(|block| block == [1; 4096]);
                if let Some(first) = first.filter(|_| name.starts_with("extents")) {
                    content[first + damaged * 4096] ^= 1;
                }
            });
            let counted = FaultyObjects::new(Arc::new(bad.await), FaultyOptions::default());
            let store: Arc<dyn Objects> = Arc::new(counted.clone());
            let disk = crate::testing::volumes(&store, "host-2").await;
            let disk = disk.open_readable(&name("web")).await.expect("there");
            let part = range(part.start * 4096, (part.end - part.start) * 4096);
            let plan = disk.plan(part, Vec::new()).finish().await.expect("the map is whole");
            let before = counted.requests();
            let error = read_whole(&disk, &plan).await.map(drop).expect_err("damaged");
            let what = format!("web: 4096 bytes at {} of the disk", damaged * 4096);
            assert!(error.in_one_line().starts_with(&what), "{}", error.in_one_line());
            let requests = counted.requests() - before;
            assert!(requests <= 20, "{requests} requests for {part:?}");
        }
    });
}

#[test]
fn check_names_what_is_damaged_and_goes_on() {
    run(8, async {
        let objects = objects();
        let volume = made(&objects, LEN).await;
        for at in [0, 8192, 40960] {
            write(&volume, at, &[1; 4096]).await.expect("written");
            volume.flush().await.expect("flushed");
        }
        volume.close().await.expect("closed");
        let contents = objects.contents();
        let check = async |objects: &MemoryObjects| {
            let volumes = volumes(objects, "host-2").await;
            volumes.check(&name("web"), &mut |_| ()).await.expect("checked")
        };
        let sound = check(&objects).await;
        assert_eq!((sound.blocks, sound.extents, sound.damaged_count), (3, 3, 0));
        // A block, a table, an extent that is gone.
        let bad = changed(&contents, |name, content| {
            if name.ends_with("/00000001") {
                content[4096] ^= 1;
            }
        });
        let found = check(&bad.await).await;
        assert_eq!(found.damaged_count, 1, "{found:?}");
        assert!(found.damaged[0].contains("at 8192 of the disk"), "{found:?}");
        let bad = changed(&contents, |name, content| {
            if name.ends_with("/00000000") && name.starts_with("extents") {
                *content.last_mut().expect("a table") ^= 1;
            }
        });
        let found = check(&bad.await).await;
        assert_eq!(found.damaged_count, 1, "{found:?}");
        assert!(found.damaged[0].contains("its table"), "{found:?}");
        let bad = changed(&contents, |name, content| {
            if name.starts_with("extents") && name.ends_with("/00000000") {
                content.clear();
            }
        });
        let found = check(&bad.await).await;
        assert!(found.damaged_count >= 1 && found.damaged[0].contains("missing"), "{found:?}");
    });
}

/// The figure of GOALS.md: uniformly random 4 KiB writes over 1 TiB, in a map that is full.
#[test]
fn random_writes_over_a_tebibyte_cost_little_more_than_themselves() {
    run(4, async {
        let objects = objects();
        let volume = made(&objects, 1 << 40).await;
        let mut rng = Rng::new(4);
        for _ in 0..10 * WEIGHT_MAX {
            let at = rng.below((1 << 40) / BLOCK_BYTES as u64) * BLOCK_BYTES as u64;
            write(&volume, at, &[1; BLOCK_BYTES]).await.expect("written");
        }
        volume.flush().await.expect("flushed");
        let stored: u64 = objects.contents().values().map(|content| content.len() as u64).sum();
        let written = (10 * WEIGHT_MAX * BLOCK_BYTES) as u64;
        assert!(stored * 100 < written * 135, "{stored} bytes for {written}");
    });
}

#[test]
fn trim_of_256_tebibytes_is_one_record() {
    run(5, async {
        let objects = objects();
        let volume = made(&objects, State::LEN_MAX).await;
        for at in [0, 1 << 30, 1 << 40, State::LEN_MAX - 4096] {
            write(&volume, at, &[1; 4096]).await.expect("written");
        }
        volume.flush().await.expect("flushed");
        let before: usize = objects.contents().values().map(|content| content.len()).sum();
        volume.discard(range(0, State::LEN_MAX)).await.expect("discarded");
        volume.flush().await.expect("flushed");
        let after: usize = objects.contents().values().map(|content| content.len()).sum();
        assert!(after - before <= 4096 + 16, "{}", after - before);
        assert_eq!(read(&volume, State::LEN_MAX - 4096, 4096).await, [0; 4096]);
    });
}

#[test]
fn disk_grows_and_keeps_its_length() {
    run(6, async {
        let objects = objects();
        let volume = made(&objects, 4096 + 512).await;
        write(&volume, 4096, &[1; 512]).await.expect("written");
        assert!(write(&volume, 4608, &[1; 512]).await.is_err(), "beyond the end");
        volume.resize(LEN).await.expect("grown");
        assert_eq!(volume.geometry().len, LEN);
        assert!(volume.resize(512).await.is_err(), "no shorter");
        let mut model = vec![0; 8192];
        model[4096..4608].fill(1);
        assert_eq!(read(&volume, 0, 8192).await, model);
        volume.close().await.expect("closed");
        let volumes = volumes(&objects, "host-2").await;
        let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
        assert_eq!(volume.geometry().len, LEN);
    });
}

#[test]
fn name_of_a_deleted_volume_is_free_and_shows_nothing_of_the_old_one() {
    run(7, async {
        let objects = objects();
        let volume = made(&objects, LEN).await;
        write(&volume, 0, &[1; 4096]).await.expect("written");
        let volumes = volumes(&objects, "host-1").await;
        assert_eq!(
            volumes.delete(&name("web"), Claimed::Refuse).await.unwrap_err().kind(),
            ErrorKind::Denied
        );
        assert_eq!(volumes.create(&name("web"), LEN).await.unwrap_err().kind(), ErrorKind::Invalid);
        volume.close().await.expect("closed");
        volumes.create(&name("other"), 512).await.expect("made");
        let names = |all: Vec<crate::volumes::VolumeInfo>| {
            all.into_iter().map(|info| info.name.as_str().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(names(volumes.list().await.expect("listed")), ["other", "web"]);
        volumes.delete(&name("web"), Claimed::Refuse).await.expect("deleted");
        assert_eq!(
            volumes.delete(&name("web"), Claimed::Refuse).await.unwrap_err().kind(),
            ErrorKind::NotFound
        );
        assert_eq!(names(volumes.list().await.expect("listed")), ["other"]);
        volumes.create(&name("web"), LEN).await.expect("made again");
        let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
        assert_eq!(read(&volume, 0, 4096).await, [0; 4096]);
    });
}
