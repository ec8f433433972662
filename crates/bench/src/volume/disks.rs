//! The disks that are measured, and how each is made and served.

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use mica_tests::server::Server;
use mica_tests::{command, mica, tools};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The name of volumes and images.
pub(super) const NAME: &str = "bench";
/// Bytes of a write log.
const LOG_BYTES: &str = "1G";

/// A disk that is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum Disk {
    /// A raw file, served by mica.
    Raw,
    /// An empty qcow2 image, served by mica.
    Qcow2,
    /// A volume in a directory, with a write log.
    VolumeLog,
    /// A volume in a directory, durable in the store.
    VolumeStore,
    /// A volume in a pool of Ceph, with a write log.
    RadosLog,
    /// A volume in a pool of Ceph, durable in the pool.
    RadosStore,
    /// An image of RBD in the same pool, served by qemu-nbd.
    Rbd,
}

impl Disk {
    /// Its name in tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw file",
            Self::Qcow2 => "qcow2",
            Self::VolumeLog => "volume, log",
            Self::VolumeStore => "volume, store",
            Self::RadosLog => "volume on RADOS, log",
            Self::RadosStore => "volume on RADOS, store",
            Self::Rbd => "RBD, qemu-nbd",
        }
    }

    pub(super) fn is_volume(self) -> bool {
        self.has_log() || self.is_durable_in_store()
    }

    /// Whether it is a volume without a log.
    pub(super) fn is_durable_in_store(self) -> bool {
        matches!(self, Self::VolumeStore | Self::RadosStore)
    }

    fn has_log(self) -> bool {
        matches!(self, Self::VolumeLog | Self::RadosLog)
    }

    fn needs_ceph(self) -> bool {
        matches!(self, Self::RadosLog | Self::RadosStore | Self::Rbd)
    }
}

/// Where disks are made.
pub(super) struct Place<'a> {
    /// For files.
    pub(super) folder: &'a Path,
    /// The configuration of the cluster.
    pub(super) ceph: Option<&'a Path>,
    pub(super) pool: &'a str,
}

impl Place<'_> {
    /// Whether there can be such a disk; says so if not.
    pub(super) fn has(&self, disk: Disk) -> bool {
        let is_there = !disk.needs_ceph() || self.ceph.is_some();
        if !is_there {
            println!("{}: NOT MEASURED, there is no --ceph-conf", disk.name());
        }
        is_there
    }

    /// The URL of a volume.
    pub(super) fn url(&self, disk: Disk, name: &str) -> String {
        match disk.needs_ceph() {
            true => format!("rados://{}/bench/{name}", self.pool),
            false => format!("file://{}/{name}", self.store().display()),
        }
    }

    /// The directory store.
    pub(super) fn store(&self) -> PathBuf {
        self.folder.join("store")
    }

    fn image(&self) -> PathBuf {
        self.folder.join("image")
    }

    fn log(&self) -> PathBuf {
        self.folder.join("log")
    }

    /// Where a server is controlled.
    pub(super) fn control(&self) -> PathBuf {
        self.folder.join("control")
    }

    /// Makes an empty `disk` of `bytes`; what an earlier one left is removed.
    ///
    /// # Errors
    /// If that fails.
    pub(super) fn make(&self, disk: Disk, bytes: u64) -> Result<()> {
        for path in [self.image(), self.log(), self.control()] {
            remove(&path)?;
        }
        let bytes_text = bytes.to_string();
        match disk {
            Disk::Raw => File::create(self.image())?.set_len(bytes)?,
            Disk::Qcow2 => {
                let mut create = Command::new(mica::binary());
                done(
                    create.args(["create", "-q", "-f", "qcow2"]).arg(self.image()).arg(bytes_text),
                )?;
            }
            Disk::Rbd => {
                let image = format!("{}/{NAME}", self.pool);
                // The first time there is none.
                let _ = command::finish(self.ceph_tool("rbd")?.args(["rm", &image]));
                let size = format!("{}M", bytes >> 20);
                done(self.ceph_tool("rbd")?.args(["create", "--size", &size, &image]))?;
            }
            Disk::VolumeLog | Disk::VolumeStore => {
                if self.store().exists() {
                    fs::remove_dir_all(self.store())?;
                }
                self.create_volume(disk, &bytes_text)?;
            }
            Disk::RadosLog | Disk::RadosStore => {
                let url = self.url(disk, NAME);
                // The first time there is none.
                let _ = command::finish(self.volume().args(["delete", "--force", &url]));
                self.create_volume(disk, &bytes_text)?;
            }
        }
        Ok(())
    }

    fn create_volume(&self, disk: Disk, bytes: &str) -> Result<()> {
        done(self.volume().args(["create", &self.url(disk, NAME), bytes]))
    }

    /// `mica volume`.
    pub(super) fn volume(&self) -> Command {
        let mut volume = Command::new(mica::binary());
        self.with_ceph(volume.arg("volume"));
        volume
    }

    fn with_ceph(&self, command: &mut Command) {
        if let Some(conf) = self.ceph {
            command.env("CEPH_CONF", conf);
        }
    }

    fn ceph_tool(&self, program: &str) -> Result<Command> {
        let mut tool = Command::new(program);
        tool.arg("--conf").arg(self.ceph.context("there is no cluster")?);
        Ok(tool)
    }

    /// Serves `disk`.
    ///
    /// # Errors
    /// If it does not get to serve.
    pub(super) fn serve(&self, disk: Disk) -> Result<Server> {
        self.serve_with(disk, &[])
    }

    /// As [`Self::serve`], by mica with `more` options.
    ///
    /// # Errors
    /// As [`Self::serve`].
    pub(super) fn serve_with(&self, disk: Disk, more: &[&str]) -> Result<Server> {
        remove(&self.control())?;
        Server::start("", |socket| {
            if disk == Disk::Rbd {
                let mut serve = Command::new(tools::QEMU_NBD.program);
                let conf = self.ceph.map(|conf| conf.display().to_string()).unwrap_or_default();
                let image = format!("rbd:{}/{NAME}:conf={conf}", self.pool);
                serve.args(["-t", "-e", "0", "-f", "raw", "--cache=writeback", "-k"]).arg(socket);
                serve.arg(image);
                return serve;
            }
            let mut serve = self.server(disk, socket);
            serve.args(more);
            match disk {
                Disk::Raw => serve.args(["--format", "raw"]).arg(self.image()),
                Disk::Qcow2 => serve.arg(self.image()),
                _ => serve.args(["--volume", &self.url(disk, NAME)]),
            };
            if disk.has_log() {
                serve.arg("--log-device").arg(self.log()).args(["--log-size", LOG_BYTES]);
            }
            serve
        })
    }

    /// Serves volume `name`, where `disk` is, with `more` options.
    ///
    /// # Errors
    /// If it does not get to serve.
    pub(super) fn serve_volume(&self, disk: Disk, name: &str, more: &[&str]) -> Result<Server> {
        remove(&self.control())?;
        Server::start("", |socket| {
            let mut serve = self.server(disk, socket);
            serve.args(["--volume", &self.url(disk, name)]).args(more);
            serve
        })
    }

    /// `mica serve`, without what it serves.
    fn server(&self, disk: Disk, socket: &Path) -> Command {
        let mut serve = Command::new(mica::binary());
        serve.arg("serve").arg("--nbd").arg(socket).arg("--control").arg(self.control());
        if disk.needs_ceph() {
            // librados does not fit into the sandbox.
            serve.args(["--sandbox", "off"]);
        }
        self.with_ceph(&mut serve);
        serve
    }

    /// Bytes that the disk occupies, where that is easily known.
    pub(super) fn occupied(&self, disk: Disk) -> Option<u64> {
        match disk {
            Disk::Raw | Disk::Qcow2 => occupied(&self.image()),
            Disk::VolumeLog | Disk::VolumeStore => occupied(&self.store()),
            _ => None,
        }
    }
}

fn occupied(path: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    let meta = fs::symlink_metadata(path).ok()?;
    if !meta.is_dir() {
        return Some(meta.blocks() * 512);
    }
    let entries = fs::read_dir(path).ok()?;
    Some(entries.flatten().filter_map(|entry| occupied(&entry.path())).sum())
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Runs `command`, which must succeed.
///
/// # Errors
/// With its output.
pub(super) fn done(command: &mut Command) -> Result<()> {
    let finished = command::finish(command);
    ensure!(finished.status.success(), "{finished}");
    Ok(())
}
