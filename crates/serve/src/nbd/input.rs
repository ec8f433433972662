//! From received bytes to requests: a receive buffer, and where in it the session is.
//!
//! One receive may bring many requests, or a part of one; a request's payload may be longer than
//! the buffer. A request is given out when all of it is there.

use super::limits::{
    PAYLOAD_BYTES_SKIPPED_MAX, PAYLOAD_STEP_BYTES, RECEIVE_BYTES_MAX, RECEIVE_BYTES_MIN,
};
use super::protocol::{Malformed, Request};
use mica_rt::Buf;

/// What the received bytes hold next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    Request(Request),
    /// Everything received is used up.
    NeedBytes,
}

/// The receiving side of a session.
pub(super) struct Input {
    /// Absent while a receive owns it.
    buf: Option<Buf>,
    at: usize,
    end: usize,
    /// The start of a header whose rest has not come yet.
    header: [u8; Request::BYTES],
    header_len: usize,
    /// A request whose payload is being skipped, and how much of that is to come.
    skipping: Option<(Request, u32)>,
    /// Counts the bytes of payloads, for [`Input::steps`].
    payload_bytes: u64,
}

impl Input {
    /// Starts with `bytes`, which the client sent right behind its last option.
    pub(super) fn new(bytes: &[u8]) -> Self {
        let mut buf = Buf::new(bytes.len().max(RECEIVE_BYTES_MIN));
        buf[..bytes.len()].copy_from_slice(bytes);
        Self {
            buf: Some(buf),
            at: 0,
            end: bytes.len(),
            header: [0; Request::BYTES],
            header_len: 0,
            skipping: None,
            payload_bytes: 0,
        }
    }

    /// The buffer for a receive, once everything in it is used up.
    pub(super) fn take_buf(&mut self) -> Option<Buf> {
        if self.at == self.end { self.buf.take() } else { None }
    }

    /// Takes a buffer back that holds `count` received bytes.
    pub(super) fn put_buf(&mut self, mut buf: Buf, count: usize) {
        assert!(count <= buf.len(), "more was received than fits");
        // Small requests never fill it; a payload does.
        if count == buf.len() && self.skipping.is_some() && count < RECEIVE_BYTES_MAX {
            let mut larger = Buf::new(RECEIVE_BYTES_MAX);
            larger[..count].copy_from_slice(&buf);
            buf = larger;
        }
        self.buf = Some(buf);
        self.at = 0;
        self.end = count;
    }

    /// The next request.
    pub(super) fn next(&mut self) -> Result<Next, Malformed> {
        loop {
            let Some(buf) = &self.buf else { return Ok(Next::NeedBytes) };
            let bytes = &buf[self.at..self.end];
            if let Some((request, left)) = &mut self.skipping {
                let skipped = bytes.len().min(*left as usize);
                self.at += skipped;
                self.payload_bytes += skipped as u64;
                *left -= u32::try_from(skipped).expect("at most `left`");
                if *left > 0 {
                    return Ok(Next::NeedBytes);
                }
                let request = *request;
                self.skipping = None;
                return Ok(Next::Request(request));
            }
            let request = match (self.header_len, bytes.first_chunk()) {
                (0, Some(header)) => {
                    self.at += Request::BYTES;
                    Request::decode(header)?
                }
                (have, _) => {
                    let taken = bytes.len().min(Request::BYTES - have);
                    self.header[have..have + taken].copy_from_slice(&bytes[..taken]);
                    self.at += taken;
                    self.header_len += taken;
                    if self.header_len < Request::BYTES {
                        return Ok(Next::NeedBytes);
                    }
                    self.header_len = 0;
                    Request::decode(&self.header)?
                }
            };
            match request.payload_len() {
                0 => return Ok(Next::Request(request)),
                len if len > PAYLOAD_BYTES_SKIPPED_MAX => return Err(Malformed),
                len => self.skipping = Some((request, len)),
            }
        }
    }

    /// Whether a request has begun to arrive and is not there as a whole.
    pub(super) fn is_partial(&self) -> bool {
        self.header_len > 0 || self.skipping.is_some()
    }

    /// A number that changes when a request that arrives slowly has made enough progress for a new
    /// deadline.
    pub(super) fn steps(&self) -> u64 {
        self.payload_bytes / PAYLOAD_STEP_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::protocol::command;

    fn header(command: u16, cookie: u64, len: u32) -> Vec<u8> {
        let mut out = 0x2560_9513_u32.to_be_bytes().to_vec();
        out.extend(0_u16.to_be_bytes());
        out.extend(command.to_be_bytes());
        out.extend(cookie.to_be_bytes());
        out.extend(0_u64.to_be_bytes());
        out.extend(len.to_be_bytes());
        out
    }

    /// The cookies that come out when `bytes` go in, `step` at a time.
    fn cookies(bytes: &[u8], step: usize) -> Result<Vec<u64>, Malformed> {
        let mut input = Input::new(&[]);
        let mut out = Vec::new();
        for part in bytes.chunks(step) {
            let mut buf = input.take_buf().expect("all is used up");
            buf[..part.len()].copy_from_slice(part);
            input.put_buf(buf, part.len());
            while let Next::Request(request) = input.next()? {
                out.push(request.cookie);
            }
        }
        Ok(out)
    }

    #[test]
    fn requests_come_out_however_the_bytes_are_cut() {
        let mut bytes = header(command::READ, 1, 4096);
        bytes.extend(header(command::WRITE, 2, 100));
        bytes.extend([0xff; 100]);
        bytes.extend(header(command::FLUSH, 3, 0));
        for step in 1..=bytes.len() {
            assert_eq!(cookies(&bytes, step), Ok(vec![1, 2, 3]), "step {step}");
        }
    }

    #[test]
    fn buffer_grows_for_payloads_only() {
        let mut input = Input::new(&header(command::WRITE, 1, 32 << 20));
        assert_eq!(input.next(), Ok(Next::NeedBytes));
        for _ in 0..520 {
            let buf = input.take_buf().expect("all is used up");
            assert!(buf.len() <= RECEIVE_BYTES_MAX);
            let count = buf.len();
            input.put_buf(buf, count);
            if let Next::Request(request) = input.next().expect("well formed") {
                assert_eq!(request.cookie, 1);
                return;
            }
        }
        panic!("the payload never ended");
    }

    #[test]
    fn wrong_magic_is_malformed() {
        assert_eq!(cookies(&[0; 28], 28), Err(Malformed));
        assert_eq!(cookies(&[0; 28], 5), Err(Malformed));
    }

    #[test]
    fn write_of_4_gib_is_malformed() {
        assert_eq!(cookies(&header(command::WRITE, 1, u32::MAX), 28), Err(Malformed));
    }
}
