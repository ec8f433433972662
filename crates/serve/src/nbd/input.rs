//! From received bytes to requests and their payloads: a receive buffer, and where in it the
//! session is.
//!
//! One receive may bring many requests, or a part of one. A request is given out when its header is
//! there; if it has a payload, the session decides what to do with it ([`Input::fill`] or
//! [`Input::skip`]) and gets it when it is complete.
//!
//! A payload ends in a buffer of its own, which starts on a page and goes to the disk as it is.
//! What the receive buffer has of it already is copied; the rest, if it is long, is received
//! straight into place. So many short payloads arrive in one system call, and long ones are not
//! copied.

use super::limits::{
    PAYLOAD_BYTES_SKIPPED_MAX, PAYLOAD_DIRECT_BYTES_MIN, PAYLOAD_STEP_BYTES, RECEIVE_BYTES_MAX,
    RECEIVE_BYTES_MIN,
};
use super::protocol::{Malformed, Request};
use mica_rt::Buf;

/// What the received bytes hold next.
#[derive(Debug)]
pub(super) enum Next {
    /// A request. If it has a payload, [`Input::fill`] or [`Input::skip`] must follow.
    Request(Request),
    /// The payload of the last request is there, or skipped.
    Payload(Option<Buf>),
    /// Everything received is used up.
    NeedBytes,
}

/// The receiving side of a session.
pub(super) struct Input {
    /// Absent while a receive owns it.
    buf: Option<Buf>,
    at: usize,
    end: usize,
    /// What the next receive may bring at most, if it is not for a payload's own buffer.
    receive_bytes: usize,
    /// The start of a header whose rest has not arrived yet.
    header: [u8; Request::BYTES],
    header_len: usize,
    payload: Payload,
    /// Counts the bytes of payloads, for [`Input::steps`].
    payload_bytes: u64,
}

/// The payload that is arriving.
enum Payload {
    None,
    /// So many bytes of it are to come.
    Skipped(usize),
    Filled(Filling),
}

struct Filling {
    /// All of the payload's buffer, or its first `filled` bytes while a receive owns the rest.
    buf: Buf,
    filled: usize,
    len: usize,
    is_direct: bool,
}

impl Input {
    /// Starts with `bytes`, which the client sent right behind its last option.
    pub(super) fn new(bytes: &[u8]) -> Self {
        let mut buf = Buf::new(bytes.len().max(RECEIVE_BYTES_MIN));
        buf.put(0, bytes);
        Self {
            buf: Some(buf),
            at: 0,
            end: bytes.len(),
            receive_bytes: RECEIVE_BYTES_MIN,
            header: [0; Request::BYTES],
            header_len: 0,
            payload: Payload::None,
            payload_bytes: 0,
        }
    }

    /// The buffer for a receive, once everything received is used up.
    pub(super) fn take_buf(&mut self) -> Option<Buf> {
        if self.at < self.end {
            return None;
        }
        let buf = self.buf.take()?;
        if let Payload::Filled(filling) = &mut self.payload
            && filling.is_direct
        {
            let mut tail = std::mem::replace(&mut filling.buf, Buf::new(0));
            filling.buf = tail.split_to(filling.filled);
            return Some(tail);
        }
        Some(if buf.len() == self.receive_bytes { buf } else { Buf::new(self.receive_bytes) })
    }

    /// Takes the buffer of [`Input::take_buf`] back with `count` received bytes.
    pub(super) fn put_buf(&mut self, buf: Buf, count: usize) {
        assert!(count <= buf.len(), "more was received than fits");
        if let Payload::Filled(filling) = &mut self.payload
            && filling.is_direct
        {
            filling.buf.join(buf);
            filling.filled += count;
            self.payload_bytes += count as u64;
            self.buf = Some(Buf::new(0));
            (self.at, self.end) = (0, 0);
        } else {
            self.buf = Some(buf);
            (self.at, self.end) = (0, count);
        }
    }

    /// What comes next.
    pub(super) fn next(&mut self) -> Result<Next, Malformed> {
        let Some(buf) = &self.buf else { return Ok(Next::NeedBytes) };
        let bytes = &buf[self.at..self.end];
        match &mut self.payload {
            Payload::None => {}
            Payload::Skipped(left) => {
                let count = bytes.len().min(*left);
                *left -= count;
                let is_over = *left == 0;
                self.at += count;
                self.payload_bytes += count as u64;
                return Ok(if is_over { self.end_payload() } else { Next::NeedBytes });
            }
            Payload::Filled(filling) => {
                let count = bytes.len().min(filling.len - filling.filled);
                let end = filling.filled + count;
                filling.buf.put(filling.filled, &bytes[..count]);
                filling.filled = end;
                let is_over = end == filling.len;
                // Begun straight, it stays so: its end is not worth another way.
                filling.is_direct |= filling.len - end >= PAYLOAD_DIRECT_BYTES_MIN;
                self.at += count;
                self.payload_bytes += count as u64;
                return Ok(if is_over { self.end_payload() } else { Next::NeedBytes });
            }
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
        if request.payload_len() > PAYLOAD_BYTES_SKIPPED_MAX {
            return Err(Malformed);
        }
        Ok(Next::Request(request))
    }

    /// The last request's payload of `len` bytes is wanted.
    pub(super) fn fill(&mut self, len: usize) {
        let is_short = len < PAYLOAD_DIRECT_BYTES_MIN;
        self.receive_bytes = if is_short { RECEIVE_BYTES_MAX } else { RECEIVE_BYTES_MIN };
        let buf = Buf::new(len);
        self.payload = Payload::Filled(Filling { buf, filled: 0, len, is_direct: false });
    }

    /// The last request's payload of `len` bytes is not wanted.
    pub(super) fn skip(&mut self, len: usize) {
        self.receive_bytes = RECEIVE_BYTES_MAX;
        self.payload = Payload::Skipped(len);
    }

    fn end_payload(&mut self) -> Next {
        match std::mem::replace(&mut self.payload, Payload::None) {
            Payload::Filled(filling) => Next::Payload(Some(filling.buf)),
            Payload::None | Payload::Skipped(_) => Next::Payload(None),
        }
    }

    /// Whether a request has begun to arrive and is not there as a whole.
    pub(super) fn is_partial(&self) -> bool {
        self.header_len > 0 || !matches!(self.payload, Payload::None)
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

    /// The cookies that come out when `bytes` go in, at most `step` at a time, and the payloads of
    /// those that are even; the others are skipped.
    fn taken(mut bytes: &[u8], step: usize) -> Result<Vec<(u64, Vec<u8>)>, Malformed> {
        let mut input = Input::new(&[]);
        let mut out: Vec<(u64, Vec<u8>)> = Vec::new();
        while !bytes.is_empty() {
            let mut buf = input.take_buf().expect("all is used up");
            assert!(buf.len() <= RECEIVE_BYTES_MAX || input.is_partial());
            let count = buf.len().min(step).min(bytes.len());
            buf.put(0, &bytes[..count]);
            bytes = &bytes[count..];
            input.put_buf(buf, count);
            loop {
                match input.next()? {
                    Next::NeedBytes => break,
                    Next::Payload(buf) => {
                        let last = out.last_mut().expect("a request before its payload");
                        assert_eq!(buf.is_some(), last.0.is_multiple_of(2));
                        last.1 = buf.map_or_else(Vec::new, |buf| buf.to_vec());
                    }
                    Next::Request(request) => {
                        out.push((request.cookie, Vec::new()));
                        match request.payload_len() as usize {
                            0 => {}
                            len if request.cookie.is_multiple_of(2) => input.fill(len),
                            len => input.skip(len),
                        }
                    }
                }
            }
        }
        Ok(out)
    }

    #[test]
    fn requests_come_out_however_the_bytes_are_cut() {
        let payload: Vec<u8> = (0..100).collect();
        let mut bytes = header(command::READ, 1, 4096);
        bytes.extend(header(command::WRITE, 2, 100));
        bytes.extend(&payload);
        bytes.extend(header(command::WRITE, 3, 50));
        bytes.extend([0xff; 50]);
        bytes.extend(header(command::FLUSH, 4, 0));
        let wanted = [(1, vec![]), (2, payload), (3, vec![]), (4, vec![])];
        for step in 1..=bytes.len() {
            assert_eq!(taken(&bytes, step).expect("well formed"), wanted, "step {step}");
        }
    }

    #[test]
    fn long_payloads_come_out_however_they_are_cut() {
        let payload: Vec<u8> = (0_u32..200_000).map(|at| at.to_le_bytes()[1]).collect();
        let mut bytes = header(command::WRITE, 2, 200_000);
        bytes.extend(&payload);
        bytes.extend(header(command::WRITE, 4, 200_000));
        bytes.extend(&payload);
        bytes.extend(header(command::FLUSH, 6, 0));
        let wanted = [(2, payload.clone()), (4, payload), (6, vec![])];
        for step in [1000, 4096, 28, 65536, 77_777, usize::MAX] {
            assert_eq!(taken(&bytes, step).expect("well formed"), wanted, "step {step}");
        }
    }

    #[test]
    fn rest_of_a_long_payload_is_received_into_its_own_buffer() {
        let mut input = Input::new(&header(command::WRITE, 2, 1 << 20));
        assert!(matches!(input.next(), Ok(Next::Request(_))));
        input.fill(1 << 20);
        assert!(matches!(input.next(), Ok(Next::NeedBytes)));

        let buf = input.take_buf().expect("all is used up");

        assert_eq!(buf.len(), 1 << 20);
        let address = buf.as_ptr();
        input.put_buf(buf, 1 << 20);
        let Ok(Next::Payload(Some(payload))) = input.next() else { panic!("it is there") };
        assert_eq!((payload.as_ptr(), payload.len()), (address, 1 << 20));
        assert!(payload.is_aligned(4096));
    }

    #[test]
    fn receive_buffer_is_bounded_whatever_is_skipped() {
        let mut input = Input::new(&header(command::WRITE, 1, 32 << 20));
        assert!(matches!(input.next(), Ok(Next::Request(_))));
        input.skip(32 << 20);
        for _ in 0..520 {
            if let Next::Payload(payload) = input.next().expect("well formed") {
                assert!(payload.is_none());
                return;
            }
            let buf = input.take_buf().expect("all is used up");
            assert!(buf.len() <= RECEIVE_BYTES_MAX);
            let count = buf.len();
            input.put_buf(buf, count);
        }
        panic!("the payload never ended");
    }

    #[test]
    fn wrong_magic_is_malformed() {
        assert_eq!(taken(&[0; 28], 28), Err(Malformed));
        assert_eq!(taken(&[0; 28], 5), Err(Malformed));
    }

    #[test]
    fn write_of_4_gib_is_malformed() {
        assert_eq!(taken(&header(command::WRITE, 1, u32::MAX), 28), Err(Malformed));
    }
}
