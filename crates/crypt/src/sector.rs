//! Ciphers of sectors: each sector is encrypted alone, by its number.

use crate::aes_cbc::AesCbc;
use crate::hash::Hash;
use crate::xts::{UNIT_BYTES, XTS_AES128_KEY_BYTES, XTS_AES256_KEY_BYTES, Xts};
use std::fmt;

/// Bytes of a sector.
pub(crate) const SECTOR: usize = 512;

/// How sectors are encrypted: the words of LUKS, of which mica knows these.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CipherName {
    mode: Mode,
    number: Number,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    Xts,
    Cbc,
}

/// How the number of a sector becomes the start of its encryption.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Number {
    /// 32 bits of it.
    Plain,
    /// 64 bits of it.
    Plain64,
    /// Encrypted with the SHA-256 of the key.
    Essiv,
}

impl CipherName {
    /// XTS with numbers of 64 bits: what new images have.
    pub const XTS: Self = Self { mode: Mode::Xts, number: Number::Plain64 };

    const ALL: [Self; 5] = [
        Self::XTS,
        Self { mode: Mode::Xts, number: Number::Plain },
        Self { mode: Mode::Cbc, number: Number::Essiv },
        Self { mode: Mode::Cbc, number: Number::Plain64 },
        Self { mode: Mode::Cbc, number: Number::Plain },
    ];

    /// The mode of AES that LUKS calls `name`, such as `xts-plain64`.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.name() == name)
    }

    /// What LUKS calls it.
    pub fn name(self) -> &'static str {
        match (self.mode, self.number) {
            (Mode::Xts, Number::Plain) => "xts-plain",
            (Mode::Xts, _) => "xts-plain64",
            (Mode::Cbc, Number::Plain) => "cbc-plain",
            (Mode::Cbc, Number::Plain64) => "cbc-plain64",
            (Mode::Cbc, Number::Essiv) => "cbc-essiv:sha256",
        }
    }

    /// The mode, and how its start is generated, with its hash: as QEMU shows them.
    pub fn parts(self) -> (&'static str, &'static str, Option<&'static str>) {
        let mode = match self.mode {
            Mode::Xts => "xts",
            Mode::Cbc => "cbc",
        };
        match self.number {
            Number::Plain => (mode, "plain", None),
            Number::Plain64 => (mode, "plain64", None),
            Number::Essiv => (mode, "essiv", Some("sha256")),
        }
    }

    /// Bits of AES in a key of so many bytes, if it can be one.
    pub fn aes_bits(self, key_bytes: usize) -> Option<usize> {
        match (self.mode, key_bytes) {
            (Mode::Xts, XTS_AES128_KEY_BYTES | XTS_AES256_KEY_BYTES) => Some(key_bytes * 4),
            (Mode::Cbc, 16 | 24 | 32) => Some(key_bytes * 8),
            _ => None,
        }
    }

    /// Bytes of a key for AES of so many bits, if there is one.
    pub fn key_bytes(self, aes_bits: usize) -> Option<usize> {
        let bytes = match self.mode {
            Mode::Xts => aes_bits / 4,
            Mode::Cbc => aes_bits / 8,
        };
        (self.aes_bits(bytes) == Some(aes_bits)).then_some(bytes)
    }

    /// The cipher with this `key`; `None` if it is none of a possible length.
    pub fn with_key(self, key: &[u8]) -> Option<SectorCipher> {
        let kind = match self.mode {
            Mode::Xts => Kind::Xts(match key.len() {
                XTS_AES128_KEY_BYTES => Xts::new_128(key.try_into().ok()?),
                _ => Xts::new(key.try_into().ok()?),
            }),
            Mode::Cbc => Kind::Cbc(AesCbc::new(key)?),
        };
        let essiv = match self.number {
            Number::Essiv => Some(AesCbc::new(Hash::Sha256.digest(key).as_ref())?),
            _ => None,
        };
        Some(SectorCipher { kind, number: self.number, essiv })
    }
}

/// Encrypts and decrypts sectors.
pub struct SectorCipher {
    kind: Kind,
    number: Number,
    essiv: Option<AesCbc>,
}

#[expect(clippy::large_enum_variant, reason = "one per open layer, used for every sector")]
enum Kind {
    Xts(Xts),
    Cbc(AesCbc),
}

impl SectorCipher {
    /// The AES of qcow2's first kind of encryption: the passphrase itself is the key, its first 16
    /// bytes.
    pub fn of_old_qcow2(passphrase: &[u8]) -> Self {
        let mut key = zeroize::Zeroizing::new([0; 16]);
        for (to, from) in key.iter_mut().zip(passphrase) {
            *to = *from;
        }
        let name = CipherName { mode: Mode::Cbc, number: Number::Plain64 };
        name.with_key(&*key).expect("a key of 16 bytes")
    }

    /// Encrypts `bytes` in place, which begin with sector number `first`.
    ///
    /// # Panics
    /// If their length is not a multiple of [`UNIT_BYTES`].
    pub fn encrypt(&self, first: u64, bytes: &mut [u8]) {
        for (sector, bytes) in (first..).zip(bytes.chunks_mut(SECTOR)) {
            let start = self.start_of(sector);
            match &self.kind {
                Kind::Xts(xts) => xts.encrypt(start, bytes),
                Kind::Cbc(cbc) => cbc.encrypt(start, bytes),
            }
        }
    }

    /// Decrypts `bytes` in place, which begin with sector number `first`.
    ///
    /// # Panics
    /// As [`Self::encrypt`].
    pub fn decrypt(&self, first: u64, bytes: &mut [u8]) {
        for (sector, bytes) in (first..).zip(bytes.chunks_mut(SECTOR)) {
            let start = self.start_of(sector);
            match &self.kind {
                Kind::Xts(xts) => xts.decrypt(start, bytes),
                Kind::Cbc(cbc) => cbc.decrypt(start, bytes),
            }
        }
    }

    fn start_of(&self, sector: u64) -> u128 {
        match (self.number, &self.essiv) {
            (Number::Plain, _) => u128::from(sector & u64::from(u32::MAX)),
            (Number::Essiv, Some(essiv)) => {
                let mut start: [u8; UNIT_BYTES] = u128::from(sector).to_le_bytes();
                essiv.encrypt_block(&mut start);
                u128::from_le_bytes(start)
            }
            _ => u128::from(sector),
        }
    }
}

impl fmt::Debug for SectorCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SectorCipher")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cipher_decrypts_what_it_encrypted_and_numbers_matter() {
        for name in CipherName::ALL {
            assert_eq!(CipherName::of_name(name.name()), Some(name));
            for len in [16, 24, 32, 64] {
                assert_eq!(name.aes_bits(len).is_some(), name.with_key(&vec![7; len]).is_some());
                let Some(bits) = name.aes_bits(len) else { continue };
                assert_eq!(name.key_bytes(bits), Some(len));
                let key: Vec<u8> = (0..len).map(|at| u8::try_from(at).expect("short")).collect();
                let cipher = name.with_key(&key).expect("a key of this length");
                let plain = vec![9; 2 * SECTOR];
                let mut sealed = plain.clone();
                cipher.encrypt(5, &mut sealed);
                assert_ne!(sealed[..SECTOR], sealed[SECTOR..], "{}", name.name());
                let mut second = plain[SECTOR..].to_vec();
                cipher.encrypt(6, &mut second);
                assert_eq!(second, sealed[SECTOR..], "sectors are encrypted alone");
                cipher.decrypt(5, &mut sealed);
                assert_eq!(sealed, plain);
            }
        }
    }

    #[test]
    fn numbers_of_32_bits_begin_again_and_others_do_not() {
        let at = |name: &str, sector| {
            let name = CipherName::of_name(name).expect("known");
            let mut bytes = [1; SECTOR];
            name.with_key(&[3; 32]).expect("a key").encrypt(sector, &mut bytes);
            bytes
        };
        assert_eq!(at("cbc-plain", 1), at("cbc-plain", 1 + (1 << 32)));
        assert_ne!(at("cbc-plain64", 1), at("cbc-plain64", 1 + (1 << 32)));
        assert_eq!(at("xts-plain", 1), at("xts-plain64", 1));
    }

    #[test]
    fn nothing_of_a_key_is_shown() {
        let cipher = SectorCipher::of_old_qcow2(b"passphrase of more than sixteen bytes");
        assert_eq!(format!("{cipher:?}"), "SectorCipher");
        let same = SectorCipher::of_old_qcow2(b"passphrase of mo");
        let [mut one, mut other] = [[4; SECTOR]; 2];
        cipher.encrypt(3, &mut one);
        same.encrypt(3, &mut other);
        assert_eq!(one, other, "sixteen bytes of it count");
    }
}
