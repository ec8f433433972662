//! A client of an NBD server, as far as a backup needs one: fixed newstyle, structured replies,
//! contexts. It waits for what it asked.

use super::uri::{Place, Uri};
use mica_block::{Error, ErrorKind, Result};
use mica_rt::Buf;
use mica_units::{GuestRange, SECTOR_BYTES};
use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// What a part is allocated.
pub(super) const BASE_ALLOCATION: &str = "base:allocation";
/// A flag of that: it reads as zeros.
pub(super) const ZERO: u32 = 2;
/// The flag of a part that a dirty bitmap has.
pub(super) const DIRTY: u32 = 1;

/// How long a server may be silent.
const SILENCE_MAX: Duration = Duration::from_secs(300);
/// Bytes of an answer to an option, and of a chunk without data, at most.
const REPLY_BYTES_MAX: u32 = 64 << 20;
/// Bytes that each answer to an option counts as besides its own: it takes memory, too.
const REPLY_BYTES: u32 = 64;

const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";
const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;
const OPT_GO: u32 = 7;
const OPT_STRUCTURED_REPLY: u32 = 8;
const OPT_LIST_META_CONTEXT: u32 = 9;
const OPT_SET_META_CONTEXT: u32 = 10;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_META_CONTEXT: u32 = 4;
const REP_ERROR: u32 = 1 << 31;
const INFO_EXPORT: u16 = 0;
const INFO_DESCRIPTION: u16 = 2;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;
const CMD_READ: u16 = 0;
const CMD_BLOCK_STATUS: u16 = 7;
const CHUNK_DONE: u16 = 1;
const CHUNK_NONE: u16 = 0;
const CHUNK_OFFSET_DATA: u16 = 1;
const CHUNK_OFFSET_HOLE: u16 = 2;
const CHUNK_BLOCK_STATUS: u16 = 5;
const CHUNK_ERROR: u16 = 1 << 15;

trait Connection: Read + Write {}
impl<T: Read + Write> Connection for T {}

/// A connection to one export.
pub(super) struct Client {
    stream: BufReader<Box<dyn Connection>>,
    export: String,
    /// Their numbers here, in the order in which they were asked for.
    contexts: Vec<u32>,
    len: u64,
}

/// What is told of an export.
pub(super) struct Export {
    pub(super) len: u64,
    pub(super) description: String,
}

/// A part of the export, and the flags that the contexts have there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Part {
    pub(super) len: u64,
    pub(super) allocation: u32,
    /// 0 if no bitmap was asked for.
    pub(super) bitmap: u32,
}

impl Client {
    pub(super) fn connect(uri: &Uri) -> Result<Self> {
        let failed = |error| Error::from_io("connecting", error);
        let limits = Some(SILENCE_MAX);
        let stream: Box<dyn Connection> = match &uri.place {
            Place::Unix(path) => {
                let stream = UnixStream::connect(path).map_err(failed)?;
                stream.set_read_timeout(limits).map_err(failed)?;
                stream.set_write_timeout(limits).map_err(failed)?;
                Box::new(stream)
            }
            Place::Tcp { host, port } => {
                let stream = TcpStream::connect((&**host, *port)).map_err(failed)?;
                stream.set_read_timeout(limits).map_err(failed)?;
                stream.set_write_timeout(limits).map_err(failed)?;
                stream.set_nodelay(true).map_err(failed)?;
                Box::new(stream)
            }
        };
        Self::greet(stream, uri.export.clone())
    }

    fn greet(stream: Box<dyn Connection>, export: String) -> Result<Self> {
        let mut client =
            Self { stream: BufReader::new(stream), export, contexts: Vec::new(), len: 0 };
        if client.take::<16>()? != *GREETING {
            return Err(broken("this is no NBD server of today"));
        }
        let flags = u16::from_be_bytes(client.take()?) & (FIXED_NEWSTYLE | NO_ZEROES);
        if flags & FIXED_NEWSTYLE == 0 {
            return Err(broken("the server is too old: it lacks fixed newstyle"));
        }
        client.send(&[&u32::from(flags).to_be_bytes()])?;
        client.option(OPT_STRUCTURED_REPLY, &[])?;
        Ok(client)
    }

    /// The contexts that the export has and that begin with `namespace`.
    pub(super) fn list(&mut self, namespace: &str) -> Result<Vec<String>> {
        let replies = self.contexts(OPT_LIST_META_CONTEXT, &[namespace])?;
        Ok(replies.into_iter().map(|(_, name)| name).collect())
    }

    /// Selects these contexts. Returns one that the server lacks.
    pub(super) fn select<'a>(&mut self, wanted: &[&'a str]) -> Result<Option<&'a str>> {
        let replies = self.contexts(OPT_SET_META_CONTEXT, wanted)?;
        self.contexts.clear();
        for wanted in wanted {
            let found = replies.iter().find(|(_, name)| name == wanted);
            let Some((id, _)) = found else { return Ok(Some(wanted)) };
            self.contexts.push(*id);
        }
        Ok(None)
    }

    fn contexts(&mut self, option: u32, queries: &[&str]) -> Result<Vec<(u32, String)>> {
        let mut payload = string(&self.export);
        payload.extend(count(queries.len()));
        queries.iter().for_each(|query| payload.extend(string(query)));
        let mut contexts = Vec::new();
        for (kind, bytes) in self.option(option, &payload)? {
            if let (REP_META_CONTEXT, Some((id, name))) = (kind, bytes.split_first_chunk()) {
                contexts.push((u32::from_be_bytes(*id), String::from_utf8_lossy(name).into()));
            }
        }
        Ok(contexts)
    }

    /// Ends the options.
    pub(super) fn go(&mut self) -> Result<Export> {
        let mut payload = string(&self.export);
        payload.extend(1_u16.to_be_bytes());
        payload.extend(INFO_DESCRIPTION.to_be_bytes());
        let (mut len, mut description) = (None, String::new());
        for (kind, bytes) in self.option(OPT_GO, &payload)? {
            let Some((info, rest)) = bytes.split_first_chunk().filter(|_| kind == REP_INFO) else {
                continue;
            };
            match u16::from_be_bytes(*info) {
                INFO_EXPORT => len = rest.first_chunk().map(|len| u64::from_be_bytes(*len)),
                INFO_DESCRIPTION => description = String::from_utf8_lossy(rest).into(),
                _ => {}
            }
        }
        let len = len.filter(|len| *len < 1 << 62);
        self.len = len.ok_or_else(|| broken("the server does not tell a length"))?;
        Ok(Export { len: self.len, description })
    }

    /// Sends an option; returns the answers before the last.
    fn option(&mut self, option: u32, payload: &[u8]) -> Result<Vec<(u32, Vec<u8>)>> {
        let (magic, number) = (OPTION_MAGIC.to_be_bytes(), option.to_be_bytes());
        self.send(&[&magic, &number, &count(payload.len()), payload])?;
        let mut replies = Vec::new();
        let mut bytes_left = REPLY_BYTES_MAX;
        loop {
            let magic = u64::from_be_bytes(self.take()?);
            let of = u32::from_be_bytes(self.take()?);
            let kind = u32::from_be_bytes(self.take()?);
            let len = u32::from_be_bytes(self.take()?);
            let left = bytes_left.checked_sub(REPLY_BYTES).and_then(|left| left.checked_sub(len));
            let left = left.filter(|_| magic == OPTION_REPLY_MAGIC && of == option);
            bytes_left =
                left.ok_or_else(|| broken("the server's answer to an option makes no sense"))?;
            let bytes = self.take_bytes(len)?;
            match kind {
                REP_ACK => return Ok(replies),
                kind if kind & REP_ERROR != 0 => return Err(refused(option, &bytes)),
                kind => replies.push((kind, bytes)),
            }
        }
    }

    /// As [`Self::status`], of whole sectors.
    pub(super) fn status_of_sectors(&mut self, at: u64, len: u64) -> Result<Vec<Part>> {
        let mut parts = Vec::new();
        let (mut told, mut wanted) = (0, len);
        // A server may stop within a sector: then the rest of that is asked for.
        while wanted > 0 {
            let more = self.status(at + told, wanted)?;
            told += more.iter().map(|part| part.len).sum::<u64>();
            parts.extend(more);
            wanted = told.next_multiple_of(SECTOR_BYTES) - told;
        }
        Ok(whole_sectors(&parts))
    }

    /// What the contexts say of the parts from `at` on: at least of a byte, of `len` at most.
    pub(super) fn status(&mut self, at: u64, len: u64) -> Result<Vec<Part>> {
        self.request(CMD_BLOCK_STATUS, 0, at, len)?;
        let mut told: Vec<Option<Vec<(u64, u32)>>> = vec![None; self.contexts.len()];
        loop {
            let chunk = self.chunk()?;
            if chunk.kind == CHUNK_BLOCK_STATUS {
                let bytes = self.take_bytes(chunk.len)?;
                let (id, parts) =
                    bytes.split_first_chunk().ok_or_else(|| broken("a status is too short"))?;
                let id = u32::from_be_bytes(*id);
                let (parts, rest) = parts.as_chunks::<8>();
                let context = self.contexts.iter().position(|context| *context == id);
                let (Some(context), true) = (context, rest.is_empty() && !parts.is_empty()) else {
                    return Err(broken("a status is of something else"));
                };
                let part = |bytes: &[u8; 8]| {
                    let (len, flags) = bytes.split_at(4);
                    let number = |half: &[u8]| half.iter().fold(0, |n, b| n << 8 | u32::from(*b));
                    (u64::from(number(len)), number(flags))
                };
                told[context] = Some(parts.iter().map(part).collect());
            } else {
                self.skip_or_fail(&chunk)?;
            }
            if chunk.is_last {
                break;
            }
        }
        let told: Option<Vec<_>> = told.into_iter().collect();
        merged(&told.ok_or_else(|| broken("a status lacks a context"))?, len)
    }

    /// The bytes of these parts of the export.
    pub(super) fn read(&mut self, ranges: &[GuestRange]) -> Result<Vec<Buf>> {
        for (range, cookie) in ranges.iter().zip(0..) {
            self.request(CMD_READ, cookie, range.start().bytes(), range.len())?;
        }
        let reply = |range: &GuestRange| usize::try_from(range.len()).map(ReadReply::new);
        let replies: std::result::Result<Vec<_>, _> = ranges.iter().map(reply).collect();
        let mut replies = replies.map_err(|_| broken("a read is too long"))?;
        let mut under_way = ranges.len();
        while under_way > 0 {
            let chunk = self.chunk()?;
            let index = usize::try_from(chunk.cookie).ok().filter(|index| *index < ranges.len());
            let index = index.ok_or_else(|| broken("an answer to nothing"))?;
            let reply = &mut replies[index];
            if reply.is_done {
                return Err(broken("an answer to what was answered"));
            }
            match chunk.kind {
                CHUNK_OFFSET_DATA | CHUNK_OFFSET_HOLE => {
                    self.fill(&chunk, &ranges[index], reply)?;
                }
                _ => self.skip_or_fail(&chunk)?,
            }
            if chunk.is_last {
                under_way -= 1;
                reply.is_done = true;
                if reply.has.contains(&false) {
                    return Err(broken("a read got too few bytes"));
                }
            }
        }
        Ok(replies.into_iter().map(|reply| reply.buf).collect())
    }

    /// Puts a chunk of data where it belongs.
    fn fill(&mut self, chunk: &Chunk, range: &GuestRange, reply: &mut ReadReply) -> Result<()> {
        let is_hole = chunk.kind == CHUNK_OFFSET_HOLE;
        let head = if is_hole { 12 } else { 8 };
        let rest = chunk.len.checked_sub(head).filter(|rest| !is_hole || *rest == 0);
        let rest = rest.ok_or_else(|| broken("data is too short"))?;
        let at = u64::from_be_bytes(self.take()?);
        let len = if is_hole { u32::from_be_bytes(self.take()?) } else { rest };
        let start = at.checked_sub(range.start().bytes());
        let start = start.filter(|start| {
            start.checked_add(u64::from(len)).is_some_and(|end| end <= range.len())
        });
        let start = start.and_then(|start| usize::try_from(start).ok());
        let start = start.ok_or_else(|| broken("data of another place"))?;
        let end = start + usize::try_from(len).expect("within the buffer");
        let has = &mut reply.has[start..end];
        if has.contains(&true) {
            return Err(broken("data comes twice"));
        }
        has.fill(true);
        match is_hole {
            true => reply.buf.fill_part(start..end, 0),
            false => {
                let bytes = &mut reply.buf.own_bytes()[start..end];
                self.stream.read_exact(bytes).map_err(lost)?;
            }
        }
        Ok(())
    }

    /// Reads a chunk that has nothing, or why something failed.
    fn skip_or_fail(&mut self, chunk: &Chunk) -> Result<()> {
        let bytes = self.take_bytes(chunk.len)?;
        if chunk.kind == CHUNK_NONE {
            return Ok(());
        }
        if chunk.kind & CHUNK_ERROR == 0 {
            return Err(broken("an answer of an unknown kind"));
        }
        let error = bytes.first_chunk().map_or(0, |error| i32::from_be_bytes(*error));
        let text = bytes.get(6..).map(String::from_utf8_lossy).unwrap_or_default();
        Err(failed_there(error, &text))
    }

    fn request(&mut self, command: u16, cookie: u64, at: u64, len: u64) -> Result<()> {
        let len = u32::try_from(len).map_err(|_| broken("a request is too long"))?;
        let flags_and_kind = u32::from(command).to_be_bytes();
        let (cookie, at) = (cookie.to_be_bytes(), at.to_be_bytes());
        self.send(&[
            &REQUEST_MAGIC.to_be_bytes(),
            &flags_and_kind,
            &cookie,
            &at,
            &len.to_be_bytes(),
        ])
    }

    fn chunk(&mut self) -> Result<Chunk> {
        let magic = u32::from_be_bytes(self.take()?);
        if magic == SIMPLE_REPLY_MAGIC {
            let error = i32::from_be_bytes(self.take()?);
            return Err(failed_there(error, ""));
        }
        let flags = u16::from_be_bytes(self.take()?);
        let kind = u16::from_be_bytes(self.take()?);
        let cookie = u64::from_be_bytes(self.take()?);
        let len = u32::from_be_bytes(self.take()?);
        if magic != CHUNK_MAGIC || len > REPLY_BYTES_MAX {
            return Err(broken("an answer makes no sense"));
        }
        Ok(Chunk { kind, cookie, len, is_last: flags & CHUNK_DONE != 0 })
    }

    fn send(&mut self, parts: &[&[u8]]) -> Result<()> {
        self.stream.get_mut().write_all(&parts.concat()).map_err(lost)
    }

    fn take<const LEN: usize>(&mut self) -> Result<[u8; LEN]> {
        let mut bytes = [0; LEN];
        self.stream.read_exact(&mut bytes).map_err(lost)?;
        Ok(bytes)
    }

    /// So many bytes, for which memory is only taken as they come.
    fn take_bytes(&mut self, len: u32) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = (&mut self.stream).take(len.into()).read_to_end(&mut bytes).map_err(lost)?;
        match read as u64 == u64::from(len) {
            true => Ok(bytes),
            false => Err(lost(std::io::ErrorKind::UnexpectedEof.into())),
        }
    }
}

/// What a chunk of an answer begins with.
struct Chunk {
    kind: u16,
    cookie: u64,
    len: u32,
    is_last: bool,
}

/// What came of a read.
struct ReadReply {
    /// Bytes that do not come are those of nobody else.
    buf: Buf,
    /// Which bytes came.
    has: Vec<bool>,
    is_done: bool,
}

impl ReadReply {
    fn new(len: usize) -> Self {
        Self { buf: Buf::zeroed(len), has: vec![false; len], is_done: false }
    }
}

/// The parts, which together are whole sectors, with ends at sectors: one that has several is dirty
/// if any of them is, and zeros if all are.
fn whole_sectors(parts: &[Part]) -> Vec<Part> {
    let mut whole = Vec::with_capacity(parts.len());
    let mut begun: Option<Part> = None;
    for part in parts {
        let mut left = *part;
        if let Some(mut sector) = begun.take() {
            let taken = left.len.min(SECTOR_BYTES - sector.len);
            sector.len += taken;
            sector.allocation &= left.allocation;
            sector.bitmap |= left.bitmap;
            left.len -= taken;
            if sector.len < SECTOR_BYTES {
                begun = Some(sector);
                continue;
            }
            whole.push(sector);
        }
        let rest = left.len % SECTOR_BYTES;
        if left.len > rest {
            whole.push(Part { len: left.len - rest, ..left });
        }
        begun = (rest > 0).then_some(Part { len: rest, ..left });
    }
    assert!(begun.is_none(), "whole sectors");
    whole
}

/// The parts for which all contexts say the same, as far as all say something, and at most `len`.
fn merged(told: &[Vec<(u64, u32)>], len: u64) -> Result<Vec<Part>> {
    let total = |parts: &Vec<(u64, u32)>| {
        parts.iter().try_fold(0_u64, |sum, (len, _)| sum.checked_add(*len)).unwrap_or(u64::MAX)
    };
    let end = told.iter().map(total).min().unwrap_or(0).min(len);
    if end == 0 {
        return Err(broken("a status says nothing"));
    }
    // Empty parts say nothing.
    let mut sides = told.iter().map(|parts| parts.iter().copied().filter(|part| part.0 > 0));
    let (mut first, mut second) = (sides.next().into_iter().flatten(), sides.next());
    let (mut parts, mut at) = (Vec::new(), 0);
    let (mut one, mut other) = ((0, 0), (0, 0));
    while at < end {
        if one.0 == 0 {
            one = first.next().unwrap_or((end - at, 0));
        }
        if other.0 == 0 {
            other = second.as_mut().and_then(Iterator::next).unwrap_or((end - at, 0));
        }
        let len = one.0.min(other.0).min(end - at);
        parts.push(Part { len, allocation: one.1, bitmap: other.1 });
        (one.0, other.0, at) = (one.0 - len, other.0 - len, at + len);
    }
    Ok(parts)
}

fn string(text: &str) -> Vec<u8> {
    [&count(text.len()), text.as_bytes()].concat()
}

fn count(count: usize) -> [u8; 4] {
    u32::try_from(count).expect("a command line is short").to_be_bytes()
}

fn broken(what: &str) -> Error {
    Error::new(ErrorKind::Io, what)
}

fn lost(error: std::io::Error) -> Error {
    Error::from_io("the connection to the server is lost", error)
}

/// An error that the server reports; the numbers are those of Linux.
fn failed_there(error: i32, text: &str) -> Error {
    let why = match text {
        "" => std::io::Error::from_raw_os_error(error).to_string(),
        text => text.chars().filter(|letter| !letter.is_control()).collect(),
    };
    broken(&format!("the server reports an error: {why}"))
}

fn refused(option: u32, bytes: &[u8]) -> Error {
    let text = String::from_utf8_lossy(bytes);
    let text: String = text.chars().filter(|letter| !letter.is_control()).collect();
    let why = if text.is_empty() { String::new() } else { format!(": {text}") };
    let what = match option {
        OPT_STRUCTURED_REPLY => "the server lacks structured replies",
        OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => "the server refuses contexts",
        _ => "the server refuses the export",
    };
    broken(&format!("{what}{why}"))
}

#[cfg(test)]
mod tests;
