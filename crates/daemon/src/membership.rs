//! Disks come and go while the process serves: by command, or because the configuration is read
//! again.
//!
//! Invariants
//! - I1 Whoever stops all disks stops each that is open: one that is opened meanwhile answers
//!   nobody, and is closed.
//! - I2 What could not be written to the image of a disk that was removed is reported at the end of
//!   the process, too.
//! - I3 A configuration that is not understood changes nothing, and one that is never touches a
//!   disk that somebody else has added. Certificates that cannot be used change nothing, either.
//! - I4 A disk that the configuration names is in the set, whether it can be served or not: as at
//!   the start of the process, it is `failed` until it can. Except if another disk is in its place.
//! - I5 The settings of a disk change only while it is closed.

use crate::certificates::{self, Renewed};
use crate::config::{Config, DiskConfig, GoneDisk, GoneDisks, LeftClosed};
use crate::listed::{Names, Stamp};
use crate::overlay::Overlay;
use crate::served::{Served, Source};
use crate::shared::Shared;
use crate::sockets::Sockets;
use mica_block::{Error, ErrorKind, Result};
use mica_store::WritesInPlace;
use parking_lot::MutexGuard;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

/// Disks whose memory is worth looking for: some 35 KiB each.
const GONE_MIN: usize = 64;

impl Shared {
    /// Adds a disk and serves it. The caller holds [`Self::hold`].
    ///
    /// # Errors
    /// Whatever prevents it from being served: then it is not added.
    pub(crate) fn add(&self, disk: DiskConfig, source: Source) -> Result<Arc<Served>> {
        self.check_addable(&disk, false)?;
        let served = self.admit(disk, source)?;
        self.begin(&served).inspect_err(|_| self.discard(&served))?;
        Ok(served)
    }

    /// Adds a disk of the configuration and serves it. If that fails, it is one of the disks all
    /// the same (I4).
    fn add_configured(&self, disk: DiskConfig) -> Result<()> {
        let addable = self.check_addable(&disk, false);
        let served = self.admit(disk, Source::Configuration)?;
        let begun = match addable {
            Ok(()) => self.begin(&served),
            Err(error) => {
                served.fail(error.clone());
                Err(error)
            }
        };
        begun.inspect_err(|_| match self.is_stopping() {
            true => self.discard(&served),
            false => served.give_up_sockets(),
        })
    }

    /// Opens a new disk and serves it.
    fn begin(&self, served: &Arc<Served>) -> Result<()> {
        served.prepare(Duration::ZERO).map_err(|error| self.explained(served, error))?;
        if self.is_stopping() {
            return Err(Error::new(ErrorKind::Denied, "the server is stopping"));
        }
        served.start();
        Self::own_sockets(served);
        served.announce();
        Ok(())
    }

    /// Forgets a disk that nobody has used.
    fn discard(&self, served: &Arc<Served>) {
        // The first failure is the one to report.
        let _ = served.remove();
        self.disks.remove(served);
    }

    /// Makes a disk one of the set, which is not open yet.
    fn admit(&self, mut disk: DiskConfig, source: Source) -> Result<Arc<Served>> {
        // What else is wrong with a second one of this name matters less.
        self.disks.check_name(&disk.name)?;
        // One that is put in the place of another may go on with what was written to that.
        if disk.settings.overlay.is_none() {
            disk.settings.overlay = Overlay::wanted(disk.settings.ephemeral);
        }
        // Another disk would wait for its writes.
        self.resources.handles.set_writes_in_place(WritesInPlace::Forbidden);
        let served = Arc::new(Served::new(disk, &mut Sockets::default(), &self.resources)?);
        served.set_source(source);
        self.disks.add(Arc::clone(&served))?;
        Ok(served)
    }

    /// Refuses a disk that this process cannot serve, or not whole: with its redo log, for one.
    fn check_addable(&self, disk: &DiskConfig, has_sockets: bool) -> Result<()> {
        if let Some(what) = disk.problem(has_sockets) {
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        // The sandbox would look for the folder of something that is in none.
        if disk.is_file() {
            mica_stack::refuse_no_path(&disk.image)?;
        }
        self.granted.as_ref().map_or(Ok(()), |granted| granted.check(disk))
    }

    /// What keeps `served` from being opened, with the disk of this process that has its image: the
    /// system only knows that this process has it.
    pub(crate) fn explained(&self, served: &Served, error: Error) -> Error {
        let file = |path: &Path| path.metadata().ok().map(|found| (found.dev(), found.ino()));
        let Some(held) = error.held().and_then(file) else { return error };
        let has_it = |other: &Arc<Served>| {
            let writes = other.is_open() && other.image_figures().is_writable;
            other.name != served.name && writes && file(&other.image()) == Some(held)
        };
        let Some(other) = self.disks.all().into_iter().find(has_it) else { return error };
        let what = format!("the disk {:?} of this server writes it", other.name);
        let error = Error::new(ErrorKind::Denied, format!("{}: {what}", other.image().display()));
        served.set_failure(&error);
        error
    }

    /// Stops serving a disk and forgets it. The caller holds [`Self::hold`].
    ///
    /// # Errors
    /// If some acknowledged writes are not in its image.
    pub(crate) fn remove(&self, served: &Arc<Served>) -> Result<()> {
        self.note_removed(served);
        let forgotten = self.forget(served);
        self.give_memory_back();
        forgotten
    }

    /// Notes that a disk of the configuration was removed by command. Of one that was added by
    /// command only the file tells whether that lists it: its table was saved there since.
    fn note_removed(&self, served: &Served) {
        let listed = self.listed();
        let mut removed = self.removed();
        if let Some(listed) = &listed {
            // What is removed from the file, too, is not kept forever.
            removed.retain(|name| listed.contains(name));
        }
        let is_listed = listed.is_some_and(|listed| listed.contains(&served.name));
        if served.source() == Source::Configuration || is_listed {
            removed.insert(served.name.clone());
        }
    }

    /// The disks that the configuration file lists now, if there is one that is understood.
    fn listed(&self) -> Option<Names> {
        let file = self.config_file.as_deref()?;
        let opened = self.open_config(file).ok()?;
        let stamp = Stamp::of(&opened.metadata().ok()?);
        let read = || Self::read_text(file, opened).ok();
        let parse = |text: &str| {
            let config = Self::parse_config(file, text).ok()?;
            Some(config.disks.into_iter().map(|disk| disk.name).collect())
        };
        self.listed.lock().names(stamp, SystemTime::now(), read, parse)
    }

    /// Disks of the configuration that were removed by command.
    pub(crate) fn removed(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.removed.lock()
    }

    fn forget(&self, served: &Arc<Served>) -> Result<()> {
        let removed = served.remove().inspect_err(|error| {
            let mut lost = self.lost.lock();
            lost.get_or_insert_with(|| error.clone());
        });
        self.disks.remove(served);
        self.gone.fetch_add(1, Ordering::Relaxed);
        removed
    }

    /// Gives back what many disks used that are gone: the heap would keep it for others, which may
    /// never come.
    fn give_memory_back(&self) {
        let is_much = |gone: usize| (gone >= GONE_MIN).then_some(0);
        if self.gone.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_much).is_ok() {
            mica_rt::release_freed_memory();
        }
    }

    /// Serves a disk again that was drained or could not be served. The caller holds
    /// [`Self::hold`].
    ///
    /// # Errors
    /// Whatever prevents that; `Denied` if it is served.
    pub(crate) fn undrain(&self, served: &Served) -> Result<()> {
        let has_sockets = served.doors().device().is_some() || !served.doors().seats().is_empty();
        // Its folder of redo logs may be another by now than the sandbox was made for.
        self.check_addable(&served.config(), has_sockets)?;
        let undrained = served.undrain(&|| self.is_stopping());
        undrained.map_err(|error| self.explained(served, error))?;
        Self::own_sockets(served);
        served.announce();
        Ok(())
    }

    /// Whether there is a configuration or a certificate to read again. An address is locked while
    /// its certificates are read, so this may hang.
    pub(crate) fn has_what_to_reload(&self) -> bool {
        self.config_file.is_some()
            || certificates::are_used(&self.resources.addresses, &self.disks.all())
    }

    /// Reads certificates and the configuration file again, as far as there are any: disks that are
    /// new in it are added, those that it no longer has are removed.
    ///
    /// # Errors
    /// If there is nothing to read, the configuration is not understood, or it is being read
    /// already: then nothing changes.
    pub(crate) fn reload(&self) -> Result<Reloaded> {
        if !self.has_what_to_reload() {
            let what = "there is no configuration to reload: the server was started without \
                        --config";
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let _one = self
            .reloading
            .try_lock()
            .ok_or_else(|| Error::new(ErrorKind::Denied, "a reload is already under way"))?;
        self.reload_alone()
    }

    /// As [`Self::reload`], for a signal, if there is anything to read; the outcome is logged. Of
    /// several that come while it is read only one reads it, once more: what was there before the
    /// last of them is read.
    pub(crate) fn hang_up(&self) {
        if !self.has_what_to_reload() {
            return;
        }
        self.is_hung_up.store(true, Ordering::SeqCst);
        while self.is_hung_up.load(Ordering::SeqCst) {
            // Who has it looks again after giving it back.
            let Some(_one) = self.hang_ups.try_lock() else { return };
            while self.is_hung_up.swap(false, Ordering::SeqCst) {
                let _alone = self.reloading.lock();
                match self.reload_alone() {
                    Ok(reloaded) => reloaded.log(),
                    Err(error) => tracing::error!("not reloaded: {}", error.in_one_line()),
                }
            }
        }
    }

    /// The caller holds `reloading`.
    fn reload_alone(&self) -> Result<Reloaded> {
        let _held = self.hold()?;
        let read = |file: &Path| {
            let text = Self::read_text(file, self.open_config(file)?)?;
            Self::parse_config(file, &text)
        };
        let config = self.config_file.as_deref().map(read).transpose()?;
        // Addresses that the configuration adds read them anyway.
        let addresses = &self.resources.addresses;
        // Disks that are removed below are not to be kept by this list.
        let certificates = certificates::renew(addresses, &self.disks.all(), &self.outside);
        let is_config_read = config.is_some();
        let mut outcome = Reloaded { is_config_read, certificates, ..Reloaded::default() };
        match config {
            Some(config) => {
                self.change_to(config, &mut outcome);
                self.give_memory_back();
            }
            None => outcome.unchanged = self.disks.all().len(),
        }
        Ok(outcome)
    }

    fn open_config(&self, file: &Path) -> Result<File> {
        self.outside.open_config(file).map(File::from)
    }

    /// What is in the configuration `file`, which was `opened`, now.
    fn read_text(file: &Path, opened: File) -> Result<String> {
        let mut text = String::new();
        let read = opened.take(CONFIG_BYTES_MAX + 1).read_to_string(&mut text);
        read.map_err(|error| Error::from_io(format!("reading {}", file.display()), error))?;
        if text.len() as u64 > CONFIG_BYTES_MAX {
            let what = format!("{} is longer than {CONFIG_BYTES_MAX} bytes", file.display());
            return Err(Error::new(ErrorKind::Limit, what));
        }
        Ok(text)
    }

    /// The configuration that `text`, which was in `file`, is.
    fn parse_config(file: &Path, text: &str) -> Result<Config> {
        let config = Config::parse(file, text)?;
        // A disk that is new is checked for a place of its own when it is added.
        config.problems(true).into_iter().next().map_or(Ok(config), Err)
    }

    /// Adds and removes disks, so that they are those of `config`.
    fn change_to(&self, config: Config, outcome: &mut Reloaded) {
        self.removed().retain(|name| config.disks.iter().any(|disk| disk.name == *name));
        self.note_process_settings(&config, outcome);
        let mut gone = GoneDisks::default();
        // Those that go first make room for those that come.
        for served in self.disks.all() {
            let stays = config.disks.iter().any(|disk| disk.name == served.name);
            if stays || served.source() == Source::Command {
                continue;
            }
            if served.is_drained() {
                let (name, left) = (served.name.clone(), served.left_closed());
                gone.add(served.config().image, GoneDisk { name, left });
            }
            match self.forget(&served) {
                Ok(()) => outcome.removed.push(served.name.clone()),
                Err(error) => outcome.refuse(&served.name, None, &error),
            }
        }
        let places: Vec<_> = (0..config.disks.len()).map(|index| config.line(index)).collect();
        for (disk, at) in config.disks.into_iter().zip(places) {
            let name = disk.name.clone();
            match self.apply(disk, &gone) {
                Ok(Applied::Added) => outcome.added.push(name),
                Ok(Applied::LeftClosed { before }) => outcome.notes.push(format!(
                    "disk {name:?} has the image of {before:?}, which was drained: it stays drained \
                     until `mica ctl undrain {name}`"
                )),
                Ok(Applied::ChangedClosed) => outcome.notes.push(format!(
                    "disk {name:?} has new settings, and stays drained until \
                     `mica ctl undrain {name}`"
                )),
                Ok(Applied::Unchanged) => outcome.unchanged += 1,
                Err(error) => outcome.refuse(&name, at, &error),
            }
        }
    }

    /// Makes a disk of the configuration one of this process, after those that are `gone` were
    /// removed.
    fn apply(&self, disk: DiskConfig, gone: &GoneDisks) -> Result<Applied> {
        let known = self.disks.named(&disk.name);
        if let Some(gone) = gone.renamed(&disk, |_| known.is_some()) {
            self.admit(disk, Source::Configuration)?.leave_closed(gone.left.clone());
            return Ok(Applied::LeftClosed { before: gone.name.clone() });
        }
        let Some(served) = known else {
            return self.add_configured(disk).map(|()| Applied::Added);
        };
        let differences = disk.differences(&served.config())?;
        if !differences.is_empty() && (served.is_drained() || served.could_not_be_served()) {
            return self.replace(&served, disk);
        }
        if !differences.is_empty() {
            let what = format!(
                "it is served with other settings ({}): remove it, then reload",
                differences.join(", ")
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        served.set_source(Source::Configuration);
        if served.could_not_be_served() {
            return self.undrain(&served).map(|()| Applied::Added);
        }
        Ok(Applied::Unchanged)
    }

    /// Puts `disk` in the place of one of its name that is closed (I5). One that was drained stays
    /// so, and an ephemeral one keeps what was written to it.
    fn replace(&self, closed: &Arc<Served>, mut disk: DiskConfig) -> Result<Applied> {
        let is_same_image = disk.image == closed.config().image;
        let left = closed.is_drained().then(|| match is_same_image {
            true => closed.left_closed(),
            false => LeftClosed::default(),
        });
        let (before, left_before) = (closed.config(), closed.left_closed());
        disk.go_on_from(&before);
        let failure = closed.failure();
        // What it has lost is reported at the end.
        let _ = self.forget(closed);
        // Another disk may have a place of it: then it stays as it was, and the next reload tries
        // it again (I4).
        let restore = |error: &Error| {
            let Ok(served) = self.admit(before.clone(), Source::Configuration) else { return };
            match left {
                Some(_) => served.leave_closed(left_before.clone()),
                None => served.fail(failure.clone().unwrap_or_else(|| error.clone())),
            }
        };
        match &left {
            None => {
                let added = self.add_configured(disk).map(|()| Applied::Added);
                added.inspect_err(|error| {
                    if self.disks.named(&before.name).is_none() {
                        restore(error);
                    }
                })
            }
            Some(left) => {
                let admitted = self.admit(disk, Source::Configuration).inspect_err(restore)?;
                admitted.leave_closed(left.clone());
                Ok(Applied::ChangedClosed)
            }
        }
    }

    /// What a running process cannot change of itself is said.
    fn note_process_settings(&self, config: &Config, outcome: &mut Reloaded) {
        if config.process != self.process {
            outcome.notes.push(
                "settings outside the tables of disks take effect at the next start".to_owned(),
            );
        }
    }
}

/// Longest configuration file, in bytes.
const CONFIG_BYTES_MAX: u64 = 64 << 20;

enum Applied {
    Added,
    Unchanged,
    /// It has other settings, and stays drained.
    ChangedClosed,
    /// It stays closed, as the disk of its image was `before`.
    LeftClosed {
        before: String,
    },
}

/// What came of reading the configuration again.
#[derive(Default, Serialize, Debug)]
pub(crate) struct Reloaded {
    /// Whether there is a configuration. Without one only certificates were read.
    #[serde(skip)]
    is_config_read: bool,
    pub(crate) added: Vec<String>,
    pub(crate) removed: Vec<String>,
    pub(crate) unchanged: usize,
    pub(crate) refused: Vec<Refused>,
    pub(crate) certificates: Vec<Renewed>,
    pub(crate) notes: Vec<String>,
}

/// A disk that is not as the configuration says, and why.
#[derive(Serialize, Debug)]
pub(crate) struct Refused {
    pub(crate) disk: String,
    /// Where the configuration names it: file and line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) at: Option<String>,
    pub(crate) error: String,
}

impl Reloaded {
    fn refuse(&mut self, disk: &str, at: Option<String>, error: &Error) {
        self.refused.push(Refused { disk: disk.to_owned(), at, error: error.in_one_line() });
    }

    /// Logs it.
    pub(crate) fn log(&self) {
        let Self { refused, certificates, notes, .. } = self;
        if self.is_config_read {
            tracing::info!("the configuration was read again: {}", self.changes());
        }
        for Refused { disk, at, error } in refused {
            let at = at.as_ref().map(|at| format!("{at}: ")).unwrap_or_default();
            tracing::error!("{at}disk {disk:?}: {error}");
        }
        for Renewed { folder, addresses, error } in certificates {
            let at = addresses.join(", ");
            match error {
                Some(error) => {
                    tracing::error!("clients at {at} still get the old certificates: {error}");
                }
                None => tracing::info!("read the certificates in {folder} again, for {at}"),
            }
        }
        notes.iter().for_each(|note| tracing::warn!("{note}"));
    }

    /// What became of the disks, for the log.
    fn changes(&self) -> String {
        let mut said = Vec::new();
        for (what, names) in [("added", &self.added), ("removed", &self.removed)] {
            if !names.is_empty() {
                said.push(format!("{what} {}", names.join(", ")));
            }
        }
        if said.is_empty() {
            said.push("no disk was added or removed".to_owned());
        }
        said.push(match self.unchanged {
            1 => "1 is left as it was".to_owned(),
            count => format!("{count} are left as they were"),
        });
        said.join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_reload_did_is_said_in_one_line() {
        let names = |all: &[&str]| all.iter().map(|name| (*name).to_owned()).collect();
        let quiet = Reloaded { unchanged: 1, ..Reloaded::default() };
        assert_eq!(quiet.changes(), "no disk was added or removed; 1 is left as it was");
        let (added, removed) = (names(&["a", "b"]), names(&["c"]));
        let busy = Reloaded { added, removed, unchanged: 2, ..Reloaded::default() };
        assert_eq!(busy.changes(), "added a, b; removed c; 2 are left as they were");
    }
}
