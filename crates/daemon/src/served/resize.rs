//! A disk grows while it is served.

use super::{Served, State};
use mica_block::{Error, ErrorKind, Result};
use mica_serve::vhost_user;

/// The length to grow a disk to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NewLength {
    Exactly(u64),
    /// Longer by this many bytes.
    Longer(u64),
}

/// The outcome of growing a disk.
pub(crate) struct Resized {
    pub(crate) old: u64,
    pub(crate) new: u64,
    /// Whether its virtual machine was told, if it can have one.
    pub(crate) notice: Option<Result<vhost_user::Notice>>,
}

impl Served {
    /// Grows the disk and tells its virtual machine. NBD has no message for that: its clients see
    /// the new length when they reconnect.
    ///
    /// # Errors
    /// As `Manage::resize`; `Denied` if it is not served, yet or any longer.
    pub(crate) fn resize(&self, to: NewLength) -> Result<Resized> {
        let changes = self.lock_changes();
        let notifier = match &*self.lock() {
            State::Serving(servers) => servers.resize_notifier(),
            state @ (State::Opening | State::Prepared(_) | State::Ended(..)) => {
                let is_ended = matches!(state, State::Ended(..));
                let when = if is_ended { "is not served" } else { "is not served yet" };
                return Err(self.denied(when));
            }
        };
        if self.settings.has_part() {
            return Err(self.denied("is served in part, which would stay as long as it is"));
        }
        let disk = self.opened().disk()?;
        let old = disk.geometry().len;
        let new = match to {
            NewLength::Exactly(len) => Some(len),
            NewLength::Longer(by) => old.checked_add(by),
        };
        let too_long = || Error::new(ErrorKind::Invalid, "a disk must be shorter than 8 EiB");
        let new = new.filter(|len| i64::try_from(*len).is_ok()).ok_or_else(too_long)?;
        self.resources.workers.run(move || async move { disk.resize(new).await })??;
        // A front end may take its time: hold nothing meanwhile.
        drop(changes);
        let notice = notifier.map(|notify| notify());
        if let Some(Err(error)) = &notice {
            let name = &self.name;
            tracing::warn!(%error, "cannot notify the virtual machine of {name} of its disk's new length");
        }
        Ok(Resized { old, new: self.image_figures().len, notice })
    }
}
