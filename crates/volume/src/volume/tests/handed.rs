//! What is done with a volume that was handed over, before its heir opens it.

use super::*;
use crate::collect::CollectOptions;
use crate::keep::Keep;
use crate::stream::ReceiveOptions;
use mica_block::Which;
use std::str::FromStr;

fn label(text: &str) -> Which {
    Which::Label(text.to_owned())
}

/// Writes a block of `byte`, and takes a snapshot of it.
async fn step(volumes: &Volumes, byte: u8, text: &str) {
    let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
    write(&volume, 0, &[byte; 4096]).await.expect("written");
    volume.snapshots().expect("has them").take(text).await.expect("taken");
    volume.close().await.expect("closed");
}

async fn sent(volumes: &Volumes, since: Option<&str>, which: &str) -> Vec<u8> {
    let (web, which, since) = (name("web"), label(which), since.map(label));
    let mut stream = Vec::new();
    let out = |bytes: &[u8]| {
        stream.extend_from_slice(bytes);
        Ok(())
    };
    let sent = volumes.send(&web, &which, (since.as_ref(), false), out, |_| {});
    sent.await.expect("sent");
    stream
}

/// The volume "web" with snapshots "old" and "", handed over to host-2; and a stream of what
/// another store has since "old".
async fn handed(objects: &MemoryObjects) -> Vec<u8> {
    let elsewhere = self::volumes(&self::objects(), "host-1").await;
    elsewhere.create(&name("web"), LEN).await.expect("made");
    step(&elsewhere, 1, "old").await;
    let whole = sent(&elsewhere, None, "old").await;
    step(&elsewhere, 2, "new").await;
    let since = sent(&elsewhere, Some("old"), "new").await;
    let volumes = volumes(objects, "host-1").await;
    let options = ReceiveOptions::default();
    let received = volumes.receive(&name("web"), options, &mut &*whole, |_| ()).await;
    received.expect("received");
    volumes.take_snapshot(&name("web"), "").await.expect("taken");
    volumes.hand_over(&name("web"), "host-2").await.expect("handed over");
    since
}

/// The story: a snapshot that was taken on the heir's host of a volume that had just been handed
/// over ended the hand-over, so that the host which had it before could open it again.
#[test]
fn volume_that_was_handed_over_is_changed_by_nobody_before_its_heir_opens_it() {
    run(1, async {
        let objects = objects();
        let since = handed(&objects).await;
        let (web, old) = (name("web"), label("old"));
        let none = Keep::from_str("1s/1s").expect("rules");
        let before = volumes(&objects, "host-1").await.info(&web).await.expect("known");
        for host in ["host-1", "host-2"] {
            let volumes = volumes(&objects, host).await;
            let options = ReceiveOptions { force: true, ..ReceiveOptions::default() };
            let refusals = [
                volumes.take_snapshot(&web, "").await.map(drop),
                volumes.drop_snapshot(&web, &old).await,
                volumes.label_snapshot(&web, &old, "older").await,
                volumes.rollback(&web, &old).await,
                volumes.keep_snapshots(&web, &none).await.map(drop),
                volumes.receive(&web, options, &mut &*since, |_| ()).await,
                volumes.delete(&web, Claimed::Refuse).await,
                volumes.open_volume(&web, Claimed::OnlyIfClosed).await.map(drop),
                volumes.open_volume(&web, Claimed::AsOf(before.head)).await.map(drop),
            ];
            for (at, refused) in refusals.into_iter().enumerate() {
                let refused = refused.expect_err("it is for its heir");
                assert_eq!(refused.kind(), ErrorKind::Denied, "{at} on {host}");
                let said = refused.in_one_line();
                assert!(said.contains("handed over to host-2"), "{at} on {host}: {said}");
                assert!(said.contains("--force"), "{at} on {host}: {said}");
            }
            // What reads it, and what makes others of it, changes nothing.
            volumes.clone_volume(&web, None, &name(host)).await.expect("cloned");
            volumes.open_readable(&web).await.expect("read");
        }
        assert_eq!(volumes(&objects, "host-1").await.info(&web).await.expect("known"), before);
        let heir = volumes(&objects, "host-2").await;
        let volume = heir.open_volume(&web, Claimed::Refuse).await.expect("its own");
        volume.close().await.expect("closed");
        heir.take_snapshot(&web, "").await.expect("nobody has it");
        heir.delete(&web, Claimed::Refuse).await.expect("nobody has it");
    });
}

/// A typo in the name of the heir is set right there, or by force.
#[test]
fn heir_hands_on_what_it_has_not_opened() {
    run(1, async {
        let objects = objects();
        handed(&objects).await;
        let [first, heir] = ["host-1", "host-2"].map(|host| volumes(&objects, host));
        let (first, heir) = (first.await, heir.await);
        let refused = first.hand_over(&name("web"), "host-3").await.unwrap_err();
        assert!(refused.in_one_line().contains("handed over to host-2"), "{refused:?}");
        heir.hand_over(&name("web"), "host-3").await.expect("its own");
        let info = first.info(&name("web")).await.expect("known");
        assert_eq!(info.heir.as_deref(), Some("host-3"));
        first.delete(&name("web"), Claimed::TakeOver).await.expect("by force");
    });
}

/// The story: an heir was mistyped, and the volume could only be opened by force, which gives up
/// what is not in the store.
#[test]
fn host_that_handed_a_volume_over_takes_it_back_until_its_heir_opens_it() {
    run(1, async {
        let objects = objects();
        handed(&objects).await;
        let web = name("web");
        let [first, heir] = ["host-1", "host-2"].map(|host| volumes(&objects, host));
        let (first, heir) = (first.await, heir.await);
        let before = first.info(&web).await.expect("known");
        let refused = heir.take_back(&web).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Denied);
        assert!(refused.in_one_line().contains("by host-1"), "{refused:?}");
        first.take_back(&web).await.expect("its own");
        let after = first.info(&web).await.expect("known");
        assert_eq!((after.heir, after.state, after.volume), (None, before.state, before.volume));
        assert_eq!(first.take_back(&web).await.unwrap_err().kind(), ErrorKind::Invalid);
        let volume = first.open_volume(&web, Claimed::Refuse).await.expect("without force");
        assert_eq!(read(&volume, 0, 4096).await, [1; 4096]);
        volume.close().await.expect("closed");
        first.hand_over(&web, "host-2").await.expect("handed over");
        let volume = heir.open_volume(&web, Claimed::Refuse).await.expect("its own");
        let refused = first.take_back(&web).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Denied);
        assert!(refused.in_one_line().contains("open on host-2"), "{refused:?}");
        write(&volume, 0, &[9; 4096]).await.expect("nothing was done to it");
        volume.close().await.expect("closed");
    });
}

/// Whatever the order of their requests, one of them is first: either its heir has the volume, and
/// it is not taken back; or it was taken back, and whoever opens it then has it.
#[test]
fn volume_that_is_taken_back_while_its_heir_opens_it_has_one_owner() {
    let mut taken_back = 0;
    for seed in 0..40 {
        run(seed, async {
            let objects = objects();
            volumes(&objects, "host-1").await.create(&name("web"), LEN).await.expect("made");
            let first = volumes(&objects, "host-1").await;
            first.hand_over(&name("web"), "host-2").await.expect("handed over");
            let options = FaultyOptions {
                seed,
                slow: 0.5,
                slow_by: Duration::from_millis(7),
                latency: Duration::from_millis(1),
                ..FaultyOptions::default()
            };
            let slow = FaultyObjects::new(Arc::new(objects.clone()), options);
            let slow: Arc<dyn Objects> = Arc::new(slow);
            let [one, two] = ["host-1", "host-2"]
                .map(|host| Volumes::open(Arc::clone(&slow), environment(host), 1 << 20));
            let (one, two) = (one.await.expect("a store"), two.await.expect("a store"));
            let (mut back, mut opened) = (None, None);
            let web = name("web");
            let both: [mica_block::LocalFuture<'_, ()>; 2] = [
                Box::pin(async {
                    mica_rt::sleep(Duration::from_millis(seed % 14)).await;
                    back = Some(one.take_back(&web).await);
                }),
                Box::pin(async { opened = Some(two.open_volume(&web, Claimed::Refuse).await) }),
            ];
            join_all(both).await;
            let volume = opened.expect("done").expect("nobody else opens it");
            write(&volume, 0, &[1; 4096]).await.expect("written");
            volume.flush().await.expect("it is not fenced");
            let info = first.info(&web).await.expect("known");
            assert_eq!(info.open_on.as_deref(), Some("host-2"), "seed {seed}");
            match back.expect("done") {
                Ok(()) => taken_back += 1,
                Err(error) => assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}"),
            }
        });
    }
    assert!((1..40).contains(&taken_back), "both orders happen: {taken_back}");
}

/// Nothing that it needs is swept, and it is its heir's afterwards as before.
#[test]
fn collection_keeps_what_a_volume_needs_that_was_handed_over_and_its_head() {
    run(1, async {
        let objects = objects();
        handed(&objects).await;
        let heir = volumes(&objects, "host-2").await;
        let before = heir.info(&name("web")).await.expect("known");
        let collected = heir.collect(CollectOptions::default(), &mut |_| ()).await;
        let collected = collected.expect("collected");
        assert_eq!((collected.volumes, collected.snapshots), (1, 2));
        assert!(collected.freed_heads > 0, "{collected:?}");
        assert_eq!(heir.info(&name("web")).await.expect("known"), before);
        for which in [None, Some(label("old"))] {
            let opened = match &which {
                None => heir.open_readable(&name("web")).await,
                Some(which) => heir.open_snapshot(&name("web"), which).await,
            };
            assert_eq!(read(&opened.expect("open"), 0, 4096).await, [1; 4096]);
        }
    });
}
