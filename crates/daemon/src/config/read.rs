//! Reading configurations: tables whose keys are the long options of the command line.
//!
//! Each part of a configuration takes the keys that it knows from its table. A key that no part
//! knows is refused, with its line. (serde's flattening of one struct into another would lose the
//! position of values in the file.)

use super::{Config, DiskConfig};
use crate::settings::{
    DiskSettings, ImageSettings, IoSettings, ProcessSettings, StatsSettings, VolumeSettings,
};
use clap::{Args, Command};
use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, IntoDeserializer, MapAccess};
use std::fmt;
use std::path::PathBuf;
use toml::Spanned;
use toml::de::{DeTable, DeValue, Error};

/// The key of the array of disks.
const DISK: &str = "disk";

/// Reads the text of a TOML file.
///
/// # Errors
/// What is not understood, and where.
pub(super) fn config(text: &str) -> Result<Config, Misread> {
    let mut table = DeTable::parse(text)?;
    let disks = table.get_mut().remove(DISK);
    let options = [keys::<ProcessSettings>(), keys::<IoSettings>(), keys::<StatsSettings>()];
    check_keys(table.clone(), &[&[DISK.to_owned()], &*options.concat()].concat())?;
    let disks = disks.map(all).transpose()?.unwrap_or_default();
    let (lines, disks) = disks.into_iter().map(|(at, disk)| (line(text, at), disk)).unzip();
    Ok(Config {
        disks,
        lines,
        process: part(&table)?,
        io: part(&table)?,
        stats: part(&table)?,
        ..Config::default()
    })
}

/// The line of the byte at `at`.
pub(super) fn line(text: &str, at: usize) -> usize {
    text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1
}

/// What is not understood, and in which disk.
pub(super) struct Misread {
    pub(super) disk: Option<String>,
    pub(super) error: Error,
}

impl From<Error> for Misread {
    fn from(error: Error) -> Self {
        Self { disk: None, error }
    }
}

/// The disks, and where each of them begins.
fn all(disks: Spanned<DeValue<'_>>) -> Result<Vec<(usize, DiskConfig)>, Misread> {
    let disks = match disks.as_ref() {
        DeValue::Array(disks) => disks.clone(),
        // serde says what it is instead.
        _ => return Ok(part::<Vec<IgnoredAny>, _>(&disks).map(|_| Vec::new())?),
    };
    let checked = |table: &Spanned<DeValue<'_>>| {
        table.as_ref().get(FORCE).map_or(Ok(()), |force| part::<ForOnce, _>(force).map(drop))?;
        disk(table)
    };
    let read = |table: Spanned<DeValue<'_>>| match checked(&table) {
        Ok(disk) => Ok((table.span().start, disk)),
        Err(error) => {
            let name = table.as_ref().get("name").and_then(|name| name.as_ref().as_str());
            Err(Misread { disk: name.map(str::to_owned), error })
        }
    };
    disks.into_iter().map(read).collect()
}

/// What is said once, to a server that begins with the disk or to which it is added.
const FORCE: &str = "force";

/// Refuses a key in a file, which would count again whenever it is read.
struct ForOnce;

impl<'de> Deserialize<'de> for ForOnce {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        // From inside the visitor the error gets its place in the file.
        value.deserialize_bool(Self)
    }
}

impl de::Visitor<'_> for ForOnce {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a boolean")
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<Self, E> {
        Err(E::custom(
            "force counts once, and a file would have it count at each start: say --force to \
             `mica serve --volume` or `mica ctl add`",
        ))
    }
}

/// The keys of a disk that are not options of the command line.
#[derive(Deserialize)]
struct Named {
    name: String,
    image: Option<PathBuf>,
}

/// Reads the table of a disk, whatever format it comes from.
pub(super) fn disk<'de, E: de::Error>(
    table: &(impl IntoDeserializer<'de, E> + Clone),
) -> Result<DiskConfig, E> {
    let named = ["name", "image"].map(str::to_owned).to_vec();
    let of_images = [keys::<ImageSettings>(), keys::<VolumeSettings>()].concat();
    let known = [named, keys::<DiskSettings>(), of_images].concat();
    check_keys(table.clone(), &known)?;
    let Named { name, image } = part(table)?;
    let volume: VolumeSettings = part(table)?;
    let disk = match (image, &volume.volume) {
        (Some(image), None) => DiskConfig { volume, ..DiskConfig::new(name, image) },
        (None, Some(_)) => DiskConfig::of_volume(name, volume),
        (None, None) => return Err(E::custom("missing field `image`, or `volume`")),
        (Some(_), Some(_)) => return Err(E::custom("a disk has an `image` or a `volume`")),
    };
    Ok(DiskConfig { settings: part(table)?, images: part(table)?, ..disk })
}

/// Reads `T` from the keys of a table that it knows.
fn part<'de, T: Deserialize<'de>, E: de::Error>(
    table: &(impl IntoDeserializer<'de, E> + Clone),
) -> Result<T, E> {
    T::deserialize(table.clone().into_deserializer())
}

/// The keys of `T`: the long names of its options.
fn keys<T: Args>() -> Vec<String> {
    let options = T::augment_args(Command::new(""));
    options.get_arguments().filter_map(|option| option.get_long().map(str::to_owned)).collect()
}

/// Refuses a table with keys other than `known`.
fn check_keys<'de, E: de::Error>(
    table: impl IntoDeserializer<'de, E>,
    known: &[String],
) -> Result<(), E> {
    table.into_deserializer().deserialize_map(KnownKeys(known))
}

struct KnownKeys<'a>(&'a [String]);

impl<'de> de::Visitor<'de> for KnownKeys<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_key_seed(KnownKey(self.0))?.is_some() {
            map.next_value::<IgnoredAny>()?;
        }
        Ok(())
    }
}

struct KnownKey<'a>(&'a [String]);

impl<'de> DeserializeSeed<'de> for KnownKey<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, key: D) -> Result<(), D::Error> {
        key.deserialize_identifier(self)
    }
}

impl de::Visitor<'_> for KnownKey<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: de::Error>(self, key: &str) -> Result<(), E> {
        if self.0.iter().any(|known| known == key) {
            return Ok(());
        }
        let known: Vec<_> = self.0.iter().map(|known| format!("`{known}`")).collect();
        let known = known.join(", ");
        Err(E::custom(format_args!("unknown field `{key}`, expected one of {known}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Asserts that every key of `T` is read, by a value that fits no option: a table.
    fn reads_all_keys<T: Args + for<'de> Deserialize<'de>>() {
        for key in keys::<T>() {
            let table = json!({ &key: {} });
            assert!(part::<T, serde_json::Error>(&table).is_err(), "{key} is not read");
        }
    }

    #[test]
    fn every_option_is_a_key() {
        reads_all_keys::<ProcessSettings>();
        reads_all_keys::<IoSettings>();
        reads_all_keys::<StatsSettings>();
        reads_all_keys::<DiskSettings>();
        reads_all_keys::<ImageSettings>();
        reads_all_keys::<VolumeSettings>();
        assert_eq!(keys::<IoSettings>(), ["aio"]);
        assert_eq!(keys::<DiskSettings>().len(), 28);
    }

    #[test]
    fn disk_is_read_from_tables_of_other_formats() {
        let read = |value: &Value| disk::<serde_json::Error>(value);
        let value =
            json!({"name": "a", "image": "/i", "nbd": ["/s"], "bps": "1M", "names": "none"});
        let config = read(&value).expect("understood");
        assert_eq!((&*config.name, config.settings.bps.0), ("a", 1 << 20));
        assert_eq!(config.images.names, [PathBuf::from("none")]);
        let error = read(&json!({"name": "a", "image": "/i", "x": 1})).expect_err("unknown");
        assert!(error.to_string().contains("unknown field `x`, expected one of `name`"), "{error}");
        assert!(read(&json!({"name": "a"})).expect_err("no image").to_string().contains("`image`"));
        let volume = json!({"name": "a", "volume": "file:///d/a", "force": true});
        let config = read(&volume).expect("understood");
        assert!(!config.is_file() && *config.image == *"file:///d/a");
        assert_eq!(Value::Object(config.to_table().expect("text")), volume);
        let kept = config.kept().to_table().expect("text");
        assert!(!kept.contains_key("force"), "it counts once: {kept:?}");
        let both = json!({"name": "a", "volume": "file:///d/a", "image": "/i"});
        assert!(read(&both).expect_err("both").to_string().contains("`volume`"));
    }
}
