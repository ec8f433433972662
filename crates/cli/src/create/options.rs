//! The options of `-o`: `key=value,...`, parsed as by qemu-img.

use super::EncryptOptions;
use crate::failure::Failure;
use crate::images::size_of;
use mica_qcow2_format::{Compression, Version};
use mica_qcow2_tools::create::{ImageWish, Preallocation};
use mica_stack::Format;

/// Options of a new image.
#[derive(Default)]
pub(crate) struct NewImageOptions {
    /// Options of a qcow2 image; of these a raw one has `preallocation` only.
    pub(crate) wish: ImageWish,
    /// How it is encrypted.
    pub(crate) encrypt: EncryptOptions,
    /// Length of the disk, if given here.
    pub(crate) size: Option<u64>,
}

/// Parses all `-o` options of an image of `format`.
pub(crate) fn parse(texts: &[String], format: Format) -> Result<NewImageOptions, Failure> {
    let mut options = NewImageOptions::default();
    for text in texts {
        for word in words(text) {
            let (key, value) = word.split_once('=').unwrap_or((&word, "on"));
            match format {
                Format::Qcow2 => options.set(key, value)?,
                _ => options.set_raw(key, value)?,
            }
        }
    }
    Ok(options)
}

impl NewImageOptions {
    fn set(&mut self, key: &str, value: &str) -> Result<(), Failure> {
        let wish = &mut self.wish;
        match key {
            "size" => self.size = Some(size_of("-o size", value)?),
            "compat" => wish.version = Some(version(value)?),
            "backing_file" => wish.backing_name = Some(value.into()),
            "backing_fmt" => wish.backing_format = Some(value.to_owned()),
            "data_file" => wish.data_file = Some(value.into()),
            "data_file_raw" => wish.data_file_raw = switch(key, value)?,
            "cluster_size" => wish.cluster_bytes = Some(size_of("-o cluster_size", value)?),
            "extended_l2" => wish.extended_l2 = Some(switch(key, value)?),
            "refcount_bits" => {
                wish.refcount_bits = Some(number(key, value)?);
            }
            "lazy_refcounts" => wish.lazy_refcounts = Some(switch(key, value)?),
            "compression_type" => wish.compression = Some(compression(value)?),
            "preallocation" => wish.preallocation = Some(value.parse::<Preallocation>()?),
            _ if self.encrypt.set(key, value)? => {}
            _ => {
                return Err(Failure::new(format!(
                    "-o: Invalid parameter '{key}': -o help lists all"
                )));
            }
        }
        Ok(())
    }

    fn set_raw(&mut self, key: &str, value: &str) -> Result<(), Failure> {
        match (key, value) {
            ("size", _) => self.size = Some(size_of("-o size", value)?),
            ("preallocation", "metadata") => {
                return Err(wrong(key, value, "off, falloc or full for a raw image"));
            }
            ("preallocation", _) => self.wish.preallocation = Some(value.parse()?),
            _ => {
                let what = format!(
                    "-o: Invalid parameter '{key}': a raw image has size and \
                                    preallocation only"
                );
                return Err(Failure::new(what));
            }
        }
        Ok(())
    }
}

/// The options of qcow2 images.
const QCOW2_OPTIONS: &[(&str, &str)] = &[
    ("backing_file", "the backing file, as -b"),
    ("backing_fmt", "its format, as -F"),
    ("cluster_size", "512 to 2M, by default 64k, for overlays 128k"),
    ("compat", "1.1 (v3), or 0.10 (v2) for old readers"),
    ("compression_type", "zlib or zstd"),
    ("data_file", "the file that holds the data instead of the image"),
    ("data_file_raw", "on: the data file is a raw image as well"),
    ("encrypt.cipher-alg", "aes-128, aes-192 or aes-256, the default"),
    ("encrypt.cipher-mode", "xts, the default, or cbc"),
    ("encrypt.format", "luks: encrypt it, with the passphrase in --secret; off"),
    ("encrypt.hash-alg", "sha1, sha256 (the default), sha384 or sha512"),
    ("encrypt.iter-time", "milliseconds that opening it takes, by default 2000"),
    ("encrypt.ivgen-alg", "plain64, the default, plain, or essiv with cbc"),
    ("encrypt.ivgen-hash-alg", "sha256, for essiv"),
    ("extended_l2", "on: clusters have 32 subclusters"),
    ("lazy_refcounts", "on: refcounts may be repaired after a crash instead of synced"),
    ("preallocation", "off, metadata, falloc or full"),
    ("refcount_bits", "1, 2, 4, 8, 16, 32 or 64"),
    ("size", "length of the disk, as SIZE"),
];
/// The options of raw images.
const RAW_OPTIONS: &[(&str, &str)] =
    &[("preallocation", "off, falloc or full"), ("size", "length of the disk, as SIZE")];

/// The list of options, if `texts` ask for it with -o help.
pub(crate) fn help(texts: &[String], format: Format) -> Option<String> {
    let asks = |text: &String| words(text).iter().any(|word| word == "help" || word == "?");
    if !texts.iter().any(asks) {
        return None;
    }
    let options = if format == Format::Qcow2 { QCOW2_OPTIONS } else { RAW_OPTIONS };
    let lines = options.iter().map(|(name, what)| format!("  {name:<22} {what}\n"));
    Some(format!("Options of {} images (-o):\n{}", format.name(), lines.collect::<String>()))
}

/// Splits at commas; a double comma stands for one within a value.
pub(crate) fn words(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter == ',' && letters.next_if_eq(&',').is_none() {
            words.push(String::new());
        } else if let Some(word) = words.last_mut() {
            word.push(letter);
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

pub(crate) fn switch(key: &str, value: &str) -> Result<bool, Failure> {
    match value {
        "on" | "yes" | "true" | "y" => Ok(true),
        "off" | "no" | "false" | "n" => Ok(false),
        _ => Err(wrong(key, value, "on or off")),
    }
}

pub(crate) fn number(key: &str, value: &str) -> Result<u64, Failure> {
    value.parse().map_err(|_| wrong(key, value, "a number"))
}

pub(crate) fn version(value: &str) -> Result<Version, Failure> {
    match value {
        "0.10" | "v2" => Ok(Version::V2),
        "1.1" | "v3" => Ok(Version::V3),
        _ => Err(wrong("compat", value, "0.10 or 1.1")),
    }
}

fn compression(value: &str) -> Result<Compression, Failure> {
    match value {
        "zlib" => Ok(Compression::Deflate),
        "zstd" => Ok(Compression::Zstd),
        _ => Err(wrong("compression_type", value, "zlib or zstd")),
    }
}

pub(crate) fn wrong(key: &str, value: &str, wanted: &str) -> Failure {
    Failure::new(format!("-o {key}={value}: it must be {wanted}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_doubled_comma_belongs_to_the_value() {
        assert_eq!(words("a=1,b=x,,y,c"), ["a=1", "b=x,y", "c"]);
        assert_eq!(words(""), Vec::<String>::new());
    }

    #[test]
    fn every_option_that_is_listed_is_known() {
        for (format, options) in [(Format::Qcow2, QCOW2_OPTIONS), (Format::Raw, RAW_OPTIONS)] {
            for (name, _) in options {
                let said = parse(&[format!("{name}=bogus")], format).err();
                let said = format!("{said:?}");
                assert!(!said.contains("Invalid parameter"), "{name}: {said}");
            }
        }
        assert!(help(&["size=1,help".to_owned()], Format::Qcow2).is_some());
        assert!(help(&["size=1".to_owned()], Format::Qcow2).is_none());
    }

    #[test]
    fn unknown_option_is_refused() {
        assert!(parse(&["cluster_sizes=1k".to_owned()], Format::Qcow2).is_err());
        assert!(parse(&["cluster_size=1k".to_owned()], Format::Raw).is_err());
        let options = parse(&["cluster_size=1k,lazy_refcounts".to_owned()], Format::Qcow2);
        let wish = options.unwrap_or_default().wish;
        assert_eq!((wish.cluster_bytes, wish.lazy_refcounts), (Some(1024), Some(true)));
    }
}
