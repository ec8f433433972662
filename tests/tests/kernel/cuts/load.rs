//! A guest that writes: several requests in flight at once, and flushes among them. It records how
//! long the log was when it knew a request to be durable.

use anyhow::{Context, Result, ensure};
use mica_gen::Rng;
use mica_tests::guest::{Answer, Guest, Request};
use mica_tests::power::{Effect, History, SECTOR, stamps};
use rustix::fs::Advice;
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

/// Maximum number of requests in flight at once.
const UNDER_WAY_MAX: u64 = 12;

/// A request that changes the disk.
#[derive(Clone, Debug)]
pub(super) struct Change {
    sectors: Range<u64>,
    number: u64,
}

/// A request that has no answer yet.
enum Sent {
    Change {
        change: Change,
        fua: bool,
    },
    /// A flush, and what had been acknowledged when it was sent: that is what it makes durable.
    Flush(Vec<Change>),
}

/// A guest at work.
pub(super) struct Load<'a> {
    pub(super) guest: Guest,
    pub(super) history: &'a mut History,
    pub(super) rng: &'a mut Rng,
    /// The file of the log that is recorded.
    pub(super) log: &'a Path,
    /// The image file, which the kernel may write back whenever it likes.
    pub(super) image: &'a File,
    /// What was acknowledged, and no flush was sent since.
    pub(super) acknowledged: Vec<Change>,
}

impl Load<'_> {
    /// Sends at most `count` requests, and returns when all are answered.
    pub(super) fn run(&mut self, count: u64) -> Result<()> {
        let mut under_way: HashMap<u64, Sent> = HashMap::new();
        let (mut sent, mut center) = (0, 0);
        while sent < count || !under_way.is_empty() {
            if self.rng.percent(2) {
                // Starts writing back dirty pages without waiting for them.
                rustix::fs::fadvise(self.image, 0, None, Advice::DontNeed)?;
            }
            let is_full = under_way.len() as u64 > self.rng.below(UNDER_WAY_MAX);
            if sent == count || is_full {
                self.receive(&mut under_way)?;
                continue;
            }
            sent += 1;
            let flushes = under_way.values().any(|sent| matches!(sent, Sent::Flush(_)));
            if !flushes && self.rng.percent(8) {
                let cookie = self.guest.send(&Request::Flush)?;
                under_way.insert(cookie, Sent::Flush(std::mem::take(&mut self.acknowledged)));
                continue;
            }
            if self.rng.percent(20) {
                center = self.rng.below(self.history.count());
            }
            let sectors = self.sectors(center);
            let is_free = under_way.values().all(|sent| match sent {
                Sent::Flush(_) => true,
                Sent::Change { change: Change { sectors: taken, .. }, .. } => {
                    sectors.end <= taken.start || taken.end <= sectors.start
                }
            });
            if is_free {
                self.change(sectors, &mut under_way)?;
            }
        }
        Ok(())
    }

    /// Makes durable all that was acknowledged, by whichever server.
    pub(super) fn flush(&mut self) -> Result<()> {
        ensure!(self.guest.flush()? == 0, "a flush fails");
        let changes = std::mem::take(&mut self.acknowledged);
        self.settle(&changes)
    }

    /// Sectors near `center` or anywhere, often whole blocks or whole clusters.
    fn sectors(&mut self, center: u64) -> Range<u64> {
        let (all, rng) = (self.history.count(), &mut self.rng);
        let at = if rng.percent(70) { center + rng.below(1024) } else { rng.below(all) };
        let (unit, len) = match rng.below(10) {
            0..2 => (128, 128 * (1 + rng.below(2))),
            2..7 => (8, rng.choose(&[8, 8, 16, 40])),
            _ => (1, rng.choose(&[1, 2, 7, 8, 130, 200])),
        };
        let at = at % all / unit * unit;
        at..(at + len).min(all)
    }

    fn change(&mut self, sectors: Range<u64>, under_way: &mut HashMap<u64, Sent>) -> Result<()> {
        let (offset, len) = (sectors.start * SECTOR, (sectors.end - sectors.start) * SECTOR);
        let len = u32::try_from(len)?;
        let (effect, fua) = match self.rng.below(100) {
            0..78 => (Effect::Stamps, self.rng.percent(5)),
            78..90 => (Effect::Zeros, false),
            _ => (Effect::MayZero, false),
        };
        let number = self.history.begin(&sectors, effect);
        let request = match effect {
            Effect::Stamps => {
                Request::Write { offset, bytes: stamps(sectors.clone(), number), fua }
            }
            Effect::Zeros => {
                Request::Zero { offset, len, no_hole: self.rng.percent(50), fua: false }
            }
            Effect::MayZero => Request::Trim { offset, len, fua: false },
        };
        let cookie = self.guest.send(&request)?;
        under_way.insert(cookie, Sent::Change { change: Change { sectors, number }, fua });
        Ok(())
    }

    fn receive(&mut self, under_way: &mut HashMap<u64, Sent>) -> Result<()> {
        let (cookie, answer) = self.guest.receive()?;
        ensure!(answer == Answer::Done(Vec::new()), "{answer:?}");
        match under_way.remove(&cookie).context("an answer to nothing")? {
            Sent::Change { change, fua: false } => self.acknowledged.push(change),
            Sent::Change { change, fua: true } => self.settle(&[change])?,
            Sent::Flush(changes) => self.settle(&changes)?,
        }
        Ok(())
    }

    fn settle(&mut self, changes: &[Change]) -> Result<()> {
        let log_len = self.log.metadata()?.len();
        for change in changes {
            self.history.settle(&change.sectors, change.number, log_len);
        }
        Ok(())
    }
}
