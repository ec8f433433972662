//! The boot records of an image in its store: numbered objects, the highest of which counts.
//!
//! Invariants
//! - I1 A record is put with put-if-absent under the number after the highest: of several hosts
//!   whose boots end together one is first, and the others merge with what that one put.
//! - I2 Those below are deleted only when one is there that counts. Whether that succeeds makes no
//!   difference: a collector does it, too.
//! - I3 A record that a newer mica wrote is left as it is.

use crate::environment::Environment;
use crate::format::Id;
use crate::format::boot::{BOOT_BYTES_MAX, BootRange, BootRecord};
use crate::names;
use crate::put::{Patience, last_in, put, read};
use mica_block::{ErrorKind, Objects, Put, Result};
use mica_rt::Buf;

/// Times that a record is merged again because others were faster.
const ROUNDS_MAX: usize = 4;

/// The boot records of one image.
pub(crate) struct BootRecords<'a> {
    pub(crate) objects: &'a dyn Objects,
    pub(crate) environment: &'a Environment,
    pub(crate) store: Id,
    pub(crate) image: Id,
}

/// What the highest number has.
pub(crate) struct Newest {
    number: u64,
    /// `None` if it is damaged: then it is as if there were none.
    pub(crate) record: Option<BootRecord>,
}

impl BootRecords<'_> {
    /// The record that counts; `None` if there never was one.
    ///
    /// # Errors
    /// What the store reports; `Unsupported` if a newer mica wrote it.
    pub(crate) async fn newest(&self) -> Result<Option<Newest>> {
        for _ in 0..ROUNDS_MAX {
            let last = last_in(self.objects, &names::boots(self.image)).await?;
            let Some(last) = last else { return Ok(None) };
            let Some(number) = names::number(&last) else { return Ok(None) };
            let bytes = read(self.objects, &last, BOOT_BYTES_MAX, Patience::VERB).await?;
            // Others put a higher one, and deleted it.
            let Some(bytes) = bytes else { continue };
            let record = match BootRecord::decode(&bytes) {
                Ok(record) => Some(record),
                Err(why) => {
                    let error = why.explain(&last, self.objects);
                    if error.kind() == ErrorKind::Unsupported {
                        return Err(error);
                    }
                    tracing::warn!(error = error.in_one_line(), "a boot record is made again");
                    None
                }
            };
            let is_ours = |it: &BootRecord| (it.store, it.image) == (self.store, self.image);
            return Ok(Some(Newest { number, record: record.filter(is_ours) }));
        }
        Ok(None)
    }

    /// Puts what `merge` makes of the newest record. Returns what counts then, if that is known.
    ///
    /// # Errors
    /// As [`Self::newest`].
    pub(crate) async fn update(
        &self,
        merge: impl Fn(Option<&[BootRange]>) -> Option<Vec<BootRange>>,
    ) -> Result<Option<BootRecord>> {
        for _ in 0..ROUNDS_MAX {
            let newest = self.newest().await?;
            let number = newest.as_ref().map(|newest| newest.number);
            let old = newest.and_then(|newest| newest.record);
            let Some(ranges) = merge(old.as_ref().map(|old| &*old.ranges)) else { return Ok(old) };
            let Some(next) = number.map_or(Some(0), |number| number.checked_add(1)) else {
                return Ok(old);
            };
            let record = BootRecord {
                store: self.store,
                image: self.image,
                nonce: self.environment.random(),
                boots: old.map_or(0, |old| old.boots).saturating_add(1),
                time_ns: self.environment.now_ns(),
                ranges,
            };
            let (name, content) =
                (names::boot(self.image, next), Buf::from_slice(&record.encode()));
            if put(self.objects, &name, content, Patience::VERB).await? == Put::Exists {
                continue;
            }
            if let Some(below) = number {
                // I2.
                let _ = self.objects.delete(&names::boot(self.image, below)).await;
            }
            return Ok(Some(record));
        }
        Ok(None)
    }
}
