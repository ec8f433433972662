//! Compresses clusters in the forms that QEMU can read: deflate with a window of 4 KiB and no
//! header, zstd as one frame.

use mica_block::{Error, ErrorKind, Result};
use mica_qcow2_format::Compression;

/// QEMU inflates with this window, as a power of two; it cannot read a larger one.
const DEFLATE_WINDOW_BITS: u8 = 12;

/// How much time to spend on making clusters small.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum CompressionLevel {
    /// As little as possible.
    Fast,
    /// As much as QEMU spends.
    #[default]
    Usual,
}

/// A compressor that is used for cluster after cluster.
pub struct Compressor {
    stream: Stream,
}

enum Stream {
    Deflate(flate2::Compress),
    Zstd(zstd::bulk::Compressor<'static>),
}

impl Compressor {
    /// A compressor of this kind.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn new(kind: Compression, level: CompressionLevel) -> Result<Self> {
        let stream = match kind {
            Compression::Deflate => {
                let level = match level {
                    CompressionLevel::Fast => flate2::Compression::fast(),
                    CompressionLevel::Usual => flate2::Compression::default(),
                };
                let bits = DEFLATE_WINDOW_BITS;
                Stream::Deflate(flate2::Compress::new_with_window_bits(level, false, bits))
            }
            Compression::Zstd => {
                let level = match level {
                    CompressionLevel::Fast => 1,
                    CompressionLevel::Usual => zstd::DEFAULT_COMPRESSION_LEVEL,
                };
                Stream::Zstd(
                    zstd::bulk::Compressor::new(level)
                        .map_err(|error| Error::from_io("making a zstd compressor", error))?,
                )
            }
        };
        Ok(Self { stream })
    }

    /// `cluster` compressed, or `None` if that does not make it smaller.
    ///
    /// # Errors
    /// If the compressor fails.
    pub fn compress(&mut self, cluster: &[u8]) -> Result<Option<Vec<u8>>> {
        let packed = match &mut self.stream {
            Stream::Deflate(stream) => {
                stream.reset();
                let mut packed = Vec::with_capacity(deflated_len_max(cluster.len()));
                let status = stream
                    .compress_vec(cluster, &mut packed, flate2::FlushCompress::Finish)
                    .map_err(|error| Error::new(ErrorKind::Io, format!("deflate: {error}")))?;
                if status != flate2::Status::StreamEnd {
                    return Ok(None);
                }
                packed
            }
            Stream::Zstd(stream) => {
                stream.compress(cluster).map_err(|error| Error::from_io("zstd", error))?
            }
        };
        Ok((packed.len() < cluster.len()).then_some(packed))
    }
}

/// Room for anything that deflate makes of `len` bytes: zlib-rs 0.6 keeps what did not fit for the
/// next cluster, and panics there.
fn deflated_len_max(len: usize) -> usize {
    len + len / 8 + 1024
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_qcow2_format::decompress;

    #[test]
    fn every_cluster_comes_back_whatever_was_compressed_before_it() {
        let noise = |len: usize| {
            let mut state = 1_u64;
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                state.to_le_bytes()[7]
            };
            (0..len).map(|_| next()).collect::<Vec<u8>>()
        };
        for kind in [Compression::Deflate, Compression::Zstd] {
            for level in [CompressionLevel::Fast, CompressionLevel::Usual] {
                let mut compressor = Compressor::new(kind, level).expect("there is memory");
                for len in [512, 4096, 65536, 2 << 20] {
                    for _ in 0..3 {
                        let packed = compressor.compress(&noise(len)).expect("it compresses");
                        assert_eq!(packed, None, "noise does not become smaller");
                    }
                    let text: Vec<u8> = (0..len).map(|at| at.to_le_bytes()[0] / 7).collect();
                    let packed = compressor.compress(&text).expect("it compresses");
                    let packed = packed.expect("text becomes smaller");
                    let mut unpacked = vec![0; len];
                    decompress(kind, &packed, &mut unpacked).expect("it is whole");
                    assert_eq!(unpacked, text);
                }
            }
        }
    }
}
