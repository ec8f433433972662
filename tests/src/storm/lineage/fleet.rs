//! The disks, the server that has them, and what a command did to them.

use super::disk::Disk;
use super::forms;
use super::order::{Before, Ending, Order};
use crate::storm::keys;
use crate::storm::kinds::Kind;
use crate::storm::model::Model;
use crate::storm::parties::Party;
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::toml::toml_of_disk;
use crate::storm::world::{World, text};
use mica_units::Rng;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The random numbers of a seed that decide only whether layers may be encrypted.
const KEYS_PART: u64 = 1 << 33;

/// And whether two disks have layers in common.
const SIBLINGS_PART: u64 = 1 << 35;

/// All of it.
#[derive(Debug)]
pub(super) struct Fleet<'a> {
    pub(super) world: World<'a>,
    pub(super) disks: Vec<Disk>,
    pub(super) config: PathBuf,
    pub(super) control: PathBuf,
    queues: u64,
    /// Servers so far.
    servers: u64,
    /// A command whose server was killed: what came of it is known when the next one tells which
    /// layers there are.
    pub(super) open: Option<(Given, Ending)>,
}

/// Perhaps a disk comes that stands on layers of another one, which has some.
fn add_sibling(world: &World<'_>, disks: &mut Vec<Disk>) -> Outcome {
    let mut rng = Rng::for_part(world.seed, SIBLINGS_PART);
    let of = usize::try_from(rng.below(disks.len() as u64)).expect("few");
    let frozen = disks[of].chain.len() as u64 - 1;
    if frozen == 0 || !world.does(&mut rng, Kind::Siblings, 40) {
        return Ok(());
    }
    let at = usize::try_from(rng.below(frozen)).expect("few");
    let number = disks.len() as u64;
    let disk = Disk::beside(world, &mut rng, number, (&disks[of], at))?;
    disks.push(disk);
    Ok(())
}

/// A command that was given, and what was known then of the disks that it is about.
#[derive(Debug)]
pub(super) struct Given {
    pub(super) order: Order,
    pub(super) before: Vec<Before>,
}

impl<'a> Fleet<'a> {
    pub(super) fn create(world: World<'a>, rng: &mut Rng) -> Outcome<Self> {
        if world.does(&mut Rng::for_part(world.seed, KEYS_PART), Kind::Encrypted, 30) {
            keys::allow(&world.images)?;
        }
        let count = rng.choose(&[1, 1, 2, 3]);
        let disks = (0..count).map(|number| Disk::create(&world, rng, number));
        let disks = disks.collect::<Outcome<Vec<_>>>()?;
        let mut disks = disks;
        add_sibling(&world, &mut disks)?;
        let [config, control] = ["mica.toml", "control"].map(|name| world.run.join(name));
        let queues = rng.choose(&[1, 1, 2]);
        let fleet = Self { world, disks, config, control, queues, servers: 0, open: None };
        fleet.write_config()?;
        Ok(fleet)
    }

    /// Writes the configuration, as a person would.
    pub(super) fn write_config(&self) -> Outcome {
        let mut file =
            format!("control = \"{}\"\nqueues = {}\n", text(&self.control)?, self.queues);
        for disk in &self.disks {
            file += &toml_of_disk(&disk.options(&self.world)?);
        }
        let new = self.config.with_extension("new");
        fs::write(&new, file)?;
        fs::rename(&new, &self.config)?;
        Ok(())
    }

    /// The command that was given last may have taken the image out that the configuration names:
    /// then that names the active layer from now on.
    pub(super) fn follow_merge(&mut self) -> Outcome<bool> {
        let all = self.open.iter().flat_map(|(given, _)| &given.order.disks);
        let left = all.filter(|(number, what)| {
            let disk = &self.disks[*number];
            !disk.is_named_by(&what.leads_to(disk))
        });
        let left: Vec<_> = left.map(|(number, _)| *number).collect();
        left.iter().for_each(|number| self.disks[*number].name_active());
        self.write_config()?;
        Ok(!left.is_empty())
    }

    pub(super) fn tell(&self, step: impl std::fmt::Display) {
        self.world.story.tell(step);
    }

    pub(super) fn new_server(&mut self) -> String {
        self.servers += 1;
        format!("server{}", self.servers)
    }

    /// Does something with what is known of disk `number`, which its clients have while they work.
    pub(super) fn with_model<T>(
        &mut self,
        number: usize,
        parties: &[Party],
        act: impl FnOnce(&mut Model) -> T,
    ) -> T {
        match parties.iter().find(|party| party.disk == number) {
            Some(party) => act(&mut party.stage.board().model),
            None => act(&mut self.disks[number].model),
        }
    }

    /// `order` is about to be given.
    pub(super) fn note(&mut self, order: Order, parties: &[Party]) -> Given {
        let before = order.disks.iter().map(|(number, _)| Before {
            model: self.with_model(*number, parties, Model::record),
            sent: Vec::new(),
        });
        let before = before.collect();
        Given { order, before }
    }

    /// Whatever became of it, what is sent from now on is later.
    pub(super) fn end_note(&mut self, given: &mut Given, parties: &[Party]) {
        let Given { order, before } = given;
        for ((number, _), before) in order.disks.iter().zip(before) {
            before.sent = self.with_model(*number, parties, Model::recorded);
        }
    }

    /// The chains that the server has lead to what became of a command. Whether it took an image
    /// out that the configuration names.
    pub(super) fn settle(&mut self, given: Given, ending: Ending, what: &str) -> Outcome<bool> {
        let Given { order, before } = given;
        let mut group = Vec::new();
        for ((number, what_of_it), before) in order.disks.into_iter().zip(before) {
            let chain = self.chain_of(number)?;
            let disk = &mut self.disks[number];
            let (old, new) = (&disk.chain, what_of_it.leads_to(disk));
            let is_done = match ending {
                Ending::Done => true,
                Ending::Refused => false,
                Ending::Open => chain == new && chain != *old,
            };
            if chain != if is_done { &*new } else { &**old } {
                let what = format!(
                    "{what}: {what_of_it:?} was {ending:?}, and {} has the layers {chain:?}, not \
                     {old:?} or {new:?}",
                    disk.name
                );
                return Err(Fault::new(Wrong::Layers, what));
            }
            let old = old.clone();
            what_of_it.settle(disk, before, ending, is_done);
            disk.chain = chain;
            group.push((number, old));
        }
        let is_unnamed = self.follow_layers()?;
        self.tidy(&group)?;
        Ok(is_unnamed)
    }

    /// A user has the configuration name the active layer of a disk that the image has left which
    /// it named. Whether there was one.
    pub(super) fn follow_layers(&mut self) -> Outcome<bool> {
        let mut is_unnamed = false;
        for disk in &mut self.disks {
            if !disk.is_named_by(&disk.chain) {
                is_unnamed = true;
                disk.name_active();
            }
        }
        self.write_config()?;
        Ok(is_unnamed)
    }

    /// Whether a server that is killed now may lose what it has acknowledged.
    pub(super) fn keeps_no_log(&self) -> Outcome<bool> {
        for disk in &self.disks {
            if forms::is_old(&self.world.images, disk.active())? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The server was killed. What it had acknowledged and not flushed is in no log if it wrote to
    /// a layer of version 2.
    pub(super) fn note_losses(&mut self) -> Outcome {
        for disk in &mut self.disks {
            disk.may_lose |= forms::is_old(&self.world.images, disk.active())?;
        }
        Ok(())
    }

    /// What was lost so is decided: before a verb, or QEMU, builds on it.
    pub(super) fn decide_losses(&mut self) -> Outcome {
        let Self { world, disks, .. } = self;
        for disk in disks.iter_mut().filter(|disk| disk.may_lose) {
            let shown = disk.shown_by_mica(world)?;
            disk.judge(&shown, "after a kill")?;
        }
        Ok(())
    }

    /// The name of another disk that has layer `file`, too.
    pub(super) fn sharer(&self, number: usize, file: &str) -> Option<&Disk> {
        let mut others = self.disks.iter().enumerate().filter(|(other, _)| *other != number);
        others.find_map(|(_, other)| other.chain.iter().any(|one| one == file).then_some(other))
    }

    /// A command that would change, or take away, what another disk needs was refused, and the
    /// other one was named.
    pub(super) fn judge_needed(&self, order: &Order, ending: Ending, said: &str) -> Outcome {
        for (number, what) in &order.disks {
            let changed = what.changed_layers(&self.disks[*number].chain);
            let Some(other) = changed.iter().find_map(|file| self.sharer(*number, file)) else {
                continue;
            };
            // It may be refused for another reason, too.
            let is_unnamed = said.contains("needs ") && !said.contains(&other.name);
            if ending == Ending::Done || ending == Ending::Refused && is_unnamed {
                let what = format!("{what:?} is {ending:?}, and {} needs it: {said}", other.name);
                return Err(Fault::new(Wrong::Layers, what));
            }
        }
        Ok(())
    }

    /// A user removes what is in no chain any more, and what killed commands left of it.
    pub(super) fn tidy(&mut self, group: &[(usize, Vec<String>)]) -> Outcome {
        for (number, old) in group {
            let others = self.disks.iter().enumerate().filter(|(other, _)| other != number);
            let needed: BTreeSet<_> = others
                .flat_map(|(_, other)| other.chain.iter().chain(other.frozen.keys()).cloned())
                .collect();
            let disk = &mut self.disks[*number];
            let known = disk.frozen.keys().filter(|file| !disk.clones.contains(file));
            let gone = known.chain(old).filter(|file| !disk.chain.contains(file));
            let gone: BTreeSet<_> = gone.cloned().collect();
            for file in gone {
                match needed.contains(&file) {
                    // The other disk may change it from now on.
                    true if disk.clones.is_empty() => drop(disk.frozen.remove(&file)),
                    true => {}
                    false => disk.remove(&self.world, &file)?,
                }
            }
        }
        Ok(())
    }

    /// The files of the chain of disk `number`, as the server has it.
    pub(super) fn chain_of(&self, number: usize) -> Outcome<Vec<String>> {
        let disk = &self.disks[number];
        let status = self.ctl_json(&["status"])?;
        let mut all = status["disks"].as_array().into_iter().flatten();
        let found = all.find(|found| found["name"] == *disk.name);
        let image = found.and_then(|found| found["image"].as_str());
        let image = image.ok_or_else(|| {
            Fault::new(Wrong::Failed, format!("{} has no image: {status}", disk.name))
        })?;
        let chain = disk.read_chain(&self.world, Path::new(image))?;
        let layers = found.map_or(0, |found| found["layers"].as_u64().unwrap_or(0));
        if layers != chain.len() as u64 {
            let what = format!("{} has {layers} layers, and its files {chain:?}", disk.name);
            return Err(Fault::new(Wrong::Layers, what));
        }
        Ok(chain)
    }

    /// A new server has the layers that it has to have, and shows what it has to.
    pub(super) fn judge_start(&mut self) -> Outcome {
        if let Some((given, ending)) = self.open.take() {
            self.settle(given, ending, "a server that starts")?;
            // The layer that was active at the end may have been the command's.
            self.note_losses()?;
        }
        for disk in &mut self.disks {
            disk.exported = None;
        }
        self.judge("a server that starts")
    }

    /// All disks have the layers and show what they have to; nobody else changes them now.
    pub(super) fn judge(&mut self, what: &str) -> Outcome {
        for number in 0..self.disks.len() {
            let chain = self.chain_of(number)?;
            let states = self.states_of(number)?;
            let disk = &mut self.disks[number];
            if chain != disk.chain {
                let what = format!("{what}: {} has {chain:?}, not {:?}", disk.name, disk.chain);
                return Err(Fault::new(Wrong::Layers, what));
            }
            let kept: Vec<_> =
                chain.iter().filter(|file| disk.states.contains(*file)).cloned().collect();
            if kept != states {
                let what = format!("{what}: {} keeps {states:?}, not {kept:?}", disk.name);
                return Err(Fault::new(Wrong::Layers, what));
            }
            let read = crate::nbd::read_disk(&disk.socket);
            let read =
                read.map_err(|error| Fault::new(Wrong::Failed, format!("{what}: {error:#}")));
            self.world.counts.reads.add();
            disk.judge(&read?, what)?;
        }
        Ok(())
    }

    /// The files of the states that the server says are kept, from the oldest.
    fn states_of(&self, number: usize) -> Outcome<Vec<String>> {
        let listed = self.ctl_json(&["backup", "list", &self.disks[number].name])?;
        let files = listed["states"].as_array().into_iter().flatten().filter_map(|state| {
            let name = Path::new(state["file"].as_str()?).file_name()?;
            Some(name.to_str()?.to_owned())
        });
        Ok(files.collect())
    }

    /// What the server says, which it has to.
    pub(super) fn ctl_json(&self, args: &[&str]) -> Outcome<Value> {
        let control = text(&self.control)?;
        let all = [&["ctl", "--control", control, "--output", "json"], args].concat();
        let said = self.world.mica(&all)?;
        if !said.status.success() {
            return Err(Fault::new(Wrong::Failed, format!("{args:?}: {said}")));
        }
        serde_json::from_str(&said.stdout)
            .map_err(|error| Fault::new(Wrong::Failed, format!("{args:?}: {error}: {said}")))
    }

    /// Nobody serves them, and all was well at the end: QEMU reads the files.
    pub(super) fn look(&mut self, what: &str) -> Outcome {
        let Self { world, disks, .. } = self;
        disks.iter_mut().try_for_each(|disk| disk.look(world, what))
    }
}
