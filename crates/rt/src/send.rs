//! Buffers that are sent together.

use crate::buf::Buf;
use std::collections::VecDeque;

/// Maximum number of buffers in one sendmsg: the kernel's UIO_MAXIOV.
pub(crate) const SEND_BUFS_MAX: usize = 1024;

/// Buffers that are sent in order, and the progress so far.
pub(crate) struct SendParts {
    /// Those that are not completely sent.
    pub(crate) bufs: VecDeque<Buf>,
    pub(crate) sent: usize,
    pub(crate) scratch: SendScratch,
}

impl SendParts {
    pub(crate) fn new(bufs: VecDeque<Buf>) -> Self {
        Self { bufs, sent: 0, scratch: SendScratch::default() }
    }

    /// Drops `count` sent bytes from the front.
    pub(crate) fn advance(&mut self, count: usize) {
        self.sent += count;
        let mut left = count;
        while let Some(front) = self.bufs.front_mut() {
            if left < front.len() {
                front.advance(left);
                return;
            }
            left -= front.len();
            self.bufs.pop_front();
        }
        assert_eq!(left, 0, "sent more than was asked");
    }
}

/// Memory that a sendmsg names, kept with the operation, which owns it until it is
/// complete.
#[derive(Default)]
pub(crate) struct SendScratch {
    pub(crate) message: Option<Box<(libc::msghdr, Vec<libc::iovec>)>>,
}
