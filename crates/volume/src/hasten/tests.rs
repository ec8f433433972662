use crate::heads::Claimed;
use crate::log::LogDevice;
use crate::opening::Opening;
use crate::shared::Durability;
use crate::testing::{environment, memory, name, range, read, run, write};
use crate::volume::Volume;
use crate::volumes::Volumes;
use mica_block::{Disk, ErrorKind, Haste, Manage, Objects, Store};
use mica_rt::{now, sleep, spawn, timeout};
use mica_store::MemoryStore;
use mica_store::object::{FaultyObjects, FaultyOptions, MemoryObjects, ObjectOperation, Throttle};
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
    Opening { log: Some(log), durability: Durability::Host, ..claimed.into() }
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

/// `objects`, where so many requests of this kind are answered, and no more.
fn failing(objects: &MemoryObjects, only: ObjectOperation, served: u64) -> FaultyObjects {
    let throttle = Some(Throttle { served, refused: 1 << 40 });
    let options = FaultyOptions { only: Some(only), throttle, ..FaultyOptions::default() };
    FaultyObjects::new(Arc::new(objects.clone()), options)
}

async fn volumes(objects: &FaultyObjects) -> Volumes {
    let objects: Arc<dyn Objects> = Arc::new(objects.clone());
    Volumes::open(objects, environment("host-1"), 1).await.expect("a store")
}

/// A claim, and a head: what is put by the opening of a volume.
const OPENED: u64 = 2;

/// The story: a put waited for its next try when the volume was given up, and was sent after that.
#[test]
fn volume_that_was_given_up_sends_no_put_any_more() {
    run(4, async {
        let objects = failing(&store().await, ObjectOperation::Put, OPENED);
        let volumes = volumes(&objects).await;
        let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
        let volume = Arc::new(volume);
        write(&volume, 0, &[7; 4096]).await;
        timeout(Duration::from_secs(10), volume.flush()).await.expect_err("it is tried for long");
        assert!(objects.requests() > OPENED + 3, "it was tried several times");
        let (closed, _) = ended(&volume, Haste::AtOnce).await;
        closed.expect_err("what was written is lost");
        let sent = objects.requests();
        sleep(Duration::from_secs(60)).await;
        assert_eq!(objects.requests(), sent);
    });
}

/// The story: one signal for all volumes of a store made the reads of a volume fail, with which it
/// puts what it has, because another one was given up, or had been latched long before.
#[test]
fn reads_are_given_up_with_their_volume_and_no_other() {
    run(5, async {
        let memory = store().await;
        let names = ["web", "read", "other"].map(name);
        let healthy = failing(&memory, ObjectOperation::Read, 1 << 40);
        let all = volumes(&healthy).await;
        for name in &names {
            if name.as_str() != "web" {
                all.create(name, LEN).await.expect("made");
            }
            let volume = all.open_volume(name, Claimed::Refuse).await.expect("open");
            write(&volume, 0, &[7; 4096]).await;
            volume.close().await.expect("closed");
        }
        let open = async |objects: &FaultyObjects| {
            let (all, [web, read, other]) = (volumes(objects).await, &names);
            let web = all.open_volume(web, Claimed::Refuse).await.expect("open");
            let read = all.open_readable(read).await.expect("open");
            let other = all.open_volume(other, Claimed::Refuse).await.expect("open");
            [web, read, other].map(Arc::new)
        };
        // As many reads as that takes are answered.
        let before = healthy.requests();
        for volume in open(&healthy).await {
            volume.close().await.expect("closed");
        }
        let served = healthy.requests() - before;
        let [web, read, other] = open(&failing(&memory, ObjectOperation::Read, served)).await;
        let began = now();
        let reading = |volume: &Arc<Volume>| {
            let volume = Arc::clone(volume);
            spawn(async move {
                let planned = volume.plan(range(0, 4096), Vec::new()).finish().await.map(drop);
                (planned, now().saturating_since(began).as_secs())
            })
        };
        let [of_web, of_read, mut of_other] = [&web, &read, &other].map(reading);
        let hastening = [&web, &read].map(|volume| {
            let volume = Arc::clone(volume);
            spawn(async move { volume.hasten(Haste::Soon).await })
        });
        for (reading, least) in [(of_read, 3), (of_web, 60)] {
            let (planned, took) = reading.await;
            assert_eq!(planned.expect_err("it was given up").kind(), ErrorKind::Io);
            assert!((least..least + 3).contains(&took), "{took} s");
        }
        timeout(AGES, &mut of_other).await.map(drop).expect_err("it is waited for");
        for (volume, hastening) in [web, read].iter().zip(hastening) {
            volume.close().await.expect("closed");
            timeout(Duration::from_secs(1), hastening).await.expect("it is over, too");
        }
    });
}

/// The story: the store went away while what a log had was put into it, and neither did the volume
/// open, nor the server end.
#[test]
fn volume_is_not_opened_if_the_store_does_not_take_what_its_log_has() {
    run(6, async {
        let objects = store().await;
        let file: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", Vec::new()));
        let log = LogDevice::create(Arc::clone(&file), LOG_LEN, [1; 16]).await.expect("a log");
        let volume = opened(&objects, AGES, with_log(log, Claimed::Refuse)).await;
        write(&volume, 4096, &[7; 4096]).await;
        volume.flush().await.expect("it is in the log");
        ended(&volume, Haste::AtOnce).await.0.expect("the log has all of it");
        drop(volume);
        let log = LogDevice::open(Arc::clone(&file), [2; 16]).await.expect("a log");
        // The one before is fenced, too.
        let away = volumes(&failing(&objects, ObjectOperation::Put, OPENED + 1)).await;
        let web = name("web");
        let opening = away.open_volume(&web, with_log(log, Claimed::Refuse));
        let in_vain = timeout(Duration::from_secs(30), opening).await;
        let error = in_vain.expect("it is told").err().expect("nothing is taken");
        assert_eq!(error.kind(), ErrorKind::Io);
        let log = LogDevice::open(file, [3; 16]).await.expect("a log");
        let volume = opened(&objects, Duration::ZERO, with_log(log, Claimed::Refuse)).await;
        assert_eq!(read(&volume, 4096, 4096).await, [7; 4096]);
    });
}

#[test]
fn volume_whose_last_head_is_not_answered_lacks_no_writes() {
    run(7, async {
        let slow = failing(&store().await, ObjectOperation::Put, OPENED + 1);
        let volumes = volumes(&slow).await;
        let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
        let volume = Arc::new(volume);
        write(&volume, 0, &[7; 4096]).await;
        volume.flush().await.expect("it is in the store");
        let (closed, _) = ended(&volume, Haste::AtOnce).await;
        let error = closed.expect_err("others do not know that it is closed").to_string();
        assert!(error.contains("it lacks only that it is closed"), "{error}");
    });
}
