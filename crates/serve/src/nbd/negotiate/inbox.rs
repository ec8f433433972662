//! What a client sends in the handshake, taken piece by piece.

use super::Refused;
use crate::nbd::channel::Channel;
use crate::nbd::limits::RECEIVE_BYTES_MIN;
use mica_rt::Buf;

/// Received bytes that were not processed yet.
pub(super) struct Inbox<'a, C> {
    channel: &'a C,
    /// Absent while a receive owns it.
    buf: Option<Buf>,
    at: usize,
    end: usize,
}

impl<'a, C: Channel> Inbox<'a, C> {
    pub(super) fn new(channel: &'a C) -> Self {
        Self { channel, buf: Some(Buf::new(RECEIVE_BYTES_MIN)), at: 0, end: 0 }
    }

    pub(super) fn rest(&self) -> &[u8] {
        self.buf.as_ref().map_or(&[], |buf| &buf[self.at..self.end])
    }

    /// Hands at least one and at most `wanted` bytes to `take`.
    async fn some(&mut self, wanted: usize, take: impl FnOnce(&[u8])) -> Result<usize, Refused> {
        if self.at == self.end {
            let buf = self.buf.take().unwrap_or_else(|| Buf::new(RECEIVE_BYTES_MIN));
            let (result, buf) = self.channel.recv(buf).await;
            self.buf = Some(buf);
            self.at = 0;
            self.end = match result {
                Ok(0) => return Err(Refused::Closed),
                Ok(count) => count,
                Err(error) => return Err(Refused::Io(error)),
            };
        }
        let count = self.rest().len().min(wanted);
        take(&self.rest()[..count]);
        self.at += count;
        Ok(count)
    }

    pub(super) async fn array<const N: usize>(&mut self) -> Result<[u8; N], Refused> {
        let mut out = [0; N];
        let mut done = 0;
        while done < N {
            let rest = &mut out[done..];
            done +=
                self.some(rest.len(), |bytes| rest[..bytes.len()].copy_from_slice(bytes)).await?;
        }
        Ok(out)
    }

    /// `len` bytes; the memory for them grows as they arrive.
    pub(super) async fn data(&mut self, len: usize) -> Result<Vec<u8>, Refused> {
        let mut out = Vec::new();
        while out.len() < len {
            let wanted = len - out.len();
            self.some(wanted, |bytes| out.extend(bytes)).await?;
        }
        Ok(out)
    }

    pub(super) async fn skip(&mut self, len: u32) -> Result<(), Refused> {
        let mut left = len as usize;
        while left > 0 {
            left -= self.some(left, |_| {}).await?;
        }
        Ok(())
    }
}
