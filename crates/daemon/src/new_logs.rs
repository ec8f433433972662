//! The logs of volumes that a start makes: the sandbox allows only what is there as it is entered.
//!
//! Invariants
//! - I1 A start that is refused leaves none of them behind that is empty and that nobody else has
//!   open ([`NewLog::take_back`]). One that was there before stays.

use crate::config::DiskConfig;
use crate::helper::Outside;
use mica_stack::NewLog;
use mica_store::Handles;
use std::sync::Arc;

/// Logs that were made, and are removed when this is dropped.
#[must_use]
pub(crate) struct NewLogs {
    logs: Vec<NewLog>,
    /// What may remove them.
    outside: Outside,
    handles: Arc<Handles>,
}

impl NewLogs {
    /// Makes those that these `disks` lack.
    pub(crate) fn make(disks: &[DiskConfig], handles: &Arc<Handles>) -> Self {
        // Opening them reports what is wrong with them.
        let make = |disk: &DiskConfig| disk.log()?.make().ok()?;
        let logs = disks.iter().filter_map(make).collect();
        Self { logs, outside: Outside::default(), handles: Arc::clone(handles) }
    }

    pub(crate) fn logs(&self) -> &[NewLog] {
        &self.logs
    }

    /// From now on only `outside` may remove them.
    pub(crate) fn leave_to(&mut self, outside: Outside) {
        self.outside = outside;
    }

    /// Leaves them to a start that succeeded.
    pub(crate) fn keep(mut self) {
        self.logs.clear();
    }
}

impl Drop for NewLogs {
    fn drop(&mut self) {
        let Self { logs, outside, handles } = self;
        for (number, log) in logs.iter().enumerate() {
            // The first failure is the one to report: why the start was refused.
            if let Err(error) = log.take_back(handles, |log| outside.remove_log(number, log)) {
                tracing::debug!(%error, "a log that was made stays");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{ImageSettings, VolumeSettings};

    fn disk(log: &std::path::Path, name: &str) -> DiskConfig {
        let volume = Some(format!("file:///nowhere/{name}"));
        let log_device = Some(log.to_owned());
        let volume = VolumeSettings { volume, log_device, ..VolumeSettings::default() };
        DiskConfig::of_volume("web".to_owned(), volume)
    }

    #[test]
    fn logs_of_a_refused_start_are_removed_unless_they_were_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let (new, old) = (folder.path().join("new"), folder.path().join("old"));
        std::fs::write(&old, "").expect("made");
        let disks = [disk(&new, "a"), disk(&old, "b"), disk(&new, "c")];
        let logs = NewLogs::make(&disks, &ImageSettings::handles());
        assert_eq!(logs.logs().len(), 1);
        assert!(new.exists());
        drop(logs);
        assert!(!new.exists() && old.exists());
        NewLogs::make(&disks, &ImageSettings::handles()).keep();
        assert!(new.exists() && old.exists());
    }

    /// The story: a log was made for a snapshot.
    #[test]
    fn volume_that_is_only_read_gets_no_log() {
        let folder = tempfile::tempdir().expect("a folder");
        let log = folder.path().join("log");
        let mut read_only = disk(&log, "web");
        read_only.settings.read_only = true;
        let disks = [disk(&log, "web@monday"), read_only];
        NewLogs::make(&disks, &ImageSettings::handles()).keep();
        assert!(!log.exists());
    }
}
