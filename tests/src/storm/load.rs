//! Clients of a served disk: several threads, each with requests in flight, none of which touch
//! sectors that another one is about to change.

use super::aim::Aim;
use super::judge;
use super::model::{Model, View};
use super::stamp::SECTOR;
use super::stamp::{self, Seq, Stamper, Writer};
use super::story::{Counts, Fault, Outcome, Wrong};
use crate::clock;
use crate::guest::{Answer, Guest, Request};
use crate::nbd::{Connection, Wish};
use mica_units::Rng;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How long a client waits for a server that takes over.
const MOVE_LIMIT: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(1);
/// What NBD calls a lack of space.
const NO_SPACE: u32 = 28;
/// How often another range is drawn if one is in use.
const AIMS: u32 = 6;

/// What the clients have to expect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// A server that lives.
    Steady,
    /// A server that may be gone a moment later, and another one there.
    Moving,
    /// The end of the last server.
    Ending,
}

/// What clients share, and those who do something to their server.
#[derive(Debug)]
pub(super) struct Board {
    pub(super) model: Model,
    pub(super) stamper: Stamper,
    /// Requests may fail, since something is short or broken.
    pub(super) may_fail: bool,
    /// Changes may, for lack of space.
    pub(super) lacks_space: bool,
    busy: Vec<Range<u64>>,
    sent: u64,
    answered: u64,
    working: u64,
    faults: Vec<Fault>,
}

impl Board {
    /// Requests that were sent.
    pub(super) fn requests_sent(&self) -> u64 {
        self.sent
    }

    /// Requests that were answered.
    pub(super) fn requests_done(&self) -> u64 {
        self.answered
    }

    /// Whether all clients have ended.
    pub(super) fn is_idle(&self) -> bool {
        self.working == 0
    }
}

/// The board, and those who wait for something on it.
#[derive(Debug)]
pub(super) struct Stage {
    board: Mutex<Board>,
    changed: Condvar,
    /// Of the server, and so of all of its disks.
    phase: Arc<Mutex<Phase>>,
}

/// How much clients do.
#[derive(Clone, Debug)]
pub(super) struct Load {
    pub(super) clients: u64,
    /// Requests of each client.
    pub(super) requests: u64,
    pub(super) seed: u64,
    pub(super) aim: Aim,
    pub(super) mood: Mood,
    /// The name of the disk where there are several; empty where there is one.
    pub(super) export: String,
}

/// How often clients ask for what, in a hundred.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Mood {
    flushes: u64,
    /// Of writes, zeros and trims.
    fuas: u64,
    reads: u64,
    zeroes: u64,
    trims: u64,
    /// Of writes, those that are long.
    long: u64,
}

impl Mood {
    pub(super) fn random(rng: &mut Rng) -> Self {
        Self {
            flushes: rng.choose(&[0, 0, 1, 3, 8, 20]),
            fuas: rng.choose(&[0, 0, 6, 25]),
            reads: rng.choose(&[3, 15]),
            zeroes: rng.choose(&[0, 8, 12]),
            trims: rng.choose(&[0, 8, 12]),
            long: rng.choose(&[0, 0, 10, 60]),
        }
    }

    fn choose(&self, rng: &mut Rng) -> What {
        let dice = rng.below(100);
        let mut bound = 0;
        let shares = [
            (self.flushes, What::Flush),
            (self.reads, What::Read),
            (self.zeroes, What::Zero),
            (self.trims, What::Trim),
        ];
        let found = shares.into_iter().find(|(share, _)| {
            bound += share;
            dice < bound
        });
        found.map_or(What::Write, |(_, what)| what)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Flush,
    Read,
    Zero,
    Trim,
    Write,
}

impl Stage {
    pub(super) fn new(model: Model, stamper: Stamper) -> Self {
        Self::in_phase(Arc::new(Mutex::new(Phase::Steady)), model, stamper)
    }

    /// For another disk of the same server.
    pub(super) fn of_second_disk(&self, model: Model, stamper: Stamper) -> Self {
        Self::in_phase(Arc::clone(&self.phase), model, stamper)
    }

    fn in_phase(phase: Arc<Mutex<Phase>>, model: Model, stamper: Stamper) -> Self {
        let board = Board {
            model,
            stamper,
            may_fail: false,
            lacks_space: false,
            busy: Vec::new(),
            sent: 0,
            answered: 0,
            working: 0,
            faults: Vec::new(),
        };
        Self { board: Mutex::new(board), changed: Condvar::new(), phase }
    }

    /// What the clients have to expect now.
    pub(super) fn phase(&self) -> Phase {
        *self.phase.lock()
    }

    /// From now on they have to expect something else.
    pub(super) fn enter(&self, phase: Phase) {
        *self.phase.lock() = phase;
    }

    pub(super) fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock()
    }

    /// Waits until `count` requests were sent, or nobody sends any more.
    pub(super) fn wait_for(&self, count: u64) {
        let waits = |board: &mut Board| board.sent < count && board.working > 0;
        self.changed.wait_while(&mut self.board(), waits);
    }

    /// Lets clients work while `meanwhile` does something to their server.
    pub(super) fn run<T>(
        &self,
        socket: &Path,
        load: &Load,
        counts: &Counts,
        meanwhile: impl FnOnce() -> Outcome<T>,
    ) -> Outcome<T> {
        self.board().working += load.clients;
        let outcome = std::thread::scope(|scope| {
            for number in 0..load.clients {
                scope.spawn(move || {
                    let rng = Rng::for_part(load.seed, number);
                    let mut client = Client::new(self, load, counts, rng);
                    let outcome = client.work(socket);
                    client.forget();
                    let mut board = self.board();
                    board.working -= 1;
                    board.faults.extend(outcome.err());
                    drop(board);
                    self.changed.notify_all();
                });
            }
            let outcome = meanwhile();
            if outcome.is_err() {
                self.enter(Phase::Ending);
            }
            outcome
        });
        let fault = self.board().faults.pop();
        match (fault, outcome) {
            // A server that was given up took its clients along.
            (Some(Fault { wrong: Wrong::Died, .. }), Err(fault)) => Err(fault),
            // What a client saw says more than its result.
            (Some(fault), _) => Err(fault),
            (None, outcome) => outcome,
        }
    }

    /// The end: what is known of the disk.
    pub(super) fn end(self) -> (Model, Stamper) {
        let board = self.board.into_inner();
        (board.model, board.stamper)
    }
}

/// What a request without an answer is about.
#[derive(Debug)]
enum Doing {
    Read(Range<u64>),
    Write { range: Range<u64>, seq: Seq, fua: bool },
    Trim { range: Range<u64>, fua: bool },
    Flush { mark: u64 },
}

impl Doing {
    fn range(&self) -> Option<&Range<u64>> {
        match self {
            Self::Read(range) | Self::Write { range, .. } | Self::Trim { range, .. } => Some(range),
            Self::Flush { .. } => None,
        }
    }
}

struct Client<'a> {
    stage: &'a Stage,
    load: &'a Load,
    counts: &'a Counts,
    rng: Rng,
    under_way: HashMap<u64, Doing>,
}

impl<'a> Client<'a> {
    fn new(stage: &'a Stage, load: &'a Load, counts: &'a Counts, rng: Rng) -> Self {
        Self { stage, load, counts, rng, under_way: HashMap::new() }
    }

    fn work(&mut self, socket: &Path) -> Outcome {
        let depth = self.rng.choose(&[1, 2, 4, 8, 16]);
        let mut left = self.load.requests;
        let Some(mut guest) = self.connect(socket)? else { return Ok(()) };
        loop {
            let went = self.talk(&mut guest, depth, &mut left)?;
            let Err(error) = went else {
                // A server that ends meanwhile misses nothing.
                let _ = guest.disconnect();
                return Ok(());
            };
            // What has no answer may have happened.
            self.forget();
            match self.stage.phase() {
                Phase::Ending => return Ok(()),
                Phase::Steady => {
                    return Err(Fault::new(Wrong::Died, format!("a client lost it: {error:#}")));
                }
                Phase::Moving => {}
            }
            match self.connect(socket)? {
                Some(other) => guest = other,
                None => return Ok(()),
            }
        }
    }

    /// A connection, as soon as somebody serves; `None` if nobody will.
    fn connect(&self, socket: &Path) -> Outcome<Option<Guest>> {
        let connected = clock::poll(MOVE_LIMIT, PAUSE, || {
            if let Ok(connection) = Connection::open(socket, &self.load.export, &Wish::default()) {
                return Some(Some(Guest::on(connection)));
            }
            (self.stage.phase() == Phase::Ending).then_some(None)
        });
        connected.ok_or_else(|| Fault::new(Wrong::Hang, "a client finds no server"))
    }

    /// Sends and receives, until all is done or the server is gone.
    fn talk(
        &mut self,
        guest: &mut Guest,
        depth: usize,
        left: &mut u64,
    ) -> Outcome<anyhow::Result<()>> {
        while *left > 0 || !self.under_way.is_empty() {
            if *left > 0 && self.under_way.len() < depth {
                *left -= 1;
                let Some((doing, request)) = self.aim() else { continue };
                // It is on its way even if sending it fails in the middle.
                match guest.send(&request) {
                    Ok(cookie) => self.under_way.insert(cookie, doing),
                    Err(error) => {
                        self.under_way.insert(0, doing);
                        return Ok(Err(error));
                    }
                };
                let mut board = self.stage.board();
                board.sent += 1;
                drop(board);
                self.stage.changed.notify_all();
                continue;
            }
            if self.under_way.is_empty() {
                continue;
            }
            match guest.receive() {
                Ok((cookie, answer)) => self.take(cookie, answer)?,
                Err(error) => return Ok(Err(error)),
            }
        }
        Ok(Ok(()))
    }

    /// A request on sectors that nobody uses; noted as sent.
    fn aim(&mut self) -> Option<(Doing, Request)> {
        let mut board = self.stage.board();
        let board = &mut *board;
        let what = self.load.mood.choose(&mut self.rng);
        if what == What::Flush {
            return Some((Doing::Flush { mark: board.model.mark() }, Request::Flush));
        }
        let is_wide = matches!(what, What::Zero | What::Trim);
        let is_long = what == What::Write && self.rng.percent(self.load.mood.long);
        let free = (0..AIMS).find_map(|_| {
            let aim = &self.load.aim;
            let range = match (is_wide, is_long) {
                (true, _) => aim.wide(&mut self.rng),
                (_, true) => aim.long(&mut self.rng),
                _ => aim.narrow(&mut self.rng),
            };
            let is_busy = board.busy.iter().any(|busy| overlap(busy, &range));
            (!is_busy).then_some(range)
        });
        let range = free?;
        board.busy.push(range.clone());
        let (offset, count) = (range.start * SECTOR as u64, range.end - range.start);
        let len = u32::try_from(count * SECTOR as u64).expect("disks are small");
        let fua = what != What::Read && self.rng.percent(self.load.mood.fuas);
        Some(match what {
            What::Read => (Doing::Read(range), Request::Read { offset, len }),
            What::Zero => {
                board.model.send(&range, 0);
                let no_hole = self.rng.percent(50);
                let request = Request::Zero { offset, len, no_hole, fua };
                (Doing::Write { range, seq: 0, fua }, request)
            }
            What::Trim => {
                board.model.trim(&range);
                (Doing::Trim { range, fua }, Request::Trim { offset, len, fua })
            }
            What::Write | What::Flush => {
                let seq = board.stamper.next(Writer::Guest);
                board.model.send(&range, seq);
                let bytes = stamp::bytes(board.stamper.disk(), range.start, count, seq);
                let request = Request::Write { offset, bytes, fua };
                (Doing::Write { range, seq, fua }, request)
            }
        })
    }

    /// An answer arrived.
    fn take(&mut self, cookie: u64, answer: Answer) -> Outcome {
        let doing = self.under_way.remove(&cookie).expect("it was asked for");
        self.counts.requests.add();
        let mut board = self.stage.board();
        board.answered += 1;
        release(&mut board, &doing);
        match answer {
            Answer::Error(_) if board.may_fail || self.stage.phase() == Phase::Ending => {
                self.counts.failed.add();
                Ok(())
            }
            Answer::Error(NO_SPACE) if board.lacks_space && !matches!(doing, Doing::Read(_)) => {
                self.counts.failed.add();
                Ok(())
            }
            Answer::Error(errno) => {
                Err(Fault::new(Wrong::Failed, format!("{doing:?} fails with {errno}")))
            }
            Answer::Done(bytes) => self.done(&mut board, &doing, &bytes),
        }
    }

    fn done(&self, board: &mut Board, doing: &Doing, bytes: &[u8]) -> Outcome {
        match doing {
            Doing::Write { range, seq, fua } => board.model.acknowledge(range, *seq, *fua),
            Doing::Flush { mark } => {
                self.counts.flushes.add();
                board.model.flushed(*mark);
            }
            Doing::Trim { range, fua } => {
                if *fua {
                    board.model.trimmed_durably(range);
                }
            }
            Doing::Read(range) => {
                let judged = board.model.judge(range.start, bytes, View::Kept);
                let content = judged.map_err(|bad| judge::fault(&bad, "a client's read"))?;
                board.model.read(range.start, &content);
            }
        }
        Ok(())
    }

    /// Gives up what has no answer.
    fn forget(&mut self) {
        let mut board = self.stage.board();
        for doing in self.under_way.drain().map(|(_, doing)| doing) {
            release(&mut board, &doing);
        }
    }
}

fn release(board: &mut Board, doing: &Doing) {
    if let Some(range) = doing.range() {
        let at = board.busy.iter().position(|busy| busy == range);
        board.busy.swap_remove(at.expect("it was taken"));
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}
