//! Records over a stream: a stream of plain bytes whose other end is known.
//!
//! The records are decrypted where they were received and encrypted from where the replies lie,
//! inside the task of the connection: no thread, no second socket. rustls hands a record's bytes
//! over in memory of its own, so that each byte is copied twice on its way in and once more on its
//! way out; beside the cipher that is little.
//!
//! Words: **incoming** is what was received and not used up: records, the last of them mostly not
//! complete. **Plain** is what was decrypted and not asked for yet.
//!
//! Invariants
//! - I1 `incoming` and `plain` have at most [`INCOMING_BYTES`] each. A handshake message that does
//!   not fit ends the connection.
//! - I2 No complete record is left in `incoming` when a receive starts, so that the sending side
//!   may ask rustls to continue without anything being decrypted.
//! - I3 Records leave in the order in which they were encrypted: one send at a time (the session's
//!   I4), and what rustls has to say by itself goes in front of it.
//! - I4 A record of which a part went out and a part did not is the last: nothing follows it, not
//!   even a goodbye.
//! - I5 The end of the stream without a goodbye (`close_notify`) is an error and never the end of
//!   the data.
//! - I6 After the first error rustls is not asked again, except for the alert that it has for the
//!   peer.

use super::credentials::Tls;
use mica_rt::{Buf, Stream, timeout};
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, EncryptError, UnbufferedStatus, WriteTraffic,
};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::time::Duration;

/// What is received at once. Room for a handshake message of the largest size that rustls takes.
const INCOMING_BYTES: usize = 128 << 10;
/// Plain bytes of a full record.
const RECORD_BYTES: usize = 16 << 10;
/// What a record has beside them, at most, in TLS 1.2 and 1.3.
const RECORD_OVERHEAD_BYTES: usize = 64;
/// Records that are encrypted before they are sent.
const SEALED_RECORDS_MAX: usize = 15;
/// Room for what rustls says by itself ahead of data: a key update.
const CONTROL_BYTES: usize = 512;
/// Limit for a peer to take a goodbye.
const CLOSE_DEADLINE: Duration = Duration::from_secs(1);

/// The server's end of a TLS connection.
pub(crate) struct TlsStream<'a> {
    stream: &'a Stream,
    state: RefCell<Box<State>>,
    /// A send began and has not ended (I4).
    is_sending: Cell<bool>,
}

struct State {
    connection: UnbufferedServerConnection,
    /// All of the buffer, or its first `end` bytes while a receive owns the rest.
    incoming: Buf,
    at: usize,
    end: usize,
    plain: Vec<u8>,
    plain_at: usize,
    /// Records that rustls made by itself and that are to go out.
    control: Vec<u8>,
    peer_closed: bool,
    failed: bool,
}

impl<'a> TlsStream<'a> {
    /// Carries out the handshake. The caller puts a deadline on it.
    ///
    /// # Errors
    /// Why there is no connection; the peer was notified.
    pub(crate) async fn accept(stream: &'a Stream, tls: &Tls) -> io::Result<Self> {
        let connection = UnbufferedServerConnection::new(tls.config()).map_err(io::Error::other)?;
        let accepted = Self {
            stream,
            state: RefCell::new(Box::new(State::new(connection))),
            is_sending: Cell::new(false),
        };
        let outcome = accepted.shake_hands().await;
        if outcome.is_err() {
            // Whether the peer hears it changes nothing.
            let _ = accepted.send_control().await;
        }
        outcome.map(|()| accepted)
    }

    async fn shake_hands(&self) -> io::Result<()> {
        loop {
            self.receive_records(&mut []).await?;
            self.send_control().await?;
            let state = self.state.borrow();
            if state.peer_closed {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            if !state.connection.is_handshaking() {
                let version = state.connection.protocol_version();
                let suite = state.connection.negotiated_cipher_suite();
                tracing::debug!(?version, ?suite, "TLS connection established");
                return Ok(());
            }
        }
    }

    /// As [`Stream::recv`]; gives 0 only if the peer said goodbye.
    pub(crate) async fn recv(&self, mut buf: Buf) -> (io::Result<usize>, Buf) {
        let taken = self.state.borrow_mut().take_plain(buf.own_bytes());
        if taken > 0 {
            return (Ok(taken), buf);
        }
        loop {
            if self.state.borrow().peer_closed {
                return (Ok(0), buf);
            }
            match self.receive_records(buf.own_bytes()).await {
                Ok(0) => {}
                result => return (result, buf),
            }
        }
    }

    /// Receives once and decrypts what is complete: into `target` what fits there, which is
    /// counted.
    async fn receive_records(&self, target: &mut [u8]) -> io::Result<usize> {
        let tail = self.state.borrow_mut().begin_receive()?;
        let (result, tail) = self.stream.recv(tail).await;
        let mut state = self.state.borrow_mut();
        match result? {
            0 => {
                state.failed = true;
                let what = "the connection was cut off without a close_notify";
                Err(io::Error::new(io::ErrorKind::UnexpectedEof, what))
            }
            count => {
                state.end_receive(tail, count);
                state.drive(target, |_| ()).map(|(filled, _)| filled)
            }
        }
    }

    /// As [`Stream::send`].
    pub(crate) async fn send(&self, mut bufs: VecDeque<Buf>) -> io::Result<()> {
        while let Some(sealed) = self.seal(&mut bufs)? {
            self.is_sending.set(true);
            self.stream.send(sealed).await?;
            self.is_sending.set(false);
        }
        Ok(())
    }

    /// As [`Stream::send_now`].
    pub(crate) async fn send_now(&self, mut bufs: VecDeque<Buf>) -> io::Result<()> {
        while let Some(sealed) = self.seal(&mut bufs)? {
            self.is_sending.set(true);
            self.stream.send_now(sealed).await?;
            self.is_sending.set(false);
        }
        Ok(())
    }

    fn seal(&self, bufs: &mut VecDeque<Buf>) -> io::Result<Option<VecDeque<Buf>>> {
        self.state.borrow_mut().seal(bufs)
    }

    async fn send_control(&self) -> io::Result<()> {
        let control = std::mem::take(&mut self.state.borrow_mut().control);
        self.is_sending.set(true);
        self.stream.send(VecDeque::from([Buf::from_slice(&control)])).await?;
        self.is_sending.set(false);
        Ok(())
    }

    /// Whether what is held is what the head of this file says (I1).
    #[cfg(test)]
    pub(crate) fn is_within_bounds(&self) -> bool {
        let state = self.state.borrow();
        state.incoming.len() <= INCOMING_BYTES && state.plain.len() <= INCOMING_BYTES
    }

    /// Says goodbye, or why not, if the peer takes it soon.
    pub(crate) async fn close(&self) {
        if self.is_sending.get() {
            return;
        }
        self.state.borrow_mut().say_goodbye();
        // Whether the peer hears it changes nothing.
        let _ = timeout(CLOSE_DEADLINE, self.send_control()).await;
    }
}

impl State {
    fn new(connection: UnbufferedServerConnection) -> Self {
        Self {
            connection,
            incoming: Buf::new(INCOMING_BYTES),
            at: 0,
            end: 0,
            plain: Vec::new(),
            plain_at: 0,
            control: Vec::new(),
            peer_closed: false,
            failed: false,
        }
    }

    /// Moves what is plain already to `target`.
    fn take_plain(&mut self, target: &mut [u8]) -> usize {
        let rest = &self.plain[self.plain_at..];
        let count = rest.len().min(target.len());
        target[..count].copy_from_slice(&rest[..count]);
        self.plain_at += count;
        if self.plain_at == self.plain.len() {
            // Memory is held while there is something in it.
            self.plain = Vec::new();
            self.plain_at = 0;
        }
        count
    }

    /// The free part of `incoming`, for a receive.
    fn begin_receive(&mut self) -> io::Result<Buf> {
        if self.failed {
            return Err(failed_before());
        }
        assert_eq!(self.incoming.len(), INCOMING_BYTES, "one receive at a time");
        self.incoming.own_bytes().copy_within(self.at..self.end, 0);
        self.end -= self.at;
        self.at = 0;
        if self.end == INCOMING_BYTES {
            self.failed = true;
            return Err(invalid_data("a handshake message is too long"));
        }
        let head = self.incoming.split_to(self.end);
        Ok(std::mem::replace(&mut self.incoming, head))
    }

    /// Takes the buffer of [`State::begin_receive`] back with `count` received bytes.
    fn end_receive(&mut self, tail: Buf, count: usize) {
        assert!(count <= tail.len(), "more was received than fits");
        self.incoming.join(tail);
        self.end += count;
    }

    /// Lets rustls continue until it has used up `incoming`: plain bytes go to `target`, and to
    /// `plain` what does not fit. Then, if data may be sent, `write` is called. Gives the bytes in
    /// `target`, and what `write` gave.
    fn drive<T>(
        &mut self,
        target: &mut [u8],
        write: impl FnOnce(&mut WriteTraffic<'_, ServerConnectionData>) -> T,
    ) -> io::Result<(usize, Option<T>)> {
        if self.failed {
            return Err(failed_before());
        }
        let mut filled = 0;
        loop {
            let bytes = &mut self.incoming.own_bytes()[self.at..self.end];
            let UnbufferedStatus { mut discard, state } =
                self.connection.process_tls_records(bytes);
            let outcome = match state {
                Ok(ConnectionState::ReadTraffic(mut traffic)) => {
                    while let Some(Ok(record)) = traffic.next_record() {
                        discard += record.discard;
                        let room = &mut target[filled..];
                        let count = record.payload.len().min(room.len());
                        let (first, later) = record.payload.split_at(count);
                        room[..count].copy_from_slice(first);
                        filled += count;
                        self.plain.extend_from_slice(later);
                    }
                    None
                }
                Ok(ConnectionState::EncodeTlsData(mut data)) => {
                    encode(&mut data, &mut self.control);
                    None
                }
                // As good as done: what is in `control` goes out before anything else (I3).
                Ok(ConnectionState::TransmitTlsData(data)) => {
                    data.done();
                    None
                }
                Ok(ConnectionState::PeerClosed) => {
                    self.peer_closed = true;
                    None
                }
                Ok(ConnectionState::WriteTraffic(mut traffic)) => {
                    let written = write(&mut traffic);
                    self.at += discard;
                    return Ok((filled, Some(written)));
                }
                Ok(ConnectionState::BlockedHandshake | ConnectionState::Closed) => Some(Ok(None)),
                // Early data is not enabled.
                Ok(_) => Some(Err(invalid_data("TLS is in an impossible state"))),
                Err(error) => Some(Err(tls_error(error))),
            };
            self.at += discard;
            match outcome {
                None => {}
                Some(Ok(written)) => return Ok((filled, written)),
                Some(Err(error)) => {
                    self.fail();
                    return Err(error);
                }
            }
        }
    }

    /// Takes what rustls has for the peer after an error (I6).
    fn fail(&mut self) {
        self.failed = true;
        while self.connection.wants_write() {
            // What waits to be sent comes before anything is decrypted.
            let UnbufferedStatus { state, .. } = self.connection.process_tls_records(&mut []);
            let Ok(ConnectionState::EncodeTlsData(mut data)) = state else { return };
            encode(&mut data, &mut self.control);
        }
    }

    /// Encrypts as much of `bufs` as goes out at once; `None` if nothing is left.
    fn seal(&mut self, bufs: &mut VecDeque<Buf>) -> io::Result<Option<VecDeque<Buf>>> {
        let left: usize = bufs.iter().map(|buf| buf.len()).sum();
        if left == 0 {
            return Ok(None);
        }
        let plain_max = left.min(SEALED_RECORDS_MAX * RECORD_BYTES);
        let mut sealed = Buf::new(plain_max + SEALED_RECORDS_MAX * RECORD_OVERHEAD_BYTES);
        let (_, written) =
            self.drive(&mut [], |traffic| seal(traffic, bufs, sealed.own_bytes()))?;
        match written {
            Some(Ok(len)) => sealed.truncate(len),
            Some(Err(error)) => return Err(io::Error::other(error)),
            None => return Err(io::ErrorKind::BrokenPipe.into()),
        }
        let control = std::mem::take(&mut self.control);
        Ok(Some(VecDeque::from([Buf::from_slice(&control), sealed])))
    }

    fn say_goodbye(&mut self) {
        if self.failed || self.connection.is_handshaking() {
            return;
        }
        let mut goodbye = [0; CONTROL_BYTES];
        let written = self.drive(&mut [], |traffic| traffic.queue_close_notify(&mut goodbye));
        if let Ok((_, Some(Ok(len)))) = written {
            self.control.extend_from_slice(&goodbye[..len]);
        }
    }
}

/// Encrypts records from `bufs` into `out`. Full records are encrypted from where they lie; what is
/// shorter is put together first, so that small replies share a record.
fn seal(
    traffic: &mut WriteTraffic<'_, ServerConnectionData>,
    bufs: &mut VecDeque<Buf>,
    out: &mut [u8],
) -> Result<usize, EncryptError> {
    let mut small = Buf::new(0);
    let mut at = 0;
    let mut records = 0;
    while records < SEALED_RECORDS_MAX
        && let Some(front) = bufs.front_mut()
    {
        let full = (front.len() / RECORD_BYTES).min(SEALED_RECORDS_MAX - records);
        if full > 0 {
            at += traffic.encrypt(&front[..full * RECORD_BYTES], &mut out[at..])?;
            front.advance(full * RECORD_BYTES);
            records += full;
        } else {
            if small.is_empty() {
                small = Buf::new(RECORD_BYTES);
            }
            let packed = pack(bufs, small.own_bytes());
            at += traffic.encrypt(&small[..packed], &mut out[at..])?;
            records += 1;
        }
        while bufs.front().is_some_and(|front| front.is_empty()) {
            bufs.pop_front();
        }
    }
    Ok(at)
}

/// Moves bytes from the front of `bufs` to `out`, until it is full or a full record comes.
fn pack(bufs: &mut VecDeque<Buf>, out: &mut [u8]) -> usize {
    let mut packed = 0;
    while packed < out.len()
        && let Some(front) = bufs.front_mut()
        && front.len() < RECORD_BYTES
    {
        let count = front.len().min(out.len() - packed);
        out[packed..packed + count].copy_from_slice(&front[..count]);
        packed += count;
        if count < front.len() {
            front.advance(count);
            break;
        }
        bufs.pop_front();
    }
    packed
}

/// Appends what rustls wants to say to `out`.
fn encode(data: &mut EncodeTlsData<'_, ServerConnectionData>, out: &mut Vec<u8>) {
    let start = out.len();
    if let Err(EncodeError::InsufficientSize(short)) = data.encode(&mut []) {
        out.resize(start + short.required_size, 0);
        data.encode(&mut out[start..]).expect("the size that it asked for");
    }
}

fn tls_error(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

fn invalid_data(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn failed_before() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the TLS connection has already failed")
}
