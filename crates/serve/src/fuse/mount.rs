//! Mounts over a file, and removing them.
//!
//! A server that was killed leaves its mount behind: every use of the file fails with "Transport
//! endpoint is not connected" then. Such a dead mount is cleared; a living one never is.
//!
//! Nothing here asks a living server anything on the caller's thread: one that hangs would take the
//! caller with it.

use mica_block::{Error, ErrorKind, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{getgid, getuid};
use std::ffi::{CString, OsString};
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// A file that one of our disks is mounted over.
#[derive(Clone, Debug)]
pub(super) struct MountPoint {
    path: PathBuf,
    /// Identifies it even if its path changes.
    id: Option<MountId>,
}

/// The numbers of a mount and of its file system. The kernel reuses both once they are free; that
/// of the file system is in use as long as its server has the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct MountId {
    mount: u64,
    device: (u32, u32),
}

/// Maximum number of dead mounts over one file that are cleared.
const DEAD_MAX: usize = 16;
/// How long a server has to show that it is alive.
const LIVING_LIMIT: Duration = Duration::from_secs(5);
/// Symbolic links that lead from one to the next.
const LINKS_MAX: usize = 40;

/// Finds the file that `file` names and clears dead mounts from it: how many.
///
/// # Errors
/// `Denied` if a server serves there; `Invalid` if it is not a regular file.
pub(super) fn prepare(file: &Path) -> Result<(PathBuf, usize)> {
    let path = resolve(file).map_err(|error| check_failed(file, error))?;
    let mut cleared = 0;
    for _ in 0..DEAD_MAX {
        let Some(entry) = top(&path)? else { break };
        match probe(&path) {
            Some(Err(Errno::NOTCONN | Errno::CONNABORTED)) => {}
            Some(_) => return Err(occupied(&path, "another server is mounted there")),
            None => {
                return Err(occupied(&path, "a server is mounted there that does not answer"));
            }
        }
        MountPoint { path: path.clone(), id: Some(entry.id) }.unmount()?;
        cleared += 1;
    }
    check_file(&path)?;
    Ok((path, cleared))
}

/// Checks that a disk can be served as `path`, as far as that is known without a mount.
///
/// # Errors
/// If there is no regular file.
pub fn check_file(path: &Path) -> Result<()> {
    let found = path.metadata().map_err(|error| check_failed(path, error))?;
    if found.is_file() {
        return Ok(());
    }
    let context = format!("{} is not a regular file, so it cannot be mounted over", path.display());
    Err(Error::new(ErrorKind::Invalid, context))
}

fn check_failed(path: &Path, error: io::Error) -> Error {
    let what = match error.kind() {
        io::ErrorKind::NotFound => "the file to mount over has to exist",
        _ => "checking the file to mount over",
    };
    Error::from_io(format!("{}: {what}", path.display()), error)
}

fn occupied(path: &Path, why: &str) -> Error {
    Error::new(ErrorKind::Denied, format!("{}: {why}", path.display()))
}

/// The path of `file` without links. Its last part may be a dead mount, which must not be asked.
fn resolve(file: &Path) -> io::Result<PathBuf> {
    let mut path = file.to_owned();
    for _ in 0..LINKS_MAX {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
        let folder = match path.parent() {
            Some(parent) if parent != Path::new("") => parent.canonicalize()?,
            _ => Path::new(".").canonicalize()?,
        };
        path = folder.join(name);
        match path.read_link() {
            Ok(target) => path = folder.join(target),
            Err(_) => return Ok(path),
        }
    }
    Err(Errno::LOOP.into())
}

/// Asks the server of `path` a question that the kernel cannot answer; `None` without an answer.
fn probe(path: &Path) -> Option<std::result::Result<(), Errno>> {
    let (sender, receiver) = mpsc::channel();
    let path = path.to_owned();
    let asking = std::thread::Builder::new().name("mica-fuse-probe".to_owned());
    // About its file system: attributes might come from the cache, even for a server just killed.
    // The thread of a question that is never answered ends with the process.
    let asked = asking.spawn(move || sender.send(rustix::fs::statfs(&path).map(drop)));
    asked.ok()?;
    receiver.recv_timeout(LIVING_LIMIT).ok()
}

impl MountPoint {
    /// The mount that was just made over `path`.
    pub(super) fn just_mounted(path: PathBuf) -> Self {
        // Without a mount table the path alone has to do.
        let id = top(&path).ok().flatten().map(|entry| entry.id);
        Self { path, id }
    }

    /// Removes it, even if it is in use: requests under way and later ones fail. Not an error if
    /// it is already gone.
    pub(super) fn unmount(&self) -> Result<()> {
        let path = match self.id {
            None => self.path.clone(),
            Some(id) => {
                let entries = table()?;
                let Some(ours) = entries.iter().find(|entry| entry.id == id) else { return Ok(()) };
                let on_top = entries.iter().rfind(|entry| entry.path == ours.path);
                if on_top.is_some_and(|entry| entry.id != id) {
                    let why = "something else is mounted over the disk, which stays mounted";
                    return Err(occupied(&ours.path, why));
                }
                ours.path.clone()
            }
        };
        detach(&path)
    }
}

/// Device and inode of what `path` shows.
pub(super) fn identity(path: &Path) -> io::Result<(u64, u64)> {
    path.metadata().map(|found| (found.dev(), found.ino()))
}

/// Mounts over the file at `path`; returns the source of the kernel's requests.
pub(super) fn mount_over(
    path: &Path,
    is_writable: bool,
    is_for_others: bool,
) -> io::Result<OwnedFd> {
    let others = if is_for_others { ",allow_other" } else { "" };
    let mode = path.metadata()?.mode();
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = rustix::fs::open(DEVICE, flags, Mode::empty())?;
    let (user, group) = (getuid().as_raw(), getgid().as_raw());
    let options = format!(
        "fd={},rootmode={mode:o},user_id={user},group_id={group},default_permissions{others}",
        device.as_raw_fd()
    );
    let options = CString::new(options)?;
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    flags.set(MountFlags::RDONLY, !is_writable);
    match mount(SOURCE, path, "fuse", flags, Some(&*options)) {
        Ok(()) => Ok(device),
        // Unprivileged users have a program that mounts for them.
        Err(Errno::PERM) => mount_as_user(path, is_writable, others),
        Err(error) => Err(error.into()),
    }
}

/// The kernel's FUSE device.
const DEVICE: &str = "/dev/fuse";
/// The source that our mounts show.
const SOURCE: &str = "mica";
const MOUNT_PROGRAMS: [&str; 2] = ["fusermount3", "fusermount"];

/// The program opens the device, mounts, and passes on the descriptor: over a socket whose number
/// is in an environment variable, and which is its standard input here.
fn mount_as_user(path: &Path, is_writable: bool, others: &str) -> io::Result<OwnedFd> {
    let access = if is_writable { "rw" } else { "ro" };
    let options = format!("fsname={SOURCE},noatime,default_permissions,{access}{others}");
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for program in MOUNT_PROGRAMS {
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = Command::new(program);
        command.args(["-o", &options, "--"]).arg(path).env("_FUSE_COMMFD", "0");
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                last = error;
                continue;
            }
        };
        // The command owns its end of the socket.
        drop(command);
        let device = receive_one(&ours);
        let mut said = String::new();
        let read = child.stderr.take().map(|mut stderr| stderr.read_to_string(&mut said));
        child.wait()?;
        read.transpose()?;
        return device.map_err(|error| match said.trim() {
            "" => error,
            said => io::Error::new(io::ErrorKind::PermissionDenied, said.replace('\n', "; ")),
        });
    }
    Err(io::Error::new(last.kind(), format!("{}: {last}", MOUNT_PROGRAMS[0])))
}

fn receive_one(socket: &UnixStream) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut into = [IoSliceMut::new(&mut byte)];
    loop {
        match recvmsg(socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => break,
        }
    }
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut received) = message
            && let Some(device) = received.next()
        {
            return Ok(device);
        }
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

fn detach(path: &Path) -> Result<()> {
    let flags = UnmountFlags::FORCE | UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
    match unmount(path, flags) {
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        // Unprivileged users have a program that unmounts for them.
        Err(Errno::PERM) if unmount_as_user(path) => Ok(()),
        Err(error) => {
            let context = format!("unmounting {}", path.display());
            Err(Error::from_io(context, error.into()))
        }
    }
}

fn unmount_as_user(path: &Path) -> bool {
    MOUNT_PROGRAMS.into_iter().any(|program| {
        let mut command = Command::new(program);
        command.args(["-u", "-z", "-q", "--"]).arg(path);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    })
}

/// A line of the mount table.
#[derive(PartialEq, Eq, Debug)]
struct Entry {
    id: MountId,
    path: PathBuf,
    is_fuse: bool,
}

/// The FUSE mount visible at `path`, if there is one.
fn top(path: &Path) -> Result<Option<Entry>> {
    let on_top = table()?.into_iter().rfind(|entry| entry.path == path);
    Ok(on_top.filter(|entry| entry.is_fuse))
}

fn table() -> Result<Vec<Entry>> {
    let text = std::fs::read(TABLE).map_err(|error| Error::from_io("reading the mounts", error))?;
    Ok(text.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

const TABLE: &str = "/proc/self/mountinfo";

/// `36 35 0:34 / /mnt/file rw,nosuid shared:1 - fuse mica rw` (proc(5)).
fn parse(line: &[u8]) -> Option<Entry> {
    let mut fields = line.split(|byte| *byte == b' ');
    let mount = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let (major, minor) = std::str::from_utf8(fields.nth(1)?).ok()?.split_once(':')?;
    let device = (major.parse().ok()?, minor.parse().ok()?);
    let path = unescape(fields.nth(1)?);
    let kind = fields.skip_while(|field| field != b"-").nth(1)?;
    let is_fuse = kind == b"fuse" || kind.starts_with(b"fuse.");
    let path = PathBuf::from(OsString::from_vec(path));
    Some(Entry { id: MountId { mount, device }, path, is_fuse })
}

/// Spaces and the like are written as three octal digits behind a backslash.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut at = 0;
    while at < field.len() {
        let digits = field.get(at + 1..at + 4).filter(|_| field[at] == b'\\');
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                at += 4;
            }
            None => {
                bytes.push(field[at]);
                at += 1;
            }
        }
    }
    bytes
}

/// Whether a mount is possible at all: names that FUSE's options cannot express are refused.
pub(super) fn check_name(path: &Path) -> Result<()> {
    if path.as_os_str().as_bytes().contains(&b'\n') {
        let context = format!("{:?} cannot be mounted over: its name contains a newline", path);
        return Err(Error::new(ErrorKind::Invalid, context));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_of_the_table_is_read_whatever_its_optional_fields() {
        let entry = |mount, device, path: &str, is_fuse| {
            Some(Entry { id: MountId { mount, device }, path: path.into(), is_fuse })
        };
        let line = b"36 35 0:34 / /a\\040b\\134c rw,nosuid shared:1 master:2 - fuse mica rw";
        assert_eq!(parse(line), entry(36, (0, 34), "/a b\\c", true));
        assert_eq!(parse(b"1 0 8:1 / / rw - ext4 /dev/sda rw"), entry(1, (8, 1), "/", false));
        assert_eq!(parse(b"2 0 0:9 / /x rw - fuse.sshfs a:/ rw"), entry(2, (0, 9), "/x", true));
        assert_eq!(parse(b"3 0 0:9 / /y rw - fuseblk /dev/b rw"), entry(3, (0, 9), "/y", false));
        for broken in [
            &b""[..],
            b"x",
            b"1 2 3",
            b"1 0 8 / / rw - fuse x rw",
            b"1 0 8:1 / / rw",
            b"1 0 8:1 / / rw -",
        ] {
            assert_eq!(parse(broken), None);
        }
    }

    #[test]
    fn backslash_without_digits_stands_for_itself() {
        assert_eq!(unescape(b"a\\"), b"a\\");
        assert_eq!(unescape(b"\\9xx\\040"), b"\\9xx ");
        assert_eq!(unescape(b"\\777"), b"\\777");
    }

    #[test]
    fn missing_file_or_other_inode_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let missing = prepare(&folder.path().join("missing")).expect_err("not there");
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        assert_eq!(prepare(folder.path()).expect_err("a folder").kind(), ErrorKind::Invalid);
    }

    #[test]
    fn links_are_followed_and_those_in_a_circle_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), b"").expect("written");
        std::os::unix::fs::symlink("file", at("link")).expect("linked");
        std::os::unix::fs::symlink("circle", at("circle")).expect("linked");

        let (found, _) = prepare(&at("link")).expect("a file");
        assert_eq!(found, at("file").canonicalize().expect("there"));
        assert!(prepare(&at("circle")).is_err());
    }
}
