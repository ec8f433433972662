//! Snapshots, merges and kept states of one disk, one after the other, with kills in between.

use crate::world::{Model, World};
use mica_gen::Rng;
use mica_tests::{clock, mica, qemu};
use std::fs;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(20);

/// A disk whose layers come and go.
struct Life {
    world: World,
    model: Model,
    /// The names of its layers, from the base.
    names: Vec<String>,
    rng: Rng,
    numbers: usize,
}

impl Life {
    fn disk(&self) -> String {
        self.world.named.strip_suffix(".qcow2").expect("so it is called").to_owned()
    }

    fn work(&mut self) {
        let mut guest = self.world.guest();
        self.model.work(&mut guest).expect("served");
    }

    fn snapshot(&mut self) {
        self.numbers += 1;
        let name = format!("layer-{}.qcow2", self.numbers);
        let path = self.world.folder().join(&name).display().to_string();
        self.world.ctl(&["snapshot", &self.disk(), &path]).ok();
        self.names.push(name);
    }

    fn keep(&mut self) {
        self.numbers += 1;
        let (state, disk) = (format!("state{}", self.numbers), self.disk());
        let socket = self.world.folder().join("backup").display().to_string();
        self.world.ctl(&["backup", "begin", &disk, "--as", &state, "--nbd", &socket]).ok();
        let active = self.names.last().expect("a layer").clone();
        let stem = active.strip_suffix(".qcow2").expect("so it is called");
        self.names.insert(self.names.len() - 1, format!("{stem}@{state}.qcow2"));
        let refused = self.world.ctl(&["commit", &disk]);
        assert_ne!(refused.code(), Some(0), "its layers are read: {refused}");
        self.world.ctl(&["backup", "end", &disk]).ok();
    }

    /// Layers at these positions have left: nobody needs their files any more.
    fn drop_layers(&mut self, from: usize, to: usize) {
        for name in self.names.drain(from..to) {
            fs::remove_file(self.world.folder().join(name)).expect("it was there");
        }
    }

    fn stream(&mut self) {
        let (disk, active) = (self.disk(), self.names.len() - 1);
        // The first layer that leaves, or 0.
        let from = usize::try_from(self.rng.below(active as u64 + 1)).expect("few");
        let base = from.checked_sub(1).map(|base| self.names[base].clone());
        let mut verb = vec!["stream", &disk];
        verb.extend(base.iter().flat_map(|base| ["--base", base]));
        if let Some(last) = (from..active).rev().find(|at| self.is_state(*at)) {
            let refused = self.world.ctl(&verb).refusal();
            assert!(refused.contains(&self.names[last]), "it says what keeps them: {refused}");
            verb.push("--drop-states");
        }
        self.world.ctl(&verb).ok();
        self.drop_layers(from, active);
    }

    fn commit(&mut self) {
        let (disk, active) = (self.disk(), self.names.len() - 1);
        if active == 0 {
            return;
        }
        let base = usize::try_from(self.rng.below(active as u64)).expect("few");
        let top = base + 1 + usize::try_from(self.rng.below((active - base) as u64)).expect("few");
        let (base_name, top_name) = (self.names[base].clone(), self.names[top].clone());
        let said = self.world.ctl(&["commit", &disk, "--base", &base_name, "--top", &top_name]);
        if (base..=top).any(|at| self.is_state(at)) {
            assert_ne!(said.code(), Some(0), "a kept state stays what it is: {said}");
            return;
        }
        said.ok();
        self.drop_layers(base + 1, (top + 1).min(active));
    }

    /// Whether a state is kept in the layer at this position, also if the layer that it is named
    /// after was merged.
    fn is_state(&self, position: usize) -> bool {
        self.names[position].contains('@')
    }

    fn restart(&mut self) {
        match self.rng.percent(50) {
            true => self.world.stop(),
            false => drop(self.world.server.take()),
        }
        // Who removed the image that was named has to name another one.
        if !self.world.folder().join(&self.world.named).exists() {
            self.world.named = self.names.last().expect("a layer").clone();
        }
        self.world.start();
        let now = self.world.disk();
        self.model.judge(now, "after a restart");
    }

    fn step(&mut self) {
        self.work();
        match self.rng.below(10) {
            0..3 => self.snapshot(),
            3..5 => self.keep(),
            5 => self.stream(),
            6..9 => self.commit(),
            _ => self.restart(),
        }
        self.work();
        let layers = self.world.ctl(&["status", "--output", "json"]).json();
        assert_eq!(layers["disks"][0]["layers"], self.names.len(), "{layers}");
        assert!(self.world.disk() == self.model.bytes, "{:?}", self.names);
    }
}

#[test]
fn layers_come_and_go_in_any_order() {
    for (seed, made) in
        [(1, &[][..]), (2, &["-o", "extended_l2=on"]), (3, &["-o", "cluster_size=4k"])]
    {
        let Some(world) = World::of_image(made, &[]) else { return };
        let (model, rng) = (Model::new(seed), Rng::new(seed));
        let names = vec!["vm.qcow2".to_owned()];
        let mut life = Life { world, model, names, rng, numbers: 0 };
        for _ in 0..24 {
            life.step();
            // The name of a disk is that of the image that its server was started with.
            if life.rng.percent(10) {
                life.world.stop();
                life.world.named = life.names.last().expect("a layer").clone();
                life.world.start();
            }
        }
        life.world.stop();
        let active = life.names.last().expect("a layer").clone();
        // A kill may leave clusters that nothing uses, and nothing worse.
        let said = qemu::img(life.world.folder(), ["check", &active]);
        assert!(matches!(said.code(), Some(0 | 3)), "{said}");
        assert!(life.world.content(&active) == life.model.bytes, "as QEMU reads it");
    }
}

#[test]
fn merge_that_was_killed_is_not_taken_for_a_snapshot_that_was() {
    let Some(mut world) = World::of_image(&["-o", "lazy_refcounts=on"], &[]) else { return };
    let mut model = Model::new(5);
    let mut guest = world.guest();
    (0..4).for_each(|_| model.work(&mut guest).expect("served"));
    world.snapshot("vm-1.qcow2", &[]).ok();
    (0..8).for_each(|_| model.work(&mut guest).expect("served"));
    assert_eq!(guest.flush().expect("served"), 0);
    drop(guest);
    world.ctl(&["commit", "vm", "--background", "--rate", "64k"]).ok();
    let is_at_work = || {
        let job = world.ctl(&["jobs", "--output", "json"]).json();
        job[0]["copied_bytes"].as_u64().filter(|copied| *copied > 0)
    };
    clock::poll(LIMIT, PAUSE, is_at_work).expect("it copies");
    drop(world.server.take());
    // From the first image, which the merge was writing.
    world.start();
    assert_eq!(world.image().file_name().expect("a name"), "vm-1.qcow2");
    let now = world.disk();
    model.judge(now, "after the kill");
    world.ctl(&["commit", "vm"]).ok();
    assert!(world.disk() == model.bytes);
    world.stop();
    assert!(world.content("vm.qcow2") == model.bytes, "the base has it all");
}

#[test]
fn marks_follow_when_layers_leave() {
    let Some(mut world) = World::new(&[]) else { return };
    let mut model = Model::new(6);
    for number in 1..4 {
        let mut guest = world.guest();
        model.work(&mut guest).expect("served");
        drop(guest);
        world.snapshot(&format!("vm-{number}.qcow2"), &[]).ok();
    }
    world.ctl(&["commit", "vm", "--top", "vm-1.qcow2"]).ok();
    world.stop();
    // From the first image: its mark named the layer that is gone.
    world.start();
    assert_eq!(world.image().file_name().expect("a name"), "vm-3.qcow2");
    assert!(world.disk() == model.bytes);
    world.stop();
    // What was merged away is not written by anybody who still names it.
    let lost = world.folder().join("vm-1.qcow2").display().to_string();
    let lost = mica::run(["commit", &lost]).refusal();
    assert!(lost.contains("is no longer based on it"), "{lost}");
}
