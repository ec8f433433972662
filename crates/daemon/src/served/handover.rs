//! A volume is handed to another host while it is served.
//!
//! ```text
//! destage, guests go on ─▶ servers end ─▶ last writes ─▶ head with the heir ─▶ closed here
//!                          └─────────── what guests wait for ───────────┘
//! ```
//!
//! Invariants
//! - I1 Until the last writes are in the store nothing is ended: if that fails, the same volume is
//!   served again. If the head is not put, it is opened again; if another host has it by then, it
//!   stays closed.

use super::{End, IDLE_DEADLINE, Served, State};
use crate::opened::Opened;
use crate::retry::stopwatch;
use mica_block::{Error, ErrorKind, Manage, ManageVolume, Result};
use mica_rt::timeout;
use std::sync::Arc;
use std::time::Duration;

/// What NBD clients are told of such a disk, where others are.
const HANDED_OVER: &str = "it was handed over to another host";

/// How a hand-over went.
pub(crate) struct HandedOver {
    /// For how long nobody was served before the other host could be.
    pub(crate) pause: Duration,
}

impl Served {
    /// Hands a volume that is served to `host`, and closes it here. Until what was written before
    /// is in the store it may take as long as `limit`: guests go on meanwhile.
    ///
    /// # Errors
    /// `Unsupported` if it is no volume, `Denied` if it is not served, `Invalid` if no host has
    /// such a name; otherwise what the store reports: then it is served as before, as far as that
    /// is possible.
    pub(crate) fn hand_over(&self, host: &str, limit: Duration) -> Result<HandedOver> {
        let _changes = self.lock_changes();
        if !matches!(*self.lock(), State::Serving(_)) {
            return Err(self.denied("is not served"));
        }
        let disk = self.opened().disk()?;
        volume(&*disk)?.check_handover_target(host)?;
        self.store_in_advance(&disk, limit)?;
        let elapsed = stopwatch();
        let servers = match &mut *self.lock() {
            State::Serving(servers) => std::mem::take(servers),
            _ => return Err(self.denied("is not served")),
        };
        *self.lock() = State::Ended(Box::new(servers.counts()), End::Closing);
        let counts = servers.shutdown();
        let ended = elapsed();
        *self.lock() = State::Ended(Box::new(counts), End::Closing);
        let (open, heir) = (Arc::clone(&disk), host.to_owned());
        let handed = self.resources.workers.run(move || async move {
            // Requests whose clients are gone still have to end.
            let _ = timeout(IDLE_DEADLINE, open.idle()).await;
            volume(&*open)?.hand_over(&heir).await
        });
        let handed = handed.and_then(|handed| handed);
        let pause = elapsed();
        if let Err(error) = handed {
            self.go_on(disk, &error);
            return Err(error);
        }
        drop(disk);
        self.release();
        *self.lock() = State::Ended(Box::new(counts), End::Closed(Ok(())));
        self.doors.close(HANDED_OVER);
        let (name, ms, ended) = (&self.name, pause.as_millis(), ended.as_millis());
        tracing::info!(
            "{name:?} was handed over to {host}; service was interrupted for {ms} ms, {ended} of \
             them waiting for requests to complete"
        );
        Ok(HandedOver { pause })
    }

    /// Waits until little is left to put.
    fn store_in_advance(&self, disk: &Arc<dyn Manage>, limit: Duration) -> Result<()> {
        let disk = Arc::clone(disk);
        let stored = self.resources.workers.run(move || async move {
            let volume = volume(&*disk)?;
            let rounds = async {
                volume.destage_all().await?;
                // What was written meanwhile: little from now on.
                volume.prepare_handover();
                volume.destage_all().await
            };
            match timeout(limit, rounds).await {
                Ok(stored) => stored,
                Err(_) => {
                    volume.abandon_handover();
                    let seconds = limit.as_secs();
                    let what = format!(
                        "the store did not take all writes within {seconds} s: the disk is served \
                         as before"
                    );
                    Err(Error::new(ErrorKind::Io, what))
                }
            }
        });
        stored.and_then(|stored| stored)
    }

    /// Serves the disk again, after its hand-over failed. The caller holds `changes`.
    fn go_on(&self, disk: Arc<dyn Manage>, error: &Error) {
        let is_open = disk.volume().is_some_and(|volume| !volume.is_ending());
        disk.volume().into_iter().for_each(|volume| volume.abandon_handover());
        drop(disk);
        let why = error.in_one_line();
        tracing::warn!(
            "{:?} could not be handed over, and continues to be served: {why}",
            self.name
        );
        let again = match is_open {
            true => Ok(()),
            false => {
                self.release();
                self.open_image().map(|opened| {
                    self.tend(&opened);
                    *self.opened() = Opened::Open(opened);
                })
            }
        };
        let again = again.and_then(|()| {
            *self.lock() = State::Prepared(Box::default());
            self.prepare_servers()
        });
        match again {
            Ok(()) => self.start(),
            Err(error) => {
                tracing::error!("{:?} is no longer served: {}", self.name, error.in_one_line());
                // If it is open, what was acknowledged is stored, or its loss stays known.
                let is_closed = self.end().is_ok();
                self.doors.close(super::FAILED);
                if is_closed {
                    *self.lock() = State::ended(End::NotServed(error));
                }
            }
        }
    }
}

fn volume(disk: &dyn Manage) -> Result<&dyn ManageVolume> {
    disk.volume().ok_or_else(|| {
        let what = "only a volume that is served for writing is handed over";
        Error::new(ErrorKind::Unsupported, what)
    })
}
