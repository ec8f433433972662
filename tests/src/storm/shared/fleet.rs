//! The disks, the configuration that lists some of them, and what a server of it has to serve.

use super::disk::{Disk, Source, Standing};
use crate::clock;
use crate::storm::configured;
use crate::storm::foreign;
use crate::storm::kinds::Kind;
use crate::storm::load::Phase;
use crate::storm::loss;
use crate::storm::parties::Party;
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::toml::toml_of_disk;
use crate::storm::world::{World, text};
use mica_units::Rng;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::time::Duration;

/// How long a server may take to do what it was asked for.
const LIMIT: Duration = Duration::from_secs(40);
const PAUSE: Duration = Duration::from_millis(5);
const SOCKETS: u64 = 2;
const DISKS_MIN: u64 = 2;
const DISKS_MORE: u64 = 5;

/// All of it.
#[derive(Debug)]
pub(super) struct Fleet<'a> {
    pub(super) world: World<'a>,
    pub(super) disks: Vec<Disk>,
    /// The names of those that the configuration lists.
    pub(super) listed: BTreeSet<String>,
    pub(super) config: PathBuf,
    pub(super) control: PathBuf,
    sockets: Vec<PathBuf>,
    queues: u64,
    /// Servers so far.
    servers: u64,
}

impl<'a> Fleet<'a> {
    /// Some disks, of which a configuration lists at least one.
    pub(super) fn create(world: World<'a>, rng: &mut Rng) -> Outcome<Self> {
        let sockets: Vec<_> = (0..1 + rng.below(SOCKETS))
            .map(|number| world.run.join(format!("shared{number}")))
            .collect();
        let count = DISKS_MIN + rng.below(DISKS_MORE);
        let disks = (0..count).map(|number| Disk::create(&world, rng, number, &sockets));
        let mut disks = disks.collect::<Outcome<Vec<_>>>()?;
        // No server takes over while there is one: most fleets have none.
        if world.does(rng, Kind::Ephemeral, 20) {
            let some = disks.iter_mut().filter(|_| rng.percent(40));
            some.for_each(Disk::make_ephemeral);
        }
        let has_logs = rng.percent(50);
        // A server that begins with a qcow2 image makes the folder for logs.
        let may_begin = |disk: &&Disk| has_logs || disk.cluster.is_none();
        let first = disks.iter().find(may_begin).unwrap_or(&disks[0]);
        let listed = disks.iter().filter(may_begin).filter(|_| rng.percent(70));
        let mut listed: BTreeSet<_> = listed.map(|disk| disk.name.clone()).collect();
        // A server without any disk does not start.
        listed.insert(first.name.clone());
        let [config, control] = ["mica.toml", "control"].map(|name| world.run.join(name));
        let queues = rng.choose(&[1, 1, 2]);
        let fleet = Self { world, disks, listed, config, control, sockets, queues, servers: 0 };
        for disk in &fleet.disks {
            fleet.tell(format_args!("{} {:?} at {:?}", disk.name, disk.cluster, disk.sockets));
        }
        fleet.write_config()?;
        if has_logs {
            fs::DirBuilder::new().mode(0o700).create(loss::folder_in(&fleet.world.log))?;
        }
        Ok(fleet)
    }

    pub(super) fn tell(&self, step: impl std::fmt::Display) {
        self.world.story.tell(step);
    }

    pub(super) fn new_server(&mut self) -> String {
        self.servers += 1;
        format!("server{}", self.servers)
    }

    /// Writes the configuration, as a person would.
    pub(super) fn write_config(&self) -> Outcome {
        let control = text(&self.control)?;
        let mut config = format!("control = \"{control}\"\nqueues = {}\n", self.queues);
        for disk in self.disks.iter().filter(|disk| self.listed.contains(&disk.name)) {
            let mut options = disk.options(&self.world)?;
            options.push(("image", disk.image()?.to_owned()));
            config += &toml_of_disk(&options);
        }
        self.tell(format_args!("  the configuration lists {:?}", self.listed));
        let new = self.config.with_extension("new");
        fs::write(&new, config)?;
        fs::rename(&new, &self.config)?;
        Ok(())
    }

    /// The names of the disks in the configuration; mica has to understand it.
    pub(super) fn read_config(&self) -> Outcome<BTreeSet<String>> {
        let binary = self.world.binary.display().to_string();
        let args = ["serve", "--check-config", "--config", text(&self.config)?];
        let said = foreign::run(&binary, &self.world.run, &args)?;
        if !said.status.success() {
            return Err(Fault::new(Wrong::Configuration, said.to_string()));
        }
        self.world.counts.configurations.add();
        let text = fs::read_to_string(&self.config)?;
        let names = text.lines().filter_map(|line| {
            let (key, value) = line.split_once('=')?;
            (key.trim() == "name").then(|| value.trim().trim_matches('"').to_owned())
        });
        let names: Vec<_> = names.collect();
        let listed: BTreeSet<_> = names.iter().cloned().collect();
        match listed.len() == names.len() {
            true => Ok(listed),
            false => Err(Fault::new(Wrong::Configuration, format!("names twice: {text}"))),
        }
    }

    /// The configuration lists what it has to.
    pub(super) fn judge_config(&self, what: &str) -> Outcome {
        let listed = self.read_config()?;
        if listed == self.listed {
            return Ok(());
        }
        let wanted = &self.listed;
        let what = format!("{what}: the configuration has {listed:?}, not {wanted:?}");
        Err(Fault::new(Wrong::Configuration, what))
    }

    /// A server begins, to which nobody has said anything yet.
    pub(super) fn begins(&mut self) {
        for disk in &mut self.disks {
            let is_listed = self.listed.contains(&disk.name);
            disk.standing = if is_listed { Standing::Serving } else { Standing::Absent };
            disk.source = Source::Configuration;
            disk.throw_away();
        }
    }

    /// A server was killed, whatever it served.
    pub(super) fn was_killed(&mut self) {
        self.disks.iter_mut().for_each(|disk| disk.is_pending = true);
    }

    /// A server took over: what was done by command stays done, and what is new in the
    /// configuration is served. What was removed and is listed there still is drained.
    pub(super) fn was_taken_over(&mut self, absent_by_command: &BTreeSet<String>) {
        for disk in &mut self.disks {
            let is_listed = self.listed.contains(&disk.name);
            match (disk.standing, disk.source) {
                (Standing::Absent, _) if is_listed => {
                    let is_closed = absent_by_command.contains(&disk.name);
                    disk.standing = if is_closed { Standing::Drained } else { Standing::Serving };
                }
                (Standing::Serving | Standing::Drained, Source::Configuration) if !is_listed => {
                    disk.standing = Standing::Absent;
                }
                _ => {}
            }
            // What was added by command and is listed, too, is the configuration's for the new
            // server.
            if is_listed {
                disk.source = Source::Configuration;
            }
        }
    }

    /// Another server takes over. A client of a disk that was taken away may not have noticed yet
    /// that it has come to its end.
    pub(super) fn moves(&self, parties: &[Party]) {
        let served = parties.iter().filter(|party| self.disks[party.disk].is_serving());
        served.for_each(|party| party.stage.enter(Phase::Moving));
    }

    /// Whether another server may have been kept from taking over, with this in its log: by
    /// commands, or because of what clients would lose.
    pub(super) fn may_keep_server(&self, log: &str) -> bool {
        let mut ephemeral = self.disks.iter().filter(|disk| disk.is_ephemeral());
        log.contains(configured::DISKS_CHANGE)
            || ephemeral.any(|disk| {
                let is_there = disk.standing != Standing::Absent;
                let is_listed = self.listed.contains(&disk.name);
                let is_named = log.contains(&format!("disk {:?} is ephemeral", disk.name));
                is_there && is_named || is_listed && log.contains("ephemeral cannot take over")
            })
    }

    /// Waits until the server has done with disk `number` what it was asked for by a client that
    /// was killed.
    pub(super) fn wait_for(&self, number: usize) -> Outcome {
        let disk = &self.disks[number];
        let wanted = match disk.standing {
            Standing::Serving => Some("serving"),
            Standing::Drained => Some("drained"),
            Standing::Absent => None,
        };
        let there = clock::poll(LIMIT, PAUSE, || {
            let status = match self.status() {
                Ok(status) => status,
                Err(fault) => return Some(Err(fault)),
            };
            let mut disks = status["disks"].as_array().into_iter().flatten();
            let state = disks.find(|told| told["name"] == *disk.name);
            let state = state.and_then(|told| told["state"].as_str());
            (state == wanted).then_some(Ok(()))
        });
        there.unwrap_or_else(|| {
            let what = format!("{} does not become {:?}", disk.name, disk.standing);
            Err(Fault::new(Wrong::Members, what))
        })
    }

    /// What the server says of disk `number`.
    pub(super) fn standing_of(&self, number: usize) -> Outcome<Standing> {
        let (status, name) = (self.status()?, &self.disks[number].name);
        let mut disks = status["disks"].as_array().into_iter().flatten();
        let told = disks.find(|told| told["name"] == **name);
        match told.map(|told| told["state"].as_str().unwrap_or("?")) {
            None => Ok(Standing::Absent),
            Some("serving") => Ok(Standing::Serving),
            Some("drained") => Ok(Standing::Drained),
            Some(_) => Err(Fault::new(Wrong::Members, format!("{name}: {status}"))),
        }
    }

    /// What the server says that it has, and what clients find: the disks that it has to serve, and
    /// no others.
    pub(super) fn judge_members(&self, what: &str) -> Outcome {
        let status = self.status()?;
        let disks: Vec<_> = status["disks"].as_array().cloned().unwrap_or_default();
        for disk in &self.disks {
            let told = disks.iter().find(|told| told["name"] == *disk.name);
            let state = told.map_or("absent", |told| told["state"].as_str().unwrap_or("?"));
            let is_right = matches!(
                (disk.standing, state),
                (Standing::Serving, "serving")
                    | (Standing::Drained, "drained")
                    | (Standing::Absent, "absent")
            );
            if !is_right {
                let (name, standing) = (&disk.name, disk.standing);
                let what = format!("{what}: {name} is {state}, not {standing:?}: {status}");
                return Err(Fault::new(Wrong::Members, what));
            }
            if disk.is_serving() {
                continue;
            }
            let found = self.sockets.iter().find(|socket| disk.connect(socket).is_ok());
            if let Some(socket) = found {
                let (name, standing) = (&disk.name, disk.standing);
                let what = format!("{what}: {name} is at {}, but {standing:?}", socket.display());
                return Err(Fault::new(Wrong::Members, what));
            }
        }
        Ok(())
    }

    fn status(&self) -> Outcome<serde_json::Value> {
        let args = ["ctl", "--control", text(&self.control)?, "--output", "json", "status"];
        let said = self.world.mica(&args)?;
        serde_json::from_str(&said.stdout)
            .map_err(|error| Fault::new(Wrong::Failed, format!("{error}: {said}")))
    }

    /// Reads all disks that are served, and judges them.
    pub(super) fn judge_disks(&mut self, what: &str) -> Outcome {
        let Self { world, disks, .. } = self;
        disks
            .iter_mut()
            .filter(|disk| disk.is_serving())
            .try_for_each(|disk| disk.judge(world, what))
    }
}
