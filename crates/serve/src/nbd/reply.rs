//! The sending side of a session: replies as they are made, in batches for the socket.
//!
//! Small parts (headers, errors, a few bytes of data) are packed into shared buffers; other data
//! goes out in the buffer that it was read into.

use super::limits::BATCH_BYTES_MAX;
use super::protocol::{self, Done, ErrorCode};
use mica_rt::Buf;
use std::collections::VecDeque;

/// Which form of replies the client negotiated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReplyStyle {
    Simple,
    Structured,
}

/// A part of a read's reply: a run of data, or of zeros.
pub(super) enum Content {
    Data { offset: u64, bufs: Vec<Buf> },
    Zeros { offset: u64, len: u64 },
}

/// Replies that wait to be sent.
pub(super) struct Outgoing {
    style: ReplyStyle,
    queue: VecDeque<Buf>,
    queued_bytes: usize,
    /// Room for small parts; the first `packed` bytes are parts that are not in the queue yet.
    small: Buf,
    packed: usize,
    /// Bytes of the batch that is being sent.
    sending_bytes: usize,
}

/// Bytes of a buffer for small parts.
const SMALL_BYTES: usize = 4096;
/// Data that is shorter is copied to the small parts: a buffer of its own takes a page of memory,
/// of which only its length is counted.
const COPIED_BYTES_MAX: usize = SMALL_BYTES / 2;

impl Outgoing {
    pub(super) fn new(style: ReplyStyle) -> Self {
        Self {
            style,
            queue: VecDeque::new(),
            queued_bytes: 0,
            small: Buf::new(0),
            packed: 0,
            sending_bytes: 0,
        }
    }

    pub(super) fn style(&self) -> ReplyStyle {
        self.style
    }

    /// Bytes that wait or are being sent.
    pub(super) fn held_bytes(&self) -> usize {
        self.queued_bytes + self.sending_bytes
    }

    /// Buffers that wait, which bounds the replies that do.
    pub(super) fn queued_parts(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn has_queued(&self) -> bool {
        self.queued_bytes > 0
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held_bytes() == 0
    }

    /// The next batch for one send; [`Outgoing::sent`] says when it is out.
    pub(super) fn take_batch(&mut self) -> VecDeque<Buf> {
        self.seal_small();
        if self.queued_bytes <= BATCH_BYTES_MAX {
            self.sending_bytes = std::mem::take(&mut self.queued_bytes);
            return std::mem::take(&mut self.queue);
        }
        let mut batch = VecDeque::new();
        let mut bytes = 0;
        while let Some(buf) = self.queue.front()
            && (batch.is_empty() || bytes + buf.len() <= BATCH_BYTES_MAX)
        {
            bytes += buf.len();
            batch.extend(self.queue.pop_front());
        }
        self.queued_bytes -= bytes;
        self.sending_bytes = bytes;
        batch
    }

    /// The batch is out.
    pub(super) fn sent(&mut self) {
        self.sending_bytes = 0;
    }

    /// A read's data, all of it in one buffer.
    #[inline]
    pub(super) fn data(&mut self, cookie: u64, offset: u64, buf: Buf) {
        match self.style {
            ReplyStyle::Simple => self.small(&protocol::simple_reply(cookie, None)),
            ReplyStyle::Structured => {
                self.small(&protocol::chunk_data(Done::Yes, cookie, offset, len_u32(buf.len())));
            }
        }
        self.buf(buf);
    }

    /// A read that is all zeros. A client with simple replies gets them written out.
    #[inline]
    pub(super) fn zeros(&mut self, cookie: u64, offset: u64, len: u32) {
        match self.style {
            ReplyStyle::Simple => {
                self.small(&protocol::simple_reply(cookie, None));
                self.buf(Buf::zeroed(len as usize));
            }
            ReplyStyle::Structured => {
                self.small(&protocol::chunk_hole(Done::Yes, cookie, offset, len));
            }
        }
    }

    /// Chunks of a structured read, the last one as `done` says.
    pub(super) fn chunks(&mut self, cookie: u64, contents: Vec<Content>, done: Done) {
        let last = contents.len().saturating_sub(1);
        for (index, content) in contents.into_iter().enumerate() {
            let done = if index == last { done } else { Done::No };
            match content {
                Content::Zeros { offset, len } => {
                    let len = u32::try_from(len).expect("within a request");
                    self.small(&protocol::chunk_hole(done, cookie, offset, len));
                }
                Content::Data { offset, bufs } => {
                    let len = bufs.iter().map(|buf| buf.len()).sum();
                    self.small(&protocol::chunk_data(done, cookie, offset, len_u32(len)));
                    bufs.into_iter().for_each(|buf| self.buf(buf));
                }
            }
        }
    }

    /// The header of a simple read whose data follows by [`Outgoing::plain`].
    pub(super) fn simple_header(&mut self, cookie: u64) {
        debug_assert_eq!(self.style, ReplyStyle::Simple);
        self.small(&protocol::simple_reply(cookie, None));
    }

    /// The header of one chunk with `len` bytes from `offset`, whose data follows by
    /// [`Outgoing::plain`].
    pub(super) fn whole_chunk_header(&mut self, cookie: u64, offset: u64, len: u32) {
        debug_assert_eq!(self.style, ReplyStyle::Structured);
        self.small(&protocol::chunk_data(Done::Yes, cookie, offset, len));
    }

    /// Data without headers, zeros written out.
    pub(super) fn plain(&mut self, contents: Vec<Content>) {
        for content in contents {
            match content {
                Content::Data { bufs, .. } => bufs.into_iter().for_each(|buf| self.buf(buf)),
                Content::Zeros { len, .. } => {
                    self.buf(Buf::zeroed(usize::try_from(len).expect("within a request")));
                }
            }
        }
    }

    /// Success without data.
    pub(super) fn success(&mut self, cookie: u64) {
        match self.style {
            ReplyStyle::Simple => self.small(&protocol::simple_reply(cookie, None)),
            ReplyStyle::Structured => self.small(&protocol::chunk_none(cookie)),
        }
    }

    /// A chunk of a block status, the last one as `done` says: the encoded `descriptors` of a
    /// context, by the number that the client has for it.
    pub(super) fn status(&mut self, cookie: u64, id: u32, (done, descriptors): (Done, &[u8])) {
        let count = descriptors.len() / protocol::STATUS_EXTENT_BYTES;
        self.small(&protocol::chunk_status(done, cookie, id, count));
        self.buf(Buf::from_slice(descriptors));
    }

    /// A failure, at `offset` if it is known which byte failed.
    pub(super) fn error(&mut self, cookie: u64, error: ErrorCode, offset: Option<u64>) {
        match self.style {
            ReplyStyle::Simple => self.small(&protocol::simple_reply(cookie, Some(error))),
            ReplyStyle::Structured => self.small(&protocol::chunk_error(cookie, error, offset)),
        }
    }

    /// Appends a few bytes, packed with their neighbours.
    fn small(&mut self, bytes: &[u8]) {
        if self.small.len() - self.packed < bytes.len() {
            self.seal_small();
            self.small = Buf::new(SMALL_BYTES);
        }
        self.small.put(self.packed, bytes);
        self.packed += bytes.len();
        self.queued_bytes += bytes.len();
    }

    fn buf(&mut self, buf: Buf) {
        if buf.len() < COPIED_BYTES_MAX {
            return self.small(&buf);
        }
        self.seal_small();
        self.queued_bytes += buf.len();
        self.queue.push_back(buf);
    }

    fn seal_small(&mut self) {
        if self.packed > 0 {
            let packed = std::mem::take(&mut self.packed);
            self.queue.push_back(self.small.split_to(packed));
        }
    }
}

fn len_u32(len: usize) -> u32 {
    u32::try_from(len).expect("within a request")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(batch: &VecDeque<Buf>) -> usize {
        batch.iter().map(|buf| buf.len()).sum()
    }

    #[test]
    fn small_replies_share_a_buffer_and_data_is_not_copied() {
        let mut out = Outgoing::new(ReplyStyle::Structured);
        let data = Buf::new(4096);
        let address = data.as_ptr();
        out.zeros(1, 0, 4096);
        out.zeros(2, 0, 4096);
        out.data(3, 0, data);

        let batch = out.take_batch();

        assert_eq!(batch.iter().map(|buf| buf.len()).collect::<Vec<_>>(), [32 + 32 + 28, 4096]);
        assert_eq!(batch[1].as_ptr(), address);
    }

    /// Once, each had a page of its own.
    #[test]
    fn memory_for_tiny_data_is_as_much_as_is_counted() {
        for style in [ReplyStyle::Simple, ReplyStyle::Structured] {
            let mut out = Outgoing::new(style);
            for at in 0..3000_u64 {
                out.data(at, at, Buf::from_slice(&at.to_le_bytes()[..1]));
            }
            let held = out.held_bytes();
            let batch = out.take_batch();
            assert!(batch.len() * SMALL_BYTES <= 2 * held, "{} pages", batch.len());
            let sent: Vec<u8> = batch.iter().flat_map(|buf| buf.to_vec()).collect();
            assert_eq!(sent.len(), held);
            let one = held / 3000;
            assert!(
                (0..3000_u64)
                    .zip(sent.chunks(one))
                    .all(|(at, reply)| { reply.last() == Some(&at.to_le_bytes()[0]) })
            );
        }
    }

    #[test]
    fn batch_is_bounded_but_never_empty() {
        let mut out = Outgoing::new(ReplyStyle::Simple);
        out.data(1, 0, Buf::new(3 << 20));
        out.data(2, 0, Buf::new(512 << 10));
        let mut sizes = Vec::new();
        while out.has_queued() {
            sizes.push(bytes(&out.take_batch()));
            out.sent();
        }
        assert_eq!(sizes, [16, 3 << 20, 16 + (512 << 10)]);
        assert!(out.is_empty());
    }

    #[test]
    fn held_bytes_count_until_the_batch_is_out() {
        let mut out = Outgoing::new(ReplyStyle::Simple);
        out.success(1);
        let batch = out.take_batch();
        assert_eq!(bytes(&batch), 16);
        assert!(!out.is_empty());
        out.sent();
        assert!(out.is_empty());
    }
}
