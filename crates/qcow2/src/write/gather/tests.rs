//! Writes to a few clusters that lead, offer themselves and are taken, and tasks that claim several
//! clusters, under a scheduler that polls and drops them in any order, from a seed.

use super::super::request::Taken;
use super::*;
use crate::testing::from_seeds;
use mica_block::{Error, ErrorKind};
use mica_units::{GuestOffset, Rng};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake};

/// What has become of a write.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Fate {
    /// Its task has its bytes.
    Own,
    /// It waits to be taken.
    Offered,
    /// The claim that it was offered to has ended.
    Again,
    /// Its leader has its bytes.
    Taken { leader: usize },
    /// The transaction that it was in has ended so.
    Ended { result: String },
    /// Its task heard of the end.
    Heard,
    /// Its task is gone, and its bytes with it.
    Dropped,
}

#[derive(Default)]
struct Model {
    fates: Vec<Fate>,
    ranges: Vec<GuestRange>,
    /// Offers in the order in which they were made, by cluster.
    offers: BTreeMap<u64, Vec<usize>>,
    /// Clusters that are claimed, and by whom.
    claimed: BTreeMap<u64, usize>,
}

impl Model {
    /// The offers that a leader must take: each that is free, the oldest first.
    fn free_offers(&self, cluster: u64, led: GuestRange) -> Vec<usize> {
        let mut free: Vec<usize> = Vec::new();
        for id in self.offers.get(&cluster).into_iter().flatten() {
            let is_apart = |other: GuestRange| other.intersect(self.ranges[*id]).is_none();
            if self.fates[*id] == Fate::Offered
                && is_apart(led)
                && free.iter().all(|other| is_apart(self.ranges[*other]))
            {
                free.push(*id);
            }
        }
        free.truncate(TAKEN_MAX);
        free
    }

    fn end_claim(&mut self, clusters: RangeInclusive<u64>) {
        for cluster in clusters {
            for id in self.offers.remove(&cluster).into_iter().flatten() {
                if self.fates[id] == Fate::Offered {
                    self.fates[id] = Fate::Again;
                }
            }
        }
    }

    fn end_taken(&mut self, leader: usize, result: &str) {
        for fate in &mut self.fates {
            if *fate == (Fate::Taken { leader }) {
                *fate = Fate::Ended { result: result.to_owned() };
            }
        }
    }
}

#[derive(Default)]
struct World {
    gather: Gather,
    claims: Claims,
    model: RefCell<Model>,
}

fn text_of(result: &Result<()>) -> String {
    result.as_ref().map_or_else(ToString::to_string, |()| "done".to_owned())
}

const ABANDONED: &str = "the write that this one had joined was abandoned";

/// A claim, of which the model knows that it is granted or waited for.
struct Holding<'a> {
    world: &'a World,
    id: usize,
    clusters: RangeInclusive<u64>,
    claimed: Option<Claimed<'a>>,
}

impl<'a> Holding<'a> {
    fn granted(&mut self, claimed: Claimed<'a>) {
        self.claimed = Some(claimed);
        for cluster in self.clusters.clone() {
            let other = self.world.model.borrow_mut().claimed.insert(cluster, self.id);
            assert_eq!(other, None, "cluster {cluster} is claimed once");
        }
    }
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        if self.claimed.is_some() {
            let model = &mut *self.world.model.borrow_mut();
            model.claimed.retain(|cluster, _| !self.clusters.contains(cluster));
        }
        drop(self.claimed.take());
        self.world.model.borrow_mut().end_claim(self.clusters.clone());
    }
}

/// Notes that a task was dropped, if it was.
struct Life<'a> {
    world: &'a World,
    id: usize,
}

impl Drop for Life<'_> {
    fn drop(&mut self) {
        // After a failed check there is nothing more to learn.
        let Ok(mut model) = self.world.model.try_borrow_mut() else { return };
        model.end_taken(self.id, ABANDONED);
        if matches!(model.fates[self.id], Fate::Own | Fate::Offered | Fate::Again) {
            model.fates[self.id] = Fate::Dropped;
        }
    }
}

/// Gives others up to `most` turns.
async fn pause(rng: &mut Rng, most: u64) {
    for _ in 0..rng.below(most + 1) {
        let mut is_over = false;
        std::future::poll_fn(|context| {
            context.waker().wake_by_ref();
            match std::mem::replace(&mut is_over, true) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }
}

/// Bytes that say whose they are.
fn bytes_of(id: usize) -> Buf {
    Buf::from_slice(&id.to_be_bytes())
}

impl World {
    /// A write as [`Writer::write_part`](super::super::Writer) does it.
    async fn write(&self, life: Life<'_>, cluster: u64, mut rng: Rng) {
        let id = life.id;
        let range = self.model.borrow().ranges[id];
        let mut buf = bytes_of(id);
        let clusters = cluster..=cluster;
        let holding = loop {
            match self.gather.join(&self.claims, GuestCluster::new(cluster), range, buf) {
                Role::Leads(claimed, back) => {
                    assert_eq!(*back, *bytes_of(id), "its own bytes");
                    let mut holding = Holding { world: self, id, clusters, claimed: None };
                    holding.granted(claimed);
                    break holding;
                }
                Role::Offered(offer) => {
                    self.note_offer(id, cluster);
                    match offer.outcome().await {
                        Outcome::Done(result) => return self.hear(id, &result),
                        Outcome::Again(back) => {
                            assert_eq!(*back, *bytes_of(id), "its own bytes");
                            let fate = &mut self.model.borrow_mut().fates[id];
                            assert_eq!(*fate, Fate::Again, "write {id}");
                            *fate = Fate::Own;
                            buf = back;
                        }
                    }
                }
            }
        };
        pause(&mut rng, 3).await;
        let taken = self.take(id, cluster, range);
        pause(&mut rng, 3).await;
        let result = match rng.percent(50) {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Io, format!("leader {id} failed"))),
        };
        self.model.borrow_mut().end_taken(id, &text_of(&result));
        taken.finish(&result);
        // Those that were taken go on while the claim stands.
        pause(&mut rng, 1).await;
        drop(holding);
        self.model.borrow_mut().fates[id] = Fate::Heard;
    }

    fn note_offer(&self, id: usize, cluster: u64) {
        let model = &mut *self.model.borrow_mut();
        model.fates[id] = Fate::Offered;
        model.offers.entry(cluster).or_default().push(id);
    }

    fn hear(&self, id: usize, result: &Result<()>) {
        let fate = &mut self.model.borrow_mut().fates[id];
        assert_eq!(*fate, Fate::Ended { result: text_of(result) }, "write {id}");
        *fate = Fate::Heard;
    }

    fn take(&self, leader: usize, cluster: u64, led: GuestRange) -> Taken {
        let model = &mut *self.model.borrow_mut();
        let expected = model.free_offers(cluster, led);
        let mut ids = Vec::new();
        let mut offers = Vec::new();
        for (range, buf, offer) in self.gather.take(GuestCluster::new(cluster), led) {
            let id = usize::from_be_bytes(*buf.first_chunk().expect("the number of a write"));
            assert_eq!(range, model.ranges[id], "its own range");
            ids.push(id);
            offers.push(offer);
        }
        assert_eq!(ids, expected, "what {leader} takes");
        ids.into_iter().for_each(|id| model.fates[id] = Fate::Taken { leader });
        Taken(offers)
    }

    /// A request to several clusters.
    async fn claim(&self, life: Life<'_>, clusters: RangeInclusive<u64>, mut rng: Rng) {
        let id = life.id;
        let [first, last] =
            [clusters.start(), clusters.end()].map(|number| GuestCluster::new(*number));
        let mut holding = Holding { world: self, id, clusters, claimed: None };
        let claimed = self.gather.claim(&self.claims, first, last).await;
        holding.granted(claimed);
        pause(&mut rng, 4).await;
        drop(holding);
        self.model.borrow_mut().fates[id] = Fate::Heard;
    }

    /// What is on offer is on offer, or was withdrawn: neither taken nor done.
    fn verify(&self) {
        for offers in self.gather.offers.lock().values() {
            assert!(!offers.is_empty(), "a cluster without offers is forgotten");
            for offer in offers {
                let state = offer.state.lock();
                assert!(matches!(state.0, State::Offered(_) | State::Over), "a standing offer");
            }
        }
    }
}

/// Whether a task was woken since it was polled.
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

struct Task<'a> {
    future: Pin<Box<dyn Future<Output = ()> + 'a>>,
    woken: Arc<Woken>,
}

/// How much goes on.
struct Load {
    tasks: usize,
    at_once: usize,
    clusters: u64,
    sectors: u64,
    drops_percent: u64,
}

impl World {
    fn start(&self, rng: &mut Rng, load: &Load) -> Task<'_> {
        let cluster = rng.below(load.clusters);
        let first = rng.below(load.sectors);
        let len = 1 + rng.below((load.sectors - first).min(4));
        let start = GuestOffset::new((cluster * load.sectors + first) * 512);
        let id = {
            let model = &mut *self.model.borrow_mut();
            model.ranges.push(GuestRange::new(start, len * 512).expect("a small disk"));
            model.fates.push(Fate::Own);
            model.fates.len() - 1
        };
        let life = Life { world: self, id };
        let own_rng = Rng::for_part(rng.next_u64(), 0);
        let future: Pin<Box<dyn Future<Output = ()>>> = match rng.percent(15) {
            true => {
                let last = cluster + rng.below(load.clusters - cluster);
                Box::pin(self.claim(life, cluster..=last, own_rng))
            }
            false => Box::pin(self.write(life, cluster, own_rng)),
        };
        Task { future, woken: Arc::new(Woken(AtomicBool::new(true))) }
    }

    fn run(&self, mut rng: Rng, load: &Load) {
        let mut tasks: Vec<Task<'_>> = Vec::new();
        let mut started = 0;
        while started < load.tasks || !tasks.is_empty() {
            if started < load.tasks && tasks.len() < load.at_once && rng.percent(60) {
                tasks.push(self.start(&mut rng, load));
                started += 1;
            }
            if tasks.is_empty() {
                continue;
            }
            if rng.percent(load.drops_percent) {
                let which = rng.below(tasks.len() as u64);
                tasks.swap_remove(usize::try_from(which).expect("few"));
                continue;
            }
            let is_awake = |task: &Task<'_>| task.woken.0.load(Ordering::SeqCst);
            let awake: Vec<_> = (0..tasks.len()).filter(|task| is_awake(&tasks[*task])).collect();
            assert!(!awake.is_empty(), "{} tasks sleep, and nobody wakes them", tasks.len());
            let which = rng.choose(&awake);
            let task = &mut tasks[which];
            task.woken.0.store(false, Ordering::SeqCst);
            let waker = Waker::from(Arc::clone(&task.woken));
            if task.future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                tasks.swap_remove(which);
            }
            self.verify();
        }
        self.check_end(load);
    }

    fn check_end(&self, load: &Load) {
        assert!(self.gather.offers.lock().is_empty(), "offers that nobody waits for");
        for cluster in 0..load.clusters {
            assert!(self.claims.try_claim(cluster).is_some(), "cluster {cluster} stays claimed");
        }
        for (id, fate) in self.model.borrow().fates.iter().enumerate() {
            // A write that was taken ends so even if its task is gone.
            let has_ended = matches!(fate, Fate::Heard | Fate::Dropped | Fate::Ended { .. });
            assert!(has_ended, "write {id} is left as {fate:?}");
        }
    }
}

#[test]
fn each_offer_ends_once_and_no_waiter_sleeps_forever() {
    from_seeds(60, |seed| {
        let mut rng = Rng::new(seed);
        let load = Load {
            tasks: 300,
            at_once: rng.choose(&[3, 8, 20]),
            clusters: rng.choose(&[1, 2, 4]),
            sectors: rng.choose(&[4, 16, 64]),
            drops_percent: rng.choose(&[0, 2, 10]),
        };
        World::default().run(rng, &load);
    });
}

/// So many that a leader cannot take all.
#[test]
fn crowd_at_one_cluster_is_taken_in_turns() {
    from_seeds(4, |seed| {
        let load = Load { tasks: 600, at_once: 300, clusters: 1, sectors: 4096, drops_percent: 1 };
        World::default().run(Rng::new(seed), &load);
    });
}

#[test]
fn bytes_of_a_transaction_come_in_the_order_of_their_ranges() {
    from_seeds(200, |seed| {
        let mut rng = Rng::new(seed);
        let mut at = 0;
        let mut pieces = Vec::new();
        let mut plain = Vec::new();
        for _ in 0..=rng.below(8) {
            at += rng.below(3) * 16;
            let len = 1 + rng.below(40);
            let bytes: Vec<u8> = (0..len).map(|_| rng.next_u64().to_be_bytes()[0]).collect();
            let range = GuestRange::new(GuestOffset::new(at), len).expect("a small disk");
            pieces.push((range, Buf::from_slice(&bytes)));
            plain.extend(bytes);
            at += len;
        }
        let ranges: Vec<_> = pieces.iter().map(|(range, _)| *range).collect();
        rng.shuffle(&mut pieces);
        let mut guest = Guest::new(pieces);
        assert_eq!(guest.ranges().collect::<Vec<_>>(), ranges);
        let mut rest = &plain[..];
        while !rest.is_empty() {
            let len = 1 + rng.below(rest.len().min(50) as u64);
            let (now, later) = rest.split_at(usize::try_from(len).expect("short"));
            match rng.percent(50) {
                true => assert_eq!(*guest.take(now.len()), *now),
                false => {
                    let mut to = vec![0; now.len()];
                    guest.copy_to(&mut to);
                    assert_eq!(to, now);
                }
            }
            rest = later;
        }
    });
}
