use super::*;
use crate::testing::{environment_at, key, kind, memory, name, run, write};
use crate::volume::Volume;
use mica_block::{ErrorKind, ManageSnapshots, Objects, Which};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const SECOND: u64 = 1_000_000_000;

/// A store, and the clock of its host.
struct World {
    objects: Arc<dyn Objects>,
    volumes: Volumes,
    now_ns: Arc<AtomicU64>,
}

impl World {
    async fn new() -> Self {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let now_ns = Arc::new(AtomicU64::new(1_700_000_000 * SECOND));
        let clock = Arc::clone(&now_ns);
        let environment = environment_at("host", move || clock.load(Ordering::Relaxed));
        let volumes = Volumes::open_or_make(Arc::clone(&objects), environment, 1 << 20).await;
        let world = Self { objects, volumes: volumes.expect("a store"), now_ns };
        world.volumes.create(&name("web"), 1 << 20).await.expect("made");
        world
    }

    fn wait(&self, seconds: u64) {
        self.now_ns.fetch_add(seconds * SECOND, Ordering::Relaxed);
    }

    async fn open(&self) -> Volume {
        self.volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open")
    }

    async fn listed(&self) -> Vec<u64> {
        let all = self.volumes.snapshots(&name("web")).await.expect("listed");
        all.into_iter().map(|snapshot| snapshot.number).collect()
    }

    async fn heads(&self) -> usize {
        let folder = name("web").folder();
        self.objects.list(Some(&folder), None).await.expect("listed").len()
    }
}

fn rules(text: &str) -> Keep {
    text.parse().expect("rules")
}

fn numbers(dropped: &[SnapshotInfo]) -> Vec<u64> {
    dropped.iter().map(|snapshot| snapshot.number).collect()
}

/// One snapshot each ten seconds, of which the fourth gets a label.
async fn take_six(world: &World, volume: &Volume) {
    for number in 1..=6 {
        write(volume, number * 4096, &[3; 4096]).await;
        volume.take("").await.expect("taken");
        world.wait(10);
    }
    ManageSnapshots::label(volume, &Which::Number(4), "mine").await.expect("labelled");
}

#[test]
fn volume_that_is_closed_keeps_what_its_rules_say() {
    run(1, async {
        let world = World::new().await;
        let volume = world.open().await;
        take_six(&world, &volume).await;
        let (web, keep) = (name("web"), rules("25s/10s"));
        // It is open: nothing is changed, but what would be is said.
        let error = world.volumes.keep_snapshots(&web, &keep).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied);
        let expired = world.volumes.expired_snapshots(&web, &keep).await.expect("read");
        assert_eq!(numbers(&expired), [1, 2, 3]);
        volume.close().await.expect("closed");
        let heads = world.heads().await;
        let dropped = world.volumes.keep_snapshots(&web, &keep).await.expect("dropped");
        assert_eq!(numbers(&dropped), [1, 2, 3]);
        assert_eq!(world.listed().await, [4, 5, 6]);
        assert!(world.heads().await > heads);
        // Nothing more is to be dropped: that costs no head.
        let heads = world.heads().await;
        assert_eq!(world.volumes.keep_snapshots(&web, &keep).await.expect("done"), []);
        assert_eq!(world.heads().await, heads);
        // However long nobody looks, the newest and the one with a label stay.
        world.wait(1_000_000);
        let dropped = world.volumes.keep_snapshots(&web, &keep).await.expect("dropped");
        assert_eq!(numbers(&dropped), [5]);
        assert_eq!(world.listed().await, [4, 6]);
        let error = world.volumes.keep_snapshots(&name("other"), &keep).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    });
}

#[test]
fn volume_that_is_served_keeps_what_its_rules_say() {
    run(2, async {
        let world = World::new().await;
        let volume = world.open().await;
        take_six(&world, &volume).await;
        let keep = rules("25s/10s,1h/1m");
        let now = volume.list().await.expect("listed");
        assert_eq!(now.len(), 6, "some are in no extent yet: {now:?}");
        let dropped = volume.keep_snapshots(&keep).await.expect("dropped");
        // The first one is that of its minute.
        assert!(!numbers(&dropped).contains(&4), "it has a label");
        let left: Vec<_> = volume.list().await.expect("listed").iter().map(|s| s.number).collect();
        assert_eq!(left.len() + dropped.len(), 6);
        assert!(left.contains(&4) && left.contains(&6), "{left:?}");
        assert_eq!(volume.keep_snapshots(&keep).await.expect("done"), []);
        volume.close().await.expect("closed");
        assert_eq!(world.listed().await, left);
        // A volume that is only read drops nothing.
        let readable = world.volumes.open_readable(&name("web")).await.expect("open");
        world.wait(1_000_000);
        readable.keep_snapshots(&keep).await.expect_err("it is only read");
        assert_eq!(world.listed().await, left);
    });
}

/// The story: rules failed on an encrypted volume, and the error named an option that the verb does
/// not have.
#[test]
fn rules_for_an_encrypted_volume_need_no_key() {
    run(1, async {
        let world = World::new().await;
        let (mail, with_key) = (name("mail"), world.volumes.with_key(Some(key())));
        with_key.create_as(&mail, 1 << 20, kind(2)).await.expect("made");
        let volume = with_key.open_volume(&mail, Claimed::Refuse).await.expect("open");
        take_six(&world, &volume).await;
        volume.close().await.expect("closed");
        let dropped = world.volumes.keep_snapshots(&mail, &rules("25s/10s")).await;
        assert_eq!(numbers(&dropped.expect("no key is needed")), [1, 2, 3]);
    });
}
