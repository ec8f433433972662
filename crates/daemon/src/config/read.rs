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

/// Reads the text of a TOML file: what of it is understood, and what is not, and where.
pub(super) fn config(text: &str) -> (Config, Vec<Misread>) {
    let mut table = match DeTable::parse(text) {
        Ok(table) => table,
        Err(error) => return (Config::default(), vec![Misread::from(error)]),
    };
    let disks = table.get_mut().remove(DISK);
    let (disks, of_disks) = disks.map(|disks| all(text, disks)).unwrap_or_default();
    let (lines, disks) = disks.into_iter().unzip();
    let (config, mistake) = of_process(&table);
    let mistake = mistake.map(Misread::from);
    (Config { disks, lines, ..config }, mistake.into_iter().chain(of_disks).collect())
}

/// Everything but the disks, and what is not understood: the disks are judged by the rest.
fn of_process(table: &Spanned<DeTable<'_>>) -> (Config, Option<Error>) {
    let options = [keys::<ProcessSettings>(), keys::<IoSettings>(), keys::<StatsSettings>()];
    let known = [&[DISK.to_owned()], &*options.concat()].concat();
    let mut mistake = check_keys(table.clone(), &known).err();
    let config = Config {
        process: understood(table, &mut mistake),
        io: understood(table, &mut mistake),
        stats: understood(table, &mut mistake),
        ..Config::default()
    };
    (config, mistake)
}

/// A part of the `table`, or its default and the first `mistake`.
fn understood<'de, T: Deserialize<'de> + Default>(
    table: &Spanned<DeTable<'de>>,
    mistake: &mut Option<Error>,
) -> T {
    part(table).unwrap_or_else(|error| {
        mistake.get_or_insert(error);
        T::default()
    })
}

/// The line of the byte at `at`.
pub(super) fn line(text: &str, at: usize) -> usize {
    text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1
}

/// What is not understood, and in which disk.
pub(super) struct Misread {
    disk: Option<String>,
    /// Where the table of the disk begins, in bytes.
    table: Option<usize>,
    error: Error,
}

impl Misread {
    /// It and its place in `text`, in one line. (The parser's own message quotes the file on
    /// several.)
    pub(super) fn said(&self, text: &str) -> String {
        let at = self.error.span().map(|span| span.start).or(self.table);
        let at = at.map(|at| format!("line {}: ", line(text, at))).unwrap_or_default();
        let disk = self.disk.as_ref().map(|name| format!("disk {name:?}: ")).unwrap_or_default();
        format!("{at}{disk}{}", in_plain_words(self.error.message()))
    }
}

impl From<Error> for Misread {
    fn from(error: Error) -> Self {
        Self { disk: None, table: None, error }
    }
}

/// The disks that are understood, each with the line where it begins, and what is not.
fn all(text: &str, disks: Spanned<DeValue<'_>>) -> (Vec<(usize, DiskConfig)>, Vec<Misread>) {
    let disks = match disks.as_ref() {
        DeValue::Array(disks) => disks.clone(),
        _ => {
            let what = "write [[disk]], with two brackets, above the keys of each disk";
            let table = Some(disks.span().start);
            return (
                Vec::new(),
                vec![Misread { disk: None, table, error: de::Error::custom(what) }],
            );
        }
    };
    let checked = |table: &Spanned<DeValue<'_>>| {
        table.as_ref().get(FORCE).map_or(Ok(()), |force| part::<ForOnce, _>(force).map(drop))?;
        disk(table)
    };
    let (mut read, mut misread) = (Vec::new(), Vec::new());
    // From one table to the next: thousands of disks are not counted from the start each.
    let (mut counted, mut line_there) = (0, 1);
    for table in disks {
        let at = table.span().start;
        line_there += line(&text[counted..], at - counted) - 1;
        counted = at;
        match checked(&table) {
            Ok(disk) => read.push((line_there, disk)),
            Err(error) => {
                let name = table.as_ref().get("name").and_then(|name| name.as_ref().as_str());
                misread.push(Misread { disk: name.map(str::to_owned), table: Some(at), error });
            }
        }
    }
    (read, misread)
}

/// serde's words for what it found and expected, as somebody says them who writes the file.
pub(super) fn in_plain_words(message: &str) -> String {
    let rest = message.strip_prefix("invalid type: ");
    let rest = rest.or_else(|| message.strip_prefix("invalid value: "));
    if let Some((found, expected)) = rest.and_then(|rest| rest.rsplit_once(", expected ")) {
        let expected = match expected {
            "u8" | "u16" | "u32" | "u64" | "usize" => "a number from 0 on",
            "i32" | "i64" | "isize" | "f32" | "f64" => "a number",
            "a sequence" => "a list",
            "a map" => "a table",
            "path string" => "a path in quotes",
            "a string" => "a text in quotes",
            "a boolean" => "true or false",
            other => other,
        };
        let found = match found.split_once(' ') {
            None if found == "map" => "a table",
            None if found == "sequence" => "a list",
            Some(("string" | "integer" | "boolean", value)) => value.trim_matches('`'),
            Some(("floating", value)) => value.trim_start_matches("point ").trim_matches('`'),
            _ => found,
        };
        return format!("expected {expected}, found {found}");
    }
    message.to_owned()
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
            "force applies once, but in a file it would apply at every start: give --force to \
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
        Err(match similar(key, self.0) {
            Some(known) => E::custom(format_args!("unknown key `{key}`: it is `{known}`")),
            None => E::custom(format_args!(
                "unknown key `{key}`: the keys are the long options of `mica serve`"
            )),
        })
    }
}

/// The one of `known` that somebody means who writes `key`.
pub(crate) fn similar<'a>(key: &str, known: &'a [String]) -> Option<&'a str> {
    let key = key.to_lowercase().replace('_', "-");
    let near = known.iter().map(|known| (edits(&key, known), &**known)).min()?;
    (3 * near.0 < key.len().max(4)).then_some(near.1)
}

/// How many letters have to be changed, added or left out to get from `one` to `other`.
fn edits(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (number, letter) in one.bytes().enumerate() {
        let mut before = number;
        let mut left = number + 1;
        for (other_letter, above) in other.bytes().zip(row.iter_mut().skip(1)) {
            let changed = before + usize::from(letter != other_letter);
            before = *above;
            left = changed.min(before + 1).min(left + 1);
            *above = left;
        }
        row.first_mut().into_iter().for_each(|first| *first = number + 1);
    }
    row.last().copied().unwrap_or(0)
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
        assert!(error.to_string().contains("unknown key `x`: the keys are"), "{error}");
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

    #[test]
    fn key_that_is_almost_known_is_named() {
        let known = ["read-only", "nbd", "image", "num-queues"].map(str::to_owned);
        for (key, meant) in [
            ("read_only", Some("read-only")),
            ("readonly", Some("read-only")),
            ("Image", Some("image")),
            ("ndb", None),
            ("num_queue", Some("num-queues")),
            ("colour", None),
        ] {
            assert_eq!(similar(key, &known), meant, "{key}");
        }
        assert_eq!([edits("", "abc"), edits("abc", ""), edits("kitten", "sitting")], [3, 3, 3]);
    }

    #[test]
    fn what_is_misread_is_said_in_plain_words_and_for_all_disks() {
        let said = |text: &str| {
            let (_, misread) = config(text);
            misread.iter().map(|misread| misread.said(text)).collect::<Vec<_>>()
        };
        assert_eq!(
            said("[disk]\nname = 'a'\n"),
            ["line 1: write [[disk]], with two brackets, above the keys of each disk"]
        );
        assert_eq!(
            said("[[disk]]\nname = 'a'\n"),
            ["line 1: disk \"a\": missing field `image`, or `volume`"]
        );
        let text = "queues = 'x'\n\n[[disk]]\nname = 'a'\nimage = 'i'\nshared = 'x'\n\
                    [[disk]]\nname = 'b'\nimage = 'i'\nread_only = true\n";
        assert_eq!(
            said(text),
            [
                "line 1: expected a number from 0 on, found \"x\"",
                "line 6: disk \"a\": expected a number from 0 on, found \"x\"",
                "line 10: disk \"b\": unknown key `read_only`: it is `read-only`",
            ]
        );
        assert_eq!(said("[[disk]]\nname = 1\n"), ["line 2: expected a text in quotes, found 1"]);
    }
}
