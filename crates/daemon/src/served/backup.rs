//! Backups of a chain that is served: a state of it is kept as a layer, and exported while guests
//! write on.
//!
//! ```text
//! begin ─▶ keep the state (stack::Keeping) ─▶ export it, read-only, at a socket of its own
//!             └ not if it is kept already: its backup was begun before, and not ended
//! end   ─▶ no longer export it
//! ```
//!
//! Invariants
//! - I1 What is exported does not change: it is the chain below a frozen layer, of which guests'
//!   writes go into another.
//!   So no layer of it is written, nor its file removed, while it is exported: a merge beneath the
//!   state, or into its layer, and a backup of it exclude each other. A stream writes the active
//!   layer alone, and a commit above the state what the export does not have: they go on beside it.
//! - I2 A disk has one backup at a time. It ends with the disk, or with the process, and can be
//!   begun again with the same state.
//! - I3 Nothing but the names of the frozen layers is remembered of a state. That its backup was
//!   ended is known to the process that ended it, and to all once a later state is kept.

use super::{Served, State};
use crate::contexts::{ChangedSince, Depth, Layered};
use crate::helper::Outside;
use crate::sandbox::Granted;
use crate::settings::{DiskSettings, NbdPlace};
use crate::tls::Security;
use mica_block::{Disk, Error, ErrorKind, Manage, ManageChain, Result};
use mica_rt::{Backend, Executor};
use mica_serve::Tls;
use mica_serve::nbd::{self, Context, Export, Exports, Limits};
use mica_stack::{Keeping, kept_states};
use mica_store::SetAside;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// Descriptors for the socket of a backup and some clients.
const DESCRIPTORS: usize = 8;
/// How many states an error names.
const STATES_NAMED_MAX: usize = 16;

/// The backups of a disk.
#[derive(Default)]
pub(crate) struct Backups(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    under_way: Option<Backup>,
    /// States whose backups were ended here.
    ended: BTreeSet<String>,
}

/// A backup that is under way. Dropping it ends the export, also for clients that read.
struct Backup {
    about: BackupInfo,
    /// What its clients get, if they may use TLS.
    tls: Option<Tls>,
    // In the order in which they end.
    _running: nbd::Running,
    _address: nbd::Address,
    _descriptors: SetAside,
}

/// What is wanted of a backup.
pub(crate) struct Wanted {
    /// The name for the state.
    pub(crate) state: String,
    /// An earlier state: what has changed since is to be known.
    pub(crate) since: Option<String>,
    /// Where it is exported.
    pub(crate) place: NbdPlace,
}

/// What is told of a backup.
#[derive(Clone, Debug)]
pub(crate) struct BackupInfo {
    pub(crate) state: String,
    pub(crate) since: Option<String>,
    /// Where clients connect.
    pub(crate) place: String,
    /// The name of the export.
    pub(crate) export: String,
    /// The file of the state.
    pub(crate) file: PathBuf,
    pub(crate) len: u64,
    /// Whether the state was kept before.
    pub(crate) is_resumed: bool,
    /// The names of what clients can ask about its parts.
    pub(crate) contexts: Vec<String>,
}

/// A state that is kept.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub(crate) state: String,
    pub(crate) file: PathBuf,
    /// The position of its layer, from the base.
    pub(crate) position: usize,
}

impl Backups {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock()
    }

    /// Ends the export of the one that is under way, which can be begun again. Waits for its
    /// clients' requests.
    pub(super) fn interrupt(&self) {
        let interrupted = self.lock().under_way.take();
        drop(interrupted);
    }
}

impl Served {
    /// Keeps the present state, or finds that it is kept, and exports it.
    ///
    /// # Errors
    /// `Denied` if the disk is not served, a backup of it is under way, the state's backup was
    /// ended, or the sandbox or the images' policy forbids it; `Unsupported` if its states cannot
    /// be kept; `NotFound` if there is no such earlier state; `Invalid` if that is no earlier one;
    /// else why the state cannot be kept or exported.
    pub(crate) fn begin_backup(
        &self,
        wanted: &Wanted,
        surroundings: (&Outside, Option<&Granted>),
    ) -> Result<BackupInfo> {
        let _changes = self.lock_changes();
        if !matches!(*self.lock(), State::Serving(_)) {
            return Err(self.denied("is not served"));
        }
        if self.settings.has_part() {
            // Its clients are not to see the rest.
            return Err(self.denied("is served in part: backups are of whole disks"));
        }
        if let Some(backup) = &self.backups.lock().under_way {
            let state = &backup.about.state;
            return Err(self.denied(&format!("has the backup {state:?} under way: end that first")));
        }
        let disk = self.opened().disk()?;
        let kept = self.kept_states()?;
        let since = wanted.since.as_deref().map(|since| self.find(&kept, since)).transpose()?;
        let known = kept.iter().rfind(|one| one.state == wanted.state);
        // A backup that was interrupted is that of the last state: an older one was ended, whoever
        // ended it.
        let is_older = known
            .is_some_and(|known| kept.last().is_some_and(|last| last.position > known.position));
        let was_ended = is_older || self.backups.lock().ended.contains(&wanted.state);
        if known.is_some() && was_ended {
            let what =
                format!("has a backup {:?} that was ended: choose another name", wanted.state);
            return Err(self.denied(&what));
        }
        let is_earlier = |since: &Kept| known.is_none_or(|known| since.position < known.position);
        if let Some(since) = since.filter(|since| !is_earlier(since)) {
            let what = format!("the state {:?} is not older than {:?}", since.state, wanted.state);
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        self.check_merge_allows(&disk.layer_paths(), known)?;
        // What is wrong with the socket is found before a state is kept.
        let door = Door::open(self, &wanted.place, surroundings)?;
        let is_resumed = known.is_some();
        let known = match known {
            Some(known) => known.clone(),
            None => {
                let new = self.keep(&disk, &wanted.state, surroundings.0)?;
                // One of this name was dropped, and others may have been.
                let is_kept = |state: &str| kept.iter().any(|one| one.state == state);
                self.backups.lock().ended.retain(|state| is_kept(state));
                new
            }
        };
        let export = self.export_of(&disk, &known, since)?;
        let about = BackupInfo {
            state: known.state,
            since: wanted.since.clone(),
            place: door.place.clone(),
            export: export.name.clone(),
            file: known.file,
            len: export.disk.geometry().len,
            is_resumed,
            contexts: export.contexts.iter().map(|context| context.name().to_owned()).collect(),
        };
        self.backups.lock().under_way = Some(door.serve(self, export, about.clone())?);
        let (name, state, place) = (&self.name, &about.state, &about.place);
        tracing::info!("the state {state:?} of {name:?} is exported at {place} for a backup");
        Ok(about)
    }

    /// Makes sure that the merge that is under way, if one is, leaves all as it is that belongs to
    /// the state that is `known` (I1). A new one is a new layer, and none is put on top meanwhile.
    fn check_merge_allows(&self, layers: &[PathBuf], known: Option<&Kept>) -> Result<()> {
        let Some(known) = known else { return self.check_takes_layers() };
        match self.job_under_way() {
            Some(job) if !job.leaves_as_it_is(layers, known.position) => {
                Err(self.refused_by(&job, "which changes a layer that the state has"))
            }
            _ => Ok(()),
        }
    }

    /// Ends the backup that is under way: its state is no longer exported, and stays kept.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub(crate) fn end_backup(&self) -> Result<BackupInfo> {
        let _changes = self.lock_changes();
        let ended = self.backups.lock().under_way.take().ok_or_else(|| {
            let what = format!("the disk {:?} has no backup under way", self.name);
            Error::new(ErrorKind::NotFound, what)
        })?;
        let about = ended.about.clone();
        drop(ended);
        self.backups.lock().ended.insert(about.state.clone());
        tracing::info!("the backup {:?} of {:?} was ended", about.state, self.name);
        Ok(about)
    }

    /// The backup that is under way.
    pub(crate) fn backup(&self) -> Option<BackupInfo> {
        self.backups.lock().under_way.as_ref().map(|backup| backup.about.clone())
    }

    /// What clients of the backup that is under way get if they use TLS, and where.
    pub(crate) fn backup_tls(&self) -> Option<(Tls, String)> {
        let backups = self.backups.lock();
        let backup = backups.under_way.as_ref()?;
        Some((backup.tls.clone()?, backup.about.place.clone()))
    }

    /// The states that are kept, from the oldest.
    ///
    /// # Errors
    /// `Denied` if the disk is closed; `Unsupported` if it is no chain that is written.
    pub(crate) fn kept_states(&self) -> Result<Vec<Kept>> {
        let disk = self.opened().disk()?;
        let image = self.image();
        chain(&*disk)?;
        // States are named after the file itself.
        let image = image.canonicalize().unwrap_or_else(|_| image.to_path_buf());
        let layers = disk.layer_paths();
        let kept = kept_states(&image, &layers).into_iter();
        let kept = kept.map(|(position, state)| {
            let file = layers[position].clone();
            Kept { state, file, position }
        });
        Ok(kept.collect())
    }

    /// The state of this name.
    pub(crate) fn find<'a>(&self, kept: &'a [Kept], state: &str) -> Result<&'a Kept> {
        kept.iter().rfind(|one| one.state == state).ok_or_else(|| {
            let names = state_names(kept.iter());
            let there = if kept.is_empty() { "has none" } else { "has " };
            let what = format!(
                "no state {state:?} is kept of the disk {:?}: it {there}{names}",
                self.name
            );
            Error::new(ErrorKind::NotFound, what)
        })
    }

    /// Keeps the present state.
    fn keep(&self, disk: &Arc<dyn Manage>, state: &str, outside: &Outside) -> Result<Kept> {
        if self.settings.overlay.is_some() {
            let what = "states can only be kept of permanent images, and this disk is ephemeral";
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let cluster_bytes = chain(&**disk)?.cluster_bytes().ok_or_else(|| {
            let what = format!(
                "the disk {:?} is a raw image, of which states cannot be kept: put a layer on top \
                 of it first (`mica ctl snapshot`)",
                self.name
            );
            Error::new(ErrorKind::Unsupported, what)
        })?;
        self.remove_dropped(&disk.layer_paths(), None);
        let keeping = Arc::new(Keeping::new(&self.image(), state)?);
        let options = self.images.image_options(Arc::clone(&self.resources.handles))?;
        let executor = Executor::new(Backend::Pool)
            .map_err(|error| Error::from_io("making a layer", error))?;
        let alike = |old: &File, new: &File| outside.make_alike(old, new);
        let made = keeping.make_overlay((cluster_bytes, disk.geometry().len), options, alike);
        let ahead = self.write_ahead(disk);
        let made = executor.block_on(made);
        let kept = made.and_then(|()| ahead.wait().flatten()).and_then(|()| {
            keeping.link()?;
            let (names, disk) = (Arc::clone(&keeping), Arc::clone(disk));
            self.resources.workers.run(move || async move {
                chain(&*disk)?.push(names.overlay(), &*names, None).await
            })?
        });
        if let Err(error) = kept {
            keeping.give_up();
            return Err(error);
        }
        let kept = self.kept_states()?;
        self.find(&kept, state).cloned()
    }

    /// The export of what is `kept`, with what has changed `since` another state.
    fn export_of(
        &self,
        disk: &Arc<dyn Manage>,
        kept: &Kept,
        since: Option<&Kept>,
    ) -> Result<Export> {
        let (live, position) = (disk, kept.position);
        let disk = Arc::clone(live);
        let view = self
            .resources
            .workers
            .run(move || async move { chain(&*disk)?.view(position).await })??;
        let files = live.layer_paths();
        let is_there = |state: &Kept| files.get(state.position) == Some(&state.file);
        if ![Some(kept), since].into_iter().flatten().all(is_there) {
            return Err(self.denied("has other layers now, as a merge has just ended: try again"));
        }
        let disk = Arc::clone(&view.disk);
        let layers = Layered::fixed(view);
        let mut contexts: Vec<Arc<dyn Context>> = vec![Arc::new(Depth(layers.clone()))];
        let beneath = |state: &Kept| state.position.checked_sub(1).map(|below| &*files[below]);
        let mut description = format!("the state {}", self.description_of(kept, beneath(kept)));
        if let Some(since) = since {
            contexts.push(Arc::new(ChangedSince::new(&since.state, layers, since.position)));
            // Another state may have had its name when readers got that.
            let since = self.description_of(since, beneath(since));
            description += &format!("; since {since}");
        }
        Ok(Export {
            disk,
            name: self.export_name().to_owned(),
            description,
            discard: self.settings.discard.into(),
            // Nobody writes there.
            edges: Arc::default(),
            contexts,
        })
    }

    /// What is said of a state that is `kept`, on the layer whose file is `beneath`.
    fn description_of(&self, kept: &Kept, beneath: Option<&Path>) -> String {
        let (state, name, found) = (&kept.state, &self.name, kept.file.metadata());
        let time = found.as_ref().map(time_of).unwrap_or_default();
        let file_of = |found: &Metadata| file_of(found.ino(), made_at(found));
        let file = found.as_ref().ok().and_then(file_of);
        let beneath = match beneath {
            None => Some("nothing".to_owned()),
            Some(path) => {
                path.metadata().ok().as_ref().and_then(file_of).map(|of| format!("file {of}"))
            }
        };
        description((state, name), &time, (file.as_deref(), beneath.as_deref()))
    }
}

/// Where a backup is read. Clients that connect wait until it is served.
struct Door {
    place: String,
    tls: Option<Tls>,
    exports: Arc<Exports>,
    address: nbd::Address,
    descriptors: SetAside,
}

impl Door {
    fn open(
        served: &Served,
        place: &NbdPlace,
        (outside, granted): (&Outside, Option<&Granted>),
    ) -> Result<Self> {
        let Served { settings, resources, .. } = served;
        let settings = DiskSettings {
            nbd: vec![place.clone()],
            tls: settings.tls,
            tls_certificates: settings.tls_certificates.clone(),
            tls_verify_peer: settings.tls_verify_peer,
            allow_plain_tcp: settings.allow_plain_tcp,
            ..DiskSettings::default()
        };
        if let Some(granted) = granted {
            granted.check_sockets(&settings)?;
        }
        let exports = Arc::<Exports>::default();
        let certificate = |file: &Path| outside.open_certificate(file);
        let security = Security::of(&settings);
        let at = place.address().ok_or_else(|| {
            Error::new(ErrorKind::Invalid, format!("nbd {place}: there is no such place"))
        })?;
        let held = security.listen(&served.name, &at, &mut None, &certificate)?;
        held.listener.own_file();
        let (place, tls) = (held.place(), held.listener.tls().cloned());
        let limits = Limits::default();
        let address = nbd::Address::open(held.listener, &exports, &resources.workers, &limits)?;
        let descriptors = resources.handles.set_aside(DESCRIPTORS);
        Ok(Self { place, tls, exports, address, descriptors })
    }

    fn serve(self, served: &Served, export: Export, about: BackupInfo) -> Result<Backup> {
        let Self { tls, exports, address, descriptors, .. } = self;
        let limits = Limits { connections_max: served.settings.clients_max(), ..Limits::default() };
        let prepared = nbd::Server::prepare(nbd::ServerConfig {
            seats: vec![Arc::new(exports.join(&export.name)?)],
            export,
            workers: Arc::clone(&served.resources.workers),
            limits,
        })?;
        let running = prepared.start();
        Ok(Backup { about, tls, _running: running, _address: address, _descriptors: descriptors })
    }
}

/// The names of states that are `kept`, the last ones first, and how many more there are.
pub(super) fn state_names<'a>(kept: impl DoubleEndedIterator<Item = &'a Kept>) -> String {
    let mut kept = kept.rev();
    let names = kept.by_ref().take(STATES_NAMED_MAX).map(|one| one.state.as_str());
    let mut names = names.collect::<Vec<_>>().join(", ");
    if let more @ 1.. = kept.count() {
        names += &format!(" and {more} older ones");
    }
    names
}

/// When the file of a state was changed last: seconds since 1970. It changes no more, unless the
/// state beneath is dropped.
fn time_of(found: &Metadata) -> String {
    format!("{}.{:09}", found.mtime(), found.mtime_nsec())
}

/// How long after the start of 1970 a file was made, if its file system knows.
fn made_at(found: &Metadata) -> Option<Duration> {
    found.created().ok().and_then(|made| made.duration_since(UNIX_EPOCH).ok())
}

/// Which file a state is in, as long as it is kept: its inode, and when it was made. Readers know
/// by it whether a state is the one that they have begun to read, or have. `None` if the file
/// system does not know when: the inode alone may be that of another file by now.
fn file_of(inode: u64, made: Option<Duration>) -> Option<String> {
    let made = made.filter(|made| !made.is_zero())?;
    Some(format!("{inode} {}", made.as_nanos()))
}

/// What is said of a state of a disk: when its file was changed last, which that is, and on what it
/// stands. If the first is another one and the last is not, no merge has changed it.
fn description(
    (state, disk): (&str, &str),
    time: &str,
    (file, beneath): (Option<&str>, Option<&str>),
) -> String {
    let beneath = beneath.map(|beneath| format!(" on {beneath}")).unwrap_or_default();
    let place = file.map(|file| format!(" in file {file}{beneath}")).unwrap_or_default();
    format!("{state} of {disk}, kept at {time}{place}")
}

fn chain(disk: &dyn Manage) -> Result<&dyn ManageChain> {
    disk.chain().ok_or_else(|| {
        let what = match Disk::is_writable(disk) {
            true => {
                "states of such a disk cannot be kept as layers: `mica convert` makes a qcow2 image"
            }
            false => "states can only be kept of a writable disk, and this one is read-only",
        };
        Error::new(ErrorKind::Unsupported, what)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: where files have no birth time, a state that got the inode of a dropped one of
    /// its name passed as that one.
    #[test]
    fn file_is_named_only_if_it_is_known_when_it_was_made() {
        let file = file_of(7, Some(Duration::new(1, 2)));
        let said = |file: Option<String>, beneath| {
            description(("tue", "web"), "12.5", (file.as_deref(), beneath))
        };
        let wanted = "tue of web, kept at 12.5 in file 7 1000000002";
        assert_eq!(said(file.clone(), None), wanted);
        assert_eq!(said(file, Some("file 6 1")), format!("{wanted} on file 6 1"));
        for unknown in [None, Some(Duration::ZERO)] {
            assert_eq!(said(file_of(7, unknown), Some("nothing")), "tue of web, kept at 12.5");
        }
    }
}
