//! Encryption of what guests write.
//!
//! **What is encrypted.** The bytes of blocks, in extents and in the log: nothing that a guest
//! wrote is in a store or on a log's device in plain form. Nodes, tables, heads, and the records of
//! snapshots are not: so collection, checks, differences, clones and all that is done to snapshots
//! need no key, and sums are those of what is stored. Who has the store learns which blocks of a
//! disk were written when, how well each run of them is compressed if the volume is, the labels and
//! times of snapshots, and which volumes share what; not what any block has, nor whether two blocks
//! have the same.
//!
//! **Against whom.** Whoever reads the store or the log. Not whoever can change them: sums find
//! what is damaged, and anybody can make a sum. As with disks that are encrypted, one who sees
//! several states of a store sees which blocks changed between them.
//!
//! ```text
//! the user's key (a file) ─ wraps, AES-256-GCM ─▶ the secret of the volume (random, in its heads)
//!         └─▶ name, for people: 8 bytes            ├─ HKDF ─▶ key of blocks   AES-256-XTS
//!                                                  └─ HKDF ─▶ key of a session of a log
//! ```
//!
//! **Cipher.** AES-256-XTS: a block is as long as before, so that places, collection and holes are
//! as without encryption. Its tweak is its place, without the sum: writer, sequence, unit. No place
//! is ever written twice (E1 of extents), also not by clones, which have writers of their own. Even
//! where that is broken from outside, by a store that was copied and written on both sides, XTS
//! shows only whether a unit of 16 bytes in the same place is the same; a mode that counts would
//! show the bytes.
//!
//! **In the log** the tweak is the number of the segment, which counts all that were ever begun in
//! the file, and that of the record; the key is one of the file and the process.
//!
//! **The user's key** encrypts only the volume's secret: it can be changed without writing a block.
//! Clones have the secret of their source, and share its extents. Heads name the key that wraps
//! theirs, so that a wrong one is said to be wrong before anything is done; GCM's tag proves it.
//!
//! Invariants
//! - I1 A key is never written, shown or logged, and is erased when it is dropped.
//! - I2 What a volume has is read and written with its own secret only: what was read with one is
//!   never returned to who has another.

use crate::format::Id;
use crate::place::Place;
use mica_block::{Error, ErrorKind, Result};
use mica_crypt::{XTS_AES256_KEY_BYTES, Xts};
use mica_map::Reference;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use std::fmt;
use std::sync::Arc;
use zeroize::Zeroizing;

/// Bytes of a user's key, and of a volume's secret.
const KEY_BYTES: usize = 32;
/// Bytes of the tag of AES-GCM.
const TAG_BYTES: usize = 16;
/// What is wrapped belongs to this use of a key.
const PURPOSE: &[u8] = b"mica volume secret 1";

/// The key of a user, which wraps the secrets of volumes.
pub struct VolumeKey {
    key: Zeroizing<[u8; KEY_BYTES]>,
    /// Where it is from, for messages.
    from: String,
}

/// What a key is called: proves nothing, and tells nothing of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyName([u8; KeyName::BYTES]);

/// The secret of a volume as its heads have it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WrappedSecret {
    /// The key that unwraps it.
    pub(crate) by: KeyName,
    pub(crate) nonce: [u8; NONCE_LEN],
    pub(crate) sealed: [u8; WrappedSecret::SEALED_BYTES],
}

impl WrappedSecret {
    pub(crate) const SEALED_BYTES: usize = KEY_BYTES + TAG_BYTES;
}

impl KeyName {
    pub(crate) const BYTES: usize = 8;

    pub(crate) fn new(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    pub(crate) fn bytes(self) -> [u8; Self::BYTES] {
        self.0
    }
}

impl fmt::Display for KeyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

impl fmt::Debug for KeyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl VolumeKey {
    /// Longest content of a file with a key.
    pub const FILE_BYTES_MAX: usize = 128;

    /// The key that the file `from` has, with this content: 32 bytes, or 64 hexadecimal digits with
    /// white space around them.
    ///
    /// # Errors
    /// `Invalid` if it is none.
    pub fn of_file(from: impl Into<String>, content: &[u8]) -> Result<Self> {
        let from = from.into();
        let digits = content.trim_ascii();
        let key = match content.try_into() {
            Ok(key) => Some(Zeroizing::new(key)),
            Err(_) => of_digits(digits),
        };
        let key = key.ok_or_else(|| {
            let what = format!(
                "{from} has no key: that is 32 bytes, or 64 hexadecimal digits as \
                 `openssl rand -hex 32` prints them"
            );
            Error::new(ErrorKind::Invalid, what)
        })?;
        Ok(Self { key, from })
    }

    /// What it is called.
    pub fn name(&self) -> KeyName {
        let mut name = [0; KeyName::BYTES];
        derive(&self.key, &[b"name of a key"], &mut name);
        KeyName(name)
    }

    /// Where it is from.
    pub(crate) fn from(&self) -> &str {
        &self.from
    }

    fn cipher(&self) -> LessSafeKey {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        derive(&self.key, &[b"wrapping"], &mut *key);
        LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &*key).expect("a key of this length"))
    }

    /// A new secret, of random numbers, and how heads have it.
    pub(crate) fn new_secret(&self, random: impl Fn() -> Id) -> (Cipher, WrappedSecret) {
        let mut secret = Zeroizing::new([0; KEY_BYTES]);
        secret[..16].copy_from_slice(&random());
        secret[16..].copy_from_slice(&random());
        let wrapped = self.wrap(&secret, random);
        (Cipher::new(secret), wrapped)
    }

    fn wrap(&self, secret: &[u8; KEY_BYTES], random: impl Fn() -> Id) -> WrappedSecret {
        let mut nonce = [0; NONCE_LEN];
        nonce.copy_from_slice(&random()[..NONCE_LEN]);
        let mut sealed = [0; WrappedSecret::SEALED_BYTES];
        let (inner, tag) = sealed.split_at_mut(KEY_BYTES);
        inner.copy_from_slice(secret);
        let (cipher, aad) = (self.cipher(), Aad::from(PURPOSE));
        let nonce_now = Nonce::assume_unique_for_key(nonce);
        let sum = cipher.seal_in_place_separate_tag(nonce_now, aad, inner);
        tag.copy_from_slice(sum.expect("it is short").as_ref());
        WrappedSecret { by: self.name(), nonce, sealed }
    }

    /// What this key wrapped, wrapped by `new`; `None` as in [`Self::unwrap`].
    pub(crate) fn rewrap(
        &self,
        wrapped: &WrappedSecret,
        new: &Self,
        random: impl Fn() -> Id,
    ) -> Option<WrappedSecret> {
        self.secret(wrapped).map(|secret| new.wrap(&secret, random))
    }

    /// `None` if it is not the key that wrapped it, or that was changed.
    pub(crate) fn unwrap(&self, wrapped: &WrappedSecret) -> Option<Cipher> {
        self.secret(wrapped).map(Cipher::new)
    }

    fn secret(&self, wrapped: &WrappedSecret) -> Option<Zeroizing<[u8; KEY_BYTES]>> {
        let mut sealed = Zeroizing::new(wrapped.sealed);
        let nonce = Nonce::assume_unique_for_key(wrapped.nonce);
        let opened = self.cipher().open_in_place(nonce, Aad::from(PURPOSE), &mut *sealed).ok()?;
        Some(Zeroizing::new(<[u8; KEY_BYTES]>::try_from(&*opened).ok()?))
    }
}

impl fmt::Debug for VolumeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("VolumeKey").field(&self.name()).finish()
    }
}

fn of_digits(digits: &[u8]) -> Option<Zeroizing<[u8; KEY_BYTES]>> {
    if digits.len() != 2 * KEY_BYTES {
        return None;
    }
    let value =
        |digit: u8| char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok());
    let mut key = Zeroizing::new([0; KEY_BYTES]);
    for (byte, digits) in key.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = value(digits[0])? << 4 | value(digits[1])?;
    }
    Some(key)
}

/// Encrypts and decrypts what a volume has.
#[derive(Clone)]
pub(crate) struct Cipher {
    inner: Arc<Inner>,
}

struct Inner {
    secret: Zeroizing<[u8; KEY_BYTES]>,
    blocks: Xts,
    /// Names the secret in this process, and tells nothing of it.
    name: u64,
}

impl Cipher {
    fn new(secret: Zeroizing<[u8; KEY_BYTES]>) -> Self {
        let mut name = [0; 8];
        derive(&secret, &[b"name"], &mut name);
        let blocks = xts_of(&secret, &[b"blocks"]);
        let name = u64::from_le_bytes(name).max(1);
        Self { inner: Arc::new(Inner { secret, blocks, name }) }
    }

    /// Differs between secrets; never 0.
    pub(crate) fn name(&self) -> u64 {
        self.inner.name
    }

    /// Encrypts what is at `place` in an extent, whatever its sum is.
    pub(crate) fn encrypt(&self, place: Place, bytes: &mut [u8]) {
        self.inner.blocks.encrypt(tweak_of(place), bytes);
    }

    /// Decrypts what is at `place`.
    pub(crate) fn decrypt(&self, place: Place, bytes: &mut [u8]) {
        self.inner.blocks.decrypt(tweak_of(place), bytes);
    }

    /// What encrypts the records that process `session` puts into the log `device`.
    pub(crate) fn of_log(&self, device: &Id, session: &Id) -> LogCipher {
        LogCipher(xts_of(&self.inner.secret, &[b"log", device, session]))
    }
}

impl fmt::Debug for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cipher")
    }
}

/// Encrypts and decrypts records of one session of a log.
pub(crate) struct LogCipher(Xts);

impl LogCipher {
    pub(crate) fn encrypt(&self, segment: u64, record: u64, bytes: &mut [u8]) {
        self.0.encrypt(u128::from(segment) << 64 | u128::from(record), bytes);
    }

    pub(crate) fn decrypt(&self, segment: u64, record: u64, bytes: &mut [u8]) {
        self.0.decrypt(u128::from(segment) << 64 | u128::from(record), bytes);
    }
}

/// Of a frame, that of its first block.
fn tweak_of(place: Place) -> u128 {
    u128::from_be_bytes(place.whole().to_bytes()) >> 32
}

fn xts_of(secret: &[u8; KEY_BYTES], purpose: &[&[u8]]) -> Xts {
    let mut key = Zeroizing::new([0; XTS_AES256_KEY_BYTES]);
    derive(secret, purpose, &mut *key);
    Xts::new(&key)
}

/// Fills `out` with a key for `purpose`, by HKDF.
fn derive(key: &[u8; KEY_BYTES], purpose: &[&[u8]], out: &mut [u8]) {
    struct Bytes(usize);
    impl KeyType for Bytes {
        fn len(&self) -> usize {
            self.0
        }
    }
    let extracted = Salt::new(HKDF_SHA256, b"mica volume").extract(key);
    let filled = extracted.expand(purpose, Bytes(out.len())).and_then(|derived| derived.fill(out));
    filled.expect("keys are short");
}

#[cfg(test)]
mod tests;
