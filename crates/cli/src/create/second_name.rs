//! The second name of the data file of a new image that takes the place of an old one, whose data
//! file has the same name.
//!
//! The two files of an image cannot be replaced in one step, and neither image may show what is in
//! the other one's data file. So the new image names its data file in another way until both have
//! their places.
//!
//! ```text
//! step                                            what a kill leaves under the image's name
//! 1 the new image names a second name for its     the old image
//!   data file, `.DATA.mica-data`; durable
//! 2 the new data file gets that name, too         the old image
//! 3 the new image takes the old one's place;      the new image, whose data file is called by
//!   durable                                         the second name
//! 4 the new data file takes the old one's         the same
//! 5 the new image names its data file as was      the new image, and a second name that nobody
//!   wished; durable                                 needs
//! 6 the second name and the old files go          the new image
//! ```
//!
//! Invariants
//! - N1 Whatever image is there at an instant names a data file that is its own.
//! - N2 A second name is removed only together with an image that names it, or that would have: one
//!   that is replaced, or that a killed process left unfinished; or if the file has the name by
//!   which the image that is replaced names it.
//!
//! What is killed after step 3 is ended by the next one that replaces the image ([`settle`]). Where
//! files cannot have two names, or one of the two has to be overwritten in place, the old image is
//! spoiled instead (`spoiled.rs`).

use super::new_file::NewFile;
use super::new_name::remove_second;
use super::{beside, node_at};
use crate::failure::Failure;
use crate::unfinished::{Unfinished, sync_name};
use mica_block::{Result, Store, read_exact, write_all};
use mica_qcow2::read_header;
use mica_qcow2_format::{HEADER_READ_BYTES, Header, HeaderChange};
use mica_rt::Buf;
use mica_stack::remove_unfinished;
use mica_units::HostOffset;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Ends a second name.
const SECOND: &str = ".mica-data";
/// How many second names are tried: one may be that of an image that was moved since.
const NAMES_MAX: u32 = 8;

/// A data file that has a second name, by which the new image names it. The name goes when this is
/// dropped.
pub(super) struct SecondName {
    link: Unfinished,
    path: PathBuf,
    image: Arc<dyn Store>,
    /// The image's first sector, which names the data file as was wished.
    sector: Buf,
}

impl SecondName {
    /// Steps 1 and 2, for the `image` and its `data` file, which are complete. `None` if it cannot
    /// have such a name: all is as it was.
    ///
    /// # Errors
    /// What the system reports.
    pub(super) async fn give(
        image: &NewFile,
        data: &NewFile,
    ) -> std::result::Result<Option<Self>, Failure> {
        let (store, place) = (Arc::clone(image.store()), data.place());
        let header = read_header(&*store).await?;
        let (Some(name), Some(own)) = (&header.data_file_name, data.real_path().file_name()) else {
            return Ok(None);
        };
        let mut paths = second_names(own).map(|second| place.with_file_name(second));
        let Some(path) = paths.find(|path| path.symlink_metadata().is_err()) else {
            return Ok(None);
        };
        let Some(second) = name_beside(image.path(), name, &path) else { return Ok(None) };
        let Some(change) = plan(&*store, &header, second).await? else { return Ok(None) };
        let sector = read_exact(&*store, HostOffset::ZERO, change.sector.len()).await?;
        put(&*store, change).await?;
        let Ok(link) = Unfinished::link(place, &path) else {
            put_sector(&*store, sector).await?;
            return Ok(None);
        };
        let second = Self { link, path, image: store, sector };
        sync_name(&second.path)?;
        Ok(Some(second))
    }

    /// Step 5.
    ///
    /// # Errors
    /// What the system reports.
    pub(super) async fn restore(&self) -> Result<()> {
        put_sector(&*self.image, Buf::from_slice(&self.sector)).await
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// It stays: so does an image that names it.
    pub(super) fn stay(self) {
        self.link.keep();
    }
}

/// Ends what processes that were killed left of second names of the file at `data`, which is to be
/// the data file of the new `image`. Returns a second name that the image that is replaced needs.
///
/// # Errors
/// What the system reports.
pub(super) async fn settle(
    image: &NewFile,
    data: &Path,
) -> std::result::Result<Option<PathBuf>, Failure> {
    let real = data.canonicalize().unwrap_or_else(|_| data.to_owned());
    let second = |name: &OsStr| {
        let path = beside(image.path(), Path::new(name));
        let is_it = real.file_name().zip(path.file_name()).is_some_and(|(own, name)| {
            second_names(own).any(|second| second == name)
                && is_same_folder(folder_of(&path), folder_of(&real))
        });
        is_it.then_some(path)
    };
    let old = image.replaced_store();
    let header = match &old {
        Some(old) => read_header(&***old).await.ok(),
        None => None,
    };
    let needed = header.as_ref().and_then(|header| second(header.data_file_name.as_deref()?));
    let left = image.left().and_then(second).filter(|left| needed.as_ref() != Some(left));
    if let Some(left) = left {
        remove_unfinished(&left);
    }
    let (Some(old), Some(header)) = (old, header) else { return Ok(None) };
    let Some(path) = needed else {
        let named = header.data_file_name.as_deref().map(Path::new);
        if named.is_some_and(|named| is_same(&beside(image.path(), named), &real)) {
            // Step 5 was the last.
            let seconds = real.file_name().into_iter().flat_map(second_names);
            let seconds = seconds.map(|second| real.with_file_name(second));
            seconds
                .filter(|second| is_same(second, &real))
                .for_each(|second| remove_second(&second));
        }
        return Ok(None);
    };
    if !is_same(&path, data) {
        return Ok(Some(path));
    }
    // Step 4 was the last.
    let named = header.data_file_name.as_deref().map(Path::new).unwrap_or(Path::new(""));
    let wished = match (named.is_absolute(), data.file_name()) {
        (false, Some(name)) => named.with_file_name(name),
        _ => real,
    };
    let Some(change) = plan(&**old, &header, wished.into()).await? else { return Ok(Some(path)) };
    put(&**old, change).await?;
    remove_second(&path);
    Ok(None)
}

/// The data file that the unfinished image at `place` names, if one was left there.
pub(super) fn data_name_in(place: &Path) -> Option<OsString> {
    let mut bytes = Vec::new();
    let file = File::open(place).ok()?;
    let len = file.metadata().ok().filter(std::fs::Metadata::is_file)?.len();
    file.take(HEADER_READ_BYTES as u64).read_to_end(&mut bytes).ok()?;
    Header::decode(&bytes, len).ok()?.data_file_name
}

/// The names that a data file called `own` may have besides.
fn second_names(own: &OsStr) -> impl Iterator<Item = OsString> {
    (1..=NAMES_MAX).map(move |number| {
        let mut name = OsString::from(".");
        name.push(own);
        name.push(SECOND);
        if number > 1 {
            name.push(number.to_string());
        }
        name
    })
}

/// What the image at `image` calls the file at `path`, which is beside the one that it calls
/// `name`.
fn name_beside(image: &Path, name: &OsStr, path: &Path) -> Option<OsString> {
    let near = Path::new(name).with_file_name(path.file_name()?);
    if is_same_folder(folder_of(&beside(image, &near)), folder_of(path)) {
        return Some(near.into());
    }
    // The name leads through a symbolic link.
    Some(folder_of(path).canonicalize().ok()?.join(path.file_name()?).into())
}

fn is_same(one: &Path, other: &Path) -> bool {
    node_at(one).is_some_and(|one| node_at(other) == Some(one))
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn is_same_folder(one: &Path, other: &Path) -> bool {
    one.canonicalize().is_ok_and(|one| other.canonicalize().is_ok_and(|other| one == other))
}

/// What makes the image in `store`, which has this `header`, call its data file `name`; `None` if
/// the header has no room for that.
async fn plan(store: &dyn Store, header: &Header, name: OsString) -> Result<Option<HeaderChange>> {
    let len = usize::try_from(header.cluster_bits.bytes()).unwrap_or(usize::MAX);
    let cluster = read_exact(store, HostOffset::ZERO, len).await?;
    let next = Header { data_file_name: Some(name), ..header.clone() };
    Ok(HeaderChange::plan(&cluster, &next).ok())
}

async fn put(store: &dyn Store, HeaderChange { name, sector }: HeaderChange) -> Result<()> {
    if let Some((at, name)) = name {
        write_all(store, Buf::from_slice(&name), HostOffset::new(at as u64)).await?;
        store.sync().await?;
    }
    put_sector(store, Buf::from_slice(&sector)).await
}

async fn put_sector(store: &dyn Store, sector: Buf) -> Result<()> {
    write_all(store, sector, HostOffset::ZERO).await?;
    store.sync().await
}
