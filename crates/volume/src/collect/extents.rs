//! The extents of a store: a list of what is there, before anything else is read.

use super::client::Client;
use crate::format::extent::HEADER_BYTES;
use crate::names;
use crate::place::ExtentId;
use mica_block::{Entry, Result};

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
    progress: impl FnMut(u64),
) -> Result<Vec<Listed>> {
    let listed = |entry: Entry| match entry {
        // A fence has a header and nothing else; an extent has a table, at least.
        Entry::Object { name, len } if len > HEADER_BYTES as u64 => {
            Ok(ExtentId::from_name(&name).map(|id| Listed { id, len }))
        }
        _ => Ok(None),
    };
    let mut all = client.within(&names::extents(), listed, progress).await?;
    all.sort_unstable();
    Ok(all)
}
