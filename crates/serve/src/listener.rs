//! Where clients connect: sockets that are bound and listening.
//!
//! A unix socket's file exists from `bind` on, but connections are refused until `listen`: a client
//! that waits for the file would be turned away. So a socket is bound to another name in the same
//! directory, listens, and only then gets its own name. The kernel keeps reporting the first name
//! ([`bound_name`]), from which a process that inherits the socket finds its place.
//!
//! Invariants
//! - I1 A socket listens from the moment it has its own name.
//! - I2 Nothing is replaced except the socket of a dead server.

mod directory;

pub(crate) use directory::{DirectoryLock, lock_directory};

use crate::tls::{Tls, TlsPolicy};
use mica_block::{Error, ErrorKind, Result};
use mica_rt::{Socket, connect_unix_at_once};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, CWD, Mode, RenameFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::ffi::OsStr;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A listening socket.
///
/// Clones are the same socket. The file of a unix socket is removed with the last of them.
#[derive(Clone, Debug)]
pub struct Listener {
    pub(crate) socket: Arc<Socket>,
    pub(crate) family: Family,
    pub(crate) security: Security,
    file: Option<Arc<SocketFile>>,
}

/// What kind of connections come from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Family {
    Unix,
    Tcp(SocketAddr),
}

/// The security of connections to a listener.
#[derive(Clone, Default, Debug)]
pub(crate) struct Security {
    pub(crate) tls: Option<(Tls, TlsPolicy)>,
    /// Plain text may leave this machine.
    is_plain_allowed: bool,
}

/// The file of a unix socket.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
    /// Whether it is ours to remove, if it is still the same one.
    is_ours: AtomicBool,
}

impl SocketFile {
    fn find(path: &Path, is_ours: bool) -> io::Result<Self> {
        let found = path.symlink_metadata()?;
        // It is found again at the end, from whatever working directory.
        let path = std::path::absolute(path)?;
        let is_ours = AtomicBool::new(is_ours);
        Ok(Self { path, device: found.dev(), inode: found.ino(), is_ours })
    }
}

/// Makes sure that sockets would be new: those of dead servers are removed. [`Listener::unix`] does
/// the same if it may connect to what it finds; a process in a sandbox may not.
#[derive(Default)]
pub struct Clearing {
    /// The directory of the last one: a thousand sockets are in one.
    locked: Option<DirectoryLock>,
}

impl Clearing {
    /// Clears the place at `path`.
    ///
    /// # Errors
    /// As [`Listener::unix`].
    pub fn clear(&mut self, path: &Path) -> Result<()> {
        if !self.locked.as_ref().is_some_and(|locked| locked.is_of(path)) {
            // Nobody waits for one while holding another.
            self.locked = None;
            let failed = |error| Error::from_io(listening_on(path), error);
            self.locked = Some(lock_directory(path).map_err(failed)?);
        }
        // Also that of a server that was killed before its socket had its name.
        remove_leftover(&bound_name(path))?;
        remove_leftover(path)
    }
}

impl Listener {
    /// Listens on a unix socket at `path`. The socket of a dead server is replaced.
    ///
    /// # Errors
    /// `Denied` if a living server listens there, or if something that is not a socket is there.
    pub fn unix(path: &Path) -> Result<Self> {
        Self::unix_for(path, SocketUsers::AsUmask)
    }

    /// As [`Self::unix`], with a choice of users that may connect.
    ///
    /// # Errors
    /// As [`Listener::unix`].
    pub fn unix_for(path: &Path, users: SocketUsers) -> Result<Self> {
        let failed = |error| Error::from_io(listening_on(path), error);
        // Two servers that find the same leftover must not both replace it.
        let _alone = lock_directory(path).map_err(failed)?;
        remove_leftover(path)?;
        let (socket, file) = listen_unseen(path, users)?;
        Self::wrap(socket, Family::Unix, Some(file))
    }

    /// Listens on a TCP address. Beyond the loopback an NBD server refuses to use it until its
    /// security is chosen: [`Listener::with_tls`], or [`Listener::allow_plain`].
    ///
    /// # Errors
    /// Any error of the system.
    pub fn tcp(address: SocketAddr) -> Result<Self> {
        let context = || format!("listening on {address}");
        let listener =
            TcpListener::bind(address).map_err(|error| Error::from_io(context(), error))?;
        let local = listener.local_addr().map_err(|error| Error::from_io(context(), error))?;
        Self::wrap(listener.into(), Family::Tcp(local), None)
    }

    /// Takes a socket that someone else bound and listens on, as a supervisor hands it over. Its
    /// file, if it has one, is left alone until [`Listener::own_file`].
    ///
    /// # Errors
    /// If it is not a listening stream socket.
    pub fn inherited(fd: OwnedFd) -> Result<Self> {
        let context = || "taking over a listening socket";
        let listening = sockopt::socket_acceptconn(&fd)
            .map_err(|error| Error::from_io(context(), error.into()))?;
        if !listening {
            return Err(Error::new(
                ErrorKind::Invalid,
                "the socket that was handed over does not listen",
            ));
        }
        let domain = sockopt::socket_domain(&fd);
        let domain = domain.map_err(|error| Error::from_io(context(), error.into()))?;
        if domain != AddressFamily::UNIX {
            let listener = TcpListener::from(fd);
            let address = listener.local_addr();
            let address = address.map_err(|error| Error::from_io(context(), error))?;
            return Self::wrap(listener.into(), Family::Tcp(address), None);
        }
        let listener = UnixListener::from(fd);
        let name = listener.local_addr().map_err(|error| Error::from_io(context(), error))?;
        let path = name.as_pathname().map(|bound| name_of_bound(bound.to_owned()));
        // If it is gone, there is nothing to remove.
        let file = path.and_then(|path| SocketFile::find(&path, false).ok());
        Self::wrap(listener.into(), Family::Unix, file)
    }

    /// The file of a unix socket.
    pub fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|file| file.path.as_path())
    }

    /// Removes the file at the end.
    pub fn own_file(&self) {
        self.set_ours(true);
    }

    /// Leaves the file where it is: another process listens there.
    pub fn leave_file(&self) {
        self.set_ours(false);
    }

    fn set_ours(&self, is_ours: bool) {
        if let Some(file) = &self.file {
            file.is_ours.store(is_ours, Ordering::Relaxed);
        }
    }

    /// Uses TLS on its connections. Only NBD can start it.
    #[must_use]
    pub fn with_tls(mut self, tls: &Tls, policy: TlsPolicy) -> Self {
        self.security.tls = Some((tls.clone(), policy));
        self
    }

    /// The credentials of its clients' TLS, if they may use it.
    pub fn tls(&self) -> Option<&Tls> {
        self.security.tls.as_ref().map(|(tls, _)| tls)
    }

    /// Allows plain text to leave this machine: for networks on which everybody may read and change
    /// everything.
    #[must_use]
    pub fn allow_plain(mut self) -> Self {
        self.security.is_plain_allowed = true;
        self
    }

    /// Refuses to be used if plain text would leave this machine and that was not allowed.
    pub(crate) fn check_secured(&self) -> Result<()> {
        let Family::Tcp(address) = self.family else { return Ok(()) };
        let is_required = matches!(self.security.tls, Some((_, TlsPolicy::Required)));
        if is_required
            || self.security.is_plain_allowed
            || address.ip().to_canonical().is_loopback()
        {
            return Ok(());
        }
        let what = format!(
            "{address} is not a loopback address, and anybody on a network can read and change \
             what is not encrypted: require TLS, or allow plain text"
        );
        Err(Error::new(ErrorKind::Denied, what))
    }

    /// The address, for TCP: with the port that the system chose if it was asked to.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        match self.family {
            Family::Tcp(address) => Some(address),
            Family::Unix => None,
        }
    }

    fn wrap(fd: OwnedFd, family: Family, file: Option<SocketFile>) -> Result<Self> {
        let socket =
            Socket::new(fd).map_err(|error| Error::from_io("making a listening socket", error))?;
        let security = Security::default();
        Ok(Self { socket: Arc::new(socket), family, security, file: file.map(Arc::new) })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_same =
            |found: std::fs::Metadata| found.dev() == self.device && found.ino() == self.inode;
        if *self.is_ours.get_mut()
            && self.path.symlink_metadata().is_ok_and(is_same)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove a socket file");
        }
    }
}

/// Prepares an accepted connection.
pub(crate) fn tune(socket: &Socket, family: Family) {
    // A socket that refuses one of these works all the same.
    match family {
        Family::Tcp(_) => {
            let _ = sockopt::set_tcp_nodelay(socket, true);
            // A client whose machine is gone looks like an idle one, which may stay as long as it
            // likes: the system probes it, and gives it up after two minutes.
            let _ = sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE);
            let _ = sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL);
            let _ = sockopt::set_tcp_keepcnt(socket, KEEPALIVE_PROBES);
            let _ = sockopt::set_socket_keepalive(socket, true);
        }
        // The system's default holds two large replies at most; TCP grows its buffers by itself.
        Family::Unix => {
            let _ = sockopt::set_socket_send_buffer_size(socket, SEND_BUFFER_BYTES);
        }
    }
}

const SEND_BUFFER_BYTES: usize = 1 << 20;
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 6;

/// The users that may connect to a unix socket, besides root.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SocketUsers {
    /// As for any file that the process creates.
    AsUmask,
    /// Only its own user.
    Own,
}

/// The suffix of a socket's name until it listens, which the kernel reports forever. One byte,
/// because names of sockets are limited.
const UNSEEN: &str = "~";

fn bound_name(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(UNSEEN);
    name.into()
}

/// Where the socket is that was bound to `bound`, by [`bound_name`] or, if there is something of
/// that name, by somebody else.
fn name_of_bound(bound: PathBuf) -> PathBuf {
    if bound.symlink_metadata().is_ok() {
        return bound;
    }
    let bytes = bound.as_os_str().as_bytes();
    match bytes.strip_suffix(UNSEEN.as_bytes()) {
        Some(path) => PathBuf::from(OsStr::from_bytes(path)),
        None => bound,
    }
}

/// A socket that listens, and its file at `path`, where there is nothing. The caller holds the lock
/// of the folder.
fn listen_unseen(path: &Path, users: SocketUsers) -> Result<(OwnedFd, SocketFile)> {
    let failed = |error: io::Error| Error::from_io(listening_on(path), error);
    let unseen = bound_name(path);
    let unseen_address = match unseen.as_os_str().len() {
        ..=NAME_BYTES_MAX => SocketAddrUnix::new(&unseen).ok(),
        _ => None,
    };
    let Some(unseen_address) = unseen_address else {
        if path.as_os_str().len() > NAME_BYTES_MAX {
            return Err(failed(Errno::NAMETOOLONG.into()));
        }
        // One byte too long for a second name: it has to be seen a moment too early.
        let address = SocketAddrUnix::new(path).map_err(|error| failed(error.into()))?;
        let socket = listen_at(&address, users).map_err(failed)?;
        return Ok((socket, SocketFile::find(path, true).map_err(failed)?));
    };
    // Of a process that was killed at just this.
    remove_leftover(&unseen)?;
    let socket = listen_at(&unseen_address, users).map_err(failed)?;
    let mut file = SocketFile::find(&unseen, true).map_err(failed)?;
    match rustix::fs::renameat_with(CWD, &unseen, CWD, path, RenameFlags::NOREPLACE) {
        Ok(()) => {}
        Err(Errno::EXIST) => return Err(is_taken(path)),
        // The file system has no such flag.
        Err(Errno::INVAL | Errno::NOSYS) => name_by_link(&unseen, path)?,
        Err(error) => return Err(failed(error.into())),
    }
    file.path = std::path::absolute(path).map_err(failed)?;
    Ok((socket, file))
}

/// Gives what is at `unseen` the name `path`, if that is free.
fn name_by_link(unseen: &Path, path: &Path) -> Result<()> {
    let failed = |error: io::Error| Error::from_io(listening_on(path), error);
    match rustix::fs::linkat(CWD, unseen, CWD, path, AtFlags::empty()) {
        Ok(()) => std::fs::remove_file(unseen).map_err(failed),
        Err(Errno::EXIST) => Err(is_taken(path)),
        // No links either, or not in a sandbox; there was nothing a moment ago.
        Err(Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP | Errno::NOSYS) => {
            std::fs::rename(unseen, path).map_err(failed)
        }
        Err(error) => Err(failed(error.into())),
    }
}

fn listen_at(address: &SocketAddrUnix, users: SocketUsers) -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    if users == SocketUsers::Own {
        // The file gets the mode that the socket has when it is bound.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    }
    rustix::net::bind(&socket, address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Longest name of a socket, without the zero byte at its end.
const NAME_BYTES_MAX: usize = 107;
/// Clients that wait to be accepted; the system has a limit of its own.
const BACKLOG: i32 = 4096;

fn listening_on(path: &Path) -> String {
    format!("listening on {}", path.display())
}

/// Checks that a server can have its socket at `path`, as far as that is known without connecting
/// to what is there: it may be the server's own.
///
/// # Errors
/// `NotFound` if there is no folder for it; `Denied` if something that is not a socket is there;
/// `Invalid` if the name is too long.
pub fn check_socket_place(path: &Path) -> Result<()> {
    let failed = |error| Error::from_io(listening_on(path), error);
    if path.as_os_str().len() > NAME_BYTES_MAX {
        return Err(failed(Errno::NAMETOOLONG.into()));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    match folder.metadata() {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Err(failed(Errno::NOTDIR.into())),
        Err(error) => {
            let folder = folder.display();
            let what = format!("{}: looking for the folder {folder}", listening_on(path));
            return Err(Error::from_io(what, error));
        }
    }
    match path.symlink_metadata() {
        Ok(there) if !there.file_type().is_socket() => Err(failed(Errno::EXIST.into())),
        _ => Ok(()),
    }
}

fn is_taken(path: &Path) -> Error {
    let what = format!("{}: another server listens there", listening_on(path));
    Error::of_held(path, what, None)
}

/// How often to check again for a server that is dying, and for one that no longer exists, whose
/// socket others may have; with a pause of two milliseconds.
const DYING_LOOKS_MAX: u32 = 5000;
const GONE_LOOKS_MAX: u32 = 500;
/// The same in a sandbox, for a second at most.
const SANDBOXED_LOOKS_MAX: u32 = 50;
const SANDBOXED_PAUSE: rustix::event::Timespec =
    rustix::event::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Connects to the server on `path`, which is there, too, if it lets nobody in. A process that was
/// killed still listens for a moment: that is waited for.
fn probe_listener(path: &Path) -> io::Result<()> {
    let mut looks = 0;
    loop {
        let Some(stream) = connect_unix_at_once(path)? else { return Ok(()) };
        // The process that called listen(): another one may have the socket by now.
        let process = rustix::net::sockopt::socket_peercred(&stream)?.pid;
        let number = u32::try_from(process.as_raw_nonzero().get()).unwrap_or(0);
        let is_there = rustix::process::test_kill_process(process) != Err(Errno::SRCH);
        let looks_max = if is_there { DYING_LOOKS_MAX } else { GONE_LOOKS_MAX };
        if !mica_rt::is_dying(number) || looks >= looks_max {
            return Ok(());
        }
        looks += 1;
        if looks == 1 {
            tracing::warn!(
                socket = %path.display(),
                "waiting for the process that listened there, {number}, to exit"
            );
        }
        let pause = rustix::event::Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
        rustix::event::poll(&mut [], Some(&pause))?;
    }
}

fn remove_leftover(path: &Path) -> Result<()> {
    let Ok(found) = path.symlink_metadata() else { return Ok(()) };
    if !found.file_type().is_socket() {
        let what = format!("{} exists and is not a socket", path.display());
        return Err(Error::new(ErrorKind::Denied, what));
    }
    match probe_listener(path) {
        Ok(()) => Err(is_taken(path)),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => remove_dead(path),
        // The sandbox forbids connecting.
        Err(error) if error.raw_os_error() == Some(Errno::PERM.raw_os_error()) => {
            let look = LOOK.lock().clone();
            let Some(is_dead) = look else { return Err(is_taken(path)) };
            // Nothing shows whether a server that still listens there was killed just now.
            for _ in 0..SANDBOXED_LOOKS_MAX {
                if is_dead(path) {
                    return remove_dead(path);
                }
                let _ = rustix::event::poll(&mut [], Some(&SANDBOXED_PAUSE));
            }
            Err(is_taken(path))
        }
        Err(error) => Err(Error::from_io(format!("checking {}", path.display()), error)),
    }
}

fn remove_dead(path: &Path) -> Result<()> {
    std::fs::remove_file(path).map_err(|error| {
        Error::from_io(format!("removing the leftover socket {}", path.display()), error)
    })
}

/// Finds out whether a unix socket is that of a dead server.
type Look = dyn Fn(&Path) -> bool + Send + Sync;

static LOOK: Mutex<Option<Arc<Look>>> = Mutex::new(None);

/// From now on uses `is_dead` to find out whether a socket is that of a dead server: for a process
/// in a sandbox, which cannot connect to it.
pub fn find_dead_sockets_with(is_dead: impl Fn(&Path) -> bool + Send + Sync + 'static) {
    *LOOK.lock() = Some(Arc::new(is_dead));
}

#[cfg(test)]
mod tests;
