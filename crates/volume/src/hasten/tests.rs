use crate::heads::Claimed;
use crate::log::LogDevice;
use crate::opening::Opening;
use crate::shared::Durability;
use crate::testing::{environment, memory, name, read, run, write};
use crate::volume::Volume;
use crate::volumes::Volumes;
use mica_block::{Disk, ErrorKind, Haste, Manage, Objects, Store};
use mica_rt::{now, spawn, timeout};
use mica_store::MemoryStore;
use mica_store::object::{FaultyObjects, FaultyOptions, MemoryObjects, ObjectOperation};
use std::sync::Arc;
use std::time::Duration;

const LEN: u64 = 1 << 20;
const LOG_LEN: u64 = 4 << 20;
/// What the store takes for a put when it is as good as down.
const AGES: Duration = Duration::from_secs(3600);

async fn opened(objects: &MemoryObjects, latency: Duration, opening: Opening) -> Arc<Volume> {
    let only = Some(ObjectOperation::Put);
    let options = FaultyOptions { only, latency, ..FaultyOptions::default() };
    let objects: Arc<dyn Objects> =
        Arc::new(FaultyObjects::new(Arc::new(objects.clone()), options));
    let volumes = Volumes::open(objects, environment("host-1"), 1 << 20).await.expect("a store");
    Arc::new(volumes.open_volume(&name("web"), opening).await.expect("open"))
}

async fn store() -> MemoryObjects {
    let memory = memory();
    let objects: Arc<dyn Objects> = Arc::new(memory.clone());
    let volumes = Volumes::open_or_make(objects, environment("host-1"), 1 << 20).await;
    volumes.expect("a store").create(&name("web"), LEN).await.expect("made");
    memory
}

fn with_log(log: Arc<LogDevice>, claimed: Claimed) -> Opening {
    Opening { claimed, log: Some(log), durability: Durability::Host }
}

/// Closes the volume as a process does that ends; returns what came of it, and after how long.
async fn ended(volume: &Arc<Volume>, haste: Haste) -> (mica_block::Result<()>, Duration) {
    let began = now();
    let hastened = Arc::clone(volume);
    let hastening = spawn(async move { hastened.hasten(haste).await });
    let closed = timeout(AGES / 2, volume.close()).await.expect("it does not wait for ever");
    let took = now().saturating_since(began);
    timeout(Duration::from_secs(1), hastening).await.expect("it is over, too");
    (closed, took)
}

/// The story: the store was down, and a server did not end on SIGTERM.
#[test]
fn store_that_does_not_answer_is_given_up_after_a_while() {
    run(1, async {
        let objects = store().await;
        for (haste, least, most) in [(Haste::Soon, 60, 62), (Haste::AtOnce, 0, 1)] {
            let volume = opened(&objects, AGES, Claimed::TakeOver.into()).await;
            write(&volume, 0, &[7; 4096]).await;
            let (closed, took) = ended(&volume, haste).await;
            let error = closed.expect_err("what was written is lost");
            assert!(error.to_string().contains("lacks 1 writes; they are lost"), "{error}");
            assert!((least..=most).contains(&took.as_secs()), "{took:?}");
            assert_eq!(volume.latch().expect("latched").kind(), ErrorKind::Io);
            assert!(!volume.is_left_to_log());
        }
    });
}

#[test]
fn what_was_flushed_into_the_log_is_there_after_the_store_was_given_up() {
    run(2, async {
        let objects = store().await;
        let file: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", Vec::new()));
        let log = LogDevice::create(Arc::clone(&file), LOG_LEN, [1; 16]).await.expect("a log");
        let volume = opened(&objects, AGES, with_log(log, Claimed::Refuse)).await;
        write(&volume, 4096, &[7; 4096]).await;
        volume.flush().await.expect("it is in the log");
        write(&volume, 8192, &[8; 4096]).await;
        let (closed, took) = ended(&volume, Haste::Soon).await;
        closed.expect("the log has all of it");
        assert!(volume.is_left_to_log() && (3..=5).contains(&took.as_secs()), "{took:?}");
        drop(volume);
        let log = LogDevice::open(file, [2; 16]).await.expect("a log");
        let volume = opened(&objects, Duration::ZERO, with_log(log, Claimed::Refuse)).await;
        assert_eq!(read(&volume, 4096, 4096).await, [7; 4096]);
        assert_eq!(read(&volume, 8192, 4096).await, [8; 4096]);
    });
}

#[test]
fn store_that_answers_is_waited_for() {
    run(3, async {
        let objects = store().await;
        let file: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", Vec::new()));
        let log = LogDevice::create(file, LOG_LEN, [1; 16]).await.expect("a log");
        // An extent and a head, which is several requests, each take less than they may.
        let slow = Duration::from_millis(600);
        let volume = opened(&objects, slow, with_log(log, Claimed::Refuse)).await;
        write(&volume, 0, &[7; 4096]).await;
        let (closed, took) = ended(&volume, Haste::Soon).await;
        closed.expect("closed");
        assert!(!volume.is_left_to_log() && took > slow, "{took:?}");
        assert!(volume.latch().is_none());
    });
}
