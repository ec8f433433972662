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

use crate::settings::{
    Aio, Cache, Discards, ImageConfig, IndexMode, OtherUsers, SandboxMode, Size, TlsMode,
    VerifyPeer, is_word, shared_memory,
};
use crate::systemd::has_inherited_sockets;
use crate::tls::Security;
use crate::ublk;
use mica_block::{Error, ErrorKind, Result};
use mica_serve::Rates;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// All that a process serves.
#[derive(Clone, Default, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Config {
    /// The disks; at least one.
    #[serde(rename = "disk", default)]
    pub disks: Vec<DiskConfig>,
    /// Threads that serve; as many as processors, if it is not said.
    pub queues: Option<usize>,
    /// How I/O is done.
    #[serde(default)]
    pub aio: Aio,
    /// Where the figures of the run are written at its end.
    pub stats_file: Option<PathBuf>,
    /// The unix socket by which the process is asked and told.
    pub control: Option<PathBuf>,
    /// The TCP address of the figures, for a collector or a browser.
    pub metrics: Option<SocketAddr>,
    /// Whether that may be beyond the loopback.
    #[serde(default)]
    pub metrics_public: bool,
    /// Whether the process gives up what serving does not need.
    #[serde(default)]
    pub sandbox: SandboxMode,
    /// Whether the process behind the control socket is taken over.
    #[serde(skip)]
    pub takeover: bool,
    /// The program that calls [`crate::run_helper`] when it is started with
    /// [`crate::HELPER_VERB`]: what a sandbox refuses is done by a process of it.
    #[serde(skip)]
    pub helper: Option<PathBuf>,
}

/// One disk, and where it is served.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct DiskConfig {
    /// What it is called wherever disks are told apart.
    pub name: String,
    /// The image: for a chain, its active layer.
    pub image: PathBuf,
    /// Where NBD clients connect.
    #[serde(default)]
    pub nbd: Vec<String>,
    /// Whether they use TLS; where there are certificates, over TCP they have to, if it is not
    /// said.
    pub tls: Option<TlsMode>,
    /// The directory of the certificates.
    pub tls_certificates: Option<PathBuf>,
    /// Whether clients have to show a certificate; they do, if it is not said.
    pub tls_verify_peer: Option<VerifyPeer>,
    /// Whether plain text may leave this machine.
    #[serde(default)]
    pub allow_plain_tcp: bool,
    /// Where the monitor of a machine connects.
    pub vhost_user: Option<PathBuf>,
    /// Whether it is a block device of this machine.
    #[serde(default)]
    pub ublk: bool,
    /// The file as which the disk is served, by FUSE.
    pub fuse: Option<PathBuf>,
    /// Whether other users may use that file; as far as the system allows it, if it is not said.
    pub allow_other: Option<OtherUsers>,
    /// Virtqueues of the vhost-user-blk device; 4, if it is not said.
    pub num_queues: Option<u16>,
    /// What a machine is told as the serial number of the device; the name, if it is not said.
    pub serial: Option<String>,
    /// Whether it is only read.
    #[serde(default)]
    pub read_only: bool,
    /// What becomes of space that clients do not need any more.
    #[serde(default)]
    pub discard: Discards,
    /// An internal snapshot to serve.
    pub load_snapshot: Option<String>,
    /// Name of the NBD export, besides the empty one.
    pub export_name: Option<String>,
    /// Text that NBD clients show with the export.
    pub description: Option<String>,
    /// Most NBD clients at one time; 256, if it is not said.
    pub shared: Option<usize>,
    /// Whether sidecars are used and written.
    #[serde(default)]
    pub index: IndexMode,
    /// Operations per second of a machine; zero is no limit.
    #[serde(default)]
    pub iops: u64,
    /// Operations that may come at once.
    #[serde(default)]
    pub iops_burst: u64,
    /// Bytes per second of a machine; zero is no limit.
    #[serde(default)]
    pub bps: Size,
    /// Bytes that may come at once.
    #[serde(default)]
    pub bps_burst: Size,
    /// Format of the image.
    #[serde(default = "qcow2")]
    pub format: String,
    /// Which files images may name: `none`, `beside`, or directories.
    #[serde(default, deserialize_with = "one_or_many")]
    pub names: Vec<PathBuf>,
    /// Directories whose files they may name besides.
    #[serde(default)]
    pub allow_path: Vec<PathBuf>,
    /// How images are read.
    #[serde(default)]
    pub cache: Cache,
    /// Whether images are read although others write them.
    #[serde(default)]
    pub force_share: bool,
    /// Most memory for the map of the disk.
    #[serde(default = "cache_size")]
    pub index_cache: Size,
    /// Where the index is, if not beside the layers.
    pub index_dir: Option<PathBuf>,
    /// Where writers leave what was not flushed; `off` for nowhere.
    #[serde(default = "shared_memory")]
    pub redo_dir: PathBuf,
    /// What shall go wrong.
    #[serde(default)]
    pub inject: Vec<String>,
}

/// Virtqueues of a device of which nothing is said.
pub(crate) const QUEUES_DEFAULT: u16 = 4;
/// NBD clients at one time of a disk of which nothing is said.
pub(crate) const CLIENTS_DEFAULT: usize = 256;

fn qcow2() -> String {
    "qcow2".to_owned()
}

/// A list, or the only thing on it.
fn one_or_many<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Vec<PathBuf>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Said {
        One(PathBuf),
        Many(Vec<PathBuf>),
    }
    Ok(match Said::deserialize(deserializer)? {
        Said::One(one) => vec![one],
        Said::Many(many) => many,
    })
}

fn cache_size() -> Size {
    Size(32 << 20)
}

impl Config {
    /// Reads a configuration. Paths in it start from its own folder.
    ///
    /// # Errors
    /// If it cannot be read, or says something that is not understood: where, and what.
    pub fn read(file: &Path) -> Result<Self> {
        let named = || file.display().to_string();
        let text = std::fs::read_to_string(file).map_err(|error| Error::from_io(named(), error))?;
        let mut config: Self = toml::from_str(&text).map_err(|error| {
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
        let devices = self.disks.iter().filter(|disk| disk.vhost_user.is_some());
        let queues = devices.map(|disk| usize::from(disk.num_queues.unwrap_or(QUEUES_DEFAULT)));
        queues.sum::<usize>().min(DOORBELLS_MAX)
    }

    fn resolve(&mut self, folder: &Path) {
        let resolve = |path: &mut PathBuf| *path = folder.join(&*path);
        self.stats_file.iter_mut().for_each(resolve);
        self.control.iter_mut().for_each(resolve);
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
        if self.stats_file.is_some() && self.disks.len() > 1 {
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
            if disk.ublk {
                return Err(ublk::refusal(name));
            }
            if let Some(what) = disk.ineffective_option(has_inherited_sockets()) {
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
    /// A disk that nobody asked anything of.
    pub fn new(name: String, image: PathBuf) -> Self {
        Self {
            name,
            image,
            nbd: Vec::new(),
            tls: None,
            tls_certificates: None,
            tls_verify_peer: None,
            allow_plain_tcp: false,
            vhost_user: None,
            ublk: false,
            fuse: None,
            allow_other: None,
            num_queues: None,
            serial: None,
            read_only: false,
            discard: Discards::default(),
            load_snapshot: None,
            export_name: None,
            description: None,
            shared: None,
            index: IndexMode::default(),
            iops: 0,
            iops_burst: 0,
            bps: Size(0),
            bps_burst: Size(0),
            format: qcow2(),
            names: Vec::new(),
            allow_path: Vec::new(),
            cache: Cache::default(),
            force_share: false,
            index_cache: cache_size(),
            index_dir: None,
            redo_dir: shared_memory(),
            inject: Vec::new(),
        }
    }

    /// The same with images opened as `images` has it.
    #[must_use]
    pub fn with_images(self, images: ImageConfig) -> Self {
        let ImageConfig {
            format,
            names,
            allow_path,
            cache,
            force_share,
            index_cache,
            index_dir,
            redo_dir,
            inject,
        } = images;
        Self {
            format,
            names,
            allow_path,
            cache,
            force_share,
            index_cache,
            index_dir,
            redo_dir,
            inject,
            ..self
        }
    }

    fn places(&self) -> Vec<Place> {
        let paths = self.vhost_user.iter().chain(&self.fuse).map(|path| path.display().to_string());
        self.nbd.iter().cloned().chain(paths).map(Place).collect()
    }

    fn resolve(&mut self, folder: &Path) {
        let resolve = |path: &mut PathBuf| *path = folder.join(&*path);
        if self.format != "null" {
            resolve(&mut self.image);
        }
        self.tls_certificates.iter_mut().for_each(resolve);
        self.vhost_user.iter_mut().for_each(resolve);
        self.fuse.iter_mut().for_each(resolve);
        self.names.iter_mut().filter(|name| !is_word(name)).for_each(resolve);
        self.allow_path.iter_mut().for_each(resolve);
        self.index_dir.iter_mut().for_each(resolve);
        if self.redo_dir.as_os_str() != "off" {
            resolve(&mut self.redo_dir);
        }
        for socket in &mut self.nbd {
            if !socket.starts_with("tcp:") {
                *socket = folder.join(&*socket).display().to_string();
            }
        }
    }

    /// How its images are opened.
    pub(crate) fn images(&self) -> ImageConfig {
        ImageConfig {
            format: self.format.clone(),
            names: self.names.clone(),
            allow_path: self.allow_path.clone(),
            cache: self.cache,
            force_share: self.force_share,
            index_cache: self.index_cache,
            index_dir: self.index_dir.clone(),
            redo_dir: self.redo_dir.clone(),
            inject: self.inject.clone(),
        }
    }

    /// How its NBD connections are secured.
    pub(crate) fn security(&self) -> Security<'_> {
        Security {
            mode: self.tls,
            certificates: self.tls_certificates.as_deref(),
            verify_peer: self.tls_verify_peer.unwrap_or_default(),
            allow_plain_tcp: self.allow_plain_tcp,
        }
    }

    /// How much a machine may do.
    pub(crate) fn rates(&self) -> Rates {
        Rates {
            iops: self.iops,
            bps: self.bps.0,
            iops_burst: self.iops_burst,
            bps_burst: self.bps_burst.0,
        }
    }
}

#[cfg(test)]
mod tests;
