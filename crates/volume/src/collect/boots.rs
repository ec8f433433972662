//! The boot records of a store.
//!
//! Invariants
//! - B1 They are listed before heads are read. So a record whose image no head names then is of one
//!   that was gone when the record was there already. (If it were not, a boot would be slow once.)

use super::client::{Client, InFlight};
use super::names::Named;
use crate::format::Id;
use crate::names;
use mica_block::{Entry, ObjectName, Result};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What was there: of each image its records, by number. What has no name of ours is not among it.
pub(crate) struct Boots(Vec<(Id, Vec<ObjectName>)>);

/// All boot records.
///
/// # Errors
/// What the store reports.
pub(crate) async fn list(client: &Client) -> Result<Boots> {
    let (mut all, mut in_flight) = (Vec::new(), InFlight::new());
    for entry in client.list(&names::all_boots()).await? {
        let Entry::Folder(folder) = entry else { continue };
        let Some(image) = names::image_of_boots(&folder) else { continue };
        let client = client.clone();
        let of_image = async move { (image, client.list(&folder).await) };
        all.extend(in_flight.push(of_image).await);
    }
    while let Some(found) = in_flight.next().await {
        all.push(found);
    }
    let records = all.into_iter().map(|(image, found)| {
        let names = found?.into_iter().map(|entry| entry.name().clone());
        Ok((image, names.filter(|name| names::number(name).is_some()).collect()))
    });
    records.collect::<Result<_>>().map(Boots)
}

impl Boots {
    /// Those that nobody needs: all of an image of which there is no volume, and otherwise all but
    /// the last.
    pub(crate) fn dead(self, names: &[Arc<Named>]) -> Vec<ObjectName> {
        let alive = names.iter().filter(|named| named.is_alive());
        let images: BTreeSet<Id> = alive.map(|named| named.head.boot_image()).collect();
        let dead = self.0.into_iter().flat_map(|(image, mut records)| {
            if images.contains(&image) {
                records.pop();
            }
            records
        });
        dead.collect()
    }
}
