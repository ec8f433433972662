//! Disks whose every byte is known, and a client that says exactly what a test tells it to.

use super::connection::{Common, serve};
use super::limits::Limits;
use super::server::{Discard, Export, QueueShared};
use super::stats::Counters;
use mica_block::{Detail, Disk, Error, ErrorKind, Extent, ExtentKind, Geometry, IoFuture, Planned};
use mica_rt::{Backend, Buf, Executor, Stream, simulate, sleep, spawn, yield_now};
use mica_units::{GuestOffset, GuestRange, HostOffset, LayerNumber};
use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[cfg(test)]
mod memory;

#[cfg(test)]
pub(super) use memory::{Event, MemoryDisk};

/// Bytes of one run of a [`PatternDisk`].
pub(super) const RUN_BYTES: u64 = 4096;

/// A disk whose byte at every offset follows from the offset, in runs of several kinds.
pub(super) struct PatternDisk {
    pub(super) len: u64,
    /// Kind of the run with this number.
    pub(super) kind: fn(u64) -> ExtentKind,
    /// Nominal time of a read; none completes on the spot.
    pub(super) latency: Option<Duration>,
    /// Whether planning has to wait.
    pub(super) slow_plans: bool,
    /// Reads that touch this fail.
    pub(super) bad: Range<u64>,
    /// A read that touches this panics.
    pub(super) poisoned: Range<u64>,
    /// Bytes of buffers that reads own now, and the most that was.
    pub(super) reading: Arc<Gauge>,
}

/// A number and its highest value.
#[derive(Default)]
pub(super) struct Gauge {
    now: AtomicU64,
    most: AtomicU64,
}

impl Gauge {
    fn add(&self, count: u64) {
        let now = self.now.fetch_add(count, Ordering::Relaxed) + count;
        self.most.fetch_max(now, Ordering::Relaxed);
    }

    fn remove(&self, count: u64) {
        self.now.fetch_sub(count, Ordering::Relaxed);
    }

    pub(super) fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    pub(super) fn most(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }
}

struct Held {
    gauge: Arc<Gauge>,
    count: u64,
}

impl Held {
    fn new(gauge: &Arc<Gauge>, count: u64) -> Self {
        gauge.add(count);
        Self { gauge: Arc::clone(gauge), count }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gauge.remove(self.count);
    }
}

impl PatternDisk {
    /// All data, at once.
    pub(super) fn data(len: u64) -> Self {
        Self {
            len,
            kind: |_| ExtentKind::Data,
            latency: None,
            slow_plans: false,
            bad: 0..0,
            poisoned: 0..0,
            reading: Arc::default(),
        }
    }

    /// Every kind of run in turn, with latency and plans that wait.
    pub(super) fn mixed(len: u64) -> Self {
        let kind = |run| match run % 7 {
            0 | 1 => ExtentKind::Data,
            2 => ExtentKind::Hole,
            3 => ExtentKind::Encoded,
            4 => ExtentKind::ZeroAllocated,
            5 => ExtentKind::Zero,
            _ => ExtentKind::Data,
        };
        let latency = Some(Duration::from_micros(100));
        Self { kind, latency, slow_plans: true, ..Self::data(len) }
    }

    /// What a read of `range` gives.
    pub(super) fn content(&self, range: Range<u64>) -> Vec<u8> {
        range
            .map(|at| {
                let is_zero = (self.kind)(at / RUN_BYTES).reads_as_zero();
                if is_zero { 0 } else { pattern(at) }
            })
            .collect()
    }

    fn extents_of(&self, range: GuestRange, extents: &mut Vec<Extent>) {
        let mut at = range.start().bytes();
        while at < range.end().bytes() {
            let run = at / RUN_BYTES;
            let end = ((run + 1) * RUN_BYTES).min(range.end().bytes());
            let next = Extent {
                start: GuestOffset::new(at),
                len: end - at,
                kind: (self.kind)(run),
                layer: LayerNumber::BASE,
                host: HostOffset::ZERO,
            };
            match extents.last_mut() {
                Some(last) if last.kind == next.kind => last.len += next.len,
                _ => extents.push(next),
            }
            at = end;
        }
    }
}

fn pattern(at: u64) -> u8 {
    (at ^ at >> 8 ^ at >> 16 ^ at >> 24).to_le_bytes()[0] | 1
}

fn touches(range: &Range<u64>, extent: &Extent) -> bool {
    let start = extent.start.bytes();
    range.start < start + extent.len && start < range.end
}

impl Disk for PatternDisk {
    fn geometry(&self) -> Geometry {
        Geometry { len: self.len, preferred_bytes: 65536 }
    }

    fn plan<'a>(
        &'a self,
        range: GuestRange,
        _detail: Detail,
        extents: &'a mut Vec<Extent>,
    ) -> Planned<'a> {
        assert!(range.end().bytes() <= self.len, "the server checks the range");
        // Every third place waits, so that both ways are used.
        if self.slow_plans && (range.start().bytes() / RUN_BYTES).is_multiple_of(3) {
            return Planned::Pending(Box::pin(async move {
                yield_now().await;
                self.extents_of(range, extents);
                Ok(())
            }));
        }
        self.extents_of(range, extents);
        Planned::Ready(Ok(()))
    }

    fn read(&self, extent: &Extent, mut buf: Buf) -> IoFuture {
        assert_eq!(buf.len() as u64, extent.len, "the server sizes the buffer");
        assert!(!touches(&self.poisoned, extent), "this panic is part of the test");
        let start = extent.start.bytes();
        let is_bad = touches(&self.bad, extent);
        let fill = move |buf: &mut Buf| {
            for (at, byte) in (start..).zip(buf.iter_mut()) {
                *byte = pattern(at);
            }
            if is_bad { Err(io::Error::from_raw_os_error(5)) } else { Ok(buf.len()) }
        };
        let outcome = |result: io::Result<usize>| {
            result.map(drop).map_err(|error| Error::from_io("reading the pattern", error))
        };
        let held = Held::new(&self.reading, extent.len);
        let Some(latency) = self.latency else {
            let result = outcome(fill(&mut buf));
            return mica_block::ready(result, buf);
        };
        IoFuture::boxed(async move {
            let (result, buf) = simulate(buf, latency, Box::new(fill)).await;
            drop(held);
            (outcome(result), buf)
        })
    }
}

/// A disk that cannot plan.
pub(super) struct BrokenDisk;

impl Disk for BrokenDisk {
    fn geometry(&self) -> Geometry {
        Geometry { len: 1 << 20, preferred_bytes: 512 }
    }

    fn plan<'a>(&'a self, _: GuestRange, _: Detail, _: &'a mut Vec<Extent>) -> Planned<'a> {
        Planned::Ready(Err(Error::new(ErrorKind::Corrupt, "the map is nonsense")))
    }

    fn read(&self, _: &Extent, _: Buf) -> IoFuture {
        unreachable!("nothing was planned")
    }
}

/// A server without sockets: connections are streams in memory.
pub(super) struct World {
    common: Arc<Common>,
    queue: Arc<QueueShared>,
    open: Rc<Cell<usize>>,
    /// See [`PatternDisk::reading`].
    pub(super) reading: Arc<Gauge>,
}

/// Runs `test` in the simulator, in several orders of events.
pub(super) fn simulated(disk: impl Fn() -> PatternDisk, test: impl AsyncFn(World)) {
    simulated_seeds(0..5, disk, test);
}

/// As [`simulated`], in as many orders as there are `seeds`.
pub(super) fn simulated_seeds(
    seeds: Range<u64>,
    disk: impl Fn() -> PatternDisk,
    test: impl AsyncFn(World),
) {
    for seed in seeds {
        let disk = disk();
        let reading = Arc::clone(&disk.reading);
        simulated_once(seed, World::new(Arc::new(disk), Discard::default(), reading), &test);
    }
}

/// As [`simulated`], with a disk that is written.
#[cfg(test)]
pub(super) fn simulated_memory(
    disk: impl Fn() -> MemoryDisk,
    discard: Discard,
    test: impl AsyncFn(World, Arc<MemoryDisk>),
) {
    for seed in 0..5 {
        let disk = Arc::new(disk());
        let world = World::new(Arc::clone(&disk) as _, discard, Arc::default());
        simulated_once(seed, world, &async |world| test(world, Arc::clone(&disk)).await);
    }
}

/// As [`simulated`], with a disk that cannot plan.
pub(super) fn simulated_with_broken_disk(test: impl AsyncFn(World)) {
    simulated_once(0, World::new(Arc::new(BrokenDisk), Discard::default(), Arc::default()), &test);
}

fn simulated_once(seed: u64, world: World, test: &impl AsyncFn(World)) {
    let executor = Executor::new(Backend::Sim { seed }).expect("the simulator");
    executor.block_on(test(world));
}

impl World {
    fn new(disk: Arc<dyn Disk>, discard: Discard, reading: Arc<Gauge>) -> Self {
        let export =
            Export { disk, name: "disk".to_owned(), description: "a pattern".to_owned(), discard };
        let common = Common::new(vec![export], Limits::default(), Arc::default());
        Self { common: Arc::new(common), queue: Arc::default(), open: Rc::default(), reading }
    }

    /// A client that has said nothing yet.
    pub(super) fn connect(&self) -> Client {
        let (near, far) = Stream::memory_pair(PIPE_BYTES);
        let (common, queue) = (Arc::clone(&self.common), Arc::clone(&self.queue));
        let open = Rc::clone(&self.open);
        open.set(open.get() + 1);
        spawn(async move {
            serve(far, common, queue).await;
            open.set(open.get() - 1);
        });
        Client { stream: near, received: VecDeque::new(), ended: false }
    }

    /// A client in the transmission phase, with structured replies and block status.
    pub(super) async fn session(&self) -> Client {
        let mut client = self.connect();
        client.greet(3).await;
        client.option(8, &[]).await;
        client.expect_ack(8).await;
        client.option(10, &meta_data(b"disk", &[b"base:allocation"])).await;
        assert_eq!(client.option_replies(10).await.len(), 2);
        client.option(7, &info_data(b"disk", &[])).await;
        assert_eq!(client.option_replies(7).await.len(), 2);
        client
    }

    /// A client in the transmission phase, with simple replies.
    pub(super) async fn simple_session(&self) -> Client {
        let mut client = self.connect();
        client.greet(3).await;
        client.option(7, &info_data(b"", &[])).await;
        assert_eq!(client.option_replies(7).await.len(), 2);
        client
    }

    /// Begins a shutdown.
    pub(super) fn stop(&self) {
        self.common.stop.raise();
    }

    pub(super) fn counters(&self) -> Counters {
        let mut sum = Counters::default();
        self.queue.stats.add_to(&mut sum);
        sum
    }

    /// Connections that the server has not ended.
    pub(super) fn open(&self) -> usize {
        self.open.get()
    }

    /// Waits, in virtual time, until the server has ended all but `count` connections.
    pub(super) async fn until_open(&self, count: usize) {
        for _ in 0..10_000 {
            if self.open() == count {
                return;
            }
            sleep(Duration::from_millis(1)).await;
        }
        panic!("{} connections are open, not {count}", self.open());
    }

    /// Shows that a client that does nothing wrong is served.
    pub(super) async fn assert_serves(&self) {
        let mut client = self.session().await;
        client.request(0, 0, 77, 0, 512).await;
        assert_eq!(client.reply_data(77).await.len(), 512);
        client.request(0, 2, 78, 0, 0).await;
        assert!(client.is_closed().await);
    }
}

/// Bytes that a direction of a connection holds, as a socket buffer does.
const PIPE_BYTES: usize = 64 << 10;

/// A client that does what the test says.
pub(super) struct Client {
    pub(super) stream: Stream,
    received: VecDeque<u8>,
    ended: bool,
}

/// A reply to a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Reply {
    Simple { cookie: u64, error: u32 },
    Chunk { is_last: bool, kind: u16, cookie: u64, data: Vec<u8> },
}

impl Client {
    pub(super) async fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.stream.send(VecDeque::from([Buf::from_slice(bytes)])).await
    }

    /// The next `len` bytes, or `None` if the connection ends before them.
    pub(super) async fn receive(&mut self, len: usize) -> Option<Vec<u8>> {
        while self.received.len() < len {
            let (result, buf) = self.stream.recv(Buf::new(64 << 10)).await;
            match result {
                Ok(0) | Err(_) => {
                    self.ended = true;
                    return None;
                }
                Ok(count) => self.received.extend(&buf[..count]),
            }
        }
        Some(self.received.drain(..len).collect())
    }

    async fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.receive(N).await.map(|bytes| bytes.try_into().expect("N bytes"))
    }

    async fn u32(&mut self) -> Option<u32> {
        self.array().await.map(u32::from_be_bytes)
    }

    /// Whether the server has ended the connection, without a further word.
    pub(super) async fn is_closed(&mut self) -> bool {
        self.receive(1).await.is_none()
    }

    /// Takes the greeting and answers with `flags`.
    pub(super) async fn greet(&mut self, flags: u32) {
        let greeting = self.receive(18).await.expect("a greeting");
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        assert_eq!(greeting[16..], [0, 3]);
        self.send(&flags.to_be_bytes()).await.expect("connected");
    }

    pub(super) async fn option(&mut self, option: u32, data: &[u8]) {
        let len = u32::try_from(data.len()).expect("short");
        self.send(&option_header(option, len)).await.expect("connected");
        self.send(data).await.expect("connected");
    }

    /// One reply to `option`: its type and data.
    pub(super) async fn option_reply(&mut self, option: u32) -> Option<(u32, Vec<u8>)> {
        let magic = self.array().await?;
        assert_eq!(u64::from_be_bytes(magic), 0x0003_e889_0455_65a9);
        assert_eq!(self.u32().await?, option);
        let reply = self.u32().await?;
        let len = self.u32().await?;
        Some((reply, self.receive(len as usize).await?))
    }

    /// All replies to `option`, the final one included.
    pub(super) async fn option_replies(&mut self, option: u32) -> Vec<(u32, Vec<u8>)> {
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

    pub(super) async fn expect_ack(&mut self, option: u32) {
        assert_eq!(self.option_replies(option).await, [(1, Vec::new())]);
    }

    /// Expects one error reply; gives its type without the error bit.
    pub(super) async fn expect_error(&mut self, option: u32) -> u32 {
        let replies = self.option_replies(option).await;
        assert_eq!(replies.len(), 1, "an error and nothing else");
        assert!(replies[0].1.len() <= 256, "the text is bounded");
        assert_eq!(replies[0].0 >> 31, 1);
        replies[0].0 & 0x7fff_ffff
    }

    pub(super) async fn request(&self, flags: u16, kind: u16, cookie: u64, at: u64, len: u32) {
        self.send(&request(flags, kind, cookie, at, len)).await.expect("connected");
    }

    /// One simple reply or chunk. The data of a simple reply is left to be received.
    pub(super) async fn reply(&mut self) -> Option<Reply> {
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
    pub(super) async fn chunks(&mut self, cookie: u64) -> Vec<(u16, Vec<u8>)> {
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
    pub(super) async fn reply_data(&mut self, cookie: u64) -> Vec<u8> {
        let chunks = self.chunks(cookie).await;
        assemble(&chunks, 0)
    }

    /// The one descriptor list of a block status.
    pub(super) async fn status(&mut self, cookie: u64) -> Vec<(u32, u32)> {
        let chunks = self.chunks(cookie).await;
        assert_eq!(chunks.len(), 1);
        let (kind, data) = &chunks[0];
        assert_eq!((*kind, u32_at(data, 0)), (5, 1));
        data[4..].chunks(8).map(|one| (u32_at(one, 0), u32_at(one, 4))).collect()
    }

    /// The error of a structured reply that consists of nothing else, and its offset.
    pub(super) async fn chunk_error(&mut self, cookie: u64) -> (u32, Option<u64>) {
        let chunks = self.chunks(cookie).await;
        assert_eq!(chunks.len(), 1, "an error and nothing else");
        decode_error(&chunks[0])
    }
}

/// Puts the content chunks of a read that starts at `start` together. Every byte comes once.
pub(super) fn assemble(chunks: &[(u16, Vec<u8>)], start: u64) -> Vec<u8> {
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

pub(super) fn decode_error((kind, data): &(u16, Vec<u8>)) -> (u32, Option<u64>) {
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

pub(super) fn option_header(option: u32, len: u32) -> Vec<u8> {
    let mut out = b"IHAVEOPT".to_vec();
    out.extend(option.to_be_bytes());
    out.extend(len.to_be_bytes());
    out
}

/// The data of INFO and GO.
pub(super) fn info_data(name: &[u8], infos: &[u16]) -> Vec<u8> {
    let mut out = string(name);
    out.extend(u16::try_from(infos.len()).expect("few").to_be_bytes());
    out.extend(infos.iter().flat_map(|info| info.to_be_bytes()));
    out
}

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
pub(super) fn meta_data(name: &[u8], queries: &[&[u8]]) -> Vec<u8> {
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

pub(super) fn request(flags: u16, kind: u16, cookie: u64, at: u64, len: u32) -> Vec<u8> {
    let mut out = 0x2560_9513_u32.to_be_bytes().to_vec();
    out.extend(flags.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(cookie.to_be_bytes());
    out.extend(at.to_be_bytes());
    out.extend(len.to_be_bytes());
    out
}
