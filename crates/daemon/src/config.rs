//! What is served, and how: from the command line, or from a TOML file whose keys are the options
//! of the command line.
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

mod read;

use crate::settings::{DiskSettings, ImageSettings, IoSettings, ProcessSettings, StatsSettings};
use crate::systemd::has_inherited_sockets;
use crate::ublk;
use mica_block::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// All that a process serves.
#[derive(Clone, Default, Debug)]
pub struct Config {
    /// The disks; at least one.
    pub disks: Vec<DiskConfig>,
    /// What is said of the process.
    pub process: ProcessSettings,
    /// How I/O is done.
    pub io: IoSettings,
    /// Where the figures of the run are written at its end.
    pub stats: StatsSettings,
    /// Whether the process behind the control socket is taken over.
    pub takeover: bool,
    /// The program that calls [`crate::run_helper`] when it is started with
    /// [`crate::HELPER_VERB`]: what a sandbox refuses is done by a process of it.
    pub helper: Option<PathBuf>,
}

/// One disk, and where it is served.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// What it is called wherever disks are told apart.
    pub name: String,
    /// The image: for a chain, its active layer as the disk is opened.
    pub image: PathBuf,
    /// How it is served, and where.
    pub settings: DiskSettings,
    /// How its images are opened.
    pub images: ImageSettings,
}

impl Config {
    /// Reads a configuration. Paths in it start from its own folder.
    ///
    /// # Errors
    /// If it cannot be read, or says something that is not understood: where, and what.
    pub fn read(file: &Path) -> Result<Self> {
        let named = || file.display().to_string();
        let text = std::fs::read_to_string(file).map_err(|error| Error::from_io(named(), error))?;
        let mut config = read::config(&text).map_err(|error| {
            // The parser's message shows the line on several lines; a message of ours is one line.
            let line =
                |at: usize| text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count();
            let at = error.span().map_or(0, |span| line(span.start) + 1);
            let context = format!("{}: line {at}: {}", named(), error.message());
            Error::new(ErrorKind::Invalid, context)
        })?;
        let folder = std::path::absolute(file).map_err(|error| Error::from_io(named(), error))?;
        config.resolve(folder.parent().unwrap_or(Path::new("/")));
        config.check().map_err(|error| error.wrap(named()))?;
        Ok(config)
    }

    /// Bells of machines that may have to be rung at the same time.
    pub(crate) fn doorbells(&self) -> usize {
        let devices = self.disks.iter().filter(|disk| disk.settings.vhost_user.is_some());
        let queues = devices.map(|disk| usize::from(disk.settings.num_queues()));
        queues.sum::<usize>().min(DOORBELLS_MAX)
    }

    /// Starts relative paths from `folder`.
    fn resolve(&mut self, folder: &Path) {
        self.process.resolve(folder);
        self.stats.resolve(folder);
        for disk in &mut self.disks {
            disk.resolve(folder);
        }
    }

    /// Whether it can be served, as far as that can be seen without opening anything.
    ///
    /// # Errors
    /// `Invalid` with what is wrong.
    pub fn check(&self) -> Result<()> {
        let invalid = |what: String| Err(Error::new(ErrorKind::Invalid, what));
        if self.disks.is_empty() {
            return invalid("there is no disk to serve".to_owned());
        }
        if self.stats.stats_file.is_some() && self.disks.len() > 1 {
            let what = "stats-file is of one disk: `mica ctl stats` tells of many";
            return invalid(what.to_owned());
        }
        let (mut names, mut sockets) = (BTreeSet::new(), BTreeSet::new());
        for disk in &self.disks {
            let name = &disk.name;
            let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
            if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(is_plain) {
                return invalid(format!(
                    "disk {name:?}: a name has 1 to {NAME_BYTES_MAX} letters, digits, -, _ or ."
                ));
            }
            if !names.insert(name) {
                return invalid(format!("two disks are called {name:?}"));
            }
            if disk.settings.ublk {
                return Err(ublk::refusal(name));
            }
            if let Some(what) = disk.settings.ineffective_option(has_inherited_sockets()) {
                return invalid(format!("disk {name:?}: {what}"));
            }
            let places = disk.places();
            if places.is_empty() && !has_inherited_sockets() {
                return invalid(format!(
                    "disk {name:?}: nothing says where it is served: add nbd, vhost-user or fuse"
                ));
            }
            for place in places {
                if !place.is_any_port() && !sockets.insert(place.0.clone()) {
                    return invalid(format!("disk {name:?}: {} is taken twice", place.0));
                }
            }
        }
        Ok(())
    }
}

/// Bells of which each has a ring of its own, that is a descriptor and some memory.
const DOORBELLS_MAX: usize = 1024;
/// Longest name of a disk.
const NAME_BYTES_MAX: usize = 64;

/// Somewhere that only one server can be.
struct Place(String);

impl Place {
    /// A port that the system chooses.
    fn is_any_port(&self) -> bool {
        self.0.starts_with("tcp:") && self.0.ends_with(":0")
    }
}

impl DiskConfig {
    /// A disk of which nothing else is said.
    pub fn new(name: String, image: PathBuf) -> Self {
        let (settings, images) = Default::default();
        Self { name, image, settings, images }
    }

    fn places(&self) -> Vec<Place> {
        let DiskSettings { nbd, vhost_user, fuse, .. } = &self.settings;
        let paths = vhost_user.iter().chain(fuse).map(|path| path.display().to_string());
        nbd.iter().cloned().chain(paths).map(Place).collect()
    }

    /// Starts relative paths from `folder`.
    fn resolve(&mut self, folder: &Path) {
        if self.images.is_file() {
            self.image = folder.join(&self.image);
        }
        self.settings.resolve(folder);
        self.images.resolve(folder);
    }
}

#[cfg(test)]
mod tests;
