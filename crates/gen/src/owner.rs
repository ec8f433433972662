//! The owner of each unit of a generated disk: the file `owner.i32` beside the layers.
//!
//! The file holds one little-endian 32-bit number per unit of the disk: the number of the owning
//! layer, -1 for a hole, -2-L where layer L says that the unit is zeros. The size of a unit is in
//! `chain.json` ([`crate::Manifest`]): the cluster size if all layers have the same one.

use crate::content;
use mica_block::{Error, Result};
use mica_units::LayerNumber;
use std::fs;
use std::path::Path;

/// Name of the file, beside the layers.
pub const FILE_NAME: &str = "owner.i32";

/// The layer whose bytes a unit shows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Owner {
    /// No layer's: it reads as zeros.
    Hole,
    /// Nobody's: the layer says that it reads as zeros.
    Zero(LayerNumber),
    /// The layer's.
    Data(LayerNumber),
}

impl Owner {
    /// From its number in the file.
    fn from_code(code: i32) -> Self {
        let layer = |number: i32| u16::try_from(number).ok().map(LayerNumber::from_u16);
        match code {
            -1 => Self::Hole,
            ..-1 => layer(-2 - code).map_or(Self::Hole, Self::Zero),
            0.. => layer(code).map_or(Self::Hole, Self::Data),
        }
    }

    /// Its number in the file.
    fn code(self) -> i32 {
        match self {
            Self::Hole => -1,
            Self::Zero(layer) => -2 - i32::from(layer.as_u16()),
            Self::Data(layer) => i32::from(layer.as_u16()),
        }
    }
}

/// The owners of all units of a disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OwnerMap {
    unit_bytes: u64,
    disk_bytes: u64,
    codes: Vec<i32>,
}

impl OwnerMap {
    /// A disk of `disk_bytes` that no layer owns, in units of `unit_bytes`.
    pub fn new(disk_bytes: u64, unit_bytes: u64) -> Self {
        let units = usize::try_from(disk_bytes.div_ceil(unit_bytes)).unwrap_or(usize::MAX);
        Self { unit_bytes, disk_bytes, codes: vec![Owner::Hole.code(); units] }
    }

    /// Reads the file of the chain in `dir`.
    ///
    /// # Errors
    /// What the system reports.
    pub fn load(dir: &Path, disk_bytes: u64, unit_bytes: u64) -> Result<Self> {
        let path = dir.join(FILE_NAME);
        let bytes = fs::read(&path)
            .map_err(|error| Error::from_io(format!("reading {}", path.display()), error))?;
        let codes = bytes.as_chunks::<4>().0.iter().map(|code| i32::from_le_bytes(*code)).collect();
        Ok(Self { unit_bytes, disk_bytes, codes })
    }

    /// Writes the file of the chain in `dir`.
    ///
    /// # Errors
    /// What the system reports.
    pub fn save(&self, dir: &Path) -> Result<()> {
        let path = dir.join(FILE_NAME);
        let bytes: Vec<u8> = self.codes.iter().flat_map(|code| code.to_le_bytes()).collect();
        fs::write(&path, bytes)
            .map_err(|error| Error::from_io(format!("writing {}", path.display()), error))
    }

    /// Bytes in a unit.
    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// Length of the disk.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// The owner of the unit that holds byte `offset`; a hole beyond the end.
    pub fn at(&self, offset: u64) -> Owner {
        let unit = usize::try_from(offset / self.unit_bytes).unwrap_or(usize::MAX);
        self.codes.get(unit).map_or(Owner::Hole, |code| Owner::from_code(*code))
    }

    /// Start of each unit that some layer holds data for.
    pub fn data_units(&self) -> impl Iterator<Item = u64> + '_ {
        self.codes
            .iter()
            .zip(0_u64..)
            .filter(|(code, _)| **code >= 0)
            .map(|(_, unit)| unit * self.unit_bytes)
    }

    /// Gives the units of `start..end` to `owner`, as far as they are on the disk.
    pub(crate) fn set(&mut self, start: u64, end: u64, owner: Owner) {
        let first = usize::try_from(start / self.unit_bytes).unwrap_or(usize::MAX);
        let last = usize::try_from(end.div_ceil(self.unit_bytes)).unwrap_or(usize::MAX);
        let last = last.min(self.codes.len());
        if first < last {
            self.codes[first..last].fill(owner.code());
        }
    }

    /// Makes the disk `disk_bytes` long: what a shorter disk loses is lost, what a longer one gains
    /// has no owner.
    pub(crate) fn resize(&mut self, disk_bytes: u64) {
        let units = usize::try_from(disk_bytes.div_ceil(self.unit_bytes)).unwrap_or(usize::MAX);
        self.codes.resize(units, Owner::Hole.code());
        self.disk_bytes = disk_bytes;
    }

    /// Checks what was read at `offset` of the disk.
    ///
    /// # Errors
    /// The disk offset of the first wrong byte, and its expected owner.
    pub fn verify(&self, buf: &[u8], offset: u64) -> std::result::Result<(), Wrong> {
        let mut start = 0;
        while start < buf.len() {
            let at = offset + start as u64;
            let left = usize::try_from(self.unit_bytes - at % self.unit_bytes).unwrap_or(buf.len());
            let end = buf.len().min(start.saturating_add(left));
            let owner = self.at(at);
            let part = &buf[start..end];
            match owner {
                Owner::Data(layer) => content::verify(part, at, layer),
                Owner::Hole | Owner::Zero(_) => content::verify_zeros(part, at),
            }
            .map_err(|offset| Wrong { offset, owner })?;
            start = end;
        }
        Ok(())
    }
}

/// A byte that is not what its owner wrote.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wrong {
    /// Its disk offset.
    pub offset: u64,
    /// Its expected owner.
    pub owner: Owner,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_owner_round_trips_through_its_code() {
        let three = LayerNumber::from_u16(3);
        for (owner, code) in [(Owner::Hole, -1), (Owner::Zero(three), -5), (Owner::Data(three), 3)]
        {
            assert_eq!(owner.code(), code);
            assert_eq!(Owner::from_code(code), owner);
        }
    }

    #[test]
    fn shorter_disk_forgets_owners_beyond_its_end() {
        let mut map = OwnerMap::new(8192, 4096);
        map.set(0, 8192, Owner::Data(LayerNumber::BASE));
        map.resize(4096);
        map.resize(8192);
        assert_eq!(map.at(0), Owner::Data(LayerNumber::BASE));
        assert_eq!(map.at(4096), Owner::Hole);
    }

    #[test]
    fn a_byte_of_another_layer_is_found() {
        let mut map = OwnerMap::new(8192, 4096);
        map.set(4096, 8192, Owner::Data(LayerNumber::from_u16(5)));
        let mut buf = vec![0; 8192];
        content::fill(&mut buf[4096..], 4096, LayerNumber::from_u16(4));
        let wrong = map.verify(&buf, 0).expect_err("layer 4 is not layer 5");
        assert_eq!(wrong.offset, 4096);
    }
}
