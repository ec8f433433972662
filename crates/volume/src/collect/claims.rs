//! Claims of writers' numbers: those below a boundary are void, and are deleted.
//!
//! A pool keeps the folder of a claim when it is empty, and a listing looks into each: so only the
//! folders are listed that may have claims, from the lowest boundary on.
//!
//! Invariants
//! - I1 A claim is deleted only when a boundary above it was put. The highest boundary stays.
//! - I2 A boundary is deleted only when every claim that was found below the highest is. So there
//!   are none below the lowest, whoever dies when; before the first boundary that voids something
//!   one is put that voids nothing. (A claim that comes to be there later is deleted by its writer,
//!   to whom it is of no use; if that dies, a kilobyte stays.)

use super::client::{Client, stranger};
use crate::freeing::Freeing;
use crate::names;
use crate::place::Writer;
use crate::put::{Patience, put};
use mica_block::{Entry, ObjectName, Result};
use mica_rt::Buf;
use std::sync::Arc;

/// What is to be done about claims.
pub(crate) struct Claims {
    /// The boundaries that are to be put first, in order.
    new: Vec<Writer>,
    /// The claims below the highest boundary then.
    below: Vec<ObjectName>,
    /// The boundaries below it that were found.
    lower: Vec<ObjectName>,
}

/// The claims that there are, and the boundaries that a new one is above.
///
/// # Errors
/// `Corrupt` if there is something else among them; otherwise what the store reports.
pub(crate) async fn find(client: &Client) -> Result<Claims> {
    let objects = &*client.objects;
    let mut boundaries = Vec::new();
    for entry in client.list(&names::boundaries()).await? {
        let writer = Writer::from_boundary(entry.name());
        boundaries.push(writer.ok_or_else(|| stranger(entry.name(), objects, "boundary"))?);
    }
    let (mut below, mut last) = (Vec::new(), None);
    let from = boundaries.first().and_then(|lowest| lowest.folder_before());
    for entry in client.list_after(&names::claims(), from.as_ref()).await? {
        let Entry::Folder(folder) = &entry else {
            return Err(stranger(entry.name(), objects, "folder of claims"));
        };
        for entry in client.list(folder).await? {
            let claim = entry.name().clone();
            let writer = Writer::from_claim(&claim);
            last = last.max(Some(writer.ok_or_else(|| stranger(&claim, objects, "claim"))?));
            below.push(claim);
        }
    }
    let names = |boundaries: &[Writer]| boundaries.iter().map(|it| it.boundary()).collect();
    let highest = boundaries.last().copied();
    match last.and_then(Writer::next).filter(|next| highest.is_none_or(|highest| highest < *next)) {
        Some(next) => {
            let first = highest.is_none().then_some(Writer::FIRST);
            let new = first.into_iter().chain([next]).collect();
            Ok(Claims { new, below, lower: names(&boundaries) })
        }
        // Others deleted claims above these; or the last number there is was claimed.
        None => {
            below.retain(|claim| Writer::from_claim(claim) < highest);
            boundaries.pop();
            Ok(Claims { new: Vec::new(), below, lower: names(&boundaries) })
        }
    }
}

impl Claims {
    pub(crate) fn count(&self) -> u64 {
        (self.below.len() + self.lower.len()) as u64
    }

    /// Puts the boundary: before any of them is deleted (I1).
    ///
    /// # Errors
    /// What the store reports.
    pub(crate) async fn put_boundary(&self, client: &Client) -> Result<()> {
        for boundary in &self.new {
            // Whoever put it, it is there: they are all alike.
            let content = Buf::from_slice(&[0]);
            let objects = Freeing(Arc::clone(&client.objects));
            put(&objects, &boundary.boundary(), content, Patience::VERB).await?;
        }
        Ok(())
    }

    /// What may be deleted then, and what may when all of that is (I2).
    pub(crate) fn names(self) -> (Vec<ObjectName>, Vec<ObjectName>) {
        let Self { new, below, mut lower } = self;
        // The one that voids nothing.
        let first = new.len().checked_sub(2).and_then(|at| new.get(at));
        lower.extend(first.map(|first| first.boundary()));
        (below, lower)
    }
}
