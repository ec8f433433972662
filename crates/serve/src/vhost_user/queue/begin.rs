//! What is done for a request, from its head to its first answer.

use super::Running;
use super::end::Ended;
use super::slot::{Kind, Progress, Slot, Work};
use crate::discard::Discard;
use crate::sectors::pieces;
use crate::vhost_user::chain::Piece;
use crate::vhost_user::common::Common;
use crate::vhost_user::memory::Memory;
use crate::vhost_user::request::{Action, ID_BYTES, Request, Rules, Status, ZeroRange};
use crate::vhost_user::transfer::{self, Cost, Transfer};
use mica_block::{Planned, Result, Zeroes};
use mica_rt::yield_now;
use mica_units::GuestRange;
use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll};
use virtio_queue::QueueT;
use vm_memory::Bytes;

/// Most bytes that a request in place moves with one operation.
const DIRECT_BYTES_MAX: u64 = 1 << 20;

/// What became of a request at first.
pub(super) enum Begun {
    InFlight,
    Ended,
    /// The rate does not let it through yet, or there is no room.
    Later,
}

impl<'a> Running<'a> {
    /// Begins the request at `head`.
    pub(super) fn begin(&mut self, head: u16) -> Begun {
        let memory = Arc::clone(&self.settings.memory);
        // Of each request, as the disk may have become longer.
        let disk_len = self.disk.geometry().len;
        let rules = Rules { disk_len, is_writable: self.is_writable };
        let request = self
            .chain
            .read(&memory.guest, self.table, head)
            .and_then(|()| Request::parse(&memory.guest, &mut self.chain, rules));
        let request = match request {
            Ok(request) if !self.lost.is_lost() => request,
            // Nothing is done of what may be zeros that were never there.
            Ok(_) => {
                self.mark_taken(head);
                self.give_back(head, 0);
                return Begun::Ended;
            }
            Err(why) => {
                self.mark_taken(head);
                self.refuse_malformed(head, why);
                return Begun::Ended;
            }
        };
        let cost = match &request.action {
            Action::Read(range) => Cost::of(range.len(), &self.chain.writable, &memory),
            Action::Write(range) => Cost::of(range.len(), &self.chain.readable, &memory),
            _ => Cost::of(0, &[], &memory),
        };
        // What runs alone gets by with less (I6).
        if self.used_bytes > 0 && !self.share.covers(self.used_bytes + cost.bytes()) {
            self.is_full = true;
            return Begun::Later;
        }
        // A stop waits for what the previous server took, but not for its rate limits.
        if let Some(limiter) = &self.common.limiter
            && !self.settings.stop
        {
            let bytes = match &request.action {
                Action::Read(range) | Action::Write(range) => Some(range.len()),
                Action::Discard(_) | Action::WriteZeroes(_) => Some(0),
                // They do not count (as of `Throttled`).
                Action::Flush | Action::GetId | Action::Refuse(_) => None,
            };
            let admitted = bytes.map_or(Ok(()), |bytes| limiter.admit(bytes, mica_rt::now()));
            if let Err(wait) = admitted {
                let mut timer = Box::pin(mica_rt::sleep(wait));
                let mut context = Context::from_waker(&self.part_wakers.timer);
                if timer.as_mut().poll(&mut context).is_pending() {
                    self.timer = Some(timer);
                    self.stats.delayed.add(1);
                }
                return Begun::Later;
            }
        }
        self.mark_taken(head);
        self.start(head, request, (cost, memory))
    }

    /// Marks `head` as in flight, unless the previous server did.
    fn mark_taken(&mut self, head: u16) {
        if head < self.queue.size()
            && self.recovered == 0
            && let Some(inflight) = &mut self.inflight
        {
            inflight.taken(head);
        }
        self.recovered = self.recovered.saturating_sub(1);
    }

    fn start(&mut self, head: u16, request: Request, (cost, memory): (Cost, Arc<Memory>)) -> Begun {
        let used = self.used_bytes;
        let covered = self.share.up_to(used + cost.bytes()).saturating_sub(used);
        let window_bytes = cost.window_within(covered);
        let status_at = request.status_at;
        let mut written = Vec::new();
        let kind = kind_of(&request.action);
        let work = match request.action {
            Action::Refuse(status) => {
                self.stats.refused.add(1);
                self.end(&Ended { head, status_at, memory, status, written });
                return Begun::Ended;
            }
            Action::GetId => {
                let status = self.give_id(&memory, &mut written);
                self.end(&Ended { head, status_at, memory, status, written });
                return Begun::Ended;
            }
            Action::Read(range) => {
                self.stats.reads.add(1);
                self.stats.read_bytes.add(range.len());
                written = std::mem::take(&mut self.chain.writable);
                self.read(range, (&memory, &written), window_bytes)
            }
            Action::Write(range) => {
                self.stats.writes.add(1);
                self.stats.written_bytes.add(range.len());
                let pieces = std::mem::take(&mut self.chain.readable);
                self.write(&memory, Transfer { range, pieces }, window_bytes)
            }
            Action::Flush => {
                self.stats.flushes.add(1);
                Work::Long(self.disk.flush())
            }
            Action::Discard(_) if self.common.discard == Discard::Ignore => {
                self.stats.discards.add(1);
                let status = Status::Ok;
                self.end(&Ended { head, status_at, memory, status, written });
                return Begun::Ended;
            }
            Action::Discard(ranges) => {
                self.stats.discards.add(1);
                Work::Empty(Box::pin(discard(self.common, ranges, self.is_write_through)))
            }
            Action::WriteZeroes(ranges) => {
                self.stats.zeroes.add(1);
                Work::Empty(Box::pin(write_zeroes(self.common, ranges, self.is_write_through)))
            }
        };
        let index = self.free.pop().expect("looked before it was taken");
        let began = self.turn_at;
        self.used_bytes += covered;
        let cost = covered;
        let mut slot = Slot { head, status_at, written, memory, kind, began, cost, work };
        let mut context = Context::from_waker(&self.wakers[index]);
        match slot.work.poll(&mut context) {
            Poll::Pending => {
                self.slots[index] = Some(slot);
                Begun::InFlight
            }
            Poll::Ready(result) => {
                self.free.push(index);
                self.end_slot(slot, result);
                Begun::Ended
            }
        }
    }

    /// A read of one extent into one piece is one operation; all else takes longer.
    fn read(
        &mut self,
        range: GuestRange,
        (memory, pieces): (&Arc<Memory>, &[Piece]),
        window_bytes: u64,
    ) -> Work<'a> {
        if let [piece] = pieces
            && range.len() <= DIRECT_BYTES_MAX
            && let Some(buf) = memory.buf(*piece)
        {
            self.extents.clear();
            let list = std::mem::take(&mut self.extents);
            if let Planned::Ready(Ok(plan)) = self.disk.plan(range, list) {
                let io =
                    if let [extent] = &*plan { Some(self.disk.read(extent, buf)) } else { None };
                let (list, in_flight) = plan.into_parts();
                self.extents = list;
                if let Some(io) = io {
                    return Work::Read { io, _in_flight: in_flight };
                }
            }
        }
        let (disk, memory, pieces) = (self.disk, Arc::clone(memory), pieces.to_vec());
        Work::Long(Box::pin(async move {
            transfer::read(disk, &memory, Transfer { range, pieces }, window_bytes).await
        }))
    }

    fn write(&mut self, memory: &Arc<Memory>, transfer: Transfer, window_bytes: u64) -> Work<'a> {
        let is_write_through = self.is_write_through;
        if let [piece] = transfer.pieces[..]
            && transfer.range.len() <= DIRECT_BYTES_MAX
            && !is_write_through
            && let Some(buf) = memory.buf(piece)
            && let Some(_sharing) = self.common.try_share()
        {
            let io = self.disk.write(transfer.range.start(), buf);
            return Work::Write { io, _sharing };
        }
        let (disk, common, memory) = (self.disk, self.common, Arc::clone(memory));
        Work::Long(Box::pin(async move {
            let _sharing = common.share().await;
            transfer::write(disk, &memory, transfer, window_bytes).await?;
            if is_write_through { disk.flush().await } else { Ok(()) }
        }))
    }

    fn give_id(&mut self, memory: &Memory, written: &mut Vec<Piece>) -> Status {
        let id = self.common.id;
        let mut done = 0;
        for piece in std::mem::take(&mut self.chain.writable) {
            let count = (piece.len as usize).min(id.len() - done);
            if memory.guest.write_slice(&id[done..done + count], piece.at).is_err() {
                return Status::IoError;
            }
            done += count;
            written.push(Piece { len: u32::try_from(count).unwrap_or(ID_BYTES), ..piece });
        }
        Status::Ok
    }
}

fn kind_of(action: &Action) -> Kind {
    match action {
        Action::Read(_) => Kind::Read,
        Action::Write(_) => Kind::Write,
        Action::Flush => Kind::Flush,
        _ => Kind::Other,
    }
}

async fn discard(
    common: &Common,
    ranges: Vec<ZeroRange>,
    is_write_through: bool,
) -> Result<Progress> {
    let discard = async |piece: ZeroRange| common.disk.discard(piece.range).await;
    in_pieces(common, ranges, is_write_through, discard).await
}

async fn write_zeroes(
    common: &Common,
    ranges: Vec<ZeroRange>,
    is_write_through: bool,
) -> Result<Progress> {
    let write = async |ZeroRange { range, may_unmap }: ZeroRange| {
        let may_unmap = may_unmap && common.discard == Discard::Unmap;
        common.disk.write_zeroes(range, Zeroes { may_unmap, fast: false }).await
    };
    in_pieces(common, ranges, is_write_through, write).await
}

/// Empties `ranges`, of which a request may name 64 GiB, piece by piece.
async fn in_pieces(
    common: &Common,
    ranges: Vec<ZeroRange>,
    is_write_through: bool,
    empty: impl AsyncFn(ZeroRange) -> Result<()>,
) -> Result<Progress> {
    for ZeroRange { range, may_unmap } in ranges {
        for piece in pieces(range) {
            if common.is_ending() {
                return Ok(Progress::LeftOff);
            }
            let sharing = common.share().await;
            empty(ZeroRange { range: piece, may_unmap }).await?;
            drop(sharing);
            if piece.end() < range.end() {
                // Other tasks run between the pieces.
                yield_now().await;
            }
        }
    }
    if is_write_through {
        common.disk.flush().await?;
    }
    Ok(Progress::Done)
}
