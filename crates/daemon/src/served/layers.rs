//! A chain gets a new active layer while it is served: a snapshot of what is beneath.
//!
//! Invariants
//! - I1 Which image a disk has changes only together with its chain, while nobody else changes the
//!   life of the disk.
//! - I2 If one disk of a group does not get its layer, none does, and no file of any is left; but a
//!   file that a chain has is never removed, whatever failed. Only if a layer cannot be made
//!   durable when it is on top already, it stays, and its disk accepts no more writes.

use super::Served;
use super::snapshots::{at_once, in_group};
use crate::opened::is_raw;
use crate::sandbox::Granted;
use mica_block::{Error, ErrorKind, Manage, ManageChain, Pushed, Result, SnapshotGroup};
use mica_rt::{Backend, Executor};
use mica_serve::Spawned;
use mica_stack::{Beneath, FileImages, Format, MayWrite, NewLayer, NewLayerWish};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How a disk got a layer.
#[derive(Debug)]
pub(crate) struct Layered {
    /// The layer that is no longer written.
    pub(crate) frozen: Arc<Path>,
    pub(crate) active: Arc<Path>,
    /// How many layers the disk has now.
    pub(crate) layers: usize,
    /// For how long its changes waited.
    pub(crate) pause: Duration,
}

/// A disk, and the file that its chain is about to get. Nobody else changes its life meanwhile.
struct Ready {
    served: Arc<Served>,
    disk: Arc<dyn Manage>,
    new: Arc<NewLayer>,
    /// Whether a kill lost none of its writes, as it was.
    was_strong: bool,
}

impl Served {
    /// Whether it is a volume.
    pub(crate) fn is_volume(&self) -> bool {
        self.volume.volume.is_some()
    }

    /// Gives each of the disks, which are different, its layer, at one instant. What was answered
    /// before is in the layers beneath. If one fails, all are as they were.
    ///
    /// # Errors
    /// `Denied` if a disk is closed, or if the sandbox or the policy does not allow a file there;
    /// `Unsupported` if a disk is no chain that is written; otherwise as [`ManageChain::push`].
    pub(crate) fn put_layers(
        all: Vec<(Arc<Self>, NewLayerWish)>,
        granted: Option<&Granted>,
    ) -> Result<Vec<Layered>> {
        let mut by_name: Vec<_> = all.iter().map(|(served, _)| served).collect();
        // Two groups with disks in common take turns.
        by_name.sort_by(|one, other| one.name.cmp(&other.name));
        let _changes: Vec<_> = by_name.into_iter().map(|served| served.lock_changes()).collect();
        // Layers that are made at the same time take no notice of each other's files.
        let mut places = BTreeSet::new();
        if let Some((_, twice)) = all.iter().find(|(_, wish)| !places.insert(place_of(&wish.path)))
        {
            let what = format!("{} is named for two disks", twice.path.display());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let make = |(served, wish): &(Arc<Self>, NewLayerWish)| {
            let made = served.make_layer(wish.clone(), granted);
            made.map_err(|error| error.wrap(format!("disk {:?}", served.name)))
        };
        let made = match &*all {
            [one] => vec![make(one)],
            all => at_once(all, make, |error| error),
        };
        let ready = made.into_iter().collect::<Result<Vec<_>>>()?;
        let pushed: Result<Vec<_>> = match &*ready {
            [one] => one.push(None).map(|pushed| vec![pushed]),
            all => {
                let pushed = in_group(all, |ready, group| ready.push(Some(group)));
                pushed.into_iter().collect()
            }
        };
        let pushed = match pushed {
            Ok(pushed) => pushed,
            Err(error) => {
                ready.into_iter().for_each(Ready::settle);
                return Err(error);
            }
        };
        Ok(ready.into_iter().zip(pushed).map(|(ready, pushed)| ready.finish(pushed)).collect())
    }

    /// Makes the file of a layer. The caller keeps others from changing the disk's life.
    fn make_layer(
        self: &Arc<Self>,
        wish: NewLayerWish,
        granted: Option<&Granted>,
    ) -> Result<Ready> {
        let disk = self.opened().disk()?;
        self.check_gets_layers(&*disk)?;
        let image = self.image();
        let options = self.images.image_options(Arc::clone(&self.resources.handles))?;
        let images = FileImages::to_write(&self.known_image(), options, MayWrite::new_file())?;
        // What the user can allow is said before what only another start can.
        let path = images.find_new(&wish.path)?;
        for file in [&*path, &*image] {
            let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
            granted.map_or(Ok(()), |granted| {
                granted.check_layers_in(folder.unwrap_or(Path::new(".")))
            })?;
        }
        let executor = Executor::new(Backend::Pool)
            .map_err(|error| Error::from_io("making a layer", error))?;
        let (len, is_raw) = (disk.geometry().len, is_raw(&*disk));
        let beneath = Beneath { active: &image, len, is_raw };
        let ahead = self.write_ahead(&disk);
        let new = executor.block_on(NewLayer::make(&images, beneath, wish));
        let new = new?;
        ahead.wait().flatten()?;
        let was_strong = disk.weakness().is_none();
        Ok(Ready { served: Arc::clone(self), disk, new: Arc::new(new), was_strong })
    }

    /// What waits to be written is made durable while the file of a layer is, so that nobody waits
    /// for one after the other.
    pub(super) fn write_ahead(&self, disk: &Arc<dyn Manage>) -> Spawned<Result<()>> {
        let disk = Arc::clone(disk);
        self.resources.workers.spawn(move || async move {
            match disk.chain() {
                Some(chain) => chain.write_ahead().await,
                None => Ok(()),
            }
        })
    }

    /// Whether a layer can be put on top of it at all.
    fn check_gets_layers(&self, disk: &dyn Manage) -> Result<()> {
        let what = match () {
            () if self.settings.overlay.is_some() => {
                "is ephemeral: its changes end with the server"
            }
            () if !matches!(self.images.format, Format::Qcow2 | Format::Raw) => {
                "is neither a qcow2 image nor a raw one: to have snapshots, copy it into one (`mica \
                 convert`) and serve that"
            }
            () if disk.chain().is_none() => "is served read-only: it has nothing to freeze",
            () => return Ok(()),
        };
        let what = format!("the disk {:?} {what}", self.name);
        Err(Error::new(ErrorKind::Unsupported, what))
    }
}

/// Where a file will be, by whatever way its folder is named.
fn place_of(file: &Path) -> PathBuf {
    let folder = file.parent().and_then(|folder| folder.canonicalize().ok());
    match (folder, file.file_name()) {
        (Some(folder), Some(name)) => folder.join(name),
        _ => file.to_owned(),
    }
}

impl Ready {
    /// Puts the layer on top of the chain.
    fn push(&self, group: Option<Arc<SnapshotGroup>>) -> Result<Pushed> {
        let (disk, new) = (Arc::clone(&self.disk), Arc::clone(&self.new));
        let of_all = group.clone();
        let pushed = self.served.resources.workers.run(move || async move {
            let chain: &dyn ManageChain = disk.chain().ok_or_else(|| {
                Error::new(ErrorKind::Unsupported, "the disk is not a writable chain")
            })?;
            let pushed = chain.push(new.path(), &*new, group.as_deref()).await;
            // It may be on top and not be durable: then it has what was acknowledged last.
            if disk.layer_paths().last().is_some_and(|path| path == new.path()) {
                new.keep();
            }
            pushed
        });
        pushed.and_then(|pushed| pushed).map_err(|error| match of_all {
            None => error,
            Some(group) => group.fail(error),
        })
    }

    /// Something failed. If that was the worker, after the chain got its layer, the layer stays.
    fn settle(self) {
        let has_it = |path: &Path| self.disk.layer_paths().iter().any(|layer| layer == path);
        if has_it(self.new.path()) {
            tracing::error!(
                "{:?} is now written to {}, although the switch was not completed",
                self.served.name,
                self.new.path().display()
            );
            self.served.set_image(self.new.path().into());
            self.new.keep();
        }
    }

    /// The chain has it.
    fn finish(self, pushed: Pushed) -> Layered {
        let Self { served, disk, new, was_strong } = self;
        let (frozen, active): (_, Arc<Path>) = (served.image(), new.path().into());
        served.set_image(Arc::clone(&active));
        let (layers, Pushed { pause }) = (disk.layer_count(), pushed);
        tracing::info!(
            "{:?} is now written to {}, on top of {}: its changes waited for {} us",
            served.name,
            active.display(),
            frozen.display(),
            pause.as_micros()
        );
        // A raw image needs no redo log; its first layer does.
        if was_strong && let Some(weakness) = disk.weakness() {
            tracing::warn!("{:?}, from its first layer on: {weakness}", served.name);
        }
        Layered { frozen, active, layers, pause }
    }
}
