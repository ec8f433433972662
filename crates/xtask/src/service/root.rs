//! A Debian with systemd, made once and kept in `target/service/base`, and the copy of it that a
//! run changes.
//!
//! Invariant
//! - I1 Nothing is deleted in which anything is mounted: that could be a folder of this machine.

use anyhow::{Context, Result, ensure};
use mica_tests::shell;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The release that packages are made for.
const RELEASE: &str = "bookworm";
/// What the service and its judges need besides a minimal system.
const PACKAGES: &str = "systemd,systemd-sysv,dbus,init-system-helpers,qemu-utils";
/// Programs that are needed here, and the packages that have them.
const TOOLS: [(&str, &str); 6] = [
    ("debootstrap", "debootstrap"),
    ("systemd-nspawn", "systemd-container"),
    ("nsenter", "util-linux"),
    ("setpriv", "util-linux"),
    ("dpkg-deb", "dpkg"),
    ("cp", "coreutils"),
];

/// Fails unless all of this can run here.
pub(super) fn check_tools() -> Result<()> {
    let folders: Vec<_> = std::env::var_os("PATH")
        .map(|path| std::env::split_paths(&path).collect())
        .unwrap_or_default();
    let folders = folders.into_iter().chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    let folders: Vec<_> = folders.collect();
    let missing: Vec<_> = TOOLS
        .iter()
        .filter(|(program, _)| !folders.iter().any(|folder| folder.join(program).is_file()))
        .map(|(program, package)| format!("{program} (Debian: {package})"))
        .collect();
    ensure!(missing.is_empty(), "service: not installed: {}", missing.join(", "));
    let is_root = rustix::process::geteuid().is_root();
    ensure!(is_root, "service: a container is booted by root: run this as root");
    Ok(())
}

/// `target/service`, which one run at a time has.
pub(super) struct Folder {
    path: PathBuf,
    /// Locked while this lives.
    _lock: File,
}

impl Folder {
    /// Creates it if necessary.
    pub(super) fn lock(path: PathBuf) -> Result<Self> {
        fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        let lock = path.join("lock");
        let file = File::create(&lock).with_context(|| lock.display().to_string())?;
        match file.try_lock() {
            Ok(()) => Ok(Self { path, _lock: file }),
            Err(TryLockError::WouldBlock) => {
                anyhow::bail!("{} is locked: another run is under way, wait for it", lock.display())
            }
            Err(TryLockError::Error(error)) => Err(error).context(lock.display().to_string()),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the Debian that later runs find.
    pub(super) fn make_base(&self, mirror: Option<&str>) -> Result<()> {
        let base = self.path.join("base");
        if base.is_dir() {
            return Ok(());
        }
        // Only a complete one gets the name.
        let new = self.path.join("base.new");
        remove(&new)?;
        let include = format!("--include={PACKAGES}");
        let mut make = Command::new("debootstrap");
        make.args(["--variant=minbase", &include, RELEASE]).arg(&new).args(mirror);
        // Packages are verified and then only read once.
        shell::run(&mut make)?;
        let caches = new.join("var/cache/apt/archives");
        shell::run(Command::new("find").arg(caches).args(["-name", "*.deb", "-delete"]))?;
        fs::rename(&new, &base).with_context(|| base.display().to_string())
    }

    /// A fresh copy of it, in place of that of the last run.
    pub(super) fn copy_of_base(&self) -> Result<PathBuf> {
        let root = self.path.join("root");
        remove(&root)?;
        let mut copy = Command::new("cp");
        shell::run(copy.args(["-a", "--reflink=auto"]).arg(self.path.join("base")).arg(&root))?;
        Ok(root)
    }
}

/// Deletes the system in `root`, if there is one and nothing is mounted in it (I1).
fn remove(root: &Path) -> Result<()> {
    if !root.exists() {
        return Ok(());
    }
    let root = root.canonicalize().with_context(|| root.display().to_string())?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("/proc/self/mountinfo")?;
    let mounted = mount_within(&mounts, &root);
    ensure!(mounted.is_none(), "{} is mounted: umount it, and repeat", mounted.unwrap_or_default());
    shell::run(Command::new("rm").args(["-rf", "--one-file-system"]).arg(root))
}

/// A mount at or below `folder`, among those of mountinfo.
fn mount_within(mounts: &str, folder: &Path) -> Option<String> {
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    // What could be mistaken for the end of a word is written in octal.
    let mut points = points.map(|point| point.replace("\\040", " ").replace("\\134", "\\"));
    points.find(|point| Path::new(point).starts_with(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_below_a_folder_are_found_and_others_are_not() {
        let mounts = "22 1 254:0 / / rw - ext4 /dev/vda rw\n\
                      31 22 0:5 / /t/rooted rw - tmpfs tmpfs rw\n\
                      32 22 0:6 / /t/my\\040root/proc rw,nosuid - proc proc rw\n";
        assert_eq!(mount_within(mounts, Path::new("/t/root")), None);
        assert_eq!(mount_within(mounts, Path::new("/t/rooted")), Some("/t/rooted".into()));
        assert_eq!(mount_within(mounts, Path::new("/t/my root")), Some("/t/my root/proc".into()));
    }
}
