//! Opening a volume for writing, and what becomes of the log that the last process left on this
//! machine.
//!
//! Invariants
//! - I1 A log is replayed only if the head that is gone on from is open under a writer that the log
//!   names. Every other one is set aside before a head is put.
//! - I2 A log names the writer that goes on with it, durably, before the head with it is put.
//! - I3 What the log has and the state lacks comes before anything else that is done.
//! - I4 A volume whose key is missing, or another one, is left as it is.

use crate::boot::Boot;
use crate::build::{Builder, Signature};
use crate::crypt::VolumeKey;
use crate::format::Id;
use crate::format::head::Head;
use crate::heads::{Claimed, Heads, LocalLog, Named, Owned, Seen};
use crate::keep::SnapshotPer;
use crate::log::{Found, Log, LogDevice, NewLog, PromisedStart};
use crate::packing::Packer;
use crate::place::Writer;
use crate::properties::Access;
use crate::put::Patience;
use crate::shared::{Counts, Durability, Putter, Shared};
use crate::state::State;
use crate::tree::Tree;
use crate::writing::as_change;
use mica_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// How a volume is opened for writing.
#[derive(Clone)]
pub struct Opening {
    /// What to do if another writer has it.
    pub claimed: Claimed,
    /// Its newest head, if that was just read ([`crate::Volumes::look`]): no other read is needed.
    pub seen: Option<Seen>,
    /// The log of this machine, which makes what is acknowledged survive the death of the process.
    pub log: Option<Arc<LogDevice>>,
    /// Where that is: for those who read the volume elsewhere, and do not see it.
    pub log_place: Option<String>,
    /// What a flush promises.
    pub durability: Durability,
    /// After what of its guest the volume takes a snapshot by itself.
    pub snapshot_per: SnapshotPer,
}

/// Without a log.
impl From<Claimed> for Opening {
    fn from(claimed: Claimed) -> Self {
        Self {
            claimed,
            seen: None,
            log: None,
            log_place: None,
            durability: Durability::Store,
            snapshot_per: SnapshotPer::Interval,
        }
    }
}

/// What a volume is opened for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose<'a> {
    /// For its blocks, with this key if it is encrypted.
    Blocks(Option<&'a VolumeKey>),
    /// For what can be done without reading or writing any.
    Snapshots,
}

/// A writer that did not close the volume.
struct Fenced {
    host: String,
    /// Whether its head says so. One that is older than such heads may have had one, too.
    had_log: bool,
}

/// What became of the log on this machine.
struct LogChoice<'a> {
    device: Option<&'a Arc<LogDevice>>,
    place: Option<&'a str>,
    purpose: Purpose<'a>,
    name: &'a str,
    /// How the volume's blocks are read and written.
    access: Access,
    claimed: Claimed,
    store: Id,
    /// That of the volume from now on.
    log: Option<Log>,
    /// Room for one that is begun.
    room: Option<PromisedStart>,
    loss: Option<String>,
    /// The writer that was fenced, unless its log is here.
    fenced: Option<Fenced>,
    /// The time of the state that is gone on from.
    state_ns: u64,
}

impl LogChoice<'_> {
    fn found(&self, head: &Head) -> Option<Found> {
        self.device?.found(head.volume)
    }

    /// The writer that `head` names, if `found` goes on under it (I1).
    fn goes_on(&self, found: &Found, head: &Head) -> Option<Writer> {
        let last = head.writer().filter(|writer| found.writers.contains(writer));
        last.filter(|_| found.store == self.store)
    }

    /// The log is that of the volume from now on.
    fn keep(&mut self, log: Log) {
        if let Some(cipher) = self.access.cipher() {
            log.encrypt_with(cipher.clone());
        }
        self.log = Some(log);
    }

    /// Sets a log aside that nobody may replay, or by force one that could not be, for what
    /// `failed` says.
    async fn set_aside(
        &mut self,
        device: &Arc<LogDevice>,
        found: &Found,
        (state, failed): (&State, Option<Error>),
    ) -> Result<()> {
        let mut numbers: Option<Range<u64>> = None;
        let looked = device.look(found, |number, _| {
            let first = numbers.as_ref().map_or(number, |numbers| numbers.start);
            numbers = Some(first..number.saturating_add(1));
            Ok(())
        });
        let looked = looked.await;
        device.set_aside(found.volume).await?;
        let why = match &failed {
            Some(error) => format!("it could not be replayed ({})", error.in_one_line()),
            None => "others had the volume since".to_owned(),
        };
        // Nobody replays it in any case: that it cannot be read is no reason not to open.
        if let Err(error) = looked {
            let error = error.in_one_line();
            self.loss = Some(format!(
                "the log of this machine may have writes that the volume lacks, and {why}: the log \
                 was set aside, and cannot be read ({error})"
            ));
            return Ok(());
        }
        let numbers = numbers.unwrap_or_default();
        // Those who wrote since count records of their own under the same numbers.
        let newest = state.map.node.map(|node| node.extent().writer);
        let first = match newest.is_some_and(|newest| found.writers.iter().all(|w| *w < newest)) {
            true => numbers.start,
            false => numbers.start.max(state.records),
        };
        let lacking = numbers.end.saturating_sub(first);
        self.loss = match lacking {
            0 if failed.is_none() => None,
            0 => Some(format!(
                "the log of this machine may have lost writes that the volume lacks, and {why}: the \
                 log was set aside"
            )),
            _ => Some(format!(
                "the log of this machine has {lacking} writes that the volume may lack, and {why}: \
                 the log was set aside"
            )),
        };
        Ok(())
    }
}

impl LocalLog for LogChoice<'_> {
    async fn admit(&mut self, head: &Head) -> Result<()> {
        let access = |key| head.properties.content(self.name, key);
        self.access = match self.purpose {
            Purpose::Snapshots => access(None),
            Purpose::Blocks(key) => {
                let access = access(key);
                access.check()?;
                access
            }
        };
        // Those of an earlier try, which was lost: the log is found again.
        drop((self.log.take(), self.room.take()));
        let Some(device) = self.device else { return Ok(()) };
        if !self.is_of(head) {
            // A writer that may be alive is not fenced for one that then cannot begin.
            self.room = Some(device.promise_start(head.volume).await?);
        } else if self.claimed == Claimed::TakeOver {
            // Its log goes on, which needs no more room; if it cannot, another one is begun.
            self.room = device.promise_start(head.volume).await.ok();
        }
        Ok(())
    }

    fn is_of(&self, head: &Head) -> bool {
        self.found(head).is_some_and(|found| self.goes_on(&found, head).is_some())
    }

    fn names(&self) -> Named {
        if self.device.is_some() { Named::ByLog } else { Named::Nowhere }
    }

    fn place(&self) -> Option<String> {
        self.device?;
        Some(self.place.unwrap_or("a log").to_owned())
    }

    async fn settle(&mut self, head: &Head, writer: Writer, state: &State) -> Result<()> {
        let is_new = matches!(self.claimed, Claimed::JustMade(_));
        let had_writer = head.writer().is_some() && !is_new;
        let fenced = || Fenced { host: head.host.clone(), had_log: head.log.is_some() };
        self.fenced = had_writer.then(fenced);
        self.state_ns = state.time_ns;
        let Some(device) = self.device else { return Ok(()) };
        let volume = head.volume;
        if let Some(found) = self.found(head) {
            let mut failed = None;
            if let Some(last) = self.goes_on(&found, head) {
                match device.go_on(volume, (last, writer), state.records).await {
                    Ok(log) => {
                        self.keep(log);
                        self.room = None;
                        self.fenced = None;
                        return Ok(());
                    }
                    // By force, the volume is opened without what its log has lost, or cannot name
                    // this writer for.
                    Err(error)
                        if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Limit)
                            && self.claimed == Claimed::TakeOver =>
                    {
                        failed = Some(error);
                    }
                    Err(error) => return Err(error),
                }
            }
            self.set_aside(device, &found, (state, failed)).await?;
        }
        let new = NewLog { store: self.store, volume, writer, first: state.records };
        let log = match self.room.take() {
            Some(room) => room.start(new).await,
            None => device.start(new.store, volume, writer, new.first).await,
        };
        self.keep(log?);
        Ok(())
    }
}

/// Opens a volume for a new writer, with all that the log of this machine has of it; with up to
/// `boot_fetch` bytes of memory for what its boots read.
///
/// # Errors
/// `Invalid` if a flush is to be durable in a log and there is none; `Denied` if others have the
/// volume, or it takes another key; otherwise what the store or the log reports.
pub(crate) async fn open(
    tree: Arc<Tree>,
    heads: Heads,
    opening: &Opening,
    (purpose, boot_fetch): (Purpose<'_>, u64),
) -> Result<Arc<Shared>> {
    let Opening { claimed, seen, log, log_place, durability, snapshot_per } = opening;
    if *durability == Durability::Host && log.is_none() {
        let what = "durability=host needs a log on this machine: name one";
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    let mut choice = LogChoice {
        device: log.as_ref(),
        place: log_place.as_deref(),
        purpose,
        name: heads.name.as_str(),
        access: Access::Plain,
        claimed: *claimed,
        store: heads.store,
        log: None,
        room: None,
        loss: None,
        fenced: None,
        state_ns: 0,
    };
    let log_opened = log.as_ref().map(|log| log.opened());
    let seen = seen.clone().and_then(|seen| seen.head_for(&heads.name, log_opened));
    let owned = heads.open(*claimed, seen, &mut choice).await?;
    let loss = choice.loss_in_words(&heads);
    let boot = (boot_fetch > 0).then(|| Boot::new(owned.head.boot_image(), boot_fetch, &tree));
    let packer = Packer::new(owned.head.properties.compression, choice.access.clone())?;
    let tree = tree.with_access(choice.access.clone());
    if let Some(log) = &choice.log {
        log.only(owned.writer);
    }
    let (state, log) = (owned.head.state, choice.log);
    let patient = tree.with_patience(tree.patience());
    // Nobody is served yet, and the log keeps what it has: whoever opens the volume learns that the
    // store does not answer, and may be told to stop.
    let for_replay = tree.with_patience(Patience::VERB);
    let (logged, packed) = ((log, loss), (for_replay, packer));
    let putter = putter(&heads, owned, (*durability, *snapshot_per), logged, packed);
    let shared = Shared::new(tree, heads, Some(putter), state, boot);
    replay(&shared).await?;
    let first = shared.now().records;
    let counts = &shared.putter()?.counts;
    counts.first_record.store(first, Ordering::Relaxed);
    counts.snapshot_records.store(first, Ordering::Relaxed);
    *shared.putter()?.tree.lock() = patient;
    Ok(shared)
}

impl LogChoice<'_> {
    /// What people should know of what is lost, or may be.
    fn loss_in_words(&self, heads: &Heads) -> Option<String> {
        let age = heads.environment.now_ns().saturating_sub(self.state_ns) / 1_000_000_000;
        let of = format!("the volume is as it was {age} s before it was opened");
        let loss = match (&self.loss, &self.fenced) {
            (Some(loss), _) => format!("{loss}; {of}"),
            (None, Some(Fenced { host, had_log: true })) => {
                format!("taken over from {host}: what only a log on {host} had is lost; {of}")
            }
            (None, Some(Fenced { host, .. })) if self.claimed == Claimed::TakeOver => {
                format!("taken over from {host}: what was not in the store yet is lost; {of}")
            }
            // Killed here, without a log: as after a power cut, what was flushed is there.
            (None, Some(Fenced { .. })) => {
                tracing::info!(volume = heads.name.as_str(), "it was not closed; {of}");
                return None;
            }
            (None, None) => return None,
        };
        tracing::warn!(volume = heads.name.as_str(), "{loss}");
        // Whoever takes a volume over by force has said so.
        self.loss.is_some().then_some(loss)
    }
}

fn putter(
    heads: &Heads,
    owned: Owned,
    (durability, snapshot_per): (Durability, SnapshotPer),
    (log, loss): (Option<Log>, Option<String>),
    (tree, packer): (Arc<Tree>, Option<Packer>),
) -> Putter {
    let signature = Signature { store: heads.store, volume: owned.head.volume };
    Putter {
        writer: owned.writer,
        durability,
        snapshot_per,
        log,
        was_store_nearer: AtomicBool::new(false),
        loss,
        tree: Mutex::new(tree),
        builder: Mutex::new(Some(Builder::new(signature, owned.head.state).with_packer(packer))),
        owned: Mutex::new(owned),
        last_head: Mutex::default(),
        trouble: Mutex::default(),
        counts: Counts::default(),
    }
}

/// Does what the log has and the state lacks, and puts it: nothing is under way when this returns,
/// for the executor that opens a volume may end then.
async fn replay(shared: &Arc<Shared>) -> Result<()> {
    let Some(log) = shared.log() else { return Ok(()) };
    let recovered = log.recovered();
    if recovered.is_empty() {
        return Ok(());
    }
    let count = recovered.end - recovered.start;
    tracing::info!(
        volume = shared.heads.name.as_str(),
        count,
        "putting records of the log into the store"
    );
    let environment = &shared.heads.environment;
    loop {
        let next = shared.now().records;
        if next >= recovered.end {
            shared.destage_all().await?;
            return shared.at_rest().await;
        }
        let mut is_full = false;
        let read = log
            .read(next, |number, record| {
                let mut now = shared.now();
                let change = as_change(record);
                let is_cut = matches!(change, crate::known::Change::Cut(_));
                if number != now.records {
                    let what = format!("the log has record {number} in place of {}", now.records);
                    return Err(Error::new(ErrorKind::Corrupt, what));
                }
                is_full = !now.make_room(is_cut, environment);
                if is_full {
                    return Err(Error::new(ErrorKind::Limit, "the batches are full"));
                }
                now.apply(change, environment);
                Ok(())
            })
            .await;
        match read {
            Err(error) if !is_full => return Err(error),
            _ => shared.destage_all().await?,
        }
    }
}
