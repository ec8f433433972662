//! Streams between stores of the simulator, against copies of whole disks.

use super::format::{BEGIN_BYTES, Begin, PART_BYTES, Part};
use super::*;
use crate::format::frame::Malformed;
use crate::format::snapshot::Origin;
use crate::heads::Claimed;
use crate::names::VolumeName;
use crate::properties::NewVolume;
use crate::state::Root;
use crate::testing::{bytes, environment, kind, memory, name, range, read, run, volumes, write};
use crate::volumes::Volumes;
use mica_block::{
    Disk as _, Entry, Error, ErrorKind, LocalFuture, Manage as _, Object, ObjectName, Objects,
    PutFuture, Result, Which, Zeroes,
};
use mica_rt::Buf;
use mica_rt::{join_two, sleep};
use mica_store::object::{FaultyObjects, FaultyOptions, ObjectOperation, Throttle};
use mica_units::{Rng, SECTOR_BYTES};
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = 4096;
/// The last block is cut.
const LEN: u64 = 40 * BLOCK + SECTOR_BYTES;

async fn store() -> Volumes {
    let objects: Arc<dyn Objects> = Arc::new(memory());
    volumes(&objects, "host").await
}

fn label(text: &str) -> Which {
    Which::Label(text.to_owned())
}

/// Writes, clears and sometimes makes longer what `name` has.
async fn change(volumes: &Volumes, name: &VolumeName, rng: &mut Rng) {
    let volume = volumes.open_volume(name, Claimed::Refuse).await.expect("open");
    for _ in 0..rng.below(12) {
        let blocks = volume.geometry().len / BLOCK;
        let first = rng.below(blocks);
        let count = 1 + rng.below(4.min(blocks - first));
        if rng.below(3) == 0 {
            let how = Zeroes { may_unmap: true, fast: false };
            let cleared = range(first * BLOCK, count * BLOCK);
            volume.write_zeroes(cleared, how).await.expect("cleared");
        } else {
            let byte = u8::try_from(1 + rng.below(255)).expect("a byte");
            let sectors = 1 + rng.below(count * BLOCK / SECTOR_BYTES);
            write(&volume, first * BLOCK, &vec![byte; bytes(sectors * SECTOR_BYTES)]).await;
        }
    }
    if rng.below(4) == 0 {
        let longer = volume.geometry().len + (1 + rng.below(20)) * SECTOR_BYTES;
        volume.resize(longer).await.expect("longer");
    }
    volume.close().await.expect("closed");
}

async fn content(volumes: &Volumes, name: &VolumeName, which: Option<&Which>) -> Vec<u8> {
    let opened = match which {
        Some(which) => volumes.open_snapshot(name, which).await,
        None => volumes.open_readable(name).await,
    };
    let volume = opened.expect("open");
    read(&volume, 0, volume.geometry().len).await
}

async fn sent(
    volumes: &Volumes,
    name: &VolumeName,
    which: &str,
    since: Option<&str>,
    is_each: bool,
) -> Vec<u8> {
    let mut stream = Vec::new();
    let since = since.map(label);
    let out = |bytes: &[u8]| {
        stream.extend_from_slice(bytes);
        Ok(())
    };
    let sent = volumes.send(name, &label(which), (since.as_ref(), is_each), out, |_| {}).await;
    sent.expect("sent");
    stream
}

async fn received(
    volumes: &Volumes,
    name: &VolumeName,
    mut stream: &[u8],
    force: bool,
) -> Result<Vec<Received>> {
    let mut all = Vec::new();
    let options = ReceiveOptions { force, ..ReceiveOptions::default() };
    volumes.receive(name, options, &mut stream, |step| all.push(step.clone())).await?;
    Ok(all)
}

/// A volume with snapshots "s0" to "s4" and changes between, and what each has.
async fn history(volumes: &Volumes, name: &VolumeName, rng: &mut Rng) -> Vec<Vec<u8>> {
    volumes.create_as(name, LEN, kind(rng.below(4))).await.expect("made");
    let mut contents = Vec::new();
    for index in 0..5 {
        change(volumes, name, rng).await;
        volumes.take_snapshot(name, &format!("s{index}")).await.expect("taken");
        contents.push(content(volumes, name, None).await);
    }
    contents
}

/// The story: the receiver of a whole volume was killed between its first head and the one that
/// opens it, and an empty volume was left, which looked like the whole one.
#[test]
fn receiver_that_dies_at_any_request_leaves_nothing_that_looks_whole() {
    run(3, async {
        let from = store().await;
        from.create(&name("web"), LEN).await.expect("made");
        change(&from, &name("web"), &mut Rng::new(3)).await;
        from.take_snapshot(&name("web"), "a").await.expect("taken");
        let whole = content(&from, &name("web"), None).await;
        let stream = sent(&from, &name("web"), "a", None, false).await;
        for served in 1.. {
            let memory: Arc<dyn Objects> = Arc::new(memory());
            let others = volumes(&memory, "other").await;
            // From then on the store is away for ever, as far as the receiver knows.
            let throttle = Some(Throttle { served, refused: 1 << 40 });
            let options = FaultyOptions { throttle, ..FaultyOptions::default() };
            let faulty: Arc<dyn Objects> =
                Arc::new(FaultyObjects::new(Arc::clone(&memory), options));
            let id = others.identity();
            let receiver = Volumes::with_id(faulty, environment("host"), 1 << 20, id).for_verbs();
            let outcome = received(&receiver, &name("copy"), &stream, false).await;
            match others.info(&name("copy")).await {
                Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "after {served}"),
                Ok(info) if info.open_on.is_some() => {}
                Ok(_) => assert!(
                    content(&others, &name("copy"), None).await == whole,
                    "after {served} requests there is a part"
                ),
            }
            if outcome.is_ok() {
                assert!(served > 10);
                return;
            }
        }
    });
}

#[test]
fn copies_and_copies_of_copies_have_every_snapshot_whatever_the_steps_are() {
    for seed in 0..40 {
        run(seed, async {
            let mut rng = Rng::new(seed);
            let (from, to, third) = (store().await, store().await, store().await);
            let (web, copy) = (name("web"), name("copy"));
            let contents = history(&from, &web, &mut rng).await;
            change(&from, &web, &mut rng).await;
            let middle = bytes(rng.below(4));
            let is_each = rng.below(2) == 0;
            let first = sent(&from, &web, &format!("s{middle}"), None, is_each).await;
            let (base, last) = (format!("s{middle}"), "s4");
            let second = sent(&from, &web, last, Some(&base), is_each).await;
            let mut listed = received(&to, &copy, &first, false).await.expect("received");
            listed.extend(received(&to, &copy, &second, false).await.expect("received"));
            assert!(listed.iter().all(|step| !step.was_there));
            for step in &listed {
                let label = &step.snapshot.label;
                let index: usize = label[1..].parse().expect("a number");
                let which = Which::Label(label.clone());
                assert_eq!(content(&to, &copy, Some(&which)).await, contents[index], "{label}");
                assert_eq!(content(&from, &web, Some(&which)).await, contents[index], "{label}");
            }
            assert_eq!(content(&to, &copy, None).await, contents[4]);
            let times = |infos: Vec<mica_block::SnapshotInfo>| -> Vec<_> {
                infos.into_iter().map(|info| (info.label, info.time_ns, info.len)).collect()
            };
            let there = times(to.snapshots(&copy).await.expect("listed"));
            let all = times(from.snapshots(&web).await.expect("listed"));
            assert!(there.iter().all(|snapshot| all.contains(snapshot)));
            // What is there changes nothing when it comes again, and a copy of the copy takes what
            // the first volume sends.
            let again = received(&to, &copy, &second, false).await.expect("received");
            assert!(again.iter().all(|step| step.was_there));
            let whole = sent(&to, &copy, &base, None, false).await;
            received(&third, &web, &whole, false).await.expect("received");
            received(&third, &web, &second, false).await.expect("received");
            assert_eq!(content(&third, &web, None).await, contents[4]);
        });
    }
}

#[test]
fn only_what_changed_is_sent() {
    run(1, async {
        let (from, web) = (store().await, name("web"));
        from.create(&web, 1 << 40).await.expect("made");
        let volume = from.open_volume(&web, Claimed::Refuse).await.expect("open");
        write(&volume, 0, &vec![1; bytes(200 * BLOCK)]).await;
        volume.close().await.expect("closed");
        from.take_snapshot(&web, "a").await.expect("taken");
        let volume = from.open_volume(&web, Claimed::Refuse).await.expect("open");
        write(&volume, (1 << 40) - BLOCK, &vec![2; bytes(BLOCK)]).await;
        volume.discard(range(0, 50 * BLOCK)).await.expect("discarded");
        volume.close().await.expect("closed");
        from.take_snapshot(&web, "b").await.expect("taken");
        let frame = |parts: usize| BEGIN_BYTES + parts * PART_BYTES;
        let whole = sent(&from, &web, "a", None, false).await;
        assert_eq!(whole.len(), frame(2) + bytes(200 * BLOCK));
        let step = sent(&from, &web, "b", Some("a"), false).await;
        assert_eq!(step.len(), frame(3) + bytes(BLOCK));
    });
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    run(2, async {
        let (from, to) = (store().await, store().await);
        let (web, copy, other) = (name("web"), name("copy"), name("other"));
        let mut rng = Rng::new(2);
        history(&from, &web, &mut rng).await;
        history(&from, &other, &mut rng).await;
        let whole = sent(&from, &web, "s0", None, false).await;
        let step = sent(&from, &web, "s1", Some("s0"), false).await;
        let kind = |outcome: Result<Vec<Received>>| outcome.expect_err("refused").kind();
        assert_eq!(kind(received(&to, &copy, &step, false).await), ErrorKind::NotFound);
        assert!(to.list().await.expect("listed").is_empty());
        assert_eq!(kind(received(&to, &copy, &[], false).await), ErrorKind::Corrupt);
        received(&to, &copy, &whole, false).await.expect("received");
        // Another volume's snapshots have the same labels and numbers.
        let foreign = sent(&from, &other, "s1", Some("s0"), false).await;
        assert_eq!(kind(received(&to, &copy, &foreign, false).await), ErrorKind::NotFound);
        let foreign = sent(&from, &other, "s0", None, false).await;
        assert_eq!(kind(received(&to, &copy, &foreign, false).await), ErrorKind::Invalid);
        // Written meanwhile.
        let before = content(&to, &copy, None).await;
        let volume = to.open_volume(&copy, Claimed::Refuse).await.expect("open");
        assert_eq!(kind(received(&to, &copy, &step, false).await), ErrorKind::Denied);
        write(&volume, 7 * BLOCK, &[9; 4096]).await;
        volume.close().await.expect("closed");
        let written = content(&to, &copy, None).await;
        assert_ne!(written, before);
        assert_eq!(kind(received(&to, &copy, &step, false).await), ErrorKind::Denied);
        assert_eq!(content(&to, &copy, None).await, written);
        received(&to, &copy, &step, true).await.expect("received");
        assert_eq!(content(&to, &copy, None).await, content(&from, &web, Some(&label("s1"))).await);
        // A label that another snapshot has.
        to.take_snapshot(&copy, "s2").await.expect("taken");
        let step = sent(&from, &web, "s2", Some("s1"), false).await;
        assert_eq!(kind(received(&to, &copy, &step, false).await), ErrorKind::Invalid);
        let same = label("s1");
        let sent = from.send(&web, &same, (Some(&same), false), |_| Ok(()), |_| {}).await;
        assert_eq!(sent.expect_err("refused").kind(), ErrorKind::Invalid);
    });
}

#[test]
fn damage_and_cuts_anywhere_are_found_and_taken_back() {
    run(3, async {
        let (from, to) = (store().await, store().await);
        let (web, copy) = (name("web"), name("copy"));
        let mut rng = Rng::new(3);
        history(&from, &web, &mut rng).await;
        let whole = sent(&from, &web, "s0", None, false).await;
        let step = sent(&from, &web, "s3", Some("s0"), true).await;
        let bad = |rng: &mut Rng, good: &[u8]| {
            let mut bad = good.to_vec();
            let at = bytes(rng.below(good.len() as u64));
            match rng.below(2) {
                0 => bad.truncate(at),
                _ => bad[at] ^= 1 << rng.below(8),
            }
            bad
        };
        for _ in 0..200 {
            received(&to, &copy, &bad(&mut rng, &whole), false).await.expect_err("damaged");
            assert!(to.list().await.expect("listed").is_empty(), "half a volume is left");
        }
        received(&to, &copy, &whole, false).await.expect("received");
        for _ in 0..200 {
            let bad = bad(&mut rng, &step);
            // Cut between two steps it is a stream of fewer.
            let outcome = received(&to, &copy, &bad, false).await;
            let snapshots = to.snapshots(&copy).await.expect("listed");
            let last = &snapshots.last().expect("the first").label;
            assert_eq!(
                content(&to, &copy, None).await,
                content(&from, &web, Some(&label(last))).await
            );
            assert!(outcome.is_err() || step.starts_with(&bad), "damage was not found");
        }
        received(&to, &copy, &step, false).await.expect("received");
        assert_eq!(content(&to, &copy, None).await, content(&from, &web, Some(&label("s3"))).await);
    });
}

/// The story: another host took the volume over by force while a stream was received, wrote to it
/// and closed it. The receiver then failed, and deleted the volume, or rolled it back.
#[test]
fn what_others_made_of_the_volume_meanwhile_is_not_taken_back() {
    run(4, async {
        let (from, web, copy) = (store().await, name("web"), name("copy"));
        history(&from, &web, &mut Rng::new(4)).await;
        let whole = sent(&from, &web, "s0", None, false).await;
        let step = sent(&from, &web, "s1", Some("s0"), false).await;
        for is_new in [true, false] {
            let memory = memory();
            let objects: Arc<dyn Objects> = Arc::new(memory.clone());
            let to = volumes(&objects, "host-1").await;
            if !is_new {
                received(&to, &copy, &whole, false).await.expect("received");
            }
            let options = FaultyOptions {
                only: Some(ObjectOperation::Put),
                slow: 1.0,
                slow_by: Duration::from_secs(10),
                ..FaultyOptions::default()
            };
            let slow: Arc<dyn Objects> = Arc::new(FaultyObjects::new(Arc::new(memory), options));
            let slow = volumes(&slow, "host-2").await;
            let other = async {
                let is_open =
                    async || to.info(&copy).await.is_ok_and(|info| info.open_on.is_some());
                while !is_open().await {
                    sleep(Duration::from_secs(1)).await;
                }
                // The answer to its head is known, and an extent is under way.
                sleep(Duration::from_secs(1)).await;
                if is_new {
                    // It is a part, which is only deleted.
                    to.delete(&copy, Claimed::TakeOver).await.expect("deleted");
                    to.create(&copy, LEN).await.expect("made");
                }
                let volume = to.open_volume(&copy, Claimed::TakeOver).await.expect("taken over");
                write(&volume, 0, &[77; 4096]).await;
                volume.close().await.expect("closed");
            };
            let stream = if is_new { &whole } else { &step };
            let receiving = received(&slow, &copy, stream, false);
            let (outcome, ()) = join_two(receiving, other).await;
            assert_eq!(outcome.expect_err("it was taken over").kind(), ErrorKind::Denied);
            assert_eq!(content(&to, &copy, None).await[..4096], [77; 4096]);
            assert!(to.list().await.expect("listed").iter().all(|info| info.open_on.is_none()));
        }
    });
}

/// What was made for a stream, and has something else by now, was left: open for ever, and a part.
#[test]
fn new_volume_that_is_not_as_it_was_made_is_deleted() {
    run(5, async {
        let (to, copy) = (store().await, name("copy"));
        let made = to.make_unfinished(&copy, LEN, NewVolume::default()).await.expect("made");
        let other = to.open_volume(&copy, Claimed::JustMade(made.volume)).await.expect("open");
        write(&other, 0, &[1; 4096]).await;
        other.flush().await.expect("flushed");
        let seen = ((Root::default(), LEN), Root::default());
        let refused = to.open_as_seen(&copy, Some(&made), seen).await.map(drop);
        assert_eq!(refused.expect_err("it was written").kind(), ErrorKind::Denied);
        let left = to.info(&copy).await.expect_err("deleted");
        assert_eq!(left.kind(), ErrorKind::NotFound);
    });
}

#[test]
fn parts_out_of_order_or_bounds_are_refused_before_their_data_is_read() {
    let part = |part: Part, sequence: u64| part.encode(sequence, &[]);
    let announced = |bytes, from| Part::announced(&bytes, 5, from, LEN);
    let data = |start, len| Part::Data { start, len };
    let good = data(BLOCK, 2 * BLOCK);
    assert_eq!(announced(part(good, 5), BLOCK), Ok(good));
    let last = Part::Nothing { start: 40 * BLOCK, len: SECTOR_BYTES };
    assert_eq!(announced(part(last, 5), BLOCK), Ok(last));
    for (bad, sequence, from) in [
        (good, 4, 0),
        (good, 5, BLOCK + 1),
        (data(0, 0), 5, 0),
        (data(SECTOR_BYTES, BLOCK), 5, 0),
        (data(0, BLOCK - 512), 5, 0),
        (data(40 * BLOCK, BLOCK), 5, 0),
        (data(u64::MAX - 4095, 4096), 5, 0),
        (Part::Nothing { start: 0, len: LEN + 512 }, 5, 0),
    ] {
        assert_eq!(announced(part(bad, sequence), from), Err(Malformed::Content), "{bad:?}");
    }
    let begin = Begin {
        snapshot: Origin { volume: [1; 16], number: 2 },
        base: None,
        time_ns: 3,
        len: LEN,
        label: "monday".to_owned(),
    };
    assert_eq!(Begin::decode(&begin.encode()), Ok(begin.clone()));
    for bit in 0..BEGIN_BYTES * 8 {
        let mut bad = begin.encode();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(Begin::decode(&bad).is_err(), "bit {bit}");
    }
}

/// A store without room for extents, which says so after a while.
struct Full(Arc<dyn Objects>, Duration);

impl Objects for Full {
    fn name(&self) -> String {
        self.0.name()
    }

    fn is_far(&self) -> bool {
        self.0.is_far()
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        self.0.open(name)
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        if content.len() as u64 > BLOCK {
            let pause = self.1;
            return Box::pin(async move {
                sleep(pause).await;
                (Err(Error::new(ErrorKind::Limit, "no space left")), content)
            });
        }
        self.0.put_if_absent(name, content)
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        self.0.list(folder, after)
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        self.0.delete(name)
    }
}

/// The story: a store was full, and what had been received of a stream stayed as a volume that
/// nobody could open.
#[test]
fn nothing_is_left_of_a_new_volume_for_which_the_store_has_no_room() {
    run(5, async {
        let source = store().await;
        source.create(&name("web"), LEN).await.expect("made");
        let mut rng = Rng::new(5);
        change(&source, &name("web"), &mut rng).await;
        source.take_snapshot(&name("web"), "a").await.expect("taken");
        let stream = sent(&source, &name("web"), "a", None, false).await;
        let full: Arc<dyn Objects> = Arc::new(Full(Arc::new(memory()), Duration::ZERO));
        let target = volumes(&full, "host").await.for_verbs();
        let options = ReceiveOptions { force: false, new: kind(5) };
        let received = target.receive(&name("copy"), options, &mut &*stream, |_| ()).await;
        let error = received.expect_err("there is no room");
        assert!(error.in_one_line().contains("no space left"), "{error:?}");
        assert!(target.list().await.expect("listed").is_empty());
    });
}

/// The story: somebody deleted by force what was being received, and made a volume of that name.
/// The receiver could not take back what it had made, and deleted what it found instead.
#[test]
fn volume_that_has_the_name_of_what_could_not_be_received_stays() {
    run(6, async {
        let (source, copy) = (store().await, name("copy"));
        history(&source, &name("web"), &mut Rng::new(4)).await;
        let stream = sent(&source, &name("web"), "s0", None, false).await;
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let here = volumes(&objects, "host-1").await;
        let full: Arc<dyn Objects> = Arc::new(Full(Arc::clone(&objects), Duration::from_secs(60)));
        let target = volumes(&full, "host-2").await.for_verbs();
        let other = async {
            let writer = async || here.info(&copy).await.ok().and_then(|info| info.writer);
            while writer().await.is_none() {
                sleep(Duration::from_secs(1)).await;
            }
            // The receiver has opened it, and an extent is under way.
            sleep(Duration::from_secs(10)).await;
            here.delete(&copy, Claimed::TakeOver).await.expect("deleted");
            here.create(&copy, LEN).await.expect("made");
            here.open_volume(&copy, Claimed::Refuse).await.expect("open")
        };
        let (outcome, volume) = join_two(received(&target, &copy, &stream, false), other).await;
        outcome.expect_err("there is no room, and it is another's");
        write(&volume, 0, &[77; 4096]).await;
        volume.close().await.expect("nobody has fenced it");
        assert_eq!(content(&here, &copy, None).await[..4096], [77; 4096]);
    });
}
