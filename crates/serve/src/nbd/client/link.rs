//! The connection after an export was chosen: requests of many tasks, and the thread that takes the
//! answers.
//!
//! Invariants
//! - L1 A request is in the table before it goes out, and leaves it with its outcome. Only the
//!   thread takes it out, or the end of the connection.
//! - L2 The end comes once, with its reason: all requests in the table get it, and all later ones.
//! - L3 No lock is held while the thread waits for bytes, so that requests go out meanwhile. One is
//!   held while a request goes out: it is a few bytes, and [`IN_FLIGHT_MAX`] of them fit in what a
//!   socket takes.

use super::reply::{ReadReply, Reply, StatusReply};
use super::{Part, broken, command, plain};
use crate::nbd::protocol::Request;
use crate::nbd::protocol::peer::{ChunkKind, ReplyHead, decode_error, decode_status};
use futures_channel::oneshot::channel;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::Buf;
use mica_rt::sync::Waiters;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

/// Half of how long a server may be silent while something waits for it.
pub(super) const SILENCE: Duration = Duration::from_secs(150);
/// Requests under way.
const IN_FLIGHT_MAX: usize = 256;
/// Bytes of a chunk without data, at most.
const CHUNK_BYTES_MAX: u32 = 64 << 20;

/// A socket. Its ends are used by different threads.
pub(super) trait Connection: Send + Sync {
    fn read(&self, bytes: &mut [u8]) -> io::Result<usize>;
    fn write(&self, bytes: &[u8]) -> io::Result<()>;
    /// How long a read or a write may wait from now on.
    fn limit(&self, silence: Duration) -> io::Result<()>;
    /// Ends it: a read that waits returns.
    fn shut(&self);
}

macro_rules! socket {
    ($kind:ty) => {
        impl Connection for $kind {
            fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
                io::Read::read(&mut &*self, bytes)
            }

            fn write(&self, bytes: &[u8]) -> io::Result<()> {
                io::Write::write_all(&mut &*self, bytes)
            }

            fn limit(&self, silence: Duration) -> io::Result<()> {
                self.set_read_timeout(Some(silence))?;
                self.set_write_timeout(Some(silence))
            }

            fn shut(&self) {
                // One that is gone is as good.
                let _ = self.shutdown(Shutdown::Both);
            }
        }
    };
}

socket!(UnixStream);
socket!(TcpStream);

/// What a server says, in order.
pub(super) struct Input(BufReader<Incoming>);

struct Incoming(Arc<dyn Connection>);

impl Read for Incoming {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Input {
    pub(super) fn new(connection: Arc<dyn Connection>) -> Self {
        Self(BufReader::new(Incoming(connection)))
    }

    /// Whether nothing came that was not taken.
    pub(super) fn is_empty(&self) -> bool {
        self.0.buffer().is_empty()
    }

    pub(super) fn take<const LEN: usize>(&mut self) -> Result<[u8; LEN]> {
        let mut bytes = [0; LEN];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.0.read_exact(bytes).map_err(lost)
    }

    /// So many bytes, for which memory is only taken as they come.
    pub(super) fn take_bytes(&mut self, len: u32) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = (&mut self.0).take(len.into()).read_to_end(&mut bytes).map_err(lost)?;
        match read as u64 == u64::from(len) {
            true => Ok(bytes),
            false => Err(lost(io::ErrorKind::UnexpectedEof.into())),
        }
    }
}

/// Why there is no connection any more.
pub(super) fn lost(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => broken("the server has ended the connection"),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            broken("the server does not answer any more")
        }
        _ => Error::from_io("the connection to the server is lost", error),
    }
}

/// What is done through a connection. Dropping it ends that.
pub(super) struct Link {
    shared: Arc<Shared>,
    /// Of the contexts that were selected, in their order.
    contexts: Arc<[u32]>,
}

struct Shared {
    table: Mutex<Table>,
    /// Tasks for which there was no room in the table.
    room: Waiters,
    /// One request goes out at a time.
    sending: Mutex<()>,
    connection: Arc<dyn Connection>,
}

#[derive(Default)]
struct Table {
    pending: HashMap<u64, Reply>,
    next_cookie: u64,
    /// Why there is no connection any more (L2).
    end: Option<Error>,
}

impl Link {
    /// Starts the thread, which goes on with `input`.
    pub(super) fn start(
        connection: Arc<dyn Connection>,
        input: Input,
        contexts: Vec<u32>,
    ) -> Result<Self> {
        // Twice as long as this is what is too long: see `Answers::wait`.
        connection.limit(SILENCE).map_err(lost)?;
        let (link, answers) = Self::new(connection, input, contexts);
        let thread = std::thread::Builder::new().name("nbd".to_owned());
        let started = thread.spawn(move || answers.take_all());
        started.map_err(|error| Error::from_io("starting a thread for the connection", error))?;
        Ok(link)
    }

    /// The link, and what its thread does.
    pub(super) fn new(
        connection: Arc<dyn Connection>,
        input: Input,
        contexts: Vec<u32>,
    ) -> (Self, Answers) {
        let shared = Arc::new(Shared {
            table: Mutex::default(),
            room: Waiters::default(),
            sending: Mutex::default(),
            connection,
        });
        let answers = Answers { input, shared: Arc::clone(&shared) };
        (Self { shared, contexts: contexts.into() }, answers)
    }

    /// Fills `buf` from `at` on; errors are those of [`super::Client::read`].
    pub(super) async fn read(&self, at: u64, buf: Buf) -> (Result<()>, Buf) {
        let (answer, answered) = channel();
        let len = buf.len() as u64;
        self.ask(command::READ, at, len, Reply::Read(ReadReply::new(at, buf, answer))).await;
        answered.await.unwrap_or_else(|_| (Err(no_answer()), Buf::new(0)))
    }

    /// What the contexts say from `at` on: at least of a byte, of `len` at most.
    pub(super) async fn status(&self, at: u64, len: u64) -> Result<Vec<Part>> {
        let (answer, answered) = channel();
        let reply = StatusReply::new(Arc::clone(&self.contexts), len, answer);
        self.ask(command::BLOCK_STATUS, at, len, Reply::Status(reply)).await;
        answered.await.unwrap_or_else(|_| Err(no_answer()))
    }

    async fn ask(&self, command: u16, offset: u64, len: u64, reply: Reply) {
        let Ok(len) = u32::try_from(len) else {
            reply.fail(Error::new(ErrorKind::Invalid, "a request is too long"));
            return;
        };
        let mut reply = Some(reply);
        let shared = &*self.shared;
        let admitted = shared.room.until(|| shared.table().admit(&mut reply)).await;
        let Some(cookie) = admitted else { return };
        shared.send(&Request { flags: 0, command, cookie, offset, len });
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // A server that hears it ends the connection without a complaint in its log.
        let disconnect = Request { flags: 0, command: command::DISC, cookie: 0, offset: 0, len: 0 };
        self.shared.send(&disconnect);
        self.shared.end(broken("the connection was closed"));
    }
}

fn no_answer() -> Error {
    broken("the connection to the server has failed")
}

impl Table {
    /// Its cookie if there is room; nothing yet if not. `None` within if it failed at once.
    fn admit(&mut self, reply: &mut Option<Reply>) -> Option<Option<u64>> {
        if let Some(error) = &self.end {
            if let Some(reply) = reply.take() {
                reply.fail(error.clone());
            }
            return Some(None);
        }
        if self.pending.len() >= IN_FLIGHT_MAX {
            return None;
        }
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        self.pending.extend(reply.take().map(|reply| (cookie, reply)));
        Some(Some(cookie))
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    fn send(&self, request: &Request) {
        let sent = {
            let _turn = self.sending.lock();
            self.connection.write(&request.encode())
        };
        if let Err(error) = sent {
            self.end(lost(error));
        }
    }

    fn end(&self, error: Error) {
        let (reason, pending) = {
            let mut table = self.table();
            let reason = table.end.get_or_insert(error).clone();
            (reason, std::mem::take(&mut table.pending))
        };
        self.connection.shut();
        pending.into_values().for_each(|reply| reply.fail(reason.clone()));
        self.room.wake_all();
    }
}

/// What the thread does.
pub(super) struct Answers {
    input: Input,
    shared: Arc<Shared>,
}

impl Drop for Answers {
    /// Also if it panicked, nobody waits for ever.
    fn drop(&mut self) {
        self.shared.end(no_answer());
    }
}

impl Answers {
    /// Takes answers until the connection ends.
    pub(super) fn take_all(mut self) {
        while self.step() {}
    }

    /// Takes one answer, or the first part of it. Returns whether the connection goes on.
    pub(super) fn step(&mut self) -> bool {
        self.take_one().map_err(|error| self.shared.end(error)).is_ok()
    }

    fn take_one(&mut self) -> Result<()> {
        self.wait()?;
        let senseless = |_| broken("an answer makes no sense");
        let head = ReplyHead::decode(&self.input.take()?).map_err(senseless)?;
        let (ReplyHead::Simple { cookie, .. } | ReplyHead::Chunk { cookie, .. }) = head;
        let pending = self.shared.table().pending.remove(&cookie);
        let Some(mut reply) = pending else { return Err(broken("an answer to nothing")) };
        let taken = match head {
            ReplyHead::Simple { error, .. } => self.simple(error, &mut reply).map(|()| true),
            ReplyHead::Chunk { kind, is_last, .. } => ChunkKind::decode(kind)
                .map_err(senseless)
                .and_then(|kind| self.chunk(kind, is_last, &mut reply))
                .map(|()| is_last),
        };
        match taken {
            Ok(true) => {
                let complete = reply.complete();
                self.shared.room.wake_all();
                complete
            }
            Ok(false) => self.put_back(cookie, reply),
            Err(error) => {
                reply.fail(error.clone());
                Err(error)
            }
        }
    }

    /// The rest of a reply is to come; unless the connection ended meanwhile.
    fn put_back(&self, cookie: u64, reply: Reply) -> Result<()> {
        let mut table = self.shared.table();
        match table.end.clone() {
            None => {
                table.pending.insert(cookie, reply);
                Ok(())
            }
            Some(error) => {
                drop(table);
                reply.fail(error.clone());
                Err(error)
            }
        }
    }

    /// Waits for the next answer: as long as it takes if there is nothing to answer.
    fn wait(&mut self) -> Result<()> {
        let mut was_silent = false;
        loop {
            match self.input.0.fill_buf() {
                Ok([]) => return Err(lost(io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                    ) =>
                {
                    let is_waited_for = !self.shared.table().pending.is_empty();
                    if is_waited_for && was_silent {
                        return Err(lost(error));
                    }
                    was_silent = is_waited_for;
                }
                Err(error) => return Err(lost(error)),
            }
        }
    }

    fn simple(&mut self, error: u32, reply: &mut Reply) -> Result<()> {
        match reply {
            _ if error != 0 => reply.note(reported(error, &[]))?,
            Reply::Read(read) => {
                let len = u32::try_from(read.buf.len()).map_err(|_| broken("a long read"))?;
                let place = read.place(read.at, len)?;
                self.input.fill(&mut read.buf.own_bytes()[place])?;
            }
            Reply::Status(_) => return Err(broken("a status says nothing")),
        }
        Ok(())
    }

    fn chunk(&mut self, kind: ChunkKind, is_last: bool, reply: &mut Reply) -> Result<()> {
        let len = u32::from_be_bytes(self.input.take()?);
        match (kind, reply) {
            (ChunkKind::Data, Reply::Read(read)) => {
                let len = len.checked_sub(8).ok_or_else(|| broken("data is too short"))?;
                let at = u64::from_be_bytes(self.input.take()?);
                let place = read.place(at, len)?;
                self.input.fill(&mut read.buf.own_bytes()[place])
            }
            (ChunkKind::Hole, Reply::Read(read)) if len == 12 => {
                let at = u64::from_be_bytes(self.input.take()?);
                let place = read.place(at, u32::from_be_bytes(self.input.take()?))?;
                read.buf.fill_part(place, 0);
                Ok(())
            }
            (ChunkKind::Status, Reply::Status(status)) if len <= CHUNK_BYTES_MAX => {
                let bytes = self.input.take_bytes(len)?;
                let (id, parts) =
                    decode_status(&bytes).map_err(|_| broken("a status makes no sense"))?;
                status.tell(id, parts)
            }
            (ChunkKind::None, _) if len == 0 && is_last => Ok(()),
            (ChunkKind::Error, reply) if len <= CHUNK_BYTES_MAX => {
                let bytes = self.input.take_bytes(len)?;
                let (error, text) =
                    decode_error(&bytes).map_err(|_| broken("an error makes no sense"))?;
                reply.note(reported(error, text))
            }
            _ => Err(broken("an answer is of another kind than what was asked")),
        }
    }
}

/// An error that the server reports; the numbers are those of Linux.
fn reported(error: u32, text: &[u8]) -> Error {
    let why = match plain(text) {
        text if text.is_empty() => {
            let number = i32::try_from(error).unwrap_or(0);
            io::Error::from_raw_os_error(number).to_string()
        }
        text => text,
    };
    broken(&format!("the server reports an error: {why}"))
}
