//! Hashes by the names that LUKS gives them, and PBKDF2 with them.

use ring::digest::{Algorithm, SHA1_FOR_LEGACY_USE_ONLY, SHA256, SHA384, SHA512, digest};
use ring::pbkdf2;
use std::num::NonZeroU32;

/// A hash function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hash {
    /// Only for headers that were made long ago.
    Sha1,
    /// What QEMU takes unless it is told otherwise.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
}

impl Hash {
    const ALL: [Self; 4] = [Self::Sha1, Self::Sha256, Self::Sha384, Self::Sha512];

    /// The hash that is called `name`, if mica has it.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|hash| hash.name() == name)
    }

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha1 => "sha1",
            Self::Sha256 => "sha256",
            Self::Sha384 => "sha384",
            Self::Sha512 => "sha512",
        }
    }

    fn algorithm(self) -> &'static Algorithm {
        match self {
            Self::Sha1 => &SHA1_FOR_LEGACY_USE_ONLY,
            Self::Sha256 => &SHA256,
            Self::Sha384 => &SHA384,
            Self::Sha512 => &SHA512,
        }
    }

    /// Bytes of a sum.
    pub(crate) fn len(self) -> usize {
        self.algorithm().output_len()
    }

    /// The sum of `bytes`.
    pub(crate) fn digest(self, bytes: &[u8]) -> ring::digest::Digest {
        digest(self.algorithm(), bytes)
    }

    /// Fills `out` with a key that is derived from `secret` in so many `iterations` (PBKDF2).
    pub(crate) fn derive(self, secret: &[u8], salt: &[u8], iterations: NonZeroU32, out: &mut [u8]) {
        let algorithm = match self {
            Self::Sha1 => pbkdf2::PBKDF2_HMAC_SHA1,
            Self::Sha256 => pbkdf2::PBKDF2_HMAC_SHA256,
            Self::Sha384 => pbkdf2::PBKDF2_HMAC_SHA384,
            Self::Sha512 => pbkdf2::PBKDF2_HMAC_SHA512,
        };
        pbkdf2::derive(algorithm, iterations, salt, secret, out);
    }
}

#[cfg(test)]
pub(crate) mod testing {
    pub(crate) fn bytes(hexadecimal: &str) -> Vec<u8> {
        let digit = |at: usize| u8::from_str_radix(&hexadecimal[at..at + 2], 16).expect("a byte");
        (0..hexadecimal.len()).step_by(2).map(digit).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::testing::bytes;
    use super::*;

    /// RFC 6070, and the same input with SHA-256 as RFC 7914 and others have it.
    #[test]
    fn vectors_of_key_derivation_are_met() {
        let iterations = NonZeroU32::new(4096).expect("not zero");
        let mut out = [0; 20];
        Hash::Sha1.derive(b"password", b"salt", iterations, &mut out);
        assert_eq!(out[..], bytes("4b007901b765489abead49d926f721d065a429c1"));
        let mut out = [0; 32];
        Hash::Sha256.derive(b"password", b"salt", iterations, &mut out);
        let known = "c5e478d59288c841aa530db6845c4c8d962893a001ce4e11a4963873aa98134a";
        assert_eq!(out[..], bytes(known));
    }

    #[test]
    fn hashes_are_known_by_their_names() {
        for hash in Hash::ALL {
            assert_eq!(Hash::of_name(hash.name()), Some(hash));
            assert_eq!(hash.digest(b"").as_ref().len(), hash.len());
        }
        assert_eq!(Hash::of_name("ripemd160"), None);
    }
}
