//! A client that writes for as long as it is let, connects again when it has to, and remembers what
//! was answered.

use super::Outcome;
use super::container::Container;
use anyhow::{Context, Result, bail, ensure};
use mica_tests::clock;
use mica_tests::nbd::{
    CMD_FLUSH, CMD_WRITE, Connection, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC, Wish, request,
};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The disk that it writes.
pub(super) const DISK: &str = "web";
pub(super) const IMAGE: &str = "/var/lib/vm/web.qcow2";
pub(super) const DISK_BYTES: u64 = 1 << 30;
/// One write in each piece, in an order that is not that of the disk.
const PIECE_BYTES: u64 = 64 << 10;
const PIECES: u64 = DISK_BYTES / PIECE_BYTES;
const STEP: u64 = 7919;
const WRITE_BYTES: u32 = 16 << 10;
/// A flush after so many writes. Those after the last one have to survive a kill, too.
const WRITES_OF_A_FLUSH: u64 = 16;
/// The disk and the log of this machine have other users.
const PAUSE: Duration = Duration::from_millis(2);
/// How long it may take until writes are answered again.
const SOON: Duration = Duration::from_secs(30);
/// What a server answers that is about to end.
const ESHUTDOWN: u32 = 108;
/// Reads of one call of qemu-io.
const READS: usize = 300;

/// What was answered: the byte that each piece was last filled with.
#[derive(Default)]
pub(super) struct Written {
    pieces: BTreeMap<u64, u8>,
    count: u64,
    /// How often the client connected.
    connections: u64,
}

impl Outcome for Written {
    fn note(&self) -> String {
        format!(": {} writes so far, over {} connections", self.count, self.connections)
    }
}

impl Written {
    /// Has qemu-io read all of it from the image, which nobody uses.
    pub(super) fn judge(&self, container: &Container) -> Result<String> {
        container.ok(["qemu-img", "check", IMAGE])?;
        let pieces: Vec<_> = self.pieces.iter().collect();
        for some in pieces.chunks(READS) {
            let mut line = "qemu-io -r -f qcow2".to_owned();
            for (offset, byte) in some {
                write!(line, " -c 'read -P {byte} {offset} {WRITE_BYTES}'")?;
            }
            let said = container.shell(&format!("{line} {IMAGE} 2>&1"))?;
            // Its exit code does not say it.
            let wrong = said.lines().find(|line| !line.starts_with("read ") && is_bad(line));
            ensure!(wrong.is_none(), "lost: {}", wrong.unwrap_or_default());
            let read = said.lines().filter(|line| line.starts_with("read ")).count();
            ensure!(read == some.len(), "qemu-io read {read} of {}: {said}", some.len());
        }
        Ok(format!("{} of {} writes in {} places", self.count, self.count, self.pieces.len()))
    }
}

/// Whether qemu-io complains in this line.
fn is_bad(line: &str) -> bool {
    ["Pattern verification failed", "failed", "error"].iter().any(|word| line.contains(word))
}

/// The client; it writes while this lives.
pub(super) struct Load {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<Written>>>,
}

#[derive(Default)]
struct Shared {
    is_ending: AtomicBool,
    answered: AtomicU64,
}

impl Load {
    /// Starts it at the socket `path` of the container, after what it has `written` before.
    pub(super) fn start(container: &Container, path: &str, written: Written) -> Self {
        let shared = Arc::new(Shared::default());
        let (path, theirs) = (container.path(path), shared.clone());
        let thread = std::thread::spawn(move || write_on(&path, &theirs, written));
        Self { shared, thread: Some(thread) }
    }

    /// Waits until it has got further: whatever happened, a server answers it.
    pub(super) fn gets_further(&self) -> Result<()> {
        let wanted = self.shared.answered.load(Ordering::Acquire) + 2 * WRITES_OF_A_FLUSH;
        let is_there = clock::poll(SOON, Duration::from_millis(20), || {
            let has_ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
            let answered = self.shared.answered.load(Ordering::Acquire);
            (has_ended || answered >= wanted).then_some(answered >= wanted)
        });
        match is_there {
            Some(true) => Ok(()),
            Some(false) => bail!("the client has given up"),
            None => bail!("the client is not answered any more"),
        }
    }

    /// Ends it.
    pub(super) fn end(mut self) -> Result<Written> {
        self.shared.is_ending.store(true, Ordering::Release);
        let thread = self.thread.take().context("the client has ended before")?;
        thread.join().map_err(|_| anyhow::anyhow!("the client panicked"))?
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.is_ending.store(true, Ordering::Release);
    }
}

fn write_on(path: &Path, shared: &Shared, mut written: Written) -> Result<Written> {
    while !shared.is_ending.load(Ordering::Acquire) {
        // Without a server there is nothing to do but to try again.
        let Ok(mut connection) = Connection::open(path, DISK, &Wish::default()) else {
            clock::sleep(PAUSE * 10);
            continue;
        };
        written.connections += 1;
        while !shared.is_ending.load(Ordering::Acquire) {
            match written.one(&mut connection) {
                Ok(0) => shared.answered.store(written.count, Ordering::Release),
                Ok(ESHUTDOWN) | Err(_) => break,
                Ok(error) => bail!("the server answers a request with error {error}"),
            }
            clock::sleep(PAUSE);
        }
    }
    Ok(written)
}

impl Written {
    /// Makes the next write, and says with what it is answered: 0 for success.
    fn one(&mut self, connection: &mut Connection) -> Result<u32> {
        if self.count % WRITES_OF_A_FLUSH == WRITES_OF_A_FLUSH - 1 {
            match answer(connection, CMD_FLUSH, 0, &[])? {
                0 => {}
                error => return Ok(error),
            }
        }
        let offset = self.count * STEP % PIECES * PIECE_BYTES;
        let byte = u8::try_from(self.count % 250 + 1)?;
        // Until it is answered, either content is right.
        self.pieces.remove(&offset);
        let data = vec![byte; WRITE_BYTES as usize];
        let error = answer(connection, CMD_WRITE, offset, &data)?;
        if error == 0 {
            self.pieces.insert(offset, byte);
            self.count += 1;
        }
        Ok(error)
    }
}

/// Sends a request, and waits for its answer.
fn answer(connection: &mut Connection, command: u16, offset: u64, data: &[u8]) -> Result<u32> {
    let head = request(command, 0, 1, offset, u32::try_from(data.len())?);
    connection.stream.write_all(&[&head, data].concat())?;
    let mut reply = [0; SIMPLE_REPLY_BYTES];
    connection.stream.read_exact(&mut reply)?;
    let [magic, error, ..] = *reply.as_chunks::<4>().0 else { bail!("a cut reply") };
    ensure!(u32::from_be_bytes(magic) == SIMPLE_REPLY_MAGIC, "no reply: {reply:02x?}");
    Ok(u32::from_be_bytes(error))
}

/// The socket of the disk in the configuration.
pub(super) fn socket() -> PathBuf {
    format!("/run/mica/{DISK}.nbd").into()
}
