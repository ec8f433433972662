//! New headers.

use super::header::{HEADER_BYTES, LuksHeader, iterations_max};
use super::unlock::{MasterKey, Unlocked, remember};
use crate::hash::Hash;
use crate::sector::{CipherName, SectorCipher};
use mica_block::{Error, ErrorKind, Passphrase, Result};
use ring::rand::{SecureRandom, SystemRandom};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

/// Bits of AES in a new header.
const AES_BITS: usize = 256;
/// How long a passphrase is hashed, as in QEMU.
const ITER_TIME: Duration = Duration::from_secs(2);
/// Fewest iterations, as in QEMU.
const ITERATIONS_MIN: u32 = 1000;
/// The master key is random: its sum needs fewer iterations than a passphrase. As in QEMU.
const DIGEST_SHARE: u32 = 8;
/// How many iterations are measured first, and for how long at least.
const MEASURED_FIRST: u32 = 1 << 12;
const MEASURED_MIN: Duration = Duration::from_millis(20);

/// How long the passphrase of a new slot is hashed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NewSlot {
    /// About so long, on this machine.
    Time(Duration),
    /// So often.
    Iterations(NonZeroU32),
}

impl Default for NewSlot {
    fn default() -> Self {
        Self::Time(ITER_TIME)
    }
}

/// What a new header is to be like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wish {
    /// The mode of AES.
    pub cipher: CipherName,
    /// Bits of AES.
    pub aes_bits: usize,
    /// The hash of all derivations.
    pub hash: Hash,
    /// How long its passphrase is hashed.
    pub slot: NewSlot,
}

impl Default for Wish {
    fn default() -> Self {
        let slot = NewSlot::default();
        Self { cipher: CipherName::XTS, aes_bits: AES_BITS, hash: Hash::Sha256, slot }
    }
}

/// A new header, and what it protects with.
#[derive(Clone)]
pub struct NewLuks {
    header: LuksHeader,
    bytes: Arc<Vec<u8>>,
    unlocked: Arc<Unlocked>,
}

impl std::fmt::Debug for NewLuks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("NewLuks").field(&self.header).finish()
    }
}

impl NewLuks {
    /// Makes a header with a random master key, which `passphrase` unlocks. Takes as long as is
    /// wished for, and a little more.
    ///
    /// # Errors
    /// `Invalid` if there is no such cipher, or the passphrase is empty; `Io` if the system has no
    /// random numbers.
    pub fn make(wish: Wish, passphrase: &Passphrase) -> Result<Self> {
        if passphrase.bytes().is_empty() {
            let what = format!("the passphrase in {} is empty", passphrase.from());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let Wish { cipher, aes_bits, hash, slot } = wish;
        let key_bytes = cipher.key_bytes(aes_bits).ok_or_else(|| {
            let what = format!("aes-{aes_bits} has no mode {}", cipher.name());
            Error::new(ErrorKind::Invalid, what)
        })?;
        let mut master = Zeroizing::new(vec![0; key_bytes]);
        fill_random(&mut master)?;
        let mut header = LuksHeader::new(cipher, key_bytes, hash, new_uuid()?);
        let iterations = iterations_of(hash, key_bytes, slot);
        fill_random(&mut header.digest_salt)?;
        header.digest_iterations = shared_out(iterations);
        header.digest = header.digest_of(&master);
        let material = new_material(&mut header, 0, iterations, passphrase, &master)?;
        let mut bytes = vec![0; usize::try_from(header.payload_offset()).expect("short")];
        bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
        let at = header.slots[0].material_sectors as usize * crate::sector::SECTOR;
        bytes[at..at + material.len()].copy_from_slice(&material);
        let cipher = Arc::new(cipher.with_key(&master).expect("a key of this length"));
        let key = MasterKey::new(master);
        let unlocked = Arc::new(Unlocked { slot: 0, key, cipher, iterations });
        remember(&header, passphrase, &unlocked);
        Ok(Self { header, bytes: Arc::new(bytes), unlocked })
    }

    /// The header and its key material: all that is before the payload.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The header.
    pub fn header(&self) -> &LuksHeader {
        &self.header
    }

    /// The cipher of the payload.
    pub fn cipher(&self) -> &Arc<SectorCipher> {
        &self.unlocked.cipher
    }
}

/// Puts the passphrase into slot `number` of the header in memory; returns the slot's material.
pub(super) fn new_material(
    header: &mut LuksHeader,
    number: usize,
    iterations: NonZeroU32,
    passphrase: &Passphrase,
    master: &[u8],
) -> Result<Vec<u8>> {
    let slot = &mut header.slots[number];
    slot.iterations = Some(iterations);
    fill_random(&mut slot.salt)?;
    // Nobody could open it any more.
    header.check_iterations()?;
    let mut stripes = Zeroizing::new(vec![0; header.material_len()]);
    fill_random(&mut stripes)?;
    let random = |out: &mut [u8]| out.copy_from_slice(&stripes[..out.len()]);
    Ok(header.seal_slot(number, passphrase.bytes(), master, random))
}

/// How often a passphrase is hashed for a new slot.
pub(super) fn iterations_of(hash: Hash, key_bytes: usize, slot: NewSlot) -> NonZeroU32 {
    let least = NonZeroU32::new(ITERATIONS_MIN).expect("not zero");
    match slot {
        NewSlot::Iterations(count) => count.clamp(least, iterations_max()),
        NewSlot::Time(time) => measure(hash, key_bytes, time).clamp(least, iterations_max()),
    }
}

/// How many iterations take about so long.
#[expect(clippy::disallowed_methods, reason = "what is measured is this machine's speed")]
fn measure(hash: Hash, key_bytes: usize, time: Duration) -> NonZeroU32 {
    let mut out = Zeroizing::new(vec![0; key_bytes]);
    let mut count = NonZeroU32::new(MEASURED_FIRST).expect("not zero");
    loop {
        let start = Instant::now();
        hash.derive(b"a passphrase", &[0; 32], count, &mut out);
        let took = start.elapsed();
        if took >= MEASURED_MIN.min(time) || count >= iterations_max() {
            let wanted = time.as_nanos().saturating_mul(u128::from(count.get()));
            let wanted = wanted / took.as_nanos().max(1);
            let wanted = u32::try_from(wanted).unwrap_or(u32::MAX);
            return NonZeroU32::new(wanted).unwrap_or(NonZeroU32::MIN);
        }
        count = count.saturating_mul(NonZeroU32::new(2).expect("not zero"));
    }
}

fn shared_out(iterations: NonZeroU32) -> NonZeroU32 {
    let share = (iterations.get() / DIGEST_SHARE).max(ITERATIONS_MIN);
    NonZeroU32::new(share).expect("at least a thousand")
}

/// Fills `bytes` with random numbers of the system.
pub(super) fn fill_random(bytes: &mut [u8]) -> Result<()> {
    SystemRandom::new()
        .fill(bytes)
        .map_err(|_| Error::new(ErrorKind::Io, "the system has no random numbers"))
}

/// A random UUID.
fn new_uuid() -> Result<String> {
    let mut bytes = [0; 16];
    fill_random(&mut bytes)?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let digits = format!("{:032x}", u128::from_be_bytes(bytes));
    let parts = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
    Ok(parts.join("-"))
}
