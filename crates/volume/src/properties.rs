//! What a volume is made with, and never changes: whether its data is compressed, and encrypted.
//!
//! Heads have it, and each head has what the one before it has; the one that deletes a volume has
//! nothing of it.

use crate::crypt::{Cipher, KeyName, VolumeKey, WrappedSecret};
use mica_block::{Error, ErrorKind};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// How data is compressed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Compression {
    /// Not at all.
    #[default]
    None,
    /// By zstd, where that saves something.
    Zstd,
}

/// How data is encrypted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Encryption {
    /// Not at all.
    #[default]
    None,
    /// With the key that is at hand.
    WithKey,
}

/// What a new volume is to be.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct NewVolume {
    /// How what is written is compressed.
    pub compression: Compression,
    /// Whether it is encrypted.
    pub encryption: Encryption,
}

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Properties {
    /// How what is written is compressed.
    pub compression: Compression,
    pub(crate) secret: Option<WrappedSecret>,
}

impl Properties {
    /// The key that it is encrypted with; `None` if it is not.
    pub fn key(&self) -> Option<KeyName> {
        self.secret.map(|secret| secret.by)
    }

    /// How volume `name`, which has these, is read and written with `key`. Without the right one
    /// its blocks are not.
    pub(crate) fn content(&self, name: &str, key: Option<&VolumeKey>) -> Access {
        match (&self.secret, key) {
            (None, _) => Access::Plain,
            (Some(secret), None) => Access::Locked(no_key(name, secret.by)),
            (Some(secret), Some(key)) => match key.unwrap(secret) {
                Some(cipher) => Access::Encrypted(cipher),
                None => Access::Locked(wrong_key(name, secret.by, key)),
            },
        }
    }
}

impl NewVolume {
    /// What a volume has that is made so, with its cipher.
    ///
    /// # Errors
    /// `Invalid` if there is no key to encrypt it with.
    pub(crate) fn properties(
        self,
        key: Option<&VolumeKey>,
        random: impl Fn() -> crate::format::Id,
    ) -> Result<Properties, Error> {
        let compression = self.compression;
        let secret = match (self.encryption, key) {
            (Encryption::None, _) => None,
            (Encryption::WithKey, Some(key)) => Some(key.new_secret(random).1),
            (Encryption::WithKey, None) => {
                let what = "to encrypt a volume takes a key: name its file with --volume-key";
                return Err(Error::new(ErrorKind::Invalid, what));
            }
        };
        Ok(Properties { compression, secret })
    }
}

fn no_key(name: &str, by: KeyName) -> Error {
    let what = format!(
        "volume {name} is encrypted with key {by}: name the file that has it with --volume-key"
    );
    Error::new(ErrorKind::Denied, what)
}

fn wrong_key(name: &str, by: KeyName, key: &VolumeKey) -> Error {
    let what = match key.name() {
        given if given == by => {
            format!("volume {name}: its secret is damaged, key {by} does not open it")
        }
        given => format!(
            "volume {name} is encrypted with key {by}, and {} has key {given}: name another file \
             with --volume-key",
            key.from()
        ),
    };
    Error::new(ErrorKind::Denied, what)
}

/// How the blocks of a volume are read and written.
#[derive(Clone, Debug)]
pub(crate) enum Access {
    /// They are as the guest wrote them.
    Plain,
    /// With this cipher.
    Encrypted(Cipher),
    /// Not at all, for this reason: the key is missing, or another one.
    Locked(Error),
}

/// Properties as heads have them.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawProperties {
    pub(crate) compression: u8,
    pub(crate) encryption: u8,
    pub(crate) reserved: [u8; 6],
    pub(crate) key: [u8; KeyName::BYTES],
    pub(crate) secret_nonce: [u8; 12],
    pub(crate) secret: [u8; WrappedSecret::SEALED_BYTES],
}

impl RawProperties {
    pub(crate) fn encode(properties: &Properties) -> Self {
        let mut raw = Self::new_zeroed();
        raw.compression = match properties.compression {
            Compression::None => 0,
            Compression::Zstd => 1,
        };
        if let Some(secret) = &properties.secret {
            raw.encryption = 1;
            (raw.key, raw.secret_nonce, raw.secret) =
                (secret.by.bytes(), secret.nonce, secret.sealed);
        }
        raw
    }

    /// `None` if these are the bytes of no properties.
    pub(crate) fn decode(&self) -> Option<Properties> {
        let compression = match self.compression {
            0 => Compression::None,
            1 => Compression::Zstd,
            _ => return None,
        };
        let secret = match self.encryption {
            0 => None,
            1 => Some(WrappedSecret {
                by: KeyName::new(self.key),
                nonce: self.secret_nonce,
                sealed: self.secret,
            }),
            _ => return None,
        };
        Some(Properties { compression, secret })
    }
}

impl Access {
    /// The cipher, if there is one.
    pub(crate) fn cipher(&self) -> Option<&Cipher> {
        match self {
            Self::Encrypted(cipher) => Some(cipher),
            Self::Plain | Self::Locked(_) => None,
        }
    }

    /// # Errors
    /// Why nothing can be read or written.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self {
            Self::Plain | Self::Encrypted(_) => Ok(()),
            Self::Locked(why) => Err(why.clone()),
        }
    }
}
