//! The files of a disk whose present state is kept: the active layer gets a second name, and a new
//! overlay of it takes the first.
//!
//! A state Y of `disk.qcow2` is kept as `disk@Y.qcow2` beside it. Nothing else says that it is one:
//! the names of a chain's layers, and that they are marked as frozen, are all that is known of its
//! states ([`kept_states`]).
//!
//! ```text
//! step                                   what a crash leaves (the process's, or the power's)
//! 1 make `.disk.qcow2.mica-new`, an      a stray file, which goes with the next attempt, or when
//!   empty overlay of `disk@Y.qcow2`;       the disk is opened again (`temporary.rs`)
//!   sync it
//! 2 link `disk.qcow2` as `disk@Y.qcow2`  the same, and a second name of the disk, which is open
//!   mark that (`above.rs`);              under the first; the next attempt takes it as it is
//!   sync the folder
//! 3 nothing is written any more, and     the same
//!   all is in the file `disk.qcow2`
//! 4 rename the overlay to `disk.qcow2`   Y is kept, and the disk goes on in an empty overlay
//! 5 the disk is written again;           Y is kept, and the disk goes on in the overlay. After a
//!   sync the folder and Y, before any      power cut perhaps as in step 3
//!   flush of it is acknowledged
//! 6 Y is closed                          Y is kept, may be in use, and uses more space than it
//!                                          needs
//! ```
//!
//! A process that opens the disk after one that died in step 5 syncs the folder first
//! ([`settle_names`]), and Y with its first flush (`qcow2/src/write/beneath.rs`).
//!
//! Invariants
//! - I1 At every instant `disk.qcow2` opens, with everything that was acknowledged, as far as it
//!   was before.
//! - I2 No file is replaced but the second name of the disk itself, and what is named like the
//!   overlay of step 1.

use crate::encrypted::{encrypted_as, no_secret};
use crate::files::plain_name;
use crate::mark::Mark;
use crate::temporary::unnamed;
use crate::{FileImages, ImageOptions, MayWrite, SidecarPlace};
use mica_block::{Error, ErrorKind, Images, LocalFuture, Renaming, Result};
use mica_crypt::luks::NewLuks;
use mica_qcow2::read_header;
use mica_qcow2_format::Encryption;
use mica_qcow2_tools::create::{ImageWish, Stores, create};
use mica_rt::{Access, File};
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, fsync, linkat, open, renameat, unlinkat};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Longest name of a file with a state: with what is added for its sidecar, and for the overlay
/// before it has its name, it must stay within 255 bytes.
const NAME_BYTES_MAX: usize = 240;
/// What stands before a state in the name of its file.
const BEFORE_STATE: char = '@';

/// The files of a disk one of whose states is to be kept.
pub struct Keeping {
    folder: Arc<File>,
    /// The disk, where its file really is.
    image: PathBuf,
    kept: PathBuf,
    overlay: PathBuf,
    /// What the overlay calls the layer beneath it.
    backing_name: OsString,
    /// What the overlay is encrypted with: as long as this is there, the chain that opens it need
    /// not compute the key again.
    luks: OnceLock<NewLuks>,
}

/// The path of the state that is kept as `state` of the disk whose active layer is `image`.
///
/// # Errors
/// `Invalid` if no state can be called so.
pub fn kept_path(image: &Path, state: &str) -> Result<PathBuf> {
    let invalid = |what: &str| {
        let context = format!("{state:?} is not a valid name of a state: {what}");
        Err(Error::new(ErrorKind::Invalid, context))
    };
    if state.is_empty() || state.chars().any(|letter| letter == '/' || letter.is_control()) {
        return invalid("it becomes part of a file name");
    }
    let (front, back) = around(image);
    let mut name = front;
    name.push(state);
    name.push(back);
    if name.len() > NAME_BYTES_MAX {
        return invalid("the name of its file would be too long");
    }
    Ok(image.with_file_name(name))
}

/// Which state of the disk whose active layer is `image` the layer at `path` is, if it is one.
pub fn state_of(image: &Path, path: &Path) -> Option<String> {
    let (front, back) = around(image);
    let name = path.file_name()?.to_str()?;
    let state = name.strip_prefix(front.to_str()?)?.strip_suffix(back.to_str()?)?;
    (!state.is_empty()).then(|| state.to_owned())
}

/// Whether the name of `file` is as that of a state.
pub(crate) fn may_keep_state(file: &Path) -> bool {
    let name = file.file_name().map(OsStr::to_string_lossy);
    name.is_some_and(|name| name.contains(BEFORE_STATE))
}

/// Whether the `file` of a state of the disk with these `layers`, one of which it may be no more,
/// is that of this `state`.
pub(crate) fn is_called(file: &Path, layers: &[PathBuf], state: &str) -> bool {
    let named = layers.iter().rev().find_map(|layer| state_of(layer, file));
    named.or_else(|| state_named(file)).is_some_and(|named| named == state)
}

/// The states that are kept in the `layers` of a chain, from the base: the position of each, and
/// its name. The active layer, which is the last one, is also at `image`.
///
/// The layer that a state is named after may have been merged since: then only a layer that was
/// frozen beneath another one keeps a state, and not any file that has such a name.
pub fn kept_states(image: &Path, layers: &[PathBuf]) -> Vec<(usize, String)> {
    let frozen = layers.get(..layers.len().saturating_sub(1)).unwrap_or_default();
    let state = |position: usize, file: &Path| {
        let mut above = layers[position + 1..].iter().map(PathBuf::as_path).chain([image]);
        let state = above.find_map(|layer| state_of(layer, file));
        state.or_else(|| state_named(file).filter(|_| Mark::is_beside(file)))
    };
    let kept = frozen.iter().enumerate();
    kept.filter_map(|(position, file)| Some((position, state(position, file)?))).collect()
}

/// The state in the name of `file`, whatever it is the state of: of an image that is there still,
/// or of which a mark is left, if one of them fits.
fn state_named(file: &Path) -> Option<String> {
    let (name, back) = (file.file_stem()?.to_str()?, around(file).1);
    let mut splits = name.match_indices(BEFORE_STATE).filter_map(|(at, _)| {
        let (front, state) = (name.get(..at)?, name.get(at + BEFORE_STATE.len_utf8()..)?);
        (!front.is_empty() && !state.is_empty()).then_some((front, state))
    });
    let was_there = |(front, _): &(&str, &str)| {
        let mut image = OsString::from(front);
        image.push(&back);
        let image = file.with_file_name(image);
        image.exists() || Mark::is_beside(&image)
    };
    let found = splits.clone().find(was_there).or_else(|| splits.next());
    found.map(|(_, state)| state.to_owned())
}

/// Before the disk at `image`, whose chain has these `layers`, is written again: makes its name
/// durable, if states of it are kept. The process that kept the last of them may have died before
/// it did that, and what is flushed from now on has to be found under that name.
///
/// # Errors
/// What the system reports.
pub fn settle_names(image: &Path, layers: &[PathBuf]) -> Result<()> {
    if !layers.iter().any(|layer| may_keep_state(layer)) {
        return Ok(());
    }
    let Ok(image) = image.canonicalize() else { return Ok(()) };
    if !layers.iter().any(|layer| state_of(&image, layer).is_some()) {
        return Ok(());
    }
    let folder = image.parent().unwrap_or(Path::new("/"));
    fsync(open_folder(folder)?).map_err(|error| failed_in(folder, "syncing", error))
}

/// Makes sure that nothing but the state goes with the `file` of one: users may have taken internal
/// snapshots of the disk before.
///
/// # Errors
/// `Denied` if it has any; else as for opening it.
pub async fn check_only_state(images: &FileImages, file: &Path) -> Result<()> {
    let (_, store) = images.glance(file)?;
    let count = read_header(&store).await?.snapshot_count;
    if count == 0 {
        return Ok(());
    }
    let what = format!(
        "{} has internal snapshots ({count}), which would go with the state: `mica ctl stream \
         --drop-states` takes its layer out of the chain, and leaves the file",
        file.display()
    );
    Err(Error::new(ErrorKind::Denied, what))
}

/// Removes the `file` of a state that no chain has any more, with its marks and its sidecars, which
/// are at this `place`, durably.
///
/// # Errors
/// What the system reports.
pub(crate) fn remove_state(file: &Path, place: &SidecarPlace) -> Result<()> {
    let real =
        file.canonicalize().map_err(|error| Error::from_io(file.display().to_string(), error))?;
    let sidecars = crate::sidecars::paths_of_sidecar(place, &real).unwrap_or_default();
    let merged = crate::merged::place_beside(file)?;
    let note = crate::overlays::note_beside(file)?;
    // First what is of no use without the file.
    Mark::forget(file)?;
    let sidecars = sidecars.iter().map(PathBuf::as_path);
    for path in sidecars.chain([&*note, file]) {
        remove(path).map_err(|error| failed_in(path, "removing", error))?;
    }
    crate::files::sync_folder_of(file)?;
    // Until then it says that the file is to be removed (`dropped.rs`).
    remove(&merged).map_err(|error| failed_in(&merged, "removing", error))?;
    crate::files::sync_folder_of(file)
}

fn open_folder(folder: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    open(folder, flags, Mode::empty()).map_err(|error| failed_in(folder, "opening", error))
}

/// What stands before and after a state in the name of its file.
fn around(image: &Path) -> (OsString, OsString) {
    let mut front = image.file_stem().unwrap_or_default().to_owned();
    front.push(BEFORE_STATE.encode_utf8(&mut [0; 4]));
    let mut back = OsString::new();
    if let Some(ending) = image.extension() {
        back.push(".");
        back.push(ending);
    }
    (front, back)
}

impl Keeping {
    /// Prepares to keep the state of the disk whose active layer is at `image`, as `state`.
    ///
    /// # Errors
    /// `Invalid` if no state can be called so; `Unsupported` if the image is no regular file; else
    /// what the system reports.
    pub fn new(image: &Path, state: &str) -> Result<Self> {
        let failed = |error: std::io::Error| Error::from_io(image.display().to_string(), error);
        let named = std::path::absolute(image).map_err(failed)?;
        let image = image.canonicalize().map_err(failed)?;
        if !image.metadata().map_err(failed)?.is_file() {
            let context = format!(
                "{} is a block device: states can only be kept of images in files",
                image.display()
            );
            return Err(Error::new(ErrorKind::Unsupported, context));
        }
        let kept = kept_path(&image, state)?;
        let opened = open_folder(image.parent().unwrap_or(Path::new("/")))?;
        Ok(Self {
            folder: Arc::new(File::new(opened, Access::Buffered)),
            backing_name: backing_name(&named, &image, &kept),
            overlay: unnamed(&image, &image),
            kept,
            image,
            luks: OnceLock::new(),
        })
    }

    /// Where the overlay is made.
    pub fn overlay(&self) -> &Path {
        &self.overlay
    }

    /// Step 1: the overlay, of a disk of `len` bytes that has clusters of `cluster_bytes`. It has
    /// subclusters if its clusters are large enough: guests that write parts of clusters do not
    /// wait for the rest to be copied from beneath. It is given the rights of the image by `alike`,
    /// as [`crate::make_alike`] does it.
    ///
    /// # Errors
    /// What the system reports.
    pub async fn make_overlay(
        &self,
        (cluster_bytes, len): (u64, u64),
        options: ImageOptions,
        alike: impl Fn(&std::fs::File, &std::fs::File) -> Result<()>,
    ) -> Result<()> {
        self.make_file(alike)?;
        let wish = ImageWish {
            cluster_bytes: Some(cluster_bytes),
            backing_name: Some(self.backing_name.clone()),
            backing_format: Some("qcow2".to_owned()),
            ..ImageWish::default()
        };
        let plan = wish.plan(len)?;
        let images = FileImages::new(&self.image, options.clone())?;
        let (_, store) = images.glance(&self.image)?;
        let header = read_header(&store).await?;
        if header.encryption != Encryption::None {
            // The next process to open the chain would not be able to.
            let Some(later) = images.passphrase(&self.kept)? else {
                return Err(no_secret(&self.kept));
            };
            let now = images.passphrase(&self.image)?;
            if now.is_some_and(|now| now.bytes() != later.bytes()) {
                let what = format!(
                    "{}: --secret names another passphrase for it than for {}",
                    self.kept.display(),
                    self.image.display()
                );
                return Err(Error::new(ErrorKind::Denied, what));
            }
        }
        let plan = encrypted_as(&images, plan, (&header, &store), &self.image).await?;
        if let Some(luks) = plan.encryption() {
            self.luks.get_or_init(|| luks.clone());
        }
        let images = FileImages::to_write(&self.overlay, options, MayWrite::new_file())?;
        let image = images.open_writable(&self.overlay)?.store;
        create(plan, Stores { image: &*image, data: None }).await
    }

    /// A new file for the overlay, which may be used as the disk's own.
    fn make_file(
        &self,
        alike: impl Fn(&std::fs::File, &std::fs::File) -> Result<()>,
    ) -> Result<()> {
        let failed = |error| failed_in(&self.overlay, "creating", error);
        let like = self.image.metadata().map_err(|error| {
            Error::from_io(format!("asking about {}", self.image.display()), error)
        })?;
        remove(&self.overlay).map_err(failed)?;
        let mut options = std::fs::OpenOptions::new();
        // Until it has its rights its owner alone may open it.
        let made = options.write(true).create_new(true).mode(0o600);
        let creating =
            |error| Error::from_io(format!("creating {}", self.overlay.display()), error);
        let file = made.open(&self.overlay).map_err(creating)?;
        let old = std::fs::OpenOptions::new().read(true).write(true).open(&self.image);
        let old =
            old.map_err(|error| Error::from_io(format!("opening {}", self.image.display()), error));
        if let Err(error) = old.and_then(|old| alike(&old, &file)) {
            let image = self.image.display();
            tracing::warn!(%error, "{image} will not have the rights it had: it is a new file");
        }
        let made = file.metadata().map_err(creating)?;
        if (made.uid(), made.gid()) != (like.uid(), like.gid()) {
            let image = self.image.display();
            tracing::warn!(
                "{image} will have another owner or group, as far as this server may give it away: \
                 it becomes a new file, and only the file of the kept state keeps the old ones"
            );
        }
        let [is, wanted] = [&made, &like].map(|found| found.mode() & 0o777);
        if is != wanted {
            let image = self.image.display();
            tracing::warn!(
                "{image} will have mode {is:o}, not {wanted:o}: its new layer is a new file"
            );
        }
        Ok(())
    }

    /// Step 2: gives the disk its second name, unless it has that already, durably.
    ///
    /// # Errors
    /// `Denied` if something else has that name; else what the system reports.
    pub fn link(&self) -> Result<()> {
        match linkat(CWD, &self.image, CWD, &self.kept, AtFlags::empty()) {
            Ok(()) => {}
            Err(Errno::EXIST) if self.has_second_name() => {}
            Err(Errno::EXIST) => {
                let context = format!(
                    "there is a file {} already, and it is no layer of this disk",
                    self.kept.display()
                );
                return Err(Error::new(ErrorKind::Denied, context));
            }
            Err(error) => return Err(failed_in(&self.kept, "making the name", error)),
        }
        // A process that opened the state for writing would change what the overlay is based on.
        self.mark()?;
        fsync(&*self.folder).map_err(|error| failed_in(&self.kept, "syncing the folder of", error))
    }

    fn mark(&self) -> Result<()> {
        Mark::put(&self.kept, &self.image).map(drop)
    }

    /// Takes back what the first steps have done.
    pub fn give_up(&self) {
        // The first failure is the one to report.
        let _ = remove(&self.overlay);
        if self.has_second_name() {
            let _ = Mark::forget(&self.kept);
            let _ = remove(&self.kept);
        }
    }

    /// Whether both names are those of one file.
    fn has_second_name(&self) -> bool {
        let file = |path: &Path| path.symlink_metadata().map(|found| (found.dev(), found.ino()));
        matches!((file(&self.image), file(&self.kept)), (Ok(one), Ok(other)) if one == other)
    }
}

impl Renaming for Keeping {
    fn kept(&self) -> Option<&Path> {
        Some(&self.kept)
    }

    fn rename(&self) -> LocalFuture<'_, Result<()>> {
        let (from, to) = (self.overlay.clone(), self.image.clone());
        Box::pin(mica_rt::on_thread(&self.folder, move |_| {
            renameat(CWD, &from, CWD, &to).map_err(|error| failed_in(&to, "renaming", error))
        }))
    }

    fn undo(&self) -> LocalFuture<'_, Result<()>> {
        let (spare, kept, image) = (self.overlay.clone(), self.kept.clone(), self.image.clone());
        Box::pin(mica_rt::on_thread(&self.folder, move |_| {
            linkat(CWD, &kept, CWD, &spare, AtFlags::empty())
                .and_then(|()| renameat(CWD, &spare, CWD, &image))
                .map_err(|error| failed_in(&image, "renaming", error))
        }))
    }

    fn sync(&self) -> LocalFuture<'_, Result<()>> {
        let image = self.image.clone();
        Box::pin(mica_rt::on_thread(&self.folder, move |folder| {
            fsync(folder).map_err(|error| failed_in(&image, "syncing the folder of", error))
        }))
    }
}

/// What the overlay, which is opened as `named` and is really at `image`, calls the `kept` layer.
fn backing_name(named: &Path, image: &Path, kept: &Path) -> OsString {
    let real_folder = named.parent().and_then(|folder| folder.canonicalize().ok());
    let name = kept.file_name().unwrap_or_default();
    // A relative name starts from the folder in which the image is named.
    if real_folder.as_deref() != image.parent() || named.file_name() != image.file_name() {
        return kept.as_os_str().to_owned();
    }
    plain_name(name)
}

/// Removes a file, if there is one.
fn remove(path: &Path) -> rustix::io::Result<()> {
    match unlinkat(CWD, path, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

fn failed_in(path: &Path, doing: &str, error: Errno) -> Error {
    let hint = match error {
        Errno::PERM | Errno::ACCESS => {
            ": if it is the sandbox that refuses it, start the server with --disks-in and this \
             folder"
        }
        _ => "",
    };
    Error::from_io(format!("{doing} {}{hint}", path.display()), error.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn states_are_found_by_the_names_of_their_files() {
        let image = Path::new("/vm/web.v2.qcow2");
        let kept = kept_path(image, "monday").unwrap();
        assert_eq!(kept, Path::new("/vm/web.v2@monday.qcow2"));
        assert_eq!(state_of(image, &kept).as_deref(), Some("monday"));
        for other in ["/vm/web.v2.qcow2", "/vm/web.v2@.qcow2", "/vm/web@monday.qcow2", "/vm/base"] {
            assert_eq!(state_of(image, Path::new(other)), None, "{other}");
        }
        // A state of a state's name.
        let kept = kept_path(Path::new("disk"), "a@b").unwrap();
        assert_eq!(state_of(Path::new("disk"), &kept).as_deref(), Some("a@b"));
        for bad in ["", "a/b", "a\n", &"x".repeat(250)] {
            assert!(kept_path(image, bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn states_stay_when_what_they_are_named_after_has_left_the_chain() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["a@b.qcow2", "base@12.qcow2", "web@v2@mon.qcow2", "web@v2@x@y.qcow2", "top"] {
            fs::write(at(name), "layer").unwrap();
        }
        let names = ["base@12.qcow2", "a@b.qcow2", "web@v2@mon.qcow2", "web@v2@x@y.qcow2", "top"];
        let layers = names.map(at).to_vec();
        let kept = |image: &str| {
            let kept = kept_states(&at(image), &layers).into_iter();
            kept.map(|(position, state)| format!("{position} {state}")).collect::<Vec<_>>()
        };
        assert_eq!(kept("a.qcow2"), ["1 b"]);
        // Nobody froze the base, and the image of two of them was merged.
        for name in ["a@b.qcow2", "web@v2@mon.qcow2", "web@v2@x@y.qcow2"] {
            Mark::put(&at(name), &at("top")).unwrap();
        }
        fs::write(at("web@v2.qcow2.mica-above"), "above: top\n").unwrap();
        assert_eq!(kept("top"), ["1 b", "2 mon", "3 x@y"]);
    }

    #[test]
    fn disk_keeps_its_name_and_the_state_gets_another() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().canonicalize().unwrap().join(name);
        fs::write(at("disk.qcow2"), "old").unwrap();
        // What a killed process left.
        fs::write(at(".disk.qcow2.mica-new"), "stray").unwrap();
        fs::hard_link(at("disk.qcow2"), at("disk@a.qcow2")).unwrap();
        let keeping = Keeping::new(&at("disk.qcow2"), "a").unwrap();
        assert_eq!(keeping.backing_name, "disk@a.qcow2");
        keeping.make_file(|old, new| crate::make_alike(old, new)).unwrap();
        keeping.link().unwrap();
        fs::write(keeping.overlay(), "new").unwrap();
        let executor = mica_rt::Executor::new(mica_rt::Backend::Pool).unwrap();
        executor.block_on(async {
            keeping.rename().await.unwrap();
            keeping.sync().await.unwrap();
        });
        let read = |name| fs::read_to_string(at(name)).unwrap();
        assert_eq!((read("disk.qcow2"), read("disk@a.qcow2")), ("new".into(), "old".into()));
        executor.block_on(async { keeping.undo().await }).unwrap();
        assert_eq!((read("disk.qcow2"), read("disk@a.qcow2")), ("old".into(), "old".into()));
        keeping.give_up();
        assert!(!at("disk@a.qcow2").exists() && !keeping.overlay().exists());
        assert_eq!(read("disk.qcow2"), "old");
    }

    #[test]
    fn name_of_another_file_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk.qcow2");
        fs::write(&image, "disk").unwrap();
        fs::write(folder.path().join("disk@a.qcow2"), "another").unwrap();
        let keeping = Keeping::new(&image, "a").unwrap();
        assert_eq!(keeping.link().unwrap_err().kind(), ErrorKind::Denied);
        keeping.give_up();
        assert_eq!(fs::read_to_string(folder.path().join("disk@a.qcow2")).unwrap(), "another");
    }

    #[test]
    fn image_behind_a_symbolic_link_names_its_base_in_full() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().canonicalize().unwrap();
        fs::create_dir(real.join("elsewhere")).unwrap();
        fs::write(real.join("disk.qcow2"), "disk").unwrap();
        let link = real.join("elsewhere/link.qcow2");
        std::os::unix::fs::symlink("../disk.qcow2", &link).unwrap();
        let keeping = Keeping::new(&link, "a").unwrap();
        assert_eq!(keeping.backing_name, real.join("disk@a.qcow2").as_os_str());
        let keeping = Keeping::new(&real.join("disk.qcow2"), "10:00").unwrap();
        assert_eq!(keeping.backing_name, "./disk@10:00.qcow2");
    }
}
