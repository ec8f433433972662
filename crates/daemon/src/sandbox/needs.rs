//! Which files and ports a configuration needs, and what was granted for those that come later.

use crate::config::{DiskConfig, NO_ROOM_FOR_POOLS};
use crate::settings::{DiskSettings, IndexMode, NbdPlace, ProcessSettings};
use crate::sockets::Sockets;
use landlock::{AccessFs, BitFlags, make_bitflags};
use mica_block::{Error, ErrorKind, Result};
use mica_serve::CERTIFICATE_FILES;
use mica_stack::{Format, MACHINE_ID, StoreUrl};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What a process needs to keep.
#[derive(Default, Debug)]
pub(crate) struct Needs {
    /// Files, or folders with everything below them, and what may be done there.
    pub(super) files: BTreeMap<PathBuf, BitFlags<AccessFs>>,
    /// Those of `files` that are folders for redo logs.
    logs: BTreeSet<PathBuf>,
    /// Files that disks are mounted over.
    mounts: BTreeSet<PathBuf>,
    /// TCP ports to listen on.
    pub(super) ports: BTreeSet<u16>,
    /// Whether files get a second name.
    pub(super) has_links: bool,
    /// Whether disks cannot be served without second names.
    needs_links: bool,
    /// TCP ports to connect to.
    pub(super) connects: BTreeSet<u16>,
    /// The folders for redo logs in the directories that were asked about: a thousand disks have
    /// one.
    log_folders: BTreeMap<PathBuf, Option<PathBuf>>,
}

/// What a sandboxed process may do, for as long as it lives.
///
/// The kernel's rules are for what was there, not for its name. So a folder that has another's
/// place since is not granted, though its name is. A file is: what is in a granted folder needs no
/// rule of its own, and certificates that were replaced are opened by the helper. A hard link in a
/// folder that is not granted is refused here though the kernel would allow it: what belongs beside
/// the image would be refused there.
#[derive(Clone, Debug)]
pub(crate) struct Granted {
    /// By real paths, what existed when the sandbox was entered.
    files: BTreeMap<PathBuf, Grant>,
    /// The files that the helper mounts disks over.
    mounts: BTreeSet<PathBuf>,
    ports: BTreeSet<u16>,
    has_links: bool,
    has_network: bool,
}

#[derive(Clone, Copy, Debug)]
struct Grant {
    access: BitFlags<AccessFs>,
    /// Which folder it is for, if it is for one: its device and inode.
    folder: Option<(u64, u64)>,
}

impl Grant {
    /// Whether what is at `path` now is what it was for.
    fn still_holds(&self, path: &Path) -> bool {
        self.folder.is_none() || self.folder == folder_at(path)
    }
}

/// The device and inode of the folder at `path`, if there is one.
fn folder_at(path: &Path) -> Option<(u64, u64)> {
    let found = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_dir)?;
    Some((found.dev(), found.ino()))
}

/// To read images. A layer may be a block device.
const READ: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | IoctlDev});
/// To write existing files.
const WRITE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{WriteFile | Truncate});
/// To create, replace and remove files.
const REPLACE: BitFlags<AccessFs> =
    make_bitflags!(AccessFs::{ReadFile | WriteFile | MakeReg | RemoveFile});
/// All that is done in a store of objects.
const STORE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    ReadFile | ReadDir | WriteFile | Truncate | MakeReg | MakeDir | RemoveFile | RemoveDir | Refer
});
/// To create and remove sockets: their folder is locked meanwhile, for which it is read.
const SOCKETS: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadDir | MakeSock | RemoveFile});
/// To make layers, and marks of those beneath, and to rename them: their folder is made durable,
/// for which it is read.
const LAYERS: BitFlags<AccessFs> =
    make_bitflags!(AccessFs::{ReadFile | WriteFile | ReadDir | MakeReg | RemoveFile});
/// To go on in a new file when the log was renamed.
const LOGS: BitFlags<AccessFs> = make_bitflags!(AccessFs::{MakeReg | WriteFile});
/// To give a file that is open its name, and to remove it.
const RENAME: BitFlags<AccessFs> = make_bitflags!(AccessFs::{MakeReg | RemoveFile});

/// Tells logs of an earlier boot, and dead writers of volumes, from current ones.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

impl Needs {
    /// What a process with these `disks` and the `inherited` sockets needs.
    ///
    /// # Errors
    /// If a folder cannot be created.
    pub(crate) fn of(
        process: &ProcessSettings,
        disks: &[DiskConfig],
        inherited: &Sockets,
    ) -> Result<Self> {
        let mut needs = Self::default();
        needs.allow(Path::new(BOOT_ID), AccessFs::ReadFile.into());
        needs.allow(Path::new(MACHINE_ID), AccessFs::ReadFile.into());
        for disk in disks {
            needs.create_folders(disk)?;
            let places = needs.add_disk(disk);
            needs.add_layers(disk, &places);
        }
        for folder in &process.disks_in {
            needs.add_folder_of_disks(folder)?;
        }
        let ProcessSettings { control, log_file, pid_file, .. } = process;
        control.iter().for_each(|socket| needs.add_socket(socket));
        log_file.iter().for_each(|file| needs.allow_in_folder_of(file, LOGS));
        pid_file.iter().for_each(|file| needs.allow_in_folder_of(file, RENAME));
        inherited.files().for_each(|socket| needs.add_socket(socket));
        needs.ports.extend(process.metrics.map(|address| address.port()));
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

    /// A rule needs an existing file or folder.
    fn create_folders(&mut self, disk: &DiskConfig) -> Result<()> {
        if let Some(folder) = disk.images.index_dir.as_ref().filter(|_| disk.is_file()) {
            std::fs::create_dir_all(folder).map_err(|error| {
                Error::from_io(format!("--index-dir {}", folder.display()), error)
            })?;
        }
        for file in disk.images.secret_files() {
            self.allow(&file, AccessFs::ReadFile.into());
        }
        for file in disk.images.fault_logs() {
            // The logger reports what is wrong with it.
            let _ = std::fs::File::options().append(true).create(true).open(file);
        }
        Ok(())
    }

    /// Disks may be added later whose images and sockets are in `folder` or below.
    ///
    /// # Errors
    /// If there is no such folder.
    fn add_folder_of_disks(&mut self, folder: &Path) -> Result<()> {
        let found = std::fs::metadata(folder).and_then(|found| match found.is_dir() {
            true => Ok(()),
            false => Err(std::io::ErrorKind::NotADirectory.into()),
        });
        let context = || format!("--disks-in {}", folder.display());
        found.map_err(|error| Error::from_io(context(), error))?;
        self.allow(folder, READ | WRITE | REPLACE | SOCKETS | STORE);
        self.has_links = true;
        // Whatever one has there that is not configured in any way.
        self.add_disk(&DiskConfig::new(String::new(), folder.join("image")));
        Ok(())
    }

    /// What a disk needs. Returns where its images may be.
    pub(super) fn add_disk(&mut self, disk: &DiskConfig) -> Vec<PathBuf> {
        let mut places = Vec::new();
        match disk.volume.url() {
            Ok(Some(url)) => {
                self.add_store(&url.store, disk.writes());
                let log = disk.log();
                log.iter().for_each(|log| self.allow(&log.path, READ | WRITE));
                let key = disk.volume.volume_key.iter();
                key.for_each(|key| self.allow(key, AccessFs::ReadFile.into()));
            }
            _ if disk.is_file() => {
                places = allowed_places(disk);
                self.add_image(disk, writes_image(disk), &places);
            }
            // Opening it reports what is wrong with it.
            _ => {}
        }
        for file in disk.images.fault_logs() {
            self.allow(file, AccessFs::WriteFile.into());
        }
        self.mounts.extend(disk.settings.fuse.clone());
        self.add_sockets(&disk.settings);
        places
    }

    /// What a store of volumes needs.
    fn add_store(&mut self, store: &StoreUrl, writes: bool) {
        match store {
            StoreUrl::Directory(folder) => {
                // To put an object is to give a new file a name in another folder.
                self.has_links |= writes;
                self.needs_links |= writes;
                self.allow(folder, if writes { STORE } else { READ | AccessFs::ReadDir });
            }
            StoreUrl::Bucket { .. } => {
                self.connects.extend(mica_stack::bucket_ports());
                for file in mica_stack::bucket_files() {
                    self.allow(&file, AccessFs::ReadFile | AccessFs::ReadDir);
                }
                // A file there shows that this process lives. Without it, the next needs --force.
                let usual = mica_stack::usual_redo_directory();
                if writes && let Ok(folder) = mica_stack::volumes_folder(usual) {
                    self.allow(&folder, REPLACE);
                }
            }
            // A pool is refused.
            StoreUrl::Pool { .. } | StoreUrl::Memory(_) => {}
        }
    }

    fn add_image(&mut self, disk: &DiskConfig, writes: bool, places: &[PathBuf]) {
        let mut folders = READ;
        // The active layer may have an external data file, whose name only the layer knows.
        if writes && may_have_layers(disk) {
            // Before a layer is merged into another one, its folder is searched for other images.
            folders |= WRITE | AccessFs::ReadDir;
        }
        let has_index = disk.settings.index == IndexMode::Auto && may_have_layers(disk);
        if has_index && disk.images.index_dir.is_none() {
            folders |= REPLACE;
        }
        places.iter().for_each(|folder| self.allow(folder, folders));
        let image = if writes { READ | WRITE } else { READ };
        // What is in a granted folder needs no rule of its own: the kernel walks all of them.
        if !self.has(&disk.image, image) {
            self.allow(&disk.image, image);
        }
        if let Some(folder) = &disk.images.index_dir {
            self.allow(folder, REPLACE);
        }
        if may_have_layers(disk) {
            self.add_logs(disk, writes);
        }
    }

    /// Grants what a writable disk needs to get layers while it is served. A disk that is added
    /// later is served without it, too.
    fn add_layers(&mut self, disk: &DiskConfig, places: &[PathBuf]) {
        let has_layers = disk.is_file() && may_have_layers(disk) && writes_image(disk);
        // A state that is kept is the active layer under a second name.
        self.has_links |= has_layers;
        for place in places.iter().filter(|_| has_layers) {
            let has_all = self.files.get(place).is_some_and(|access| access.contains(LAYERS));
            if !has_all && place.is_dir() {
                self.allow(place, LAYERS);
            }
        }
    }

    /// Grants the folders for the disk's redo logs. If there is none, opening the image reports
    /// what that costs.
    fn add_logs(&mut self, disk: &DiskConfig, writes: bool) {
        let all = REPLACE | AccessFs::Truncate;
        // A note there says where the logs are, if they are elsewhere.
        if writes && let Some(usual) = self.log_folder(mica_stack::usual_redo_directory()) {
            self.allow(&usual, all);
            self.logs.insert(usual);
        }
        let Some(directory) = disk.images.redo_dir() else { return };
        if let Some(folder) = self.log_folder(directory) {
            self.allow(&folder, if writes { all } else { AccessFs::ReadFile.into() });
            self.logs.insert(folder);
            if let Some(folder) = mica_stack::redo_folder_of_owner(directory, &disk.image) {
                self.allow(&folder, AccessFs::ReadFile.into());
            }
        }
    }

    /// The folder of this user's logs in `directory`, which is made if there is none.
    fn log_folder(&mut self, directory: &Path) -> Option<PathBuf> {
        if let Some(known) = self.log_folders.get(directory) {
            return known.clone();
        }
        let folder = mica_stack::redo_folder(directory).ok();
        self.log_folders.insert(directory.to_owned(), folder.clone());
        folder
    }

    /// Whether a folder is allowed that has the file at `path`, and this `access` to it.
    fn has(&self, path: &Path, access: BitFlags<AccessFs>) -> bool {
        let folder = path.parent().and_then(|folder| self.files.get(folder));
        let has_all = folder.is_some_and(|folder| folder.contains(access));
        // A link leads elsewhere.
        has_all && path.symlink_metadata().is_ok_and(|found| found.is_file())
    }

    fn add_sockets(&mut self, settings: &DiskSettings) {
        for name in CERTIFICATE_FILES {
            // Each of them may be a symbolic link to another folder.
            let folder = settings.tls_certificates.iter();
            folder.for_each(|folder| self.allow(&folder.join(name), AccessFs::ReadFile.into()));
        }
        if let Some(socket) = &settings.vhost_user {
            self.add_socket(socket);
        }
        for place in &settings.nbd {
            match place {
                NbdPlace::Unix(path) => self.add_socket(path),
                NbdPlace::Tcp(address) => drop(self.ports.insert(address.port())),
            }
        }
    }

    /// What is granted once a sandbox is entered with this.
    pub(crate) fn granted(&self) -> Granted {
        let real = |(path, access): (&PathBuf, &BitFlags<AccessFs>)| {
            Some((path.canonicalize().ok()?, *access))
        };
        let mut files = BTreeMap::new();
        for (path, access) in self.files.iter().filter_map(real) {
            let folder = folder_at(&path);
            let grant = files.entry(path).or_insert(Grant { access, folder });
            grant.access |= access;
        }
        let has_network = !self.connects.is_empty();
        let (mounts, ports) = (self.mounts.clone(), self.ports.clone());
        Granted { files, mounts, ports, has_links: self.has_links, has_network }
    }

    pub(super) fn allow(&mut self, path: &Path, access: BitFlags<AccessFs>) {
        *self.files.entry(path.to_owned()).or_default() |= access;
    }
}

impl Granted {
    /// Makes sure that `disk` can be served.
    ///
    /// # Errors
    /// `Denied` with what the sandbox would refuse.
    pub(crate) fn check(&self, disk: &DiskConfig) -> Result<()> {
        let denied = |what: String| Err(Error::new(ErrorKind::Denied, what));
        if let Some(file) = &disk.settings.fuse
            && !self.mounts.contains(file)
        {
            return denied(format!(
                "{}: the sandbox allows no further FUSE files: put the disk into the \
                 configuration and restart the server",
                file.display()
            ));
        }
        if disk.volume.is_in_pool() {
            return denied(NO_ROOM_FOR_POOLS.to_owned());
        }
        let mut needs = Needs::default();
        needs.add_disk(disk);
        if let Some(directory) = folder_of_logs_that_cannot_be_made(disk) {
            let directory = directory.display();
            return denied(format!(
                "the sandbox does not allow a folder for redo logs to be made in {directory}: make \
                 sure that there is such a folder, put a disk with --redo-dir {directory} into the \
                 configuration, and restart the server"
            ));
        }
        self.check_needs(&needs)
    }

    fn check_needs(&self, needs: &Needs) -> Result<()> {
        let denied = |what: String| Err(Error::new(ErrorKind::Denied, what));
        if let Some(port) = needs.ports.difference(&self.ports).next() {
            return denied(format!(
                "the sandbox allows no further TCP ports, such as {port}: put the disk into the \
                 configuration and restart the server, or serve it at a unix socket"
            ));
        }
        if needs.needs_links && !self.has_links {
            return denied(
                "the sandbox allows no volumes in directories: put the disk into the \
                 configuration and restart the server, or start it with --disks-in"
                    .to_owned(),
            );
        }
        if !needs.connects.is_empty() && !self.has_network {
            return denied(
                "the sandbox allows no further volumes behind a network: put the disk into the \
                 configuration and restart the server"
                    .to_owned(),
            );
        }
        let mut files: Vec<_> = needs.files.iter().collect();
        // Where disks are allowed, the usual folder for their logs is, too: that is said first.
        files.sort_by_key(|(path, _)| needs.logs.contains(*path));
        for (path, access) in files {
            // What does not exist is reported by the code that needs it.
            let Ok(real) = path.canonicalize() else { continue };
            if let Some(what) = self.refusal(&real, *access, needs.logs.contains(path)) {
                return denied(what);
            }
        }
        Ok(())
    }

    /// Makes sure that layers can be made in `folder`.
    ///
    /// # Errors
    /// `Denied` if the sandbox would refuse it.
    pub(crate) fn check_layers_in(&self, folder: &Path) -> Result<()> {
        // What does not exist is reported by the code that needs it.
        let Ok(real) = folder.canonicalize() else { return Ok(()) };
        match self.refusal(&real, LAYERS, false) {
            Some(what) => Err(Error::new(ErrorKind::Denied, what)),
            None => Ok(()),
        }
    }

    /// Makes sure that NBD clients can be served where these settings say.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub(crate) fn check_sockets(&self, settings: &DiskSettings) -> Result<()> {
        let mut needs = Needs::default();
        needs.add_sockets(settings);
        if let Some(port) = needs.ports.difference(&self.ports).next() {
            let what = format!(
                "the sandbox allows no further TCP ports, such as {port}: use a unix socket (--nbd \
                 unix:PATH), or start the server with --sandbox off"
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        self.check_needs(&needs)
    }

    /// Why the sandbox refuses `access` to what is at the `real` path, if it does.
    fn refusal(&self, real: &Path, access: BitFlags<AccessFs>, is_logs: bool) -> Option<String> {
        let named = || real.ancestors().filter_map(|at| Some((at, self.files.get(at)?)));
        let all = |mut allowed, (_, grant): (&Path, &Grant)| {
            allowed |= grant.access;
            allowed
        };
        let held = named().filter(|(at, grant)| grant.still_holds(at));
        if held.fold(BitFlags::empty(), all).contains(access) {
            return None;
        }
        let folder = if real.is_dir() { real } else { real.parent().unwrap_or(real) };
        let folder = folder.display();
        let replaced = named().find(|(at, grant)| !grant.still_holds(at));
        Some(match replaced {
            Some((at, _)) if named().fold(BitFlags::empty(), all).contains(access) => format!(
                "the sandbox does not allow what is in {}, which is not the folder that was there \
                 when the server started: restart the server",
                at.display()
            ),
            _ if is_logs => format!(
                "the sandbox does not allow redo logs in {folder}: put a disk that has them there \
                 into the configuration and restart the server"
            ),
            _ => format!(
                "the sandbox does not allow disks in {folder}: start the server with --disks-in \
                 {folder}"
            ),
        })
    }
}

/// Where the images of `disk` may be. Opening it reports what is wrong with its settings, and that
/// it does not exist.
fn allowed_places(disk: &DiskConfig) -> Vec<PathBuf> {
    let (image, named) = (&disk.image, disk.images.named_files());
    named
        .and_then(|(names, given)| mica_stack::allowed_places(image, names, &given))
        .unwrap_or_default()
}

/// Where the logs of `disk` would be, if that is a place in which nothing can be made.
fn folder_of_logs_that_cannot_be_made(disk: &DiskConfig) -> Option<&Path> {
    let has_logs = disk.is_file() && may_have_layers(disk);
    let directory = disk.images.redo_dir().filter(|_| has_logs && writes_image(disk))?;
    mica_stack::lacks_redo_folder(directory).then_some(directory)
}

/// Whether it is a chain, or a raw image, which becomes one when a layer is put on top of it.
fn may_have_layers(disk: &DiskConfig) -> bool {
    // Nothing beside a device could say that it is frozen.
    let is_raw_file = || std::fs::metadata(&disk.image).is_ok_and(|found| found.is_file());
    match disk.images.format {
        Format::Qcow2 => true,
        Format::Raw => disk.is_file() && writes_image(disk) && is_raw_file(),
        Format::Luks | Format::Null => false,
    }
}

/// Whether the image itself is written, and not an overlay that is thrown away.
fn writes_image(disk: &DiskConfig) -> bool {
    disk.settings.writes() && disk.settings.overlay.is_none()
}
