//! Directories that images may name files in, without an option: from the environment and from
//! configuration files.
//!
//! - I1 A file is trusted only if its owner is root or the user of this process, and nobody else
//!   may write it: whoever writes it decides what a stranger's image may read.
//! - I2 What cannot be used is left out, with a warning: fewer files may be named then, never more.

use rustix::fs::OFlags;
use serde::Deserialize;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The variable that lists directories, separated by colons.
const VARIABLE: &str = "MICA_ALLOW_PATH";
/// The file for all users.
const SYSTEM_FILE: &str = "/etc/mica/config.toml";
/// The file of one user, in their directory of configurations.
const USER_FILE: &str = "mica/config.toml";
/// The most that is read of a file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The keys of a configuration file.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Config {
    #[serde(default)]
    allow_path: Vec<PathBuf>,
}

/// Those directories, as far as they exist. They are looked up once for the process.
pub fn standing_allow_paths() -> &'static [PathBuf] {
    static PATHS: OnceLock<Vec<PathBuf>> = OnceLock::new();
    PATHS.get_or_init(|| {
        let mut paths: Vec<_> =
            std::env::var_os(VARIABLE).iter().flat_map(std::env::split_paths).collect();
        let user = user_file(std::env::var_os("XDG_CONFIG_HOME"), std::env::var_os("HOME"));
        for file in [Some(SYSTEM_FILE.into()), user].into_iter().flatten() {
            match read(&file) {
                Ok(more) => paths.extend(more),
                Err(why) => tracing::warn!(path = %file.display(), "configuration ignored: {why}"),
            }
        }
        paths.retain(|path| is_usable(path));
        paths
    })
}

fn user_file(config_home: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    // As the specification of these directories says, what is relative does not count.
    let absolute = |path: OsString| Some(PathBuf::from(path)).filter(|path| path.is_absolute());
    let folder = config_home.and_then(absolute);
    let folder = folder.or_else(|| Some(home.and_then(absolute)?.join(".config")));
    Some(folder?.join(USER_FILE))
}

/// What the configuration at `path` allows; nothing, if there is none.
fn read(path: &Path) -> Result<Vec<PathBuf>, String> {
    // A FIFO must not hang us.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error.to_string()),
    };
    let found = file.metadata().map_err(|error| error.to_string())?;
    if !found.is_file() {
        return Err("it is not a regular file".to_owned());
    }
    if ![rustix::process::geteuid().as_raw(), 0].contains(&found.uid()) {
        return Err("it belongs to another user".to_owned());
    }
    if found.mode() & 0o022 != 0 {
        return Err("others may write it: chmod go-w".to_owned());
    }
    let mut text = String::new();
    let read = file.take(FILE_BYTES_MAX).read_to_string(&mut text);
    read.map_err(|error| error.to_string())?;
    let config: Config = toml::from_str(&text).map_err(|error| error.message().to_owned())?;
    Ok(config.allow_path)
}

fn is_usable(path: &Path) -> bool {
    if path.as_os_str().is_empty() {
        return false;
    }
    if !path.is_absolute() {
        tracing::warn!(path = %path.display(), "not allowed: only absolute paths can be");
        return false;
    }
    // A directory may be there only at times.
    path.exists()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    fn config(dir: &Path, text: &str, mode: u32) -> PathBuf {
        let file = dir.join("config.toml");
        fs::write(&file, text).expect("there is room");
        fs::set_permissions(&file, Permissions::from_mode(mode)).expect("it is ours");
        file
    }

    #[test]
    fn a_configuration_that_others_may_write_allows_nothing() {
        let dir = tempfile::tempdir().expect("a folder");
        let text = "allow-path = [\"/a\", \"/b\"]\n";
        let file = config(dir.path(), text, 0o644);
        assert_eq!(read(&file).expect("trusted"), ["/a", "/b"].map(PathBuf::from));
        for mode in [0o664, 0o646, 0o666] {
            let file = config(dir.path(), text, mode);
            assert!(read(&file).expect_err("not trusted").contains("chmod"), "{mode:o}");
        }
    }

    #[test]
    fn a_configuration_that_is_not_understood_allows_nothing() {
        let dir = tempfile::tempdir().expect("a folder");
        for text in ["allow-paths = [\"/a\"]", "allow-path = \"/a\"", "["] {
            assert!(read(&config(dir.path(), text, 0o600)).is_err(), "{text}");
        }
        assert!(read(dir.path()).is_err(), "a directory");
        assert_eq!(read(&dir.path().join("none")).expect("there is none").len(), 0);
    }

    #[test]
    fn the_user_has_one_file_and_relative_directories_do_not_count() {
        let file = |config: Option<&str>, home: Option<&str>| {
            user_file(config.map(OsString::from), home.map(OsString::from))
        };
        assert_eq!(file(Some("/c"), Some("/h")), Some("/c/mica/config.toml".into()));
        assert_eq!(file(None, Some("/h")), Some("/h/.config/mica/config.toml".into()));
        assert_eq!(file(Some("c"), Some("/h")), Some("/h/.config/mica/config.toml".into()));
        assert_eq!(file(Some(""), Some("")), None);
    }
}
