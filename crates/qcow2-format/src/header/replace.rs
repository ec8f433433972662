//! Another header for an image that has one, by at most two writes, so that a power cut between
//! them, or within one, leaves the old header or the new one.
//!
//! ```text
//! the backing file's name, if it fits no more ─▶ sync ─▶ the first sector
//! ```
//!
//! Invariants
//! - I1 The first write touches no byte that the header in the file uses.
//! - I2 The second write is the first sector, which a device writes as a whole.

use super::rename::{Old, SECTOR};
use super::{Header, Version};
use mica_block::{Error, ErrorKind, Result};
use std::os::unix::ffi::OsStrExt;

/// Where the place of the backing file's name is in a header.
const BACKING_NAME_AT: usize = 8;

/// The writes that replace the header of an image, in order; the first one is durable before the
/// second begins.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeaderChange {
    /// Where the backing file's name is put, unless it is a part of the sector.
    pub name: Option<(usize, Vec<u8>)>,
    /// The new first sector.
    pub sector: Vec<u8>,
}

impl HeaderChange {
    /// What makes `new` the header of the image whose first cluster is `first_cluster`. The names
    /// of the feature bits, which are for people, make room if they must.
    ///
    /// # Errors
    /// As [`Header::encode`]; `Unsupported` if the new header does not fit a sector.
    pub fn plan(first_cluster: &[u8], new: &Header) -> Result<Self> {
        let old = Old::read(first_cluster)?;
        let without_names = Header { feature_names: Vec::new(), ..new.clone() };
        let wanted = if new.version == Version::V2 { &without_names } else { new };
        for header in [wanted, &without_names] {
            let mut sector = header.encode()?;
            if sector.len() <= SECTOR {
                sector.resize(SECTOR, 0);
                return Ok(Self { name: None, sector });
            }
        }
        let name = new.backing.as_ref().map_or(&[][..], |backing| backing.name.as_bytes());
        let mut sector = without_names.encode()?;
        sector.truncate(sector.len() - name.len());
        // One that is behind the sector already stays, however often the rest changes.
        let stays = old.place_behind_sector(name);
        let at = stays.unwrap_or_else(|| old.end().max(SECTOR).next_multiple_of(8));
        if sector.len() > SECTOR || at + name.len() > first_cluster.len() {
            let what = "the new header does not fit a sector, which could be written at once: \
                        qemu-img writes it nevertheless";
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let place = (at as u64).to_be_bytes();
        sector[BACKING_NAME_AT..BACKING_NAME_AT + place.len()].copy_from_slice(&place);
        sector.resize(SECTOR, 0);
        let name = stays.is_none().then(|| (at, name.to_vec()));
        Ok(Self { name, sector })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BackingName, Compression, FeatureName, L2Format};
    use mica_units::{ClusterBits, HostCluster};

    fn header(bits: u32, version: Version, backing: Option<&str>) -> Header {
        let cluster_bits = ClusterBits::new(bits).expect("a size of clusters");
        let l2 = L2Format { cluster_bits, version, extended: false, data_file: false };
        let mut header = Header::new(l2, Compression::Deflate);
        header.size = 1 << 20;
        header.l1_entries = 1 << 10;
        header.l1_offset = cluster_bits.start_of(HostCluster::new(3));
        header.refcount_table_offset = cluster_bits.start_of(HostCluster::new(1));
        header.refcount_table_clusters = 1;
        header.backing =
            backing.map(|name| BackingName { name: name.into(), format: Some("qcow2".to_owned()) });
        header
    }

    fn cluster_of(header: &Header) -> Vec<u8> {
        let mut bytes = header.encode().expect("it fits");
        bytes.resize(1 << header.cluster_bits.bits(), 0);
        bytes
    }

    #[test]
    fn every_step_leaves_the_old_header_or_the_new_one() {
        let long = "a/".repeat(400) + "base.qcow2";
        for bits in [9, 12, 16] {
            for backing in [None, Some("base.qcow2"), Some(long.as_str())] {
                if bits == 9 && backing == Some(&long) {
                    continue;
                }
                let of = |version| header(bits, version, backing);
                for (from, to) in [(Version::V2, Version::V3), (Version::V3, Version::V2)] {
                    let (old, mut new) = (of(from), of(to));
                    new.compatible.lazy_refcounts = to == Version::V3;
                    let mut bytes = cluster_of(&old);
                    let change = HeaderChange::plan(&bytes, &new).expect("room");
                    assert_eq!(change.sector.len(), SECTOR);
                    let decoded = |bytes: &[u8]| Header::decode(bytes, 1 << 30).expect("a header");
                    let before = decoded(&bytes);
                    if let Some((at, name)) = &change.name {
                        bytes[*at..at + name.len()].copy_from_slice(name);
                        assert_eq!(decoded(&bytes), before);
                    }
                    bytes[..SECTOR].copy_from_slice(&change.sector);
                    let mut after = decoded(&bytes);
                    // They are for people.
                    after.feature_names.clone_from(&new.feature_names);
                    assert_eq!(after, new, "{bits} {backing:?}");
                }
            }
        }
    }

    #[test]
    fn name_behind_the_sector_stays_where_it_is() {
        let long = "a/".repeat(400) + "base.qcow2";
        let mut new = header(12, Version::V3, Some(&long));
        // So that it begins within the sector.
        new.feature_names.clear();
        let mut bytes = cluster_of(&new);
        let mut names = 0;
        // Were it moved each time, the cluster would soon be full.
        for size in 1..20 {
            new.size = size << 20;
            let change = HeaderChange::plan(&bytes, &new).expect("room");
            for (at, part) in change.name.into_iter().inspect(|_| names += 1) {
                bytes[at..at + part.len()].copy_from_slice(&part);
            }
            bytes[..SECTOR].copy_from_slice(&change.sector);
            let decoded = Header::decode(&bytes, 1 << 30).expect("a header");
            assert_eq!((decoded.size, &decoded.backing), (new.size, &new.backing));
        }
        assert_eq!(names, 1);
    }

    #[test]
    fn header_that_fits_no_sector_is_refused() {
        let mut new = header(16, Version::V3, None);
        let extension = crate::Extension { magic: 7, data: vec![1; 600] };
        new.unknown_extensions.push(extension);
        let error = HeaderChange::plan(&cluster_of(&new), &new).expect_err("too long");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        new.unknown_extensions.clear();
        let names = new.feature_names.clone();
        let again = |name: &FeatureName| FeatureName { name: "x".repeat(40), ..name.clone() };
        new.feature_names.extend(names.iter().map(again));
        let change = HeaderChange::plan(&cluster_of(&new), &new).expect("names make room");
        assert_eq!(change.name, None);
    }
}
