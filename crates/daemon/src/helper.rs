//! The helper: a process that does for a sandboxed server what the sandbox forbids. It finds out
//! who holds a lock and which sockets are dead, mounts and unmounts files, makes temporary ones,
//! connects to a process that takes over, and opens the configuration and certificates once more:
//! landlock allows a file that was there at the start, not the one that replaces it. It gives the
//! file of a new layer the rights of the one whose name that takes, and removes the logs that a
//! refused start has made.
//!
//! ```text
//! server (sandboxed)  ─ one small request at a time ──────────▶  helper: the same program,
//!                     ◀─ a reply, perhaps with a descriptor ───  started before the sandbox
//! ```
//!
//! Invariants
//! - I1 What may be requested is fixed before the server reads any untrusted input: mount points
//!   are numbered as in the configuration, there is one configuration, certificates are the files
//!   of fixed names in its folders, temporary files have no names, and connections go only to
//!   sockets in folders with a takeover's name. Rights change only of files that are empty, and
//!   that the server may write ([`mica_stack::make_alike`]). Files are removed only if they are the
//!   logs that this start made, and empty ([`NewLog::remove`]).
//! - I2 The helper reads nothing but requests, and ends with the server, however that ends.
//! - I3 It has its own system call filter, unless its user needs another program to mount.
//! - I4 A file on storage that hangs is given up: requests share one link, and the others wait.

mod process;

pub use process::run_helper;

use crate::messages::{receive_with_fds, send_with_fds};
use crate::overlay::nameless_file;
use mica_block::{Error, ErrorKind, Result};
use mica_serve::CERTIFICATE_FILES;
use mica_serve::fuse::{AllowOther, MountRequest, Mounted, Mounts, MountsHere};
use mica_stack::NewLog;
use mica_store::{Holder, LockQuestion, find_holder};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

/// The verb that makes this program the helper.
pub const HELPER_VERB: &str = "sandbox-helper";

/// Most bytes of a message.
const MESSAGE_BYTES_MAX: usize = 32 << 10;
/// Limit for a reply. Clearing dead mounts has limits of its own below that.
const ANSWER_LIMIT: Timespec = Timespec { tv_sec: 120, tv_nsec: 0 };

/// What the helper is sent before the first request.
#[derive(Serialize, Deserialize)]
enum Setup {
    /// A file to mount over: the first is number 0.
    File(Vec<u8>),
    /// The configuration.
    Config(Vec<u8>),
    /// A folder with certificates.
    Certificates(Vec<u8>),
    /// A log that was made: the first is number 0.
    NewLog { path: Vec<u8>, device: u64, inode: u64 },
    /// The end of the setup.
    Begin,
}

#[derive(Serialize, Deserialize)]
enum Request {
    Holder {
        device: u64,
        inode: u64,
        byte: u64,
        process: u32,
        descriptor: i32,
    },
    IsDead {
        path: Vec<u8>,
    },
    Connect {
        path: Vec<u8>,
    },
    Config,
    Certificate {
        path: Vec<u8>,
    },
    Temporary,
    /// With the descriptors of an old file and of a new one.
    Alike,
    RemoveLog {
        log: usize,
    },
    Mount {
        file: usize,
        is_writable: bool,
        others: OtherUsers,
        image: Option<(u64, u64)>,
    },
    Unmount {
        file: usize,
    },
}

#[derive(Serialize, Deserialize)]
enum Reply {
    Holder(LockHolder),
    IsDead(bool),
    /// With the descriptor of the socket.
    Connected,
    /// With the descriptor of the file.
    Config,
    /// With the descriptor of the file.
    Certificate,
    /// With the descriptor of the file.
    Temporary,
    Alike,
    LogRemoved,
    /// With the descriptor of the mount.
    Mounted {
        is_for_others: bool,
        cleared: usize,
    },
    Unmounted,
    /// After a reply with a descriptor: the helper has closed its own copy.
    Released,
    Refused {
        kind: Kind,
        what: String,
    },
}

#[derive(Clone, Copy, Serialize, Deserialize)]
enum OtherUsers {
    On,
    Off,
    Auto,
}

#[derive(Serialize, Deserialize)]
enum LockHolder {
    Living(String),
    Dying(String),
    Nobody,
    Unknown,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
enum Kind {
    Denied,
    Invalid,
    NotFound,
    Io,
}

/// Does for this process what it may not do in its sandbox.
#[derive(Clone)]
pub(crate) enum Outside {
    /// There is no sandbox: this process does it itself.
    Here(Arc<MountsHere>),
    /// A helper does it.
    Helper(Arc<Helper>),
}

impl Default for Outside {
    fn default() -> Self {
        Self::Here(Arc::default())
    }
}

impl Outside {
    /// Connects to the process that waits at `path` to take over.
    pub(crate) fn connect(&self, path: &Path) -> Result<OwnedFd> {
        match self {
            Self::Here(_) => connect(path),
            Self::Helper(helper) => helper.connect(path),
        }
    }

    /// Opens the configuration file once more: `path`, as it was named at the start.
    pub(crate) fn open_config(&self, path: &Path) -> Result<OwnedFd> {
        match self {
            Self::Here(_) => open_config(path),
            Self::Helper(helper) => helper.config(),
        }
    }

    /// Opens a file of certificates.
    pub(crate) fn open_certificate(&self, path: &Path) -> Result<OwnedFd> {
        match self {
            Self::Helper(helper) if is_certificate(path, &helper.certificates) => {
                helper.certificate(path)
            }
            // Folders of disks that were added are where the sandbox allows them to be.
            Self::Here(_) | Self::Helper(_) => open_file(path),
        }
    }

    /// Makes a file without a name among the temporary ones.
    pub(crate) fn temporary_file(&self) -> Result<OwnedFd> {
        match self {
            Self::Here(_) => nameless_file(&std::env::temp_dir()),
            Self::Helper(helper) => helper.temporary(),
        }
    }

    /// Gives the `new` file, which is empty, the rights of the `old` one.
    pub(crate) fn make_alike(&self, old: &File, new: &File) -> Result<()> {
        match self {
            Self::Here(_) => mica_stack::make_alike(old, new),
            Self::Helper(helper) => helper.make_alike(old, new),
        }
    }

    /// Removes the log that was made as number `number` of all, `log`.
    pub(crate) fn remove_log(&self, number: usize, log: &NewLog) -> Result<()> {
        match self {
            Self::Here(_) => log.remove(),
            Self::Helper(helper) => helper.remove_log(number),
        }
    }

    /// Notices if the helper ends before this process does. Called inside the sandbox.
    ///
    /// # Errors
    /// Those of the system calls.
    pub(crate) fn watch(&self) -> Result<()> {
        match self {
            Self::Here(_) => Ok(()),
            Self::Helper(helper) => helper.watch(),
        }
    }

    pub(crate) fn mounts(&self) -> Arc<dyn Mounts> {
        match self {
            Self::Here(mounts) => Arc::clone(mounts) as _,
            Self::Helper(helper) => Arc::clone(helper) as _,
        }
    }
}

/// The server's end of the helper.
pub(crate) struct Helper {
    link: Mutex<Link>,
    /// The process, until somebody waits for its end.
    process: Mutex<Option<Child>>,
    files: Vec<PathBuf>,
    /// Folders.
    certificates: Vec<PathBuf>,
}

/// What a helper may be asked for.
#[derive(Default)]
pub(crate) struct Errands {
    /// Files to mount over.
    pub(crate) files: Vec<PathBuf>,
    /// The configuration, to be read again.
    pub(crate) config: Option<PathBuf>,
    /// Folders with certificates, to be read again.
    pub(crate) certificates: Vec<PathBuf>,
    /// Logs that this start made, to be removed if it is refused.
    pub(crate) new_logs: Vec<NewLog>,
}

/// The way to the helper.
enum Link {
    Open(OwnedFd),
    /// A reply was late: it would be taken for that of the next request.
    Late,
    /// There is no helper any more.
    Ended,
}

impl Helper {
    /// Starts `program` as the helper of a server, for these errands.
    ///
    /// # Errors
    /// Those of the system calls.
    pub(crate) fn start(program: &Path, errands: Errands) -> Result<Arc<Self>> {
        let Errands { files, config, certificates, new_logs } = errands;
        let failed = |error| Error::from_io("starting the sandbox helper", error);
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (ours, theirs) = socketpair(family, kind, SocketFlags::CLOEXEC, None)
            .map_err(|error| failed(error.into()))?;
        let mut command = Command::new(program);
        command.arg0("mica").arg(HELPER_VERB).stdin(theirs);
        // It writes nothing but replies. It ends with the link.
        let process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let process = Mutex::new(Some(process.map_err(failed)?));
        let setup = files.iter().map(|file| Setup::File(bytes_of(file)));
        let setup = setup.chain(config.map(|config| Setup::Config(bytes_of(&config))));
        let folders = certificates.iter().map(|folder| Setup::Certificates(bytes_of(folder)));
        let logs = new_logs.iter().map(|NewLog { path, device, inode }| Setup::NewLog {
            path: bytes_of(path),
            device: *device,
            inode: *inode,
        });
        let setup = setup.chain(folders).chain(logs);
        for message in setup.chain([Setup::Begin]) {
            send(&ours, &message, &[]).map_err(failed)?;
        }
        Ok(Arc::new(Self { link: Mutex::new(Link::Open(ours)), process, files, certificates }))
    }

    /// Waits for its end on a thread, and reports one that comes too early. Called inside the
    /// sandbox, which threads that run already would not be in.
    ///
    /// # Errors
    /// Those of the system calls.
    pub(crate) fn watch(self: &Arc<Self>) -> Result<()> {
        let Some(mut process) = self.process.lock().take() else { return Ok(()) };
        let helper = Arc::downgrade(self);
        let body = move || {
            let _ = process.wait();
            if let Some(helper) = helper.upgrade() {
                *helper.link.lock() = Link::Ended;
                tracing::error!("{ENDED}");
            }
        };
        let thread = std::thread::Builder::new().name("mica-reaper".to_owned()).spawn(body);
        thread.map(drop).map_err(|error| Error::from_io("watching the sandbox helper", error))
    }

    /// Finds out who holds a lock.
    pub(crate) fn holder(&self, question: &LockQuestion) -> Holder {
        let LockQuestion { device, inode, byte, process, descriptor } = *question;
        match self.request(&Request::Holder { device, inode, byte, process, descriptor }) {
            Ok((Reply::Holder(LockHolder::Living(name)), _)) => Holder::Living(name),
            Ok((Reply::Holder(LockHolder::Dying(name)), _)) => Holder::Dying(name),
            Ok((Reply::Holder(LockHolder::Nobody), _)) => Holder::Nobody,
            _ => Holder::Unknown,
        }
    }

    /// Whether the unix socket at `path` is that of a dead server.
    pub(crate) fn is_dead(&self, path: &Path) -> bool {
        let request = Request::IsDead { path: bytes_of(path) };
        matches!(self.request(&request), Ok((Reply::IsDead(true), _)))
    }

    fn config(&self) -> Result<OwnedFd> {
        match self.request(&Request::Config)? {
            (Reply::Config, Some(file)) => Ok(file),
            _ => Err(protocol_error()),
        }
    }

    fn certificate(&self, path: &Path) -> Result<OwnedFd> {
        match self.request(&Request::Certificate { path: bytes_of(path) })? {
            (Reply::Certificate, Some(file)) => Ok(file),
            _ => Err(protocol_error()),
        }
    }

    fn temporary(&self) -> Result<OwnedFd> {
        match self.request(&Request::Temporary)? {
            (Reply::Temporary, Some(file)) => Ok(file),
            _ => Err(protocol_error()),
        }
    }

    fn make_alike(&self, old: &File, new: &File) -> Result<()> {
        match self.request_with(&Request::Alike, &[old.as_fd(), new.as_fd()])? {
            (Reply::Alike, _) => Ok(()),
            _ => Err(protocol_error()),
        }
    }

    fn remove_log(&self, log: usize) -> Result<()> {
        match self.request(&Request::RemoveLog { log })? {
            (Reply::LogRemoved, _) => Ok(()),
            _ => Err(protocol_error()),
        }
    }

    fn connect(&self, path: &Path) -> Result<OwnedFd> {
        match self.request(&Request::Connect { path: bytes_of(path) })? {
            (Reply::Connected, Some(socket)) => Ok(socket),
            _ => Err(protocol_error()),
        }
    }

    /// Sends a request and waits for the reply.
    fn request(&self, request: &Request) -> Result<(Reply, Option<OwnedFd>)> {
        self.request_with(request, &[])
    }

    /// The same with descriptors.
    fn request_with(
        &self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Option<OwnedFd>)> {
        let mut link = self.link.lock();
        let socket = match &*link {
            Link::Open(socket) => socket,
            broken => return Err(broken.error()),
        };
        let received = send(socket, request, fds).and_then(|()| {
            let (reply, fds) = receive_reply(socket)?;
            // Once it says so, the helper has closed its copy: a mount then ends with this process.
            if !fds.is_empty() && !matches!(receive_reply(socket)?, (Reply::Released, _)) {
                return Err(io::ErrorKind::InvalidData.into());
            }
            Ok((reply, fds))
        });
        let (reply, fds) = match received {
            Ok(received) => received,
            Err(error) => {
                *link = match error.kind() {
                    io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::BrokenPipe
                    | io::ErrorKind::ConnectionReset => Link::Ended,
                    _ => Link::Late,
                };
                return Err(link.error());
            }
        };
        match reply {
            Reply::Refused { kind, what } => {
                let kind = match kind {
                    Kind::Denied => ErrorKind::Denied,
                    Kind::Invalid => ErrorKind::Invalid,
                    Kind::NotFound => ErrorKind::NotFound,
                    Kind::Io => ErrorKind::Io,
                };
                Err(Error::new(kind, what))
            }
            reply => Ok((reply, fds.into_iter().next())),
        }
    }

    fn number_of(&self, file: &Path) -> Result<usize> {
        self.files.iter().position(|known| known == file).ok_or_else(protocol_error)
    }
}

impl Mounts for Helper {
    fn mount(&self, request: &MountRequest) -> Result<Mounted> {
        let request = Request::Mount {
            file: self.number_of(&request.file)?,
            is_writable: request.is_writable,
            others: match request.allow_other {
                AllowOther::On => OtherUsers::On,
                AllowOther::Off => OtherUsers::Off,
                AllowOther::Auto => OtherUsers::Auto,
            },
            image: request.image,
        };
        match self.request(&request)? {
            (Reply::Mounted { is_for_others, cleared }, Some(device)) => {
                Ok(Mounted { device, is_for_others, cleared })
            }
            _ => Err(protocol_error()),
        }
    }

    fn unmount(&self, file: &Path) -> Result<()> {
        match self.request(&Request::Unmount { file: self.number_of(file)? })? {
            (Reply::Unmounted, _) => Ok(()),
            _ => Err(protocol_error()),
        }
    }
}

impl Link {
    /// Why nothing can be requested.
    fn error(&self) -> Error {
        let what = match self {
            Self::Ended => ENDED,
            Self::Open(_) | Self::Late => "the sandbox helper does not answer: restart the server",
        };
        Error::new(ErrorKind::Io, what)
    }
}

const ENDED: &str = "the sandbox helper has ended: restart the server";

/// The next reply, if it arrives in time; `UnexpectedEof` if the helper has ended.
fn receive_reply(socket: &OwnedFd) -> io::Result<(Reply, Vec<OwnedFd>)> {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let count = loop {
        match poll(&mut fds, Some(&ANSWER_LIMIT)) {
            Err(rustix::io::Errno::INTR) => {}
            outcome => break outcome?,
        }
    };
    if count == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let (bytes, fds) = receive_with_fds(socket, MESSAGE_BYTES_MAX)?;
    if bytes.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((serde_json::from_slice(&bytes)?, fds))
}

fn protocol_error() -> Error {
    Error::new(ErrorKind::Io, "protocol error between the server and its sandbox helper")
}

fn send(socket: &OwnedFd, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_with_fds(socket, &serde_json::to_vec(message)?, fds)
}

fn bytes_of(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

fn path_of(bytes: Vec<u8>) -> PathBuf {
    OsString::from_vec(bytes).into()
}

/// Opens a configuration file.
fn open_config(path: &Path) -> Result<OwnedFd> {
    open_file(path).map_err(|error| error.wrap(format!("reading {}", path.display())))
}

/// Opens a file for reading. Whatever is there now is not waited for.
fn open_file(path: &Path) -> Result<OwnedFd> {
    let failed = |error: rustix::io::Errno| Error::from_io("opening it", error.into());
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
    let found = rustix::fs::fstat(&file).map_err(failed)?;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => Ok(file),
        _ => Err(Error::new(ErrorKind::Invalid, "it is not a file")),
    }
}

/// Whether `path` is one of the files that belong into one of the `folders` of certificates.
fn is_certificate(path: &Path, folders: &[PathBuf]) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| CERTIFICATE_FILES.contains(&name))
        && path.parent().is_some_and(|folder| folders.iter().any(|known| known == folder))
}

/// Whether the unix socket at `path` is that of a dead server: nobody has it open. Nobody notices,
/// as the sockets of servers are of another kind.
fn is_dead(path: &Path) -> bool {
    let probe = || {
        let (family, kind) = (AddressFamily::UNIX, SocketType::DGRAM);
        let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
    };
    probe() == Err(rustix::io::Errno::CONNREFUSED)
}

/// Connects to the process that waits at `path` to take over.
fn connect(path: &Path) -> Result<OwnedFd> {
    let connected = || {
        let socket = crate::messages::socket()?;
        // Whoever listens there need not accept, which would be waited for.
        let flags = fcntl_getfl(&socket)?;
        fcntl_setfl(&socket, flags | OFlags::NONBLOCK)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        fcntl_setfl(&socket, flags)?;
        Ok(socket)
    };
    connected().map_err(|error: rustix::io::Errno| {
        Error::from_io(format!("connecting to {}", path.display()), error.into())
    })
}
