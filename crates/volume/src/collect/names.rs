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
use mica_block::{Entry, Error, ErrorKind, ObjectName, Objects, Result};
use std::collections::{BTreeMap, BTreeSet, HashMap};
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
    let (objects, damaged) = (Arc::clone(&client.objects), Arc::new(damaged.clone()));
    let head = move |entry: Entry| head_of(entry.name(), &damaged, &*objects);
    let mut numbers: BTreeMap<VolumeName, Vec<u64>> = BTreeMap::new();
    for (name, number) in client.within(&names::volumes(), head, |_| ()).await? {
        numbers.entry(name).or_default().push(number);
    }
    let (mut all, mut in_flight) = (Vec::new(), InFlight::new());
    for (name, mut numbers) in numbers {
        numbers.sort_unstable();
        let (client, known) = (client.clone(), known.get(&name).map(|known| Arc::clone(known)));
        let read = async move { read_listed(&client, store, (name, numbers), known).await };
        all.extend(in_flight.push(read).await.transpose()?.flatten());
    }
    while let Some(read) = in_flight.next().await {
        all.extend(read?);
    }
    Ok(all)
}

/// Which volume has the head `name`, and its number; `None` if it is among `damaged`.
fn head_of(
    name: &ObjectName,
    damaged: &BTreeSet<VolumeName>,
    objects: &dyn Objects,
) -> Result<Option<(VolumeName, u64)>> {
    let mut parts = name.as_str().split('/').skip(1);
    let (Some(volume), Some(_)) = (parts.next(), parts.next()) else {
        return Err(stranger(name, objects, "folder of a volume"));
    };
    let volume = VolumeName::new(volume)?;
    if damaged.contains(&volume) {
        return Ok(None);
    }
    let number = names::number(name).filter(|number| volume.head(*number) == *name);
    let number = number.ok_or_else(|| stranger(name, objects, "head"))?;
    Ok(Some((volume, number)))
}

/// The highest head of `name`; `None` if it has none.
///
/// # Errors
/// As [`stable_names`].
pub(crate) async fn read_name(
    client: &Client,
    store: Id,
    name: &VolumeName,
) -> Result<Option<Arc<Named>>> {
    let numbers = head_numbers(client, name).await?;
    read_listed(client, store, (name.clone(), numbers), None).await
}

/// The highest head of `name`, which has those that are listed, in order. `known` is one that need
/// not be read again.
async fn read_listed(
    client: &Client,
    store: Id,
    (name, mut lower): (VolumeName, Vec<u64>),
    known: Option<Arc<Named>>,
) -> Result<Option<Arc<Named>>> {
    for _ in 0..LISTS_MAX {
        let Some(number) = lower.pop() else { return Ok(None) };
        if let Some(known) = known.as_ref().filter(|known| known.head.number == number) {
            return Ok(Some(Arc::clone(known)));
        }
        let object = name.head(number);
        let bytes = match client.read(&object, 0, HEAD_READ_BYTES).await {
            Ok(bytes) => bytes,
            // There is a higher one, and another collector deleted this.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                lower = head_numbers(client, &name).await?;
                continue;
            }
            Err(error) => return Err(error),
        };
        let head = decode_head(&*client.objects, &name, (store, number), &bytes).await?;
        return Ok(Some(Arc::new(Named { name, head, lower })));
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
