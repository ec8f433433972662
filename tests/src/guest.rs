//! A client that writes: concurrent requests, and answers with the server's error. Covers what a
//! test of the write path needs of NBD; the protocol itself is tested elsewhere.

use crate::nbd::{self, Connection, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC};
use crate::server::Server;
use anyhow::{Context, Result, ensure};
use std::collections::HashMap;
use std::io::{Read, Write};

const CMD_WRITE: u16 = 1;
const CMD_FLUSH: u16 = 3;
const CMD_TRIM: u16 = 4;
const CMD_WRITE_ZEROES: u16 = 6;
const FLAG_FUA: u16 = 1;
const FLAG_NO_HOLE: u16 = 2;

/// The numbers of errors in NBD are Linux's.
pub const EIO: u32 = 5;
/// No space left.
pub const ENOSPC: u32 = 28;

/// A guest's requests.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Request {
    /// Bytes from here.
    Read {
        /// Where.
        offset: u64,
        /// How many.
        len: u32,
    },
    /// These bytes, from here on.
    Write {
        /// Where.
        offset: u64,
        /// What.
        bytes: Vec<u8>,
        /// Durable before it is answered.
        fua: bool,
    },
    /// Zeros.
    Zero {
        /// Where.
        offset: u64,
        /// How many.
        len: u32,
        /// The range keeps its space.
        no_hole: bool,
        /// Durable before it is answered.
        fua: bool,
    },
    /// Not needed any more.
    Trim {
        /// Where.
        offset: u64,
        /// How many.
        len: u32,
        /// What becomes of it is durable before it is answered.
        fua: bool,
    },
    /// Everything that was acknowledged becomes durable.
    Flush,
}

/// How the server answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Done; with the bytes of a read.
    Done(Vec<u8>),
    /// Refused with this number.
    Error(u32),
}

impl Answer {
    /// The number of the error; 0 if it was done.
    pub fn errno(&self) -> u32 {
        match self {
            Self::Done(_) => 0,
            Self::Error(errno) => *errno,
        }
    }
}

/// A connection on which requests may be in flight.
#[derive(Debug)]
pub struct Guest {
    connection: Connection,
    /// Bytes that are read by each request that has no answer yet.
    under_way: HashMap<u64, usize>,
    next: u64,
}

impl Guest {
    /// Connects to `server`.
    ///
    /// # Errors
    /// If the handshake fails.
    pub fn connect(server: &Server) -> Result<Self> {
        Ok(Self::on(server.connect(&nbd::Wish::default())?))
    }

    /// On a `connection` with simple replies.
    pub fn on(connection: Connection) -> Self {
        Self { connection, under_way: HashMap::new(), next: 1 }
    }

    /// Length of the disk.
    pub fn len(&self) -> u64 {
        self.connection.len
    }

    /// Whether the disk has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sends `request`; returns its cookie.
    ///
    /// # Errors
    /// If the server is gone.
    pub fn send(&mut self, request: &Request) -> Result<u64> {
        let cookie = self.next;
        self.next += 1;
        let (command, flags, offset, len, data): (u16, u16, u64, u32, &[u8]) = match request {
            Request::Read { offset, len } => (nbd::CMD_READ, 0, *offset, *len, &[]),
            Request::Write { offset, bytes, fua } => {
                (CMD_WRITE, fua_flag(*fua), *offset, u32::try_from(bytes.len())?, bytes)
            }
            Request::Zero { offset, len, no_hole, fua } => {
                let flags = if *no_hole { FLAG_NO_HOLE } else { 0 };
                (CMD_WRITE_ZEROES, flags | fua_flag(*fua), *offset, *len, &[])
            }
            Request::Trim { offset, len, fua } => (CMD_TRIM, fua_flag(*fua), *offset, *len, &[]),
            Request::Flush => (CMD_FLUSH, 0, 0, 0, &[]),
        };
        let head = nbd::request(command, flags, cookie, offset, len);
        self.connection.stream.write_all(&[&head, data].concat())?;
        let reads = if command == nbd::CMD_READ { usize::try_from(len)? } else { 0 };
        self.under_way.insert(cookie, reads);
        Ok(cookie)
    }

    /// The next answer, and the cookie of its request.
    ///
    /// # Errors
    /// If the server is gone or breaks the protocol.
    pub fn receive(&mut self) -> Result<(u64, Answer)> {
        let mut reply = [0; SIMPLE_REPLY_BYTES];
        self.connection.stream.read_exact(&mut reply).context("waiting for an answer")?;
        let (words, _) = reply.as_chunks::<4>();
        let [magic, errno] = [0, 1].map(|index| u32::from_be_bytes(words[index]));
        ensure!(magic == SIMPLE_REPLY_MAGIC, "no reply: {reply:02x?}");
        let cookie = u64::from_be_bytes(*reply.last_chunk().context("a reply has 16 bytes")?);
        let len = self.under_way.remove(&cookie).context("an answer to no request")?;
        if errno != 0 {
            return Ok((cookie, Answer::Error(errno)));
        }
        let mut bytes = vec![0; len];
        self.connection.stream.read_exact(&mut bytes)?;
        Ok((cookie, Answer::Done(bytes)))
    }

    /// Sends `request` and waits for its answer; nothing else may be in flight.
    ///
    /// # Errors
    /// If the server is gone or breaks the protocol.
    pub fn ask(&mut self, request: &Request) -> Result<Answer> {
        ensure!(self.under_way.is_empty(), "answers to others are awaited");
        self.send(request)?;
        Ok(self.receive()?.1)
    }

    /// Writes; the error's number, or 0.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<u32> {
        let request = Request::Write { offset, bytes: bytes.to_vec(), fua: false };
        Ok(self.ask(&request)?.errno())
    }

    /// Flushes; the error's number, or 0.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn flush(&mut self) -> Result<u32> {
        Ok(self.ask(&Request::Flush)?.errno())
    }

    /// Reads; the bytes or the error's number.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn read(&mut self, offset: u64, len: u32) -> Result<Answer> {
        self.ask(&Request::Read { offset, len })
    }

    /// Says goodbye.
    ///
    /// # Errors
    /// If the server is gone.
    pub fn disconnect(self) -> Result<()> {
        self.connection.disconnect()
    }
}

fn fua_flag(fua: bool) -> u16 {
    if fua { FLAG_FUA } else { 0 }
}
