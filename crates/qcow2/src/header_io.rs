//! Reading the header of an image, and opening the data file that it names.

use mica_block::{Error, ErrorKind, Images, OpenImage, Result, Store, read_exact, write_all};
use mica_qcow2_format::{HEADER_READ_BYTES, Header, field, parse_data_file_name};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::path::{Path, PathBuf};

/// Reads and decodes the header of an image that is to be read.
pub async fn read_header(store: &dyn Store) -> Result<Header> {
    read_header_as(store, Header::decode).await
}

/// Reads the header of an image and decodes it with `decode`.
pub async fn read_header_as(
    store: &dyn Store,
    decode: impl FnOnce(&[u8], u64) -> Result<Header>,
) -> Result<Header> {
    let file_len = store.len()?;
    let mut bytes = read_start(store, file_len, HEADER_READ_BYTES).await?;
    // A long header or name shows in what was read; each round reads more, up to a cluster.
    loop {
        let needed = Header::bytes_needed(&bytes)?;
        if needed <= bytes.len() || bytes.len() as u64 >= file_len {
            return decode(&bytes, file_len);
        }
        bytes = read_start(store, file_len, needed).await?;
    }
}

/// Clears these autoclear bits of an image that nobody writes, durably.
pub(crate) async fn clear_autoclear(store: &dyn Store, bits: u64) -> Result<()> {
    let at = HostOffset::new(field::AUTOCLEAR as u64);
    let word = read_exact(store, at, 8).await?;
    let word = word.first_chunk().map_or(0, |word| u64::from_be_bytes(*word));
    write_all(store, Buf::from_slice(&(word & !bits).to_be_bytes()), at).await?;
    store.sync().await
}

/// The first `len` bytes of a file of `file_len`, or all of it.
pub(crate) async fn read_start(store: &dyn Store, file_len: u64, len: usize) -> Result<Buf> {
    let len = usize::try_from(file_len).unwrap_or(usize::MAX).min(len);
    read_exact(store, HostOffset::ZERO, len).await
}

/// Opens the data file that the image at `path` names; returns its path, too.
pub fn open_data_file(
    images: &dyn Images,
    path: &Path,
    header: &Header,
    writable: bool,
) -> Result<(PathBuf, OpenImage)> {
    let Some(name) = &header.data_file_name else {
        let context = "the image keeps its data in an external file and does not name it";
        return Err(Error::new(ErrorKind::Corrupt, context));
    };
    let resolved = images.resolve(path, &parse_data_file_name(name)?)?;
    let opened = if writable { images.open_writable(&resolved) } else { images.open(&resolved) };
    let opened =
        opened.map_err(|error| error.wrap(format!("{}, its data file", resolved.display())))?;
    Ok((resolved, opened))
}
