use super::super::url::StoreUrl;
use super::super::{Patience, Stores};
use super::*;
use mica_rt::{Backend, Buf, Executor, now};
use mica_store::Handles;
use mica_store::object::MemoryObjects;
use mica_units::GuestOffset;
use std::time::Duration;

fn stores() -> Stores {
    Stores::new(Handles::new(64), 1 << 20, Patience::Verb)
}

/// Runs `test` on a volume of 1 MiB that was just made in this store, by its URL.
fn with_volume(test: impl AsyncFnOnce(Arc<Store>, VolumeUrl)) {
    let folder = tempfile::tempdir().expect("a folder");
    let run = async {
        let stores = stores();
        let name = VolumeName::new("web").expect("a name");
        let url = StoreUrl::Directory(folder.path().to_owned());
        let store = stores.open_or_make(&url).await.expect("a store");
        store.volumes().create(&name, 1 << 20).await.expect("made");
        test(store, VolumeUrl { store: url, name, snapshot: None }).await;
    };
    Executor::new(Backend::Pool).expect("threads").block_on(run);
}

/// How a server opens it.
fn to_write() -> VolumeOptions {
    VolumeOptions { access: VolumeAccess::Write, ..VolumeOptions::default() }
}

/// The story: two servers found out that the writer of a volume was dead. One served the
/// volume, and the other took it from that one, or deleted it, without force.
#[test]
fn who_has_a_volume_by_now_is_left_alone_though_its_writer_before_is_dead() {
    with_volume(async |store, url| {
        let (name, volumes, stores) = (url.name.clone(), store.volumes(), stores());
        let options = to_write();
        drop(stores.open_volume(&url, &options).await.expect("open"));
        let locked = store.locked(&name, false).await.expect("nobody has it");
        assert_eq!(locked.standing, Standing::Abandoned);
        let fast = volumes.open_volume(&name, locked.claimed()).await.expect("open");
        let opened = open_locked(volumes, &name, &locked, &options, None).await;
        assert_eq!(opened.map(drop).expect_err("it is served").kind(), ErrorKind::Denied);
        let deleted = volumes.delete(&name, locked.claimed()).await;
        assert_eq!(deleted.expect_err("it is served").kind(), ErrorKind::Denied);
        fast.close().await.expect("nobody has fenced it");
    });
}

/// The story: a server that started just when `mica volume gc` had given the lock of a volume
/// back, and had not opened that yet, failed: the volume was open on its own host.
#[test]
fn compactor_that_opens_a_volume_behind_the_back_of_a_server_gives_way() {
    with_volume(async |store, url| {
        let (name, volumes) = (url.name.clone(), store.volumes());
        let options = to_write();
        for is_closed in [true, false] {
            let compactor = store.locked(&name, false).await.expect("nobody has it");
            compactor.sign(None, false).expect("signed");
            let claimed = compactor.claimed();
            drop(compactor);
            let mut locked = store.locked(&name, false).await.expect("nobody has it");
            assert_eq!(locked.standing == Standing::Closed, is_closed);
            let compacting = volumes.open_volume(&name, claimed).await.expect("open");
            let open = store.open_held((volumes, &name), &mut locked, &options, None);
            let served = open.await.expect("the compactor gives way");
            assert!(compacting.close().await.is_err(), "it was fenced");
            // Another server has it: it is not asked for ever.
            let mut late = Locked { writer: None, standing: Standing::Closed, ..locked };
            late.lock = None;
            let open = store.open_held((volumes, &name), &mut late, &options, None);
            assert_eq!(open.await.map(drop).expect_err("open").kind(), ErrorKind::Denied);
            // It is killed.
            drop(served);
        }
    });
}

/// The story: a server hung after it had taken the lock of a volume, another took the volume by
/// force, and the first one went on: it took the other for dead, as the one before was, and
/// fenced it. Its guest got errors.
#[test]
fn who_has_taken_a_volume_by_force_is_left_alone_by_whom_it_was_taken_from() {
    with_volume(async |store, url| {
        let (name, volumes) = (url.name.clone(), store.volumes());
        let others = stores();
        let options = to_write();
        let by_force = VolumeOptions { force: true, ..options.clone() };
        for has_looked in [true, false, true, false] {
            // It hangs before it has put its head, or before it knows who has the volume.
            let (mut locked, lock) = match has_looked {
                true => (store.locked(&name, false).await.ok(), None),
                false => {
                    (None, VolumeLock::take(store.directory().expect("a folder"), &name).await.ok())
                }
            };
            let served = others.open_volume(&url, &by_force).await.expect("by force");
            if let Some(lock) = lock {
                let found = volumes.look(&name).await.expect("it is there");
                locked = Some(store.standing_of(found, Some(lock)).await);
            }
            let mut locked = locked.expect("it had the lock");
            let open = store.open_held((volumes, &name), &mut locked, &options, None);
            let refused = open.await.map(drop).expect_err("it is served");
            assert_eq!(refused.kind(), ErrorKind::Denied);
            served.write(GuestOffset::ZERO, Buf::zeroed(4096)).await.0.expect("written");
            served.flush().await.expect("nobody has fenced it");
            // It is killed.
            drop(served);
        }
    });
}

/// The story: `mica volume snapshot` and `mica volume delete` failed just when `mica volume gc` had
/// given the lock of the volume back, and then opened it: it was open on its own host.
#[test]
fn compactor_that_opens_a_volume_behind_the_back_of_a_verb_gives_way() {
    with_volume(async |store, url| {
        let (name, volumes) = (url.name.clone(), store.volumes());
        let _compactor = store.compactor().await.expect("asked").expect("nobody else is one");
        for is_closed in [true, false] {
            let locked = store.locked(&name, false).await.expect("nobody has it");
            assert_eq!(locked.standing == Standing::Closed, is_closed);
            let compacting = volumes.open_volume(&name, Claimed::AsOf(locked.head)).await;
            let held = store.settle_locked(&name, locked).await.expect("the compactor gives way");
            volumes.take_snapshot(&name, "").await.expect("nobody has it");
            assert!(compacting.expect("open").close().await.is_err(), "it was fenced");
            drop(held);
            // A server is killed.
            drop(volumes.open_volume(&name, Claimed::Refuse).await.expect("open"));
        }
        for is_closed in [false, true] {
            let mut locked = store.locked(&name, false).await.expect("nobody has it");
            assert_eq!(locked.standing == Standing::Closed, is_closed);
            let compacting = volumes.open_volume(&name, Claimed::AsOf(locked.head)).await;
            let deleted = store.delete_held(&name, &mut locked, false).await;
            deleted.expect("the compactor gives way");
            assert!(compacting.expect("open").close().await.is_err(), "it was fenced");
            volumes.create(&name, 1 << 20).await.expect("made");
        }
    });
}

/// The story: as above, but the compactor opened the volume only once the verb had looked who had
/// it. A stream that was received had been read by then.
#[test]
fn compactor_opens_no_volume_that_a_verb_has_taken_since() {
    with_volume(async |store, url| {
        let (name, volumes) = (url.name.clone(), store.volumes());
        let compactor = store.compactor().await.expect("asked").expect("nobody else is one");
        for is_closed in [true, false] {
            let seen = compactor.look(&name).await.expect("nobody has it");
            assert_eq!(seen.standing == Standing::Closed, is_closed);
            let held = store.settle(&name).await.expect("nobody has it");
            let late = volumes.open_volume(&name, Claimed::AsOf(seen.head)).await;
            assert_eq!(late.map(drop).expect_err("a verb has it").kind(), ErrorKind::Denied);
            volumes.take_snapshot(&name, "").await.expect("nobody has it");
            drop(held);
            // A server is killed.
            drop(volumes.open_volume(&name, Claimed::Refuse).await.expect("open"));
        }
        // While none lives, a verb puts no head for it.
        drop(compactor);
        volumes.delete(&name, Claimed::TakeOver).await.expect("deleted");
        volumes.create(&name, 1 << 20).await.expect("made");
        let before = volumes.info(&name).await.expect("known").head;
        drop(store.settle(&name).await.expect("nobody has it"));
        assert_eq!(volumes.info(&name).await.expect("known").head, before);
    });
}

/// The story: a volume was handed over to a host on which `mica volume gc` ran before the server
/// that was to have it. The collection opened and closed it, and then any host could open it.
#[test]
fn volume_that_was_handed_to_this_host_is_compacted_and_changed_only_after_it_was_opened() {
    with_volume(async |store, url| {
        let (name, volumes) = (url.name.clone(), store.volumes());
        volumes.hand_over(&name, &host()).await.expect("handed over");
        let before = volumes.info(&name).await.expect("known");
        assert!(!store.is_left_to_compactors(&before).await);
        let compactor = store.compactor().await.expect("asked").expect("nobody else is one");
        let sparse = mica_volume::Sparse {
            name: name.clone(),
            extents: Vec::new(),
            bytes: 0,
            live_bytes: 0,
        };
        let never = mica_rt::sync::Signal::default();
        let compact = async || compactor.compact(&sparse, None, &never).await;
        assert_eq!(compact().await.expect_err("its heir's").kind(), ErrorKind::Denied);
        // A verb that finds a collection at work puts no head first.
        let held = store.settle(&name).await.expect("nobody has it open");
        assert_eq!(
            volumes.take_snapshot(&name, "").await.expect_err("its heir's").kind(),
            ErrorKind::Denied
        );
        drop(held);
        let refused = store.delete(&name, false).await.expect_err("its heir's");
        assert!(refused.in_one_line().contains("handed over to"), "{refused:?}");
        assert_eq!(volumes.info(&name).await.expect("known"), before);
        let served = stores().open_volume(&url, &to_write()).await.expect("its own");
        served.close().await.expect("closed");
        drop(served);
        compact().await.expect("nobody has it");
        drop(store.settle(&name).await.expect("nobody has it"));
    });
}

/// The story: a volume in a bucket was looked at once its store had been probed, and then again by
/// the opening, one answer after the other.
#[test]
fn far_volume_is_looked_at_once_and_its_store_probed_once() {
    const LATENCY: Duration = Duration::from_millis(30);
    Executor::new(Backend::Sim { seed: 1 }).expect("the simulator").block_on(async {
        let memory = MemoryObjects::new("memory");
        let near = Store::of_bucket(Arc::new(memory.clone())).await.expect("made");
        let name = VolumeName::new("web").expect("a name");
        near.volumes().create(&name, 1 << 20).await.expect("made");
        let far = memory.with_exact_latency(LATENCY);
        let store = Store::of_bucket(Arc::new(far)).await.expect("it is there");
        // The looks at the volume, the probe, and an opening without the former.
        for trips in [2 + 8 + 6, 2 + 7] {
            let begun = now();
            let mut locked = store.locked(&name, false).await.expect("nobody has it");
            let options = to_write();
            let open = store.open_held((store.volumes(), &name), &mut locked, &options, None);
            let volume = open.await.expect("opened");
            assert_eq!(now().saturating_since(begun), LATENCY * trips);
            volume.close().await.expect("closed");
        }
    });
}
