//! Claims of writers' numbers: those below a boundary are void, and are deleted.
//!
//! Invariants
//! - I1 A claim is deleted only when a boundary above it was put. The highest boundary stays.

use super::client::{Client, stranger};
use crate::names;
use crate::place::Writer;
use crate::put::{Patience, put};
use mica_block::{Entry, ObjectName, Result};
use mica_rt::Buf;

/// What is to be done about claims.
pub(crate) struct Claims {
    /// The boundary that is to be put first.
    boundary: Option<Writer>,
    below: Vec<ObjectName>,
}

/// The claims that there are, and the boundaries that a new one is above.
///
/// # Errors
/// `Corrupt` if there is something else among them; otherwise what the store reports.
pub(crate) async fn find(client: &Client) -> Result<Claims> {
    let objects = &*client.objects;
    let (mut below, mut last) = (Vec::new(), None);
    for entry in client.list(&names::claims()).await? {
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
    let (mut boundaries, mut highest) = (Vec::new(), None);
    for entry in client.list(&names::boundaries()).await? {
        let writer = Writer::from_boundary(entry.name());
        highest = Some(writer.ok_or_else(|| stranger(entry.name(), objects, "boundary"))?);
        boundaries.push(entry.name().clone());
    }
    match last.and_then(Writer::next) {
        Some(next) if highest.is_none_or(|highest| highest < next) => {
            below.extend(boundaries);
            Ok(Claims { boundary: Some(next), below })
        }
        // Others deleted claims above these; or the last number there is was claimed.
        _ => {
            below.retain(|claim| Writer::from_claim(claim) < highest);
            boundaries.pop();
            below.extend(boundaries);
            Ok(Claims { boundary: None, below })
        }
    }
}

impl Claims {
    pub(crate) fn count(&self) -> u64 {
        self.below.len() as u64
    }

    /// Puts the boundary: before anything is deleted (I1).
    ///
    /// # Errors
    /// What the store reports.
    pub(crate) async fn put_boundary(&self, client: &Client) -> Result<()> {
        let Some(boundary) = self.boundary else { return Ok(()) };
        // Whoever put it, it is there: they are all alike.
        let content = Buf::from_slice(&[0]);
        put(&*client.objects, &boundary.boundary(), content, Patience::VERB).await.map(drop)
    }

    /// What may be deleted then.
    pub(crate) fn names(self) -> impl Iterator<Item = ObjectName> {
        self.below.into_iter()
    }
}
