//! A disk whose file begins with a LUKS header.

use super::header::{HEADER_BYTES, LuksHeader};
use super::unlock::{HeaderPlace, Unlocked, unlock};
use crate::store::CryptStore;
use mica_block::{Passphrase, Result, Store, read_exact};
use mica_units::HostOffset;
use std::sync::Arc;

/// The way to the payload behind a header.
#[derive(Clone)]
pub struct Payload {
    unlocked: Arc<Unlocked>,
    start: HostOffset,
}

/// The header that `store` begins with.
///
/// # Errors
/// As [`LuksHeader::decode`]; any error of the store.
pub async fn read_header(store: &dyn Store) -> Result<LuksHeader> {
    LuksHeader::decode(&read_exact(store, HostOffset::ZERO, HEADER_BYTES).await?)
}

impl Payload {
    /// Unlocks the payload in `store`.
    ///
    /// # Errors
    /// As [`read_header`] and [`unlock`].
    pub async fn unlock(store: &dyn Store, passphrase: &Arc<Passphrase>) -> Result<Self> {
        let header = read_header(store).await?;
        let place = HeaderPlace { store, at: HostOffset::ZERO };
        let unlocked = unlock(&header, place, passphrase).await?;
        Ok(Self { unlocked, start: HostOffset::new(header.payload_offset()) })
    }

    /// Its plain bytes, in the same `store` or another view of it.
    pub fn of(&self, store: Arc<dyn Store>) -> CryptStore {
        CryptStore::from(store, Arc::clone(&self.unlocked.cipher), self.start)
    }
}
