//! A store of volumes: which there are, and how one is opened.

mod clone;
mod diff;
mod rekey;
mod retention;
mod snapshots;

use crate::boot::{BootInfo, BootRecords};
use crate::crypt::VolumeKey;
use crate::environment::Environment;
use crate::format::Id;
use crate::format::head::{Head, Life};
use crate::format::origin::Origin;
use crate::format::store::{self, STORE_BYTES};
use crate::freeing::{Freeing, needs_room};
use crate::heads::{Claimed, Heads, Seen, check_host};
use crate::names::{self, VolumeName};
use crate::opening::{self, Opening, Purpose};
use crate::place::Writer;
use crate::properties::{Access, NewVolume, Properties};
use crate::put::{Patience, is_empty, list, put, read};
use crate::state::State;
use crate::tree::Tree;
use crate::volume::Volume;
use mica_block::{ClonedFrom, Entry, Error, ErrorKind, LIST_MAX, Objects, Put, Result};
use mica_rt::Buf;
use std::sync::Arc;

/// The volumes of a store, for all of a process that use it: they share a cache.
#[derive(Clone)]
pub struct Volumes {
    pub(crate) objects: Arc<dyn Objects>,
    pub(crate) environment: Environment,
    pub(crate) store: Id,
    /// What verbs read.
    pub(crate) tree: Arc<Tree>,
    /// That of the disks that are opened.
    patience: Patience,
    /// What opens those that are encrypted.
    key: Option<Arc<VolumeKey>>,
    /// Memory for what boots of a disk that is opened read first; 0 if nothing is recorded.
    boot_fetch: u64,
}

/// What there is to know of a volume without opening it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeInfo {
    /// Its name.
    pub name: VolumeName,
    /// Its identity: that of no other volume, also if the name is used again.
    pub volume: Id,
    /// The number of its newest head. Whoever opens, closes or deletes it puts the next one.
    pub head: u64,
    /// Its state. Of one that a writer has open this may be an older one.
    pub state: State,
    /// The host that writes it now; `None` if nobody does.
    pub open_on: Option<String>,
    /// The number of its writer, if one has it: no other ever has that in this store.
    pub writer: Option<Writer>,
    /// Where the log of its writer is on that host, if it has one: the store may lack what it has.
    pub log: Option<String>,
    /// What it was made with.
    pub properties: Properties,
    /// The host that it was handed to, and which has not opened it yet.
    pub heir: Option<String>,
    /// Whether it can be opened: a clone cannot before it is finished, nor can what gets the
    /// content of an image or a stream, which is open meanwhile.
    pub is_ready: bool,
    /// What it was cloned from, if it is a clone. [`Volumes::cloned_from`] says what became of
    /// that.
    pub origin: Option<Origin>,
}

/// The volumes of a store.
#[derive(Clone, Default, Debug)]
pub struct Listed {
    /// Those whose newest heads can be read, by name.
    pub volumes: Vec<VolumeInfo>,
    /// Those whose newest heads are damaged, by name, and what is wrong with them.
    pub damaged: Vec<(VolumeName, Error)>,
    /// Those whose newest heads only a newer version of mica can read, by name.
    pub newer: Vec<(VolumeName, Error)>,
}

impl Volumes {
    /// The volumes in `objects`, with a cache of nodes of about `cache_bytes`.
    ///
    /// # Errors
    /// `NotFound` if this is no store of volumes, `Corrupt` if it is one that has lost what says
    /// so; otherwise what the store reports.
    pub async fn open(
        objects: Arc<dyn Objects>,
        environment: Environment,
        cache_bytes: u64,
    ) -> Result<Self> {
        let found = Self::find(Arc::clone(&objects), environment, cache_bytes).await?;
        if let Some(found) = found {
            return Ok(found);
        }
        expect_none(&*objects).await?;
        let what = format!("{} has no volumes", objects.name());
        Err(Error::new(ErrorKind::NotFound, what))
    }

    /// As [`Self::open`], for those who look in several places: `None` if no store is there. One
    /// that has lost what says so is not looked for, as it would have to be listed.
    ///
    /// # Errors
    /// What the store reports.
    pub async fn find(
        objects: Arc<dyn Objects>,
        environment: Environment,
        cache_bytes: u64,
    ) -> Result<Option<Self>> {
        let store = stored_id(&*objects).await?;
        Ok(store.map(|store| Self::with_id(objects, environment, cache_bytes, store)))
    }

    /// As [`Self::open`]; makes a store of volumes of an empty one.
    ///
    /// # Errors
    /// `Invalid` if the store has objects that are not of volumes; otherwise what the store
    /// reports.
    pub async fn open_or_make(
        objects: Arc<dyn Objects>,
        environment: Environment,
        cache_bytes: u64,
    ) -> Result<Self> {
        loop {
            if let Some(store) = stored_id(&*objects).await? {
                return Ok(Self::with_id(objects, environment, cache_bytes, store));
            }
            expect_none(&*objects).await?;
            if !is_empty(&*objects, Patience::VERB).await? {
                // Another process may have made it in between.
                if let Some(store) = stored_id(&*objects).await? {
                    return Ok(Self::with_id(objects, environment, cache_bytes, store));
                }
                let what = format!(
                    "{} has objects that are not of volumes: use an empty folder or prefix",
                    objects.name()
                );
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            let new = Buf::from_slice(&store::encode(environment.random()));
            // Whoever was faster made the store.
            match put(&*objects, &names::format(), new, Patience::VERB).await? {
                Put::Done | Put::Exists => {}
            }
        }
    }

    pub(crate) fn with_id(
        objects: Arc<dyn Objects>,
        environment: Environment,
        cache_bytes: u64,
        store: Id,
    ) -> Self {
        let tree = Arc::new(Tree::new(Arc::clone(&objects), cache_bytes));
        Self {
            objects,
            environment,
            store,
            tree,
            patience: Patience::Endless,
            key: None,
            boot_fetch: 0,
        }
    }

    /// The same, with a key for volumes that are encrypted. It has no meaning for others.
    #[must_use]
    pub fn with_key(&self, key: Option<Arc<VolumeKey>>) -> Self {
        Self { key, ..self.clone() }
    }

    /// The same, whose disks record what is read first, and fetch what earlier boots of their image
    /// read first, up to so many bytes for each image; 0 is neither. It takes [`Manage::tend`], and
    /// so it is for those that are opened for writing.
    ///
    /// [`Manage::tend`]: mica_block::Manage::tend
    #[must_use]
    pub fn with_boot_fetch(self, boot_fetch: u64) -> Self {
        Self { boot_fetch, ..self }
    }

    /// The same, for those who have no guest: requests to their disks end, too, if the store does
    /// not answer. Otherwise they wait for as long as that takes.
    #[must_use]
    pub fn for_verbs(self) -> Self {
        Self { patience: Patience::VERB, ..self }
    }

    /// The same, for what frees space: if there is none, it may take what the store has in reserve.
    pub(crate) fn freeing(&self) -> Self {
        Self { objects: Arc::new(Freeing(Arc::clone(&self.objects))), ..self.clone() }
    }

    /// How the blocks of a volume with this head are read.
    ///
    /// # Errors
    /// `Denied` if the key is missing, or another one.
    pub(crate) fn access(&self, name: &VolumeName, properties: &Properties) -> Result<Access> {
        let access = properties.content(name.as_str(), self.key.as_deref());
        access.check().map(|()| access)
    }

    /// What a disk that is opened reads.
    fn disk_tree(&self) -> Arc<Tree> {
        self.tree.with_patience(self.patience)
    }

    /// The identity of the store.
    pub fn identity(&self) -> Id {
        self.store
    }

    /// Makes a volume of `len` bytes that reads as zeros.
    ///
    /// # Errors
    /// `Invalid` if no volume has this length, or there is one of this name already.
    pub async fn create(&self, name: &VolumeName, len: u64) -> Result<()> {
        self.create_as(name, len, NewVolume::default()).await
    }

    /// As [`Self::create`], compressed or encrypted.
    ///
    /// # Errors
    /// As [`Self::create`]; `Invalid` if there is no key to encrypt it with.
    pub async fn create_as(&self, name: &VolumeName, len: u64, new: NewVolume) -> Result<()> {
        let (state, properties) = (self.first_state(len)?, self.properties(new)?);
        self.heads(name).create(state, properties).await.map(drop)
    }

    /// Makes a volume of `len` bytes whose content follows. Until it is opened with
    /// [`Claimed::JustMade`], and closed, nobody takes it for a whole one. Returns which it is.
    ///
    /// # Errors
    /// As [`Self::create_as`].
    pub async fn create_unfinished(
        &self,
        name: &VolumeName,
        len: u64,
        new: NewVolume,
    ) -> Result<Id> {
        self.make_unfinished(name, len, new).await.map(|head| head.volume)
    }

    /// Deletes what [`Self::create_unfinished`] made, `volume`, if it was not closed; its writer is
    /// fenced. What others made of its name stays. Returns whether it is there, and whole.
    ///
    /// # Errors
    /// What the store reports; `Corrupt` if the newest head is damaged.
    pub async fn delete_unfinished(&self, name: &VolumeName, volume: Id) -> Result<bool> {
        self.heads(name).delete_unfinished(volume).await
    }

    /// As [`Self::create_unfinished`]; returns its first head.
    pub(crate) async fn make_unfinished(
        &self,
        name: &VolumeName,
        len: u64,
        new: NewVolume,
    ) -> Result<Head> {
        let (state, properties) = (self.first_state(len)?, self.properties(new)?);
        self.heads(name).create_unfinished(state, properties).await
    }

    fn properties(&self, new: NewVolume) -> Result<Properties> {
        new.properties(self.key.as_deref(), || self.environment.random())
    }

    /// That of a volume of `len` bytes that reads as zeros.
    fn first_state(&self, len: u64) -> Result<State> {
        check_len(len)?;
        Ok(State { time_ns: self.environment.now_ns(), ..State::empty(len) })
    }

    /// Deletes a volume. The space comes back with the next collection. With [`Claimed::TakeOver`]
    /// its writer, if it has one, is fenced first. One whose newest head is damaged is deleted so,
    /// too: a writer that it may have learns it when it puts its next head.
    ///
    /// # Errors
    /// `NotFound` if there is none; `Denied` if it is open, or was handed over, and that is to be
    /// left; `NoSpace` if there is no room to say that it is deleted.
    pub async fn delete(&self, name: &VolumeName, claimed: Claimed) -> Result<()> {
        self.freeing().heads(name).delete(claimed).await.map_err(needs_room)
    }

    /// All volumes, by name.
    ///
    /// # Errors
    /// What the store reports; `Corrupt` if the newest head of one is damaged, `Unsupported` if
    /// only a newer version of mica can read it.
    pub async fn list(&self) -> Result<Vec<VolumeInfo>> {
        let listed = self.list_with_damaged().await?;
        match listed.damaged.into_iter().chain(listed.newer).next() {
            Some((_, error)) => Err(error),
            None => Ok(listed.volumes),
        }
    }

    /// As [`Self::list`], but a volume whose newest head cannot be read is no obstacle to the
    /// others.
    ///
    /// # Errors
    /// What the store reports.
    pub async fn list_with_damaged(&self) -> Result<Listed> {
        let folder = names::volumes();
        let (mut all, mut after) = (Listed::default(), None);
        loop {
            let page = list(&*self.objects, &folder, after.as_ref(), Patience::VERB).await?;
            for entry in &page {
                let Entry::Folder(folder) = entry else { continue };
                let Some((_, name)) = folder.as_str().rsplit_once('/') else { continue };
                let name = VolumeName::new(name)?;
                match self.info(&name).await {
                    Ok(info) => all.volumes.push(info),
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        all.damaged.push((name, error));
                    }
                    Err(error) if error.kind() == ErrorKind::Unsupported => {
                        all.newer.push((name, error));
                    }
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
            if page.len() < LIST_MAX {
                return Ok(all);
            }
            after = page.last().map(|entry| entry.name().clone());
        }
    }

    /// What the newest head says of a volume.
    ///
    /// # Errors
    /// `NotFound` if there is none, `Corrupt` if its newest head is damaged.
    pub async fn info(&self, name: &VolumeName) -> Result<VolumeInfo> {
        self.look(name).await.map(|(info, _)| info)
    }

    /// As [`Self::info`], for who may open the volume next: the head is not read again then.
    ///
    /// # Errors
    /// As there.
    pub async fn look(&self, name: &VolumeName) -> Result<(VolumeInfo, Seen)> {
        let seen = self.heads(name).look().await?;
        let head = seen.head().clone();
        let writer = head.writer();
        let open_on = writer.map(|_| head.host.clone());
        let is_ready = head.life != Life::Pinned && !head.is_unfinished;
        let log = head.log.filter(|_| open_on.is_some());
        let heir = Some(head.heir).filter(|_| head.life == Life::HandedOver);
        let info = VolumeInfo {
            name: name.clone(),
            volume: head.volume,
            head: head.number,
            state: head.state,
            open_on,
            writer,
            log,
            properties: head.properties,
            heir,
            is_ready,
            origin: head.origin,
        };
        Ok((info, seen))
    }

    /// What a volume was cloned from, with what became of that; `None` if it is no clone, or one
    /// that an older version of mica has made.
    pub async fn cloned_from(&self, info: &VolumeInfo) -> Option<ClonedFrom> {
        let origin = info.origin.as_ref()?;
        Some(origin.looked_up(&self.heads(&origin.name), &self.tree).await)
    }

    /// Opens a volume for reading and writing. What the log of this machine has of it, and the
    /// store has not, is put before this returns.
    ///
    /// # Errors
    /// `NotFound` if there is none; `Denied` if another writer has it, or it was handed to another
    /// host, and that is to be left, or if it takes another key.
    pub async fn open_volume(
        &self,
        name: &VolumeName,
        opening: impl Into<Opening>,
    ) -> Result<Volume> {
        let (tree, heads) = (self.disk_tree(), self.heads(name));
        let purpose = (Purpose::Blocks(self.key.as_deref()), self.boot_fetch);
        Ok(Volume::of(opening::open(tree, heads, &opening.into(), purpose).await?))
    }

    /// As [`Self::open_volume`], but for what needs no key: of one that is encrypted, no block can
    /// be read or written.
    ///
    /// # Errors
    /// As [`Self::open_volume`].
    pub async fn open_without_blocks(
        &self,
        name: &VolumeName,
        opening: impl Into<Opening>,
    ) -> Result<Volume> {
        let (tree, heads) = (self.disk_tree(), self.heads(name));
        let opened = opening::open(tree, heads, &opening.into(), (Purpose::Snapshots, 0)).await?;
        Ok(Volume::of(opened))
    }

    /// Hands a volume that nobody writes to `host`: no other opens it, except by force. Its heir
    /// may hand on one that it has not opened. A volume that is open is handed over by
    /// [`Volume::hand_over`].
    ///
    /// # Errors
    /// As [`Self::open_volume`].
    pub async fn hand_over(&self, name: &VolumeName, host: &str) -> Result<()> {
        // What cannot be done costs no head, and leaves none open.
        check_host(host)?;
        self.open_without_blocks(name, Claimed::Refuse).await?.hand_over(host).await
    }

    /// Takes a volume back that this host handed over, and its heir has not opened: whoever wants
    /// it has it next.
    ///
    /// # Errors
    /// `Invalid` if it is handed over to nobody; `Denied` if its heir was faster, or another host
    /// handed it over.
    pub async fn take_back(&self, name: &VolumeName) -> Result<()> {
        self.heads(name).take_back().await
    }

    /// Opens what is in the store of a volume now, for reading. It stays as it is, whatever is
    /// written meanwhile. Long readers should clone first: what the volume itself does not
    /// name any more is collected.
    ///
    /// # Errors
    /// As [`Self::info`].
    pub async fn open_readable(&self, name: &VolumeName) -> Result<Volume> {
        let heads = self.heads(name);
        let (head, state) = heads.counting().await?;
        let tree = self.disk_tree().with_access(self.access(name, &head.properties)?);
        Ok(Volume::readable(tree, heads, state))
    }

    /// The newest boot record of the image that a volume comes from; `None` if it has none, or
    /// nobody can read it.
    ///
    /// # Errors
    /// As [`Self::info`]; `Unsupported` if a newer mica wrote it.
    pub async fn boot_record(&self, name: &VolumeName) -> Result<Option<BootInfo>> {
        let head = self.heads(name).newest().await?;
        let records = BootRecords {
            objects: &*self.objects,
            environment: &self.environment,
            store: self.store,
            image: head.boot_image(),
        };
        let newest = records.newest().await?;
        let record = newest.and_then(|newest| newest.record);
        Ok(record.as_ref().map(BootInfo::of))
    }

    pub(crate) fn heads(&self, name: &VolumeName) -> Heads {
        Heads {
            objects: Arc::clone(&self.objects),
            environment: self.environment.clone(),
            store: self.store,
            name: name.clone(),
        }
    }
}

/// Checks that a volume can have `len` bytes: for who would otherwise make a store first.
///
/// # Errors
/// `Invalid` if none can.
pub fn check_len(len: u64) -> Result<()> {
    if len > 0 && State::is_len(len) {
        return Ok(());
    }
    let most = State::LEN_MAX;
    let what = format!("a volume must be a whole number of sectors, up to {most} bytes, not {len}");
    Err(Error::new(ErrorKind::Invalid, what))
}

/// Checks that there are no volumes where nothing says that there is a store.
///
/// # Errors
/// `Corrupt` if there are.
async fn expect_none(objects: &dyn Objects) -> Result<()> {
    // Another process may have made the store in between.
    if !has_heads(objects).await? || stored_id(objects).await?.is_some() {
        return Ok(());
    }
    let what = format!(
        "{} of {} is missing, and says which store this is, although there are volumes: restore it \
         from a copy",
        names::format(),
        objects.name()
    );
    Err(Error::new(ErrorKind::Corrupt, what))
}

/// Whether there are heads of volumes. Others, too, have folders of this name.
async fn has_heads(objects: &dyn Objects) -> Result<bool> {
    let page = list(objects, &names::volumes(), None, Patience::VERB).await?;
    let folders = page.iter().filter(|entry| matches!(entry, Entry::Folder(_)));
    for folder in folders.take(FOLDERS_MAX) {
        let heads = list(objects, folder.name(), None, Patience::VERB).await?;
        let is_head = |entry: &Entry| match entry {
            Entry::Object { name, .. } => names::number(name).is_some(),
            Entry::Folder(_) => false,
        };
        if heads.iter().any(is_head) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Which store this is; `None` if it is none yet.
async fn stored_id(objects: &dyn Objects) -> Result<Option<Id>> {
    let name = names::format();
    let Some(bytes) = read(objects, &name, STORE_BYTES, Patience::VERB).await? else {
        return Ok(None);
    };
    store::decode(&bytes).map(Some).map_err(|why| why.explain(&name, objects))
}

/// Folders in which heads are looked for, at most, where nothing says that there is a store.
const FOLDERS_MAX: usize = 16;

#[cfg(test)]
mod tests;
