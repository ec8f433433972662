//! Long chains, made fast: QEMU makes one base and one layer, of which all others are copies with
//! another backing file, other clusters and other content.

use crate::storm::foreign;
use crate::storm::stamp::{self, SECTOR};
use crate::storm::story::{Outcome, trouble};
use std::fs;
use std::path::Path;

/// Clusters that each layer owns, in a row.
pub(super) const OWNED: u64 = 3;
/// The bits of an entry that are an offset.
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

/// The eight bytes of an image at `at`.
fn word(bytes: &[u8], at: usize) -> Outcome<u64> {
    let word = bytes.get(at..).and_then(<[u8]>::first_chunk);
    word.map(|word| u64::from_be_bytes(*word)).ok_or_else(|| trouble("a cut image"))
}

/// The offset in an entry.
fn place(word: u64) -> Outcome<usize> {
    usize::try_from(word & OFFSET_MASK).map_err(trouble)
}

/// The first `count` entries of the image in `bytes`, which one L2 table has.
pub(super) fn entries(bytes: &[u8], count: usize) -> Outcome<Vec<u64>> {
    let at = place(word(bytes, place(word(bytes, 40)?)?)?)?;
    (0..count).map(|number| word(bytes, at + 8 * number)).collect()
}

/// The name of a layer; all have the same length.
pub(super) fn name_of(layer: usize) -> String {
    format!("layer{layer:04}.qcow2")
}

/// An image with a row of clusters at the disk's beginning, as bytes.
#[derive(Debug)]
pub(super) struct Template {
    bytes: Vec<u8>,
    cluster: u64,
    /// Where the name of the backing file is; `None` for a base.
    backing_at: Option<usize>,
    /// Where the entries of the clusters are, and where they point to.
    entries_at: usize,
    data_at: usize,
}

impl Template {
    /// Makes one in `dir`, for disks of `sectors` sectors, which one L2 table covers.
    pub(super) fn make(dir: &Path, cluster: u64, sectors: u64, has_backing: bool) -> Outcome<Self> {
        let (name, len) = ("template.qcow2", (sectors * SECTOR as u64).to_string());
        let (below, options) = (name_of(0), format!("cluster_size={cluster}"));
        let mut args = vec!["create", "-q", "-f", "qcow2", "-o", &options];
        if has_backing {
            args.extend(["-u", "-b", &below, "-F", "qcow2"]);
        }
        args.extend([name, &len]);
        foreign::img(dir, &args)?;
        let write = format!("write -q -P 1 0 {}", OWNED * cluster);
        // The layer that it names is not there yet.
        let base = dir.join(&below);
        if has_backing {
            foreign::img(dir, &["create", "-q", "-f", "qcow2", "-o", &options, &below, &len])?;
        }
        foreign::io(dir, "qcow2", name, &[write])?;
        if has_backing {
            fs::remove_file(base)?;
        }
        let bytes = fs::read(dir.join(name))?;
        fs::remove_file(dir.join(name))?;
        Self::parse(bytes, cluster, has_backing)
    }

    fn parse(bytes: Vec<u8>, cluster: u64, has_backing: bool) -> Outcome<Self> {
        let backing_at = match has_backing {
            true => Some(usize::try_from(word(&bytes, 8)?).map_err(trouble)?),
            false => None,
        };
        let entries_at = place(word(&bytes, place(word(&bytes, 40)?)?)?)?;
        let data_at = place(word(&bytes, entries_at)?)?;
        for number in 0..OWNED {
            let at = entries_at + 8 * usize::try_from(number).map_err(trouble)?;
            if place(word(&bytes, at)?)? as u64 != data_at as u64 + number * cluster {
                return Err(trouble("a template's clusters are not in a row"));
            }
        }
        Ok(Self { bytes, cluster, backing_at, entries_at, data_at })
    }

    /// The layer on `below` that owns the clusters from `first` on, which hold write `seq` of disk
    /// `disk`.
    pub(super) fn layer(&self, below: usize, first: u64, disk: u64, seq: u64) -> Outcome<Vec<u8>> {
        let mut bytes = self.bytes.clone();
        if let Some(at) = self.backing_at {
            let name = name_of(below);
            bytes[at..at + name.len()].copy_from_slice(name.as_bytes());
        }
        let len = 8 * usize::try_from(OWNED).map_err(trouble)?;
        let entries = bytes[self.entries_at..self.entries_at + len].to_vec();
        bytes[self.entries_at..self.entries_at + len].fill(0);
        let at = self.entries_at + 8 * usize::try_from(first).map_err(trouble)?;
        bytes[at..at + len].copy_from_slice(&entries);
        let sectors = self.cluster / SECTOR as u64;
        let data = stamp::bytes(disk, first * sectors, OWNED * sectors, seq);
        bytes.resize(bytes.len().max(self.data_at + data.len()), 0);
        bytes[self.data_at..self.data_at + data.len()].copy_from_slice(&data);
        Ok(bytes)
    }
}
