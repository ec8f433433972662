//! Which files and ports a configuration needs.

use crate::config::{Config, DiskConfig};
use crate::settings::{IndexMode, ProcessSettings};
use crate::sockets::Sockets;
use landlock::{AccessFs, BitFlags, make_bitflags};
use mica_block::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// What a process needs to keep.
#[derive(Default, Debug)]
pub(crate) struct Needs {
    /// Files, or folders with everything below them, and what may be done there.
    pub(super) files: BTreeMap<PathBuf, BitFlags<AccessFs>>,
    /// TCP ports to listen on.
    pub(super) ports: BTreeSet<u16>,
}

/// To read images. A layer may be a block device.
const READ: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | IoctlDev});
/// To write existing files.
const WRITE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{WriteFile | Truncate});
/// To create, replace and remove files.
const REPLACE: BitFlags<AccessFs> =
    make_bitflags!(AccessFs::{ReadFile | WriteFile | MakeReg | RemoveFile});
/// To create and remove sockets: their folder is locked meanwhile, for which it is read.
const SOCKETS: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadDir | MakeSock | RemoveFile});
/// To go on in a new file when the log was renamed.
const LOGS: BitFlags<AccessFs> = make_bitflags!(AccessFs::{MakeReg | WriteFile});
/// To give a file that is open its name, and to remove it.
const RENAME: BitFlags<AccessFs> = make_bitflags!(AccessFs::{MakeReg | RemoveFile});

/// Tells logs of an earlier boot from current ones.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

impl Needs {
    /// What `config` and the `inherited` sockets need.
    ///
    /// # Errors
    /// If a folder cannot be created.
    pub(crate) fn of(config: &Config, inherited: &Sockets) -> Result<Self> {
        let mut needs = Self::default();
        needs.allow(Path::new(BOOT_ID), AccessFs::ReadFile.into());
        for disk in &config.disks {
            needs.add_disk(disk)?;
        }
        config.process.control.iter().for_each(|socket| needs.add_socket(socket));
        let ProcessSettings { log_file, pid_file, .. } = &config.process;
        log_file.iter().for_each(|file| needs.allow_in_folder_of(file, LOGS));
        pid_file.iter().for_each(|file| needs.allow_in_folder_of(file, RENAME));
        inherited.files().for_each(|socket| needs.add_socket(socket));
        needs.ports.extend(config.process.metrics.map(|address| address.port()));
        Ok(needs)
    }

    /// Allows the folder of a socket that is created, and removed at the end.
    pub(crate) fn add_socket(&mut self, socket: &Path) {
        self.allow_in_folder_of(socket, SOCKETS);
    }

    fn allow_in_folder_of(&mut self, file: &Path, access: BitFlags<AccessFs>) {
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
        self.allow(folder.unwrap_or(Path::new(".")), access);
    }

    pub(super) fn add_disk(&mut self, disk: &DiskConfig) -> Result<()> {
        let overlay = disk.settings.overlay_folder.as_deref();
        let writes = disk.settings.writes() && overlay.is_none();
        if let Some(folder) = overlay {
            self.allow(folder, READ | WRITE | REPLACE | AccessFs::ReadDir);
            self.allow_in_folder_of(folder, AccessFs::RemoveDir.into());
        }
        if disk.images.is_file() {
            self.add_image(disk, writes)?;
        }
        for file in disk.images.inject.iter().filter_map(|fault| fault.strip_prefix("log=")) {
            if file != "-" {
                // A rule needs an existing file. The logger reports what is wrong with it.
                let _ = std::fs::File::options().append(true).create(true).open(file);
                self.allow(Path::new(file), AccessFs::WriteFile.into());
            }
        }
        self.add_sockets(disk);
        Ok(())
    }

    fn add_image(&mut self, disk: &DiskConfig, writes: bool) -> Result<()> {
        let mut folders = READ;
        // The active layer may have an external data file, whose name only the layer knows.
        if writes && disk.images.format == "qcow2" {
            folders |= WRITE;
        }
        let has_index = disk.settings.index == IndexMode::Auto && disk.images.format == "qcow2";
        if has_index && disk.images.index_dir.is_none() {
            folders |= REPLACE;
        }
        // Opening the image reports that it does not exist.
        let (names, given) = disk.images.named_files()?;
        let allowed = mica_stack::allowed_places(&disk.image, names, &given);
        for folder in allowed.unwrap_or_default() {
            self.allow(&folder, folders);
        }
        self.allow(&disk.image, if writes { READ | WRITE } else { READ });
        if let Some(folder) = &disk.images.index_dir {
            // A rule needs an existing folder.
            std::fs::create_dir_all(folder).map_err(|error| {
                Error::from_io(format!("--index-dir {}", folder.display()), error)
            })?;
            self.allow(folder, REPLACE);
        }
        if disk.images.format == "qcow2" {
            self.add_logs(disk, writes);
        }
        Ok(())
    }

    /// If there is no folder for logs, opening the image reports what that costs.
    fn add_logs(&mut self, disk: &DiskConfig, writes: bool) {
        let all = REPLACE | AccessFs::Truncate;
        // A note there says where the logs are, if they are elsewhere.
        if writes && let Ok(usual) = mica_stack::usual_redo_folder() {
            self.allow(&usual, all);
        }
        let Some(directory) = disk.images.redo_dir() else { return };
        if let Ok(folder) = mica_stack::redo_folder(directory) {
            self.allow(&folder, if writes { all } else { AccessFs::ReadFile.into() });
            if let Some(folder) = mica_stack::redo_folder_of_owner(directory, &disk.image) {
                self.allow(&folder, AccessFs::ReadFile.into());
            }
        }
    }

    fn add_sockets(&mut self, disk: &DiskConfig) {
        for name in ["server-cert.pem", "server-key.pem", "ca-cert.pem", "ca-crl.pem"] {
            // Each of them may be a symbolic link to another folder.
            let folder = disk.settings.tls_certificates.iter();
            folder.for_each(|folder| self.allow(&folder.join(name), AccessFs::ReadFile.into()));
        }
        if let Some(socket) = &disk.settings.vhost_user {
            self.add_socket(socket);
        }
        for name in &disk.settings.nbd {
            match name.strip_prefix("tcp:").map(str::parse::<SocketAddr>) {
                None => self.add_socket(Path::new(name)),
                Some(Ok(address)) => drop(self.ports.insert(address.port())),
                // Listening reports what is wrong with it.
                Some(Err(_)) => {}
            }
        }
    }

    pub(super) fn allow(&mut self, path: &Path, access: BitFlags<AccessFs>) {
        *self.files.entry(path.to_owned()).or_default() |= access;
    }
}
