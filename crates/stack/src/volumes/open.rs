//! Opening a volume, or a snapshot of one.

use super::alive::{AliveNote, Kept};
use super::faults::StoreFaults;
use super::held::HeldVolume;
use super::keys::read_volume_key;
use super::lock::{CompactorLock, VolumeLock};
use super::logs::LogPlace;
use super::machine::host;
use super::stores::{Store, Stores};
use super::url::VolumeUrl;
use super::waiting::SAY_AFTER_OF_SERVERS;
use mica_block::{Error, ErrorKind, Manage, Result};
use mica_rt::timeout;
use mica_volume::{
    Claimed, Durability, Keep, LogDevice, NewVolume, Opening, Seen, SnapshotPer, Volume,
    VolumeInfo, VolumeKey, VolumeName, Volumes, Writer,
};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;

/// How often who has a volume is asked again while its lock is held. Only compactors open volumes
/// without that, each of them once, and whoever has passed the lock by, whom this is left to.
const ASKED_AGAIN_MAX: u32 = 4;

/// How a volume is opened.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct VolumeOptions {
    /// What for. A snapshot is only read.
    pub access: VolumeAccess,
    /// The file with its key, if it is encrypted.
    pub key: Option<PathBuf>,
    /// Whether another writer that may be alive is fenced, and what is only in its log given up.
    pub force: bool,
    /// The log of what is not in the store yet.
    pub log: Option<LogPlace>,
    /// What the answer to a flush promises: that what was written is in the log, if there is one,
    /// unless this says something else.
    pub durability: Option<Durability>,
    /// Automatic snapshots, while somebody tends the volume: how many are taken, and kept.
    pub keep: Option<Keep>,
    /// Whether they are taken after each write or flush, and not in intervals.
    pub snapshot_per: SnapshotPer,
    /// Memory for what boots of its image read first, which is recorded and fetched ahead while
    /// somebody tends the volume; 0 if it is not.
    pub boot_fetch: u64,
    /// How its store misbehaves, for tests.
    pub faults: StoreFaults,
}

/// What a volume is opened for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum VolumeAccess {
    /// To read it.
    #[default]
    Read,
    /// To read and write it.
    Write,
    /// To write an image into it, which [`Store::begin_import`] made, under this identity: until it
    /// is closed, nobody may take it for all of that. Another of its name is left alone.
    Import([u8; 16]),
}

/// Whether a volume is open, as far as heads and the lock of this machine say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Standing {
    Closed,
    /// Its writer was on this machine and is dead.
    Abandoned,
    /// Its writer may be alive.
    Open,
}

/// A volume whose lock was taken, if it is on this machine.
pub(super) struct Locked {
    pub(super) lock: Option<VolumeLock>,
    pub(super) standing: Standing,
    /// Its writer, if that is dead and only what it left on this machine says so.
    pub(super) dead: Option<Kept>,
    /// Which volume it is.
    pub(super) volume: [u8; 16],
    /// The number of its head when that was found out.
    pub(super) head: u64,
    /// The writer that this head named.
    writer: Option<Writer>,
    /// The log that it named.
    log: Option<PathBuf>,
    /// Whether it was handed over to a host that has not opened it yet.
    is_handed: bool,
    is_encrypted: bool,
    /// The head that says all this, for who opens the volume next.
    seen: Seen,
}

impl Locked {
    /// The log of a writer of this machine that did not close the volume. The head names it, too:
    /// the file of the lock may have been lost, as where a store was copied without it.
    pub(super) fn left(&self) -> Option<&Path> {
        let lock = self.lock.as_ref().filter(|_| self.standing == Standing::Abandoned)?;
        lock.found().log.as_deref().or(self.log.as_deref())
    }

    /// What a verb may do about the writer without force: only the dead one is fenced, as another
    /// process may have found out the same, and may serve the volume by now.
    pub(super) fn claimed(&self) -> Claimed {
        match (self.standing, self.writer) {
            (Standing::Abandoned, Some(dead)) => Claimed::TakeOverOf(dead),
            _ => Claimed::OnlyIfClosed,
        }
    }

    fn opening(&self, claimed: Claimed) -> Opening {
        Opening { seen: Some(self.seen.clone()), ..claimed.into() }
    }

    /// Checks that the volume is complete, and not the beginning of an import.
    pub(super) fn check_whole(&self, name: &VolumeName) -> Result<()> {
        let is_import = self.lock.as_ref().is_some_and(|lock| lock.found().is_import);
        if is_import && self.standing != Standing::Closed {
            Err(part_of_image(name))
        } else {
            Ok(())
        }
    }

    fn give_back(&mut self) {
        self.lock.iter_mut().for_each(VolumeLock::give_back);
    }

    pub(super) fn sign(&self, log: Option<&Path>, is_import: bool) -> Result<()> {
        self.lock.as_ref().map_or(Ok(()), |lock| lock.sign(log, is_import))
    }
}

impl Stores {
    /// Opens what `url` names.
    ///
    /// # Errors
    /// `NotFound` if it does not exist; `Denied` if a writer has it that may be alive, unless that
    /// one is to be fenced, or if it is part of an image whose import did not end, or takes another
    /// key; `Invalid` if it takes none, or the file has none.
    pub async fn open_volume(
        &self,
        url: &VolumeUrl,
        options: &VolumeOptions,
    ) -> Result<Arc<dyn Manage>> {
        let mut opening = pin!(self.open_silently(url, options));
        if let Ok(opened) = timeout(SAY_AFTER_OF_SERVERS, opening.as_mut()).await {
            return opened;
        }
        let (name, store, seconds) =
            (url.name.as_str(), &url.store, SAY_AFTER_OF_SERVERS.as_secs());
        tracing::warn!("volume {name} is not open after {seconds} s: still waiting for {store}");
        opening.await
    }

    async fn open_silently(
        &self,
        url: &VolumeUrl,
        options: &VolumeOptions,
    ) -> Result<Arc<dyn Manage>> {
        let store = self.open_with(&url.store, &options.faults).await?;
        let key = options.key.as_deref().map(read_volume_key).transpose()?;
        // A user who names a key believes that the volume is encrypted.
        let check_key = |is_encrypted: bool| match is_encrypted || options.key.is_none() {
            true => Ok(()),
            false => Err(takes_no_key(&url.name)),
        };
        let volumes = store.volumes().with_key(key).with_boot_fetch(options.boot_fetch);
        if let Some(which) = url.which() {
            if options.key.is_some() {
                check_key(volumes.info(&url.name).await?.properties.key().is_some())?;
            }
            return Ok(Arc::new(volumes.open_snapshot(&url.name, &which).await?));
        }
        if options.access == VolumeAccess::Read {
            check_key(store.check_readable(&url.name).await?.properties.key().is_some())?;
            return Ok(Arc::new(volumes.open_readable(&url.name).await?));
        }
        let mut locked = store.locked(&url.name, options.force).await?;
        check_key(locked.is_encrypted).inspect_err(|_| locked.give_back())?;
        if !matches!(options.access, VolumeAccess::Import(_)) {
            locked.check_whole(&url.name).inspect_err(|_| locked.give_back())?;
        }
        let log = match &options.log {
            Some(place) => Some(self.log(place).await.inspect_err(|_| locked.give_back())?),
            None => None,
        };
        let volume = store.open_held((&volumes, &url.name), &mut locked, options, log).await;
        let volume = volume.inspect_err(|_| locked.give_back())?;
        locked.lock.iter_mut().for_each(VolumeLock::keep);
        locked.dead.iter().for_each(AliveNote::forget);
        let needs_sign = options.access == VolumeAccess::Write && options.log.is_none();
        let alive = needs_sign.then(|| store.sign_of_life(&volume, locked.volume)).flatten();
        let (volume, keep) = (Arc::new(volume), options.keep.clone());
        let keep = keep.map(|rules| (rules, options.snapshot_per));
        store.is_written(&url.name, &volume);
        Ok(Arc::new(HeldVolume::new(volume, (store, url.name.clone()), (locked.lock, alive), keep)))
    }
}

/// Why a volume is left alone whose key was named.
fn takes_no_key(name: &VolumeName) -> Error {
    let what = format!("volume {} is not encrypted: leave out --volume-key", name.as_str());
    Error::new(ErrorKind::Invalid, what)
}

/// Opens a volume for writing, and says in its lock's file who has it (lock, I3): before that as
/// the writer, and afterwards with its log, before anybody else can write.
async fn open_locked(
    volumes: &Volumes,
    name: &VolumeName,
    locked: &Locked,
    options: &VolumeOptions,
    log: Option<Arc<LogDevice>>,
) -> Result<Volume> {
    let made = match options.access {
        VolumeAccess::Import(made) => Some(made),
        VolumeAccess::Read | VolumeAccess::Write => None,
    };
    let is_import = made.is_some();
    let claimed = match (made, options.force, locked.standing, locked.left(), &log) {
        (Some(made), ..) => Claimed::JustMade(made),
        (None, true, ..) => Claimed::TakeOver,
        (_, _, Standing::Abandoned, None, _) => locked.claimed(),
        // The log knows whether it is the one.
        (_, _, Standing::Abandoned, Some(_), Some(_))
        | (_, _, Standing::Closed | Standing::Open, ..) => Claimed::Refuse,
        (_, _, Standing::Abandoned, Some(left), None) => return Err(needs_log(name, left)),
    };
    if let (Some(left), Some(log), false) = (locked.left(), &log, options.force)
        && log.found(locked.volume).is_none()
    {
        let place = options.log.as_ref().map_or(left, |place| &*place.path);
        return Err(lacks_records(name, left, place));
    }
    let usual = if log.is_some() { Durability::Host } else { Durability::Store };
    let durability = options.durability.unwrap_or(usual);
    let log_place = options.log.as_ref().map(|place| absolute(&place.path));
    let log_place = log_place.map(|path| path.display().to_string());
    let snapshot_per = options.snapshot_per;
    let opening = Opening { log, log_place, durability, snapshot_per, ..locked.opening(claimed) };
    // Of one that may be alive the file goes on to say what it says.
    if options.force || locked.standing != Standing::Open {
        locked.sign(locked.left(), is_import)?;
    }
    let opened = volumes.open_volume(name, opening).await;
    let volume = opened.inspect_err(|_| {
        locked.lock.iter().for_each(VolumeLock::restore);
    })?;
    let log = options.log.as_ref().map(|place| absolute(&place.path));
    if let Err(error) = locked.sign(log.as_deref(), is_import) {
        // Nobody has written. The first failure is the one to report.
        let _ = volume.close().await;
        return Err(error);
    }
    Ok(volume)
}

/// Where a log is, for whoever reads of it in another folder.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// A volume that a verb is about to change: as long as this is there, nobody on this machine opens
/// it.
pub struct Settled {
    _lock: Option<VolumeLock>,
}

impl Store {
    /// Makes a volume ready to be changed by a verb: if its writer was killed on this machine, its
    /// time is over, and what it had put into the store counts.
    ///
    /// # Errors
    /// `Denied` if another process of this machine has it open, or it is part of an image;
    /// otherwise what the store reports.
    pub async fn settle(&self, name: &VolumeName) -> Result<Settled> {
        let locked = self.locked(name, false).await?;
        self.settle_locked(name, locked).await
    }

    async fn settle_locked(&self, name: &VolumeName, mut locked: Locked) -> Result<Settled> {
        locked.check_whole(name)?;
        let needs_head = match locked.standing {
            Standing::Abandoned => true,
            // Nobody compacts it (compacting, K5), and a head would end that.
            Standing::Closed if locked.is_handed => false,
            // One that had the lock before may be about to open it: not after that (compacting,
            // K4).
            Standing::Closed => self.directory().is_some_and(CompactorLock::is_held),
            Standing::Open => false,
        };
        if needs_head {
            let open = async |locked: &Locked| match locked.left() {
                Some(left) => Err(needs_log(name, left)),
                None => {
                    let opening = locked.opening(locked.claimed());
                    self.volumes().open_without_blocks(name, opening).await
                }
            };
            self.asking_again(name, &mut locked, open).await?.close().await?;
            locked.dead.iter().for_each(AliveNote::forget);
        }
        if locked.standing != Standing::Open {
            // The verb may be killed as well.
            locked.sign(None, false)?;
        }
        Ok(Settled { _lock: locked.lock })
    }

    /// Makes a volume of `len` bytes for an image, which is written into it when it is opened for
    /// that. Until it is closed then, nobody takes it for a whole one: at no step of this. Returns
    /// which volume it is.
    ///
    /// # Errors
    /// As [`mica_volume::Volumes::create`]; `Denied` if another process of this machine makes it.
    pub async fn begin_import(
        &self,
        name: &VolumeName,
        len: u64,
        key: Option<Arc<VolumeKey>>,
        new: NewVolume,
    ) -> Result<[u8; 16]> {
        let volumes = self.volumes().with_key(key);
        let Some(directory) = self.directory() else {
            return volumes.create_unfinished(name, len, new).await;
        };
        let lock = VolumeLock::take(directory, name).await?;
        if !self.has(name).await? {
            lock.sign(None, true)?;
        }
        let made = volumes.create_unfinished(name, len, new).await;
        if made.is_err() {
            match self.has(name).await {
                Ok(false) => lock.remove(),
                // What there is, is another's.
                Ok(true) | Err(_) => lock.restore(),
            }
        }
        made
    }

    /// Deletes `volume`, which [`Self::begin_import`] made, if it was not closed. Its name may be
    /// that of another by now, which stays. Returns whether it is there, and whole.
    ///
    /// # Errors
    /// What the store reports; `Corrupt` if its newest head is damaged.
    pub async fn undo_import(&self, name: &VolumeName, volume: [u8; 16]) -> Result<bool> {
        let locked = match self.locked(name, false).await {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            // Whoever has the lock deletes it by force, or has another one.
            Err(error) if error.kind() == ErrorKind::Denied => None,
            locked => Some(locked?),
        };
        let is_whole = self.volumes().delete_unfinished(name, volume).await?;
        let lock = locked.filter(|locked| locked.volume == volume).and_then(|locked| locked.lock);
        if let Some(lock) = lock.filter(|_| !is_whole) {
            lock.remove();
        }
        Ok(is_whole)
    }

    /// Deletes a volume that nobody writes, or with `force` one that somebody may write: that
    /// writer is fenced first.
    ///
    /// # Errors
    /// `NotFound` if there is none; `Denied` if somebody has it open; `Corrupt` if its newest head
    /// is damaged, without force.
    pub async fn delete(&self, name: &VolumeName, force: bool) -> Result<()> {
        let mut locked = match self.locked(name, force).await {
            // Nobody can say who has it, and nobody can go on with it.
            Err(error) if force && error.kind() == ErrorKind::Corrupt => {
                return self.volumes().delete(name, Claimed::TakeOver).await;
            }
            locked => locked?,
        };
        let deleted = self.delete_held(name, &mut locked, force).await;
        deleted.inspect_err(|_| locked.give_back())?;
        locked.dead.iter().for_each(AliveNote::forget);
        if let Some(lock) = locked.lock {
            lock.remove();
        }
        Ok(())
    }

    async fn delete_held(&self, name: &VolumeName, locked: &mut Locked, force: bool) -> Result<()> {
        let delete = async |locked: &Locked| {
            let claimed = match locked.left() {
                _ if force => Claimed::TakeOver,
                None => locked.claimed(),
                Some(_) => Claimed::Refuse,
            };
            self.volumes().delete(name, claimed).await
        };
        self.asking_again(name, locked, delete).await
    }

    /// Takes the lock of a volume, if it is on this machine, and finds out who has it.
    ///
    /// # Errors
    /// `Denied` if another process of this machine has it open, and that is to be left; `NotFound`
    /// if there is none.
    pub(super) async fn locked(&self, name: &VolumeName, force: bool) -> Result<Locked> {
        let mut lock = match self.directory() {
            Some(directory) if force => Some(VolumeLock::take_by_force(directory, name).await?),
            Some(directory) => Some(VolumeLock::take(directory, name).await?),
            None => None,
        };
        match self.volumes().look(name).await {
            Ok(found) => Ok(self.standing_of(found, lock).await),
            Err(error) => {
                lock.iter_mut().for_each(VolumeLock::give_back);
                if let Some(lock) = lock.filter(|_| error.kind() == ErrorKind::NotFound) {
                    lock.remove();
                }
                Err(error)
            }
        }
    }

    /// Who has a volume, of which this is the `lock`, if it is on this machine.
    async fn standing_of(
        &self,
        (info, seen): (VolumeInfo, Seen),
        lock: Option<VolumeLock>,
    ) -> Locked {
        // Asked after the head was read: who has passed the lock by since is not in that.
        let is_dead = |host: &str| lock.as_ref().is_some_and(|lock| lock.proves_end_on(host));
        let dead = self.dead_writer(&info).await;
        let standing = match &info.open_on {
            None => Standing::Closed,
            Some(host) if is_dead(host) => Standing::Abandoned,
            Some(_) if dead.is_some() => Standing::Abandoned,
            Some(_) => Standing::Open,
        };
        let VolumeInfo { volume, head, writer, log, heir, properties, .. } = info;
        let (log, is_handed) = (log.map(PathBuf::from), heir.is_some());
        let is_encrypted = properties.key().is_some();
        Locked { lock, standing, dead, volume, head, writer, log, is_handed, is_encrypted, seen }
    }

    /// Opens a volume that is `locked` for writing.
    async fn open_held(
        &self,
        (volumes, name): (&Volumes, &VolumeName),
        locked: &mut Locked,
        options: &VolumeOptions,
        log: Option<Arc<LogDevice>>,
    ) -> Result<Volume> {
        let open =
            async |locked: &Locked| open_locked(volumes, name, locked, options, log.clone()).await;
        self.asking_again(name, locked, open).await
    }

    /// Acts on a volume that is `locked`. If another has it open, that may be a compactor that had
    /// taken the lock before and opened it since, and which gives way (compacting, K1): who has it
    /// is asked again.
    async fn asking_again<T>(
        &self,
        name: &VolumeName,
        locked: &mut Locked,
        act: impl AsyncFn(&Locked) -> Result<T>,
    ) -> Result<T> {
        for _ in 0..ASKED_AGAIN_MAX {
            match act(locked).await {
                Err(error) if error.kind() == ErrorKind::Denied => {
                    if !self.is_abandoned_since(name, locked).await {
                        return Err(error);
                    }
                }
                done => return done,
            }
        }
        act(locked).await
    }

    /// Asks again who has a volume that is `locked`: whether that is another writer than before,
    /// and a dead one or a compactor.
    async fn is_abandoned_since(&self, name: &VolumeName, locked: &mut Locked) -> bool {
        let before = (locked.volume, locked.writer);
        // What was refused first is the error to report.
        let Ok(found) = self.volumes().look(name).await else { return false };
        let Some(lock) = locked.lock.take() else { return false };
        *locked = self.standing_of(found, Some(lock)).await;
        let is_another = locked.volume == before.0 && locked.writer != before.1;
        is_another && locked.standing == Standing::Abandoned
    }

    /// That a volume which is only read is all of something, and that the store has what its last
    /// writer acknowledged, if that one was killed on this machine; returns what is known of it. Of
    /// a writer that may be alive, what it has put is read.
    ///
    /// # Errors
    /// `Denied` if it is a part of an image, or a log may have what the store has not; otherwise
    /// what the store reports.
    pub async fn check_readable(&self, name: &VolumeName) -> Result<VolumeInfo> {
        let Some(directory) = self.directory() else {
            let info = self.volumes().info(name).await?;
            warn_of_log(&info);
            return Ok(info);
        };
        let (last, is_held) = VolumeLock::look(directory, name);
        let info = self.volumes().info(name).await?;
        let left = match &last.log {
            // A server may have opened it since.
            None if VolumeLock::look(directory, name).1 => None,
            None => info.log.as_deref().map(Path::new),
            Some(log) => Some(&**log),
        };
        let left = left.filter(|_| !is_held);
        let Some(host) = &info.open_on else { return Ok(info) };
        match left {
            _ if last.is_import => Err(part_of_image(name)),
            Some(left) if last.was_here_as(host) => Err(needs_log_to_read(name, left)),
            // It is served, here or elsewhere.
            Some(_) | None => {
                warn_of_log(&info);
                Ok(info)
            }
        }
    }

    /// Keeps what shows that the writer of `volume` lives, where nothing else does: in a store
    /// without locks. Of a writer without a log, which would know it.
    pub(super) fn sign_of_life(&self, volume: &Volume, id: [u8; 16]) -> Option<AliveNote> {
        let writer = volume.writer().filter(|_| self.is_remote())?;
        let of = Kept { store: self.volumes().identity(), volume: id, writer };
        AliveNote::keep(&of)
            .inspect_err(|error| tracing::debug!(%error, "nothing shows whether this lives"))
            .ok()
    }

    /// The writer that the head of a volume names, if it was on this machine and is dead. It has no
    /// log: what that has would be lost.
    pub(super) async fn dead_writer(&self, info: &VolumeInfo) -> Option<Kept> {
        let was_here = info.open_on.as_deref() == Some(&*host()) && info.log.is_none();
        let writer = info.writer.filter(|_| self.is_remote() && was_here)?;
        let of = Kept { store: self.volumes().identity(), volume: info.volume, writer };
        AliveNote::proves_end_of(&of).await.then_some(of)
    }
}

/// Says that what is read of a volume may be older than what was acknowledged.
fn warn_of_log(info: &VolumeInfo) {
    let (Some(host), Some(log)) = (&info.open_on, &info.log) else { return };
    let name = info.name.as_str();
    tracing::warn!(
        "volume {name} is open on {host}, whose log {log} may have writes that the store lacks: \
         what is read may be older; mica ctl snapshot there, or naming a snapshot, is exact"
    );
}

/// Why a volume is left alone that a process was making of an image.
fn part_of_image(name: &VolumeName) -> Error {
    let what = format!(
        "volume {} is incomplete, as its import has not finished: wait for it, or delete the \
         volume and import again",
        name.as_str()
    );
    Error::new(ErrorKind::Denied, what)
}

/// Why a volume is not read whose writer was killed: it would be older than what was acknowledged.
fn needs_log_to_read(name: &VolumeName, log: &Path) -> Error {
    let (name, log) = (name.as_str(), log.display());
    let what = format!(
        "volume {name} was not closed, and its log {log} may have writes that the store lacks: \
         serve it once with --log-device {log}, or by --force without that, or name one of its \
         snapshots"
    );
    Error::new(ErrorKind::Denied, what)
}

/// Why a volume is left alone whose writer was killed: the log that was named is not the one.
fn lacks_records(name: &VolumeName, left: &Path, log: &Path) -> Error {
    let (name, left, log) = (name.as_str(), left.display(), log.display());
    let what = format!(
        "volume {name} was not closed, and the log {log} has nothing of it: what the store lacks \
         was in {left}; serve it with --log-device {left} as that was, or by --force without it"
    );
    Error::new(ErrorKind::Denied, what)
}

/// Why a volume is left alone whose writer was killed: what it acknowledged may only be in its log.
pub(super) fn needs_log(name: &VolumeName, log: &Path) -> Error {
    let (name, log) = (name.as_str(), log.display());
    let what = format!(
        "volume {name} was not closed, and its log {log} may have writes that the store lacks: \
         serve it with --log-device {log}, or by --force without that"
    );
    Error::new(ErrorKind::Denied, what)
}

#[cfg(test)]
mod tests;
