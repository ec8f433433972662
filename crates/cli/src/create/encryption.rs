//! `-o encrypt.…`: how a new image is encrypted.

use crate::failure::Failure;
use crate::images::ImageArgs;
use mica_block::Passphrase;
use mica_crypt::luks::{NewLuks, NewSlot, Wish};
use mica_crypt::{CipherName, Hash};
use mica_qcow2_tools::create::ImagePlan;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use zeroize::Zeroizing;

/// Bits of AES in a new image.
const AES_BITS: usize = 256;

/// What `-o encrypt.…` says.
#[derive(Clone, Default, Debug)]
pub(crate) struct EncryptOptions {
    /// Whether, if that is said.
    is_wanted: Option<bool>,
    aes_bits: Option<usize>,
    mode: Option<String>,
    number: Option<String>,
    number_hash: Option<String>,
    hash: Option<Hash>,
    time: Option<Duration>,
}

/// The option that says whether.
const FORMAT: &str = "encrypt.format";

impl EncryptOptions {
    /// Sets what `key` names, in the words of qemu-img; false if there is no such option.
    pub(super) fn set(&mut self, key: &str, value: &str) -> Result<bool, Failure> {
        let wrong = |wanted: &str| Err(Failure::new(format!("-o {key}={value}: use {wanted}")));
        match (key, value) {
            (FORMAT, "luks") => self.is_wanted = Some(true),
            (FORMAT | "encryption", "off") => self.is_wanted = Some(false),
            (FORMAT | "encryption", _) => {
                return wrong(
                    "-o encrypt.format=luks, or off (images with the old AES are read, not made)",
                );
            }
            ("encrypt.key-secret", _) => {
                return wrong("--secret FILE, with the file that has the passphrase");
            }
            ("encrypt.cipher-alg", _) => {
                self.aes_bits = match value {
                    "aes-128" => Some(128),
                    "aes-192" => Some(192),
                    "aes-256" => Some(256),
                    _ => return wrong("aes-128, aes-192 or aes-256"),
                };
            }
            ("encrypt.cipher-mode", "xts" | "cbc") => self.mode = Some(value.to_owned()),
            ("encrypt.cipher-mode", _) => return wrong("xts or cbc"),
            ("encrypt.ivgen-alg", "plain" | "plain64" | "essiv") => {
                self.number = Some(value.to_owned());
            }
            ("encrypt.ivgen-alg", _) => return wrong("plain, plain64 or essiv"),
            ("encrypt.ivgen-hash-alg", "sha256") => self.number_hash = Some(value.to_owned()),
            ("encrypt.ivgen-hash-alg", _) => return wrong("sha256"),
            ("encrypt.hash-alg", _) => match Hash::of_name(value) {
                Some(hash) => self.hash = Some(hash),
                None => return wrong("sha1, sha256, sha384 or sha512"),
            },
            ("encrypt.iter-time", _) => match value.parse() {
                Ok(milliseconds @ 1..) => self.time = Some(Duration::from_millis(milliseconds)),
                _ => return wrong("a number of milliseconds"),
            },
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Whether anything is said.
    pub(crate) fn says_anything(&self) -> bool {
        let Self { is_wanted, aes_bits, mode, number, number_hash, hash, time } = self;
        let words = [mode, number, number_hash].map(|word| word.is_some());
        is_wanted.is_some()
            || aes_bits.is_some()
            || hash.is_some()
            || time.is_some()
            || words.contains(&true)
    }

    /// Whether the image is encrypted; on a base that is, it is unless it is said not to be.
    pub(crate) fn wants(&self, base_is_encrypted: bool) -> Result<bool, Failure> {
        let details_only = Self { is_wanted: None, ..self.clone() }.says_anything();
        match self.is_wanted {
            Some(true) => Ok(true),
            None if base_is_encrypted => Ok(true),
            Some(false) | None if details_only => Err(Failure::new(
                "-o encrypt.format=luks is missing: without it nothing is encrypted",
            )),
            Some(false) | None => Ok(false),
        }
    }

    fn wish(&self) -> Result<Wish, Failure> {
        let mode = self.mode.as_deref().unwrap_or("xts");
        let number = match (self.number.as_deref(), mode) {
            (Some("essiv"), _) => "essiv:sha256",
            (Some(number), _) => number,
            (None, _) => "plain64",
        };
        if self.number_hash.is_some() && number != "essiv:sha256" {
            let what = "-o encrypt.ivgen-hash-alg: only encrypt.ivgen-alg=essiv has a hash";
            return Err(Failure::new(what));
        }
        let name = format!("{mode}-{number}");
        let cipher = CipherName::of_name(&name).ok_or_else(|| {
            Failure::new(format!("-o encrypt.ivgen-alg: mica does not support {name} for images"))
        })?;
        let slot = self.time.map_or_else(NewSlot::default, NewSlot::Time);
        let aes_bits = self.aes_bits.unwrap_or(AES_BITS);
        Ok(Wish { cipher, aes_bits, hash: self.hash.unwrap_or(Hash::Sha256), slot })
    }

    /// A new LUKS header for the image at `file`, with the passphrase that `images` say.
    pub(crate) fn make(&self, file: &Path, images: &ImageArgs) -> Result<NewLuks, Failure> {
        let passphrase = passphrase_of(file, images)?;
        Ok(NewLuks::make(self.wish()?, &passphrase)?)
    }

    /// The `plan` of an image that nobody makes, encrypted if it is to be, for its length alone: no
    /// passphrase is needed for that, and nothing is unlocked.
    pub(crate) fn apply_to_measure(
        &self,
        plan: ImagePlan,
        base_is_encrypted: bool,
    ) -> Result<ImagePlan, Failure> {
        if !self.wants(base_is_encrypted)? {
            return Ok(plan);
        }
        let wish = Wish { slot: NewSlot::Iterations(NonZeroU32::MIN), ..self.wish()? };
        let any = Passphrase::new("the measure", Zeroizing::new(b"any".to_vec()));
        Ok(plan.encrypted(NewLuks::make(wish, &any)?)?)
    }

    /// The `plan` of the image at `file`, encrypted if it is to be.
    pub(crate) fn apply(
        &self,
        plan: ImagePlan,
        (file, base_is_encrypted): (&Path, bool),
        images: &ImageArgs,
    ) -> Result<ImagePlan, Failure> {
        match self.wants(base_is_encrypted)? {
            true => Ok(plan.encrypted(self.make(file, images)?)?),
            false => Ok(plan),
        }
    }
}

fn passphrase_of(file: &Path, images: &ImageArgs) -> Result<Arc<Passphrase>, Failure> {
    let secrets = images.image_options()?.secrets;
    secrets.of(file)?.ok_or_else(|| {
        let what = "will be encrypted: name the file with its passphrase (--secret FILE)";
        Failure::new(format!("{} {what}", file.display()))
    })
}

/// Says that the plain image at `file` gets what an encrypted one has.
pub(crate) fn warn_of_plain(file: &Path) {
    tracing::warn!(
        "{} is not encrypted, but its source is: use qcow2 with -o encrypt.format=luks to encrypt \
         it",
        file.display()
    );
}
