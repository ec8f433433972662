//! AES-256 in XTS mode (IEEE 1619), for whole blocks of the cipher: no ciphertext is stolen.
//!
//! Invariants
//! - I1 One tweak belongs to one place for ever. Under the same tweak, equal plain bytes at equal
//!   offsets give equal encrypted bytes, and nothing worse.

use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes256Dec, Aes256Enc, Block};

/// Bytes of the two keys together.
pub(crate) const KEY_BYTES: usize = 64;
/// What is encrypted is a multiple of this.
pub(crate) const UNIT_BYTES: usize = 16;
/// Blocks of the cipher that are handed to it at once.
const BLOCKS_AT_ONCE: usize = 64;

/// See the module.
pub(crate) struct Xts {
    encrypt: Aes256Enc,
    decrypt: Aes256Dec,
    tweak: Aes256Enc,
}

impl Xts {
    pub(crate) fn new(key: &[u8; KEY_BYTES]) -> Self {
        let (data, tweak) = key.split_at(KEY_BYTES / 2);
        let [data, tweak] = [data, tweak].map(|half| Array::try_from(half).expect("half of it"));
        Self {
            encrypt: Aes256Enc::new(&data),
            decrypt: Aes256Dec::new(&data),
            tweak: Aes256Enc::new(&tweak),
        }
    }

    /// # Panics
    /// If `bytes` are not whole units.
    pub(crate) fn encrypt(&self, tweak: u128, bytes: &mut [u8]) {
        self.each(tweak, bytes, |blocks| self.encrypt.encrypt_blocks(blocks));
    }

    /// # Panics
    /// As [`Self::encrypt`].
    pub(crate) fn decrypt(&self, tweak: u128, bytes: &mut [u8]) {
        self.each(tweak, bytes, |blocks| self.decrypt.decrypt_blocks(blocks));
    }

    fn each(&self, tweak: u128, bytes: &mut [u8], cipher: impl Fn(&mut [Block])) {
        let (blocks, rest) = Block::slice_as_chunks_mut(bytes);
        assert!(rest.is_empty(), "whole units are encrypted");
        let mut first = Block::from(tweak.to_le_bytes());
        self.tweak.encrypt_block(&mut first);
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
}

fn apply(mask: u128, block: &mut Block) {
    let bytes: [u8; UNIT_BYTES] = (*block).into();
    *block = (u128::from_le_bytes(bytes) ^ mask).to_le_bytes().into();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hexadecimal: &str) -> Vec<u8> {
        let digit = |at: usize| u8::from_str_radix(&hexadecimal[at..at + 2], 16).expect("a byte");
        (0..hexadecimal.len()).step_by(2).map(digit).collect()
    }

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

    #[test]
    fn another_tweak_or_length_gives_other_bytes() {
        let xts = Xts::new(&[7; KEY_BYTES]);
        let mut sealed = vec![[5; 4096]; 2];
        xts.encrypt(1, &mut sealed[0]);
        xts.encrypt(2, &mut sealed[1]);
        assert_ne!(sealed[0], sealed[1]);
        let mut start = [5; 48];
        xts.encrypt(1, &mut start);
        assert_eq!(start, sealed[0][..48], "units are encrypted one after the other");
    }
}
