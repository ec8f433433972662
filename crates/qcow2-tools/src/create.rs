//! Creates a new image, as `qemu-img create` does: the layout is that of an empty [`ImageWriter`],
//! so that files are laid out in one place only.
//!
//! The header is written last, when everything that it names is durable: the remains of an image
//! that a power cut interrupted are not an image.

mod options;

pub use options::{DataFile, ImagePlan, ImageWish, Preallocation, TablePlaces};

use crate::layout::{ImageWriter, Place, Write};
use mica_block::{Error, ErrorKind, Result, Space, Store, write_all};
use mica_rt::Buf;
use mica_units::HostOffset;

/// Bytes of zeros that are written at a time.
const ZEROS_BYTES: u64 = 1 << 20;

/// Where an image is created. Both stores are empty.
#[derive(Clone, Copy)]
pub struct Stores<'a> {
    /// The image itself.
    pub image: &'a dyn Store,
    /// The file for its data, if the plan has one.
    pub data: Option<&'a dyn Store>,
}

/// Creates the planned image, without data.
///
/// # Errors
/// Any error of the stores; `Limit` if the tables of the image would be too long.
pub async fn create(plan: ImagePlan, stores: Stores<'_>) -> Result<()> {
    finish(begin(plan, stores).await?, stores).await
}

/// As [`create`], with one sync, for a file that gets its name afterwards: whatever a power cut
/// leaves of it, nobody takes that for an image.
///
/// # Errors
/// As [`create`].
pub async fn create_unnamed(plan: ImagePlan, stores: Stores<'_>) -> Result<()> {
    let writer = begin(plan, stores).await?;
    let header = write_ending(writer, stores).await?;
    write_all(stores.image, Buf::from_slice(&header), HostOffset::ZERO).await?;
    named(stores.image, stores.image.sync().await)
}

/// Gives the planned image its space.
async fn begin(plan: ImagePlan, stores: Stores<'_>) -> Result<ImageWriter> {
    let preallocation = plan.preallocation;
    let mut writer = ImageWriter::new(plan)?;
    while let Some(reserved) = writer.reserve_table()? {
        if let Some((place, at, len)) = reserved.data {
            give_space(stores.at(place), preallocation, at, len).await?;
        }
        write_each(stores, reserved.writes).await?;
    }
    Ok(writer)
}

/// Writes the end of an image: the tables, and when they are durable the header.
///
/// # Errors
/// As [`create`].
pub async fn finish(writer: ImageWriter, stores: Stores<'_>) -> Result<()> {
    let header = write_ending(writer, stores).await?;
    named(stores.image, stores.image.sync().await)?;
    write_all(stores.image, Buf::from_slice(&header), HostOffset::ZERO).await?;
    named(stores.image, stores.image.sync().await)
}

/// Writes everything but the header, which is returned.
async fn write_ending(mut writer: ImageWriter, stores: Stores<'_>) -> Result<Vec<u8>> {
    write_each(stores, writer.take_last_table()?).await?;
    let data_len = writer.data_file_len();
    let mut ending = writer.end()?;
    while let Some(write) = ending.next_write()? {
        write_each(stores, vec![write]).await?;
    }
    named(stores.image, end_at(stores.image, ending.len()).await)?;
    if let (Some(data), Some(len)) = (stores.data, data_len) {
        named(data, data.set_len(len).await)?;
        named(data, data.sync().await)?;
    }
    ending.header()
}

/// Gives the image's file its length. A device has its own, which must do.
async fn end_at(image: &dyn Store, len: u64) -> Result<()> {
    if !image.identity().is_device() {
        return image.set_len(len).await;
    }
    let there = image.len()?;
    match there < len {
        true => {
            let what = format!("too small: it holds {there} bytes, and the image needs {len}");
            Err(Error::new(ErrorKind::Io, what))
        }
        false => Ok(()),
    }
}

impl<'a> Stores<'a> {
    /// The store of this place.
    ///
    /// # Panics
    /// If the plan has a data file and there is no store for it.
    pub fn at(&self, place: Place) -> &'a dyn Store {
        match place {
            Place::Image => self.image,
            Place::DataFile => self.data.expect("a plan with a data file comes with its store"),
        }
    }
}

async fn write_each(stores: Stores<'_>, writes: Vec<Write>) -> Result<()> {
    for Write { place, at, bytes } in writes {
        write_all(stores.at(place), bytes, at).await?;
    }
    Ok(())
}

/// Reserves the requested space for `len` bytes at `at`.
async fn give_space(
    store: &dyn Store,
    preallocation: Preallocation,
    at: HostOffset,
    len: u64,
) -> Result<()> {
    match preallocation {
        Preallocation::Off | Preallocation::Metadata => Ok(()),
        Preallocation::Falloc => named(store, store.space(Space::Allocate, at, len).await),
        Preallocation::Full => write_zeros(store, at, len).await,
    }
}

/// Writes `len` bytes of zeros at `at`, so that the space exists whatever the file system supports.
///
/// # Errors
/// Any error of the store.
pub async fn write_zeros(store: &dyn Store, at: HostOffset, len: u64) -> Result<()> {
    let (mut at, mut left) = (at.bytes(), len);
    while left > 0 {
        let count = left.min(ZEROS_BYTES);
        let zeros = Buf::zeroed(usize::try_from(count).expect("at most a mebibyte"));
        write_all(store, zeros, HostOffset::new(at)).await?;
        (at, left) = (at + count, left - count);
    }
    Ok(())
}

/// The result of a call, with the store's name.
fn named<T>(store: &dyn Store, result: Result<T>) -> Result<T> {
    result.map_err(|error: Error| error.wrap(store.name()))
}

#[cfg(test)]
mod tests;
