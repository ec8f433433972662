//! Unlocking: from a header and a passphrase to the cipher of the payload.
//!
//! That is slow on purpose: seconds of hashing. So the process remembers what it unlocked for as
//! long as somebody uses it, and who asks for the same meanwhile waits for the first.

use super::header::LuksHeader;
use crate::compute::compute;
use crate::hash::Hash;
use crate::sector::SectorCipher;
use mica_block::{Error, ErrorKind, Passphrase, Result, Store, read_exact};
use mica_rt::Buf;
use mica_rt::sync::Claims;
use mica_units::HostOffset;
use parking_lot::Mutex;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, LazyLock, Weak};
use zeroize::Zeroizing;

/// The key of a payload. Erased when it is dropped, and never shown.
pub struct MasterKey(Zeroizing<Vec<u8>>);

impl MasterKey {
    pub(super) fn new(key: Zeroizing<Vec<u8>>) -> Self {
        Self(key)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MasterKey")
    }
}

/// What a passphrase unlocked.
pub struct Unlocked {
    /// The slot that it opened.
    pub slot: usize,
    /// The master key.
    pub key: MasterKey,
    /// The cipher of the payload.
    pub cipher: Arc<SectorCipher>,
    /// Iterations of the slot.
    pub iterations: NonZeroU32,
}

/// Names a header and a passphrase in this process.
type Fingerprint = [u8; 32];

#[derive(Default)]
struct Known {
    all: Mutex<Vec<(Fingerprint, Weak<Unlocked>)>>,
    /// Those that are being unlocked, by the first bytes of their fingerprints.
    under_way: Claims,
}

static KNOWN: LazyLock<Known> = LazyLock::new(Known::default);

impl Known {
    fn get(&self, fingerprint: &Fingerprint) -> Option<Arc<Unlocked>> {
        let mut all = self.all.lock();
        all.retain(|(_, unlocked)| unlocked.strong_count() > 0);
        all.iter().find(|(known, _)| known == fingerprint)?.1.upgrade()
    }

    fn add(&self, fingerprint: Fingerprint, unlocked: &Arc<Unlocked>) {
        let mut all = self.all.lock();
        all.push((fingerprint, Arc::downgrade(unlocked)));
    }
}

fn fingerprint(header: &LuksHeader, passphrase: &Passphrase) -> Fingerprint {
    let mut named = Zeroizing::new(header.encode().to_vec());
    named.extend_from_slice(passphrase.bytes());
    let mut fingerprint = [0; 32];
    fingerprint.copy_from_slice(Hash::Sha256.digest(&named).as_ref());
    fingerprint
}

/// Remembers what a new header with this passphrase unlocks.
pub(super) fn remember(header: &LuksHeader, passphrase: &Passphrase, unlocked: &Arc<Unlocked>) {
    KNOWN.add(fingerprint(header, passphrase), unlocked);
}

/// Where a header is.
#[derive(Clone, Copy)]
pub struct HeaderPlace<'a> {
    /// What has it.
    pub store: &'a dyn Store,
    /// Where it begins there.
    pub at: HostOffset,
}

/// Unlocks the `header` at `place`.
///
/// # Errors
/// `Denied` if the passphrase opens none of its slots; any error of the store.
pub async fn unlock(
    header: &LuksHeader,
    place: HeaderPlace<'_>,
    passphrase: &Arc<Passphrase>,
) -> Result<Arc<Unlocked>> {
    let name = fingerprint(header, passphrase);
    let key = u64::from_le_bytes(*name.first_chunk().expect("longer"));
    let _alone = KNOWN.under_way.claim(key).await;
    if let Some(unlocked) = KNOWN.get(&name) {
        return Ok(unlocked);
    }
    let mut materials = Vec::new();
    for (number, _) in header.active_slots() {
        materials.push((number, material(header, place, number).await?));
    }
    let iterations = header.active_slots().flat_map(|(_, count)| [count, header.digest_iterations]);
    let iterations: Vec<_> = iterations.collect();
    let (of, with) = (header.clone(), Arc::clone(passphrase));
    let found = compute(iterations, move || open(&of, &with, &materials)).await?;
    let unlocked = found.map(Arc::new).ok_or_else(|| wrong(header, passphrase))?;
    KNOWN.add(name, &unlocked);
    Ok(unlocked)
}

/// The key material of slot `number`.
async fn material(header: &LuksHeader, place: HeaderPlace<'_>, number: usize) -> Result<Buf> {
    let start = u64::from(header.slots[number].material_sectors) * mica_units::SECTOR_BYTES;
    let at = place
        .at
        .checked_add(start)
        .ok_or_else(|| Error::new(ErrorKind::Corrupt, "the key material ends beyond 64 bits"))?;
    read_exact(place.store, at, header.material_len()).await
}

fn open(
    header: &LuksHeader,
    passphrase: &Passphrase,
    materials: &[(usize, Buf)],
) -> Option<Unlocked> {
    materials.iter().find_map(|(slot, material)| {
        let key = header.open_slot(*slot, passphrase.bytes(), material)?;
        if !header.proves(&key) {
            return None;
        }
        let cipher = Arc::new(header.cipher.with_key(&key)?);
        let iterations = header.slots[*slot].iterations?;
        Some(Unlocked { slot: *slot, key: MasterKey::new(key), cipher, iterations })
    })
}

fn wrong(header: &LuksHeader, passphrase: &Passphrase) -> Error {
    let slots = match header.active_slots().count() {
        0 => {
            let what = "it has no active key slots: nobody can read it";
            return Error::new(ErrorKind::Denied, what);
        }
        1 => "does not open its only active key slot".to_owned(),
        count => format!("opens none of its {count} active key slots"),
    };
    let hint = match passphrase.bytes().last() {
        Some(b'\n') => " (it ends with a line break, which counts)",
        _ => "",
    };
    let what = format!("the passphrase in {}{hint} {slots}", passphrase.from());
    Error::new(ErrorKind::Denied, what)
}
