//! Adding keys to encrypted images, and removing them: what `encrypt.state`, `encrypt.new-secret`,
//! `encrypt.old-secret`, `encrypt.keyslot` and `encrypt.iter-time` of `qemu-img amend` say.

use crate::Format;
use mica_block::{Error, ErrorKind, Images, Passphrase, Result};
use mica_crypt::luks::{HeaderPlace, NewSlot, Slot, add_key, read_header, remove_keys};
use mica_qcow2::{needed_passphrase, read_luks_header, replay_redo_log};
use mica_units::HostOffset;
use std::path::Path;
use std::sync::Arc;

/// What is to happen to the keys of an image.
pub enum KeyChange {
    /// `encrypt.state=active`: the passphrase `new` opens it, too.
    Add {
        /// The new passphrase.
        new: Arc<Passphrase>,
        /// The slot; the first that is free if it is not said.
        slot: Option<usize>,
        /// How long the passphrase is hashed.
        how: NewSlot,
    },
    /// `encrypt.state=inactive`: these slots open it no more.
    Remove {
        /// Which.
        which: Slot,
        /// Whether none may be left: nobody can read the image then, ever.
        last_too: bool,
    },
}

/// Changes the keys of the image at `path`, which nobody else may have open. Its data stays as it
/// is. Durable when this returns. Returns how many keys were added, or removed: none if the slot
/// was not in use.
///
/// # Errors
/// `Unsupported` if the image has no LUKS header; `Denied` if its passphrase is missing or wrong,
/// or if the last key would be removed; as for opening it for writing.
pub async fn amend_keys(
    images: &dyn Images,
    (path, format): (&Path, Format),
    change: KeyChange,
) -> Result<usize> {
    let image = images.open_writable(path)?;
    let store = &*image.store;
    let changed = async {
        let (mut luks, at) = match format {
            Format::Luks => (read_header(store).await?, HostOffset::ZERO),
            Format::Qcow2 => {
                replay_redo_log(images, path, store).await?;
                let header = mica_qcow2::read_header(store).await?;
                read_luks_header(&header, store).await?.ok_or_else(no_keys)?
            }
            Format::Raw | Format::Null => return Err(no_keys()),
        };
        let place = HeaderPlace { store, at };
        match change {
            KeyChange::Add { new, slot, how } => {
                let known = needed_passphrase(images, path)?;
                add_key(&mut luks, place, &known, (&new, slot, how)).await.map(|_| 1)
            }
            KeyChange::Remove { which, last_too } => {
                remove_keys(&mut luks, place, &which, last_too).await
            }
        }
    };
    changed.await.map_err(|error| error.wrap(path.display().to_string()))
}

fn no_keys() -> Error {
    Error::new(ErrorKind::Unsupported, "the image is not encrypted with LUKS: it has no key slots")
}
