//! The mark of a frozen layer: where the writing of its disk goes on.
//!
//! A configuration names the image that a disk began with. Once a layer is on top of that, whoever
//! opens the image again to write it would change what the layer above stands on, and destroy it.
//! So a small file beside the frozen layer, `LAYER.mica-above`, names the layer above. It gets its
//! name before anything is written above, and nothing that is written there is called durable
//! before it is. It is removed by nobody but people, and a snapshot that fails.
//! docs/formats/above.md has its bytes.
//!
//! Whoever is about to write a layer looks for its mark, and follows it from layer to layer. What
//! it finds is one of these:
//!
//! | the layer above | what is written |
//! |---|---|
//! | there, and stands on it, perhaps through others | the layer above |
//! | there, and stands on something else | nothing: the user has to say |
//! | missing, or a name that the chain may not open | nothing: the user has to say |
//!
//! Whether the writer of the layer has closed it is of no consequence: nothing that is read is
//! missing from it (`qcow2/src/chain/push.rs`, I5), and whoever opens the chain for writing closes
//! it (`qcow2/src/unclosed.rs`).
//!
//! A merge takes layers out of the chain: a mark that named one of them names the layer that is
//! above from then on ([`settle_marks`]). If its process was killed before that, the marks lead
//! through layers that have left to the one above, which stands on a layer that they passed: that
//! one's mark is put right by whoever opens the chain for writing ([`Active::mend`]).
//!
//! Invariants
//! - I1 A mark is followed only if a stranger cannot have put it there (`mark.rs`).
//! - I2 Only a name that the policy of the chain permits is opened.
//! - I3 Before anything is written above, the mark that led there is durable, and so is its layer.
//!   Whoever put it may have been killed before it synced them, and after a power cut what was
//!   written above, and flushed, would not be found, or lack what is beneath. Marks further below
//!   are durable: a layer is put on top only of one that is settled.

use crate::files::{position_of, sync_folder_of};
use crate::mark::{Mark, cure};
use crate::may_write::{MayWrite, frozen};
use crate::policy::allowed_places;
use crate::{FileImages, ImageOptions, Names};
use mica_block::{Error, ErrorKind, Identity, Images, Result, Store, read_exact};
use mica_qcow2::read_header;
use mica_qcow2_format::{Header, parse_image_name};
use mica_store::FileStore;
use mica_units::{HostOffset, LayerNumber};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// An L1 table is read in pieces of this size.
const L1_PIECE_BYTES: usize = 1 << 20;

/// The layer that is written for an image, and what is to be known for opening it.
pub(crate) struct Active {
    pub(crate) path: PathBuf,
    pub(crate) options: ImageOptions,
    /// The format by which the layer above names the one that the user named, if there is one, and
    /// it says.
    pub(crate) named_as: Option<String>,
    /// Layers whose marks lead on through such as have left the chain, and what is above them.
    stale: Vec<(PathBuf, PathBuf)>,
}

impl Active {
    /// Has marks lead past the layers that a merge took out before it was killed. The caller has
    /// the chain open for writing.
    pub(crate) fn mend(&self) {
        for (layer, above) in &self.stale {
            let put = Mark::put(layer, above).and_then(|mark| sync_folder_of(mark.path()));
            if let Err(error) = put {
                // It is found as it was this time.
                tracing::warn!(
                    "{}: its mark leads on through layers that left the chain: {}",
                    layer.display(),
                    error.in_one_line()
                );
            }
        }
    }
}

/// The layer that is written for the image that the user `named`, qcow2 or raw: that one, or the
/// one above it in which the writing goes on.
///
/// # Errors
/// As for opening the images; `Denied` if it cannot be told.
pub(crate) async fn active_layer(named: &Path, options: ImageOptions) -> Result<Active> {
    let images = FileImages::new(named, options.clone())?;
    let mut path = named.to_owned();
    let mut followed: Option<(FileStore, Mark)> = None;
    let (mut named_as, mut passed, mut stale) = (None, Vec::new(), Vec::new());
    for _ in 0..LayerNumber::COUNT_MAX {
        let (located, store) = images.glance(&path)?;
        let Some(mark) = Mark::of(&path, located.owner())? else {
            let options = match followed {
                None => options,
                Some((layer, mark)) => {
                    settle(&layer, &mark).await?;
                    beneath(named, options)?
                }
            };
            return Ok(Active { path, options, named_as, stale });
        };
        passed.push((path, located.identity(store.len()?)));
        let Stands { on, format } = check_above(&images, &passed, &mark).await?;
        if on + 1 < passed.len() {
            // Those after it have left the chain, and so has what their marks say.
            stale.retain(|(layer, _)| passed[..on].iter().any(|(path, _)| path == layer));
            stale.push((passed[on].0.clone(), mark.above().to_owned()));
            passed.truncate(on + 1);
        }
        if on == 0 {
            named_as = format;
        }
        path = mark.above().to_owned();
        followed = Some((store, mark));
    }
    let what = format!("{}: the marks of its layers form a loop", named.display());
    Err(Error::new(ErrorKind::Limit, what))
}

/// Whether the image that the user `named` is a frozen layer, above which the writing goes
/// on. It shows all that it has to then, even if its writer was killed before it closed it
/// (`qcow2/src/chain/push.rs`, I5).
///
/// # Errors
/// As for opening the images; `Denied` if it cannot be told.
pub async fn is_frozen(named: &Path, options: ImageOptions) -> Result<bool> {
    Ok(active_layer(named, options).await?.path != named)
}

/// Makes `layer` and its `mark` durable, before anything is written above (I3).
async fn settle(layer: &FileStore, mark: &Mark) -> Result<()> {
    layer.sync().await?;
    sync_folder_of(mark.path())
}

/// Whether its writer has not closed the image.
fn is_in_use(header: &Header) -> bool {
    header.autoclear.unknown != 0 || header.incompatible.dirty
}

/// Whether a writer has had the qcow2 image at `path`: it has not closed it, it left something of
/// its own, or went on above.
pub(crate) async fn is_used(images: &FileImages, path: &Path) -> Result<bool> {
    let (located, store) = images.glance(path)?;
    let header = read_header(&store).await.map_err(|error| error.wrap(name_of(path)))?;
    Ok(is_in_use(&header)
        || Mark::of(path, located.owner())?.is_some()
        || has_data(images, path).await?)
}

/// Whether the qcow2 image at `path` has anything of its own.
pub(crate) async fn has_data(images: &FileImages, path: &Path) -> Result<bool> {
    let (_, store) = images.glance(path)?;
    let header = read_header(&store).await.map_err(|error| error.wrap(name_of(path)))?;
    let len = u64::from(header.l1_entries) * 8;
    for start in (0..len).step_by(L1_PIECE_BYTES) {
        let at = HostOffset::new(header.l1_offset.bytes().saturating_add(start));
        let piece = usize::try_from(len - start).unwrap_or(usize::MAX).min(L1_PIECE_BYTES);
        let piece = read_exact(&store, at, piece).await;
        let piece = piece.map_err(|error| error.wrap(name_of(path)))?;
        if piece.iter().any(|byte| *byte != 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether there is a mark for a layer at `path`, where there may be no file.
pub fn has_mark(path: &Path) -> bool {
    Mark::is_beside(path)
}

pub(crate) fn owner_of(layer: &Path) -> Result<u32> {
    let found = std::fs::metadata(layer)
        .map_err(|error| Error::from_io(layer.display().to_string(), error))?;
    Ok(found.uid())
}

/// What becomes of the files of layers that left a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GoneFiles {
    /// They are the user's, and stay.
    Stay,
    /// They are about to be removed.
    Go,
}

/// The layers that are `gone` from a chain were merged, and it has these `layers` now, from the
/// base. The mark of a layer that leads to one of these, through such as are gone only, names that
/// one. A mark that leads elsewhere is of another disk, of which the chain may be a clone: it stays
/// as it is. Those that are gone keep theirs: what they name does not stand on them any more, so
/// that nobody writes them without being told, or is that other disk's.
///
/// # Errors
/// `Denied` if the `files` are to go, and a mark leads to one from which none leads on: that may be
/// where another disk is. Else what the system reports. A mark that is as it was leads to a refusal
/// that says what to do.
pub fn settle_marks(layers: &[PathBuf], gone: &[PathBuf], files: GoneFiles) -> Result<()> {
    for position in 1..layers.len() {
        let (layer, above) = (&layers[position - 1], &layers[position..]);
        let Some(mark) = Mark::of(layer, owner_of(layer)?)? else { continue };
        let end = match end_through(gone, mark.above())? {
            End::Beyond(end) => end,
            End::In(file) if files == GoneFiles::Go => return Err(leads_nowhere(&mark, file)),
            End::In(_) | End::Elsewhere => continue,
        };
        if let Some(at) = position_of(above, &end) {
            let above = std::path::absolute(&above[at])
                .map_err(|error| Error::from_io(above[at].display().to_string(), error))?;
            sync_folder_of(Mark::put(layer, &above)?.path())?;
        }
    }
    Ok(())
}

/// The `mark` leads to a `file` that stays for that.
fn leads_nowhere(mark: &Mark, file: &Path) -> Error {
    let (file, at) = (file.display(), mark.path().display());
    let what = format!(
        "{file} stays: by the mark {at} a disk goes on there, and no mark leads on from there; if \
         no disk does, remove that mark"
    );
    Error::new(ErrorKind::Denied, what)
}

/// Where marks lead through layers that are gone.
enum End<'a> {
    /// To none of these, or to one whose file is gone, too.
    Elsewhere,
    /// To this one, and not on; or in a circle.
    In(&'a Path),
    /// To a layer that is not gone.
    Beyond(PathBuf),
}

/// Where the marks lead from the layer at `from`, if that is `gone`, through others that are.
fn end_through<'a>(gone: &'a [PathBuf], from: &Path) -> Result<End<'a>> {
    let (mut end, mut passed) = (from.to_owned(), None);
    // Each of them once: there may be a loop.
    for _ in 0..=gone.len() {
        let Some(at) = position_of(gone, &end) else {
            return Ok(if passed.is_none() { End::Elsewhere } else { End::Beyond(end) });
        };
        let layer = &*gone[at];
        if !layer.try_exists().map_err(|error| Error::from_io(name_of(layer), error))? {
            return Ok(End::Elsewhere);
        }
        let Some(mark) = Mark::of(layer, owner_of(layer)?)? else { return Ok(End::In(layer)) };
        mark.above().clone_into(&mut end);
        passed = Some(layer);
    }
    Ok(passed.map_or(End::Elsewhere, End::In))
}

/// How the layer that a mark leads to stands on one that was passed on the way there.
struct Stands {
    /// Which one.
    on: usize,
    /// The format by which it is named, if that is said.
    format: Option<String>,
}

/// Makes sure that what is above the last layer that was `passed`, which has this `mark`, still
/// stands on it; or on one before it, if a merge took out those in between.
async fn check_above(
    images: &FileImages,
    passed: &[(PathBuf, Identity)],
    mark: &Mark,
) -> Result<Stands> {
    let (layer, _) = passed.last().expect("the layer with the mark");
    let (at, above) = (mark.path(), mark.above());
    let denied = |what: &str| {
        let (named, above) = (layer.display(), above.display());
        let what = format!("{named} is frozen: its disk continues in {above}, {what}");
        Error::new(ErrorKind::Denied, format!("{what}; {}", cure(layer, at)))
    };
    let mut path = above.to_owned();
    for depth in 0..LayerNumber::COUNT_MAX {
        let store = match images.glance(&path) {
            Ok((_, store)) => store,
            Err(error) if error.kind() == ErrorKind::NotFound && depth == 0 => {
                return Err(denied("which is missing"));
            }
            Err(error) => return Err(denied(&format!("which cannot be opened ({error})"))),
        };
        let header = match read_header(&store).await {
            Ok(header) => header,
            Err(error) if depth == 0 => {
                return Err(denied(&format!("which cannot be read ({error})")));
            }
            // A raw base, for one.
            Err(_) => break,
        };
        let below = header.backing.and_then(|backing| {
            let name = parse_image_name(&backing.name).ok()?;
            let below = images.resolve(&path, &name.path).ok()?;
            images.identify(&below).ok().map(|found| (below, found, backing.format))
        });
        let Some((below, found, format)) = below else { break };
        let is_it = |(_, passed): &(PathBuf, Identity)| {
            (found.device, found.inode) == (passed.device, passed.inode)
        };
        if let Some(on) = passed.iter().rposition(is_it) {
            return Ok(Stands { on, format });
        }
        path = below;
    }
    Err(denied(&match end_of_marks(above) {
        None => "which is no longer based on it".to_owned(),
        Some(end) => format!(
            "which is no longer based on it, and from there in {}, as far as marks say",
            end.display()
        ),
    }))
}

/// Where the marks lead from the layer at `from`, which only tells people where to look; `None` if
/// they lead nowhere.
fn end_of_marks(from: &Path) -> Option<PathBuf> {
    let mut end = None;
    for _ in 0..LayerNumber::COUNT_MAX {
        let at: &Path = end.as_deref().unwrap_or(from);
        let mark = owner_of(at).and_then(|owner| Mark::of(at, owner));
        match mark {
            Ok(Some(mark)) => end = Some(mark.above().to_owned()),
            _ => return end,
        }
    }
    // A loop.
    None
}

/// Options for opening a layer above the image that the user `named`, which may name that one, and
/// what that one may name.
fn beneath(named: &Path, mut options: ImageOptions) -> Result<ImageOptions> {
    if options.names != Names::None {
        let places = allowed_places(named, options.names, &options.allow_paths)?;
        let real = named
            .canonicalize()
            .map_err(|error| Error::from_io(format!("finding {}", named.display()), error))?;
        options.allow_paths.extend(places);
        options.allow_paths.push(real);
    }
    Ok(options)
}

impl MayWrite {
    /// Checks that the image at `path`, which exists, is not a frozen layer.
    ///
    /// # Errors
    /// `Denied` if it is a frozen layer, or if that cannot be told.
    pub async fn check(path: &Path, options: &ImageOptions) -> Result<Self> {
        let active = active_layer(path, options.clone()).await?;
        match active.path == path {
            true => Ok(Self::as_active()),
            false => Err(frozen(path, &active.path)),
        }
    }
}

fn name_of(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests;
