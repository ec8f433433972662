//! The folder that becomes a package.

use super::output;
use anyhow::{Context, Result};
use mica_tests::shell;
use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder; dropping it removes it.
pub(super) struct Stage {
    folder: tempfile::TempDir,
}

impl Stage {
    pub(super) fn new() -> Result<Self> {
        Ok(Self { folder: tempfile::tempdir()? })
    }

    pub(super) fn root(&self) -> &Path {
        self.folder.path()
    }

    /// The path of `name`, in a folder that exists from now on.
    pub(super) fn place(&self, name: &str) -> Result<PathBuf> {
        let path = self.root().join(name);
        fs::create_dir_all(path.parent().context("no folder")?)?;
        Ok(path)
    }

    pub(super) fn write(&self, name: &str, content: String) -> Result<()> {
        fs::write(self.place(name)?, content).with_context(|| name.to_owned())
    }

    /// Copies a file of the project.
    pub(super) fn copy(&self, from: &Path, to: &str) -> Result<()> {
        let content = fs::read_to_string(shell::root().join(from));
        self.write(to, content.with_context(|| from.display().to_string())?)
    }

    /// Copies the files in and below a folder of the project whose names end in one of `ends`.
    pub(super) fn copy_folder(&self, from: &Path, to: &str, ends: &[&str]) -> Result<()> {
        let root = shell::root();
        for file in self.files_in(&root.join(from))? {
            let end = file.extension().and_then(OsStr::to_str);
            if end.is_some_and(|end| ends.contains(&end)) {
                let (name, below) =
                    (file.strip_prefix(&root)?, file.strip_prefix(root.join(from))?);
                self.copy(name, &format!("{to}/{}", below.display()))?;
            }
        }
        Ok(())
    }

    pub(super) fn rename(&self, from: &str, to: &str) -> Result<()> {
        fs::rename(self.root().join(from), self.place(to)?).with_context(|| from.to_owned())
    }

    /// Compresses the files in `folders`, except for those of the names `plain`.
    pub(super) fn compress(&self, folders: &[&str], plain: &[&str]) -> Result<()> {
        for folder in folders {
            let files = self.files_in(&self.root().join(folder))?;
            let files = files.iter().filter(|file| !plain.iter().any(|name| file.ends_with(name)));
            // Neither names nor times.
            output(Command::new("gzip").arg("-9n").args(files))?;
        }
        Ok(())
    }

    /// Everything that is installed, with its sum, as `md5sum` writes it.
    pub(super) fn sums(&self) -> Result<String> {
        let files = self.files_in(&self.root().join("usr"))?;
        let names = files.iter().filter_map(|file| file.strip_prefix(self.root()).ok());
        Ok(output(Command::new("md5sum").args(names).current_dir(self.root()))? + "\n")
    }

    /// What is installed takes this many KiB.
    pub(super) fn kib(&self) -> Result<u64> {
        let files = self.files_in(&self.root().join("usr"))?;
        files.iter().try_fold(0, |sum, file| Ok(sum + file.metadata()?.len().div_ceil(1024)))
    }

    /// Gives everything the modes that it is installed with, whatever the umask here is.
    pub(super) fn set_modes(&self, scripts: &[String]) -> Result<()> {
        for file in self.files_in(self.root())? {
            let name = file.strip_prefix(self.root())?;
            let runs = name.starts_with("usr/bin")
                || scripts.iter().any(|script| name == Path::new(script));
            fs::set_permissions(&file, Permissions::from_mode(if runs { 0o755 } else { 0o644 }))?;
            for folder in file.ancestors().skip(1).take_while(|at| at.starts_with(self.root())) {
                fs::set_permissions(folder, Permissions::from_mode(0o755))?;
            }
        }
        Ok(())
    }

    /// The files in and below `folder`, in order.
    fn files_in(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => files.extend(self.files_in(&entry.path())?),
                false => files.push(entry.path()),
            }
        }
        files.sort();
        Ok(files)
    }
}
