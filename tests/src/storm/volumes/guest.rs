//! Clients of a volume: each has a part of the disk, whose borders are within blocks.

use super::disk::Disk;
use super::host;
use crate::guest::{Answer, Guest, Request};
use crate::storm::model::View;
use crate::storm::stamp::{self, SECTOR, Seq};
use crate::storm::story::{Counts, Fault, Outcome, Wrong};
use mica_units::Rng;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Requests of a client at once, at most.
const BURST_MAX: u64 = 8;
const COUNTS: [u64; 10] = [1, 2, 7, 8, 8, 8, 8, 16, 40, 128];

/// Clients on one disk.
pub(super) const CLIENTS: u64 = 2;

/// What clients share.
#[derive(Debug)]
pub(super) struct Stage<'a> {
    /// They are to end.
    pub(super) is_over: AtomicBool,
    /// Requests may fail.
    pub(super) may_fail: AtomicBool,
    pub(super) counts: &'a Counts,
    /// The number of the last write.
    pub(super) last: &'a AtomicU64,
    pub(super) stamp: u64,
}

/// How a client ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// It was asked to.
    Stopped,
    /// Its connection is gone.
    Gone,
    /// Its server refused a request.
    Refused,
}

struct Client<'a, 'b> {
    stage: &'a Stage<'b>,
    disk: &'a Disk,
    guest: Guest,
    rng: Rng,
    part: Range<u64>,
}

/// What has no answer yet.
struct Sent {
    range: Range<u64>,
    kind: Kind,
}

enum Kind {
    Write { seq: Seq, fua: bool },
    Read,
}

/// One client, until it is told to end, its server is gone, or something is wrong.
pub(super) fn work(
    stage: &Stage<'_>,
    disk: &Disk,
    socket: &Path,
    (number, seed): (u64, u64),
) -> Outcome<End> {
    let Ok(connection) = host::connect(socket) else { return Ok(End::Gone) };
    let sectors = disk.known().model.len();
    let share = sectors / CLIENTS;
    let end = if number + 1 == CLIENTS { sectors } else { (number + 1) * share };
    let part = number * share..end;
    let (guest, rng) = (Guest::on(connection), Rng::for_part(seed, 1000 + number));
    let mut client = Client { stage, disk, guest, rng, part };
    while !stage.is_over.load(Ordering::Relaxed) {
        match client.burst() {
            Ok(true) => {}
            Ok(false) if stage.may_fail.load(Ordering::Relaxed) => return Ok(End::Refused),
            Ok(false) => {
                return Err(Fault::new(Wrong::Failed, format!("{}: a request failed", disk.name)));
            }
            Err(Failure::Gone) => return Ok(End::Gone),
            Err(Failure::Wrong(fault)) => return Err(fault),
        }
    }
    Ok(End::Stopped)
}

enum Failure {
    Gone,
    Wrong(Fault),
}

impl From<anyhow::Error> for Failure {
    fn from(_: anyhow::Error) -> Self {
        Self::Gone
    }
}

impl Client<'_, '_> {
    /// Some requests at once, and sometimes a flush. `false` if one was refused.
    fn burst(&mut self) -> Result<bool, Failure> {
        let count = 1 + self.rng.below(BURST_MAX);
        let room = (self.part.end - self.part.start) / count;
        let mut under_way = HashMap::new();
        for number in 0..count {
            let first = self.part.start + number * room;
            let len = self.rng.choose(&COUNTS).min(room);
            let start = first + self.rng.below(room - len + 1);
            let sent = self.send(start..start + len)?;
            under_way.insert(sent.0, sent.1);
        }
        let mut is_done = true;
        while !under_way.is_empty() {
            let (cookie, answer) = self.guest.receive()?;
            let Some(sent) = under_way.remove(&cookie) else { return Err(Failure::Gone) };
            self.stage.counts.requests.add();
            match answer {
                Answer::Done(bytes) => self.answered(&sent, &bytes).map_err(Failure::Wrong)?,
                Answer::Error(_) => {
                    self.stage.counts.failed.add();
                    is_done = false;
                }
            }
        }
        if is_done && self.rng.percent(30) {
            let mark = self.disk.known().model.mark();
            if self.guest.flush()? != 0 {
                return Ok(false);
            }
            self.stage.counts.flushes.add();
            self.disk.known().flushed(mark);
        }
        Ok(is_done)
    }

    fn send(&mut self, range: Range<u64>) -> Result<(u64, Sent), Failure> {
        let (offset, count) = (range.start * SECTOR as u64, range.end - range.start);
        let len = u32::try_from(count * SECTOR as u64).map_err(anyhow::Error::from)?;
        let fua = self.rng.percent(10);
        let is_blocks = range.start.is_multiple_of(8) && range.end.is_multiple_of(8);
        let dice = self.rng.below(100);
        let (request, kind) = match dice {
            0..10 => (Request::Read { offset, len }, Kind::Read),
            10..16 => {
                let no_hole = self.rng.percent(30);
                let zero = Request::Zero { offset, len, no_hole, fua };
                (zero, Kind::Write { seq: 0, fua })
            }
            16..22 if is_blocks => {
                (Request::Trim { offset, len, fua }, Kind::Write { seq: 0, fua })
            }
            _ => {
                let seq = self.stage.last.fetch_add(1, Ordering::Relaxed) + 1;
                let bytes = stamp::bytes(self.stage.stamp, range.start, count, seq);
                (Request::Write { offset, bytes, fua }, Kind::Write { seq, fua })
            }
        };
        if let Kind::Write { seq, .. } = kind {
            self.disk.known().send(&range, seq);
        }
        let cookie = self.guest.send(&request)?;
        Ok((cookie, Sent { range, kind }))
    }

    fn answered(&self, sent: &Sent, bytes: &[u8]) -> Outcome {
        let mut known = self.disk.known();
        match sent.kind {
            Kind::Write { seq, fua } => known.acknowledge(&sent.range, seq, fua),
            Kind::Read => {
                let judged = known.model.judge(sent.range.start, bytes, View::Kept);
                if let Err(bad) = judged {
                    let what = format!("{}: a read while it is served: {bad:?}", self.disk.name);
                    return Err(Fault::new(Wrong::LostAcknowledged, what));
                }
            }
        }
        Ok(())
    }
}
