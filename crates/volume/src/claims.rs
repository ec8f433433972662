//! The numbers of writers: claims, and the boundaries below which they are void.
//!
//! Invariants
//! - I1 No number is used twice: a claim counts if its put was done, and no boundary above it was
//!   there then. Claims are deleted only below a boundary.
//! - I2 A number that is claimed now is greater than all that were claimed before.
//! - I3 Nobody can foresee the number of a writer with a log. Otherwise a store that is put back
//!   from a copy would give that number again to another writer, and the log would be taken for
//!   that one's.

use crate::format::Id;
use crate::format::head::Life;
use crate::heads::{Heads, Named, ROUNDS_MAX};
use crate::names;
use crate::place::Writer;
use crate::put::{Patience, last_in, put};
use crate::state::State;
use mica_block::{Error, ErrorKind, ObjectName, Objects, Put, Result};
use mica_rt::Buf;

impl Heads {
    /// Claims a number for a writer of `volume`, which a log names or not (I3).
    ///
    /// # Errors
    /// `Limit` if there are no more; otherwise what the store reports.
    pub(crate) async fn claim(&self, volume: Id, named: Named) -> Result<Writer> {
        let objects = &*self.objects;
        for _ in 0..ROUNDS_MAX {
            let last = newest_claim(objects).await?;
            // Read after the claims: who deletes them has put the boundary before.
            let boundary = newest_boundary(objects).await?.unwrap_or(Writer::FIRST);
            let next = last.map_or(Some(boundary), |last| last.next().map(|w| w.max(boundary)));
            let step = match named {
                Named::Nowhere => 0,
                Named::ByLog => self.random_step(),
            };
            let writer = next.and_then(|next| Writer::new(next.number() + step));
            let writer = writer.ok_or_else(|| {
                let what = format!("{} has no writer numbers left", objects.name());
                Error::new(ErrorKind::Limit, what)
            })?;
            let claim = self.head(0, volume, Life::Open { writer, sequence: 0 }, State::default());
            let claim = Buf::from_slice(&claim.encode());
            if put(objects, &writer.claim(), claim, Patience::VERB).await? == Put::Exists {
                continue;
            }
            if newest_boundary(objects).await?.is_none_or(|boundary| boundary <= writer) {
                return Ok(writer);
            }
        }
        let what = format!("other hosts keep claiming numbers in {}: try again", objects.name());
        Err(Error::new(ErrorKind::Io, what))
    }

    /// Numbers that are left out: few enough for 16 million writers with logs at the least.
    fn random_step(&self) -> u64 {
        let [.., low, high] = self.environment.random();
        u16::from_le_bytes([low, high]).into()
    }
}

/// The greatest writer that was claimed, as far as claims were not deleted.
///
/// # Errors
/// `Corrupt` if something else is among the claims; otherwise what the store reports.
pub(crate) async fn newest_claim(objects: &dyn Objects) -> Result<Option<Writer>> {
    let Some(folder) = last_in(objects, &names::claims()).await? else { return Ok(None) };
    let Some(claim) = last_in(objects, &folder).await? else { return Ok(None) };
    let writer = Writer::from_claim(&claim);
    writer.map(Some).ok_or_else(|| stranger(&claim, objects, "claim of a writer"))
}

/// The highest boundary.
///
/// # Errors
/// As [`newest_claim`].
pub(crate) async fn newest_boundary(objects: &dyn Objects) -> Result<Option<Writer>> {
    let Some(boundary) = last_in(objects, &names::boundaries()).await? else { return Ok(None) };
    let writer = Writer::from_boundary(&boundary);
    writer.map(Some).ok_or_else(|| stranger(&boundary, objects, "boundary of claims"))
}

fn stranger(name: &ObjectName, objects: &dyn Objects, wanted: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("{name} of {} is not a valid {wanted}", objects.name()))
}
