//! Writes and flushes: puts them on a server, over one connection or many, and times them.
//!
//! A slot is a writer: it has one request in flight. What it writes is ready in the slot's own
//! buffer, in which only the stamps change from write to write.

use super::histogram::{Histogram, ratio};
use super::replies::{Content, Replies};
use super::stamp;
use anyhow::{Context, Result, bail, ensure};
use mica_tests::{clock, nbd};
use std::io::Write;
use std::time::{Duration, Instant};

/// Payloads up to here are gathered into one system call.
const GATHERED_BYTES_MAX: usize = 16 << 10;

/// Writes to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteLoad<'a> {
    /// Where, in this order.
    pub(crate) offsets: &'a [u64],
    /// Bytes per write.
    pub(crate) bytes: u32,
    /// Writes in flight on each connection.
    pub(crate) depth: usize,
    /// When what was written is made durable.
    pub(crate) durable: Durable,
    /// How long at most; the writes may end before.
    pub(crate) limit: Duration,
    /// The writer, as stamped on each sector.
    pub(crate) generation: u64,
}

/// When a load makes durable what it wrote. It always does at its end, within its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Durable {
    /// Only at the end.
    AtEnd,
    /// After this many writes: waits for those in flight, flushes, continues.
    Every(u64),
    /// After each write, by the slot that made it, while others continue.
    Each,
}

/// The result of writes.
#[derive(Clone, Default, Debug)]
pub(crate) struct Written {
    /// Time it took.
    pub(crate) elapsed: Duration,
    /// Bytes written.
    pub(crate) bytes: u64,
    /// Latencies of writes.
    pub(crate) writes: Histogram,
    /// Latencies of flushes.
    pub(crate) flushes: Histogram,
    /// Where it wrote.
    pub(crate) offsets: Vec<u64>,
}

impl Written {
    /// Writes a second.
    pub(crate) fn per_second(&self) -> f64 {
        ratio(self.writes.total(), 1) / self.elapsed.as_secs_f64()
    }

    /// Writes a second before the flush at the end, which measures the device.
    pub(crate) fn per_second_before_the_end(&self) -> f64 {
        let flush = Duration::from_secs_f64(self.flushes.max_us() / 1e6);
        let unflushed = self.elapsed.saturating_sub(flush).as_secs_f64();
        ratio(self.writes.total(), 1) / unflushed.max(f64::EPSILON)
    }

    /// MiB a second.
    pub(crate) fn mib_per_second(&self) -> f64 {
        ratio(self.bytes, 1 << 20) / self.elapsed.as_secs_f64()
    }
}

/// Puts `load` on all `connections` at once, each with a share of the offsets and a thread.
///
/// # Errors
/// If a request fails, or the server breaks the protocol or a connection.
pub(crate) fn write(connections: &mut [nbd::Connection], load: &WriteLoad<'_>) -> Result<Written> {
    let share = load.offsets.len().div_ceil(connections.len().max(1)).max(1);
    let start = clock::now();
    if let [connection] = connections {
        return write_one(connection, load, start);
    }
    let outcomes = std::thread::scope(|scope| {
        let shares = connections.iter_mut().zip(load.offsets.chunks(share));
        let threads: Vec<_> = shares
            .map(|(connection, offsets)| {
                scope.spawn(move || write_one(connection, &WriteLoad { offsets, ..*load }, start))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().ok().context("a writer panicked")?)
            .collect::<Result<Vec<_>>>()
    })?;
    Ok(outcomes.into_iter().fold(Written::default(), |mut all, one| {
        all.elapsed = all.elapsed.max(one.elapsed);
        all.bytes += one.bytes;
        all.writes.merge(&one.writes);
        all.flushes.merge(&one.flushes);
        all.offsets.extend(one.offsets);
        all
    }))
}

fn write_one(
    connection: &mut nbd::Connection,
    load: &WriteLoad<'_>,
    start: Instant,
) -> Result<Written> {
    let slot = |_| {
        let mut payload = vec![0; load.bytes as usize];
        stamp::fill(&mut payload, 0, load.generation);
        Slot { started: start, state: State::Idle, payload }
    };
    let mut driver = Driver {
        load,
        slots: (0..load.depth).map(slot).collect(),
        idle: (0..load.depth).rev().collect(),
        to_flush: Vec::new(),
        next: 0,
        unflushed: 0,
        gathered: Vec::new(),
        written: Written::default(),
    };
    let mut replies = Replies::new();
    let mut now = start;
    while driver.fill(&mut connection.stream, now, now >= start + load.limit)? {
        replies.receive(&mut connection.stream)?;
        now = clock::now();
        while let Some(piece) = replies.next(|_| 0)? {
            if let Content::Failed(error) = piece.what {
                bail!("a request fails with {error}");
            }
            let slot = usize::try_from(piece.cookie)?;
            if piece.last {
                driver.complete(slot, now)?;
            }
        }
    }
    driver.written.elapsed = start.elapsed();
    driver.written.offsets = load.offsets.get(..driver.next).unwrap_or_default().to_vec();
    Ok(driver.written)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Writing,
    Flushing,
}

struct Slot {
    started: Instant,
    state: State,
    payload: Vec<u8>,
}

struct Driver<'a> {
    load: &'a WriteLoad<'a>,
    slots: Vec<Slot>,
    idle: Vec<usize>,
    /// Slots whose write they have to flush themselves.
    to_flush: Vec<usize>,
    /// Number of the next offset.
    next: usize,
    /// Writes since the last flush for all.
    unflushed: u64,
    gathered: Vec<u8>,
    written: Written,
}

impl Driver<'_> {
    /// Sends what can be sent; false when everything is done. With `stop` no new write begins.
    fn fill(&mut self, stream: &mut impl Write, now: Instant, stop: bool) -> Result<bool> {
        self.gathered.clear();
        while let Some(slot) = self.to_flush.pop() {
            self.flush(slot, now);
        }
        let due = match self.load.durable {
            Durable::Every(writes) => self.unflushed >= writes,
            Durable::AtEnd | Durable::Each => false,
        };
        let ended = stop || self.next >= self.load.offsets.len();
        if !due && !ended {
            self.fill_writes(stream, now)?;
        } else if self.idle.len() == self.slots.len()
            && self.unflushed > 0
            && let Some(slot) = self.idle.pop()
        {
            self.unflushed = 0;
            self.flush(slot, now);
        }
        stream.write_all(&self.gathered)?;
        Ok(self.idle.len() < self.slots.len())
    }

    fn fill_writes(&mut self, stream: &mut impl Write, now: Instant) -> Result<()> {
        let room = match self.load.durable {
            Durable::Every(writes) => writes - self.unflushed,
            Durable::AtEnd | Durable::Each => u64::MAX,
        };
        for _ in 0..room {
            let Some(&offset) = self.load.offsets.get(self.next) else { break };
            let Some(number) = self.idle.pop() else { break };
            self.next += 1;
            if self.load.durable != Durable::Each {
                self.unflushed += 1;
            }
            let slot = &mut self.slots[number];
            (slot.state, slot.started) = (State::Writing, now);
            stamp::stamp(&mut slot.payload, offset, self.load.generation);
            let cookie = number as u64;
            let request = nbd::request(nbd::CMD_WRITE, 0, cookie, offset, self.load.bytes);
            self.gathered.extend_from_slice(&request);
            if slot.payload.len() <= GATHERED_BYTES_MAX {
                self.gathered.extend_from_slice(&slot.payload);
            } else {
                stream.write_all(&self.gathered)?;
                self.gathered.clear();
                stream.write_all(&slot.payload)?;
            }
        }
        Ok(())
    }

    fn flush(&mut self, number: usize, now: Instant) {
        let slot = &mut self.slots[number];
        (slot.state, slot.started) = (State::Flushing, now);
        self.gathered.extend(nbd::request(nbd::CMD_FLUSH, 0, number as u64, 0, 0));
    }

    fn complete(&mut self, number: usize, now: Instant) -> Result<()> {
        let slot = self.slots.get_mut(number).context("a reply to a request never made")?;
        let latency = now.saturating_duration_since(slot.started);
        let state = std::mem::replace(&mut slot.state, State::Idle);
        ensure!(state != State::Idle, "a second reply to one request");
        if state == State::Flushing {
            self.written.flushes.add(latency);
        } else {
            self.written.writes.add(latency);
            self.written.bytes += u64::from(self.load.bytes);
            if self.load.durable == Durable::Each {
                self.to_flush.push(number);
                return Ok(());
            }
        }
        self.idle.push(number);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Durable, WriteLoad, write};
    use crate::load::null;
    use std::time::Duration;

    fn flushes_of(durable: Durable, connections: usize) -> (u64, u64, u64) {
        let offsets: Vec<u64> = (0..100).map(|number| number * 4096).collect();
        let limit = Duration::from_secs(60);
        let load =
            WriteLoad { offsets: &offsets, bytes: 4096, depth: 4, durable, limit, generation: 1 };
        let written =
            null::with_clients(connections, |clients| write(clients, &load)).expect("written");
        assert_eq!(written.offsets.len(), 100);
        (written.writes.total(), written.flushes.total(), written.bytes)
    }

    #[test]
    fn all_is_written_once_and_flushed_as_often_as_wanted() {
        let bytes = 100 * 4096;
        assert_eq!(flushes_of(Durable::AtEnd, 1), (100, 1, bytes));
        assert_eq!(flushes_of(Durable::Every(32), 1), (100, 4, bytes));
        assert_eq!(flushes_of(Durable::Each, 1), (100, 100, bytes));
        assert_eq!(flushes_of(Durable::Each, 16), (100, 100, bytes));
    }
}
