//! The file of a new layer, for a chain that is open.
//!
//! ```text
//! made under another name, durably ─▶ its name ─┬▶ the chain gets it, and the mark its name
//! mark of the layer beneath, the same ───────────┘    ─▶ folder durable ─▶ kept
//! ```
//!
//! The mark of the layer beneath ([`crate::above`]) says that this one is written. It gets its name
//! at the instant at which that is so: the chain does it ([`Renaming`]).
//!
//! Invariants
//! - I1 Its name is that of a whole image, whenever the power goes.
//! - I2 Nothing is written to it before the mark has its name: whoever opens the layer beneath from
//!   then on finds it. It is durable before that, and what the mark says, too, and its name comes
//!   first: no power cut leaves a mark that leads nowhere. Within one folder that relies on the
//!   file system to keep the order of names, as those with a journal do; a sync in between would
//!   not be worth its time. If it is in another folder, that one is synced.
//! - I3 If the chain does not get it, what was made is removed: mark, durably, then file. A file
//!   that was there before stays.

use crate::above::is_used;
use crate::encrypted::encrypted_as;
use crate::files::{base_name, folder_of, open_folder_of, sync_folder_of};
use crate::images::FileImages;
use crate::mark::{Prepared, SUFFIX, place};
use crate::temporary::{name_new, unnamed};
use mica_block::{Error, ErrorKind, Images, LocalFuture, Renaming, Result};
use mica_crypt::luks::NewLuks;
use mica_qcow2::read_header;
use mica_qcow2_tools::create::{ImageWish, Stores, create_unnamed};
use mica_store::{FileKind, FileStore, Located};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a new layer is to be like.
#[derive(Clone, Debug)]
pub struct NewLayerWish {
    /// Its file.
    pub path: PathBuf,
    /// Its properties. If neither the size of its clusters nor subclusters are wished for, it has
    /// those of the layer beneath.
    pub image: ImageWish,
    /// Whether the file may be there already: an empty overlay of the layer beneath.
    pub reuse: bool,
}

/// What a new layer is put on top of.
#[derive(Clone, Copy, Debug)]
pub struct Beneath<'a> {
    /// The active layer of an open disk.
    pub active: &'a Path,
    /// Bytes of the disk.
    pub len: u64,
    /// Whether the active layer is a raw image: nothing in it is taken for anything else.
    pub is_raw: bool,
}

/// A new layer, which its chain is about to get. Dropping it removes it, unless it is kept.
#[derive(Debug)]
pub struct NewLayer {
    path: PathBuf,
    is_made: bool,
    /// The folder of the mark.
    folder: Arc<mica_rt::File>,
    mark: Option<Arc<Prepared>>,
    is_marked: AtomicBool,
    /// What it is encrypted with: as long as this is there, the chain that opens it need not
    /// compute the key again.
    luks: Option<NewLuks>,
    is_kept: AtomicBool,
}

impl NewLayer {
    /// Makes an empty overlay of what is `beneath`, on a disk to which `images` belongs, and
    /// prepares the mark of that one. Durable when this returns, except for the names.
    ///
    /// # Errors
    /// `Denied` if the chain may not open a file there, `Invalid` if there is one or what was
    /// wished for is impossible, `Unsupported` if `active` is a device; otherwise what the system
    /// reports. Nothing is left then.
    pub async fn make(
        images: &FileImages,
        beneath: Beneath<'_>,
        wish: NewLayerWish,
    ) -> Result<Self> {
        let NewLayerWish { path, image, reuse } = wish;
        let active = beneath.active;
        let (located, store) = images.glance(active)?;
        if located.kind() == FileKind::BlockDevice {
            let what = format!(
                "{} is a block device: nothing beside it could say that it is frozen",
                active.display()
            );
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let path = images.find_new(&path)?;
        let mut new = Self {
            path,
            is_made: false,
            folder: open_folder_of(&place(active, SUFFIX)?)?,
            mark: None,
            is_marked: AtomicBool::new(false),
            luks: None,
            is_kept: AtomicBool::new(false),
        };
        let is_there = match new.path.symlink_metadata() {
            Ok(_) if reuse => {
                // A mark must name nothing that has a life of its own. What is no image at all is
                // refused when it is put on top.
                if matches!(is_used(images, &new.path).await, Ok(true)) {
                    let what = format!("{} already has data, or is in use", new.path.display());
                    return Err(Error::new(ErrorKind::Invalid, what));
                }
                true
            }
            Ok(_) => {
                let what = format!(
                    "{} exists: --reuse takes it, if it is an empty overlay of {}",
                    new.path.display(),
                    active.display()
                );
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            Err(_) => false,
        };
        // Two files are made durable in the time of one.
        let (layer, above) = (active.to_owned(), new.path.clone());
        let preparing =
            mica_rt::on_thread(&new.folder, move |_| Prepared::new(&layer, &above).map(Arc::new));
        let mut mark = None;
        let preparing: LocalFuture<'_, Result<()>> = Box::pin(async {
            mark = Some(preparing.await?);
            Ok(())
        });
        let filing: LocalFuture<'_, Result<()>> = Box::pin(async {
            match is_there {
                true => sync_file(&new.path),
                false => new.make_file(images, beneath, (&located, &store), image).await,
            }
        });
        let made = mica_rt::join_all([filing, preparing]).await;
        new.mark = mark;
        made.into_iter().collect::<Result<()>>()?;
        if new.mark_folder() != Some(folder_of(&new.path)) {
            sync_folder_of(&new.path)?;
        }
        Ok(new)
    }

    fn mark_folder(&self) -> Option<&Path> {
        self.mark.as_ref().map(|prepared| folder_of(prepared.mark().path()))
    }

    async fn make_file(
        &mut self,
        images: &FileImages,
        Beneath { active, len, is_raw }: Beneath<'_>,
        (located, store): (&Located, &FileStore),
        mut wish: ImageWish,
    ) -> Result<()> {
        wish.backing_name = Some(base_name(active, &self.path)?);
        wish.backing_format = Some(if is_raw { "raw" } else { "qcow2" }.to_owned());
        let plan = if is_raw {
            wish.plan(len)?
        } else {
            let header = read_header(store).await?;
            if (wish.cluster_bytes, wish.extended_l2) == (None, None) {
                wish.cluster_bytes = Some(header.cluster_bits.bytes());
                wish.extended_l2 = Some(header.l2_format().extended);
            }
            let plan = wish.plan(len)?;
            encrypted_as(images, plan, (&header, store), &self.path).await?
        };
        self.luks = plan.encryption().cloned();
        let unnamed = Unnamed::make(&self.path, active, located.mode() & 0o666)?;
        let image = match images.open_writable(&unnamed.path) {
            Ok(image) => image.store,
            Err(error) => {
                unnamed.leave(&error);
                return Err(error);
            }
        };
        // Only who has it locked knows that nobody else makes it.
        if !unnamed.is_new {
            image.set_len(0).await?;
        }
        create_unnamed(plan, Stores { image: &*image, data: None }).await?;
        // Before another process can lock it, which would take it for what is left of one.
        let named = unnamed.name(&self.path);
        drop(image);
        named?;
        self.is_made = true;
        Ok(())
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The chain has it.
    pub fn keep(&self) {
        self.is_kept.store(true, Ordering::Release);
    }

    /// Does something with the mark on a thread: the disk's other requests do not wait for the file
    /// system.
    fn on_mark(
        &self,
        act: impl FnOnce(&Prepared) -> Result<()> + Send + 'static,
    ) -> LocalFuture<'_, Result<()>> {
        let mark = Arc::clone(self.mark.as_ref().expect("a layer that was made has its mark"));
        Box::pin(mica_rt::on_thread(&self.folder, move |_| act(&mark)))
    }
}

impl Renaming for NewLayer {
    fn kept(&self) -> Option<&Path> {
        None
    }

    /// What was there is marked by somebody else's snapshot, which is over: nothing is above.
    fn rename(&self) -> LocalFuture<'_, Result<()>> {
        self.is_marked.store(true, Ordering::Release);
        self.on_mark(Prepared::name)
    }

    fn undo(&self) -> LocalFuture<'_, Result<()>> {
        self.on_mark(|prepared| prepared.mark().remove())
    }

    fn sync(&self) -> LocalFuture<'_, Result<()>> {
        self.on_mark(|prepared| sync_folder_of(prepared.mark().path()))
    }
}

impl Drop for NewLayer {
    fn drop(&mut self) {
        if self.is_kept.load(Ordering::Acquire) {
            return;
        }
        if let Some(prepared) = &self.mark {
            prepared.give_up();
            // A mark without its layer would keep the one beneath from being written (I3).
            if self.is_marked.load(Ordering::Acquire)
                && let Err(error) = prepared.mark().remove()
            {
                tracing::error!("{}", error.in_one_line());
                return;
            }
        }
        if self.is_made {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Makes a file durable that somebody else made.
fn sync_file(path: &Path) -> Result<()> {
    let synced = File::open(path).and_then(|file| file.sync_data());
    synced.map_err(|error| Error::from_io(format!("syncing {}", path.display()), error))
}

/// A file that has not got its name yet. Dropping it removes it.
struct Unnamed {
    path: PathBuf,
    /// Nothing is left in it of another process.
    is_new: bool,
}

impl Unnamed {
    /// Makes it, empty, in the folder of `path`. One of a process that was killed is taken as it
    /// is: it may be that of another one that is at work.
    fn make(path: &Path, active: &Path, mode: u32) -> Result<Self> {
        let unnamed = unnamed(path, active);
        let mut options = OpenOptions::new();
        options.write(true).mode(mode);
        options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
        let made = match options.clone().create_new(true).open(&unnamed) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                options.open(&unnamed).map(|_| false)
            }
            made => made.map(|_| true),
        };
        match made {
            Ok(is_new) => Ok(Self { path: unnamed, is_new }),
            Err(error) => Err(Error::from_io(format!("creating {}", path.display()), error)),
        }
    }

    /// It cannot be had, for this `reason`. Somebody else may be making it: also one that is new
    /// here, if that process found it before this one could lock it.
    fn leave(self, reason: &Error) {
        if !self.is_new || reason.kind() == ErrorKind::Denied {
            std::mem::forget(self);
        }
    }

    /// Gives it the name `path`, which nothing has.
    fn name(self, path: &Path) -> Result<()> {
        let named = name_new(&self.path, path);
        named.map_err(|error| Error::from_io(format!("creating {}", path.display()), error))
    }
}

impl Drop for Unnamed {
    fn drop(&mut self) {
        // It is not there any more if it has its name.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests;
