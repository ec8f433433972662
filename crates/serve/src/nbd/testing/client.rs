//! A client that is scripted by a test, and the bytes that it sends and receives.

#[cfg(test)]
use crate::tls::testing;
use mica_rt::{Buf, Stream};
#[cfg(test)]
use rustls::ClientConnection;
#[cfg(test)]
use std::cell::Cell;
use std::collections::VecDeque;
use std::io;

// Errors as they are sent.
pub(in crate::nbd) const EPERM: u32 = 1;
pub(in crate::nbd) const EIO: u32 = 5;
pub(in crate::nbd) const EINVAL: u32 = 22;
pub(in crate::nbd) const ENOSPC: u32 = 28;
pub(in crate::nbd) const EOVERFLOW: u32 = 75;
pub(in crate::nbd) const ENOTSUP: u32 = 95;

/// A client that does what the test says.
pub(in crate::nbd) struct Client {
    pub(in crate::nbd) stream: Stream,
    received: VecDeque<u8>,
    ended: bool,
    /// Where it speaks TLS. Taken out while it is used.
    #[cfg(test)]
    tls: Cell<Option<Box<ClientConnection>>>,
}

/// A reply to a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::nbd) enum Reply {
    Simple { cookie: u64, error: u32 },
    Chunk { is_last: bool, kind: u16, cookie: u64, data: Vec<u8> },
}

impl Client {
    pub(super) fn new(stream: Stream) -> Self {
        Self {
            stream,
            received: VecDeque::new(),
            ended: false,
            #[cfg(test)]
            tls: Cell::default(),
        }
    }

    /// Speaks TLS from here on.
    #[cfg(test)]
    pub(in crate::nbd) async fn start_tls(
        &mut self,
        mut connection: Box<ClientConnection>,
    ) -> io::Result<()> {
        self.option(5, &[]).await;
        self.expect_ack(5).await;
        let outcome = testing::shake_hands(&mut connection, &self.stream).await;
        self.tls.set(Some(connection));
        outcome
    }

    pub(in crate::nbd) async fn send(&self, bytes: &[u8]) -> io::Result<()> {
        #[cfg(test)]
        if let Some(mut connection) = self.tls.take() {
            let outcome = testing::send(&mut connection, &self.stream, bytes).await;
            self.tls.set(Some(connection));
            return outcome;
        }
        self.stream.send(VecDeque::from([Buf::from_slice(bytes)])).await
    }

    /// The next `len` bytes, or `None` if the connection ends before them.
    pub(in crate::nbd) async fn receive(&mut self, len: usize) -> Option<Vec<u8>> {
        while self.received.len() < len {
            let Some(bytes) = self.receive_some().await else {
                self.ended = true;
                return None;
            };
            self.received.extend(bytes);
        }
        Some(self.received.drain(..len).collect())
    }

    async fn receive_some(&self) -> Option<Vec<u8>> {
        #[cfg(test)]
        if let Some(mut connection) = self.tls.take() {
            let outcome = testing::receive(&mut connection, &self.stream).await;
            self.tls.set(Some(connection));
            return outcome.ok();
        }
        let (result, buf) = self.stream.recv(Buf::new(64 << 10)).await;
        let count = result.ok().filter(|count| *count > 0)?;
        Some(buf[..count].to_vec())
    }

    /// Whether the server ended TLS before the connection.
    #[cfg(test)]
    pub(in crate::nbd) fn heard_goodbye(&self) -> bool {
        let mut connection = self.tls.take().expect("it speaks TLS");
        let state = connection.process_new_packets();
        self.tls.set(Some(connection));
        state.is_ok_and(|state| state.peer_has_closed())
    }

    async fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.receive(N).await.map(|bytes| bytes.try_into().expect("N bytes"))
    }

    async fn u32(&mut self) -> Option<u32> {
        self.array().await.map(u32::from_be_bytes)
    }

    /// Whether the server has ended the connection, without a further word.
    pub(in crate::nbd) async fn is_closed(&mut self) -> bool {
        self.receive(1).await.is_none()
    }

    /// Takes the greeting and answers with `flags`.
    pub(in crate::nbd) async fn greet(&mut self, flags: u32) {
        let greeting = self.receive(18).await.expect("a greeting");
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        assert_eq!(greeting[16..], [0, 3]);
        self.send(&flags.to_be_bytes()).await.expect("connected");
    }

    pub(in crate::nbd) async fn option(&mut self, option: u32, data: &[u8]) {
        let len = u32::try_from(data.len()).expect("short");
        self.send(&option_header(option, len)).await.expect("connected");
        self.send(data).await.expect("connected");
    }

    /// One reply to `option`: its type and data.
    pub(in crate::nbd) async fn option_reply(&mut self, option: u32) -> Option<(u32, Vec<u8>)> {
        let magic = self.array().await?;
        assert_eq!(u64::from_be_bytes(magic), 0x0003_e889_0455_65a9);
        assert_eq!(self.u32().await?, option);
        let reply = self.u32().await?;
        let len = self.u32().await?;
        Some((reply, self.receive(len as usize).await?))
    }

    /// All replies to `option`, the final one included.
    pub(in crate::nbd) async fn option_replies(&mut self, option: u32) -> Vec<(u32, Vec<u8>)> {
        let mut replies = Vec::new();
        loop {
            let reply = self.option_reply(option).await.expect("a reply");
            let is_final = reply.0 == 1 || reply.0 >> 31 == 1;
            replies.push(reply);
            if is_final {
                return replies;
            }
        }
    }

    pub(in crate::nbd) async fn expect_ack(&mut self, option: u32) {
        assert_eq!(self.option_replies(option).await, [(1, Vec::new())]);
    }

    /// Expects one error reply; gives its type without the error bit.
    pub(in crate::nbd) async fn expect_error(&mut self, option: u32) -> u32 {
        let replies = self.option_replies(option).await;
        assert_eq!(replies.len(), 1, "an error and nothing else");
        assert!(replies[0].1.len() <= 256, "the text is bounded");
        assert_eq!(replies[0].0 >> 31, 1);
        replies[0].0 & 0x7fff_ffff
    }

    pub(in crate::nbd) async fn request(
        &self,
        flags: u16,
        kind: u16,
        cookie: u64,
        at: u64,
        len: u32,
    ) {
        self.send(&request(flags, kind, cookie, at, len)).await.expect("connected");
    }

    /// One simple reply or chunk. The data of a simple reply is left to be received.
    pub(in crate::nbd) async fn reply(&mut self) -> Option<Reply> {
        match self.u32().await? {
            0x6744_6698 => {
                let error = self.u32().await?;
                let cookie = u64::from_be_bytes(self.array().await?);
                Some(Reply::Simple { cookie, error })
            }
            0x668e_33ef => {
                let flags = u16::from_be_bytes(self.array().await?);
                let kind = u16::from_be_bytes(self.array().await?);
                let cookie = u64::from_be_bytes(self.array().await?);
                let len = self.u32().await?;
                let data = self.receive(len as usize).await?;
                Some(Reply::Chunk { is_last: flags & 1 == 1, kind, cookie, data })
            }
            other => panic!("{other:#x} is no reply"),
        }
    }

    /// The chunks up to the last one, which must all be for `cookie`.
    pub(in crate::nbd) async fn chunks(&mut self, cookie: u64) -> Vec<(u16, Vec<u8>)> {
        let mut chunks = Vec::new();
        loop {
            match self.reply().await.expect("a reply") {
                Reply::Chunk { is_last, kind, cookie: of, data } if of == cookie => {
                    chunks.push((kind, data));
                    if is_last {
                        return chunks;
                    }
                }
                other => panic!("{other:?} is no chunk for {cookie}"),
            }
        }
    }

    /// The bytes of a structured read that starts at 0, put together from its chunks.
    pub(in crate::nbd) async fn reply_data(&mut self, cookie: u64) -> Vec<u8> {
        let chunks = self.chunks(cookie).await;
        assemble(&chunks, 0)
    }

    /// The one descriptor list of a block status.
    pub(in crate::nbd) async fn status(&mut self, cookie: u64) -> Vec<(u32, u32)> {
        let chunks = self.chunks(cookie).await;
        assert_eq!(chunks.len(), 1);
        let (kind, data) = &chunks[0];
        assert_eq!((*kind, u32_at(data, 0)), (5, 1));
        data[4..].chunks(8).map(|one| (u32_at(one, 0), u32_at(one, 4))).collect()
    }

    /// The error of a structured reply that consists of nothing else, and its offset.
    pub(in crate::nbd) async fn chunk_error(&mut self, cookie: u64) -> (u32, Option<u64>) {
        let chunks = self.chunks(cookie).await;
        assert_eq!(chunks.len(), 1, "an error and nothing else");
        decode_error(&chunks[0])
    }
}

/// Puts the content chunks of a read that starts at `start` together. Every byte comes once.
pub(in crate::nbd) fn assemble(chunks: &[(u16, Vec<u8>)], start: u64) -> Vec<u8> {
    let mut parts: Vec<(u64, Vec<u8>)> = Vec::new();
    for (kind, data) in chunks {
        let at = u64_at(data, 0);
        match kind {
            1 => parts.push((at, data[8..].to_vec())),
            2 => parts.push((at, vec![0; u32_at(data, 8) as usize])),
            other => panic!("chunk type {other} has no content"),
        }
    }
    parts.sort();
    let mut out = Vec::new();
    for (at, data) in parts {
        assert_eq!(at, start + out.len() as u64, "no gap and no overlap");
        out.extend(data);
    }
    out
}

pub(in crate::nbd) fn decode_error((kind, data): &(u16, Vec<u8>)) -> (u32, Option<u64>) {
    let text_len = usize::from(u16::from_be_bytes([data[4], data[5]]));
    assert!(std::str::from_utf8(&data[6..6 + text_len]).is_ok());
    let offset = match kind {
        0x8001 => None,
        0x8002 => Some(u64_at(data, 6 + text_len)),
        other => panic!("chunk type {other} is no error"),
    };
    (u32_at(data, 0), offset)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

pub(in crate::nbd) fn option_header(option: u32, len: u32) -> Vec<u8> {
    let mut out = b"IHAVEOPT".to_vec();
    out.extend(option.to_be_bytes());
    out.extend(len.to_be_bytes());
    out
}

/// The data of INFO and GO.
pub(in crate::nbd) fn info_data(name: &[u8], infos: &[u16]) -> Vec<u8> {
    let mut out = string(name);
    out.extend(u16::try_from(infos.len()).expect("few").to_be_bytes());
    out.extend(infos.iter().flat_map(|info| info.to_be_bytes()));
    out
}

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
pub(in crate::nbd) fn meta_data(name: &[u8], queries: &[&[u8]]) -> Vec<u8> {
    let mut out = string(name);
    out.extend(u32::try_from(queries.len()).expect("few").to_be_bytes());
    out.extend(queries.iter().flat_map(|query| string(query)));
    out
}

fn string(bytes: &[u8]) -> Vec<u8> {
    let mut out = u32::try_from(bytes.len()).expect("short").to_be_bytes().to_vec();
    out.extend(bytes);
    out
}

pub(in crate::nbd) fn request(flags: u16, kind: u16, cookie: u64, at: u64, len: u32) -> Vec<u8> {
    let mut out = 0x2560_9513_u32.to_be_bytes().to_vec();
    out.extend(flags.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(cookie.to_be_bytes());
    out.extend(at.to_be_bytes());
    out.extend(len.to_be_bytes());
    out
}
