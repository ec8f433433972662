//! Compressed clusters: where they are and what is in them.

use super::corrupt;
use flate2::{Decompress, FlushDecompress, Status};
use mica_block::{Error, ErrorKind, Result};
use mica_units::{ClusterBits, HostOffset};
use std::cell::RefCell;
use zstd::zstd_safe::{self, DCtx};

/// Unit in which the length of compressed data is stored.
const SECTOR_BYTES: u64 = 512;
/// How the clusters of an image are compressed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum Compression {
    /// Raw deflate, without a zlib header.
    #[default]
    Deflate,
    /// Zstandard frames.
    Zstd,
}

/// Where a compressed cluster is stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CompressedCluster {
    /// First byte; not aligned to anything.
    pub host: HostOffset,
    /// The compressed data is at most this long: its end is known to a sector only, may be in the
    /// next cluster or beyond the end of the file, where zeros are read.
    pub len_max: u64,
}

impl CompressedCluster {
    /// What an L2 entry with bit 62 says.
    #[inline]
    pub fn from_entry(entry: u64, cluster_bits: ClusterBits) -> Self {
        let size_bits = cluster_bits.bits() - 8;
        let offset_bits = 62 - size_bits;
        let host = entry & ((1 << offset_bits) - 1);
        let sectors = ((entry >> offset_bits) & ((1 << size_bits) - 1)) + 1;
        Self { host: HostOffset::new(host), len_max: sectors * SECTOR_BYTES - host % SECTOR_BYTES }
    }

    /// The bits of the L2 entry below bit 62. An address or a length that does not fit loses its
    /// upper bits; code that places clusters keeps to [`Self::host_max`] and to less than a
    /// cluster.
    pub(super) fn to_entry(self, cluster_bits: ClusterBits) -> u64 {
        let size_bits = cluster_bits.bits() - 8;
        let offset_bits = 62 - size_bits;
        let host = self.host.bytes() & ((1 << offset_bits) - 1);
        let end = self.len_max.saturating_add(host % SECTOR_BYTES);
        let additional = end.div_ceil(SECTOR_BYTES).saturating_sub(1) & ((1 << size_bits) - 1);
        host | additional << offset_bits
    }

    /// The highest address that an entry can name.
    pub fn host_max(cluster_bits: ClusterBits) -> HostOffset {
        HostOffset::new((1 << (62 - (cluster_bits.bits() - 8))) - 1)
    }
}

/// A decompressor that is reused, so that a read allocates nothing.
pub struct Decompressor {
    deflate: Option<Decompress>,
    zstd: Option<DCtx<'static>>,
}

impl Decompressor {
    /// One that has not allocated anything yet.
    pub const fn new() -> Self {
        Self { deflate: None, zstd: None }
    }

    /// Fills `output`, which is one cluster, from the compressed `input`. Bytes of `input` after
    /// the compressed data are ignored, as their number is known to a sector only.
    ///
    /// # Errors
    /// `Corrupt` if the data is broken or too short for a cluster, or, with zstd, too long.
    pub fn decompress(&mut self, kind: Compression, input: &[u8], output: &mut [u8]) -> Result<()> {
        match kind {
            Compression::Deflate => self.inflate(input, output),
            Compression::Zstd => self.zstd(input, output),
        }
    }

    fn inflate(&mut self, input: &[u8], output: &mut [u8]) -> Result<()> {
        let stream = match &mut self.deflate {
            Some(stream) => {
                stream.reset(false);
                stream
            }
            none => none.insert(Decompress::new(false)),
        };
        let status = stream.decompress(input, output, FlushDecompress::Finish);
        let filled = stream.total_out() == output.len() as u64;
        match status {
            // As in QEMU, more data after the cluster is full is fine.
            Ok(Status::Ok | Status::BufError | Status::StreamEnd) if filled => Ok(()),
            Ok(_) => Err(short(stream.total_out(), output.len())),
            Err(error) => Err(broken("deflate", &error.to_string())),
        }
    }

    /// Frame by frame, each in one call: a stream would keep the window that the frame asks for, up
    /// to 128 MiB if an attacker chose it.
    fn zstd(&mut self, input: &[u8], output: &mut [u8]) -> Result<()> {
        let context = match &mut self.zstd {
            Some(context) => context,
            none => none.insert(DCtx::try_create().ok_or_else(|| {
                Error::new(ErrorKind::Limit, "no memory for a zstd decompressor")
            })?),
        };
        let wanted = output.len();
        let (mut input, mut output) = (input, output);
        while !output.is_empty() {
            if input.is_empty() {
                return Err(short((wanted - output.len()) as u64, wanted));
            }
            let frame_len = zstd_safe::find_frame_compressed_size(input).map_err(zstd_error)?;
            let (frame, rest) = input.split_at_checked(frame_len).unwrap_or((input, &[]));
            let count = context.decompress(output, frame).map_err(zstd_error)?;
            if frame_len == 0 && count == 0 {
                return Err(broken("zstd", "empty frame"));
            }
            input = rest;
            output = output.get_mut(count..).unwrap_or_default();
        }
        Ok(())
    }
}

impl Default for Decompressor {
    fn default() -> Self {
        Self::new()
    }
}

/// [`Decompressor::decompress`] with the decompressor of this thread.
///
/// # Errors
/// As there.
pub fn decompress(kind: Compression, input: &[u8], output: &mut [u8]) -> Result<()> {
    thread_local! {
        static DECOMPRESSOR: RefCell<Decompressor> = const { RefCell::new(Decompressor::new()) };
    }
    DECOMPRESSOR.with_borrow_mut(|decompressor| decompressor.decompress(kind, input, output))
}

fn short(got: u64, wanted: usize) -> Error {
    corrupt(format!("compressed data ends after {got} of a cluster's {wanted} bytes"))
}

fn broken(kind: &str, why: &str) -> Error {
    corrupt(format!("compressed data is broken ({kind}: {why})"))
}

fn zstd_error(code: usize) -> Error {
    broken("zstd", zstd_safe::get_error_name(code))
}

#[cfg(test)]
mod tests;
