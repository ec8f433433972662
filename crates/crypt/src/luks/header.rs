//! The bytes of a header.

use super::split;
use crate::hash::Hash;
use crate::sector::CipherName;
use mica_block::{Error, ErrorKind, Result};
use mica_units::SECTOR_BYTES;
use std::num::NonZeroU32;
use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};
use zeroize::Zeroizing;

/// Bytes of a header, without key material.
pub const HEADER_BYTES: usize = size_of::<RawHeader>();
/// Key slots of a header.
pub const SLOTS: usize = 8;

/// Where the slots begin in a header.
const SLOTS_AT: usize = 208;
/// What a LUKS image of any version begins with.
pub const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
const VERSION: u16 = 1;
const ACTIVE: u32 = 0x00ac_71f3;
const INACTIVE: u32 = 0x0000_dead;
/// Stripes of a key: the only number that QEMU accepts.
const STRIPES: u32 = 4000;
/// Where the key material of the first slot begins: at a multiple of 4 KiB, as all of it.
const MATERIAL_ALIGN_SECTORS: u32 = 8;
/// More than this takes minutes of computing, which an image could make anybody spend. QEMU and
/// cryptsetup choose as many as take two seconds.
const ITERATIONS_MAX: u32 = 1 << 27;
/// A passphrase that opens nothing is tried with all keys: what all of them take together. Eight
/// keys of two seconds each take less on any machine.
const ALL_ITERATIONS_MAX: u64 = 1 << 28;
pub(super) const DIGEST_BYTES: usize = 20;
pub(super) const SALT_BYTES: usize = 32;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 6],
    version: U16,
    cipher_name: [u8; 32],
    cipher_mode: [u8; 32],
    hash: [u8; 32],
    payload_sectors: U32,
    key_bytes: U32,
    digest: [u8; DIGEST_BYTES],
    digest_salt: [u8; SALT_BYTES],
    digest_iterations: U32,
    uuid: [u8; 40],
    slots: [RawSlot; SLOTS],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawSlot {
    active: U32,
    iterations: U32,
    salt: [u8; SALT_BYTES],
    material_sectors: U32,
    stripes: U32,
}

const _: () = assert!(size_of::<RawHeader>() == 592);
const _: () = assert!(size_of::<RawSlot>() == 48);
const _: () = assert!(std::mem::offset_of!(RawHeader, slots) == SLOTS_AT);

/// A header that was checked: its places lie apart from each other, before the payload.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LuksHeader {
    /// The mode of AES.
    pub cipher: CipherName,
    /// The hash of all derivations.
    pub hash: Hash,
    /// Sectors before the payload.
    pub payload_sectors: u32,
    /// Bytes of the master key.
    pub key_bytes: usize,
    /// The sum that proves a master key.
    pub(super) digest: [u8; DIGEST_BYTES],
    pub(super) digest_salt: [u8; SALT_BYTES],
    /// How often the master key is hashed for that.
    pub digest_iterations: NonZeroU32,
    /// What identifies it.
    pub uuid: String,
    /// Its key slots.
    pub slots: [KeySlot; SLOTS],
}

/// A key slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeySlot {
    /// How often its passphrase is hashed; `None` if it is not in use.
    pub iterations: Option<NonZeroU32>,
    pub(super) salt: [u8; SALT_BYTES],
    /// Where its key material begins, in sectors.
    pub material_sectors: u32,
}

impl KeySlot {
    /// Whether a passphrase opens it.
    pub fn is_active(&self) -> bool {
        self.iterations.is_some()
    }

    /// Stripes of its key material.
    pub fn stripes(&self) -> u32 {
        STRIPES
    }
}

impl LuksHeader {
    /// A header without keys, whose key material and payload follow each other.
    pub(super) fn new(cipher: CipherName, key_bytes: usize, hash: Hash, uuid: String) -> Self {
        let material = material_sectors(key_bytes).next_multiple_of(MATERIAL_ALIGN_SECTORS);
        let slot = |number: u32| KeySlot {
            iterations: None,
            salt: [0; SALT_BYTES],
            material_sectors: MATERIAL_ALIGN_SECTORS + number * material,
        };
        let count = u32::try_from(SLOTS).expect("eight");
        Self {
            cipher,
            hash,
            payload_sectors: slot(count).material_sectors,
            key_bytes,
            digest: [0; DIGEST_BYTES],
            digest_salt: [0; SALT_BYTES],
            digest_iterations: NonZeroU32::MIN,
            uuid,
            slots: [0, 1, 2, 3, 4, 5, 6, 7].map(slot),
        }
    }

    /// Decodes the header in the first [`HEADER_BYTES`] of `bytes`.
    ///
    /// # Errors
    /// `Corrupt` if it contradicts the format, `Unsupported` for what mica does not know, `Limit`
    /// for what would take too long.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let is_luks = bytes.get(..MAGIC.len()) == Some(&MAGIC);
        let Some((raw, _)) = RawHeader::read_from_prefix(bytes).ok().filter(|_| is_luks) else {
            return Err(corrupt("there is no LUKS header where one should be"));
        };
        match raw.version.get() {
            VERSION => {}
            2 => return Err(unsupported("its header is of LUKS version 2: mica knows version 1")),
            other => return Err(unsupported(format!("LUKS version {other} is not known"))),
        }
        let (cipher, hash) = (raw.cipher()?, raw.hash()?);
        let key_bytes = raw.key_bytes.get() as usize;
        if cipher.aes_bits(key_bytes).is_none() {
            let what = format!("{} bytes are no key for aes-{}", key_bytes, cipher.name());
            return Err(corrupt(what));
        }
        let mut header = Self {
            payload_sectors: raw.payload_sectors.get(),
            digest: raw.digest,
            digest_salt: raw.digest_salt,
            digest_iterations: iterations(raw.digest_iterations, "of the master key's sum")?,
            ..Self::new(cipher, key_bytes, hash, text(&raw.uuid))
        };
        for (number, (slot, raw)) in header.slots.iter_mut().zip(&raw.slots).enumerate() {
            *slot = raw.decode(number)?;
        }
        header.check_places()?;
        header.check_iterations()?;
        Ok(header)
    }

    /// Its bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let raw = RawHeader {
            magic: MAGIC,
            version: VERSION.into(),
            cipher_name: padded("aes"),
            cipher_mode: padded(self.cipher.name()),
            hash: padded(self.hash.name()),
            payload_sectors: self.payload_sectors.into(),
            key_bytes: u32::try_from(self.key_bytes).expect("64 at most").into(),
            digest: self.digest,
            digest_salt: self.digest_salt,
            digest_iterations: self.digest_iterations.get().into(),
            uuid: padded(&self.uuid),
            slots: self.slots.map(|slot| slot.encode()),
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        bytes
    }

    /// Where slot `number` is in the header's bytes, and what it is there.
    pub(super) fn slot_bytes(&self, number: usize) -> (usize, [u8; size_of::<RawSlot>()]) {
        let mut bytes = [0; size_of::<RawSlot>()];
        bytes.copy_from_slice(self.slots[number].encode().as_bytes());
        (SLOTS_AT + number * bytes.len(), bytes)
    }

    /// Bytes of the key material of a slot, rounded up to sectors.
    pub(super) fn material_len(&self) -> usize {
        self.split_len().next_multiple_of(crate::sector::SECTOR)
    }

    fn split_len(&self) -> usize {
        self.key_bytes * STRIPES as usize
    }

    /// Where the key material of slot `number` ends, in bytes.
    pub fn material_end(&self, number: usize) -> u64 {
        let start = u64::from(self.slots[number].material_sectors) * SECTOR_BYTES;
        start + self.material_len() as u64
    }

    /// Bytes before the payload.
    pub fn payload_offset(&self) -> u64 {
        u64::from(self.payload_sectors) * SECTOR_BYTES
    }

    /// Its active slots, by their numbers.
    pub fn active_slots(&self) -> impl Iterator<Item = (usize, NonZeroU32)> + '_ {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(number, slot)| Some((number, slot.iterations?)))
    }

    /// A look at all keys ends before long.
    ///
    /// # Errors
    /// `Limit` if it does not.
    pub(super) fn check_iterations(&self) -> Result<()> {
        let digest = u64::from(self.digest_iterations.get());
        let slots = self.active_slots().map(|(_, count)| u64::from(count.get()) + digest);
        let all: u64 = slots.sum();
        if all > ALL_ITERATIONS_MAX {
            let what = format!(
                "{all} iterations of all key slots: more than {ALL_ITERATIONS_MAX} take too long"
            );
            return Err(Error::new(ErrorKind::Limit, what));
        }
        Ok(())
    }

    /// Nothing lies over anything else.
    fn check_places(&self) -> Result<()> {
        let len = u64::from(material_sectors(self.key_bytes));
        let header = (HEADER_BYTES as u64).div_ceil(SECTOR_BYTES);
        let places = self.slots.map(|slot| u64::from(slot.material_sectors));
        for (number, at) in places.into_iter().enumerate() {
            let after = places[number + 1..].iter();
            let overlaps = |other: &u64| at < other + len && *other < at + len;
            if at < header || at + len > u64::from(self.payload_sectors) {
                let what = format!("key slot {number} lies over the header, or the payload");
                return Err(corrupt(what));
            }
            if after.clone().any(overlaps) {
                return Err(corrupt(format!("key slot {number} lies over another")));
            }
        }
        Ok(())
    }

    /// The master key in `material`, as the `passphrase` of slot `number` encrypted it: nothing
    /// proves that it is that.
    pub(super) fn open_slot(
        &self,
        number: usize,
        passphrase: &[u8],
        material: &[u8],
    ) -> Option<Zeroizing<Vec<u8>>> {
        let slot = &self.slots[number];
        let mut key = Zeroizing::new(vec![0; self.key_bytes]);
        self.hash.derive(passphrase, &slot.salt, slot.iterations?, &mut key);
        let mut stripes = Zeroizing::new(material.get(..self.split_len())?.to_vec());
        self.cipher.with_key(&key)?.decrypt(0, &mut stripes);
        Some(split::merge(self.hash, &stripes, self.key_bytes))
    }

    /// The material of slot `number`, whose salt and iterations are set, for `master`.
    pub(super) fn seal_slot(
        &self,
        number: usize,
        passphrase: &[u8],
        master: &[u8],
        random: impl Fn(&mut [u8]),
    ) -> Vec<u8> {
        let slot = &self.slots[number];
        let iterations = slot.iterations.expect("a slot that is in use");
        let mut key = Zeroizing::new(vec![0; self.key_bytes]);
        self.hash.derive(passphrase, &slot.salt, iterations, &mut key);
        let mut material = vec![0; self.material_len()];
        let stripes = &mut material[..self.split_len()];
        split::split(self.hash, master, stripes, random);
        self.cipher.with_key(&key).expect("of this length").encrypt(0, stripes);
        material
    }

    /// Whether `key` is the master key.
    pub(super) fn proves(&self, key: &[u8]) -> bool {
        self.digest == self.digest_of(key)
    }

    pub(super) fn digest_of(&self, key: &[u8]) -> [u8; DIGEST_BYTES] {
        let mut sum = [0; DIGEST_BYTES];
        self.hash.derive(key, &self.digest_salt, self.digest_iterations, &mut sum);
        sum
    }
}

impl RawHeader {
    fn cipher(&self) -> Result<CipherName> {
        let (name, mode) = (text(&self.cipher_name), text(&self.cipher_mode));
        CipherName::of_name(&mode).filter(|_| name == "aes").ok_or_else(|| {
            unsupported(format!("the cipher {name:?} in mode {mode:?} is not one that mica knows"))
        })
    }

    fn hash(&self) -> Result<Hash> {
        let name = text(&self.hash);
        Hash::of_name(&name)
            .ok_or_else(|| unsupported(format!("the hash {name:?} is not one that mica knows")))
    }
}

impl RawSlot {
    fn decode(&self, number: usize) -> Result<KeySlot> {
        let active = match self.active.get() {
            ACTIVE => Some(iterations(self.iterations, &format!("of key slot {number}"))?),
            INACTIVE => None,
            other => {
                let what = format!("key slot {number} is neither active nor inactive ({other:#x})");
                return Err(corrupt(what));
            }
        };
        if self.stripes.get() != STRIPES {
            let what = format!("key slot {number} has {} stripes, not {STRIPES}", self.stripes);
            return Err(unsupported(what));
        }
        let material_sectors = self.material_sectors.get();
        Ok(KeySlot { iterations: active, salt: self.salt, material_sectors })
    }
}

impl KeySlot {
    fn encode(&self) -> RawSlot {
        RawSlot {
            active: if self.is_active() { ACTIVE } else { INACTIVE }.into(),
            iterations: self.iterations.map_or(0, NonZeroU32::get).into(),
            salt: self.salt,
            material_sectors: self.material_sectors.into(),
            stripes: STRIPES.into(),
        }
    }
}

fn material_sectors(key_bytes: usize) -> u32 {
    let sectors = (key_bytes * STRIPES as usize).div_ceil(crate::sector::SECTOR);
    u32::try_from(sectors).expect("keys are short")
}

fn iterations(count: U32, of_what: &str) -> Result<NonZeroU32> {
    let Some(count) = NonZeroU32::new(count.get()) else {
        return Err(corrupt(format!("the iterations {of_what} are 0")));
    };
    if count.get() > ITERATIONS_MAX {
        let what =
            format!("{count} iterations {of_what}: more than {ITERATIONS_MAX} take too long");
        return Err(Error::new(ErrorKind::Limit, what));
    }
    Ok(count)
}

/// The most iterations that a header may have.
pub(super) fn iterations_max() -> NonZeroU32 {
    NonZeroU32::new(ITERATIONS_MAX).expect("not zero")
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    // The last byte stays 0.
    for (to, from) in bytes.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = from;
    }
    bytes
}

fn corrupt(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}

fn unsupported(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unsupported, what)
}
