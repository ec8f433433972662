//! The client's side of an NBD handshake, and plain requests for tests. For load see `xtask`'s
//! `load`.

use anyhow::{Context, Result, bail, ensure};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const GREETING: &[u8] = b"NBDMAGICIHAVEOPT";
const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const OPT_GO: u32 = 7;
const OPT_STRUCTURED_REPLY: u32 = 8;
const OPT_SET_META_CONTEXT: u32 = 10;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_META_CONTEXT: u32 = 4;
const REP_ERROR: u32 = 1 << 31;
const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;
/// Fixed newstyle, no zeroes.
const CLIENT_FLAGS: u32 = 3;
/// Bytes of a read of ours.
const READ_BYTES: usize = 1 << 20;
/// How long a server may stay silent.
const SILENCE_MAX: Duration = Duration::from_secs(120);

/// First bytes of a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First bytes of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First bytes of a chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;
/// Bytes of a request's header.
pub const REQUEST_BYTES: usize = 28;
/// Bytes of a simple reply's header.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Bytes of a chunk's header.
pub const CHUNK_BYTES: usize = 20;
/// Command: read.
pub const CMD_READ: u16 = 0;
/// Command: write.
pub const CMD_WRITE: u16 = 1;
/// Command: end the connection.
pub const CMD_DISCONNECT: u16 = 2;
/// Command: make durable what was written.
pub const CMD_FLUSH: u16 = 3;
/// Command: report what is data, hole and zero.
pub const CMD_BLOCK_STATUS: u16 = 7;
/// Request flag: one extent only.
pub const FLAG_REQ_ONE: u16 = 1 << 3;
/// Chunk flag: the last of its reply.
pub const CHUNK_DONE: u16 = 1;
/// Chunk: data at an offset.
pub const CHUNK_DATA: u16 = 1;
/// Chunk: zeros at an offset.
pub const CHUNK_HOLE: u16 = 2;

/// What a client asks for in the handshake.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Wish {
    /// Structured replies; block status needs them.
    pub structured: bool,
    /// The meta context `base:allocation`, for block status.
    pub allocation: bool,
}

/// A client after its handshake.
#[derive(Debug)]
pub struct Connection {
    /// The socket, in transmission.
    pub stream: UnixStream,
    /// Length of the export in bytes.
    pub len: u64,
    /// Its transmission flags.
    pub flags: u16,
    /// Minimum, preferred and maximum block size, if the server states them.
    pub block_sizes: Option<[u32; 3]>,
    /// Whether replies are structured.
    pub structured: bool,
}

/// All bytes of the disk that is served at the unix socket at `path`.
///
/// # Errors
/// If there is no server, or a read fails.
pub fn read_disk(path: &Path) -> Result<Vec<u8>> {
    Connection::open(path, "", &Wish::default())?.read_all()
}

impl Connection {
    /// Connects to the unix socket at `path` and negotiates up to `NBD_OPT_GO`.
    ///
    /// # Errors
    /// If there is no server or it refuses.
    pub fn open(path: &Path, export: &str, wish: &Wish) -> Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(SILENCE_MAX))?;
        stream.set_write_timeout(Some(SILENCE_MAX))?;
        let mut connection =
            Self { stream, len: 0, flags: 0, block_sizes: None, structured: false };
        connection.negotiate(export, wish)?;
        Ok(connection)
    }

    fn negotiate(&mut self, export: &str, wish: &Wish) -> Result<()> {
        let greeting: [u8; 18] = self.take()?;
        ensure!(greeting.starts_with(GREETING), "no NBD server: {greeting:02x?}");
        self.stream.write_all(&CLIENT_FLAGS.to_be_bytes())?;
        if wish.structured || wish.allocation {
            let replies = self.option(OPT_STRUCTURED_REPLY, &[])?;
            ensure!(replies.last().is_some_and(|last| last.0 == REP_ACK), "no structured replies");
            self.structured = true;
        }
        let name = sized(export.as_bytes())?;
        if wish.allocation {
            let queries = [&name[..], &1_u32.to_be_bytes(), &sized(b"base:allocation")?].concat();
            let replies = self.option(OPT_SET_META_CONTEXT, &queries)?;
            let granted = replies.iter().any(|reply| reply.0 == REP_META_CONTEXT);
            ensure!(granted, "no base:allocation");
        }
        let go = [&name[..], &1_u16.to_be_bytes(), &INFO_BLOCK_SIZE.to_be_bytes()].concat();
        for (kind, data) in self.option(OPT_GO, &go)? {
            match data.split_first_chunk().map(|(kind, rest)| (u16::from_be_bytes(*kind), rest)) {
                Some((INFO_EXPORT, rest)) if kind == REP_INFO => {
                    let (len, flags) = rest.split_first_chunk().context("a cut NBD_INFO_EXPORT")?;
                    self.len = u64::from_be_bytes(*len);
                    let flags = flags.first_chunk().context("a cut NBD_INFO_EXPORT")?;
                    self.flags = u16::from_be_bytes(*flags);
                }
                Some((INFO_BLOCK_SIZE, rest)) if kind == REP_INFO => {
                    let sizes = rest.as_chunks::<4>().0;
                    ensure!(sizes.len() == 3, "a cut NBD_INFO_BLOCK_SIZE");
                    self.block_sizes = Some([0, 1, 2].map(|size| u32::from_be_bytes(sizes[size])));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Sends option `option` and gathers the replies up to the one that ends them.
    fn option(&mut self, option: u32, data: &[u8]) -> Result<Vec<(u32, Vec<u8>)>> {
        let len = u32::try_from(data.len())?;
        let head = [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &len.to_be_bytes()];
        self.stream.write_all(&[&head.concat(), data].concat())?;
        let mut replies = Vec::new();
        loop {
            let (magic, of) = (u64::from_be_bytes(self.take()?), u32::from_be_bytes(self.take()?));
            ensure!(magic == OPTION_REPLY_MAGIC && of == option, "a reply to no option of ours");
            let (kind, len) = (u32::from_be_bytes(self.take()?), u32::from_be_bytes(self.take()?));
            ensure!(len <= 1 << 16, "an option's reply of {len} bytes");
            let mut data = vec![0; len as usize];
            self.stream.read_exact(&mut data)?;
            if kind & REP_ERROR != 0 && option == OPT_GO {
                bail!("refused with {kind:#x}: {}", String::from_utf8_lossy(&data));
            }
            let last = kind == REP_ACK || kind & REP_ERROR != 0;
            replies.push((kind, data));
            if last {
                return Ok(replies);
            }
        }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads `len` bytes at `offset`, in requests of a MiB.
    ///
    /// # Errors
    /// If the server refuses or breaks the protocol. The connection must have simple replies.
    pub fn read(&mut self, offset: u64, len: u64) -> Result<Vec<u8>> {
        ensure!(!self.structured, "replies are structured");
        let mut bytes = vec![0; usize::try_from(len)?];
        for (number, piece) in (0_u64..).zip(bytes.chunks_mut(READ_BYTES)) {
            let at = offset + number * READ_BYTES as u64;
            let request = request(CMD_READ, 0, number, at, u32::try_from(piece.len())?);
            self.stream.write_all(&request)?;
            let reply: [u8; SIMPLE_REPLY_BYTES] = self.take()?;
            let [magic, error, ..] = *reply.as_chunks::<4>().0 else { bail!("a cut reply") };
            ensure!(u32::from_be_bytes(magic) == SIMPLE_REPLY_MAGIC, "no reply: {reply:02x?}");
            let error = u32::from_be_bytes(error);
            ensure!(error == 0, "the read of {} bytes at {at} fails with {error}", piece.len());
            ensure!(reply[8..] == number.to_be_bytes(), "a reply to another request");
            self.stream.read_exact(piece)?;
        }
        Ok(bytes)
    }

    /// Reads the whole export.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_all(&mut self) -> Result<Vec<u8>> {
        self.read(0, self.len)
    }

    /// Ends the connection as a client should.
    ///
    /// # Errors
    /// If the server is gone.
    pub fn disconnect(mut self) -> Result<()> {
        self.stream.write_all(&request(CMD_DISCONNECT, 0, 0, 0, 0))?;
        Ok(())
    }
}

/// The bytes of a request.
pub fn request(
    command: u16,
    flags: u16,
    cookie: u64,
    offset: u64,
    len: u32,
) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&command.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// `bytes` after their length.
fn sized(bytes: &[u8]) -> Result<Vec<u8>> {
    Ok([&u32::try_from(bytes.len())?.to_be_bytes()[..], bytes].concat())
}
