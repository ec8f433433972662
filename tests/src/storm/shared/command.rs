//! What is said to a server by `mica ctl`: disks are added, removed, drained, undrained and made
//! longer, and the configuration is read again. The client or the server may be killed meanwhile.

use super::disk::{Disk, Source, Standing, index};
use super::fleet::Fleet;
use super::server::Server;
use crate::clock;
use crate::command::{self, Finished};
use crate::storm::kinds::Kind;
use crate::storm::load::Phase;
use crate::storm::parties::Party;
use crate::storm::stamp::SECTOR;
use crate::storm::story::{Fault, Outcome, Wrong, trouble};
use crate::storm::world::text;
use mica_units::Rng;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How long `mica ctl` may take.
const LIMIT: Duration = Duration::from_secs(40);

/// What is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verb {
    Add,
    Remove,
    Drain,
    Undrain,
}

/// A verb on a disk, and whether the configuration is to have it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    verb: Verb,
    /// Its place among the disks.
    pub(super) disk: usize,
    saves: bool,
}

impl Order {
    /// Something that can be asked for now.
    pub(super) fn random(fleet: &Fleet<'_>, rng: &mut Rng) -> Self {
        let disk = index(rng, fleet.disks.len());
        let verb = match fleet.disks[disk].standing {
            Standing::Absent => Verb::Add,
            Standing::Drained => rng.choose(&[Verb::Undrain, Verb::Undrain, Verb::Remove]),
            Standing::Serving => rng.choose(&[Verb::Drain, Verb::Remove]),
        };
        // The configuration keeps one disk: a server without any does not start.
        let is_last = |name: &str| fleet.listed.len() == 1 && fleet.listed.contains(name);
        let saves = match verb {
            Verb::Add => true,
            Verb::Remove => !is_last(&fleet.disks[disk].name),
            Verb::Drain | Verb::Undrain => false,
        };
        Self { verb, disk, saves: saves && fleet.world.does(rng, Kind::Save, 50) }
    }

    /// The same, which the configuration does not have.
    pub(super) fn unsaved(self) -> Self {
        Self { saves: false, ..self }
    }

    /// Whether it takes the disk out of the configuration.
    pub(super) fn is_saved_removal(self) -> bool {
        self.saves && self.verb == Verb::Remove
    }

    pub(super) fn args(self, fleet: &Fleet<'_>) -> Outcome<Vec<String>> {
        let disk = &fleet.disks[self.disk];
        let mut args = ["ctl", "--control", text(&fleet.control)?].map(str::to_owned).to_vec();
        let verb = match self.verb {
            Verb::Add => "add",
            Verb::Remove => "remove",
            Verb::Drain => "drain",
            Verb::Undrain => "undrain",
        };
        args.push(verb.to_owned());
        if self.verb == Verb::Add {
            for (key, value) in disk.options(&fleet.world)? {
                args.push(format!("--{key}"));
                // What is on or off in a configuration is an option without a value.
                args.extend((key != "ephemeral").then_some(value));
            }
            args.push(disk.image()?.to_owned());
        } else {
            args.push(disk.name.clone());
        }
        args.extend(self.saves.then(|| "--save".to_owned()));
        fleet.tell(format_args!("  {args:?}"));
        Ok(args)
    }

    /// Clients of the disk lose it.
    pub(super) fn warn(self, parties: &[Party]) {
        if matches!(self.verb, Verb::Drain | Verb::Remove) {
            stage_of(self.disk, parties).inspect(|party| party.stage.enter(Phase::Ending));
        }
    }

    /// What the server and the configuration have once it is done.
    fn is_done(self, fleet: &mut Fleet<'_>, server: &mut Server, parties: &[Party]) {
        fleet.world.counts.members.add();
        let name = fleet.disks[self.disk].name.clone();
        if matches!(self.verb, Verb::Drain | Verb::Remove) {
            // Its image is closed.
            match stage_of(self.disk, parties) {
                Some(party) => party.stage.board().model.closed(),
                None => fleet.disks[self.disk].model.closed(),
            }
        }
        let disk = &mut fleet.disks[self.disk];
        match self.verb {
            Verb::Add => {
                (disk.standing, disk.source) = (Standing::Serving, Source::Command);
                server.absent_by_command.remove(&name);
            }
            Verb::Remove => {
                server.absent_by_command.insert(name.clone());
                (disk.standing, disk.is_thrown_away) = (Standing::Absent, true);
            }
            Verb::Drain => disk.standing = Standing::Drained,
            Verb::Undrain => disk.standing = Standing::Serving,
        }
        self.note_saved(fleet);
    }

    /// What the disk may be once it is done, if a server may have taken over before or since.
    pub(super) fn standings(self) -> &'static [Standing] {
        match self.verb {
            Verb::Add => &[Standing::Serving],
            // The new server keeps what its configuration lists, closed.
            Verb::Remove => &[Standing::Absent, Standing::Drained],
            // What the configuration does not list any more is gone.
            Verb::Drain => &[Standing::Drained, Standing::Absent],
            Verb::Undrain => &[Standing::Serving, Standing::Absent],
        }
    }

    /// The configuration has it, if it was to be saved.
    pub(super) fn note_saved(self, fleet: &mut Fleet<'_>) {
        if self.saves {
            let name = fleet.disks[self.disk].name.clone();
            self.save(&mut fleet.listed, name);
        }
    }

    fn save(self, listed: &mut std::collections::BTreeSet<String>, name: String) {
        match self.verb {
            Verb::Add => listed.insert(name),
            _ => listed.remove(&name),
        };
    }

    /// Gives the order, which has to be carried out.
    pub(super) fn give(
        self,
        fleet: &mut Fleet<'_>,
        server: &mut Server,
        parties: &[Party],
    ) -> Outcome {
        let args = self.args(fleet)?;
        self.warn(parties);
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let said = fleet.world.mica(&args)?;
        done(said, server)?;
        self.is_done(fleet, server, parties);
        Ok(())
    }

    /// The client is killed over it. The server may carry it out all the same, the configuration
    /// has it or not; then it is asked for again.
    pub(super) fn give_and_kill_the_client(
        self,
        fleet: &mut Fleet<'_>,
        rng: &mut Rng,
        server: &mut Server,
        parties: &[Party],
    ) -> Outcome {
        let before = fleet.listed.clone();
        let args = self.args(fleet)?;
        self.warn(parties);
        let pause = Duration::from_micros(rng.below(20_000));
        fleet.tell(format_args!("    whose client is killed after {pause:?}"));
        let mut client = spawn(fleet, &args)?;
        clock::sleep(pause);
        // It may have ended.
        let _ = client.kill();
        client.wait()?;
        fleet.world.counts.ctl_kills.add();
        let mut after = before.clone();
        if self.saves {
            self.save(&mut after, fleet.disks[self.disk].name.clone());
        }
        let listed = fleet.read_config()?;
        if listed != before && listed != after {
            let what = format!("a killed client left {listed:?} of {before:?}, or {after:?}");
            return Err(Fault::new(Wrong::Configuration, what));
        }
        fleet.listed = listed;
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let said = fleet.world.mica(&args)?;
        let is_saved_now = said.status.success() && self.saves;
        fleet.tell(format_args!("    and again: {}", said.stderr.trim()));
        let listed = if is_saved_now { after } else { fleet.listed.clone() };
        // Whoever came first, the server has done it.
        self.is_done(fleet, server, parties);
        fleet.listed = listed;
        fleet.wait_for(self.disk)
    }

    /// The server is killed over it. What succeeded is in the configuration, and nothing else.
    pub(super) fn give_and_kill_the_server(
        self,
        fleet: &mut Fleet<'_>,
        rng: &mut Rng,
        server: Server,
    ) -> Outcome {
        let args = self.args(fleet)?;
        let pause = Duration::from_micros(rng.below(20_000));
        fleet.tell(format_args!("    whose server is killed after {pause:?}"));
        let mut client = spawn(fleet, &args)?;
        clock::sleep(pause);
        server.kill(fleet)?;
        let status =
            command::wait(&mut client, LIMIT).ok_or_else(|| trouble("ctl does not end"))?;
        if status.success() {
            self.note_saved(fleet);
        }
        Ok(())
    }
}

fn stage_of(disk: usize, parties: &[Party]) -> Option<&Party> {
    parties.iter().find(|party| party.disk == disk)
}

fn spawn(fleet: &Fleet<'_>, args: &[String]) -> Outcome<Child> {
    let mut ctl = Command::new(fleet.world.binary);
    let ctl = ctl.current_dir(&fleet.world.images).args(args);
    Ok(ctl.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?)
}

fn done(said: Finished, server: &Server) -> Outcome<Finished> {
    match said.status.success() {
        true => Ok(said),
        false => {
            let what = format!("{said}\n{}", server.log());
            Err(Fault::new(Wrong::Failed, what))
        }
    }
}

/// A disk is drained and served again at once: its clients come back.
pub(super) fn bounce(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    server: &mut Server,
    parties: &[Party],
) -> Outcome {
    let Some(disk) = serving(fleet, rng) else { return Ok(()) };
    if let Some(party) = stage_of(disk, parties) {
        party.stage.enter(Phase::Moving);
    }
    let name = fleet.disks[disk].name.clone();
    for verb in ["drain", "undrain"] {
        fleet.tell(format_args!("  {verb} {name}"));
        let args = ["ctl", "--control", text(&fleet.control)?, verb, &name];
        done(fleet.world.mica(&args)?, server)?;
        fleet.world.counts.members.add();
    }
    Ok(())
}

/// The configuration changes, and is read again.
pub(super) fn reload(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    server: &mut Server,
    parties: &[Party],
) -> Outcome {
    change_config(fleet, rng)?;
    read_again(fleet, server, parties)
}

/// A disk that is drained gets another setting in the configuration, which is read again.
pub(super) fn replace(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    server: &mut Server,
    parties: &[Party],
) -> Outcome {
    let is_drained = |disk: &&mut Disk| {
        let is_configured = disk.source == Source::Configuration;
        disk.standing == Standing::Drained && is_configured && fleet.listed.contains(&disk.name)
    };
    let mut drained: Vec<_> = fleet.disks.iter_mut().filter(is_drained).collect();
    if drained.is_empty() {
        return Ok(());
    }
    let at = index(rng, drained.len());
    fleet.world.story.tell(format_args!("  {} gets another setting", drained[at].name));
    drained[at].change_settings(rng);
    fleet.write_config()?;
    read_again(fleet, server, parties)
}

/// The configuration is read again as it is.
pub(super) fn read_again(fleet: &mut Fleet<'_>, server: &mut Server, parties: &[Party]) -> Outcome {
    for (number, disk) in fleet.disks.iter_mut().enumerate() {
        let is_listed = fleet.listed.contains(&disk.name);
        if is_listed || disk.source == Source::Command || disk.standing == Standing::Absent {
            continue;
        }
        if let Some(party) = stage_of(number, parties) {
            party.stage.enter(Phase::Ending);
        }
    }
    let args = ["ctl", "--control", text(&fleet.control)?, "reload"];
    let said = fleet.world.mica(&args)?;
    fleet.tell(format_args!("  reload: {}", said.stdout.trim()));
    drop(done(said, server)?);
    fleet.world.counts.members.add();
    server.absent_by_command.clear();
    for (number, disk) in fleet.disks.iter_mut().enumerate() {
        let is_listed = fleet.listed.contains(&disk.name);
        match (is_listed, disk.standing, disk.source) {
            (true, Standing::Absent, _) => disk.standing = Standing::Serving,
            (false, Standing::Serving | Standing::Drained, Source::Configuration) => {
                match stage_of(number, parties) {
                    Some(party) => party.stage.board().model.closed(),
                    None => disk.model.closed(),
                }
                (disk.standing, disk.is_thrown_away) = (Standing::Absent, true);
            }
            _ => {}
        }
        if is_listed {
            disk.source = Source::Configuration;
        }
    }
    Ok(())
}

/// A person adds a disk to the configuration, or takes one out.
pub(super) fn change_config(fleet: &mut Fleet<'_>, rng: &mut Rng) -> Outcome {
    let disk = index(rng, fleet.disks.len());
    let name = fleet.disks[disk].name.clone();
    if !fleet.listed.contains(&name) {
        fleet.listed.insert(name);
    } else if fleet.listed.len() > 1 {
        fleet.listed.remove(&name);
    }
    fleet.write_config()
}

/// A disk gets longer under its clients.
pub(super) fn grow(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    server: &mut Server,
    parties: &[Party],
) -> Outcome {
    let Some(disk) = serving(fleet, rng) else { return Ok(()) };
    let party = stage_of(disk, parties);
    let len = party.map_or(fleet.disks[disk].model.len(), |party| party.stage.board().model.len());
    let Some(longer) = Disk::longer(len, rng) else { return Ok(()) };
    let (name, size) = (fleet.disks[disk].name.clone(), (longer * SECTOR as u64).to_string());
    fleet.tell(format_args!("  resize {name} {size}"));
    let args = ["ctl", "--control", text(&fleet.control)?, "resize", &name, &size];
    done(fleet.world.mica(&args)?, server)?;
    fleet.world.counts.resizes.add();
    match party {
        Some(party) => party.stage.board().model.resize(longer),
        None => fleet.disks[disk].model.resize(longer),
    }
    Ok(())
}

fn serving(fleet: &Fleet<'_>, rng: &mut Rng) -> Option<usize> {
    let serving = fleet.disks.iter().enumerate().filter(|(_, disk)| disk.is_serving());
    let serving: Vec<_> = serving.map(|(number, _)| number).collect();
    (!serving.is_empty()).then(|| rng.choose(&serving))
}
