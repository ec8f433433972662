//! Losses that the rules allow: which of them mica has to report, and whether it did.
//!
//! What a killed server acknowledged and had not flushed may be lost for some [`Cause`]. Somebody
//! has to say so, in a warning that people see by default:
//!
//! - L1 A server that starts on an image that names a log, whatever has become of the log.
//! - L2 One that finds the image's log where it keeps its own, though the image does not name it
//!   any more, or a note that the log is elsewhere. Who was killed after it took that log away has
//!   said so itself.
//! - L3 Nobody has to where nothing is left to be seen. The killed server kept no log, which it
//!   reports for as long as it serves ([`Cause::NoLog`], judged when it starts). Or the image is a
//!   copy from before its log had a name, or from after another program cleared it: a log of the
//!   same inode need not be its own ([`Cause::Copied`]). Or somebody took the log away, and another
//!   program cleared the name ([`Cause::LogGone`]).
//! - L4 Anything else without a word is wrong: if there is nothing to be seen, a log disappeared.
//!   A server whose syncs failed has said so ([`Cause::Sick`]), and one that lost its log, since
//!   memory for it was full ([`Cause::SmallLog`]) or somebody took it away ([`Cause::LogGone`]).

use super::log_limit::LogLimit;
use super::story::{Count, Counts, Outcome};
use rustix::process::geteuid;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Why what was not flushed may be lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cause {
    /// The killed server kept no log.
    NoLog,
    /// The memory for its log was full at times.
    SmallLog,
    /// The memory for its log was too little at times, and it said so.
    TinyLog,
    /// Its log was taken away, or an older copy of it put back.
    LogGone,
    /// Its syncs failed at times.
    Sick,
    /// Another program wrote to the image.
    Written,
    /// A copy of the image was put back.
    Copied,
    /// A timestamp of the image was moved.
    Touched,
    /// The log is not where the next server keeps its own.
    Elsewhere,
}

/// Where a server keeps its log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LogAt {
    Usual,
    Small,
    Elsewhere,
    Nowhere,
}

/// What may be lost of a chain, and what was said about it.
#[derive(Clone, Default, Debug)]
pub(super) struct Loss {
    causes: Vec<Cause>,
    /// A server that started since the kill, and was killed too, warned.
    is_told: bool,
}

/// What a server that starts can see of the one that was killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Trace {
    is_named: bool,
    has_log: bool,
}

impl Loss {
    /// Unflushed writes may be lost, for one more reason.
    pub(super) fn add(&mut self, cause: Cause) {
        if !self.has(cause) {
            self.causes.push(cause);
        }
    }

    /// Whether unflushed writes may be lost.
    pub(super) fn may_be(&self) -> bool {
        !self.causes.is_empty()
    }

    /// A server is about to start that keeps its log in a usual or a small place.
    pub(super) fn look_in(&mut self, place: LogAt) {
        let was_small = self.has(Cause::SmallLog);
        let is_found = if was_small { place == LogAt::Small } else { place == LogAt::Usual };
        if !is_found {
            self.add(Cause::Elsewhere);
        }
    }

    fn has(&self, cause: Cause) -> bool {
        self.causes.contains(&cause)
    }

    /// Whether such a program, or the one that `said` this, reports a loss.
    pub(super) fn is_told(&self, said: &str) -> bool {
        self.is_told || tells_loss(said)
    }

    /// A program that opened the image, and need not go on with it, `said` this.
    pub(super) fn hear(&mut self, said: &str) {
        self.is_told |= tells_loss(said);
    }

    /// Somebody who could not go on without a loss has said so.
    pub(super) fn was_told(&mut self) {
        self.is_told = true;
    }

    /// Whether somebody has to say that something is lost.
    pub(super) fn is_due(&self, trace: Trace) -> bool {
        let is_unknown = [Cause::Copied, Cause::NoLog].into_iter().any(|cause| self.has(cause))
            || self.has(Cause::LogGone) && !trace.has_log;
        trace.is_named || !is_unknown
    }

    /// Where a loss that nobody reported is counted.
    pub(super) fn silent<'a>(&self, counts: &'a Counts) -> &'a Count {
        match () {
            () if self.has(Cause::NoLog) => &counts.silent_no_log,
            () if self.has(Cause::Copied) => &counts.silent_copied,
            () => &counts.silent_log_gone,
        }
    }
}

impl Trace {
    /// What there is to see of the image at `path`, for who keeps logs of this `limit` in `logs`.
    pub(super) fn find(path: &Path, logs: Option<&Path>, limit: Option<LogLimit>) -> Outcome<Self> {
        const VERSION_AT: usize = 4;
        const NAME_AT: usize = 88;
        let image = File::open(path)?;
        let mut header = [0; NAME_AT + 4];
        image.read_exact_at(&mut header, 0)?;
        let is_new = header[VERSION_AT..VERSION_AT + 4] == 3_u32.to_be_bytes();
        let stat = image.metadata()?;
        let log = logs.and_then(|logs| {
            let end = limit.map_or(String::new(), LogLimit::name_end);
            let name = format!("{:x}-{:x}.redo{end}", stat.dev(), stat.ino());
            fs::metadata(folder_in(logs).join(name)).ok()
        });
        // An image that is younger has the inode of one that was deleted.
        let is_older = |log: &fs::Metadata| match (stat.created(), log.modified()) {
            (Ok(created), Ok(modified)) => created <= modified,
            _ => true,
        };
        Ok(Self {
            is_named: is_new && header[NAME_AT..] != [0; 4],
            has_log: log.is_some_and(|log| log.len() > 0 && is_older(&log)),
        })
    }

    /// Whether the image names a log.
    pub(super) fn is_named(self) -> bool {
        self.is_named
    }

    /// Whether the image's log is where it is looked for.
    pub(super) fn has_log(self) -> bool {
        self.has_log
    }
}

/// Where servers of this user that keep logs in `logs` have them.
pub(super) fn folder_in(logs: &Path) -> PathBuf {
    logs.join(format!("mica-{}", geteuid().as_raw()))
}

/// Whether a program warned of a loss.
fn tells_loss(said: &str) -> bool {
    said.lines().any(|line| line.contains("WARN") && line.contains("are lost"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_is_due_unless_nothing_can_be_known() {
        let named = Trace { is_named: true, has_log: false };
        let nothing = Trace { is_named: false, has_log: false };
        for (cause, is_due) in [
            (Cause::Copied, false),
            (Cause::NoLog, false),
            (Cause::LogGone, false),
            (Cause::Written, true),
        ] {
            let mut loss = Loss::default();
            loss.add(cause);
            assert_eq!((loss.is_due(named), loss.is_due(nothing)), (true, is_due), "{cause:?}");
        }
    }

    #[test]
    fn warning_is_a_word_and_nothing_else() {
        let loss = Loss::default();
        assert!(loss.is_told(" INFO stopping\n WARN …: writes that were not flushed are lost"));
        assert!(!loss.is_told(" INFO writes are lost") && !loss.is_told(" WARN a request failed"));
    }
}
