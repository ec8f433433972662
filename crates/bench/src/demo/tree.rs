//! The files of the demonstration: real ones of this machine, and how they change.

use anyhow::{Context, Result, ensure};
use mica_gen::Rng;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Where real files are: this project's own, and what a Debian system has.
const SOURCES: &[&str] = &["/usr/share/doc", "/usr/lib/python3", "/usr/share/perl", "/usr/bin"];
/// Bytes of files that are taken.
const TREE_BYTES: u64 = 120 << 20;
/// Largest file that is taken.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// Files that a snapshot changes, of each kind.
const CHANGED: u64 = 3;

/// A tree of files, on this machine and on the disk alike.
pub(crate) struct Tree {
    root: PathBuf,
    /// Names relative to the root, and lengths.
    files: BTreeMap<String, u64>,
    rng: Rng,
}

/// A change to one file of the tree, already made on this machine.
pub(crate) enum Change {
    /// The file is new.
    Written(String),
    /// The file has other content than before.
    Rewritten(String),
    /// The file is gone.
    Removed(String),
}

impl Tree {
    /// Copies real files into `root`.
    pub(crate) fn gather(root: &Path) -> Result<Self> {
        fs::create_dir(root)?;
        let mut tree = Self { root: root.to_owned(), files: BTreeMap::new(), rng: Rng::new(500) };
        tree.take(&mica_tests::shell::root().join("crates"), "mica")?;
        for source in SOURCES {
            let name = source.trim_start_matches('/').replace('/', "-");
            tree.take(Path::new(source), &name)?;
        }
        ensure!(tree.count() > 20, "there are no files to put on the disk");
        Ok(tree)
    }

    /// Copies what is below `source`, as far as it fits, into folder `name`.
    fn take(&mut self, source: &Path, name: &str) -> Result<()> {
        let Ok(entries) = fs::read_dir(source) else { return Ok(()) };
        let mut entries: Vec<_> = entries.filter_map(Result::ok).collect();
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let (kind, file) = (entry.file_type()?, entry.file_name());
            // Names that debugfs needs no quotes for.
            let plain = |name: &&str| {
                name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.+".contains(&byte))
            };
            let Some(file) = file.to_str().filter(plain) else { continue };
            let name = format!("{name}/{file}");
            if kind.is_dir() {
                self.take(&entry.path(), &name)?;
            } else if kind.is_file() {
                let len = entry.metadata()?.len();
                if len <= FILE_BYTES_MAX && self.bytes() + len <= TREE_BYTES {
                    let to = self.root.join(&name);
                    fs::create_dir_all(to.parent().context("a file is in a folder")?)?;
                    // Unreadable files are left out.
                    if fs::copy(entry.path(), &to).is_ok() {
                        self.files.insert(name, len);
                    }
                }
            }
        }
        Ok(())
    }

    /// Where it is on this machine.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// How many files it has.
    pub(crate) fn count(&self) -> usize {
        self.files.len()
    }

    /// Bytes of all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.values().sum()
    }

    /// Changes files as in daily use: some are edited, one is new, now and then one is removed.
    pub(crate) fn edit_some(&mut self, number: u32) -> Result<Vec<Change>> {
        let mut changes = Vec::new();
        for _ in 0..CHANGED {
            let name = self.any()?;
            let path = self.root.join(&name);
            let mut bytes = fs::read(&path)?;
            let at = usize::try_from(self.rng.below(bytes.len() as u64 + 1))?;
            let line = format!("edited in the life of snapshot {number}\n");
            bytes.splice(at..at, line.into_bytes());
            self.files.insert(name.clone(), bytes.len() as u64);
            fs::write(path, bytes)?;
            if changes.iter().all(|change| change_name(change) != name) {
                changes.push(Change::Rewritten(name));
            }
        }
        let name = format!("mica/new-{number}.txt");
        let text =
            format!("born in the life of snapshot {number}\n").repeat(1 + number as usize % 300);
        fs::write(self.root.join(&name), &text)?;
        self.files.insert(name.clone(), text.len() as u64);
        changes.push(Change::Written(name));
        if number.is_multiple_of(3) {
            let name = self.any()?;
            if changes.iter().all(|change| change_name(change) != name) {
                fs::remove_file(self.root.join(&name))?;
                self.files.remove(&name);
                changes.push(Change::Removed(name));
            }
        }
        Ok(changes)
    }

    fn any(&mut self) -> Result<String> {
        let at = usize::try_from(self.rng.below(self.files.len() as u64))?;
        self.files.keys().nth(at).cloned().context("the tree is empty")
    }

    /// Compares what was read back into `out` with the tree; returns how many files and bytes there
    /// are.
    pub(crate) fn compare(&self, out: &Path) -> Result<(usize, u64)> {
        for name in self.files.keys() {
            let back =
                fs::read(out.join(name)).with_context(|| format!("{name} did not come back"))?;
            ensure!(back == fs::read(self.root.join(name))?, "{name} came back different");
        }
        let count = count_files(&out.join("mica"))?;
        let wanted = self.files.keys().filter(|name| name.starts_with("mica/")).count();
        ensure!(count == wanted, "{count} files came back where {wanted} were");
        Ok((self.count(), self.bytes()))
    }
}

/// The file that a change is about.
pub(crate) fn change_name(change: &Change) -> &str {
    match change {
        Change::Written(name) | Change::Rewritten(name) | Change::Removed(name) => name,
    }
}

fn count_files(folder: &Path) -> Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        count += if entry.file_type()?.is_dir() { count_files(&entry.path())? } else { 1 };
    }
    Ok(count)
}
