//! The parts of a machine that are not programs on the host's path: Debian's kernel, and a busybox
//! that needs no libraries. Both are downloaded and unpacked into a folder of ours, by `cargo xtask
//! setup`, so that nothing becomes the host's kernel.

use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Depends on the kernel for virtual machines that this release of Debian has now.
const KERNEL_PACKAGE: &str = "linux-image-cloud-amd64";
const BUSYBOX_PACKAGE: &str = "busybox-static";

/// Where the packages are unpacked.
pub fn folder() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    root.join("target/machine")
}

/// Whether they are there.
pub fn are_there() -> bool {
    folder().is_dir()
}

/// Downloads and unpacks what is missing. Needs up-to-date package lists, but no privileges.
///
/// # Errors
/// If apt does not have it.
pub fn download() -> Result<()> {
    let (done, new) = (folder(), folder().with_extension("new"));
    if done.is_dir() {
        return Ok(());
    }
    if new.exists() {
        fs::remove_dir_all(&new)?;
    }
    fs::create_dir_all(&new)?;
    run(Command::new("apt-get")
        // apt's own user may not write here, and would complain.
        .args(["--quiet", "--option", "APT::Sandbox::User=root"])
        .args(["download", &newest_kernel()?, BUSYBOX_PACKAGE])
        .current_dir(&new))?;
    for package in find(&new, &|file| file_name(file).ends_with(".deb"))? {
        run(Command::new("dpkg-deb").arg("--extract").arg(&package).arg(&new))?;
        fs::remove_file(package)?;
    }
    // Only a complete folder gets the final name.
    fs::rename(&new, &done).context("naming the machine's parts")
}

/// The kernel.
///
/// # Errors
/// If it is not there.
pub(super) fn kernel() -> Result<PathBuf> {
    the(|file| file_name(file).starts_with("vmlinuz-"))
}

/// A busybox that needs no libraries.
///
/// # Errors
/// If it is not there.
pub fn busybox() -> Result<Vec<u8>> {
    Ok(fs::read(the(is_busybox)?)?)
}

/// Module `name` of the kernel; `None` if this kernel has it built in.
///
/// # Errors
/// If it cannot be read.
pub(super) fn module(name: &str) -> Result<Option<Vec<u8>>> {
    let [plain, packed] = ["ko", "ko.xz"].map(|end| format!("{name}.{end}"));
    let files = find(&folder(), &|file| [&*plain, &packed].contains(&file_name(file)))?;
    let Some(file) = files.first() else { return Ok(None) };
    if file.extension().is_some_and(|end| end == "ko") {
        return Ok(Some(fs::read(file)?));
    }
    let mut unpack = Command::new(the(is_busybox)?);
    let unpacked = unpack.args(["xz", "-dc"]).arg(file).output()?;
    ensure!(unpacked.status.success(), "{} cannot be unpacked", file.display());
    Ok(Some(unpacked.stdout))
}

/// The package has others of its name, which are no programs.
fn is_busybox(file: &Path) -> bool {
    file.ends_with("bin/busybox")
}

fn file_name(file: &Path) -> &str {
    file.file_name().and_then(OsStr::to_str).unwrap_or_default()
}

fn the(is_it: impl Fn(&Path) -> bool) -> Result<PathBuf> {
    let found = find(&folder(), &is_it)?;
    found.into_iter().next().with_context(|| format!("{} is not whole", folder().display()))
}

/// Files in `folder` and below that are wanted.
fn find(folder: &Path, is_wanted: &dyn Fn(&Path) -> bool) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.extend(find(&entry.path(), is_wanted)?);
        } else if entry.file_type()?.is_file() && is_wanted(&entry.path()) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// The package with the kernel itself.
fn newest_kernel() -> Result<String> {
    let output = Command::new("apt-cache").args(["depends", KERNEL_PACKAGE]).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut depends = text.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    let kernel = depends.find(|package| package.starts_with("linux-image-"));
    kernel.map(str::to_owned).with_context(|| format!("apt knows no {KERNEL_PACKAGE}"))
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("starting {command:?}"))?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}
