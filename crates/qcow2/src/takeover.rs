//! Taking an image over from a writer that died while the machine went on: what its log says
//! ([`crate::write::handover`]) is put into the image before anybody looks at it; where the image
//! is only read, over it.
//!
//! Invariants
//! - I1 A log is believed only if it is of this start of the machine, the image names it, and no
//!   witness tells of a loss: then nobody has written the image since, and the page cache has all
//!   that the writer wrote. [`mica_block::Witness`] says what is not noticed.
//! - I2 A power cut during this leaves an image as a power cut under the writer does: data, then
//!   counts and tables that nothing names yet, then tables that got links, then links; each durable
//!   before the next begins.
//! - I3 The log is forgotten after the image stops naming it, and that after all of it is durable:
//!   if this is killed too, the next one begins anew.
//! - I4 Who only reads puts nothing into the image and leaves the log as it is. It is applied only
//!   while nobody can write the image.

mod found;
mod over;
mod replay;

use crate::format::Header;
use crate::open::{open_data_file, read_header};
use crate::write::handover::names_log;
use crate::write::header::{AUTOCLEAR_AT, LOG_NAME_SHIFT};
use found::Found;
use mica_block::{
    Error, ErrorKind, Handover, Images, OpenImage, Result, Store, read_exact, write_all,
};
use mica_rt::Buf;
use mica_units::HostOffset;
use over::Over;
use replay::{Replay, Step};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How often a log that somebody has is asked for, and how long is waited in between.
const TRIES_MAX: u32 = 50;
const PAUSE: Duration = Duration::from_millis(2);

/// Puts into the image at `path`, open for writing as `store`, what a writer that died had
/// acknowledged. Nothing, if there was none.
///
/// # Errors
/// What a write or a sync says.
pub(crate) async fn take_over(images: &dyn Images, path: &Path, store: &dyn Store) -> Result<()> {
    let Some(name) = named_log(store).await? else { return Ok(()) };
    let handover = images.handover(path)?;
    let found = match &handover {
        Some(handover) => find_of_the_dead(&**handover, name, store).await?,
        None => None,
    };
    match found {
        // Who marks an image as corrupt ends its writing, and its log.
        Some((header, _)) if header.incompatible.corrupt => {}
        Some((header, found)) => {
            let data = data_store(images, path, &header, true)?;
            if is_lost(&found, path, store, data.as_deref()) {
                return forget(store, handover.as_deref()).await;
            }
            let synced = sync_both(store, data.as_deref()).await;
            if let (Err(_), Some(handover)) = (&synced, &handover) {
                // The kernel tells once that data was lost: who tries again would hear of nothing,
                // and believe the log.
                handover.remove();
            }
            synced?;
            write_down(&header, store, &found).await?;
            tracing::info!(groups = found.groups.len(), "taken over from a writer that died");
        }
        None => {
            if let Some(place) = images.handover_of_another(path)? {
                let context = format!(
                    "what its last writer left is in {}, which is of another user: open it once as \
                     that user, or remove that file and lose what was not flushed",
                    place.display()
                );
                return Err(Error::new(ErrorKind::Denied, context));
            }
            warn_of_loss(path);
        }
    }
    forget(store, handover.as_deref()).await
}

/// Ends what the image has to do with its log (I3).
async fn forget(store: &dyn Store, handover: Option<&dyn Handover>) -> Result<()> {
    clear_name(store).await?;
    if let Some(handover) = handover {
        handover.remove();
    }
    Ok(())
}

/// The image at `path`, open for reading, as it is with what a writer that died had acknowledged.
///
/// # Errors
/// What a read says.
pub(crate) async fn read_over(
    images: &dyn Images,
    path: &Path,
    image: OpenImage,
) -> Result<OpenImage> {
    let Some(name) = named_log(&*image.store).await? else { return Ok(image) };
    let Some(handover) = images.handover_of_the_dead(path)? else { return Ok(image) };
    match find(&*handover, name, &*image.store).await? {
        Some((header, _)) if header.incompatible.corrupt => Ok(image),
        Some((header, found)) => {
            let data = data_store(images, path, &header, false)?;
            if is_lost(&found, path, &*image.store, data.as_deref()) {
                return Ok(image);
            }
            let replay = Replay::plan(&*image.store, &header, &found).await?;
            tracing::info!(
                image = %path.display(),
                "its last writer died: it is read with what that left, which who opens it for \
                 writing next puts in"
            );
            let store = Arc::new(Over::new(image.store, replay));
            Ok(OpenImage { store, identity: image.identity })
        }
        None => {
            warn_of_loss(path);
            Ok(image)
        }
    }
}

/// As [`find`], for who has the image open for writing. A process that was killed just now lets go
/// of its files one after the other, so that the log may be its own for a moment still.
async fn find_of_the_dead(
    handover: &dyn Handover,
    name: u32,
    store: &dyn Store,
) -> Result<Option<(Header, Found)>> {
    let mut tries = 1;
    loop {
        match find(handover, name, store).await {
            Err(error) if error.kind() == ErrorKind::Denied && tries < TRIES_MAX => {
                mica_rt::sleep(PAUSE).await;
                tries += 1;
            }
            found => return found,
        }
    }
}

/// The log in `handover` that the image in `store` calls `name`, and the header of the image.
async fn find(
    handover: &dyn Handover,
    name: u32,
    store: &dyn Store,
) -> Result<Option<(Header, Found)>> {
    let Some(found) = Found::read(handover, name)? else { return Ok(None) };
    let header = read_header(store).await?;
    Ok(found.fits(store, &header)?.then_some((header, found)))
}

/// Says so where the image at `path`, which is read as a backing file and has this `header`, lacks
/// what its writer acknowledged before it died. An index tells of the file alone, so the log is not
/// laid over it.
pub(crate) fn warn_of_log(images: &dyn Images, path: &Path, header: &Header) {
    let Some(name) = names_log(header.autoclear.unknown) else { return };
    let Ok(Some(handover)) = images.handover_of_the_dead(path) else { return };
    let found = Found::read(&*handover, name);
    if found.is_ok_and(|found| found.is_some_and(|found| !found.groups.is_empty())) {
        tracing::warn!(
            image = %path.display(),
            "its last writer died, and writes that were not flushed are not in it yet: open it \
             once for writing, as `mica serve` does, before it is used as a backing file"
        );
    }
}

fn warn_of_loss(path: &Path) {
    tracing::warn!(
        image = %path.display(),
        "its last writer did not close it, and left nothing here that fits: writes that were not \
         flushed are lost"
    );
}

/// The name of the log in the header of the image, if there is one.
async fn named_log(store: &dyn Store) -> Result<Option<u32>> {
    const START_BYTES: usize = 104;
    if store.len()? < START_BYTES as u64 {
        return Ok(None);
    }
    let start = read_exact(store, HostOffset::ZERO, START_BYTES).await?;
    // Version 2 has no such bits.
    if start[..8] != *b"QFI\xfb\0\0\0\x03" {
        return Ok(None);
    }
    let at = usize::try_from(AUTOCLEAR_AT).expect("88");
    let bits = start[at..].first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
    Ok(names_log(bits))
}

async fn clear_name(store: &dyn Store) -> Result<()> {
    let bits = read_exact(store, HostOffset::new(AUTOCLEAR_AT), 8).await?;
    let bits = bits.first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
    let kept = bits & ((1 << LOG_NAME_SHIFT) - 1);
    let at = HostOffset::new(AUTOCLEAR_AT);
    write_all(store, Buf::from_slice(&kept.to_be_bytes()), at).await?;
    store.sync().await
}

/// The data file of the image at `path`, if it has one.
fn data_store(
    images: &dyn Images,
    path: &Path,
    header: &Header,
    writable: bool,
) -> Result<Option<Arc<dyn Store>>> {
    if !header.incompatible.external_data_file {
        return Ok(None);
    }
    Ok(Some(open_data_file(images, path, header, writable)?.1.store))
}

/// Whether the system lost what the image at `path`, in these stores, needs of what was `found`
/// (I1). Then it says so.
fn is_lost(found: &Found, path: &Path, store: &dyn Store, data: Option<&dyn Store>) -> bool {
    let stores: Vec<_> = [Some(store), data].into_iter().flatten().collect();
    let is_lost = found.tells_loss(&stores);
    if is_lost {
        tracing::warn!(
            image = %path.display(),
            "its last writer did not close it, and its file system was mounted anew since, or its \
             device came anew: writes that were not flushed are lost"
        );
    }
    is_lost
}

/// Makes durable what the links of the log lead to.
async fn sync_both(store: &dyn Store, data: Option<&dyn Store>) -> Result<()> {
    if let Some(data) = data {
        data.sync().await?;
    }
    store.sync().await
}

/// Puts what was `found` into the image, whose data is durable.
async fn write_down(header: &Header, store: &dyn Store, found: &Found) -> Result<()> {
    let replay = Replay::plan(store, header, found).await?;
    for step in Step::ALL {
        if replay.pages_of(step).next().is_none() {
            // What is durable stays so, and a sync costs a guest's time.
            continue;
        }
        for (at, bytes) in replay.pages_of(step) {
            write_all(store, Buf::from_slice(bytes), at).await?;
        }
        // Each step before the next (I2).
        store.sync().await?;
    }
    Ok(())
}
