//! What becomes of the client of a writer that is fenced.

use super::Claimed;
use crate::collect::CollectOptions;
use crate::format::head::Head;
use crate::testing::{memory, name, read, run, volumes, write};
use crate::volumes::Volumes;
use mica_block::{
    Disk, Entry, Error, ErrorKind, LocalFuture, Manage, Object, ObjectName, Objects, PutFuture,
    Result,
};
use mica_rt::{Buf, join_all, sleep};
use mica_store::object::{FaultyObjects, FaultyOptions, MemoryObjects, ObjectOperation};
use parking_lot::Mutex;
use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// A store that knows its clients, as one of them sees it.
#[derive(Clone)]
struct Clients {
    inner: MemoryObjects,
    client: &'static str,
    /// Whether it lets clients shut others out.
    is_allowed: bool,
    shut_out: Arc<Mutex<Vec<String>>>,
}

impl Objects for Clients {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn is_far(&self) -> bool {
        self.inner.is_far()
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        self.inner.open(name)
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        self.inner.put_if_absent(name, content)
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        self.inner.list(folder, after)
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        self.inner.delete(name)
    }

    fn client(&self) -> Option<String> {
        Some(self.client.to_owned())
    }

    fn shut_out(&self, client: &str) -> LocalFuture<'static, Result<()>> {
        self.shut_out.lock().push(client.to_owned());
        let denied = || Error::new(ErrorKind::Denied, "the key does not allow it");
        Box::pin(ready(if self.is_allowed { Ok(()) } else { Err(denied()) }))
    }
}

async fn of(store: &Clients, client: &'static str) -> Volumes {
    let objects: Arc<dyn Objects> = Arc::new(Clients { client, ..store.clone() });
    volumes(&objects, client).await
}

#[test]
fn client_of_a_writer_is_shut_out_only_by_those_who_take_its_volume_over() {
    for is_allowed in [true, false] {
        run(u64::from(is_allowed), async {
            let store =
                Clients { inner: memory(), client: "", is_allowed, shut_out: Arc::default() };
            let said = || store.shut_out.lock().clone();
            let (one, two) = (of(&store, "one").await, of(&store, "two").await);
            let web = name("web");
            one.create(&web, 1 << 20).await.expect("made");
            let old = one.open_volume(&web, Claimed::Refuse).await.expect("open");
            write(&old, 0, &[1; 4096]).await;
            let refused = two.open_volume(&web, Claimed::Refuse).await.map(drop);
            assert_eq!(refused.expect_err("it is open").kind(), ErrorKind::Denied);
            assert_eq!(said(), [""; 0], "nobody takes it over");
            let new = two.open_volume(&web, Claimed::TakeOver).await.expect("fenced all the same");
            assert_eq!(said(), ["one"]);
            write(&new, 0, &[2; 4096]).await;
            assert_eq!(read(&new, 0, 4096).await, [2; 4096]);
            new.close().await.expect("closed");
            // One that is closed is nobody's; and who was killed here does not shut itself out.
            drop(one.open_volume(&web, Claimed::TakeOver).await.expect("open"));
            let again = one.open_volume(&web, Claimed::TakeOver).await.expect("open");
            assert_eq!(said(), ["one"]);
            drop(again);
            two.delete(&web, Claimed::TakeOver).await.expect("deleted");
            assert_eq!(said(), ["one", "one"]);
        });
    }
}

/// The story: a head of one volume was copied among those of another. The disk was that of the
/// other one from then on, nothing was wrong with it, and a collector deleted what was its own.
#[test]
fn head_of_another_volume_is_refused_by_all_who_read_it() {
    for is_old in [false, true] {
        run(u64::from(is_old), async {
            let objects: Arc<dyn Objects> = Arc::new(memory());
            let volumes = volumes(&objects, "host").await;
            for (text, byte) in [("web", 1), ("mail", 2)] {
                volumes.create(&name(text), 1 << 20).await.expect("made");
                let volume = volumes.open_volume(&name(text), Claimed::Refuse).await.expect("open");
                write(&volume, 0, &[byte; 4096]).await;
                volume.close().await.expect("closed");
            }
            let (web, mail) = (volumes.heads(&name("web")), volumes.heads(&name("mail")));
            let own = web.newest().await.expect("a head");
            let mut strange = mail.newest().await.expect("a head");
            assert_eq!(own.number, strange.number);
            if is_old {
                strange.name_sum = None;
            }
            let place = name("web").head(own.number);
            objects.delete(&place).await.expect("deleted");
            let content = Buf::from_slice(&strange.encode());
            objects.put_if_absent(&place, content).await.0.expect("put");
            let is_refused = |error: Error| {
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
                assert!(error.to_string().contains(place.as_str()), "{error}");
            };
            let opened = volumes.open_volume(&name("web"), Claimed::TakeOver).await;
            is_refused(opened.map(drop).expect_err("it is another's"));
            is_refused(volumes.open_readable(&name("web")).await.map(drop).expect_err("as well"));
            let plan = volumes.collect(CollectOptions::default(), &mut |_| ()).await;
            is_refused(plan.map(drop).expect_err("nothing is collected"));
            volumes.open_readable(&name("mail")).await.map(drop).expect("it is its own");
            // What older versions put is opened, as long as nothing contradicts it.
            let old = Head { name_sum: None, ..own };
            objects.delete(&place).await.expect("deleted");
            let content = Buf::from_slice(&old.encode());
            objects.put_if_absent(&place, content).await.0.expect("put");
            let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
            assert_eq!(read(&volume, 0, 4096).await, [1; 4096]);
            volume.close().await.expect("closed");
            assert!(web.newest().await.expect("a head").name_sum.is_some());
        });
    }
}

/// The story: an import into a bucket was killed, and what it had copied was exported as the image.
#[test]
fn part_of_what_a_volume_is_to_have_is_only_deleted() {
    run(1, async {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let (one, two) = (volumes(&objects, "one").await, volumes(&objects, "two").await);
        let web = name("web");
        let is_part = |error: Error| {
            assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
            assert!(error.to_string().contains("is incomplete"), "{error}");
        };
        for is_killed in [true, false] {
            let made = one.create_unfinished(&web, 1 << 20, Default::default()).await;
            let made = Claimed::JustMade(made.expect("made"));
            let volume = one.open_volume(&web, made).await.expect("open");
            write(&volume, 0, &[1; 4096]).await;
            volume.flush().await.expect("it is in the store");
            let info = two.info(&web).await.expect("there");
            assert_eq!((info.open_on.as_deref(), info.is_ready), (Some("one"), false));
            is_part(two.open_readable(&web).await.map(drop).expect_err("a part"));
            is_part(two.clone_volume(&web, None, &name("copy")).await.expect_err("a part"));
            for claimed in [Claimed::Refuse, Claimed::TakeOver] {
                is_part(two.open_volume(&web, claimed).await.map(drop).expect_err("a part"));
            }
            is_part(two.delete(&web, Claimed::Refuse).await.expect_err("it may go on"));
            if is_killed {
                drop(volume);
                two.delete(&web, Claimed::TakeOver).await.expect("deleted");
            } else {
                volume.close().await.expect("closed");
                assert!(two.info(&web).await.expect("there").is_ready);
                let volume = two.open_volume(&web, Claimed::Refuse).await.expect("all of it");
                assert_eq!(read(&volume, 0, 4096).await, [1; 4096]);
                volume.close().await.expect("closed");
            }
        }
    });
}

#[test]
fn only_what_its_own_writer_has_not_closed_of_a_new_volume_is_taken_back() {
    run(1, async {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let (one, web) = (volumes(&objects, "one").await, name("web"));
        let heads = one.heads(&web);
        let made = one.make_unfinished(&web, 1 << 20, Default::default()).await.expect("made");
        let first = one.open_volume(&web, Claimed::JustMade(made.volume)).await.expect("open");
        let writer = first.writer().expect("it writes");
        // The answer to its last head was lost.
        first.close().await.expect("closed");
        heads.delete_unclosed(made.volume, writer).await.expect("left");
        let again = one.open_volume(&web, Claimed::Refuse).await.expect("it is whole");
        heads.delete_unclosed(made.volume, writer).await.expect("left");
        write(&again, 0, &[1; 4096]).await;
        again.flush().await.expect("nobody has fenced it");
        heads.delete_unclosed([9; 16], again.writer().expect("it writes")).await.expect("left");
        assert!(one.info(&web).await.is_ok());
        heads
            .delete_unclosed(made.volume, again.writer().expect("it writes"))
            .await
            .expect("deleted");
        assert_eq!(one.info(&web).await.expect_err("none").kind(), ErrorKind::NotFound);
        assert_eq!(again.close().await.expect_err("it is fenced").kind(), ErrorKind::Denied);
    });
}

/// The story: somebody deleted a volume whose import was under way, and made another of its name.
/// That one was deleted when the import failed.
#[test]
fn only_a_part_is_unmade_and_never_another_of_its_name() {
    run(1, async {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let (one, two) = (volumes(&objects, "one").await, volumes(&objects, "two").await);
        let web = name("web");
        let begin = || one.create_unfinished(&web, 1 << 20, Default::default());
        let made = begin().await.expect("made");
        let volume = one.open_volume(&web, Claimed::JustMade(made)).await.expect("open");
        write(&volume, 0, &[1; 4096]).await;
        assert!(!one.delete_unfinished(&web, made).await.expect("deleted"));
        assert_eq!(one.info(&web).await.expect_err("none").kind(), ErrorKind::NotFound);
        assert_eq!(volume.close().await.expect_err("it is fenced").kind(), ErrorKind::Denied);
        assert!(!one.delete_unfinished(&web, made).await.expect("there is none"));

        let made = begin().await.expect("made");
        two.delete(&web, Claimed::TakeOver).await.expect("deleted");
        two.create(&web, 1 << 20).await.expect("made");
        let another = one.open_volume(&web, Claimed::JustMade(made)).await.map(drop);
        assert_eq!(another.expect_err("it is another's").kind(), ErrorKind::Denied);
        assert!(!one.delete_unfinished(&web, made).await.expect("left"));
        two.delete(&web, Claimed::Refuse).await.expect("it is there");

        let made = begin().await.expect("made");
        let volume = one.open_volume(&web, Claimed::JustMade(made)).await.expect("open");
        volume.close().await.expect("closed");
        assert!(one.delete_unfinished(&web, made).await.expect("left"));
        assert!(one.info(&web).await.expect("it is whole").is_ready);
    });
}

/// The story: an import stalled when it had made its volume, which somebody deleted by force and
/// imported again. The first then went on in the second one's volume: its writer was fenced, and
/// what both had copied was closed as an image.
#[test]
fn who_made_a_volume_leaves_another_of_its_name_alone_that_is_unfinished() {
    run(1, async {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let (one, two) = (volumes(&objects, "one").await, volumes(&objects, "two").await);
        let web = name("web");
        let first = one.create_unfinished(&web, 1 << 20, Default::default()).await.expect("made");
        two.delete(&web, Claimed::TakeOver).await.expect("deleted");
        let second = two.create_unfinished(&web, 1 << 20, Default::default()).await.expect("made");
        let refused = one.open_volume(&web, Claimed::JustMade(first)).await.map(drop);
        assert_eq!(refused.expect_err("it is another's").kind(), ErrorKind::Denied);
        let volume = two.open_volume(&web, Claimed::JustMade(second)).await.expect("open");
        write(&volume, 0, &[2; 4096]).await;
        let refused = one.open_volume(&web, Claimed::JustMade(first)).await.map(drop);
        assert_eq!(refused.expect_err("it is another's").kind(), ErrorKind::Denied);
        volume.close().await.expect("nobody has fenced its writer");
    });
}

/// The story: two servers found out that the writer of a volume was dead. One served the volume,
/// and the other fenced it, or deleted what it served: whoever had it was dead, so it thought.
#[test]
fn who_knows_that_one_writer_is_dead_leaves_another_alone() {
    run(1, async {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let (one, two) = (volumes(&objects, "one").await, volumes(&objects, "two").await);
        let web = name("web");
        one.create(&web, 1 << 20).await.expect("made");
        let killed = one.open_volume(&web, Claimed::Refuse).await.expect("open");
        write(&killed, 0, &[1; 4096]).await;
        killed.flush().await.expect("it is in the store");
        let dead = Claimed::TakeOverOf(killed.writer().expect("it writes"));
        drop(killed);
        let options = FaultyOptions {
            only: Some(ObjectOperation::Put),
            slow: 1.0,
            slow_by: Duration::from_secs(10),
            ..FaultyOptions::default()
        };
        let slow: Arc<dyn Objects> = Arc::new(FaultyObjects::new(Arc::clone(&objects), options));
        let three = volumes(&slow, "three").await;
        // The slow ones have read the head of the dead one, and the other is faster.
        let (mut opened, mut deleted, mut served) = (None, None, None);
        let futures: [Pin<Box<dyn Future<Output = ()> + '_>>; 3] = [
            Box::pin(async { opened = Some(three.open_volume(&web, dead).await.map(drop)) }),
            Box::pin(async { deleted = Some(three.delete(&web, dead).await) }),
            Box::pin(async {
                sleep(Duration::from_secs(1)).await;
                served = Some(two.open_volume(&web, dead).await.expect("its writer is dead"));
            }),
        ];
        join_all(futures).await;
        let is_left = |outcome: Result<()>| {
            assert_eq!(outcome.expect_err("it is served").kind(), ErrorKind::Denied);
        };
        is_left(opened.expect("done"));
        is_left(deleted.expect("done"));
        is_left(three.open_volume(&web, dead).await.map(drop));
        is_left(three.delete(&web, dead).await);
        let served = served.expect("open");
        assert_eq!(read(&served, 0, 4096).await, [1; 4096]);
        write(&served, 0, &[2; 4096]).await;
        served.close().await.expect("nobody has fenced it");
        three.delete(&web, dead).await.expect("nobody has it");
    });
}
