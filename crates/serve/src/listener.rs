//! Where clients connect: sockets that are bound and listening.

use crate::tls::{Tls, TlsPolicy};
use mica_block::{Error, ErrorKind, Result};
use mica_rt::Socket;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::{SocketAddrUnix, sockopt};
use std::ffi::OsStr;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// What those who connect there get besides a socket.
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
        // It is found again at the end, wherever the process is by then.
        let path = std::path::absolute(path)?;
        let is_ours = AtomicBool::new(is_ours);
        Ok(Self { path, device: found.dev(), inode: found.ino(), is_ours })
    }
}

impl Listener {
    /// Listens on a unix socket at `path`. The socket of a server that is gone is replaced.
    ///
    /// # Errors
    /// `Denied` if a living server listens there, or if there is something that is no socket.
    pub fn unix(path: &Path) -> Result<Self> {
        let context = || format!("listening on {}", path.display());
        // Two servers that find the same leftover must not both replace it.
        let _alone = lock_directory(path).map_err(|error| Error::from_io(context(), error))?;
        remove_leftover(path)?;
        let listener =
            UnixListener::bind(path).map_err(|error| Error::from_io(context(), error))?;
        let file =
            SocketFile::find(path, true).map_err(|error| Error::from_io(context(), error))?;
        Self::wrap(listener.into(), Family::Unix, Some(file))
    }

    /// Listens on a TCP address. Beyond the loopback an NBD server refuses to use it until it is
    /// said what becomes of those who connect: [`Listener::with_tls`], or
    /// [`Listener::allow_plain`].
    ///
    /// # Errors
    /// What the system says.
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
    /// If it is no listening stream socket.
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
        let name = rustix::net::getsockname(&fd);
        let name = name.map_err(|error| Error::from_io(context(), error.into()))?;
        if let Ok(address) = SocketAddr::try_from(name.clone()) {
            return Self::wrap(fd, Family::Tcp(address), None);
        }
        let path = SocketAddrUnix::try_from(name).ok().and_then(|name| {
            let path = name.path_bytes()?;
            Some(PathBuf::from(OsStr::from_bytes(path)))
        });
        // One that is gone is nobody's to remove.
        let file = path.and_then(|path| SocketFile::find(&path, false).ok());
        Self::wrap(fd, Family::Unix, file)
    }

    /// The file of a unix socket.
    pub fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|file| file.path.as_path())
    }

    /// Removes the file at the end.
    pub fn own_file(&self) {
        self.set_ours(true);
    }

    /// Leaves the file where it is: somebody else listens there.
    pub fn leave_file(&self) {
        self.set_ours(false);
    }

    fn set_ours(&self, is_ours: bool) {
        if let Some(file) = &self.file {
            file.is_ours.store(is_ours, Ordering::Relaxed);
        }
    }

    /// Has TLS on its connections. Only NBD knows how to start it.
    #[must_use]
    pub fn with_tls(mut self, tls: &Tls, policy: TlsPolicy) -> Self {
        self.security.tls = Some((tls.clone(), policy));
        self
    }

    /// Lets plain text leave this machine: for networks on which everybody may read and change
    /// everything.
    #[must_use]
    pub fn allow_plain(mut self) -> Self {
        self.security.is_plain_allowed = true;
        self
    }

    /// Refuses to be used if plain text would leave this machine and nobody said that it may.
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
            "{address} is beyond the loopback, where anybody may read and change what is not \
             encrypted: TLS has to be required there, or plain text allowed"
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
            tracing::warn!(path = %self.path.display(), %error, "a socket file stays behind");
        }
    }
}

/// Prepares an accepted connection.
pub(crate) fn tune(socket: &Socket, family: Family) {
    // Each is an optimisation: a socket that refuses it works all the same.
    match family {
        Family::Tcp(_) => {
            let _ = sockopt::set_tcp_nodelay(socket, true);
        }
        // The system's default holds two large replies at most; TCP grows its buffers by itself.
        Family::Unix => {
            let _ = sockopt::set_socket_send_buffer_size(socket, SEND_BUFFER_BYTES);
        }
    }
}

const SEND_BUFFER_BYTES: usize = 1 << 20;

const LOCK_ATTEMPTS: u32 = 250;
const LOCK_PAUSE: rustix::event::Timespec =
    rustix::event::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

pub(crate) fn lock_directory(path: &Path) -> io::Result<OwnedFd> {
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(directory, flags, Mode::empty())?;
    // Whoever may read the folder can hold this lock, and nobody may hold us up by it.
    for _ in 0..LOCK_ATTEMPTS {
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            outcome => return outcome.map(|()| fd).map_err(Into::into),
        }
        let _ = rustix::event::poll(&mut [], Some(&LOCK_PAUSE));
    }
    let what = format!("{} is locked by another program", directory.display());
    Err(io::Error::new(io::ErrorKind::ResourceBusy, what))
}

fn remove_leftover(path: &Path) -> Result<()> {
    let denied = |what: &str| {
        Err(Error::new(ErrorKind::Denied, format!("listening on {}: {what}", path.display())))
    };
    let Ok(found) = path.symlink_metadata() else { return Ok(()) };
    if !found.file_type().is_socket() {
        return denied("there is something that is not a socket");
    }
    match UnixStream::connect(path) {
        Ok(_) => denied("another server listens there"),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(|error| {
                Error::from_io(format!("removing the leftover socket {}", path.display()), error)
            })
        }
        Err(error) => Err(Error::from_io(format!("looking at {}", path.display()), error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_of_a_dead_server_is_replaced() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        // Dropping a std listener closes it and leaves its file, as a killed server does.
        drop(UnixListener::bind(&path).expect("bind"));
        assert!(path.exists());

        let listener = Listener::unix(&path).expect("replaces it");

        UnixStream::connect(&path).expect("it listens");
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn socket_of_a_living_server_is_left_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let _living = Listener::unix(&path).expect("bind");

        let error = Listener::unix(&path).expect_err("it lives");

        assert_eq!(error.kind(), ErrorKind::Denied);
        UnixStream::connect(&path).expect("it still listens");
    }

    #[test]
    fn file_that_is_no_socket_is_left_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.raw");
        std::fs::write(&path, b"precious").expect("write");

        let error = Listener::unix(&path).expect_err("not a socket");

        assert_eq!(error.kind(), ErrorKind::Denied);
        assert_eq!(std::fs::read(&path).expect("read"), b"precious");
    }

    #[test]
    fn file_goes_with_the_last_clone_and_stays_for_who_took_over() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let first = Listener::unix(&path).expect("bind");
        let clone = first.clone();
        let fd = first.as_fd().try_clone_to_owned().expect("a descriptor");
        let heir = Listener::inherited(fd).expect("it listens");
        assert_eq!(heir.path(), Some(&*path));

        drop(first);
        assert!(path.exists());
        clone.leave_file();
        drop(clone);
        UnixStream::connect(&path).expect("the heir listens");
        heir.own_file();
        drop(heir);
        assert!(!path.exists());
    }

    #[test]
    fn file_that_another_server_put_there_since_is_left_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let ours = Listener::unix(&path).expect("bind");
        std::fs::remove_file(&path).expect("remove");
        let _theirs = UnixListener::bind(&path).expect("bind");

        drop(ours);

        UnixStream::connect(&path).expect("it still listens");
    }
}
