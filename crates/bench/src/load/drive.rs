//! Drives a server with a pattern of requests and counts the answers.

use super::histogram::{Histogram, ratio};
use super::pattern::{Offsets, Pattern};
use super::replies::{Content, Replies};
use anyhow::{Context as _, Result, ensure};
use mica_gen::owner::OwnerMap;
use mica_tests::{clock, nbd};
use std::io::Write;
use std::time::{Duration, Instant};

/// A load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load<'a> {
    /// What is asked.
    pub(crate) request: Request,
    /// Where.
    pub(crate) pattern: Pattern,
    /// Bytes per request.
    pub(crate) bytes: u32,
    /// Requests in flight.
    pub(crate) depth: usize,
    /// How long at most; a pattern that ends may end it before.
    pub(crate) limit: Duration,
    /// The owners of the disk's parts; without them nothing is verified.
    pub(crate) owners: Option<&'a OwnerMap>,
    /// Seed of what is random.
    pub(crate) seed: u64,
}

/// What a load asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Request {
    /// The bytes.
    Read,
    /// What they are: data, hole or zero. A look-up without data.
    BlockStatus,
}

/// The result of a load.
#[derive(Clone, Default, Debug)]
pub(crate) struct Outcome {
    /// Time it took.
    pub(crate) elapsed: Duration,
    /// Bytes read.
    pub(crate) bytes: u64,
    /// Latencies of requests; their number is the number of requests.
    pub(crate) latency: Histogram,
    /// Requests that failed.
    pub(crate) failed: u64,
    /// Requests answered with the wrong bytes, and the first of them.
    pub(crate) wrong: u64,
    /// The first wrong answer, in words.
    pub(crate) first_wrong: Option<String>,
}

impl Outcome {
    /// Requests a second.
    pub(crate) fn per_second(&self) -> f64 {
        ratio(self.latency.total(), 1) / self.elapsed.as_secs_f64()
    }

    /// MiB a second.
    pub(crate) fn mib_per_second(&self) -> f64 {
        ratio(self.bytes, 1 << 20) / self.elapsed.as_secs_f64()
    }

    /// Whether every request was answered, and rightly.
    ///
    /// # Errors
    /// If not.
    pub(crate) fn check(&self) -> Result<()> {
        let Self { failed, wrong, first_wrong, .. } = self;
        ensure!(*failed == 0, "{failed} requests failed");
        ensure!(*wrong == 0, "{wrong} WRONG ANSWERS: {first_wrong:?}");
        Ok(())
    }

    /// Counts what `other` did after it, too.
    pub(crate) fn then(self, other: &Self) -> Self {
        let elapsed = self.elapsed + other.elapsed;
        Self { elapsed, ..self.merge(other.clone()) }
    }

    /// Counts what another connection did at the same time, too.
    fn merge(mut self, other: Self) -> Self {
        self.elapsed = self.elapsed.max(other.elapsed);
        self.bytes += other.bytes;
        self.latency.merge(&other.latency);
        self.failed += other.failed;
        self.wrong += other.wrong;
        self.first_wrong = self.first_wrong.or(other.first_wrong);
        self
    }

    /// Counts a wrong answer.
    pub(super) fn note_wrong(&mut self, what: impl FnOnce() -> String) {
        self.wrong += 1;
        self.first_wrong.get_or_insert_with(what);
    }
}

struct Slot {
    offset: u64,
    started: Instant,
    failed: bool,
    wrong: bool,
    answered: u64,
}

/// Puts `load` on all `connections` at once, on each with another seed and from its own thread.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_on_all(connections: &mut [nbd::Connection], load: &Load<'_>) -> Result<Outcome> {
    if let [connection] = connections {
        return run(connection, load);
    }
    let outcomes = std::thread::scope(|scope| {
        let seeds = (0..).map(|number: u64| load.seed + (number << 32));
        let threads: Vec<_> = connections
            .iter_mut()
            .zip(seeds)
            .map(|(connection, seed)| scope.spawn(move || run(connection, &Load { seed, ..*load })))
            .collect();
        let ends = threads.into_iter();
        ends.map(|thread| thread.join().ok().context("a reader panicked")?)
            .collect::<Result<Vec<_>>>()
    })?;
    Ok(outcomes.into_iter().fold(Outcome::default(), Outcome::merge))
}

/// Puts `load` on `connection`.
///
/// # Errors
/// If the server breaks the protocol or the connection. Requests that it fails, or answers wrongly,
/// are counted instead.
pub(crate) fn run(connection: &mut nbd::Connection, load: &Load<'_>) -> Result<Outcome> {
    let bytes = u64::from(load.bytes);
    ensure!(connection.len >= bytes, "a disk of {} bytes is too small", connection.len);
    let start = clock::now();
    let mut driver = Driver {
        load,
        offsets: Offsets::new(load.pattern, load.owners, connection.len, bytes, load.seed),
        slots: (0..load.depth).map(|_| Slot::idle(start)).collect(),
        idle: (0..load.depth).collect(),
        requests: Vec::with_capacity(load.depth * nbd::REQUEST_BYTES),
        zeros: vec![0; if load.owners.is_some() { load.bytes as usize } else { 0 }],
        outcome: Outcome::default(),
    };
    let mut replies = Replies::new();
    let end = start + load.limit;
    let mut now = start;
    while driver.fill(now, end) {
        connection.stream.write_all(&driver.requests)?;
        replies.receive(&mut connection.stream)?;
        now = clock::now();
        driver.take(&mut replies, now)?;
    }
    driver.outcome.elapsed = start.elapsed();
    Ok(driver.outcome)
}

struct Driver<'a> {
    load: &'a Load<'a>,
    offsets: Offsets<'a>,
    slots: Vec<Slot>,
    idle: Vec<usize>,
    requests: Vec<u8>,
    zeros: Vec<u8>,
    outcome: Outcome,
}

impl Driver<'_> {
    /// Prepares a request for each idle slot; false when all is done.
    fn fill(&mut self, now: Instant, end: Instant) -> bool {
        self.requests.clear();
        while now < end
            && let Some(slot) = self.idle.pop()
        {
            let Some(offset) = self.offsets.next() else {
                self.idle.push(slot);
                break;
            };
            let (command, flags) = match self.load.request {
                Request::Read => (nbd::CMD_READ, 0),
                Request::BlockStatus => (nbd::CMD_BLOCK_STATUS, nbd::FLAG_REQ_ONE),
            };
            let cookie = slot as u64;
            let request = nbd::request(command, flags, cookie, offset, self.load.bytes);
            self.requests.extend_from_slice(&request);
            self.slots[slot] = Slot { offset, ..Slot::idle(now) };
        }
        self.idle.len() < self.slots.len()
    }

    /// Takes all replies that are there.
    fn take(&mut self, replies: &mut Replies, now: Instant) -> Result<()> {
        let bytes = u64::from(self.load.bytes);
        let reads = self.load.request == Request::Read;
        while let Some(piece) =
            replies.next(|_| if reads { self.load.bytes as usize } else { 0 })?
        {
            let index = usize::try_from(piece.cookie)?;
            ensure!(index < self.slots.len(), "a reply to request {}, never made", piece.cookie);
            let slot = &mut self.slots[index];
            let (at, data) = match piece.what {
                Content::Data(at, data) => (at.unwrap_or(slot.offset), Some(data)),
                Content::Zeros(at, len) => {
                    ensure!(len <= bytes, "a hole of {len} bytes");
                    (at, Some(&self.zeros[..self.zeros.len().min(usize::try_from(len)?)]))
                }
                Content::Other => (slot.offset, None),
                Content::Failed(_) => {
                    slot.failed = true;
                    (slot.offset, None)
                }
            };
            if let Some(data) = data {
                slot.answered += data.len() as u64;
                if let Some(wrong) = self.load.owners.and_then(|map| map.verify(data, at).err()) {
                    slot.wrong = true;
                    let what = || format!("byte {} is not {:?}'s", wrong.offset, wrong.owner);
                    self.outcome.first_wrong.get_or_insert_with(what);
                }
            }
            if piece.last {
                self.complete(index, now);
            }
        }
        Ok(())
    }

    fn complete(&mut self, index: usize, now: Instant) {
        let slot = &self.slots[index];
        let bytes = u64::from(self.load.bytes);
        let outcome = &mut self.outcome;
        outcome.latency.add(now.saturating_duration_since(slot.started));
        if slot.failed {
            outcome.failed += 1;
        } else if self.load.request == Request::Read {
            outcome.bytes += bytes;
            let offset = slot.offset;
            let short = self.load.owners.is_some() && slot.answered != bytes;
            if slot.wrong || short {
                outcome.note_wrong(|| format!("bytes are missing of the read at {offset}"));
            }
        }
        self.idle.push(index);
    }
}

impl Slot {
    fn idle(now: Instant) -> Self {
        Self { offset: 0, started: now, failed: false, wrong: false, answered: 0 }
    }
}
