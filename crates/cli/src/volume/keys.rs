//! Options about keys, compression and encryption, and how these are shown.

use crate::failure::Failure;
use clap::{Args, ValueEnum};
use mica_stack::read_volume_key;
use mica_volume::{Compression, Encryption, NewVolume, Properties, VolumeKey};
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::sync::Arc;

// Of verbs that read or write blocks. (A doc comment would become the help of the verb.)
#[derive(Args, Default)]
pub(super) struct KeyArgs {
    /// The file with the key of an encrypted volume.
    ///
    /// 32 bytes, or 64 hexadecimal digits. No option takes the key itself, because other users can
    /// see command lines.
    #[arg(long, value_name = "FILE")]
    pub(super) volume_key: Option<PathBuf>,
}

// Of verbs that make volumes.
#[derive(Args)]
pub(super) struct NewArgs {
    /// Compress written data where that saves at least an eighth.
    #[arg(long, value_enum, value_name = "zstd")]
    compress: Option<Compress>,
    /// Encrypt written data with the key in --volume-key.
    ///
    /// Encrypts the content of blocks, in the store and in logs, with AES-256-XTS. The key is
    /// needed to read, write and copy them, but not for snapshots, clones, checks and collection.
    /// Without the key nobody can ever read the volume.
    #[arg(long)]
    encrypt: bool,
    #[command(flatten)]
    pub(super) key: KeyArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum Compress {
    Zstd,
}

impl KeyArgs {
    /// The key, if a file is named.
    pub(super) fn read(&self) -> Result<Option<Arc<VolumeKey>>, Failure> {
        Ok(self.volume_key.as_deref().map(read_volume_key).transpose()?)
    }
}

impl NewArgs {
    /// The key, if a file is named.
    pub(super) fn read_key(&self) -> Result<Option<Arc<VolumeKey>>, Failure> {
        if self.encrypt && self.key.volume_key.is_none() {
            let what = "--encrypt takes a key: name the file that has it with --volume-key";
            return Err(Failure::new(what));
        }
        self.key.read()
    }

    /// Whether it is to be encrypted.
    pub(super) fn encrypts(&self) -> bool {
        self.encrypt
    }

    /// What a new volume is to be.
    pub(super) fn new_volume(&self) -> NewVolume {
        let compression =
            self.compress.map_or(Compression::None, |Compress::Zstd| Compression::Zstd);
        let encryption = if self.encrypt { Encryption::WithKey } else { Encryption::None };
        NewVolume { compression, encryption }
    }
}

/// How a volume is compressed, in a word.
fn compression(properties: &Properties) -> Option<&'static str> {
    match properties.compression {
        Compression::None => None,
        Compression::Zstd => Some("zstd"),
    }
}

/// Adds what a volume was made with to JSON.
pub(super) fn add_properties(all: &mut Map<String, Value>, properties: &Properties) {
    all.insert("compression".to_owned(), compression(properties).into());
    let key = properties.key();
    all.insert("encryption".to_owned(), key.map(|_| "aes-256-xts").into());
    all.insert("key".to_owned(), key.map(|key| key.to_string()).into());
}

/// What a volume was made with, for people; empty if nothing.
pub(super) fn properties_text(properties: &Properties) -> String {
    let encrypted = properties.key().map(|key| format!("encrypted with key {key}"));
    let compressed = compression(properties).map(|how| format!("compressed by {how}"));
    let both: Vec<_> = [compressed, encrypted].into_iter().flatten().collect();
    both.join(", ")
}
