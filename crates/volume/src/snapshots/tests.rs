//! Snapshots, clones and rollbacks against a model that copies whole disks.

use crate::heads::Claimed;
use crate::names::VolumeName;
use crate::testing::{bytes, memory, name, range, read, run, volumes, write};
use crate::volume::Volume;
use crate::volumes::Volumes;
use mica_block::{Disk, ErrorKind, Manage, Objects, Result, SnapshotInfo, Which, Zeroes};
use mica_store::object::{FaultyObjects, FaultyOptions};
use mica_units::{Rng, SECTOR_BYTES};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = 4096;
const LEN_MIN: u64 = 24 * BLOCK + SECTOR_BYTES;
const LEN_MAX: u64 = 40 * BLOCK;
const VOLUMES_MAX: usize = 5;

/// A volume as it should be.
#[derive(Clone)]
struct Model {
    content: Vec<u8>,
    snapshots: BTreeMap<u64, (String, Vec<u8>)>,
    next: u64,
}

impl Model {
    fn of(content: Vec<u8>) -> Self {
        Self { content, snapshots: BTreeMap::new(), next: 1 }
    }

    fn label_is_free(&self, label: &str) -> bool {
        label.is_empty() || self.snapshots.values().all(|(other, _)| other != label)
    }

    fn find(&self, which: &Which) -> Option<u64> {
        self.snapshots.iter().find_map(|(number, (label, _))| {
            let is_it = match which {
                Which::Label(wanted) => label == wanted,
                Which::Number(wanted) => number == wanted,
            };
            is_it.then_some(*number)
        })
    }

    fn is_listed_as(&self, infos: &[SnapshotInfo]) {
        let listed: Vec<_> =
            infos.iter().map(|info| (info.number, &*info.label, bytes(info.len))).collect();
        let expected: Vec<_> = self
            .snapshots
            .iter()
            .map(|(number, (label, content))| (*number, &**label, content.len()))
            .collect();
        assert_eq!(listed, expected);
    }
}

/// All volumes of a store, of which one is open.
struct World {
    rng: Rng,
    objects: Arc<dyn Objects>,
    volumes: Volumes,
    models: BTreeMap<VolumeName, Model>,
    current: VolumeName,
    open: Option<Volume>,
    counts: BTreeMap<&'static str, usize>,
}

impl World {
    async fn new(objects: Arc<dyn Objects>, seed: u64) -> Self {
        let volumes = volumes(&objects, "host-0").await;
        let current = name("web");
        volumes.create(&current, LEN_MIN).await.expect("made");
        let open = Some(volumes.open_volume(&current, Claimed::Refuse).await.expect("open"));
        let models = BTreeMap::from([(current.clone(), Model::of(vec![0; bytes(LEN_MIN)]))]);
        let (rng, counts) = (Rng::new(seed), BTreeMap::new());
        Self { rng, objects, volumes, models, current, open, counts }
    }

    fn model(&mut self) -> &mut Model {
        self.models.get_mut(&self.current).expect("it has one")
    }

    fn volume(&self) -> &Volume {
        self.open.as_ref().expect("it is open")
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// A snapshot that there is, mostly.
    fn any_snapshot(&mut self) -> Which {
        let model = &self.models[&self.current];
        let count = model.snapshots.len() as u64;
        if count == 0 || self.rng.percent(10) {
            return match self.rng.below(2) {
                0 => Which::Number(self.rng.below(20)),
                _ => Which::Label("missing".to_owned()),
            };
        }
        let index = bytes(self.rng.below(count));
        let (number, (label, _)) = model.snapshots.iter().nth(index).expect("so many");
        if label.is_empty() || self.rng.percent(50) {
            Which::Number(*number)
        } else {
            Which::Label(label.clone())
        }
    }

    fn any_label(&mut self) -> String {
        match self.rng.below(4) {
            0 => format!("label {}", self.rng.below(8)),
            1 => format!("l{}", self.rng.below(1000)),
            _ => String::new(),
        }
    }

    fn any_range(&mut self) -> (u64, u64) {
        let sectors = self.model().content.len() as u64 / SECTOR_BYTES;
        let start = self.rng.below(sectors);
        let len = (1 + self.rng.below(40)).min(sectors - start);
        (start * SECTOR_BYTES, len * SECTOR_BYTES)
    }

    async fn step(&mut self) {
        match self.rng.below(30) {
            0..8 => self.write().await,
            8..11 => self.clear().await,
            11 => self.volume().flush().await.expect("flushed"),
            12 => self.grow().await,
            13..17 => self.take().await,
            17..19 => self.remove().await,
            19..21 => self.label().await,
            21 => self.compare_open().await,
            22..25 => self.offline().await,
            25 => self.reopen().await,
            26 => self.take_over().await,
            27 => self.clone_one().await,
            28 => self.look_at_a_snapshot().await,
            _ => self.diff().await,
        }
    }

    async fn write(&mut self) {
        let (at, len) = self.any_range();
        let new: Vec<u8> = (0..len).map(|_| byte(&mut self.rng)).collect();
        write(self.volume(), at, &new).await;
        self.model().content[bytes(at)..bytes(at + len)].copy_from_slice(&new);
    }

    async fn clear(&mut self) {
        let (at, len) = self.any_range();
        let zeroes = Zeroes { may_unmap: self.rng.percent(50), fast: false };
        self.volume().write_zeroes(range(at, len), zeroes).await.expect("zeroed");
        self.model().content[bytes(at)..bytes(at + len)].fill(0);
    }

    async fn grow(&mut self) {
        let len = self.model().content.len() as u64 + SECTOR_BYTES * self.rng.below(20);
        if len <= LEN_MAX {
            self.volume().resize(len).await.expect("grown");
            self.model().content.resize(bytes(len), 0);
        }
    }

    async fn take(&mut self) {
        let label = self.any_label();
        let taken = self.volume().snapshots().expect("a volume has them").take(&label).await;
        self.taken(&label, taken);
    }

    fn taken(&mut self, label: &str, taken: Result<SnapshotInfo>) {
        self.count("taken");
        let model = self.model();
        match taken {
            Ok(info) => {
                assert!(model.label_is_free(label), "two have the label {label:?}");
                assert_eq!((info.number, &*info.label), (model.next, label));
                assert_eq!(bytes(info.len), model.content.len());
                let snapshot = (label.to_owned(), model.content.clone());
                model.snapshots.insert(model.next, snapshot);
                model.next += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
                assert!(!model.label_is_free(label), "{error:?}");
            }
        }
    }

    async fn remove(&mut self) {
        let which = self.any_snapshot();
        let removed = self.volume().snapshots().expect("a volume has them").remove(&which).await;
        self.removed(&which, removed);
    }

    fn removed(&mut self, which: &Which, removed: Result<()>) {
        let model = self.model();
        match (model.find(which), removed) {
            (Some(number), Ok(())) => drop(model.snapshots.remove(&number)),
            (None, Err(error)) => assert_eq!(error.kind(), ErrorKind::NotFound, "{error:?}"),
            (found, removed) => panic!("{which}: {found:?}, {removed:?}"),
        }
        self.count("removed");
    }

    async fn label(&mut self) {
        let (which, label) = (self.any_snapshot(), self.any_label());
        let snapshots = self.volume().snapshots().expect("a volume has them");
        let labelled = snapshots.label(&which, &label).await;
        self.labelled(&which, &label, labelled);
    }

    fn labelled(&mut self, which: &Which, label: &str, labelled: Result<()>) {
        let model = self.model();
        let Some(number) = model.find(which) else {
            assert_eq!(labelled.expect_err("none").kind(), ErrorKind::NotFound);
            return;
        };
        let mut others = model.clone();
        others.snapshots.remove(&number);
        if others.label_is_free(label) {
            labelled.expect("labelled");
            model.snapshots.get_mut(&number).expect("there").0 = label.to_owned();
        } else {
            assert_eq!(labelled.expect_err("two have it").kind(), ErrorKind::Invalid);
        }
        self.count("labelled");
    }

    async fn compare_open(&mut self) {
        let listed = self.volume().snapshots().expect("a volume has them").list().await;
        self.model().is_listed_as(&listed.expect("listed"));
        let (at, len) = self.any_range();
        let there = read(self.volume(), at, len).await;
        assert_eq!(there, self.model().content[bytes(at)..bytes(at + len)]);
    }

    /// What is done to a volume that nobody has open; and before, that it is not done to one that
    /// somebody has.
    async fn offline(&mut self) {
        let (which, label) = (self.any_snapshot(), self.any_label());
        let name = self.current.clone();
        if self.rng.percent(20) {
            let refused = self.volumes.take_snapshot(&name, &label).await;
            assert_eq!(refused.expect_err("it is open").kind(), ErrorKind::Denied);
        }
        self.close().await;
        match self.rng.below(4) {
            0 => {
                let taken = self.volumes.take_snapshot(&name, &label).await;
                self.taken(&label, taken);
            }
            1 => {
                let removed = self.volumes.drop_snapshot(&name, &which).await;
                self.removed(&which, removed);
            }
            2 => {
                let labelled = self.volumes.label_snapshot(&name, &which, &label).await;
                self.labelled(&which, &label, labelled);
            }
            _ => {
                let rolled_back = self.volumes.rollback(&name, &which).await;
                let model = self.model();
                match model.find(&which) {
                    Some(number) => {
                        rolled_back.expect("rolled back");
                        model.content = model.snapshots[&number].1.clone();
                        self.count("rolled back");
                    }
                    None => {
                        let refused = rolled_back.expect_err("there is none");
                        assert_eq!(refused.kind(), ErrorKind::NotFound);
                    }
                }
            }
        }
        let listed = self.volumes.snapshots(&name).await.expect("listed");
        self.model().is_listed_as(&listed);
        self.open(Claimed::Refuse).await;
    }

    async fn close(&mut self) {
        let volume = self.open.take().expect("it is open");
        volume.close().await.expect("closed");
    }

    async fn open(&mut self, claimed: Claimed) {
        let opened = self.volumes.open_volume(&self.current, claimed).await;
        self.open = Some(opened.expect("open"));
    }

    /// Closes the volume, and opens it again, or another.
    async fn reopen(&mut self) {
        self.close().await;
        let names: Vec<_> = self.models.keys().cloned().collect();
        self.current = names[bytes(self.rng.below(names.len() as u64))].clone();
        self.open(Claimed::Refuse).await;
        self.count("opened again");
    }

    /// Another host takes over what was flushed, and a snapshot that was taken before.
    async fn take_over(&mut self) {
        self.volume().flush().await.expect("flushed");
        let lost = self.open.take();
        let host = format!("host-{}", self.rng.below(1000));
        self.volumes = volumes(&self.objects, &host).await;
        self.open(Claimed::TakeOver).await;
        let lost = lost.expect("it was open");
        let taken = lost.snapshots().expect("a volume has them").take("").await;
        let refused = taken.expect_err("it was fenced");
        assert_eq!(refused.kind(), ErrorKind::Denied, "{refused:?}");
        self.count("taken over");
    }

    async fn clone_one(&mut self) {
        if self.models.len() == VOLUMES_MAX {
            return self.delete_a_clone().await;
        }
        let which = self.any_snapshot();
        let target = name(&format!("clone-{}", self.rng.below(1 << 40)));
        let cloned = self.volumes.clone_volume(&self.current, Some(&which), &target).await;
        let model = self.model();
        let Some(number) = model.find(&which) else {
            assert_eq!(cloned.expect_err("there is none").kind(), ErrorKind::NotFound);
            return;
        };
        cloned.expect("cloned");
        let clone = Model::of(model.snapshots[&number].1.clone());
        self.models.insert(target.clone(), clone);
        let again = self.volumes.clone_volume(&self.current, Some(&which), &target).await;
        assert_eq!(again.expect_err("there is one").kind(), ErrorKind::Invalid);
        self.count("cloned");
    }

    async fn delete_a_clone(&mut self) {
        let clone = self.models.keys().find(|name| **name != self.current).cloned();
        let clone = clone.expect("there are others");
        self.volumes.delete(&clone, Claimed::Refuse).await.expect("deleted");
        self.models.remove(&clone);
    }

    async fn look_at_a_snapshot(&mut self) {
        let which = self.any_snapshot();
        self.volume().flush().await.expect("flushed");
        let opened = self.volumes.open_snapshot(&self.current, &which).await;
        let model = self.model();
        match (model.find(&which), opened) {
            (Some(number), Ok(volume)) => {
                let content = model.snapshots[&number].1.clone();
                assert_eq!(read(&volume, 0, content.len() as u64).await, content);
                assert!(!volume.is_writable());
            }
            (None, Err(error)) => assert_eq!(error.kind(), ErrorKind::NotFound),
            (found, opened) => panic!("{which}: {found:?}, {:?}", opened.err()),
        }
        self.count("looked at");
    }

    /// Whatever differs is in the diff.
    async fn diff(&mut self) {
        let which = [self.any_snapshot(), self.any_snapshot()];
        let name = self.current.clone();
        let model = self.model();
        let found = which.clone().map(|which| model.find(&which));
        let [Some(before), Some(after)] = found else { return };
        let [before, after] = [before, after].map(|number| model.snapshots[&number].1.clone());
        let mut is_in = vec![false; before.len().max(after.len())];
        let (mut end, mut all) = (0, 0);
        let each = |range: mica_units::GuestRange| {
            assert!(range.start().bytes() >= end && !range.is_empty());
            end = range.end().bytes();
            all += range.len();
            is_in[bytes(range.start().bytes())..bytes(end)].fill(true);
        };
        let diff = self.volumes.diff((&name, Some(&which[0])), (&name, Some(&which[1])), each);
        diff.await.expect("compared");
        for (at, is_in) in is_in.iter().enumerate() {
            let [before, after] = [&before, &after].map(|content| content.get(at).unwrap_or(&0));
            assert!(*is_in || before == after, "byte {at} differs");
        }
        if which[0] == which[1] {
            assert_eq!(all, 0);
        }
        self.count("compared");
    }

    /// Everything of all volumes, read by a host that has nothing in memory.
    async fn compare_all(&mut self) {
        self.close().await;
        let volumes = volumes(&self.objects, "judge").await;
        for (name, model) in &self.models {
            let volume = volumes.open_readable(name).await.expect("open");
            let len = model.content.len() as u64;
            assert_eq!(volume.geometry().len, len);
            assert_eq!(read(&volume, 0, len).await, model.content, "{}", name.as_str());
            model.is_listed_as(&volumes.snapshots(name).await.expect("listed"));
            for (number, (_, content)) in &model.snapshots {
                let opened = volumes.open_snapshot(name, &Which::Number(*number)).await;
                let there = read(&opened.expect("open"), 0, content.len() as u64).await;
                assert_eq!(there, *content, "snapshot {number} of {}", name.as_str());
            }
        }
    }
}

fn byte(rng: &mut Rng) -> u8 {
    u8::try_from(rng.below(256)).expect("a byte")
}

async fn live(objects: Arc<dyn Objects>, seed: u64, steps: usize) -> BTreeMap<&'static str, usize> {
    let mut world = World::new(objects, seed).await;
    for _ in 0..steps {
        world.step().await;
    }
    world.compare_all().await;
    world.counts
}

/// The situations that a random test is for have to occur in it.
fn met_all(counts: &BTreeMap<&'static str, usize>) {
    let all = [
        "taken",
        "removed",
        "labelled",
        "rolled back",
        "opened again",
        "taken over",
        "cloned",
        "looked at",
        "compared",
    ];
    for what in all {
        assert!(counts.get(what).is_some_and(|count| *count > 10), "{what}: {counts:?}");
    }
}

#[test]
fn volumes_are_as_a_model_that_copies_everything_says() {
    let mut all = BTreeMap::new();
    for seed in 0..40 {
        let counts = run(seed, live(Arc::new(memory()), seed, 300));
        counts.into_iter().for_each(|(what, count)| *all.entry(what).or_default() += count);
    }
    met_all(&all);
}

/// Over a store that refuses, loses answers, and does what was asked for later, or twice.
#[test]
fn volumes_are_as_the_model_says_over_a_store_with_faults() {
    let mut all = BTreeMap::new();
    for seed in 0..24 {
        let options = FaultyOptions {
            seed,
            refused: 0.02,
            lost: 0.05,
            late: 0.02,
            slow: 0.1,
            slow_by: Duration::from_millis(30),
            ..FaultyOptions::default()
        };
        let counts = run(seed, async {
            let memory: Arc<dyn Objects> =
                Arc::new(memory().with_latency(Duration::from_millis(2)));
            volumes(&memory, "maker").await;
            live(Arc::new(FaultyObjects::new(memory, options)), seed, 120).await
        });
        counts.into_iter().for_each(|(what, count)| *all.entry(what).or_default() += count);
    }
    met_all(&all);
}
