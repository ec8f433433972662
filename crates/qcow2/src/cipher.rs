//! How a layer's data is encrypted, and the way to its key.
//!
//! Tables and compressed clusters are plain, as in QEMU. So the file of an encrypted layer has two
//! views: its tables are read as they are, and its data through a store that decrypts and encrypts
//! by the place in the file. Only the oldest kind counts sectors of the disk instead: what it has
//! is left to [`Layer::read_deferred`](crate::layer::Layer::read_deferred), and nobody writes it.

use mica_block::{Error, ErrorKind, Images, Passphrase, Result, Store, read_exact};
use mica_crypt::luks::{HEADER_BYTES, HeaderPlace, LuksHeader, Payload, Unlocked, unlock};
use mica_crypt::{CryptStore, SectorCipher};
use mica_qcow2_format::{Encryption, Header};
use mica_units::HostOffset;
use std::path::Path;
use std::sync::Arc;

/// The cipher of a layer.
#[derive(Clone)]
pub(crate) enum LayerCipher {
    /// LUKS: by the place in the file.
    ByHost(Arc<Unlocked>),
    /// The old AES: by the place on the disk.
    ByGuest(Arc<SectorCipher>),
    /// A LUKS image that is no qcow2 image: what is behind its header.
    Payload(Payload),
}

impl LayerCipher {
    /// Unlocks the qcow2 image at `path`, which has this `header`, and whose file is `store`;
    /// `None`
    /// if it is not encrypted.
    ///
    /// # Errors
    /// `Denied` if there is no passphrase for it, or a wrong one; if its LUKS header is none that
    /// mica knows; any error of the store.
    pub(crate) async fn unlock(
        images: &dyn Images,
        path: &Path,
        (header, store): (&Header, &dyn Store),
    ) -> Result<Option<Self>> {
        if header.encryption == Encryption::None {
            return Ok(None);
        }
        let passphrase = needed_passphrase(images, path)?;
        if header.encryption == Encryption::Aes {
            let cipher = SectorCipher::of_old_qcow2(passphrase.bytes());
            return Ok(Some(Self::ByGuest(Arc::new(cipher))));
        }
        let Some((luks, at)) = read_luks_header(header, store).await? else { return Ok(None) };
        Ok(Some(Self::ByHost(unlock(&luks, HeaderPlace { store, at }, &passphrase).await?)))
    }

    /// Unlocks the LUKS image at `path`, whose file is `store`.
    ///
    /// # Errors
    /// As [`Self::unlock`].
    pub(crate) async fn unlock_luks(
        images: &dyn Images,
        path: &Path,
        store: &dyn Store,
    ) -> Result<Self> {
        let passphrase = needed_passphrase(images, path)?;
        Ok(Self::Payload(Payload::unlock(store, &passphrase).await?))
    }

    /// The data in `store` of a layer with `cipher`, if it has one.
    pub(crate) fn over(cipher: Option<&Self>, store: Arc<dyn Store>) -> Arc<dyn Store> {
        match cipher {
            Some(Self::ByHost(unlocked)) => {
                Arc::new(CryptStore::new(store, Arc::clone(&unlocked.cipher)))
            }
            Some(Self::Payload(payload)) => Arc::new(payload.of(store)),
            Some(Self::ByGuest(_)) | None => store,
        }
    }
}

/// The passphrase of the image at `path`.
///
/// # Errors
/// `Denied` if the user named none for it.
pub fn needed_passphrase(images: &dyn Images, path: &Path) -> Result<Arc<Passphrase>> {
    images.passphrase(path)?.ok_or_else(|| {
        let what = "the image is encrypted: add --secret FILE, where FILE holds its passphrase";
        Error::new(ErrorKind::Denied, what)
    })
}

/// The LUKS header of the image with this `header`, whose file is `store`, and where it is; `None`
/// if the image is not encrypted by LUKS.
///
/// # Errors
/// As [`LuksHeader::decode`]; any error of the store.
pub async fn read_luks_header(
    header: &Header,
    store: &dyn Store,
) -> Result<Option<(LuksHeader, HostOffset)>> {
    let Encryption::Luks { header: Some((at, len)) } = header.encryption else { return Ok(None) };
    let bytes = read_exact(store, at, HEADER_BYTES).await?;
    let luks = LuksHeader::decode(&bytes)?;
    let has_all = |slot: usize| luks.material_end(slot) <= len;
    // Those without a key, too: one may be put there.
    if let Some(slot) = (0..luks.slots.len()).find(|slot| !has_all(*slot)) {
        let what = format!("key slot {slot} lies behind the LUKS header of {len} bytes");
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    Ok(Some((luks, at)))
}
