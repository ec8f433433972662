//! What is served and how, from the command line or from a TOML file whose keys are the options of
//! the command line.
//!
//! ```toml
//! control = "/run/mica/control.sock"
//!
//! [[disk]]
//! name = "web1"
//! image = "/var/lib/vm/web1.qcow2"
//! vhost-user = "/run/mica/web1.sock"
//! nbd = ["/run/mica/web1.nbd"]
//! bps = "200M"
//! ```

mod gone;
mod read;

pub(crate) use gone::{GoneDisk, GoneDisks};
pub(crate) use read::similar;

use crate::held::is_socket_name;
use crate::opened::Shown;
use crate::places::{Places, Resident};
use crate::settings::{
    DiskSettings, ImageSettings, IoSettings, ProcessSettings, SandboxMode, StatsSettings,
    VolumeSettings,
};
use crate::systemd::has_inherited_sockets;
use mica_block::{Error, ErrorKind, Result};
use mica_stack::{LogPlace, StoreFaults};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// All that a process serves.
#[derive(Clone, Default, Debug)]
pub struct Config {
    /// The disks; at least one.
    pub disks: Vec<DiskConfig>,
    /// Settings of the process.
    pub process: ProcessSettings,
    /// How I/O is done.
    pub io: IoSettings,
    /// Where the figures of the run are written at its end.
    pub stats: StatsSettings,
    /// Whether to take over from the process behind the control socket.
    pub takeover: bool,
    /// The file that it was read from.
    pub(crate) file: Option<PathBuf>,
    /// The same, as it was named.
    pub(crate) named: Option<PathBuf>,
    /// What that file says of the process: the command line may say otherwise.
    pub(crate) process_in_file: ProcessSettings,
    /// Of the disks, those that somebody added by command to the process that is taken over.
    pub(crate) added: BTreeSet<String>,
    /// Of the disks, those that are not opened: they were drained or removed there, perhaps not
    /// without loss.
    pub(crate) drained: BTreeMap<String, LeftClosed>,
    /// Of the disks, those that the process that is taken over serves at addresses that they share.
    pub(crate) served: BTreeSet<String>,
    /// The program that calls [`crate::run_helper`] when started with [`crate::HELPER_VERB`]: a
    /// process of it does what the sandbox forbids.
    pub helper: Option<PathBuf>,
    /// The line of each disk, if they are from a file.
    pub lines: Vec<usize>,
}

/// One disk: its name, its image and its settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskConfig {
    /// Its name, unique among the disks.
    pub name: String,
    /// The image to open first: for a chain, its active layer. Of a volume, its URL.
    pub image: PathBuf,
    /// How it is served, and where.
    pub settings: DiskSettings,
    /// How its images are opened.
    pub images: ImageSettings,
    /// The volume, if it is one.
    pub volume: VolumeSettings,
}

/// How a disk was left that is closed.
#[derive(Clone, Default, Debug)]
pub(crate) struct LeftClosed {
    /// What went wrong when it was closed.
    pub(crate) loss: Option<String>,
    pub(crate) shown: Shown,
}

/// A disk that another process does not serve as the configuration says.
#[derive(Serialize, Deserialize, Clone, Default, Debug)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct HandedOver {
    pub(crate) name: String,
    /// Its table, if somebody added it by command.
    pub(crate) table: Option<Map<String, Value>>,
    /// Whether it was drained or removed.
    pub(crate) is_closed: bool,
    /// What went wrong when it was closed.
    #[serde(default)]
    pub(crate) loss: Option<String>,
    /// Whether it is served there. Told of disks that share an address, or the image of one that is
    /// closed. Older processes have none.
    #[serde(default)]
    pub(crate) is_served: bool,
    /// Its image if it is closed: the configuration may have given the disk another name.
    #[serde(default)]
    pub(crate) image: Option<String>,
    /// What it shows if it is closed.
    #[serde(default)]
    pub(crate) shown: Shown,
}

impl Config {
    /// Reads a configuration file. Relative paths in it start from its folder. What it asks for is
    /// not checked: that depends on more ([`Config::check`]).
    ///
    /// # Errors
    /// If it cannot be read or is not understood: where, and what.
    pub fn read(file: &Path) -> Result<Self> {
        let named = || file.display().to_string();
        let text = std::fs::read_to_string(file).map_err(|error| Error::from_io(named(), error))?;
        Self::parse(file, &text)
    }

    /// What is understood of a configuration file, and all that is not.
    ///
    /// # Errors
    /// If nothing can be read.
    pub fn read_all(file: &Path) -> Result<(Self, Vec<Error>)> {
        let text = std::fs::read_to_string(file)
            .map_err(|error| Error::from_io(file.display().to_string(), error))?;
        Self::parse_all(file, &text)
    }

    /// Understands the `text` of a configuration file.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(crate) fn parse(file: &Path, text: &str) -> Result<Self> {
        let (config, misread) = Self::parse_all(file, text)?;
        misread.into_iter().next().map_or(Ok(config), Err)
    }

    /// What is understood of it, and all that is not.
    fn parse_all(file: &Path, text: &str) -> Result<(Self, Vec<Error>)> {
        let named = || file.display().to_string();
        let (mut config, misread) = read::config(text);
        let said = |misread: &read::Misread| {
            Error::new(ErrorKind::Invalid, format!("{}: {}", named(), misread.said(text)))
        };
        let misread = misread.iter().map(said).collect();
        let folder = std::path::absolute(file).map_err(|error| Error::from_io(named(), error))?;
        config.resolve(folder.parent().unwrap_or(Path::new("/")));
        (config.file, config.named) = (Some(folder), Some(file.to_owned()));
        config.process_in_file = config.process.clone();
        Ok((config, misread))
    }

    /// The file, and the line at which the table of a disk begins there, if it is from a file.
    pub(crate) fn line(&self, index: usize) -> Option<String> {
        let file = self.named.as_deref()?.display();
        self.lines.get(index).map(|line| format!("{file}: line {line}"))
    }

    /// A disk as messages name it: with file and line, if it is from a file.
    pub fn place(&self, index: usize) -> String {
        let name = self.disks.get(index).map_or("", |disk| &disk.name);
        match self.line(index) {
            Some(line) => format!("{line}: disk {name:?}"),
            None => format!("disk {name:?}"),
        }
    }

    /// Takes over what was done by command in another process.
    ///
    /// # Errors
    /// `Invalid` if a disk that was added there is another one here.
    pub(crate) fn take_over(&mut self, disks: Vec<HandedOver>) -> Result<()> {
        let (mut gone, mut told) = (GoneDisks::default(), BTreeSet::new());
        for disk in disks {
            let HandedOver { name, table, is_closed, loss, is_served, image, shown } = disk;
            if is_served {
                self.served.insert(name.clone());
            }
            let own = self.disks.iter().find(|disk| disk.name == name);
            let is_known = own.is_some() || table.is_some();
            let added = table.as_ref().map(DiskConfig::from_table).transpose()?;
            match (own, added) {
                (Some(own), Some(added)) if !own.differences(&added)?.is_empty() => {
                    let what = format!(
                        "disk {name:?}: the other process serves it with settings that differ from \
                         the configuration ({}): remove it there",
                        own.differences(&added)?.join(", ")
                    );
                    return Err(Error::new(ErrorKind::Invalid, what));
                }
                (None, Some(added)) => {
                    self.added.insert(name.clone());
                    self.disks.push(added);
                }
                (Some(_), _) | (None, None) => {}
            }
            told.insert(name.clone());
            let left = LeftClosed { loss, shown };
            match image {
                _ if !is_closed => {}
                Some(image) if !is_known => {
                    gone.add(PathBuf::from(image), GoneDisk { name, left });
                }
                _ => drop(self.drained.insert(name, left)),
            }
        }
        for disk in &self.disks {
            if let Some(gone) = gone.renamed(disk, |name| told.contains(name)) {
                self.drained.insert(disk.name.clone(), gone.left.clone());
            }
        }
        Ok(())
    }

    /// Whether a disk may be served at sockets that its settings do not name: those of systemd's
    /// units, which a process that takes over gets from the one before it.
    fn may_inherit_sockets(&self) -> bool {
        self.takeover || has_inherited_sockets()
    }

    /// Doorbells of virtual machines: one for each queue.
    pub(crate) fn doorbells(&self) -> usize {
        let later = if self.process.disks_in.is_empty() { 0 } else { DOORBELLS_LATER };
        (self.queues() + later).min(DOORBELLS_MAX)
    }

    /// Doorbells more that may have to be rung at the same time: a front end may name another one
    /// for a queue that still has the one before.
    pub(crate) fn second_doorbells(&self) -> usize {
        self.queues().min(DOORBELLS_MAX - self.doorbells())
    }

    /// Queues of virtual machines.
    fn queues(&self) -> usize {
        let devices = self.disks.iter().filter(|disk| disk.settings.vhost_user.is_some());
        devices.map(|disk| usize::from(disk.settings.num_queues())).sum()
    }

    /// Starts relative paths from `folder`.
    fn resolve(&mut self, folder: &Path) {
        self.process.resolve(folder);
        self.stats.resolve(folder);
        for disk in &mut self.disks {
            disk.resolve(folder);
        }
    }

    /// Checks everything that can be checked without opening anything.
    ///
    /// # Errors
    /// `Invalid` with what is wrong first.
    pub fn check(&self) -> Result<()> {
        self.problems(self.may_inherit_sockets()).into_iter().next().map_or(Ok(()), Err)
    }

    /// All that is wrong as far as it can be seen without opening anything. `has_sockets` if disks
    /// may be served at sockets that their settings do not name.
    pub(crate) fn problems(&self, has_sockets: bool) -> Vec<Error> {
        let mut all = Vec::new();
        let file = self.named.as_ref().map(|file| format!("{}: ", file.display()));
        let file = file.unwrap_or_default();
        let mut invalid =
            |what: &str| all.push(Error::new(ErrorKind::Invalid, format!("{file}{what}")));
        if self.disks.is_empty() && self.process.control.is_none() {
            invalid("no disk to serve, and no control socket to add one");
        }
        if self.stats.stats_file.is_some() && self.disks.len() > 1 {
            invalid("stats-file covers a single disk; use `mica ctl stats`");
        }
        let (mut names, mut places) = (BTreeMap::new(), Places::default());
        for (index, disk) in self.disks.iter().enumerate() {
            let name = &disk.name;
            let mut invalid = |what: String| {
                let place = self.place(index);
                all.push(Error::new(ErrorKind::Invalid, format!("{place}: {what}")));
            };
            disk.problem(has_sockets).into_iter().for_each(&mut invalid);
            if disk.volume.is_in_pool() && self.process.sandbox() != SandboxMode::Off {
                invalid(NO_ROOM_FOR_POOLS.to_owned());
            }
            if disk.settings.ephemeral && self.takeover {
                let what = "ephemeral cannot take over: its clients would lose what they wrote; \
                            restart instead";
                invalid(what.to_owned());
            }
            if names.contains_key(name) {
                // Where it would be is in dispute then.
                invalid("another disk has this name".to_owned());
                continue;
            }
            names.insert(name, index);
            if let Err(conflict) = places.add(disk.resident(), &[]) {
                let with = format!("the disk {:?}", conflict.with);
                let other = names.get(&conflict.with).and_then(|index| self.lines.get(*index));
                let shown = other.map_or(with.clone(), |line| format!("{with} (line {line})"));
                invalid(conflict.describe(&shown));
            }
        }
        all
    }
}

/// Most doorbells with a ring of their own, which costs a descriptor and some memory.
const DOORBELLS_MAX: usize = 1024;
/// Doorbells for disks that are added later. Further ones share a ring.
const DOORBELLS_LATER: usize = 64;
/// Why a volume in a pool of Ceph is not served.
pub(crate) const NO_ROOM_FOR_POOLS: &str =
    "the sandbox has no room for librados, which volumes in a pool need: add --sandbox off";
/// Longest name of a disk.
const NAME_BYTES_MAX: usize = 64;

impl DiskConfig {
    /// A disk with default settings.
    pub fn new(name: String, image: PathBuf) -> Self {
        let (settings, images, volume) = Default::default();
        Self { name, image, settings, images, volume }
    }

    /// A disk that is this volume, or a snapshot of one.
    pub fn of_volume(name: String, volume: VolumeSettings) -> Self {
        let image = PathBuf::from(volume.volume.clone().unwrap_or_default());
        Self { volume, ..Self::new(name, image) }
    }

    /// Whether the image is a file: a volume is none, nor is a disk of zeros.
    pub(crate) fn is_file(&self) -> bool {
        self.volume.volume.is_none() && self.images.is_file()
    }

    /// Whether what is served is opened for writing.
    pub(crate) fn writes(&self) -> bool {
        self.settings.writes() && !self.volume.is_snapshot()
    }

    /// The log of its volume, if it is written.
    pub(crate) fn log(&self) -> Option<LogPlace> {
        self.volume.log().filter(|_| self.writes())
    }

    /// The same without what counts for the first opening only.
    #[must_use]
    pub fn kept(&self) -> Self {
        let mut kept = self.clone();
        kept.volume.force = false;
        kept
    }

    /// Reads the table of a disk in a configuration file, as JSON.
    ///
    /// # Errors
    /// `Invalid` with what is not understood.
    pub fn from_table(table: &Map<String, Value>) -> Result<Self> {
        read::disk::<serde_json::Error>(&Value::Object(table.clone())).map_err(|error| {
            let what = read::in_plain_words(&error.to_string());
            Error::new(ErrorKind::Invalid, format!("the table of a disk: {what}"))
        })
    }

    /// The name under which NBD clients find it.
    pub(crate) fn export_name(&self) -> &str {
        self.settings.export_name.as_deref().unwrap_or(&self.name)
    }

    /// What matters of it for where it may be.
    pub(crate) fn resident(&self) -> Resident<'_> {
        Resident { disk: &self.name, export: self.export_name(), settings: &self.settings }
    }

    /// Keeps the overlay of `before`, a disk of this name whose place it takes, if both are
    /// ephemeral. What is written above another image, or above one that is read as another format,
    /// would be no part of this disk.
    pub(crate) fn go_on_from(&mut self, before: &Self) {
        let is_same_image =
            self.image == before.image && self.images.format == before.images.format;
        if self.settings.ephemeral && before.settings.ephemeral && is_same_image {
            self.settings.overlay.clone_from(&before.settings.overlay);
        }
    }

    /// The table of this disk in a configuration file, as JSON, without what is the default.
    ///
    /// # Errors
    /// `Invalid` if a path is not text.
    pub fn to_table(&self) -> Result<Map<String, Value>> {
        let default = Self::new(String::new(), PathBuf::new()).all_keys()?;
        let mut table = self.all_keys()?;
        table.retain(|key, value| default.get(key) != Some(value));
        Ok(table)
    }

    /// The keys in which it differs from `other`.
    ///
    /// # Errors
    /// As [`Self::to_table`].
    pub(crate) fn differences(&self, other: &Self) -> Result<Vec<String>> {
        let (own, other) = (self.all_keys()?, other.all_keys()?);
        let keys: BTreeSet<_> = own.keys().chain(other.keys()).collect();
        let differs = |key: &&&String| own.get(**key) != other.get(**key);
        Ok(keys.iter().filter(differs).map(|key| (*key).clone()).collect())
    }

    fn all_keys(&self) -> Result<Map<String, Value>> {
        let no_text = |error: serde_json::Error| {
            Error::new(ErrorKind::Invalid, format!("disk {:?}: {error}", self.name))
        };
        let mut all = Map::new();
        all.insert("name".to_owned(), json!(self.name));
        if self.volume.volume.is_none() {
            let image = serde_json::to_value(&self.image).map_err(no_text)?;
            all.insert("image".to_owned(), image);
        }
        let settings = serde_json::to_value(&self.settings).map_err(no_text)?;
        let images = serde_json::to_value(&self.images).map_err(no_text)?;
        let volume = serde_json::to_value(&self.volume).map_err(no_text)?;
        for part in [settings, images, volume] {
            let Value::Object(part) = part else { continue };
            all.extend(part.into_iter().filter(|(_, value)| !value.is_null()));
        }
        Ok(all)
    }

    /// What is wrong with it by itself, if anything is, as far as it can be seen without opening
    /// anything. `has_sockets` if sockets may have been passed for it.
    pub(crate) fn problem(&self, has_sockets: bool) -> Option<String> {
        let name = &self.name;
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(is_plain) {
            let what = format!("a name has 1 to {NAME_BYTES_MAX} letters, digits, -, _ or .");
            return Some(what);
        }
        if is_socket_name(name) {
            return Some("sockets have such names: use another".to_owned());
        }
        if let Some(what) = self.ephemeral_problem() {
            return Some(format!("ephemeral {what}"));
        }
        if let Some(what) = self.volume_problem() {
            return Some(what);
        }
        if let Some(what) = self.settings.ineffective_option(has_sockets) {
            return Some(what);
        }
        if self.settings.shared == Some(0) {
            let what = "shared 0 would admit no NBD client (with qemu-nbd it means no limit): use \
                        a number from 1 on, or leave it out for 256";
            return Some(what.to_owned());
        }
        if !self.settings.has_place() && !has_sockets {
            return Some("nowhere to serve it: add nbd, vhost-user or fuse".to_owned());
        }
        None
    }

    /// Why it cannot be ephemeral, if it is to be.
    fn ephemeral_problem(&self) -> Option<&'static str> {
        let DiskSettings { ephemeral, read_only, load_snapshot, .. } = &self.settings;
        match () {
            () if !ephemeral => None,
            () if *read_only || load_snapshot.is_some() => {
                Some("is for disks that are written: leave it out, or read-only and load-snapshot")
            }
            () if !self.is_file() => {
                Some("needs an image: neither a volume nor a disk of zeros is one")
            }
            () => None,
        }
    }

    /// What is wrong with its volume, as far as its settings say.
    fn volume_problem(&self) -> Option<String> {
        let url = match self.volume.url() {
            Err(error) => return Some(error.in_one_line()),
            Ok(None) => return self.volume.ineffective_option(),
            Ok(Some(url)) => url,
        };
        if self.settings.load_snapshot.is_some() {
            return Some(format!(
                "load-snapshot is for images: name the snapshot of a volume behind an @, as in \
                 {}/{}@LABEL",
                url.store,
                url.name.as_str()
            ));
        }
        if let Err(error) = StoreFaults::new(&self.images.inject) {
            return Some(error.in_one_line());
        }
        if self.writes() {
            return self.volume.ineffective_option().or_else(|| self.volume.log_problem());
        }
        let option = self.volume.option_of_writers()?;
        Some(format!(
            "{option} is for volumes that are written, and this one is only read: leave it out"
        ))
    }

    /// Starts relative paths from `folder`.
    pub fn resolve(&mut self, folder: &Path) {
        let image = folder.join(&self.image);
        // What opens it says what to do with a URL, if it is told of that one.
        if self.is_file() && (!mica_stack::is_no_path(&self.image) || image.exists()) {
            self.image = image;
        }
        self.settings.resolve(folder);
        self.images.resolve(folder);
        self.volume.resolve(folder);
    }
}

#[cfg(test)]
mod tests;
