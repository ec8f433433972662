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

mod read;

use crate::settings::{DiskSettings, ImageSettings, IoSettings, ProcessSettings, StatsSettings};
use crate::systemd::has_inherited_sockets;
use mica_block::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
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
    /// The program that calls [`crate::run_helper`] when started with [`crate::HELPER_VERB`]: a
    /// process of it does what the sandbox forbids.
    pub helper: Option<PathBuf>,
    /// The line of each disk, if they are from a file.
    pub lines: Vec<usize>,
}

/// One disk: its name, its image and its settings.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// Its name, unique among the disks.
    pub name: String,
    /// The image to open first: for a chain, its active layer.
    pub image: PathBuf,
    /// How it is served, and where.
    pub settings: DiskSettings,
    /// How its images are opened.
    pub images: ImageSettings,
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
        let mut config = read::config(&text).map_err(|error| {
            // The parser's own message quotes the file on several lines; ours is one line.
            let read::Misread { disk, error } = error;
            let at = error.span().map_or(0, |span| read::line(&text, span.start));
            let disk = disk.map(|name| format!("disk {name:?}: ")).unwrap_or_default();
            let context = format!("{}: line {at}: {disk}{}", named(), error.message());
            Error::new(ErrorKind::Invalid, context)
        })?;
        let folder = std::path::absolute(file).map_err(|error| Error::from_io(named(), error))?;
        config.resolve(folder.parent().unwrap_or(Path::new("/")));
        Ok(config)
    }

    /// Whether a disk may be served at sockets that its settings do not name: those of systemd's
    /// units, which a process that takes over gets from the one before it.
    fn may_inherit_sockets(&self) -> bool {
        self.takeover || has_inherited_sockets()
    }

    /// Doorbells of virtual machines that may have to be rung at the same time.
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

    /// Checks everything that can be checked without opening anything.
    ///
    /// # Errors
    /// `Invalid` with what is wrong.
    pub fn check(&self) -> Result<()> {
        let invalid = |what: String| Err(Error::new(ErrorKind::Invalid, what));
        if self.disks.is_empty() {
            return invalid("no disk to serve".to_owned());
        }
        if self.stats.stats_file.is_some() && self.disks.len() > 1 {
            let what = "stats-file covers a single disk; use `mica ctl stats`";
            return invalid(what.to_owned());
        }
        let (mut names, mut used) = (BTreeSet::new(), BTreeSet::new());
        for (index, disk) in self.disks.iter().enumerate() {
            let name = &disk.name;
            let named = |what: String| match self.lines.get(index) {
                Some(line) => format!("line {line}: disk {name:?}: {what}"),
                None => format!("disk {name:?}: {what}"),
            };
            if let Some(what) = self.problem_of(disk) {
                return invalid(named(what));
            }
            if !names.insert(name) {
                return invalid(named("another disk has this name".to_owned()));
            }
            for endpoint in disk.endpoints() {
                if !endpoint.is_any_port() && !used.insert(endpoint.0.clone()) {
                    return invalid(named(format!("{} is used twice", endpoint.0)));
                }
            }
        }
        Ok(())
    }

    /// What is wrong with a disk by itself, if anything is.
    fn problem_of(&self, disk: &DiskConfig) -> Option<String> {
        let name = &disk.name;
        let has_sockets = self.may_inherit_sockets();
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(is_plain) {
            let what = format!("a name has 1 to {NAME_BYTES_MAX} letters, digits, -, _ or .");
            return Some(what);
        }
        if let Some(what) = disk.ephemeral_problem(self.takeover) {
            return Some(format!("ephemeral {what}"));
        }
        if let Some(what) = disk.settings.ineffective_option(has_sockets) {
            return Some(what);
        }
        if disk.settings.shared == Some(0) {
            let what = "shared 0 would admit no NBD client (with qemu-nbd it means no limit): use \
                        a number from 1 on, or leave it out for 256";
            return Some(what.to_owned());
        }
        if disk.endpoints().is_empty() && !has_sockets {
            return Some("nowhere to serve it: add nbd, vhost-user or fuse".to_owned());
        }
        None
    }
}

/// Most doorbells with a ring of their own, which costs a descriptor and some memory.
const DOORBELLS_MAX: usize = 1024;
/// Longest name of a disk.
const NAME_BYTES_MAX: usize = 64;

/// Something that only one server can listen on or mount over.
struct Endpoint(String);

impl Endpoint {
    /// Whether the system chooses the port.
    fn is_any_port(&self) -> bool {
        self.0.starts_with("tcp:") && self.0.ends_with(":0")
    }
}

impl DiskConfig {
    /// A disk with default settings.
    pub fn new(name: String, image: PathBuf) -> Self {
        let (settings, images) = Default::default();
        Self { name, image, settings, images }
    }

    /// Why it cannot be ephemeral, if it is to be.
    fn ephemeral_problem(&self, takeover: bool) -> Option<&'static str> {
        let DiskSettings { ephemeral, read_only, load_snapshot, .. } = &self.settings;
        match () {
            () if !ephemeral => None,
            () if *read_only || load_snapshot.is_some() => {
                Some("is for disks that are written: leave it out, or read-only and load-snapshot")
            }
            () if !self.images.is_file() => Some("needs an image: a disk of zeros has none"),
            () if takeover => {
                Some("cannot take over: its clients would lose what they wrote; restart instead")
            }
            () => None,
        }
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        let DiskSettings { nbd, vhost_user, fuse, .. } = &self.settings;
        let paths = vhost_user.iter().chain(fuse).map(|path| path.display().to_string());
        nbd.iter().cloned().chain(paths).map(Endpoint).collect()
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
