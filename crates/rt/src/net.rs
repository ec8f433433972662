//! Stream sockets, and their stand-in in memory for tests and the simulator.

use crate::buf::Buf;
use crate::descriptors;
use crate::op::OpKind;
use crate::send::SendParts;
use crate::socket::Socket;
use crate::submit::{Op, RawOp};
use rustix::io::Errno;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

impl Socket {
    /// Waits until there is something to read or to accept.
    ///
    /// # Errors
    /// Any error of the system.
    pub async fn readable(self: &Arc<Self>) -> io::Result<()> {
        RawOp::start(OpKind::Readable { socket: Arc::clone(self) }).outcome().await
    }

    /// Accepts one connection from a listening socket. Holders of descriptors give way for it.
    ///
    /// # Errors
    /// Any error of the system; connections that were aborted in the meantime are skipped.
    pub async fn accept(self: &Arc<Self>) -> io::Result<Self> {
        loop {
            match descriptors::accept(self.as_fd()) {
                Ok(fd) => return Self::new(fd),
                Err(rustix::io::Errno::AGAIN) => self.readable().await?,
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// A stream of bytes in both directions.
#[derive(Clone)]
pub enum Stream {
    /// A socket of the system.
    Socket(Arc<Socket>),
    /// One end of a pair in memory, for tests and the simulator.
    Memory(MemoryStream),
}

impl Stream {
    /// Reads at least one byte; 0 means that the peer has closed. The buffer is returned.
    pub async fn recv(&self, buf: Buf) -> (io::Result<usize>, Buf) {
        match self {
            Self::Socket(socket) => {
                Op::start(OpKind::Recv { socket: Arc::clone(socket), buf }).await
            }
            Self::Memory(stream) => stream.recv(buf).await,
        }
    }

    /// Sends all of `bufs`, in order, together with everything else that this turn submits.
    ///
    /// # Errors
    /// Any error of the system; some of the bytes may have been sent by then.
    pub async fn send(&self, bufs: VecDeque<Buf>) -> io::Result<()> {
        self.send_parts(SendParts::new(without_empty(bufs))).await
    }

    /// As [`Stream::send`], but with an immediate system call: faster for a peer that waits for
    /// exactly this, costlier if more is about to be submitted.
    ///
    /// # Errors
    /// As [`Stream::send`].
    pub async fn send_now(&self, bufs: VecDeque<Buf>) -> io::Result<()> {
        let mut parts = SendParts::new(without_empty(bufs));
        if let Self::Socket(socket) = self
            && !parts.bufs.is_empty()
        {
            match socket.try_send(&parts) {
                Ok(count) => parts.advance(count),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.send_parts(parts).await
    }

    async fn send_parts(&self, parts: SendParts) -> io::Result<()> {
        if parts.bufs.is_empty() {
            return Ok(());
        }
        match self {
            Self::Socket(socket) => {
                RawOp::start(OpKind::Send { socket: Arc::clone(socket), parts }).outcome().await
            }
            Self::Memory(stream) => stream.send(parts).await,
        }
    }

    /// Shuts down both directions: a pending `recv` on either end returns 0.
    pub fn shutdown(&self) {
        match self {
            // A peer that is already gone is as good as shut down.
            Self::Socket(socket) => {
                let _ = rustix::net::shutdown(socket.as_fd(), rustix::net::Shutdown::Both);
            }
            Self::Memory(stream) => stream.shutdown(),
        }
    }

    /// Two ends of a stream in memory; each direction holds at most `capacity` bytes.
    pub fn memory_pair(capacity: usize) -> (Self, Self) {
        let one = Rc::new(RefCell::new(Pipe::new(capacity)));
        let two = Rc::new(RefCell::new(Pipe::new(capacity)));
        let left = End { incoming: Rc::clone(&one), outgoing: Rc::clone(&two) };
        let right = End { incoming: two, outgoing: one };
        let stream = |end| Self::Memory(MemoryStream { end: Rc::new(end) });
        (stream(left), stream(right))
    }
}

fn without_empty(mut bufs: VecDeque<Buf>) -> VecDeque<Buf> {
    bufs.retain(|buf| !buf.is_empty());
    bufs
}

/// One end of a [`Stream::memory_pair`].
#[derive(Clone)]
pub struct MemoryStream {
    end: Rc<End>,
}

/// The state that clones of an end share. When the last is dropped, the end is shut down, as a
/// socket is.
struct End {
    incoming: Rc<RefCell<Pipe>>,
    outgoing: Rc<RefCell<Pipe>>,
}

struct Pipe {
    bytes: VecDeque<u8>,
    capacity: usize,
    closed: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Pipe {
    fn new(capacity: usize) -> Self {
        Self { bytes: VecDeque::new(), capacity, closed: false, reader: None, writer: None }
    }
}

impl MemoryStream {
    fn recv(&self, mut buf: Buf) -> impl Future<Output = (io::Result<usize>, Buf)> + use<'_> {
        std::future::poll_fn(move |context| {
            let mut pipe = self.end.incoming.borrow_mut();
            if pipe.bytes.is_empty() && !pipe.closed {
                pipe.reader = Some(context.waker().clone());
                return Poll::Pending;
            }
            let count = pipe.bytes.len().min(buf.len());
            for (to, from) in buf.own_bytes().iter_mut().zip(pipe.bytes.drain(..count)) {
                *to = from;
            }
            if let Some(writer) = pipe.writer.take() {
                writer.wake();
            }
            Poll::Ready((Ok(count), std::mem::replace(&mut buf, Buf::new(0))))
        })
    }

    fn send(&self, parts: SendParts) -> impl Future<Output = io::Result<()>> + use<'_> {
        SendMemory { pipe: &self.end.outgoing, parts }
    }

    fn shutdown(&self) {
        self.end.shutdown();
    }
}

impl End {
    fn shutdown(&self) {
        for pipe in [&self.incoming, &self.outgoing] {
            let mut pipe = pipe.borrow_mut();
            pipe.closed = true;
            let wakers = [pipe.reader.take(), pipe.writer.take()];
            drop(pipe);
            wakers.into_iter().flatten().for_each(Waker::wake);
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.shutdown();
    }
}

struct SendMemory<'a> {
    pipe: &'a RefCell<Pipe>,
    parts: SendParts,
}

impl Future for SendMemory<'_> {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut pipe = self.pipe.borrow_mut();
        loop {
            if pipe.closed {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            let room = pipe.capacity - pipe.bytes.len();
            let Some(front) = self.parts.bufs.front() else { return Poll::Ready(Ok(())) };
            if room == 0 {
                pipe.writer = Some(context.waker().clone());
                return Poll::Pending;
            }
            let count = room.min(front.len());
            pipe.bytes.extend(&front[..count]);
            self.parts.advance(count);
            if let Some(reader) = pipe.reader.take() {
                reader.wake();
            }
        }
    }
}
