//! Frozen layers whose writer was killed before it closed them.
//!
//! A layer is closed after another one was put on top of it, and after others were merged into it.
//! A process that dies before that leaves the frozen layer with the name of its log, or with dirty
//! bitmaps that are in use. It lacks nothing that is read; but its bitmaps are inconsistent for
//! other programs, and a program that opens it for reading and then writes it, as QEMU's commit
//! does with its base, leaves no trace in what the header says of the bitmaps. So whoever opens a
//! chain for writing closes such layers, before it reads them, and whoever merges into one, too.
//!
//! ```text
//! a log or kept bits in the header? ─▶ sync │ alone with the file
//!   ─▶ the file has all links of the log?
//!   ─▶ counts │ sync ─▶ no log ─▶ no name │ sync ─▶ clusters that are unused are free │ sync
//!   ─▶ bitmaps not in use │ sync ─▶ no kept bits │ sync
//! ```
//!
//! Invariants
//! - U1 Nothing that the layer shows changes: only counts, as far as the log proves them (R1 of
//!   [`crate::redo`]), flags of bitmaps, and autoclear bits. Clusters may stay counted that nothing
//!   uses.
//! - U2 That is done only while nobody else has the file open: others rely on that what they read
//!   does not change, and a program that wrote back the header that it had read would undo it.
//! - U3 A log with links that the file lacks stays, and so does the layer: its writer died before
//!   the layer was frozen, and what stands on it does so without these links.
//! - U4 A process may die, or the power go, at any instant: what is left is closed the same way. A
//!   kept bit goes after the flag that it stands for, and a log before its name.
//! - U5 A chain whose frozen layer cannot be closed opens all the same, unless something that was
//!   written to it turns out to be lost: a flush of the chain would have to say so.

use crate::header_io::read_header;
use crate::redo::{LOG_NAME_SHIFT, end_log_of_frozen, names_log};
use crate::write::bitmaps::settle_bitmaps;
use mica_block::{Error, ErrorKind, Images, OpenImage, Result, Store};
use mica_qcow2_format::{Autoclear, Header};
use std::io;
use std::path::Path;
use std::time::Duration;

/// How often a layer is tried that somebody has open, and the pause in between: the process that
/// died may still be ending, or another one may be closing the layer.
const TRIES_MAX: u32 = 50;
const PAUSE: Duration = Duration::from_millis(2);

/// Whether a writer has not closed the image with this `header`.
pub(crate) fn is_unclosed(header: &Header) -> bool {
    let bits = header.autoclear.unknown;
    names_log(bits).is_some() || bits & Autoclear::KEPT_BITMAPS != 0
}

/// Closes the frozen layer at `path`, which is not open here, if that can be done. If it cannot,
/// that is said, and it stays as it is.
///
/// # Errors
/// If it cannot be read, or what it has cannot be made durable.
pub(crate) async fn close_frozen_at(images: &dyn Images, path: &Path) -> Result<()> {
    let image = path.display();
    // All that its writer left unsynced, which may be much: nobody waits for it while we are alone.
    // The kernel says once that some of it is lost, so whoever opens the chain is told.
    images.open(path)?.store.sync().await?;
    let opened = match open_alone(images, path).await {
        Ok(opened) => opened,
        Err(error) if is_for_reading_only(&error) => {
            tracing::info!(%image, %error, "{STAYS}");
            return Ok(());
        }
        Err(error) => {
            tracing::warn!(%image, %error, "{STAYS}");
            return Ok(());
        }
    };
    let closed = async {
        let header = read_header(&*opened.store).await?;
        close_frozen(images, path, &*opened.store, header).await
    };
    match closed.await {
        Ok(header) if !is_unclosed(&header) => {
            tracing::info!(%image, "closed a frozen layer whose last writer did not");
        }
        Ok(_) => tracing::warn!(%image, "its header or its bitmaps are damaged: {STAYS}"),
        Err(error) => tracing::warn!(%image, %error, "{STAYS}"),
    }
    Ok(())
}

/// Whether the file, or its file system, is not to be written, perhaps for good.
fn is_for_reading_only(error: &Error) -> bool {
    let kind = error.raw_os_error().map(|errno| io::Error::from_raw_os_error(errno).kind());
    matches!(kind, Some(io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied))
}

const STAYS: &str = "the last writer of a frozen layer did not close it, and it stays so: its dirty \
                     bitmaps are inconsistent for other programs, and nothing may be merged into it \
                     as long as somebody else has it open";

async fn open_alone(images: &dyn Images, path: &Path) -> Result<OpenImage> {
    let mut tries = 1;
    loop {
        match images.open_alone(path) {
            Err(error)
                if error.kind() == ErrorKind::Denied
                    && error.raw_os_error().is_none()
                    && tries < TRIES_MAX =>
            {
                mica_rt::sleep(PAUSE).await;
                tries += 1;
            }
            opened => return opened,
        }
    }
}

/// Closes the frozen layer at `path`, whose file in `store` has this `header`, and which nobody
/// else has open. Returns the header that it has then.
///
/// # Errors
/// `Denied` if its log has what the file lacks, or if that cannot be told; any failure to read or
/// to write the image.
pub(crate) async fn close_frozen(
    images: &dyn Images,
    path: &Path,
    store: &dyn Store,
    header: Header,
) -> Result<Header> {
    // Who writes an image that is marked as corrupt says so.
    if !is_unclosed(&header) || header.incompatible.corrupt {
        return Ok(header);
    }
    end_log_of_frozen(images, path, store, &header).await?;
    let mut header = header;
    header.autoclear.unknown &= (1 << LOG_NAME_SHIFT) - 1;
    settle_bitmaps(store, header).await
}
