//! Passphrases of encrypted images.

use std::fmt;
use zeroize::Zeroizing;

/// A passphrase. Erased when it is dropped, and never shown.
pub struct Passphrase {
    bytes: Zeroizing<Vec<u8>>,
    from: String,
}

impl Passphrase {
    /// Longest passphrase, in bytes.
    pub const BYTES_MAX: usize = 64 << 10;

    /// What `from`, in words for people, has.
    pub fn new(from: impl Into<String>, bytes: Zeroizing<Vec<u8>>) -> Self {
        Self { bytes, from: from.into() }
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Where it is from.
    pub fn from(&self) -> &str {
        &self.from
    }
}

impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Passphrase").field(&self.from).finish()
    }
}
