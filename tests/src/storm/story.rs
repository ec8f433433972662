//! What happened in a storm: the steps of a chain, the counts of a run, and what was wrong.

use parking_lot::Mutex;
use std::fmt::Display;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is wrong, in a word.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Wrong {
    /// Something is in a sector that nobody wrote there.
    Foreign,
    /// What another program wrote durably is gone.
    Undone,
    /// What a flush promised is gone.
    LostFlushed,
    /// What was acknowledged is gone where it had to be kept.
    LostAcknowledged,
    /// Old or lost content reappeared.
    CameBack,
    /// Where unflushed writes may be lost, some are and some are not.
    Mixed,
    /// `qemu-img check` finds corruption.
    Corrupt,
    /// Clusters leak after a clean close.
    Leak,
    /// An internal snapshot does not hold what it held.
    Snapshot,
    /// The disk has another length than it may have.
    Length,
    /// A server that should serve does not start.
    NotServed,
    /// A plain start after a kill is refused.
    Refused,
    /// A server ended, or did not go on, by itself.
    Died,
    /// A server panicked.
    Panicked,
    /// A request failed that had no reason to.
    Failed,
    /// A takeover failed.
    Takeover,
    /// Something did not end in time.
    Hang,
    /// Another program cannot use the image.
    Unusable,
    /// Something acknowledged is lost, and nobody said so who could have.
    Silent,
    /// A program that looked at a served image was not refused, or changed something.
    Looked,
    /// A server has other disks than it was told to have.
    Members,
    /// A disk has other layers, or keeps other states, than it may.
    Layers,
    /// A store takes much more space than is needed.
    Space,
    /// A change since a state is not told.
    Untold,
    /// What is restored from a backup is not what was backed up.
    Restored,
    /// What is said of allocation is not so.
    Status,
    /// A layer changed that nobody may write any more.
    Thawed,
    /// A configuration does not have what was saved.
    Configuration,
    /// The storm's own trouble.
    Trouble,
}

impl Wrong {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Foreign => "foreign content",
            Self::Undone => "another program's write undone",
            Self::LostFlushed => "flushed write lost",
            Self::LostAcknowledged => "acknowledged write lost",
            Self::CameBack => "lost write came back",
            Self::Mixed => "mixture of two states",
            Self::Corrupt => "corruption",
            Self::Leak => "leak after a clean close",
            Self::Snapshot => "internal snapshot changed",
            Self::Length => "wrong length",
            Self::NotServed => "not served",
            Self::Refused => "refused start",
            Self::Died => "server died",
            Self::Panicked => "panic",
            Self::Failed => "request failed",
            Self::Takeover => "takeover failed",
            Self::Hang => "hang",
            Self::Silent => "lost without a word",
            Self::Looked => "not safe from others",
            Self::Unusable => "unusable by QEMU",
            Self::Members => "other disks than were asked for",
            Self::Space => "more space than is needed",
            Self::Layers => "other layers than it may have",
            Self::Thawed => "a frozen layer changed",
            Self::Status => "wrong block status",
            Self::Untold => "a change that is not told",
            Self::Restored => "restored content that is not what was backed up",
            Self::Configuration => "configuration is not what was saved",
            Self::Trouble => "trouble of the storm",
        }
    }
}

/// Something is wrong.
#[derive(Clone, Debug)]
pub(super) struct Fault {
    pub(super) wrong: Wrong,
    pub(super) what: String,
}

pub(super) type Outcome<T = ()> = Result<T, Fault>;

impl Fault {
    pub(super) fn new(wrong: Wrong, what: impl Into<String>) -> Self {
        Self { wrong, what: what.into() }
    }
}

impl From<std::io::Error> for Fault {
    #[track_caller]
    fn from(error: std::io::Error) -> Self {
        trouble(error)
    }
}

impl From<anyhow::Error> for Fault {
    #[track_caller]
    fn from(error: anyhow::Error) -> Self {
        trouble(format!("{error:#}"))
    }
}

/// What keeps the storm itself from going on.
#[track_caller]
pub(super) fn trouble(error: impl Display) -> Fault {
    let at = std::panic::Location::caller();
    Fault::new(Wrong::Trouble, format!("{error} ({}:{})", at.file(), at.line()))
}

macro_rules! counts {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal;)+) => {
        /// What was counted in a run; all threads count together.
        #[derive(Default, Debug)]
        pub struct Counts { $($(#[doc = $doc])+ pub $name: Count),+ }

        impl Counts {
            /// All of them, with what they are called.
            pub fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$(($text, self.$name.get())),+]
            }
        }
    };
}

counts! {
    /// Chains.
    chains = "chains";
    /// Of those, disks at shared addresses.
    shared = "  disks at shared addresses";
    /// Writers beneath which the power is cut.
    power_cuts = "  with power cuts";
    /// Chains of 100 layers and more.
    deep = "  of 100 to 1,000 layers";
    /// Volumes in stores.
    volumes = "  of volumes";
    /// Disks whose layers come and go.
    lineages = "  of layers that come and go";
    /// Chains that nobody serves.
    at_rest = "  of verbs that are killed";
    /// Chains whose logs have little memory.
    small_logs = "  with logs of little memory";
    /// Lives of servers.
    lives = "lives";
    /// Requests of clients that were answered.
    requests = "requests";
    /// Of those, the ones that failed, as they could.
    failed = "  with an error, as allowed";
    /// Flushes that were acknowledged.
    flushes = "flushes";
    /// Lives of servers whose reads, writes or syncs fail.
    sick = "lives with failing I/O";
    /// Kills of a server that serves or starts.
    kills = "kills";
    /// Kills in a takeover.
    takeover_kills = "kills in takeovers";
    /// Live takeovers that succeeded.
    takeovers = "takeovers";
    /// Clean closes.
    closes = "clean closes";
    /// States of a disk that a power cut left.
    cuts = "power cuts judged";
    /// Resizes in which somebody was killed.
    resize_kills = "kills in resizes";
    /// Disks that got another length.
    resizes = "resizes";
    /// Disks that were added, removed, drained or undrained, and configurations that were read
    /// again.
    members = "disks that came or went";
    /// Clients of the control socket that were killed.
    ctl_kills = "  with a client that was killed";
    /// Commands that were given in a takeover.
    overlaps = "commands in takeovers";
    /// Configurations that were held against what was saved.
    configurations = "configurations judged";
    /// Times that QEMU wrote to an image.
    foreign = "foreign writes";
    /// Of those, commits.
    commits = "commits";
    /// Internal snapshots made, gone back to, or deleted.
    snapshots = "internal snapshots";
    /// Layers that served disks got.
    layers = "live snapshots";
    /// States that were kept for backups.
    states = "states kept";
    /// Exported states that were written into a folder and restored.
    backups = "  backed up and restored";
    /// Merges of layers, states that were dropped included.
    merges = "live merges";
    /// Those that did not come to their end.
    merges_cancelled = "  cancelled";
    /// Commands that were refused, since a state or a clone was in the way.
    layers_refused = "commands refused, as they may be";
    /// Times that several commands were given at once.
    at_once = "several commands at once";
    /// Clones of frozen layers.
    clones = "clones";
    /// Those that were moved to another folder.
    clones_moved = "  moved to another folder";
    /// Times that all frozen layers were read twice after a kill in a takeover.
    twice = "frozen layers read twice";
    /// Disks whose block status was judged.
    statuses = "block status judged";
    /// Copies put back.
    copies = "copies put back";
    /// Times that the index of a chain was damaged, or removed.
    indexes = "indexes damaged";
    /// Looks at a served image by other programs.
    peeks = "looks by others";
    /// Times that space ran out for a server.
    full = "full file systems";
    /// Times that a file system took no writes.
    frozen = "frozen file systems";
    /// Times that a server got no more threads.
    threadless = "servers without threads";
    /// Logs that were taken from servers that live.
    logs_taken = "logs taken away";
    /// Starts after a kill of images that another program wrote meanwhile.
    contested = "starts after a foreign write";
    /// Starts at which unflushed writes were lost, as they may be.
    lost = "lost, as allowed";
    /// Of those, the ones that a warning reports.
    told = "  with a warning";
    /// Those without: the killed server kept no log.
    silent_no_log = "  without: there was no log";
    /// A copy of the image does not name its log.
    silent_copied = "  without: a copy that names no log";
    /// Somebody took the log away, and somebody else the name.
    silent_log_gone = "  without: neither log nor name";
    /// Plain starts that had to be tried again since the killed server still held the image.
    refused = "starts tried again";
    /// Verbs of volumes that ended by themselves.
    verbs = "verbs of volumes";
    /// Those that were killed.
    verb_kills = "  killed";
    /// Verbs about chains that nobody serves, which came to their end.
    verbs_at_rest = "verbs on chains at rest";
    /// Those that were killed.
    verbs_at_rest_killed = "  killed";
    /// Those that were killed after what they are for was done.
    verbs_at_rest_late = "  of which it was done";
    /// Those that were refused, as they may be.
    verbs_at_rest_refused = "  refused";
    /// Dirty bitmaps that had something to say, and were judged.
    bitmaps = "bitmaps judged";
    /// Snapshots of volumes that were written meanwhile.
    volume_snapshots = "snapshots of served volumes";
    /// Clones of volumes that were written meanwhile.
    live_clones = "clones of served volumes";
    /// Volumes that another host took by force.
    forced = "forced take-overs";
    /// Collections in stores of volumes.
    collections = "collections";
    /// Snapshots that were sent to another store.
    streams = "snapshots sent";
    /// Checks by QEMU, and of stores of volumes.
    checks = "checks";
    /// Full reads that were judged.
    reads = "full reads judged";
}

/// A number that goes up.
#[derive(Default, Debug)]
pub struct Count(AtomicU64);

impl Count {
    /// One more.
    pub(super) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// How many.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The steps of one chain, in a file that is kept with its images when something is wrong.
#[derive(Debug)]
pub(super) struct Story(Mutex<File>);

/// The file's name.
pub(super) const STORY: &str = "steps.log";

impl Story {
    pub(super) fn begin(dir: &Path) -> std::io::Result<Self> {
        File::create(dir.join(STORY)).map(|file| Self(Mutex::new(file)))
    }

    pub(super) fn tell(&self, step: impl Display) {
        let mut file = self.0.lock();
        // A story that cannot be told fails no chain.
        let _ = writeln!(file, "{step}");
    }
}
