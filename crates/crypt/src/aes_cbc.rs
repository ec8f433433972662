//! AES in CBC mode, for whole blocks of the cipher.

use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes128Dec, Aes128Enc, Aes192Dec, Aes192Enc, Aes256Dec, Aes256Enc, Block};

/// Blocks that are decrypted at once.
const BLOCKS_AT_ONCE: usize = 32;

/// A key of 16, 24 or 32 bytes.
pub(crate) enum AesCbc {
    Aes128 { encrypt: Aes128Enc, decrypt: Aes128Dec },
    Aes192 { encrypt: Aes192Enc, decrypt: Aes192Dec },
    Aes256 { encrypt: Aes256Enc, decrypt: Aes256Dec },
}

impl AesCbc {
    /// `None` if AES has no keys of this length.
    pub(crate) fn new(key: &[u8]) -> Option<Self> {
        if let Ok(key) = Array::try_from(key) {
            let (encrypt, decrypt) = (Aes128Enc::new(&key), Aes128Dec::new(&key));
            return Some(Self::Aes128 { encrypt, decrypt });
        }
        if let Ok(key) = Array::try_from(key) {
            let (encrypt, decrypt) = (Aes192Enc::new(&key), Aes192Dec::new(&key));
            return Some(Self::Aes192 { encrypt, decrypt });
        }
        let key = Array::try_from(key).ok()?;
        let (encrypt, decrypt) = (Aes256Enc::new(&key), Aes256Dec::new(&key));
        Some(Self::Aes256 { encrypt, decrypt })
    }

    /// Encrypts one block.
    pub(crate) fn encrypt_block(&self, block: &mut [u8; 16]) {
        let mut whole = Block::from(*block);
        match self {
            Self::Aes128 { encrypt, .. } => encrypt.encrypt_block(&mut whole),
            Self::Aes192 { encrypt, .. } => encrypt.encrypt_block(&mut whole),
            Self::Aes256 { encrypt, .. } => encrypt.encrypt_block(&mut whole),
        }
        *block = whole.into();
    }

    fn decrypt_blocks(&self, blocks: &mut [Block]) {
        match self {
            Self::Aes128 { decrypt, .. } => decrypt.decrypt_blocks(blocks),
            Self::Aes192 { decrypt, .. } => decrypt.decrypt_blocks(blocks),
            Self::Aes256 { decrypt, .. } => decrypt.decrypt_blocks(blocks),
        }
    }

    /// # Panics
    /// If `bytes` are not whole blocks.
    pub(crate) fn encrypt(&self, iv: u128, bytes: &mut [u8]) {
        let (blocks, rest) = bytes.as_chunks_mut::<16>();
        assert!(rest.is_empty(), "whole blocks are encrypted");
        let mut before = iv;
        for block in blocks {
            *block = (u128::from_le_bytes(*block) ^ before).to_le_bytes();
            self.encrypt_block(block);
            before = u128::from_le_bytes(*block);
        }
    }

    /// # Panics
    /// As [`Self::encrypt`].
    pub(crate) fn decrypt(&self, iv: u128, bytes: &mut [u8]) {
        let (blocks, rest) = Block::slice_as_chunks_mut(bytes);
        assert!(rest.is_empty(), "whole blocks are decrypted");
        let mut before = iv;
        for blocks in blocks.chunks_mut(BLOCKS_AT_ONCE) {
            let mut sealed = [0; BLOCKS_AT_ONCE];
            for (kept, block) in sealed.iter_mut().zip(blocks.iter()) {
                *kept = u128::from_le_bytes((*block).into());
            }
            self.decrypt_blocks(blocks);
            for (block, sealed) in blocks.iter_mut().zip(sealed) {
                let bytes: [u8; 16] = (*block).into();
                *block = (u128::from_le_bytes(bytes) ^ before).to_le_bytes().into();
                before = sealed;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::testing::bytes;

    /// NIST SP 800-38A, F.2.1 and F.2.5.
    #[test]
    fn vectors_of_the_standard_are_met() {
        let iv = u128::from_le_bytes(
            bytes("000102030405060708090a0b0c0d0e0f").try_into().expect("16 bytes"),
        );
        let plain = bytes("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51");
        for (key, sealed) in [
            (
                "2b7e151628aed2a6abf7158809cf4f3c",
                "7649abac8119b246cee98e9b12e9197d5086cb9b507219ee95db113a917678b2",
            ),
            (
                "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4",
                "f58c4c04d6e5f1ba779eabfb5f7bfbd69cfc4e967edb808d679f777bc6702c7d",
            ),
        ] {
            let cbc = AesCbc::new(&bytes(key)).expect("a key");
            let mut block = plain.clone();
            cbc.encrypt(iv, &mut block);
            assert_eq!(block, bytes(sealed));
            cbc.decrypt(iv, &mut block);
            assert_eq!(block, plain);
        }
        assert!(AesCbc::new(&[0; 20]).is_none());
    }

    #[test]
    fn what_is_longer_than_a_turn_comes_back() {
        let cbc = AesCbc::new(&[3; 24]).expect("a key");
        let plain: Vec<u8> = (0..=255).cycle().take(16 * (BLOCKS_AT_ONCE * 2 + 3)).collect();
        let mut sealed = plain.clone();
        cbc.encrypt(9, &mut sealed);
        assert_ne!(sealed, plain);
        cbc.decrypt(9, &mut sealed);
        assert_eq!(sealed, plain);
    }
}
