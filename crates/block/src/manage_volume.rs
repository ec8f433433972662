//! What the owner of a volume does with it that no other disk knows: its store, and other hosts.

use crate::{Error, ErrorKind, LocalFuture, Result, Which};
use mica_units::GuestRange;
use std::fmt;

/// A volume as its owner sees it.
pub trait ManageVolume {
    /// Puts everything that was acknowledged so far into the store. Requests go on meanwhile.
    ///
    /// # Errors
    /// Why the disk is latched.
    fn destage_all(&self) -> LocalFuture<'_, Result<()>>;

    /// As [`Self::destage_all`]; whoever reads the volume there then finds all of that, too.
    ///
    /// # Errors
    /// As [`Self::destage_all`].
    fn checkpoint(&self) -> LocalFuture<'_, Result<()>>;

    /// Prepares for a handover: from now on little may wait for the store, which slows guests down
    /// to its speed.
    fn prepare_handover(&self);

    /// Undoes [`Self::prepare_handover`]: the volume stays here.
    fn abandon_handover(&self);

    /// Checks that a host can have this name.
    ///
    /// # Errors
    /// `Invalid` if none can.
    fn check_handover_target(&self, host: &str) -> Result<()>;

    /// As [`Manage::close`](crate::Manage::close), for the host of this name: no other opens it
    /// then, except by force.
    ///
    /// # Errors
    /// `Invalid` if no host can have this name; otherwise what the store reports. As long as
    /// [`Self::is_ending`] says no, the volume is open as before.
    fn hand_over<'a>(&'a self, host: &'a str) -> LocalFuture<'a, Result<()>>;

    /// Deletes the volume, whose import failed, instead of closing it. At no time does it look as
    /// if all of its data were there.
    ///
    /// # Errors
    /// What the store reports; the volume may be there, and open, then.
    fn abort_import(&self) -> LocalFuture<'_, Result<()>>;

    /// Whether it takes no more changes because it is being closed, or was.
    fn is_ending(&self) -> bool;

    /// How its log and its store do.
    fn figures(&self) -> VolumeStats;

    /// Makes the volume `target` in the same store, which begins as a snapshot, or as everything
    /// that was answered before. Requests go on meanwhile.
    ///
    /// # Errors
    /// `NotFound` if there is no such snapshot; `Invalid` if nothing can be called so, or is
    /// already; `Unsupported` if the store is not known here; otherwise what it reports.
    fn clone_as<'a>(
        &'a self,
        _which: Option<&'a Which>,
        _target: &'a str,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(std::future::ready(Err(store_unknown())))
    }

    /// What it was cloned from; `None` if it is no clone, or that is not known.
    fn cloned_from(&self) -> LocalFuture<'_, Option<ClonedFrom>>;

    /// The ranges that may differ between a snapshot and another one, or everything that was
    /// answered before, in order.
    ///
    /// # Errors
    /// `NotFound` if there is no such snapshot; `Limit` if they are too many; otherwise as
    /// [`Self::clone_as`].
    fn differences<'a>(
        &'a self,
        _before: &'a Which,
        _after: Option<&'a Which>,
    ) -> LocalFuture<'a, Result<Vec<GuestRange>>> {
        Box::pin(std::future::ready(Err(store_unknown())))
    }
}

/// What a volume was cloned from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClonedFrom {
    /// The name of that volume.
    pub volume: String,
    /// The number of its snapshot; `None` if it was what the volume itself had.
    pub snapshot: Option<u64>,
    /// What became of it.
    pub now: SourceNow,
}

/// What became of what a volume was cloned from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SourceNow {
    /// It is there.
    There {
        /// The label of the snapshot, if it is one; empty if it has none now.
        label: String,
    },
    /// The volume is there without the snapshot.
    SnapshotDropped,
    /// The volume was deleted. There may be another one of its name.
    VolumeDeleted,
    /// Nothing of the volume can be read.
    Unknown,
}

/// As a snapshot is named, as long as it is there.
impl fmt::Display for ClonedFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.volume)?;
        let Some(number) = self.snapshot else {
            return match self.now {
                SourceNow::VolumeDeleted => f.write_str(" (since deleted)"),
                _ => Ok(()),
            };
        };
        match &self.now {
            SourceNow::There { label } if label.is_empty() => write!(f, "@{number}"),
            SourceNow::There { label } => write!(f, "@{label}"),
            SourceNow::SnapshotDropped => write!(f, ", snapshot {number} (since dropped)"),
            SourceNow::VolumeDeleted => write!(f, " (since deleted), snapshot {number}"),
            SourceNow::Unknown => write!(f, ", snapshot {number}"),
        }
    }
}

fn store_unknown() -> Error {
    Error::new(ErrorKind::Unsupported, "the store of the volume is not known here")
}

/// How the log and the store of a volume do: since it was opened, or now.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct VolumeStats {
    /// Its share of the write log, if it has one.
    pub log: Option<LogStats>,
    /// Changes that were recorded.
    pub records: u64,
    /// Of these, how many the store does not have yet.
    pub pending_records: u64,
    /// Bytes of these in memory.
    pub pending_bytes: u64,
    /// How long ago the oldest of them was made, in milliseconds.
    pub pending_ms: u64,
    /// Extents that are being put.
    pub extents_in_flight: u64,
    /// Extents that the store took.
    pub extents: u64,
    /// Heads that it took.
    pub heads: u64,
    /// Bytes of these extents.
    pub extent_bytes: u64,
    /// Puts that failed, and were tried again.
    pub put_failures: u64,
    /// How long the puts of extents took.
    pub puts: Times,
    /// For how long the store has taken nothing, in milliseconds; 0 if it answers.
    pub store_silent_ms: u64,
    /// Writes that waited because the log is nearly full, or the store slower than its guest.
    pub throttled_writes: u64,
    /// Whether they do now.
    pub is_throttled: bool,
    /// Snapshots that it has; `None` if they were not counted yet.
    pub snapshots: Option<u64>,
    /// Whether another host has taken it over.
    pub is_fenced: bool,
    /// What is recorded and fetched ahead for boots, if anything is.
    pub boot: Option<BootStats>,
}

/// What boots of a volume's image read first, and what was fetched because of that.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct BootStats {
    /// Bytes that the record names; 0 if there is none.
    pub record_bytes: u64,
    /// Boots that changed it.
    pub boots: u64,
    /// Bytes that were fetched ahead, for all disks of the image.
    pub fetched_bytes: u64,
    /// Bytes of reads that these had.
    pub served_bytes: u64,
    /// Whether what is read still counts as boot.
    pub is_booting: bool,
}

/// How full a write log is, for one volume.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct LogStats {
    /// Bytes that are used.
    pub used_bytes: u64,
    /// All that can be.
    pub bytes: u64,
    /// How long the syncs for its flushes took.
    pub syncs: Times,
}

/// How long requests of a kind took.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Times {
    /// How many.
    pub count: u64,
    /// All of them together, in nanoseconds.
    pub sum_ns: u64,
    /// Half of the last ones took no longer, in microseconds; 0 if there was none.
    pub p50_us: u64,
    /// The same for 99 of 100.
    pub p99_us: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_of_a_clone_is_not_said_to_be_there_when_it_is_not() {
        let there = |label: &str| SourceNow::There { label: label.to_owned() };
        for (snapshot, now, wanted) in [
            (Some(3), there("v1"), "gold@v1"),
            (Some(3), there(""), "gold@3"),
            (None, there(""), "gold"),
            (Some(3), SourceNow::SnapshotDropped, "gold, snapshot 3 (since dropped)"),
            (Some(3), SourceNow::VolumeDeleted, "gold (since deleted), snapshot 3"),
            (None, SourceNow::VolumeDeleted, "gold (since deleted)"),
            (Some(3), SourceNow::Unknown, "gold, snapshot 3"),
            (None, SourceNow::Unknown, "gold"),
        ] {
            let from = ClonedFrom { volume: "gold".to_owned(), snapshot, now };
            assert_eq!(from.to_string(), wanted);
        }
    }
}
