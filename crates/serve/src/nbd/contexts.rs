//! What clients can ask about the parts of a disk: metadata contexts. Every export has
//! `base:allocation`; the others are its owner's.

use super::protocol::{BASE_ALLOCATION, STATE_HOLE, STATE_ZERO};
use mica_block::{Disk, Extent, ExtentKind, LocalFuture, Result, Survey};
use mica_units::GuestRange;
use std::sync::Arc;

/// A property that parts of a disk have.
pub trait Context: Send + Sync {
    /// Its name with its namespace, such as `qemu:allocation-depth`.
    fn name(&self) -> &str;

    /// What holds for the parts of `range`, which is not empty, in their order, from its start, as
    /// far as that takes a bounded amount of memory: at least for a byte.
    ///
    /// Errors: why that is not known.
    fn parts(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Part>>>;
}

/// A part of a disk, and what holds for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// Its length in bytes; not zero.
    pub len: u64,
    /// As the context defines it.
    pub flags: u32,
}

/// A context of an export, by its number there: 0 is `base:allocation`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ContextNumber(pub(super) usize);

impl ContextNumber {
    pub(super) const ALLOCATION: Self = Self(0);

    /// The number that clients get.
    pub(super) fn id(self) -> u32 {
        u32::try_from(self.0).expect("an export has few contexts") + 1
    }
}

/// The contexts of an export.
pub(super) struct Contexts<'a>(pub(super) &'a [Arc<dyn Context>]);

impl<'a> Contexts<'a> {
    /// All of them, with their names.
    pub(super) fn all(&self) -> impl Iterator<Item = (ContextNumber, &'a [u8])> + use<'a> {
        let others = self.0.iter().map(|context| context.name().as_bytes());
        let names = [BASE_ALLOCATION].into_iter().chain(others);
        names.enumerate().map(|(number, name)| (ContextNumber(number), name))
    }

    /// As [`Context::parts`], of the context `number` of `disk`.
    pub(super) async fn parts(
        &self,
        number: ContextNumber,
        disk: &dyn Disk,
        range: GuestRange,
    ) -> Result<Vec<Part>> {
        if number != ContextNumber::ALLOCATION {
            return self.0[number.0 - 1].parts(range).await;
        }
        let extents = Survey::new(disk, range).next().await?.unwrap_or_default();
        Ok(extents.iter().map(allocation).collect())
    }
}

/// Whether `query` of a list asks for the context called `name`: a namespace, or a part of one,
/// lists all that begin with it ("Metadata querying").
pub(super) fn lists(query: &[u8], name: &[u8]) -> bool {
    query == name || query.ends_with(b":") && name.starts_with(query)
}

fn allocation(extent: &Extent) -> Part {
    // What has no data is a hole, as in QEMU, whether or not a place is kept for it.
    let flags = match extent.kind {
        ExtentKind::DataInHole => STATE_ZERO,
        kind if kind.reads_as_zero() => STATE_HOLE | STATE_ZERO,
        _ => 0,
    };
    Part { len: extent.len, flags }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_list_what_is_in_them() {
        let bitmap = b"qemu:dirty-bitmap:monday";
        for query in [&b"qemu:"[..], b"qemu:dirty-bitmap:", bitmap] {
            assert!(lists(query, bitmap));
        }
        for query in [&b"base:"[..], b"qemu", b"qemu:dirty-bitmap", b"qemu:dirty-bitmap:mon", b""] {
            assert!(!lists(query, bitmap));
        }
    }

    #[test]
    fn what_has_no_data_is_a_hole_whether_or_not_a_place_is_kept_for_it() {
        let flags = |kind| {
            let range = GuestRange::new(mica_units::GuestOffset::ZERO, 512).expect("fits");
            allocation(&Extent::unplaced(range, kind)).flags
        };
        for kind in [ExtentKind::Hole, ExtentKind::Zero, ExtentKind::ZeroAllocated] {
            assert_eq!(flags(kind), STATE_HOLE | STATE_ZERO);
        }
        assert_eq!(flags(ExtentKind::DataInHole), STATE_ZERO);
        assert_eq!(flags(ExtentKind::Data), 0);
    }
}
