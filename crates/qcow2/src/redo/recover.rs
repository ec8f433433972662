//! Recovery by the next process to open an image whose writer died: the log is applied to the image
//! before anybody looks at it or, if the image is only read, laid over it. [`super`] has the rules.

use super::LOG_NAME_SHIFT;
use super::baseline::Run;
use super::evidence;
use super::format::names_log;
use super::found::Found;
use super::over::Over;
use super::replay::{Replay, Step};
use crate::header_io::{clear_autoclear, open_data_file, read_header};
use mica_block::{
    Error, ErrorKind, Images, OpenImage, RedoMemory, Result, Store, read_exact, write_all,
};
use mica_qcow2_format::{Header, MAGIC, field};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How often to retry a log that is in use, and how long to wait in between.
const TRIES_MAX: u32 = 50;
const PAUSE: Duration = Duration::from_millis(2);

/// Why a log is not used.
const NOTHING_FITS: &str = "left nothing here that fits";
const HEADER_CHANGED: &str = "another program has since changed its header, or made it shorter";
const REMOUNTED: &str = "its file system has since been remounted, or its device reattached";
const WRITTEN_SINCE: &str = "another program has since written over what it had changed";
const NOT_DURABLE: &str = "its data could not be made durable";
const NOT_NAMED: &str =
    "another program has since opened it for writing, or put a copy in its place";

/// Applies to the image at `path`, open for writing as `store`, what a writer that died had
/// acknowledged. Does nothing if there was none.
///
/// # Errors
/// Any failure of a write or a sync.
pub async fn replay_redo_log(images: &dyn Images, path: &Path, store: &dyn Store) -> Result<()> {
    let Some(name) = named_log(store).await? else {
        return drop_unnamed(images, path, store).await;
    };
    let memory = images.redo_logs().log(path)?;
    let found = found_in(memory.as_deref(), name).await?;
    let (Some(log), Some(found)) = (memory.as_deref(), found) else {
        refuse_if_elsewhere(images, path)?;
        return set_aside(path, store, memory.as_deref(), NOTHING_FITS).await;
    };
    if let Some(why) = found.doubt {
        return set_aside(path, store, Some(log), why).await;
    }
    let header = read_header(store).await?;
    let mut unused: &[Run] = &[];
    // Marking an image as corrupt ends the writing, and the log.
    if !found.is_empty() && !header.incompatible.corrupt {
        let data = data_store(images, path, &header, true)?;
        match usable(&found, &header, store, data.as_deref()).await? {
            Ok(replay) => {
                let synced = sync_both(store, data.as_deref()).await;
                if let Err(error) = synced {
                    // The kernel reports lost data once: the next attempt would hear nothing of it,
                    // and trust the log.
                    set_aside(path, store, Some(log), NOT_DURABLE).await?;
                    return Err(error);
                }
                found.begin_replay(log)?;
                write_down(store, &replay).await?;
                unused = found.unused();
                tracing::info!(groups = found.groups.len(), "replayed a dead writer's redo log");
            }
            Err(why) if found.has_links() => {
                return set_aside(path, store, Some(log), why).await;
            }
            // Only clusters that were counted ahead are lost with it: they leak.
            Err(why) => tracing::debug!(why, "a log that links nothing is not used"),
        }
    }
    clear_name(store).await?;
    log.remove();
    free_unused(store, &header, unused).await
}

/// Frees the clusters that a log called unused which the image in `store` does not name any more:
/// while it does, free clusters may be given to somebody else, and the log would free them a second
/// time.
async fn free_unused(store: &dyn Store, header: &Header, unused: &[Run]) -> Result<()> {
    let mut freed = Replay::empty(header);
    freed.free_unused(store, header, unused).await?;
    write_down(store, &freed).await
}

/// Fails if the log of the image at `path` is where this process does not use it.
fn refuse_if_elsewhere(images: &dyn Images, path: &Path) -> Result<()> {
    let context = if let Some(place) = images.redo_logs().of_another(path)? {
        format!(
            "what its last writer left is in {}, which belongs to another user: open it as that \
             user once, or remove that file and lose what was not flushed",
            place.display()
        )
    } else if let Some(place) = images.redo_logs().elsewhere(path)? {
        format!(
            "what its last writer left is in {}: pass {} as --redo-dir, or remove that file and \
             lose what was not flushed",
            place.display(),
            place.ancestors().nth(2).unwrap_or(&place).display()
        )
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::Denied, context))
}

/// Detaches the image from a log that is not used, and warns with the reason `why`. The name goes
/// last: a process that dies before has another one warn.
async fn set_aside(
    path: &Path,
    store: &dyn Store,
    memory: Option<&dyn RedoMemory>,
    why: &str,
) -> Result<()> {
    let kept = memory.and_then(RedoMemory::set_aside);
    warn_of_loss(path, why, kept);
    clear_name(store).await
}

/// The image at `path` names no log: warns if there is one whose writes are lost. Whoever cleared
/// the name need not have lost any: a process that replayed the log may have died before it removed
/// it.
async fn drop_unnamed(images: &dyn Images, path: &Path, store: &dyn Store) -> Result<()> {
    if let Some(memory) = images.redo_logs().unnamed_log(path)?
        && drop_log(path, store, &*memory).await?
    {
        return Ok(());
    }
    if let Some(place) = images.redo_logs().elsewhere(path)? {
        tracing::warn!(
            image = %path.display(),
            log = %place.display(),
            "its last writer did not close it, and {NOT_NAMED}: if that log, which is not used any \
             more, has writes that were not flushed, they are lost; remove it"
        );
    }
    Ok(())
}

/// Lets go of the log in `memory`, which the image at `path` does not name any more, if it has any
/// links, or may have had more. Says whether it did.
async fn drop_log(path: &Path, store: &dyn Store, memory: &dyn RedoMemory) -> Result<bool> {
    let found = match once_orphaned(|| Found::read_any(memory)).await {
        Ok(Some(found)) if found.doubt.is_some() => {
            let kept = memory.set_aside().map(|place| place.display().to_string());
            tracing::warn!(
                image = %path.display(),
                kept,
                "a redo log that was copied or changed is in the place of the image's own, and \
                 {NOT_NAMED}: if its last writer did not close it, writes that were not flushed are \
                 lost"
            );
            return Ok(true);
        }
        Ok(Some(found)) if found.has_links() => found,
        Ok(_) => return Ok(false),
        // Nothing of it is used, so it keeps no image from being opened.
        Err(error) => {
            tracing::debug!(%error, "a log that the image does not name cannot be read");
            let kept = memory.set_aside();
            warn_of_loss(path, NOT_NAMED, kept);
            return Ok(true);
        }
    };
    let header = read_header(store).await?;
    // What cannot be compared is not in the file.
    if is_in_file(&found, &header, store).await.unwrap_or(false) {
        memory.remove();
    } else {
        let kept = memory.set_aside();
        warn_of_loss(path, NOT_NAMED, kept);
    }
    Ok(true)
}

/// Whether the file has all that the log changes already, by the work of those who had the log
/// (R7).
async fn is_in_file(found: &Found, header: &Header, store: &dyn Store) -> Result<bool> {
    if !found.fits(store, header)? {
        return Ok(false);
    }
    let replay = Replay::plan(store, header, found).await?;
    Ok(replay.goes_on_from(store, found).await? && replay.is_in(store).await?)
}

/// Ends the log that the frozen layer at `path`, which nobody else has open, names in its `header`:
/// counts become right as far as that can be told, and the image in `store` names none any more.
/// Of a log that is gone, as after a power cut, nothing is missing: whoever put a layer on top had
/// written out what there was to be read.
///
/// # Errors
/// `Denied` if it has links that the file lacks, or if that cannot be told; any failure of a write
/// or a sync.
pub(crate) async fn end_log_of_frozen(
    images: &dyn Images,
    path: &Path,
    store: &dyn Store,
    header: &Header,
) -> Result<()> {
    let Some(name) = names_log(header.autoclear.unknown) else { return Ok(()) };
    let memory = images.redo_logs().log(path)?;
    let found = found_in(memory.as_deref(), name).await?;
    let (Some(log), Some(found)) = (memory.as_deref(), found) else {
        refuse_if_elsewhere(images, path)?;
        return clear_name(store).await;
    };
    let mut unused: &[Run] = &[];
    match links_are_in(images, path, store, &found).await? {
        Ok(None) => {}
        Ok(Some(replay)) => {
            found.begin_replay(log)?;
            write_down(store, &replay).await?;
            unused = found.unused();
        }
        Err(why) => {
            let context = format!(
                "its last writer did not close it, and {why}: `mica check -r leaks` closes it as \
                 it is, while nobody has it open"
            );
            return Err(Error::new(ErrorKind::Denied, context));
        }
    }
    // Whoever finds the name alone misses nothing, and nobody would look for a log without a name.
    log.remove();
    clear_name(store).await?;
    free_unused(store, header, unused).await
}

/// What the log that was `found` makes of the counts of the frozen layer at `path`, if it can be
/// applied and the file in `store` has all links of it already; why it must not be ended otherwise.
async fn links_are_in(
    images: &dyn Images,
    path: &Path,
    store: &dyn Store,
    found: &Found,
) -> Result<std::result::Result<Option<Replay>, &'static str>> {
    if let Some(why) = found.doubt {
        return Ok(Err(why));
    }
    if found.is_empty() {
        return Ok(Ok(None));
    }
    let header = read_header(store).await?;
    let data = data_store(images, path, &header, false)?;
    Ok(match usable(found, &header, store, data.as_deref()).await? {
        Ok(replay) if replay.has_links_in(store).await? => Ok(Some(replay)),
        Ok(_) => Err("writes that were not flushed are in its redo log alone"),
        Err(why) if found.has_links() => Err(why),
        // Only clusters that were counted ahead are lost with it: they leak.
        Err(_) => Ok(None),
    })
}

fn warn_of_loss(path: &Path, why: &str, kept: Option<PathBuf>) {
    let kept = kept.map(|place| place.display().to_string());
    tracing::warn!(
        image = %path.display(),
        kept,
        "its last writer did not close it, and {why}: writes that were not flushed are lost"
    );
}

/// The image at `path`, open for reading, including what a writer that died had acknowledged.
///
/// # Errors
/// Any failure of a read.
pub async fn read_over(images: &dyn Images, path: &Path, image: OpenImage) -> Result<OpenImage> {
    let Some(name) = named_log(&*image.store).await? else { return Ok(image) };
    let memories = images.redo_logs().orphaned(path)?;
    for memory in &memories {
        let Some(found) = Found::read(&**memory, name)? else { continue };
        if let Some(why) = found.doubt {
            warn_of_loss(path, why, None);
            return Ok(image);
        }
        let header = read_header(&*image.store).await?;
        if found.is_empty() || header.incompatible.corrupt {
            return Ok(image);
        }
        let data = data_store(images, path, &header, false)?;
        let usable = usable(&found, &header, &*image.store, data.as_deref()).await?;
        let replay = match usable {
            Ok(mut replay) => {
                replay.free_unused(&*image.store, &header, found.unused()).await?;
                replay
            }
            Err(why) => {
                if found.has_links() {
                    warn_of_loss(path, why, None);
                }
                return Ok(image);
            }
        };
        tracing::info!(
            image = %path.display(),
            "its last writer died: it is read with what that left, which the next process to \
             open it for writing applies"
        );
        let store = Arc::new(Over::new(image.store, replay));
        return Ok(OpenImage { store, identity: image.identity, content: image.content });
    }
    match images.redo_logs().of_another(path)? {
        Some(place) => warn_of_another(path, &place),
        // Nothing is known while somebody may be writing.
        None if memories.is_empty() => {}
        None => warn_of_loss(path, NOTHING_FITS, None),
    }
    Ok(image)
}

fn warn_of_another(path: &Path, place: &Path) {
    tracing::warn!(
        image = %path.display(),
        log = %place.display(),
        "its last writer did not close it; what it left is another user's: here the image is read \
         without writes that were not flushed, and that user sees them"
    );
}

/// What the log in `memory`, if there is one, has under this `name`, for a process that has the
/// image open for writing.
async fn found_in(memory: Option<&dyn RedoMemory>, name: u32) -> Result<Option<Found>> {
    match memory {
        Some(memory) => once_orphaned(|| Found::read(memory, name)).await,
        None => Ok(None),
    }
}

/// Reads a log by `read`, for a process that has the image open for writing. A process that was
/// just killed closes its files one after the other, so the log may still be its own for a moment.
async fn once_orphaned(read: impl Fn() -> Result<Option<Found>>) -> Result<Option<Found>> {
    let mut tries = 1;
    loop {
        match read() {
            Err(error) if error.kind() == ErrorKind::Denied && tries < TRIES_MAX => {
                mica_rt::sleep(PAUSE).await;
                tries += 1;
            }
            found => return found,
        }
    }
}

/// Warns if the image at `path`, which is read as a backing file and has this `header`, lacks what
/// its writer acknowledged before it died. An index describes only the file, so the log is not laid
/// over it.
pub(crate) fn warn_of_log(images: &dyn Images, path: &Path, header: &Header) {
    let Some(name) = names_log(header.autoclear.unknown) else { return };
    let Ok(memories) = images.redo_logs().orphaned(path) else { return };
    for memory in &memories {
        let Ok(Some(found)) = Found::read(&**memory, name) else { continue };
        if let Some(why) = found.doubt {
            warn_of_loss(path, why, None);
        } else if found.has_links() {
            tracing::warn!(
                image = %path.display(),
                "its last writer died, and writes that were not flushed are not in it yet: open it \
                 once for writing, as `mica serve` does, before it is used as a backing file"
            );
        }
        return;
    }
    if let Ok(Some(place)) = images.redo_logs().of_another(path) {
        warn_of_another(path, &place);
    }
}

/// The name of the log in the header of the image, if there is one.
async fn named_log(store: &dyn Store) -> Result<Option<u32>> {
    const START_BYTES: usize = 104;
    if store.len()? < START_BYTES as u64 {
        return Ok(None);
    }
    let start = read_exact(store, HostOffset::ZERO, START_BYTES).await?;
    // Version 2 lacks such bits.
    if start[..4] != MAGIC || start[4..8] != [0, 0, 0, 3] {
        return Ok(None);
    }
    let bits =
        start[field::AUTOCLEAR..].first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
    Ok(names_log(bits))
}

async fn clear_name(store: &dyn Store) -> Result<()> {
    clear_autoclear(store, u64::MAX << LOG_NAME_SHIFT).await
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

/// What the log that was `found` makes of the image in these stores, or why it is not used (R1).
async fn usable(
    found: &Found,
    header: &Header,
    store: &dyn Store,
    data: Option<&dyn Store>,
) -> Result<std::result::Result<Replay, &'static str>> {
    if !found.fits(store, header)? {
        return Ok(Err(HEADER_CHANGED));
    }
    let stores: Vec<_> = [Some(store), data].into_iter().flatten().collect();
    if found.tells_loss(&stores) {
        return Ok(Err(REMOUNTED));
    }
    let replay = Replay::plan(store, header, found).await?;
    if !replay.goes_on_from(store, found).await? {
        return Ok(Err(WRITTEN_SINCE));
    }
    Ok(match evidence::contradiction(&replay, header, store, data).await? {
        Some(why) => Err(why),
        None => Ok(replay),
    })
}

/// Makes durable the data that the links of the log lead to.
async fn sync_both(store: &dyn Store, data: Option<&dyn Store>) -> Result<()> {
    if let Some(data) = data {
        data.sync().await?;
    }
    store.sync().await
}

/// Writes the pages that a log makes into the image, whose data is durable.
async fn write_down(store: &dyn Store, replay: &Replay) -> Result<()> {
    for step in Step::ALL {
        if replay.pages_of(step).next().is_none() {
            // What is durable stays so, and a sync costs the guest time.
            continue;
        }
        for (at, bytes) in replay.pages_of(step) {
            write_all(store, Buf::from_slice(bytes), at).await?;
        }
        // Each step before the next (R3).
        store.sync().await?;
    }
    Ok(())
}
