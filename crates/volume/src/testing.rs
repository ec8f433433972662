//! What several tests of this crate need.

use crate::crypt::VolumeKey;
use crate::environment::Environment;
use crate::format::Id;
use crate::format::origin::Origin;
use crate::names::VolumeName;
use crate::properties::{Compression, Encryption, NewVolume};
use crate::volume::Volume;
use crate::volumes::Volumes;
use mica_block::{Disk, Extent, Objects, read_whole};
use mica_rt::{Backend, Buf, Executor};
use mica_store::object::MemoryObjects;
use mica_units::{GuestOffset, GuestRange};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A host whose times and identities only differ.
pub(crate) fn environment(host: &str) -> Environment {
    environment_at(host, next)
}

/// A host with a clock.
pub(crate) fn environment_at(
    host: &str,
    now_ns: impl Fn() -> u64 + Send + Sync + 'static,
) -> Environment {
    Environment::new(host, now_ns, || {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&next().to_le_bytes());
        id
    })
}

fn next() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

pub(crate) fn memory() -> MemoryObjects {
    MemoryObjects::new("memory")
}

pub(crate) async fn volumes(objects: &Arc<dyn Objects>, host: &str) -> Volumes {
    let opened = Volumes::open_or_make(Arc::clone(objects), environment(host), 1 << 20).await;
    opened.expect("a store").with_key(Some(key()))
}

/// The key of all volumes that are encrypted.
pub(crate) fn key() -> Arc<VolumeKey> {
    Arc::new(VolumeKey::of_file("test.key", &[7; 32]).expect("a key"))
}

/// What the volumes of a test with this seed are: compressed or not, encrypted or not.
pub(crate) fn kind(seed: u64) -> NewVolume {
    let compression = if seed & 1 == 0 { Compression::None } else { Compression::Zstd };
    let encryption = if seed & 2 == 0 { Encryption::None } else { Encryption::WithKey };
    NewVolume { compression, encryption }
}

pub(crate) fn name(text: &str) -> VolumeName {
    VolumeName::new(text).expect("a name")
}

/// What a clone that a test puts itself was made of, and its image.
pub(crate) fn origin() -> (Origin, Id) {
    (Origin { volume: [1; 16], name: name("gold"), snapshot: None }, [1; 16])
}

pub(crate) fn run<T>(seed: u64, test: impl Future<Output = T>) -> T {
    Executor::new(Backend::Sim { seed }).expect("a simulator").block_on(test)
}

pub(crate) fn range(start: u64, len: u64) -> GuestRange {
    GuestRange::new(GuestOffset::new(start), len).expect("on the disk")
}

pub(crate) fn bytes(count: u64) -> usize {
    usize::try_from(count).expect("small")
}

pub(crate) async fn write(volume: &Volume, at: u64, bytes: &[u8]) {
    let written = volume.write(GuestOffset::new(at), Buf::from_slice(bytes)).await;
    written.0.expect("written");
}

pub(crate) async fn read(volume: &Volume, at: u64, len: u64) -> Vec<u8> {
    let plan = volume.plan(range(at, len), Vec::new()).finish().await.expect("planned");
    assert!(Extent::covers(&plan, range(at, len)));
    read_whole(volume, &plan).await.expect("read").to_vec()
}
