//! Drives a device with a load and counts the answers.

use super::ring::{Ask, BLOCK_BYTES};
use super::{DEPTH_MAX, Device, Wake};
use crate::load::Histogram;
use crate::load::drive::Outcome;
use crate::load::pattern::{Offsets, Pattern};
use crate::load::stamp;
use anyhow::{Result, bail, ensure};
use mica_gen::Rng;
use mica_gen::owner::OwnerMap;
use mica_tests::clock;
use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

/// A load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskLoad<'a> {
    /// What is asked, and where.
    pub(crate) access: Access<'a>,
    /// Requests in flight on each queue.
    pub(crate) depth: usize,
    /// How long at most; an access that ends may end it before.
    pub(crate) limit: Duration,
    /// Seed of what is random; writes of another seed have other content.
    pub(crate) seed: u32,
    /// What it means if the server goes away.
    pub(crate) absence: Absence,
}

/// What is asked, in blocks of 4 KiB. Reads may be longer; of those the first block is verified.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Access<'a> {
    /// Reads; verified if owners are given.
    Read(Pattern, Option<&'a OwnerMap>),
    /// Writes to any of these places, repeatedly.
    Rewrite(&'a [u64]),
    /// Writes to each of these places, once.
    Once(&'a [u64]),
    /// Reads what was written (place, generation) and verifies it, once.
    Check(&'a BTreeMap<u64, u64>),
}

/// What it means if the server goes away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Absence {
    /// The run has failed.
    Fails,
    /// As with a monitor that reconnects: the guest waits.
    IsWaitedFor,
}

/// The result of a load.
#[derive(Default, Debug)]
pub(crate) struct Done {
    /// Counts and latencies.
    pub(crate) outcome: Outcome,
    /// Latencies of each queue: each is one of the guest's processors, which waits for its own.
    pub(crate) queues: Vec<Histogram>,
    /// What was acknowledged last: place and generation.
    pub(crate) written: BTreeMap<u64, u64>,
    /// How many times the server went away and came back.
    pub(crate) absences: u32,
}

#[derive(Clone, Copy)]
struct Slot {
    offset: u64,
    generation: u64,
    started: Instant,
}

/// Puts `load` on `device`.
///
/// # Errors
/// If the server breaks the protocol, or goes away and may not. Requests that it fails, or answers
/// wrongly, are counted instead.
pub(crate) fn run(device: &mut Device, load: &DiskLoad<'_>) -> Result<Done> {
    ensure!((1..=DEPTH_MAX).contains(&load.depth), "1 to {DEPTH_MAX} requests are in flight");
    let queues = device.rings.len();
    if let Access::Rewrite(places) = load.access {
        // Otherwise no free place is found for a write.
        ensure!(places.len() >= 2 * load.depth * queues, "{} places are too few", places.len());
    }
    let start = clock::now();
    let idle = Slot { offset: 0, generation: 0, started: start };
    let mut driver = Driver {
        load,
        places: Places::new(load, device),
        slots: vec![vec![idle; load.depth]; queues],
        idle: vec![(0..load.depth).collect(); queues],
        in_flight: 0,
        busy: HashSet::new(),
        block: [0; BLOCK_BYTES],
        writes: 0,
        done: Done { queues: vec![Histogram::default(); queues], ..Done::default() },
    };
    stamp::fill(&mut driver.block, 0, 0);
    let is_read = matches!(load.access, Access::Read(..));
    ensure!(is_read || device.request_bytes == BLOCK_BYTES, "only reads may be longer");
    let end = start + load.limit;
    let mut now = start;
    while driver.fill(device, now, end)? {
        driver.await_answers(device)?;
        now = clock::now();
        driver.take(device, now)?;
    }
    driver.done.outcome.elapsed = start.elapsed();
    let Done { outcome, queues, .. } = &mut driver.done;
    queues.iter().for_each(|queue| outcome.latency.merge(queue));
    Ok(driver.done)
}

struct Driver<'a> {
    load: &'a DiskLoad<'a>,
    places: Places<'a>,
    slots: Vec<Vec<Slot>>,
    idle: Vec<Vec<usize>>,
    in_flight: usize,
    /// Places that are being written: no two writes to one place are in flight, so that it is known
    /// which is the last.
    busy: HashSet<u64>,
    block: [u8; BLOCK_BYTES],
    writes: u64,
    done: Done,
}

impl Driver<'_> {
    /// Offers a request for each idle slot and notifies the server; false when all is done.
    fn fill(&mut self, device: &mut Device, now: Instant, end: Instant) -> Result<bool> {
        // One to each queue in turn: so even a short load is spread over them.
        let mut offered = now < end;
        while offered {
            offered = false;
            for queue in 0..self.idle.len() {
                let Some(&slot) = self.idle[queue].last() else { continue };
                let Some((offset, generation)) = self.places.next(&self.busy) else { break };
                self.idle[queue].pop();
                self.slots[queue][slot] = Slot { offset, generation, started: now };
                self.offer(device, queue, slot)?;
                offered = true;
            }
        }
        for ring in &mut device.rings {
            ring.publish()?;
        }
        Ok(self.in_flight > 0)
    }

    fn offer(&mut self, device: &mut Device, queue: usize, slot: usize) -> Result<()> {
        let offset = self.slots[queue][slot].offset;
        let ring = &mut device.rings[queue];
        let ask = match self.load.access {
            Access::Read(..) | Access::Check(_) => Ask::Read,
            Access::Rewrite(_) | Access::Once(_) => {
                self.writes += 1;
                let generation = u64::from(self.load.seed) << 32 | self.writes;
                self.slots[queue][slot].generation = generation;
                self.busy.insert(offset);
                stamp::stamp(&mut self.block, offset, generation);
                ring.fill(slot, &self.block)?;
                Ask::Write
            }
        };
        self.in_flight += 1;
        ring.offer(slot, ask, offset)
    }

    /// Returns when there is something to take.
    fn await_answers(&mut self, device: &mut Device) -> Result<()> {
        let is_there = |device: &Device| device.rings.iter().any(|ring| ring.has_answers());
        while !is_there(device) {
            for ring in &device.rings {
                ring.ask_for_call()?;
            }
            // No call reports completions from before it was requested.
            if is_there(device) {
                break;
            }
            if device.wait()? == Wake::Gone {
                if self.load.absence == Absence::Fails {
                    bail!("the server closed the connection");
                }
                device.lose()?;
                device.reconnect()?;
                self.done.absences += 1;
                // The server that was notified is gone.
                for ring in &device.rings {
                    ring.kick()?;
                }
            }
        }
        Ok(())
    }

    /// Takes all answers that are there.
    fn take(&mut self, device: &mut Device, now: Instant) -> Result<()> {
        for (queue, ring) in device.rings.iter_mut().enumerate() {
            while let Some((slot, status)) = ring.take()? {
                ensure!(slot < self.load.depth, "slot {slot} was never used");
                let Slot { offset, generation, started } = self.slots[queue][slot];
                self.in_flight -= 1;
                self.idle[queue].push(slot);
                self.done.queues[queue].add(now.saturating_duration_since(started));
                let outcome = &mut self.done.outcome;
                if status != 0 {
                    outcome.failed += 1;
                    self.busy.remove(&offset);
                    continue;
                }
                outcome.bytes += device.request_bytes as u64;
                let wrong = match self.load.access {
                    Access::Read(_, Some(owners)) => {
                        ring.data(slot, &mut self.block)?;
                        owners.verify(&self.block, offset).err().map(|wrong| wrong.offset)
                    }
                    Access::Check(_) => {
                        ring.data(slot, &mut self.block)?;
                        stamp::first_wrong(&self.block, offset, generation)
                    }
                    Access::Read(_, None) => None,
                    Access::Rewrite(_) | Access::Once(_) => {
                        self.busy.remove(&offset);
                        self.done.written.insert(offset, generation);
                        None
                    }
                };
                if let Some(at) = wrong {
                    outcome.note_wrong(|| format!("byte {at} is not what was written there"));
                }
            }
        }
        Ok(())
    }
}

/// Where requests go, and what they write or expect.
enum Places<'a> {
    Offsets(Box<Offsets<'a>>),
    Any(&'a [u64], Rng),
    Once(std::slice::Iter<'a, u64>),
    Check(std::collections::btree_map::Iter<'a, u64, u64>),
}

impl<'a> Places<'a> {
    fn new(load: &DiskLoad<'a>, device: &Device) -> Self {
        let seed = u64::from(load.seed);
        let (disk_bytes, bytes) = (device.disk_bytes, device.request_bytes as u64);
        match load.access {
            Access::Read(pattern, owners) => {
                Self::Offsets(Box::new(Offsets::new(pattern, owners, disk_bytes, bytes, seed)))
            }
            Access::Rewrite(places) => Self::Any(places, Rng::new(seed)),
            Access::Once(places) => Self::Once(places.iter()),
            Access::Check(written) => Self::Check(written.iter()),
        }
    }

    fn next(&mut self, busy: &HashSet<u64>) -> Option<(u64, u64)> {
        match self {
            Self::Offsets(offsets) => offsets.next().map(|offset| (offset, 0)),
            Self::Once(places) => places.next().map(|place| (*place, 0)),
            Self::Check(written) => written.next().map(|(place, generation)| (*place, *generation)),
            Self::Any(places, rng) => loop {
                // At least every other place is free.
                let at = usize::try_from(rng.below(places.len() as u64)).ok()?;
                let place = *places.get(at)?;
                if !busy.contains(&place) {
                    return Some((place, 0));
                }
            },
        }
    }
}
