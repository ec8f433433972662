//! Which names a store has, and the highest head of each.
//!
//! Invariants
//! - I1 What [`stable_names`] returns was read after extents were listed, and read twice: no name
//!   that is not in it had a volume then that a volume of it did not name, too.

use super::client::{Client, InFlight, stranger};
use crate::format::Id;
use crate::format::head::{HEAD_READ_BYTES, Head, Life};
use crate::names::{self, VolumeName};
use crate::place::Writer;
use crate::put::decode_head;
use mica_block::{Entry, Error, ErrorKind, Result};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Times that all heads are read, at most: volumes are made faster then than names are listed.
const ROUNDS_MAX: usize = 32;
/// Times that one name's heads are listed, at most.
const LISTS_MAX: usize = 32;

/// A name, and the highest head that it had.
pub(crate) struct Named {
    pub(crate) name: VolumeName,
    pub(crate) head: Head,
    /// The numbers of heads below.
    pub(crate) lower: Vec<u64>,
}

impl Named {
    /// Whether it names anything.
    pub(crate) fn is_alive(&self) -> bool {
        self.head.life != Life::Deleted
    }

    /// Whether what it names may be missing: it is a clone that is not ready.
    pub(crate) fn is_pinned(&self) -> bool {
        self.head.life == Life::Pinned
    }

    /// All of this writer from this extent on counts, too.
    pub(crate) fn above(&self) -> Option<(Writer, u32)> {
        match self.head.life {
            Life::Open { writer, sequence } => Some((writer, sequence)),
            _ => None,
        }
    }
}

/// The highest heads of all names but `damaged`, read until there were no other volumes the second
/// time.
///
/// # Errors
/// `Corrupt` if a head is damaged; otherwise what the store reports.
pub(crate) async fn stable_names(
    client: &Client,
    store: Id,
    damaged: &BTreeSet<VolumeName>,
) -> Result<Vec<Arc<Named>>> {
    let mut before = read_names(client, store, &[], damaged).await?;
    for _ in 0..ROUNDS_MAX {
        let now = read_names(client, store, &before, damaged).await?;
        let is_same =
            |(a, b): (&Arc<Named>, &Arc<Named>)| a.name == b.name && a.head.volume == b.head.volume;
        if before.len() == now.len() && before.iter().zip(&now).all(is_same) {
            // What a volume names now, it named then, or its writer has put it since.
            return Ok(before);
        }
        before = now;
    }
    let what = format!("volumes keep being created in {}: try again", client.objects.name());
    Err(Error::new(ErrorKind::Io, what))
}

/// The highest head of every name now. Those that `before` has are not read again.
async fn read_names(
    client: &Client,
    store: Id,
    before: &[Arc<Named>],
    damaged: &BTreeSet<VolumeName>,
) -> Result<Vec<Arc<Named>>> {
    let known: HashMap<&VolumeName, &Arc<Named>> =
        before.iter().map(|named| (&named.name, named)).collect();
    let (mut all, mut in_flight) = (Vec::new(), InFlight::new());
    for entry in client.list(&names::volumes()).await? {
        let Entry::Folder(folder) = &entry else {
            return Err(stranger(entry.name(), &*client.objects, "folder of a volume"));
        };
        let Some((_, name)) = folder.as_str().rsplit_once('/') else { continue };
        let name = VolumeName::new(name)?;
        if damaged.contains(&name) {
            continue;
        }
        let (client, known) = (client.clone(), known.get(&name).map(|known| Arc::clone(known)));
        let read = async move { read_name(&client, store, &name, known).await };
        all.extend(in_flight.push(read).await.transpose()?.flatten());
    }
    while let Some(read) = in_flight.next().await {
        all.extend(read?);
    }
    Ok(all)
}

/// The highest head of `name`; `None` if it has none. `known` is one that need not be read again.
///
/// # Errors
/// As [`stable_names`].
pub(crate) async fn read_name(
    client: &Client,
    store: Id,
    name: &VolumeName,
    known: Option<Arc<Named>>,
) -> Result<Option<Arc<Named>>> {
    for _ in 0..LISTS_MAX {
        let mut lower = head_numbers(client, name).await?;
        let Some(number) = lower.pop() else { return Ok(None) };
        if let Some(known) = known.as_ref().filter(|known| known.head.number == number) {
            return Ok(Some(Arc::clone(known)));
        }
        let object = name.head(number);
        let bytes = match client.read(&object, 0, HEAD_READ_BYTES).await {
            Ok(bytes) => bytes,
            // There is a higher one, and another collector deleted this.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let head = decode_head(&*client.objects, name, (store, number), &bytes).await?;
        return Ok(Some(Arc::new(Named { name: name.clone(), head, lower })));
    }
    let what = format!("the heads of volume {} keep changing: try again", name.as_str());
    Err(Error::new(ErrorKind::Io, what))
}

/// The numbers of all heads of `name`, in order.
///
/// # Errors
/// `Corrupt` if there is something else among them; otherwise what the store reports.
pub(crate) async fn head_numbers(client: &Client, name: &VolumeName) -> Result<Vec<u64>> {
    let heads = client.list(&name.folder()).await?;
    let number = |entry: &Entry| {
        let number = names::number(entry.name());
        number.ok_or_else(|| stranger(entry.name(), &*client.objects, "head"))
    };
    heads.iter().map(number).collect()
}
