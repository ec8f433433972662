//! A connection over TLS.
//!
//! Invariants
//! - S1 One thread reads at a time, and what it took from the socket and has not been decrypted is
//!   its own.
//! - S2 No lock of the session is held while anything waits for the socket, so that requests go out
//!   while the other thread waits for answers.
//! - S3 Records go out in the order in which they were encrypted: both are done under one lock.

use super::link::Connection;
use mica_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustls::ClientConnection;
use std::io::{self, Read as _, Write as _};
use std::sync::Arc;
use std::time::Duration;

/// Bytes that are taken from the socket at a time.
const TAKEN_BYTES: usize = 64 << 10;

/// A connection that is encrypted on its way.
pub(super) struct Secure {
    socket: Arc<dyn Connection>,
    session: Mutex<ClientConnection>,
    /// Records go out one after the other (S3).
    sending: Mutex<()>,
    taken: Mutex<Taken>,
}

/// What came from the socket (S1).
#[derive(Default)]
struct Taken {
    bytes: Vec<u8>,
    /// How much of it the session has.
    used: usize,
}

impl Secure {
    /// Begins `session` over `socket`, and waits until both sides know each other.
    ///
    /// # Errors
    /// `Denied` if they do not trust each other; `Io` if the connection ends.
    pub(super) fn begin(
        socket: Arc<dyn Connection>,
        mut session: ClientConnection,
    ) -> Result<Arc<dyn Connection>> {
        // What is written is a few requests.
        session.set_buffer_limit(None);
        let (session, sending, taken) = (Mutex::new(session), Mutex::default(), Mutex::default());
        let this = Self { socket, session, sending, taken };
        this.shake_hands().map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => {
                Error::new(ErrorKind::Denied, format!("TLS with the server fails: {error}"))
            }
            _ => super::link::lost(error),
        })?;
        Ok(Arc::new(this))
    }

    fn shake_hands(&self) -> io::Result<()> {
        let mut taken = self.taken.lock();
        while self.session.lock().is_handshaking() {
            self.flush()?;
            if self.session.lock().wants_read() {
                self.take(&mut taken)?;
            }
        }
        self.flush()
    }

    /// Gives the session what the server said, for which it waits if there is nothing yet.
    fn take(&self, taken: &mut Taken) -> io::Result<()> {
        if taken.used == taken.bytes.len() {
            taken.bytes.resize(TAKEN_BYTES, 0);
            taken.used = TAKEN_BYTES;
            let read = self.socket.read(&mut taken.bytes)?;
            taken.bytes.truncate(read);
            taken.used = 0;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let mut session = self.session.lock();
        taken.used += session.read_tls(&mut &taken.bytes[taken.used..])?;
        let processed = session.process_new_packets();
        let has_more = session.wants_write();
        drop(session);
        if has_more {
            // The reason why it ends, for one.
            let flushed = self.flush();
            if processed.is_ok() {
                flushed?;
            }
        }
        processed.map(drop).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Sends what the session has to say by itself.
    fn flush(&self) -> io::Result<()> {
        self.send(&[])
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let _in_turn = self.sending.lock();
        let mut records = Vec::new();
        {
            let mut session = self.session.lock();
            session.writer().write_all(bytes)?;
            while session.wants_write() {
                session.write_tls(&mut records)?;
            }
        }
        match records.is_empty() {
            true => Ok(()),
            false => self.socket.write(&records),
        }
    }
}

impl Connection for Secure {
    fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut taken = self.taken.lock();
        loop {
            match self.session.lock().reader().read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
            self.take(&mut taken)?;
        }
    }

    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        self.send(bytes)
    }

    fn limit(&self, silence: Duration) -> io::Result<()> {
        self.socket.limit(silence)
    }

    fn shut(&self) {
        self.socket.shut();
    }
}
