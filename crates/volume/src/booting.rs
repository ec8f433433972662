//! The life of a boot: the record is read, and fetched; when the boot is over, the next one is put.
//!
//! See `boot` for what a boot is.

mod fetch;
#[cfg(test)]
mod tests;

use crate::boot::{Boot, BootInfo, BootRecords};
use crate::shared::Shared;
use mica_rt::{spawn, timeout};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The longest boot.
const BOOT_MAX: Duration = Duration::from_secs(120);
/// What a volume that is closed waits, at most, for its record: whoever comes next waits with it.
const CLOSING_MAX: Duration = Duration::from_secs(1);

impl Shared {
    fn boot_records(&self, boot: &Boot) -> BootRecords<'_> {
        BootRecords {
            objects: &*self.heads.objects,
            environment: &self.heads.environment,
            store: self.heads.store,
            image: boot.image,
        }
    }

    /// Has fetched what the record says, and ends the boot when it is over.
    pub(crate) async fn tend_boot(self: &Arc<Self>) {
        let Some(boot) = &self.boot else { return };
        // It ends with the boot, or before.
        drop(spawn(Arc::clone(self).fetch_boot()));
        let is_over = timeout(BOOT_MAX, boot.full.raised());
        match self.over.unless_raised(boot.ended.unless_raised(is_over)).await {
            Some(Some(_)) => self.end_boot(true).await,
            // Whoever closes the volume does it.
            Some(None) => {}
            // It was handed over, or taken.
            None => self.end_boot(false).await,
        }
    }

    async fn fetch_boot(self: Arc<Self>) {
        let Some(boot) = &self.boot else { return };
        let volume = self.heads.name.as_str();
        let newest = match self.boot_records(boot).newest().await {
            Ok(newest) => newest,
            // I1.
            Err(error) => {
                let error = error.in_one_line();
                tracing::warn!(volume, error, "the boot record cannot be read");
                return;
            }
        };
        let Some(record) = newest.and_then(|newest| newest.record) else { return };
        *boot.found.lock() = Some(BootInfo::of(&record));
        if let Err(error) = fetch::fetch(&self, boot, &record).await {
            let error = error.in_one_line();
            tracing::debug!(volume, error, "no more is fetched for the boot");
        }
    }

    /// Ends the boot, if it has not ended: after all of it, or because the volume is closed.
    pub(crate) async fn end_boot(&self, is_whole: bool) {
        let Some(boot) = &self.boot else { return };
        boot.is_recording.store(false, Ordering::Relaxed);
        boot.ended.raise();
        let trace = mem::take(&mut *boot.trace.lock());
        drop(boot.using.lock().take());
        if trace.is_empty() {
            return;
        }
        let records = self.boot_records(boot);
        let update = records.update(|old| trace.merged(old, is_whole));
        let updated = match is_whole {
            true => Ok(update.await),
            false => timeout(CLOSING_MAX, update).await,
        };
        let volume = self.heads.name.as_str();
        match updated {
            Ok(Ok(Some(record))) => *boot.found.lock() = Some(BootInfo::of(&record)),
            Ok(Ok(None)) => {}
            Ok(Err(error)) => {
                let error = error.in_one_line();
                tracing::debug!(volume, error, "what the boot read is not recorded");
            }
            Err(_) => tracing::debug!(volume, "the store takes long: the boot is not recorded"),
        }
    }
}
