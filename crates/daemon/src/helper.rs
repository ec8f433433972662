//! What a server in a sandbox has another process do: search for who holds a lock, mount and
//! unmount files, and go to meet a process that takes over.
//!
//! ```text
//! server (sandboxed)  ─ one question at a time, a few words each ─▶  helper: the same program,
//!                     ◀─ an answer, perhaps with a descriptor ─────  started before the sandbox
//! ```
//!
//! Invariants
//! - I1 What may be asked is fixed before the server reads anything that strangers wrote: files are
//!   mounted over by their place in the configuration, and met is only who waits in a folder of a
//!   takeover's name.
//! - I2 The helper reads nothing but questions, and ends with the server, whatever ends that.
//! - I3 It has a filter of system calls of its own, unless its user needs another program to mount.

mod process;

pub use process::run_helper;

use crate::messages::{receive_with_fds, send_with_fds};
use mica_block::{Error, ErrorKind, Result};
use mica_serve::fuse::{AllowOther, MountRequest, Mounted, Mounts, MountsHere};
use mica_store::{Holder, LockQuestion, find_holder};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// The word that makes this program the helper.
pub const HELPER_VERB: &str = "sandbox-helper";

/// Bytes of a message.
const MESSAGE_BYTES_MAX: usize = 32 << 10;
/// For an answer. Clearing dead mounts has limits of its own below that.
const ANSWER_LIMIT: Timespec = Timespec { tv_sec: 120, tv_nsec: 0 };

/// What the helper is told before it is asked anything.
#[derive(Serialize, Deserialize)]
enum Setup {
    /// A file to be mounted over: the first is number 0.
    File(Vec<u8>),
    /// That was all.
    Begin,
}

#[derive(Serialize, Deserialize)]
enum Request {
    Holder { inode: u64, byte: u64, process: u32, descriptor: i32 },
    Meet { path: Vec<u8> },
    Mount { file: usize, is_writable: bool, others: Others, image: Option<(u64, u64)> },
    Unmount { file: usize },
}

#[derive(Serialize, Deserialize)]
enum Reply {
    Holder(Held),
    /// With the descriptor of a socket.
    Met,
    /// With that of a mount.
    Mounted {
        is_for_others: bool,
        cleared: usize,
    },
    Unmounted,
    /// After an answer with a descriptor: the helper has closed its own.
    LetGo,
    Refused {
        kind: Kind,
        what: String,
    },
}

#[derive(Clone, Copy, Serialize, Deserialize)]
enum Others {
    On,
    Off,
    Auto,
}

#[derive(Serialize, Deserialize)]
enum Held {
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

/// Who does for this process what it may not do in a sandbox.
#[derive(Clone)]
pub(crate) enum Outside {
    /// It does it itself: there is no sandbox.
    Here(Arc<MountsHere>),
    /// Another process.
    Helper(Arc<Helper>),
}

impl Outside {
    /// A socket that is connected to the process that waits at `path` to take over.
    pub(crate) fn meet(&self, path: &Path) -> Result<OwnedFd> {
        match self {
            Self::Here(_) => meet(path),
            Self::Helper(helper) => helper.meet(path),
        }
    }

    pub(crate) fn mounts(&self) -> Arc<dyn Mounts> {
        match self {
            Self::Here(mounts) => Arc::clone(mounts) as _,
            Self::Helper(helper) => Arc::clone(helper) as _,
        }
    }
}

/// The other process.
pub(crate) struct Helper {
    /// `None` once it has not answered in time: what it says later would answer something else.
    link: Mutex<Option<OwnedFd>>,
    files: Vec<PathBuf>,
}

impl Helper {
    /// Starts `program` as the helper of a server that is to mount over `files`.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn start(program: &Path, files: Vec<PathBuf>) -> Result<Arc<Self>> {
        let failed = |error| Error::from_io("starting the helper of the sandbox", error);
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (ours, theirs) = socketpair(family, kind, SocketFlags::CLOEXEC, None)
            .map_err(|error| failed(error.into()))?;
        let mut command = Command::new(program);
        command.arg0("mica").arg(HELPER_VERB).stdin(theirs);
        // It says nothing but answers. It ends with the link, and is nobody's to wait for.
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().map_err(failed)?;
        let setup = files.iter().map(|file| Setup::File(bytes_of(file)));
        for message in setup.chain([Setup::Begin]) {
            send(&ours, &message, &[]).map_err(failed)?;
        }
        Ok(Arc::new(Self { link: Mutex::new(Some(ours)), files }))
    }

    /// Who holds a lock.
    pub(crate) fn holder(&self, question: &LockQuestion) -> Holder {
        let LockQuestion { inode, byte, process, descriptor } = *question;
        match self.ask(&Request::Holder { inode, byte, process, descriptor }) {
            Ok((Reply::Holder(Held::Living(name)), _)) => Holder::Living(name),
            Ok((Reply::Holder(Held::Dying(name)), _)) => Holder::Dying(name),
            Ok((Reply::Holder(Held::Nobody), _)) => Holder::Nobody,
            _ => Holder::Unknown,
        }
    }

    fn meet(&self, path: &Path) -> Result<OwnedFd> {
        match self.ask(&Request::Meet { path: bytes_of(path) })? {
            (Reply::Met, Some(socket)) => Ok(socket),
            _ => Err(nonsense()),
        }
    }

    /// Asks, and waits for the answer.
    fn ask(&self, request: &Request) -> Result<(Reply, Option<OwnedFd>)> {
        let failed = |error| Error::from_io("asking the helper of the sandbox", error);
        let mut link = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        let silent = || {
            let what = "the helper of the sandbox does not answer: start the server again";
            Error::new(ErrorKind::Io, what)
        };
        let socket = link.as_ref().ok_or_else(silent)?;
        send(socket, request, &[]).map_err(failed)?;
        let heard = hear(socket).and_then(|(reply, fds)| {
            // The helper has a descriptor no more once it says so: what is mounted ends with us.
            if !fds.is_empty() && !matches!(hear(socket), Some((Reply::LetGo, _))) {
                return None;
            }
            Some((reply, fds))
        });
        let Some((reply, fds)) = heard else {
            *link = None;
            return Err(silent());
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
        self.files.iter().position(|known| known == file).ok_or_else(nonsense)
    }
}

impl Mounts for Helper {
    fn mount(&self, request: &MountRequest) -> Result<Mounted> {
        let request = Request::Mount {
            file: self.number_of(&request.file)?,
            is_writable: request.is_writable,
            others: match request.allow_other {
                AllowOther::On => Others::On,
                AllowOther::Off => Others::Off,
                AllowOther::Auto => Others::Auto,
            },
            image: request.image,
        };
        match self.ask(&request)? {
            (Reply::Mounted { is_for_others, cleared }, Some(device)) => {
                Ok(Mounted { device, is_for_others, cleared })
            }
            _ => Err(nonsense()),
        }
    }

    fn unmount(&self, file: &Path) -> Result<()> {
        match self.ask(&Request::Unmount { file: self.number_of(file)? })? {
            (Reply::Unmounted, _) => Ok(()),
            _ => Err(nonsense()),
        }
    }
}

/// The next answer, if it comes in time.
fn hear(socket: &OwnedFd) -> Option<(Reply, Vec<OwnedFd>)> {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let count = loop {
        match poll(&mut fds, Some(&ANSWER_LIMIT)) {
            Err(rustix::io::Errno::INTR) => {}
            outcome => break outcome.ok()?,
        }
    };
    if count == 0 {
        return None;
    }
    let (bytes, fds) = receive_with_fds(socket, MESSAGE_BYTES_MAX).ok()?;
    Some((serde_json::from_slice(&bytes).ok()?, fds))
}

fn nonsense() -> Error {
    Error::new(ErrorKind::Io, "the helper of the sandbox was asked or answers nonsense")
}

fn send(socket: &OwnedFd, message: &impl Serialize, fd: &[OwnedFd]) -> std::io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let fds: Vec<_> = fd.iter().map(std::os::fd::AsFd::as_fd).collect();
    send_with_fds(socket, &bytes, &fds)
}

fn bytes_of(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

fn path_of(bytes: Vec<u8>) -> PathBuf {
    OsString::from_vec(bytes).into()
}

/// A socket that is connected to the process that waits at `path` to take over.
fn meet(path: &Path) -> Result<OwnedFd> {
    let connected = || {
        let socket = crate::messages::socket()?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(socket)
    };
    connected().map_err(|error: rustix::io::Errno| {
        Error::from_io(format!("connecting to {}", path.display()), error.into())
    })
}
