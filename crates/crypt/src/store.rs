//! A store that shows the plain bytes of another, which has them encrypted by sectors.
//!
//! Reads decrypt what they read; writes encrypt a copy. What does not begin and end with a sector
//! is widened: reads take whole sectors, and writes fill them with what is there.
//!
//! Invariants
//! - I1 A buffer that is written is never changed, and memory that another program sees never has
//!   encrypted bytes.
//! - I2 What is beyond the end reads as zeros, as the contract of stores says; everything else
//!   reads as what decryption makes of it, also where nothing was ever written: so unwritten bytes,
//!   and holes, do not read as zeros.
//! - I3 Of a write of parts of sectors, nothing else in them is lost: writes that touch the same
//!   sectors wait for each other.

use crate::sector::{SECTOR, SectorCipher};
use mica_block::{
    ChangeFuture, Error, ErrorKind, IoFuture, LocalFuture, Result, Run, RunKind, Space, Store,
    StoreIdentity, Witness, read_exact,
};
use mica_rt::Buf;
use mica_rt::sync::{Claims, Mode};
use mica_units::{HostOffset, SECTOR_BYTES};
use std::sync::Arc;

/// See the module.
pub struct CryptStore {
    shared: Arc<Shared>,
    identity: StoreIdentity,
}

struct Shared {
    inner: Arc<dyn Store>,
    cipher: Arc<SectorCipher>,
    /// Where the encrypted bytes begin; a multiple of a sector. Sectors are counted from here.
    start: u64,
    /// Sectors that are being written.
    writes: Claims,
}

impl CryptStore {
    /// The plain bytes of `inner`, whose sectors are counted from its beginning.
    pub fn new(inner: Arc<dyn Store>, cipher: Arc<SectorCipher>) -> Self {
        Self::from(inner, cipher, HostOffset::ZERO)
    }

    /// The plain bytes of what begins at `start` in `inner`: there is sector 0.
    ///
    /// # Panics
    /// If that is not the beginning of a sector.
    pub fn from(inner: Arc<dyn Store>, cipher: Arc<SectorCipher>, start: HostOffset) -> Self {
        assert!(start.is_aligned(SECTOR_BYTES), "sectors begin with one");
        let (start, writes) = (start.bytes(), Claims::default());
        let shared = Arc::new(Shared { inner, cipher, start, writes });
        Self { shared, identity: StoreIdentity::own() }
    }

    /// The place in the store beneath.
    fn beneath(&self, offset: HostOffset) -> HostOffset {
        self.shared.beneath(offset)
    }
}

/// A range of bytes, widened to whole sectors.
#[derive(Clone, Copy)]
struct Around {
    /// The first of them.
    first: u64,
    /// Where they begin.
    at: HostOffset,
    /// How long they are.
    len: usize,
    /// Where the bytes begin in them.
    skip: usize,
}

impl Around {
    fn of(offset: HostOffset, len: usize) -> Self {
        let skip = usize::try_from(offset.bytes() % SECTOR_BYTES).expect("less than a sector");
        let first = offset.bytes() / SECTOR_BYTES;
        let at = HostOffset::new(first * SECTOR_BYTES);
        Self { first, at, len: (skip + len).next_multiple_of(SECTOR), skip }
    }

    fn last(self) -> u64 {
        self.first + (self.len / SECTOR) as u64 - 1
    }
}

impl Shared {
    fn beneath(&self, offset: HostOffset) -> HostOffset {
        // What is beyond 64 bits is beyond the end of everything.
        HostOffset::new(offset.bytes().saturating_add(self.start))
    }

    fn len(&self) -> Result<u64> {
        Ok(self.inner.len()?.saturating_sub(self.start))
    }

    /// Decrypts `sectors`, which are those `around` something, and were read.
    fn decrypt(&self, around: Around, sectors: &mut [u8]) -> Result<()> {
        // Encrypted bytes are never zeros by chance. What is beyond the end is.
        let is_cut = sectors.last_chunk::<SECTOR>().is_none_or(|last| *last == [0; SECTOR]);
        let held = match is_cut {
            false => sectors.len(),
            true => {
                let there = self.len()?.next_multiple_of(SECTOR_BYTES);
                let held = there.saturating_sub(around.at.bytes());
                usize::try_from(held).unwrap_or(usize::MAX).min(sectors.len())
            }
        };
        self.cipher.decrypt(around.first, &mut sectors[..held]);
        Ok(())
    }

    /// Reads the sectors `around` something.
    async fn read(&self, around: Around) -> Result<Buf> {
        let mut sectors = read_exact(&*self.inner, self.beneath(around.at), around.len).await?;
        self.decrypt(around, sectors.own_bytes())?;
        Ok(sectors)
    }

    /// Writes `bytes` at `offset`.
    async fn write(&self, bytes: &Buf, offset: HostOffset) -> Result<()> {
        let around = Around::of(offset, bytes.len());
        let is_whole = around.len == bytes.len();
        let mode = if is_whole { Mode::Shared } else { Mode::Exclusive };
        let _claim = self.writes.claim_range(around.first..=around.last(), mode).await;
        let mut sectors = match is_whole {
            true => Buf::from_slice(bytes),
            false => {
                let mut sectors = self.read(around).await?;
                sectors.put(around.skip, bytes);
                sectors
            }
        };
        self.cipher.encrypt(around.first, sectors.own_bytes());
        self.inner.write_at(sectors, self.beneath(around.at)).await.0
    }
}

impl Store for CryptStore {
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        if buf.is_empty() {
            return mica_block::ready(Ok(()), buf);
        }
        let shared = Arc::clone(&self.shared);
        let around = Around::of(offset, buf.len());
        if around.len == buf.len() && !buf.is_foreign() {
            let reading = self.shared.inner.read_at(buf, self.beneath(offset));
            return IoFuture::boxed(async move {
                let (result, mut buf) = reading.await;
                let result = result.and_then(|()| shared.decrypt(around, buf.own_bytes()));
                (result, buf)
            });
        }
        IoFuture::boxed(async move {
            let mut buf = buf;
            let result = shared.read(around).await;
            let result = result.map(|sectors| {
                buf.put(0, &sectors[around.skip..around.skip + buf.len()]);
            });
            (result, buf)
        })
    }

    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        if buf.is_empty() {
            return mica_block::ready(Ok(()), buf);
        }
        let shared = Arc::clone(&self.shared);
        // In a task of its own: half of a sector's bytes read, and none written, are lost when a
        // caller goes away; and a claim must end after the write, not before.
        IoFuture::boxed(mica_rt::spawn(async move {
            let result = shared.write(&buf, offset).await;
            (result, buf)
        }))
    }

    fn sync(&self) -> ChangeFuture {
        self.shared.inner.sync()
    }

    fn sync_written(&self, _bytes: Buf, _offset: HostOffset) -> ChangeFuture {
        // The bytes that are there are others.
        self.shared.inner.sync()
    }

    fn space(&self, change: Space, offset: HostOffset, len: u64) -> ChangeFuture {
        match change {
            Space::Allocate => self.shared.inner.space(change, self.beneath(offset), len),
            // Zeros of the store beneath are not zeros here.
            Space::Punch | Space::Zero => {
                let what = "zeros of an encrypted image have to be written";
                let error = Error::new(ErrorKind::Unsupported, what);
                Box::pin(async move { Err(error) })
            }
        }
    }

    fn set_len(&self, len: u64) -> ChangeFuture {
        self.shared.inner.set_len(self.beneath(HostOffset::new(len)).bytes())
    }

    fn len(&self) -> Result<u64> {
        self.shared.len()
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.shared.inner.allocated_bytes()
    }

    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        let left = self.shared.len()?.saturating_sub(offset.bytes());
        Ok(match left {
            0 => Run { kind: RunKind::Hole, len },
            left => Run { kind: RunKind::Data, len: len.min(left) },
        })
    }

    fn name(&self) -> String {
        self.shared.inner.name()
    }

    fn identity(&self) -> StoreIdentity {
        self.identity
    }

    fn reads_unwritten_as_zeros(&self) -> bool {
        false
    }

    fn witness(&self) -> Witness {
        self.shared.inner.witness()
    }

    fn is_cached(&self, offset: HostOffset) -> bool {
        self.shared.inner.is_cached(self.beneath(offset))
    }

    fn read_ahead(&self, offset: HostOffset, len: u64) -> LocalFuture<'static, ()> {
        self.shared.inner.read_ahead(self.beneath(offset), len)
    }
}

#[cfg(test)]
mod tests;
