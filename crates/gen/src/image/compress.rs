//! Compresses clusters as QEMU can read them: deflate with its window of 4 KiB and no header, zstd
//! as one frame.

use mica_block::{Error, ErrorKind, Result};
use mica_qcow2::format::Compression;

/// QEMU inflates with this window, as a power of two; a larger one it cannot read.
const DEFLATE_WINDOW_BITS: u8 = 12;
const ZSTD_LEVEL: i32 = 1;

/// A compressor that is used for cluster after cluster.
pub(super) enum Compressor {
    Deflate(flate2::Compress),
    Zstd(zstd::bulk::Compressor<'static>),
}

impl Compressor {
    pub(super) fn new(kind: Compression) -> Result<Self> {
        Ok(match kind {
            Compression::Deflate => Self::Deflate(flate2::Compress::new_with_window_bits(
                flate2::Compression::fast(),
                false,
                DEFLATE_WINDOW_BITS,
            )),
            Compression::Zstd => Self::Zstd(
                zstd::bulk::Compressor::new(ZSTD_LEVEL)
                    .map_err(|error| Error::from_io("making a zstd compressor", error))?,
            ),
        })
    }

    /// `cluster` compressed, or `None` where that does not make it smaller.
    pub(super) fn compress(&mut self, cluster: &[u8]) -> Result<Option<Vec<u8>>> {
        let packed = match self {
            Self::Deflate(stream) => {
                stream.reset();
                let mut packed = Vec::with_capacity(cluster.len());
                let status = stream
                    .compress_vec(cluster, &mut packed, flate2::FlushCompress::Finish)
                    .map_err(|error| Error::new(ErrorKind::Io, format!("deflate: {error}")))?;
                if status != flate2::Status::StreamEnd {
                    return Ok(None);
                }
                packed
            }
            Self::Zstd(stream) => {
                stream.compress(cluster).map_err(|error| Error::from_io("zstd", error))?
            }
        };
        Ok((packed.len() < cluster.len()).then_some(packed))
    }
}
