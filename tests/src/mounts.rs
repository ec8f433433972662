//! Disks as files (FUSE) and file systems in folders. Anything mounted here is unmounted on drop,
//! whatever the outcome of the test.

use crate::{clock, command, tools};
use anyhow::{Context, Result, bail, ensure};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How long FUSE may take to start and stop, and a file system to become free.
const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(5);
/// Others look for a free loop device at the same time, and may be faster.
const TRIES: u32 = 5;

/// A disk that is served over NBD as a file, by `nbdfuse`.
#[derive(Debug)]
pub struct FuseFile {
    child: Child,
    folder: PathBuf,
}

impl FuseFile {
    /// Makes the disk of `uri` a file in `folder`, which is created. `None` if the system has no
    /// FUSE for us.
    ///
    /// # Panics
    /// If `folder` cannot be created, or `nbdfuse` cannot be started.
    pub fn mount(folder: &Path, uri: &str) -> Option<Self> {
        std::fs::create_dir_all(folder).expect("made");
        let mut nbdfuse = Command::new("nbdfuse");
        nbdfuse.arg(folder.join("disk")).arg(uri).stdin(Stdio::null()).stderr(Stdio::null());
        let mut child = nbdfuse.spawn().expect("started");
        let there = clock::poll(LIMIT, PAUSE, || match child.try_wait().expect("a child") {
            Some(_) => Some(false),
            None => folder.join("disk").exists().then_some(true),
        });
        if there == Some(true) {
            return Some(Self { child, folder: folder.to_owned() });
        }
        let _ = child.kill();
        let _ = child.wait();
        std::fs::remove_dir(folder).expect("nothing is mounted there");
        None
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.folder.join("disk")
    }

    /// Removes the file; everything written has then reached the server.
    ///
    /// # Panics
    /// If it is in use.
    pub fn unmount(mut self) {
        // A loop device lets go of its file a moment after it is unmounted.
        let ways: [&[&str]; 3] = [&["fusermount3", "-u"], &["fusermount", "-u"], &["umount"]];
        let is_done = |way: &&[&str]| {
            let mut command = Command::new(way[0]);
            let command = command.args(&way[1..]).arg(&self.folder).stderr(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        };
        let done = clock::poll(LIMIT, PAUSE * 10, || ways.iter().copied().find(is_done));
        assert!(done.is_some(), "{} stays in use", self.folder.display());
        assert!(command::wait(&mut self.child, LIMIT).is_some(), "nbdfuse does not end");
    }
}

impl Drop for FuseFile {
    fn drop(&mut self) {
        // After `unmount` it has ended; otherwise a test is failing, and nothing must stay mounted.
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            let _ = Command::new("umount").arg("-l").arg(&self.folder).status();
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Makes `image` a file of so many bytes with an ext4, which `mke2fs` makes with `options`.
///
/// # Errors
/// If that fails, or there is no `mke2fs`.
pub fn make_ext4(image: &Path, bytes: u64, options: &[&str]) -> Result<()> {
    std::fs::File::create(image)?.set_len(bytes)?;
    let mut make = Command::new(tools::MKE2FS.find().context("mke2fs is missing")?);
    let made = command::finish(make.args(["-q", "-F", "-t", "ext4"]).args(options).arg(image));
    ensure!(made.status.success(), "{made}");
    Ok(())
}

/// A mounted file system.
#[derive(Debug)]
pub struct Mount {
    folder: PathBuf,
    is_mounted: bool,
}

impl Mount {
    /// Mounts a memory file system of at most `mib` MiB at `folder`, which is created.
    ///
    /// # Errors
    /// If that is not allowed.
    pub fn memory(folder: &Path, mib: u64) -> Result<Self> {
        Self::new(&["-t", "tmpfs", "-o", &format!("size={mib}M")], Path::new("tmpfs"), folder)
    }

    /// Mounts the ext4 in file `image` at `folder`, which is created. Its loop device is removed
    /// with it.
    ///
    /// # Errors
    /// If that is not allowed, or the file system is broken.
    pub fn ext4(image: &Path, folder: &Path) -> Result<Self> {
        let mut tries = 1;
        loop {
            match Self::new(&["-t", "ext4", "-o", "loop,noatime"], image, folder) {
                Err(_) if tries < TRIES => clock::sleep(PAUSE * 10),
                result => return result,
            }
            tries += 1;
        }
    }

    /// Mounts the file system on `device` at `folder`, which is created.
    ///
    /// # Errors
    /// If that is not allowed, or the file system is broken.
    pub fn device(device: &str, folder: &Path) -> Result<Self> {
        Self::new(&[], Path::new(device), folder)
    }

    fn new(options: &[&str], what: &Path, folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        let mut mount = Command::new("mount");
        let output = mount.args(options).arg(what).arg(folder).output().context("mount")?;
        if !output.status.success() {
            bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(Self { folder: folder.to_owned(), is_mounted: true })
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Unmounts it; everything written has then reached the storage beneath.
    ///
    /// # Panics
    /// If it stays in use.
    pub fn unmount(mut self) {
        let live = live_ext4(&self.folder);
        // A ring releases its files a moment after its process has ended.
        let free = clock::poll(LIMIT, PAUSE, || {
            let output = Command::new("umount").arg(&self.folder).output();
            output.is_ok_and(|output| output.status.success()).then_some(())
        });
        assert!(free.is_some(), "{} stays in use", self.folder.display());
        self.is_mounted = false;
        // Programs of other tests, in mount namespaces of their own, keep what was mounted when
        // they began: it is written out once the last of them has ended.
        let Some(live) = live else { return };
        let ended = clock::poll(LIMIT, PAUSE, || (!live.exists()).then_some(()));
        assert!(ended.is_some(), "another mount namespace keeps {}", self.folder.display());
    }
}

/// What exists in the system's own files for as long as the ext4 that is mounted at `folder` lives;
/// `None` if something else is.
fn live_ext4(folder: &Path) -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let folder = folder.canonicalize().ok()?;
    let source = mounts.lines().rev().find_map(|line| {
        let (place, what) = line.split_once(" - ")?;
        let is_it = place.split(' ').nth(4).is_some_and(|at| Path::new(at) == folder);
        is_it.then(|| what.split(' ').nth(1)).flatten()
    })?;
    let live = Path::new("/sys/fs/ext4").join(Path::new(source).file_name()?);
    live.exists().then_some(live)
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.is_mounted {
            let _ = Command::new("umount").arg("-l").arg(&self.folder).status();
        }
    }
}

/// A file system that takes no writes for as long as this lives (`fsfreeze`), or this process does:
/// whoever waits for it cannot even be killed.
#[derive(Debug)]
pub struct Frozen {
    /// Ends that once its standard input is closed.
    guard: Child,
}

impl Frozen {
    /// Freezes the one that is mounted at `folder`, once everything written has reached its
    /// storage.
    ///
    /// # Errors
    /// If it cannot be frozen.
    pub fn new(folder: &Path) -> Result<Self> {
        let mut guard = Command::new("sh");
        // An interrupt at the terminal is not for it.
        guard.args(["-c", "read -r _; exec fsfreeze -u \"$0\""]).arg(folder).process_group(0);
        let guard = guard.stdin(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let frozen = Self { guard };
        let said = command::run("fsfreeze", [Path::new("-f"), folder]);
        if !said.status.success() {
            bail!("{said}");
        }
        Ok(frozen)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        if !self.guard.wait().is_ok_and(|status| status.success()) {
            eprintln!("a file system may still be frozen");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: a test beside this one had a mount namespace, and a disk was judged that did not
    /// have what had been written to it.
    #[test]
    fn what_is_unmounted_has_reached_its_storage_although_another_namespace_had_it() {
        let dir = tempfile::tempdir().expect("a folder");
        let (image, folder) = (dir.path().join("image"), dir.path().join("folder"));
        if !tools::present(&[tools::MKE2FS]) {
            return;
        }
        make_ext4(&image, 16 << 20, &[]).expect("made");
        let Ok(mount) = Mount::ext4(&image, &folder) else {
            tools::skip("mounting a file system is not allowed here");
            return;
        };
        let live = live_ext4(&folder).expect("an ext4");
        let mut other = Command::new("unshare");
        other.args(["--mount", "sh", "-c", "echo; read -r _"]);
        let other = other.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut other = other.spawn().expect("started");
        let mut began = [0];
        let mut said = other.stdout.take().expect("piped");
        let has_begun = std::io::Read::read_exact(&mut said, &mut began).is_ok();
        std::fs::write(folder.join("file"), "content").expect("written");
        let stdin = other.stdin.take();
        let ends = std::thread::spawn(move || {
            clock::sleep(PAUSE * 20);
            drop(stdin);
            other.wait()
        });
        mount.unmount();
        assert!(!live.exists());
        ends.join().expect("no panic").expect("ended");
        assert!(has_begun, "no namespace of its own");
    }
}
