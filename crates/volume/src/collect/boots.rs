//! The boot records of a store.
//!
//! Invariants
//! - B1 They are listed before heads are read. So a record whose image no head names then is of one
//!   that was gone when the record was there already. (If it were not, a boot would be slow once.)

use super::client::Client;
use super::names::Named;
use crate::format::Id;
use crate::names;
use mica_block::{Entry, ObjectName, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What was there: of each image its records, by number. What has no name of ours is not among it.
pub(crate) struct Boots(BTreeMap<Id, Vec<ObjectName>>);

/// All boot records.
///
/// # Errors
/// What the store reports.
pub(crate) async fn list(client: &Client) -> Result<Boots> {
    let record = |entry: Entry| {
        let image = names::image_of_record(entry.name());
        Ok(image.map(|image| (image, entry.name().clone())))
    };
    let mut all: BTreeMap<Id, Vec<ObjectName>> = BTreeMap::new();
    for (image, record) in client.within(&names::all_boots(), record, |_| ()).await? {
        all.entry(image).or_default().push(record);
    }
    all.values_mut().for_each(|records| records.sort());
    Ok(Boots(all))
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
