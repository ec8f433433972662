//! AES in XTS mode (IEEE 1619), for whole blocks of the cipher: no ciphertext is stolen.
//!
//! Invariants
//! - I1 One tweak belongs to one place for ever. Under the same tweak, equal plain bytes at equal
//!   offsets give equal encrypted bytes, and nothing worse.

use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes128Dec, Aes128Enc, Aes256Dec, Aes256Enc, Block};

/// Bytes of the two keys of AES-256 together.
pub const XTS_AES256_KEY_BYTES: usize = 64;
/// Bytes of the two keys of AES-128 together.
pub(crate) const XTS_AES128_KEY_BYTES: usize = 32;
/// What is encrypted is a multiple of this.
pub const UNIT_BYTES: usize = 16;
/// Blocks of the cipher that are handed to it at once.
const BLOCKS_AT_ONCE: usize = 64;

/// See the module.
pub struct Xts(Keys);

enum Keys {
    Aes128 { encrypt: Aes128Enc, decrypt: Aes128Dec, tweak: Aes128Enc },
    Aes256 { encrypt: Aes256Enc, decrypt: Aes256Dec, tweak: Aes256Enc },
}

impl Xts {
    /// A cipher with a key of AES-256.
    pub fn new(key: &[u8; XTS_AES256_KEY_BYTES]) -> Self {
        let (data, tweak) = key.split_at(XTS_AES256_KEY_BYTES / 2);
        let [data, tweak] = [data, tweak].map(|half| Array::try_from(half).expect("half of it"));
        Self(Keys::Aes256 {
            encrypt: Aes256Enc::new(&data),
            decrypt: Aes256Dec::new(&data),
            tweak: Aes256Enc::new(&tweak),
        })
    }

    /// A cipher with a key of AES-128.
    pub(crate) fn new_128(key: &[u8; XTS_AES128_KEY_BYTES]) -> Self {
        let (data, tweak) = key.split_at(XTS_AES128_KEY_BYTES / 2);
        let [data, tweak] = [data, tweak].map(|half| Array::try_from(half).expect("half of it"));
        Self(Keys::Aes128 {
            encrypt: Aes128Enc::new(&data),
            decrypt: Aes128Dec::new(&data),
            tweak: Aes128Enc::new(&tweak),
        })
    }

    /// Encrypts `bytes` in place.
    ///
    /// # Panics
    /// If `bytes` are not whole units of [`UNIT_BYTES`].
    pub fn encrypt(&self, tweak: u128, bytes: &mut [u8]) {
        match &self.0 {
            Keys::Aes128 { encrypt, tweak: of_tweak, .. } => {
                each(of_tweak, tweak, bytes, |blocks| encrypt.encrypt_blocks(blocks));
            }
            Keys::Aes256 { encrypt, tweak: of_tweak, .. } => {
                each(of_tweak, tweak, bytes, |blocks| encrypt.encrypt_blocks(blocks));
            }
        }
    }

    /// Decrypts `bytes` in place.
    ///
    /// # Panics
    /// As [`Self::encrypt`].
    pub fn decrypt(&self, tweak: u128, bytes: &mut [u8]) {
        match &self.0 {
            Keys::Aes128 { decrypt, tweak: of_tweak, .. } => {
                each(of_tweak, tweak, bytes, |blocks| decrypt.decrypt_blocks(blocks));
            }
            Keys::Aes256 { decrypt, tweak: of_tweak, .. } => {
                each(of_tweak, tweak, bytes, |blocks| decrypt.decrypt_blocks(blocks));
            }
        }
    }
}

fn each(
    of_tweak: &impl BlockCipherEncrypt<BlockSize = aes::cipher::consts::U16>,
    tweak: u128,
    bytes: &mut [u8],
    cipher: impl Fn(&mut [Block]),
) {
    let (blocks, rest) = Block::slice_as_chunks_mut(bytes);
    assert!(rest.is_empty(), "whole units are encrypted");
    let mut first = Block::from(tweak.to_le_bytes());
    of_tweak.encrypt_block(&mut first);
    let mut mask = u128::from_le_bytes(first.into());
    for blocks in blocks.chunks_mut(BLOCKS_AT_ONCE) {
        let mut masks = [0; BLOCKS_AT_ONCE];
        for (kept, block) in masks.iter_mut().zip(blocks.iter_mut()) {
            *kept = mask;
            apply(mask, block);
            mask = (mask << 1) ^ ((mask >> 127) * 0x87);
        }
        cipher(blocks);
        masks.iter().zip(blocks).for_each(|(mask, block)| apply(*mask, block));
    }
}

fn apply(mask: u128, block: &mut Block) {
    let bytes: [u8; UNIT_BYTES] = (*block).into();
    *block = (u128::from_le_bytes(bytes) ^ mask).to_le_bytes().into();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::testing::bytes;

    /// Vector 10 of IEEE 1619-2007: its first and last units.
    #[test]
    fn vector_of_the_standard_is_met() {
        let key = bytes(
            "27182818284590452353602874713526624977572470936999595749669676273141592653589793238462\
             643383279502884197169399375105820974944592",
        );
        let xts = Xts::new(&key.try_into().expect("two keys"));
        let plain: Vec<u8> = (0..=255).cycle().take(512).collect();
        let mut sealed = plain.clone();
        xts.encrypt(0xff, &mut sealed);
        assert_eq!(
            sealed[..32],
            bytes("1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b")
        );
        assert_eq!(sealed[496..], bytes("c4f36ffda9fcea70b9c6e693e148c151"));
        xts.decrypt(0xff, &mut sealed);
        assert_eq!(sealed, plain);
    }

    /// Vector 2 of IEEE 1619-2007.
    #[test]
    fn vector_of_the_standard_is_met_with_shorter_keys() {
        let mut key = [0x11; XTS_AES128_KEY_BYTES];
        key[16..].fill(0x22);
        let xts = Xts::new_128(&key);
        let mut sealed = [0x44; 32];
        xts.encrypt(0x33_3333_3333, &mut sealed);
        let known = "c454185e6a16936e39334038acef838bfb186fff7480adc4289382ecd6d394f0";
        assert_eq!(sealed[..], bytes(known));
        xts.decrypt(0x33_3333_3333, &mut sealed);
        assert_eq!(sealed, [0x44; 32]);
    }

    #[test]
    fn another_tweak_or_length_gives_other_bytes() {
        let xts = Xts::new(&[7; XTS_AES256_KEY_BYTES]);
        let mut sealed = vec![[5; 4096]; 2];
        xts.encrypt(1, &mut sealed[0]);
        xts.encrypt(2, &mut sealed[1]);
        assert_ne!(sealed[0], sealed[1]);
        let mut start = [5; 48];
        xts.encrypt(1, &mut start);
        assert_eq!(start, sealed[0][..48], "units are encrypted one after the other");
    }
}
