//! Another backing file for an image that has tables: only what says so in its header changes, by
//! at most two writes, so that a power cut between them, or within one, leaves the old name or the
//! new one.
//!
//! ```text
//! the new name, behind everything that the header has ─▶ sync ─▶ the fields, within one sector
//! ```
//!
//! Invariants
//! - I1 The first write touches no byte that the header in the file uses.
//! - I2 The second write lies in the first sector, which a device writes as a whole.

use super::frame::{BACKING_NAME_BYTES_MAX, Frame};
use super::{BACKING_FORMAT_BYTES_MAX, BackingName};
use crate::extension::{self, Walk};
use mica_block::{Error, ErrorKind, Result};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;

/// What a device writes as a whole.
pub(super) const SECTOR: usize = 512;
/// Where the first of the fields that change is: the place of the backing file's name.
const FIELDS_AT: usize = 8;
/// The end of these fields: place and length of the name.
const FIELDS_END: usize = 20;

/// The writes that give an image another backing file, in order; the first one is durable before
/// the second begins.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackingChange {
    /// Where the new name is put, unless it is a part of the other write.
    pub name: Option<(usize, Vec<u8>)>,
    /// The fields that make it count.
    pub fields: (usize, Vec<u8>),
}

impl BackingChange {
    /// What makes `new` the backing file of the image whose first cluster is `first_cluster`, or
    /// leaves it without one.
    ///
    /// # Errors
    /// As [`Header::decode`](super::Header::decode); `Limit` if the name is too long, or there is
    /// no room for it; `Unsupported` if the header would have to be laid out again, which no single
    /// write does.
    pub fn plan(first_cluster: &[u8], new: Option<&BackingName>) -> Result<Self> {
        let old = Old::read(first_cluster)?;
        let format = new.and_then(|new| new.format.as_deref());
        let len = new.map_or(0, |new| new.name.len());
        if len > BACKING_NAME_BYTES_MAX
            || format.is_some_and(|f| f.len() > BACKING_FORMAT_BYTES_MAX)
        {
            let what = format!(
                "the backing file's name has {len} bytes, the maximum is {BACKING_NAME_BYTES_MAX}"
            );
            return Err(Error::new(ErrorKind::Limit, what));
        }
        // Without a backing file nobody looks at its format. The names of the feature bits serve
        // nobody who knows the bits.
        let with_format = old.extensions(format, Keep::All);
        let without_names = old.extensions(format, Keep::NoFeatureNames);
        let mut layouts = vec![with_format, without_names];
        if new.is_none() {
            layouts.push(old.extensions.clone());
        }
        let planned = layouts.iter().find_map(|layout| old.plan(layout, new));
        planned.ok_or_else(|| {
            let what = "the header has no room for another backing file's name: \
                        `qemu-img rebase -u` lays it out again while nobody uses the image";
            Error::new(ErrorKind::Unsupported, what)
        })
    }
}

type Extensions = Vec<(u32, Vec<u8>)>;

/// Which extensions stay.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keep {
    All,
    NoFeatureNames,
}

/// The header as it is.
pub(super) struct Old<'a> {
    bytes: &'a [u8],
    extensions: Extensions,
    extensions_at: usize,
    /// The end of what the header uses.
    end: usize,
    /// Where the backing file's name is.
    name: Range<usize>,
}

impl<'a> Old<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self> {
        let frame = Frame::decode(bytes)?;
        if bytes.len() != 1 << frame.cluster_bits.bits() {
            return Err(Error::new(ErrorKind::Invalid, "the first cluster is not whole"));
        }
        let mut walk = Walk::new(bytes, frame.header_len, frame.extensions_end);
        let mut extensions = Extensions::new();
        let mut end = frame.header_len;
        while let Some(step) = walk.next()? {
            end = step.offset + step.data.len().next_multiple_of(8);
            extensions.push((step.magic, step.data.into_owned()));
        }
        // The mark of the end, which need not be there where the name follows.
        let name = frame.backing_at..frame.backing_at + frame.backing_len;
        let end = (end + 8).max(name.end);
        Ok(Self { bytes, extensions, extensions_at: frame.header_len, end, name })
    }

    /// The end of what the header uses.
    pub(super) fn end(&self) -> usize {
        self.end
    }

    /// Where `name` is, if that is the backing file's, and all of it lies behind the first sector.
    pub(super) fn place_behind_sector(&self, name: &[u8]) -> Option<usize> {
        let at = self.name.start;
        let is_it = self.bytes.get(self.name.clone()) == Some(name);
        (at >= SECTOR && !name.is_empty() && is_it).then_some(at)
    }

    /// The extensions with the format of another backing file.
    fn extensions(&self, format: Option<&str>, keep: Keep) -> Extensions {
        let mut changed = self.extensions.clone();
        let named = |magic| move |extension: &(u32, Vec<u8>)| extension.0 == magic;
        let place = changed.iter().position(named(extension::BACKING_FORMAT));
        match (format, place) {
            (Some(format), Some(place)) => changed[place].1 = format.into(),
            (Some(format), None) => changed.insert(0, (extension::BACKING_FORMAT, format.into())),
            (None, Some(place)) => drop(changed.remove(place)),
            (None, None) => {}
        }
        if keep == Keep::NoFeatureNames {
            changed.retain(|(magic, _)| *magic != extension::FEATURE_NAMES);
        }
        changed
    }

    /// The writes that lead to these `extensions`, if there are such.
    fn plan(&self, extensions: &Extensions, new: Option<&BackingName>) -> Option<BackingChange> {
        let mut after = self.bytes.to_vec();
        let mut area = Vec::new();
        for (magic, data) in extensions {
            extension::append(&mut area, *magic, data);
        }
        extension::append(&mut area, extension::END, &[]);
        let area_end = self.extensions_at + area.len();
        after.get_mut(self.extensions_at..area_end)?.copy_from_slice(&area);
        let (name, at) = match new {
            None => (&[][..], 0),
            Some(new) => (new.name.as_bytes(), self.end.max(area_end).next_multiple_of(8)),
        };
        let mut first = None;
        let at = match after.get(at..at + name.len()) {
            Some(_) if name.is_empty() => at,
            Some(_) => {
                first = Some((at, name.to_vec()));
                at
            }
            // In the place of the old one, if all of it is one sector.
            None => {
                let part = after.get_mut(area_end..area_end + name.len())?;
                part.copy_from_slice(name);
                area_end
            }
        };
        after[FIELDS_AT..FIELDS_AT + 8].copy_from_slice(&(at as u64).to_be_bytes());
        let len = u32::try_from(name.len()).ok()?;
        after[FIELDS_AT + 8..FIELDS_END].copy_from_slice(&len.to_be_bytes());
        let differs = |at: &usize| after[*at] != self.bytes[*at];
        let end = (0..after.len()).rev().find(differs).map_or(FIELDS_END, |last| last + 1);
        let end = end.max(FIELDS_END);
        let fields = (FIELDS_AT, after[FIELDS_AT..end].to_vec());
        (end <= SECTOR).then_some(BackingChange { name: first, fields })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Header;
    use super::*;
    use crate::{Compression, FeatureName, L2Format, Version};
    use mica_units::ClusterBits;

    fn header(bits: u32, version: Version, backing: Option<(&str, Option<&str>)>) -> Header {
        let cluster_bits = ClusterBits::new(bits).expect("a size of clusters");
        let l2 = L2Format { cluster_bits, version, extended: false, data_file: false };
        let mut header = Header::new(l2, Compression::Deflate);
        header.size = 1 << 20;
        header.l1_entries = 1 << 10;
        header.l1_offset = cluster_bits.start_of(mica_units::HostCluster::new(3));
        header.refcount_table_offset = cluster_bits.start_of(mica_units::HostCluster::new(1));
        header.refcount_table_clusters = 1;
        header.backing = backing.map(named);
        header
    }

    fn named((name, format): (&str, Option<&str>)) -> BackingName {
        BackingName { name: name.into(), format: format.map(str::to_owned) }
    }

    fn cluster_of(header: &Header) -> Vec<u8> {
        let mut bytes = header.encode().expect("it fits");
        bytes.resize(1 << header.cluster_bits.bits(), 0);
        bytes
    }

    /// The change, as far as it was written; what the header says then.
    fn applied(bytes: &[u8], change: &BackingChange, steps: usize) -> Header {
        let mut bytes = bytes.to_vec();
        let writes = change.name.iter().chain([&change.fields]);
        for (at, part) in writes.take(steps) {
            bytes[*at..at + part.len()].copy_from_slice(part);
        }
        Header::decode(&bytes, 1 << 30).expect("it is a header")
    }

    #[test]
    fn every_step_of_a_change_leaves_the_old_name_or_the_new_one_and_all_else() {
        let names = [
            None,
            Some(("base.qcow2", Some("qcow2"))),
            Some(("b", Some("raw"))),
            Some(("/a/much/longer/name/of/a/file/that/is/elsewhere", Some("qcow2"))),
        ];
        for bits in [9, 12, 16, 21] {
            for version in [Version::V2, Version::V3] {
                for old in names {
                    for new in names {
                        let header = header(bits, version, old);
                        let bytes = cluster_of(&header);
                        let new = new.map(named);
                        let change = BackingChange::plan(&bytes, new.as_ref()).expect("room");
                        assert!(change.fields.0 + change.fields.1.len() <= SECTOR);
                        let steps = 1 + usize::from(change.name.is_some());
                        for before in 0..steps {
                            let read = applied(&bytes, &change, before);
                            assert_eq!(read, Header::decode(&bytes, 1 << 30).expect("a header"));
                        }
                        let read = applied(&bytes, &change, steps);
                        assert_eq!(read.backing, new, "{bits} {version:?} {old:?}");
                        let names = read.feature_names.clone();
                        assert!(names.is_empty() || names == header.feature_names);
                        let again = Header { backing: header.backing.clone(), ..read };
                        assert_eq!(
                            Header { feature_names: header.feature_names.clone(), ..again },
                            { header.clone() }
                        );
                    }
                }
            }
        }
    }

    /// QEMU's own table of names reaches beyond the first sector.
    #[test]
    fn header_of_more_than_a_sector_keeps_its_layout_or_loses_only_names_of_features() {
        let mut long = header(16, Version::V3, Some(("base", None)));
        while cluster_of(&long).iter().rposition(|byte| *byte != 0).expect("a header") < 700 {
            let name = FeatureName { name: "another".to_owned(), ..long.feature_names[0].clone() };
            long.feature_names.push(name);
        }
        let bytes = cluster_of(&long);
        for new in [None, Some(named(("other", Some("qcow2"))))] {
            let change = BackingChange::plan(&bytes, new.as_ref()).expect("room");
            let steps = 1 + usize::from(change.name.is_some());
            assert_eq!(applied(&bytes, &change, steps).backing, new);
        }
    }

    #[test]
    fn name_without_room_is_refused() {
        let name = "n".repeat(600);
        let small = header(9, Version::V3, None);
        let wish = named((&name, Some("qcow2")));
        let error = BackingChange::plan(&cluster_of(&small), Some(&wish)).expect_err("no room");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let wish = named((&"n".repeat(1024), None));
        let large = header(16, Version::V3, None);
        let error = BackingChange::plan(&cluster_of(&large), Some(&wish)).expect_err("too long");
        assert_eq!(error.kind(), ErrorKind::Limit);
    }
}
