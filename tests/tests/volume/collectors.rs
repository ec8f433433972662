//! Two collectors at once in one store, beside a server whose guest writes; any of the three is
//! killed at any instant. Whatever is needed afterwards is there.
//!
//! `MICA_COLLECTOR_ROUNDS` says how often, `MICA_COLLECTOR_SEED` with which random numbers.

use crate::snapshots::ctl;
use mica_gen::Rng;
use mica_tests::guest::Guest;
use mica_tests::server::Server;
use mica_tests::volume::{Store, run};
use mica_tests::{clock, mica, nbd};
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Each takes three seconds; change what collects with 50 and more.
const ROUNDS_DEFAULT: u64 = 8;
const BLOCK: usize = 4096;
const BLOCKS: usize = 512;
/// Snapshots and clones that there are at once, at most.
const KEPT_MAX: usize = 6;

/// What a volume or a snapshot has in each of its blocks: the number of a write, 0 for none.
type Content = Vec<u64>;

/// What there has to be.
struct Model {
    now: Content,
    /// By label.
    snapshots: BTreeMap<String, Content>,
    /// By name.
    clones: BTreeMap<String, Content>,
    last: u64,
    rng: Rng,
}

fn bytes_of(content: &[u64]) -> Vec<u8> {
    let block = |number: &u64| number.to_le_bytes().into_iter().cycle().take(BLOCK);
    content.iter().flat_map(block).collect()
}

/// One after the other until all is over; many are killed.
fn collect(store: &Store, is_over: &AtomicBool, kills: &AtomicU64, mut rng: Rng) {
    while !is_over.load(Ordering::Relaxed) {
        if rng.percent(40) {
            run(["gc", "-q", &store.url()]).ok();
            continue;
        }
        let mut gc = Command::new(mica::binary());
        gc.args(["volume", "gc", "-q", &store.url()]).stderr(Stdio::null());
        let mut child = gc.spawn().expect("started");
        clock::sleep(Duration::from_micros(1000 + rng.below(40_000)));
        child.kill().expect("killed");
        let status = child.wait().expect("ended");
        kills.fetch_add(u64::from(!status.success()), Ordering::Relaxed);
    }
}

/// Ends collectors, also if a test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Model {
    fn new(seed: u64) -> Self {
        let (snapshots, clones) = (BTreeMap::new(), BTreeMap::new());
        Self { now: vec![0; BLOCKS], snapshots, clones, last: 0, rng: Rng::new(seed) }
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.rng.below(limit as u64)).expect("small")
    }

    /// A guest writes, and what it has is kept, cloned and dropped.
    fn live(&mut self, store: &Store, server: &Server) {
        let mut guest = Guest::connect(server).expect("served");
        for _ in 0..self.rng.below(60) {
            match self.rng.below(12) {
                0 => self.take(store),
                1 => self.drop_one(store),
                2 => self.clone_one(store),
                3 => assert_eq!(guest.flush().expect("flushed"), 0),
                _ => self.write(&mut guest),
            }
        }
    }

    fn write(&mut self, guest: &mut Guest) {
        let first = self.below(BLOCKS - 64);
        let count = 1 + self.below(64);
        self.last += 1;
        self.now[first..first + count].fill(self.last);
        let bytes = bytes_of(&self.now[first..first + count]);
        assert_eq!(guest.write((first * BLOCK) as u64, &bytes).expect("written"), 0);
    }

    fn take(&mut self, store: &Store) {
        if self.snapshots.len() < KEPT_MAX {
            self.last += 1;
            let label = format!("s{}", self.last);
            ctl(store, &["snapshot", "web", &label]).ok();
            self.snapshots.insert(label, self.now.clone());
        }
    }

    fn any(&mut self) -> Option<(String, Content)> {
        let at = self.below(self.snapshots.len().max(1));
        let (label, content) = self.snapshots.iter().nth(at)?;
        Some((label.clone(), content.clone()))
    }

    fn drop_one(&mut self, store: &Store) {
        let Some((label, _)) = self.any() else { return };
        ctl(store, &["drop", "web", &label]).ok();
        self.snapshots.remove(&label);
    }

    /// A clone of a snapshot, or one less.
    fn clone_one(&mut self, store: &Store) {
        if self.clones.len() >= KEPT_MAX {
            let (name, _) = self.clones.pop_first().expect("there is one");
            run(["delete", "-q", &store.volume(&name)]).ok();
            return;
        }
        let Some((label, content)) = self.any() else { return };
        self.last += 1;
        let name = format!("clone-{}", self.last);
        ctl(store, &["clone", &format!("web@{label}"), &name]).ok();
        self.clones.insert(name, content);
    }

    /// Everything is whole, and what it has to be.
    fn judge(&self, store: &Store, what: &str) {
        run(["check", "-q", &store.url()]).ok();
        let file = store.folder().join("content.raw");
        let labels =
            self.snapshots.iter().map(|(label, content)| (format!("web@{label}"), content));
        let clones = self.clones.iter().map(|(name, content)| (name.clone(), content));
        let now = std::iter::once(("web".to_owned(), &self.now));
        for (name, content) in labels.chain(clones).chain(now) {
            let (url, file) = (store.volume(&name), file.display().to_string());
            run(["export", "-q", "-O", "raw", "--force", &url, &file]).ok();
            let found = std::fs::read(&file).expect("exported");
            assert!(found == bytes_of(content), "{what}: {name} is not what it was");
        }
    }
}

#[test]
fn two_collectors_and_a_server_that_are_killed_lose_nothing() {
    let told = |name: &str, default| {
        let told = std::env::var(name).ok();
        told.map_or(default, |text| text.parse().expect("a number"))
    };
    let rounds = told("MICA_COLLECTOR_ROUNDS", ROUNDS_DEFAULT);
    let seed = told("MICA_COLLECTOR_SEED", 5);
    let (store, mut model) = (Store::new(), Model::new(seed));
    store.create("web", &(BLOCKS * BLOCK).to_string());
    let [log, control] = ["log", "control"].map(|name| store.folder().join(name));
    let (log, control) = (log.display().to_string(), control.display().to_string());
    let options = ["--log-device", &*log, "--log-size", "64M", "--control", &*control];
    let kills = AtomicU64::new(0);
    for round in 0..rounds {
        let what = format!("round {round}, MICA_COLLECTOR_SEED={seed}");
        let is_over = AtomicBool::new(false);
        let server = store.serve("web", &options).expect("served");
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let (store, is_over, kills) = (&store, &is_over, &kills);
                let rng = Rng::new(model.rng.next_u64());
                scope.spawn(move || collect(store, is_over, kills, rng));
            }
            let over = Over(&is_over);
            model.live(&store, &server);
            if model.rng.percent(50) {
                super::kill::kill(&server);
                // What is in the log is put while others collect.
                let again = store.serve("web", &options).expect("served again");
                let mut client = again.connect(&nbd::Wish::default()).expect("served");
                let found = client.read_all().expect("read");
                assert!(found == bytes_of(&model.now), "{what}: it lost what it acknowledged");
                again.stop().expect("stopped");
            } else {
                server.stop().expect("stopped");
            }
            drop(over);
        });
        model.judge(&store, &what);
    }
    // How many of them ended before they were killed is up to the machine.
    println!("{} collectors were killed", kills.load(Ordering::Relaxed));
    // And nothing is kept that nothing needs.
    run(["gc", "-q", &store.url()]).ok();
    let left = run(["gc", "--dry-run", "--output", "json", &store.url()]).json();
    assert_eq!(left["freed-extents"], 0, "{left}");
}
