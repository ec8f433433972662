//! The configuration file of a server, in which disks that came or went by command are kept across
//! a restart. Comments and order stay as they are.
//!
//! The server, which its sandbox keeps from writing the file, only names it. What it names is not
//! trusted: it has to be a configuration of a server at this control socket, and of the right user.

use crate::client::Client;
use crate::failure::Failure;
use mica_daemon::{Config, DiskConfig};
use rustix::fs::FlockOperation;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use tempfile::TempPath;
use toml_edit::{Array, ArrayOfTables, DocumentMut, Item, Table};

/// The file, and the disks that it had.
pub(super) struct Saved {
    file: PathBuf,
    disks: Vec<DiskConfig>,
}

impl Saved {
    /// That of the server of `client`.
    ///
    /// # Errors
    /// If it has none, or names one that is not its own.
    pub(super) fn of(client: &Client) -> Result<Self, Failure> {
        let status = client.get("/v1/status")?;
        let Some(file) = status["config"].as_str().map(PathBuf::from) else {
            return Err(Failure::new(
                "--save: the server has no configuration file: start it with --config",
            ));
        };
        Self::checked(file, client.socket()).map_err(|failure| failure.within("--save"))
    }

    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    fn checked(file: PathBuf, socket: &Path) -> Result<Self, Failure> {
        let named = || file.display().to_string();
        let failed = |error: io::Error| Failure::from(error).within(named());
        let owner = std::fs::metadata(&file).map_err(failed)?.uid();
        if owner != 0 && owner != rustix::process::geteuid().as_raw() {
            return Err(Failure::new("it belongs to another user").within(named()));
        }
        let config = Config::read(&file)?;
        let is_here = config.process.control.is_some_and(|control| {
            let identity =
                |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
            identity(&control).is_some_and(|found| Some(found) == identity(socket))
        });
        if !is_here {
            let what = "it is not the configuration of the server at this control socket: its key \
                        `control` has to name that";
            return Err(Failure::new(what).within(named()));
        }
        Ok(Self { file, disks: config.disks })
    }

    /// # Errors
    /// If the file has another table of the name of one of `disks`: one that was never loaded, or
    /// whose disk was removed by command. It must not be lost.
    pub(super) fn refuse_others(&self, disks: &[DiskConfig]) -> Result<(), Failure> {
        let others: BTreeMap<_, _> = self.disks.iter().map(|other| (&other.name, other)).collect();
        let is_another =
            |disk: &&DiskConfig| others.get(&disk.name).is_some_and(|own| **own != disk.kept());
        match disks.iter().find(is_another) {
            Some(disk) => Err(Failure::new(format!(
                "--save: {} has a disk {:?} with other settings, which would be lost: serve that with \
                 `mica ctl reload`, or choose another --name",
                self.file.display(),
                disk.name
            ))),
            None => Ok(()),
        }
    }

    /// Adds the tables of `disks`, or replaces them. The file is read and written whole for it,
    /// however many they are.
    ///
    /// # Errors
    /// If the file cannot be written: the disks are served nevertheless.
    pub(super) fn add(&self, disks: &[DiskConfig]) -> Result<(), Failure> {
        if disks.is_empty() {
            return Ok(());
        }
        let names: BTreeSet<_> = disks.iter().map(|disk| &*disk.name).collect();
        let tables = disks.iter().map(|disk| disk.kept().to_table().map_err(Failure::from));
        tables
            .collect::<Result<Vec<_>, _>>()
            .and_then(|tables| {
                self.edit(|disks| {
                    disks.retain(|disk| !name_of(disk).is_some_and(|name| names.contains(name)));
                    tables.iter().for_each(|table| disks.push(to_toml(table)));
                })
            })
            .map_err(|failure| {
                let names: Vec<_> = disks.iter().map(|disk| disk.name.clone()).collect();
                failure.within(format!("{}: served, but not saved", listed(&names)))
            })
    }

    /// Removes the tables of the disks of these `names`, however many, as [`Self::add`] does.
    ///
    /// # Errors
    /// If the file cannot be written: the disks are not served any longer nevertheless.
    pub(super) fn remove(&self, names: &[String]) -> Result<(), Failure> {
        if names.is_empty() {
            return Ok(());
        }
        let gone: BTreeSet<_> = names.iter().map(|name| &**name).collect();
        self.edit(|disks| disks.retain(|disk| !name_of(disk).is_some_and(|it| gone.contains(it))))
            .map_err(|failure| {
                failure.within(format!("{}: removed, but still saved", listed(names)))
            })
    }

    /// Replaces the file by an edited one, as a whole or not at all.
    fn edit(&self, edit: impl FnOnce(&mut ArrayOfTables)) -> Result<(), Failure> {
        let named = || self.file.display().to_string();
        let failed = |error: io::Error| Failure::from(error).within(named());
        // A symbolic link stays one.
        let file = self.file.canonicalize().map_err(failed)?;
        let folder = file.parent().unwrap_or(Path::new("/"));
        let folder_file = File::open(folder).map_err(failed)?;
        // Two clients do not edit at the same time.
        rustix::fs::flock(&folder_file, FlockOperation::LockExclusive)
            .map_err(|error| failed(error.into()))?;
        let text = std::fs::read_to_string(&file).map_err(failed)?;
        let parsed = text.parse::<DocumentMut>();
        let mut document = parsed.map_err(|error| Failure::new(error.message()).within(named()))?;
        let disks = document.entry("disk").or_insert(Item::ArrayOfTables(ArrayOfTables::new()));
        let Some(disks) = disks.as_array_of_tables_mut() else {
            let what = "its key `disk` is not written as tables [[disk]]: edit it by hand";
            return Err(Failure::new(what).within(named()));
        };
        edit(disks);
        let found = std::fs::metadata(&file).map_err(failed)?;
        let (mut new, place) = new_beside(&file).map_err(failed)?;
        new.write_all(document.to_string().as_bytes()).map_err(failed)?;
        new.set_permissions(found.permissions()).map_err(failed)?;
        // Only root can, and only root needs to.
        let _ = std::os::unix::fs::fchown(&new, Some(found.uid()), Some(found.gid()));
        new.sync_all().map_err(failed)?;
        place.persist(&file).map_err(|error| failed(error.error))?;
        folder_file.sync_all().map_err(failed)
    }
}

/// A new file that is to replace `file`, under one name whoever edits it: what a killed client left
/// there is removed, which is safe, as the folder is locked.
fn new_beside(file: &Path) -> io::Result<(File, TempPath)> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let place = file.with_file_name(format!(".{name}.mica-new"));
    match std::fs::remove_file(&place) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let new = File::options().write(true).create_new(true).mode(0o600).open(&place)?;
    Ok((new, TempPath::try_from_path(place)?))
}

fn name_of(disk: &Table) -> Option<&str> {
    disk.get("name").and_then(Item::as_str)
}

/// Names of disks, in one line that can be read however many they are.
pub(super) fn listed(names: &[String]) -> String {
    match names {
        [first, .., last] if names.len() > NAMED_MAX => {
            format!("{} disks, {first} to {last}", names.len())
        }
        _ => names.join(", "),
    }
}

/// Disks that a message names each.
const NAMED_MAX: usize = 8;

/// A table of text, numbers, booleans and lists of text.
fn to_toml(table: &Map<String, Value>) -> Table {
    let scalar = |value: &Value| -> Option<toml_edit::Value> {
        Some(match value {
            Value::String(text) => text.into(),
            Value::Bool(bool) => (*bool).into(),
            other => other.as_i64()?.into(),
        })
    };
    let mut all = Table::new();
    for (key, value) in table {
        let value = match value {
            Value::Array(list) => Some(list.iter().filter_map(scalar).collect::<Array>().into()),
            value => scalar(value),
        };
        all.extend(value.map(|value| (key.clone(), value)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const BEFORE: &str = "# ours\ncontrol = \"c\" # here\n\n[[disk]]\n# the first\nname = \"a\"\n\
                          image = \"a.qcow2\"\nnbd = [\"a.sock\"]\n";

    #[test]
    fn saved_disks_are_read_as_they_were_and_the_rest_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("mica.toml");
        std::fs::write(&file, BEFORE).expect("written");
        let read = || {
            let disks = Config::read(&file).expect("understood").disks;
            Saved { file: file.clone(), disks }
        };
        let saved = read();
        let table = json!({
            "name": "b", "image": "/b", "nbd": ["/x", "/y \"z\""], "iops": 7, "read-only": true,
            "bps": "1M", "vhost-user": "/v",
        });
        let Value::Object(table) = table else { unreachable!() };
        let disk = DiskConfig::from_table(&table).expect("understood");
        saved.refuse_others(std::slice::from_ref(&disk)).expect("there is none");
        // What a client left that was killed.
        let left = folder.path().join(".mica.toml.mica-new");
        std::fs::write(&left, "half").expect("written");
        saved.add(std::slice::from_ref(&disk)).expect("saved");
        assert!(!left.exists(), "it is left");
        let saved = read();
        saved.refuse_others(std::slice::from_ref(&disk)).expect("it is the same");
        let other = DiskConfig { image: "/other".into(), ..disk.clone() };
        let refused = saved.refuse_others(&[other]).expect_err("its table would be lost");
        assert!(format!("{refused:?}").contains("has a disk \\\"b\\\""), "{refused:?}");
        saved.add(&[disk]).expect("replaced");
        let text = std::fs::read_to_string(&file).expect("read");
        assert!(text.starts_with(BEFORE), "{text}");
        let config = Config::read(&file).expect("understood");
        assert_eq!(config.disks.len(), 2);
        assert_eq!(config.disks[1], DiskConfig::from_table(&table).expect("understood"));

        saved.remove(&["b".to_owned()]).expect("saved");
        assert_eq!(std::fs::read_to_string(&file).expect("read"), BEFORE);

        // Many come in the order of their file.
        let many = ["z", "a", "b"].map(|name| DiskConfig::new(name.to_owned(), "/i".into()));
        saved.add(&many).expect("saved");
        let names: Vec<_> = Config::read(&file).expect("understood").disks;
        let names: Vec<_> = names.into_iter().map(|disk| disk.name).collect();
        assert_eq!(names, ["z", "a", "b"], "one of each name");
        assert_eq!(listed(&names), "z, a, b");
        let hundred: Vec<_> = (0..100).map(|number| number.to_string()).collect();
        assert_eq!(listed(&hundred), "100 disks, 0 to 99");
    }
}
