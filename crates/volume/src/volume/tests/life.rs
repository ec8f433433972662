//! The ends of openings and of volumes, and of the executors that they ran on.

use super::*;
use crate::log::LogDevice;
use crate::opening::Opening;
use crate::place::Writer;
use mica_block::Store;
use mica_rt::sleep;
use mica_store::MemoryStore;
use mica_store::faulty::{ErrorOptions, ErrorStore, Operation, Operations, When};
use mica_units::HostOffset;

const ID: [u8; 16] = [7; 16];

fn latent() -> MemoryObjects {
    objects().with_latency(Duration::from_millis(2))
}

fn log_file() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new_writable("log", vec![0; 4096 + 16 * (16 << 10)]))
}

fn host(log: &Arc<LogDevice>, claimed: Claimed) -> Opening {
    Opening { log: Some(Arc::clone(log)), durability: Durability::Host, ..claimed.into() }
}

/// The thread that opens a volume ends its executor, and with it every task that is left. A
/// snapshot in the log makes a checkpoint due when it is replayed: its task was dropped, and that
/// latched the volume that had just been opened.
#[test]
fn replay_leaves_no_task_to_the_executor_of_the_opening() {
    for seed in 0..20 {
        let objects = latent();
        let log = run(seed, async {
            let log = LogDevice::open(log_file(), ID).await.expect("a log");
            let volumes = volumes(&objects, "host-1").await;
            volumes.create(&name("web"), LEN).await.expect("made");
            let opened = volumes.open_volume(&name("web"), host(&log, Claimed::Refuse)).await;
            let volume = opened.expect("open");
            write(&volume, 0, &[1; 4096]).await.expect("written");
            volume.snapshots().expect("has them").take("first").await.expect("taken");
            // It is killed.
            log
        });
        let volume = run(seed, async {
            let volumes = volumes(&objects, "host-1").await;
            let opened = volumes.open_volume(&name("web"), host(&log, Claimed::Refuse)).await;
            opened.expect("open")
        });
        assert!(volume.latch().is_none(), "seed {seed}: {:?}", volume.latch());
        run(seed, async {
            write(&volume, 4096, &[2; 4096]).await.expect("written");
            volume.flush().await.expect("flushed");
            assert_eq!(read(&volume, 0, 4096).await, [1; 4096]);
            volume.close().await.expect("closed");
        });
    }
}

/// As above, of a volume that is closed while a checkpoint is due.
#[test]
fn closing_leaves_no_task_to_the_executor() {
    for seed in 0..60 {
        let objects = latent();
        let volume = run(seed, async {
            let volume = made(&objects, LEN).await;
            write(&volume, 0, &[1; 4096]).await.expect("written");
            volume.snapshots().expect("has them").take("").await.expect("taken");
            volume.close().await.expect("closed");
            volume
        });
        assert!(volume.latch().is_none(), "seed {seed}: {:?}", volume.latch());
    }
}

/// The head is put and the log is not ended: whoever closes again is not told that all is well.
#[test]
fn volume_is_closed_only_when_its_log_is_ended() {
    run(1, async {
        let file = log_file();
        let objects = objects();
        let volumes = volumes(&objects, "host-1").await;
        volumes.create(&name("web"), LEN).await.expect("made");
        let options = |number| ErrorOptions {
            operations: Operations::NONE.with(Operation::Write),
            when: When::From(number),
            errno: 5,
        };
        let failing: Arc<dyn Store> = Arc::new(ErrorStore::new(file, options(4)));
        let log = LogDevice::open(failing, ID).await.expect("a log");
        let opened = volumes.open_volume(&name("web"), host(&log, Claimed::Refuse)).await;
        let volume = opened.expect("open");
        assert!(volume.close().await.is_err());
        assert!(volume.close().await.is_err());
    });
}

/// What a stranger's log has lost cannot be counted: that is said, and no reason not to open.
#[test]
fn volume_opens_beside_a_stale_log_that_cannot_be_read() {
    run(1, async {
        let (file, objects) = (log_file(), objects());
        let here = volumes(&objects, "host-1").await;
        here.create(&name("web"), LEN).await.expect("made");
        let log = LogDevice::open(Arc::clone(&file), ID).await.expect("a log");
        let opened = here.open_volume(&name("web"), host(&log, Claimed::Refuse)).await;
        let volume = opened.expect("open");
        write(&volume, 0, &[1; 4096]).await.expect("written");
        volume.flush().await.expect("flushed");
        drop((volume, log));
        let other = volumes(&objects, "host-2").await;
        let taken = other.open_volume(&name("web"), Claimed::TakeOver).await.expect("open");
        taken.close().await.expect("closed");
        // All of the first segment but its header.
        let groups = 8192..16384;
        let options = ErrorOptions {
            operations: Operations::READS,
            when: When::Ranges(vec![groups]),
            errno: 5,
        };
        let damaged: Arc<dyn Store> = Arc::new(ErrorStore::new(file, options));
        let log = LogDevice::open(damaged, [8; 16]).await.expect("a log");
        let opened = here.open_volume(&name("web"), host(&log, Claimed::Refuse)).await;
        let volume = opened.expect("open");
        let weakness = volume.weakness().expect("it is said");
        assert!(weakness.contains("cannot be read"), "{weakness}");
        assert!(log.volumes().iter().any(|found| found.is_set_aside));
    });
}

/// The story: a volume was opened by force because its log was damaged, and it said that others had
/// had the volume since; or nothing, where not one write could be read.
#[test]
fn volume_that_is_opened_by_force_without_its_damaged_log_says_what_is_wrong_with_that() {
    // Of two groups, each in a segment of its own, the first; and both.
    let all: [(&[u64], &str); 2] =
        [(&[8192], "has 1 writes"), (&[8192, 24576], "may have lost writes")];
    for (damaged, wanted) in all {
        run(1, async {
            let (file, objects) = (log_file(), objects());
            let volumes = volumes(&objects, "host-1").await;
            volumes.create(&name("web"), LEN).await.expect("made");
            let log = LogDevice::open(Arc::clone(&file), ID).await.expect("a log");
            let away = FaultyOptions {
                only: Some(ObjectOperation::Put),
                throttle: Some(Throttle { served: 2, refused: 1 << 40 }),
                ..FaultyOptions::default()
            };
            let away = Arc::new(FaultyObjects::new(Arc::new(objects.clone()), away));
            let away = Volumes::open(away, environment("host-1"), 1 << 20).await.expect("a store");
            let volume = away.open_volume(&name("web"), host(&log, Claimed::Refuse)).await;
            let volume = volume.expect("open");
            for byte in 1..=2 {
                write(&volume, 0, &[byte; 4096]).await.expect("written");
                volume.flush().await.expect("it is in the log");
            }
            drop((volume, log));
            for at in damaged {
                let written = file.write_at(Buf::from_slice(&[9; 512]), HostOffset::new(*at)).await;
                written.0.expect("written");
            }
            let log = LogDevice::open(file, [8; 16]).await.expect("a log");
            let web = name("web");
            let open = |claimed| volumes.open_volume(&web, host(&log, claimed));
            let error = open(Claimed::Refuse).await.map(drop).expect_err("it has lost writes");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            let said = open(Claimed::TakeOver).await.expect("open").weakness().expect("said");
            assert!(said.contains(wanted) && said.contains(&error.in_one_line()), "{said}");
            assert!(!said.contains("others had"), "{said}");
        });
    }
}

/// The story: a server was killed again and again, and wrote less than a segment each time. Its log
/// named all that had ever had it, and the 33rd could not name itself.
#[test]
fn volume_opens_after_any_number_of_deaths_within_one_segment() {
    run(1, async {
        const BLOCKS: u64 = LEN / 4096;
        let (file, objects) = (log_file(), objects());
        let volumes = volumes(&objects, "host-1").await;
        volumes.create(&name("web"), LEN).await.expect("made");
        let mut model = vec![0; usize::try_from(LEN).expect("small")];
        for round in 1..=40 {
            let log = LogDevice::open(Arc::clone(&file), [round; 16]).await.expect("a log");
            let opened = volumes.open_volume(&name("web"), host(&log, Claimed::Refuse)).await;
            let volume = opened.unwrap_or_else(|error| panic!("round {round}: {error}"));
            assert!(read(&volume, 0, LEN).await == model, "round {round}");
            let at = u64::from(round) * 7 % BLOCKS * 4096;
            write(&volume, at, &[round; 4096]).await.expect("written");
            model[usize::try_from(at).expect("small")..][..4096].fill(round);
            volume.flush().await.expect("it is in the log");
        }
    });
}

/// Processes that named themselves in the log and never got the volume: their heads may be under
/// way, and so nobody is forgotten. By force, the volume opens without that log.
#[test]
fn log_that_can_name_no_other_is_in_the_way_of_no_force() {
    run(1, async {
        let (file, objects) = (log_file(), objects());
        let volumes = volumes(&objects, "host-1").await;
        volumes.create(&name("web"), LEN).await.expect("made");
        let log = LogDevice::open(file, ID).await.expect("a log");
        drop(volumes.open_volume(&name("web"), host(&log, Claimed::Refuse)).await.expect("open"));
        let found = log.volumes().remove(0);
        for number in 1..=31 {
            let next = Writer::new(1 << 30 | number).expect("a writer");
            let gone_on = log.go_on(found.volume, (found.writers[0], next), found.freed).await;
            drop(gone_on.expect("there is room for its name"));
        }
        let open = async |claimed| {
            let opened = volumes.open_volume(&name("web"), host(&log, claimed)).await;
            opened.map(|volume| volume.weakness())
        };
        let error = open(Claimed::Refuse).await.expect_err("32 are named");
        assert_eq!(error.kind(), ErrorKind::Limit, "{error}");
        let said = open(Claimed::TakeOver).await.expect("open").expect("it is said");
        assert!(said.contains(&error.in_one_line()), "{said}");
        open(Claimed::Refuse).await.expect("it has a log of its own");
    });
}

/// The story: a volume was taken over by force, and the log of the new host had no room for it: its
/// writer was fenced, and nobody served it.
#[test]
fn writer_is_not_fenced_for_one_whose_log_has_no_room() {
    run(1, async {
        let (objects, web) = (objects(), name("web"));
        let (one, two) = (volumes(&objects, "host-1").await, volumes(&objects, "host-2").await);
        one.create(&web, LEN).await.expect("made");
        one.create(&name("mail"), LEN).await.expect("made");
        let served = one.open_volume(&web, Claimed::Refuse).await.expect("open");
        let len = usize::try_from(LogDevice::LEN_MIN).expect("small");
        let file = Arc::new(MemoryStore::new_writable("log", vec![0; len]));
        let log = LogDevice::open(file, ID).await.expect("a log");
        let mail = two.open_volume(&name("mail"), host(&log, Claimed::Refuse)).await.expect("open");
        write(&mail, 0, &[1; 4096]).await.expect("written");
        let taken = two.open_volume(&web, host(&log, Claimed::TakeOver)).await;
        assert_eq!(taken.map(drop).expect_err("there is no room").kind(), ErrorKind::NoSpace);
        write(&served, 0, &[2; 4096]).await.expect("written");
        served.flush().await.expect("it is in the store");
        mail.close().await.expect("closed");
        // The room of the other one is enough.
        let taken = two.open_volume(&web, host(&log, Claimed::TakeOver)).await.expect("open");
        assert_eq!(read(&taken, 0, 4096).await, [2; 4096]);
        // As long as it is open here, its log is in use.
        let again = two.open_volume(&web, host(&log, Claimed::TakeOver)).await;
        assert_eq!(again.map(drop).expect_err("it is open").kind(), ErrorKind::Denied);
        write(&taken, 0, &[3; 4096]).await.expect("written");
        taken.close().await.expect("nobody has fenced it");
    });
}

/// The story: a volume was taken over by force, and while the store was asked to fence its writer,
/// another volume took the last room of the log: nobody served the first one.
#[test]
fn room_of_a_log_is_kept_from_the_look_at_it_until_a_writer_is_fenced() {
    run(1, async {
        let (objects, web, mail) = (objects(), name("web"), name("mail"));
        let one = volumes(&objects, "host-1").await;
        one.create(&web, LEN).await.expect("made");
        one.create(&mail, LEN).await.expect("made");
        let served = one.open_volume(&web, Claimed::Refuse).await.expect("open");
        write(&served, 0, &[2; 4096]).await.expect("written");
        served.flush().await.expect("it is in the store");
        let len = usize::try_from(LogDevice::LEN_MIN).expect("small");
        let file = Arc::new(MemoryStore::new_writable("log", vec![0; len]));
        let log = LogDevice::open(file, ID).await.expect("a log");
        let options = FaultyOptions {
            only: Some(ObjectOperation::Put),
            slow: 1.0,
            slow_by: Duration::from_secs(1),
            ..FaultyOptions::default()
        };
        let slow = FaultyObjects::new(Arc::new(objects.clone()), options);
        let slow = Volumes::open(Arc::new(slow), environment("host-2"), 1 << 20).await;
        let (slow, quick) = (slow.expect("a store"), volumes(&objects, "host-2").await);
        let (mut taken, mut refused) = (None, None);
        let both: [LocalFuture<'_, ()>; 2] = [
            Box::pin(async {
                taken = Some(slow.open_volume(&web, host(&log, Claimed::TakeOver)).await);
            }),
            Box::pin(async {
                // It claims its number, and has not fenced anybody yet.
                sleep(Duration::from_millis(500)).await;
                let opened = quick.open_volume(&mail, host(&log, Claimed::Refuse)).await;
                refused = Some(opened.map(drop).expect_err("there is no room"));
            }),
        ];
        join_all(both).await;
        assert_eq!(refused.map(|error| error.kind()), Some(ErrorKind::NoSpace));
        let taken = taken.expect("done").expect("it had room");
        assert_eq!(read(&taken, 0, 4096).await, [2; 4096]);
        taken.close().await.expect("closed");
        // What was kept, and what nobody has any more, is free again.
        let mail = quick.open_volume(&mail, host(&log, Claimed::Refuse)).await.expect("open");
        mail.close().await.expect("closed");
    });
}

/// Room that is kept for an opening that then fails is given back.
#[test]
fn room_of_a_log_that_is_not_begun_is_given_back() {
    run(1, async {
        let (objects, web, mail) = (objects(), name("web"), name("mail"));
        let volumes = volumes(&objects, "host").await;
        volumes.create(&web, LEN).await.expect("made");
        volumes.create(&mail, LEN).await.expect("made");
        let len = usize::try_from(LogDevice::LEN_MIN).expect("small");
        let file = Arc::new(MemoryStore::new_writable("log", vec![0; len]));
        let log = LogDevice::open(file, ID).await.expect("a log");
        let options = FaultyOptions {
            only: Some(ObjectOperation::Put),
            refused: 1.0,
            ..FaultyOptions::default()
        };
        let failing = FaultyObjects::new(Arc::new(objects.clone()), options);
        let failing = Volumes::open(Arc::new(failing), environment("host"), 1 << 20).await;
        let failing = failing.expect("a store");
        for _ in 0..3 {
            let failed = failing.open_volume(&web, host(&log, Claimed::Refuse)).await;
            assert_eq!(failed.map(drop).expect_err("no put").kind(), ErrorKind::Io);
        }
        let mail = volumes.open_volume(&mail, host(&log, Claimed::Refuse)).await.expect("open");
        mail.close().await.expect("closed");
    });
}

/// Two processes that find an empty store at one time: one of them makes it, for both.
#[test]
fn store_that_two_make_at_once_is_made_once() {
    for seed in 0..100 {
        run(seed, async {
            let shared: Arc<dyn Objects> = Arc::new(latent());
            let make =
                |host| Volumes::open_or_make(Arc::clone(&shared), environment(host), 1 << 20);
            let made = mica_rt::join_all(vec![make("host-1"), make("host-2")]).await;
            let ids: Vec<_> = made.into_iter().map(|made| made.expect("a store").store).collect();
            assert_eq!(ids[0], ids[1], "seed {seed}");
        });
    }
}

#[test]
fn host_that_cannot_be_handed_to_costs_no_head() {
    run(1, async {
        let objects = objects();
        made(&objects, LEN).await.close().await.expect("closed");
        let volumes = volumes(&objects, "host-1").await;
        let refused = volumes.hand_over(&name("web"), "").await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid);
        let info = volumes.info(&name("web")).await.expect("there");
        assert_eq!(info.open_on, None);
    });
}

/// A head with the last number there is, which nobody puts: an error, and no panic.
#[test]
fn head_after_which_there_is_no_number_is_refused() {
    run(1, async {
        let objects = objects();
        made(&objects, LEN).await.close().await.expect("closed");
        let volumes = volumes(&objects, "host-1").await;
        let heads = volumes.heads(&name("web"));
        let last = heads.newest().await.expect("a head");
        let hostile = crate::format::head::Head { number: u64::MAX, ..last };
        let (object, content) = heads.as_object(&hostile);
        objects.put_if_absent(&object, content).await.0.expect("put");
        let refused = volumes.open_volume(&name("web"), Claimed::TakeOver).await.err();
        assert_eq!(refused.expect("refused").kind(), ErrorKind::Limit);
        let refused = volumes.delete(&name("web"), Claimed::TakeOver).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Limit);
    });
}
