//! The extents of a store: a list of what is there, before anything else is read.

use super::client::{Client, InFlight};
use crate::format::extent::HEADER_BYTES;
use crate::names;
use crate::place::ExtentId;
use mica_block::{Entry, ObjectName, Result};

/// Parts of extents are given back in whole pages of a file system.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// An extent that was there. 24 bytes, and nothing else is kept of those that are only listed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Listed {
    pub(crate) id: ExtentId,
    /// Length of the object.
    pub(crate) len: u64,
}

/// All extents, in order. Fences are not among them, nor is what no extent's name is: they stay.
///
/// # Errors
/// What the store reports.
pub(crate) async fn list_extents(
    client: &Client,
    mut progress: impl FnMut(u64),
) -> Result<Vec<Listed>> {
    let (mut all, mut in_flight) = (Vec::new(), InFlight::new());
    for entry in client.list(&names::extents()).await? {
        let Entry::Folder(folder) = entry else { continue };
        let client = client.clone();
        if let Some(found) = in_flight.push(async move { of_writer(&client, &folder).await }).await
        {
            all.extend(found?);
            progress(all.len() as u64);
        }
    }
    while let Some(found) = in_flight.next().await {
        all.extend(found?);
        progress(all.len() as u64);
    }
    all.sort_unstable();
    Ok(all)
}

async fn of_writer(client: &Client, folder: &ObjectName) -> Result<Vec<Listed>> {
    let entries = client.list(folder).await?;
    let listed = |entry: Entry| match entry {
        // A fence has a header and nothing else; an extent has a table, at least.
        Entry::Object { name, len } if len > HEADER_BYTES as u64 => {
            ExtentId::from_name(&name).map(|id| Listed { id, len })
        }
        _ => None,
    };
    Ok(entries.into_iter().filter_map(listed).collect())
}
