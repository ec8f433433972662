//! Bugs of the past.

use super::model::{Image, ModelLayer, build, compare, open, path, plain, plain_chain, put};
use mica_block::{Disk, ErrorKind, Images};
use mica_qcow2::snapshots::SnapshotSelector;
use mica_qcow2::{Chain, ChainOptions, IndexUse};
use mica_qcow2_format::{L1Entry, L2Entry, SnapshotEntry, Version};
use mica_sim::{TinyImage, TinySpec, World, scenario};
use mica_units::HostOffset;
use std::sync::Arc;

/// The active layer holds as much beyond the end of a shorter layer as that one is long. A walk
/// that only adds up what was found takes this for everything, and shows zeros for the base.
#[test]
fn clusters_beyond_a_shorter_layer_do_not_hide_the_base() {
    scenario(1, |world| async move {
        let layers = plain_chain(&[plain(12, 8, 0..8), plain(12, 8, 0..0), plain(12, 16, 8..16)]);
        put(&world, &layers);
        let unindexed = open(&world, &layers, IndexUse::Read).await;
        build(&unindexed, 1).await.unwrap();
        let chain = open(&world, &layers, IndexUse::Read).await;
        assert_eq!(chain.indexed_layers(), 1);
        compare(&chain, &layers).await;
    });
}

/// Bytes of a sidecar's header.
const SIDECAR_HEADER_BYTES: usize = 256;

/// Inverts a bit of every node of a layer's sidecar; its seal stays good.
fn damage(world: &World, layers: &[ModelLayer], number: usize) {
    let there = world.change_sidecar(path(number, &layers[number]), |bytes| {
        for byte in &mut bytes[SIDECAR_HEADER_BYTES..] {
            *byte ^= 1;
        }
    });
    assert!(there);
}

async fn indexed(world: &World, layers: &[ModelLayer]) -> Arc<Chain> {
    let chain = open(world, layers, IndexUse::Read).await;
    build(&chain, usize::MAX).await.unwrap();
    assert_eq!(chain.indexed_layers(), layers.len() - 1);
    chain
}

/// The sidecar of a layer is trusted if that layer's owner wrote it. With it that owner could make
/// the chain read a layer above instead of the base, at any offset: what the guest wrote there.
#[test]
fn sidecar_that_names_a_layer_above_its_own_is_not_trusted() {
    scenario(1, |world| async move {
        // Of different slices, so that the base's leaf is not made again above.
        let layers = plain_chain(&[
            plain(12, 2048, 1024..1032),
            plain(12, 2048, 0..8),
            plain(12, 2048, 9..9),
        ]);
        put(&world, &layers);
        indexed(&world, &layers).await;
        world.change_sidecar(path(0, &layers[0]), |sidecar| {
            let payload = SIDECAR_HEADER_BYTES + 8;
            let len = u32::from_le_bytes(sidecar[payload - 8..payload - 4].try_into().unwrap());
            let entries = payload + len as usize / 10 * 2;
            let mut changed = 0;
            for entry in sidecar[entries..payload + len as usize].as_chunks_mut::<8>().0 {
                let bits = u64::from_le_bytes(*entry);
                if bits >> 45 & 7 == 3 {
                    *entry = (bits | 1 << 48).to_le_bytes();
                    changed += 1;
                }
            }
            assert!(changed > 0, "the base has data");
            mica_sim::hostile::fix_checksums(sidecar, 0);
        });
        let chain = open(&world, &layers, IndexUse::Read).await;
        assert_eq!(chain.indexed_layers(), 2, "its seal fits");
        compare(&chain, &layers).await;
    });
}

/// The builder published the tree with the sidecar in which it had just found a damaged node, gave
/// up, and found the same node again the next time: the thread that maintains the index never
/// rested.
#[test]
fn damaged_sidecar_that_a_build_needs_is_rewritten_by_that_build() {
    scenario(1, |world| async move {
        let layers = plain_chain(&[
            plain(12, 16, 0..8),
            plain(12, 16, 4..5),
            plain(12, 16, 6..7),
            plain(12, 16, 9..10),
        ]);
        put(&world, &layers);
        indexed(&world, &layers).await;
        damage(&world, &layers, 1);
        world.sidecars().remove(&path(2, &layers[2])).unwrap();
        compare(&*indexed(&world, &layers).await, &layers).await;
        let reopened = open(&world, &layers, IndexUse::Read).await;
        compare(&reopened, &layers).await;
        assert_eq!(reopened.indexed_layers(), 3);
    });
}

/// A copied layer is verified by its content. Its sidecar's content was sealed again unchecked.
#[test]
fn damaged_sidecar_of_a_copied_layer_is_not_sealed_again() {
    scenario(1, |world| async move {
        let layers = plain_chain(&[plain(12, 16, 0..8), plain(12, 16, 4..5)]);
        put(&world, &layers);
        indexed(&world, &layers).await;
        damage(&world, &layers, 0);
        let damaged = world.sidecar(path(0, &layers[0])).unwrap();
        put(&world, &layers);
        indexed(&world, &layers).await;
        let sealed = world.sidecar(path(0, &layers[0])).unwrap();
        assert!(sealed[SIDECAR_HEADER_BYTES..] != damaged[SIDECAR_HEADER_BYTES..]);
        let reopened = open(&world, &layers, IndexUse::Read).await;
        assert_eq!(reopened.indexed_layers(), 1);
        compare(&reopened, &layers).await;
        assert_eq!(reopened.indexed_layers(), 1);
    });
}

/// For a layer that ends before the one beneath, the builder rewrote the slice of its end first. If
/// it then wrote more than it keeps, it looked for that slice in a sidecar that did not exist yet.
#[test]
fn short_layer_with_a_large_map_gets_its_index() {
    // Every other cluster of 512 bytes reads as zeros: as many runs as a slice can have.
    fn striped(len: u64, first: u64, below: Option<&str>) -> ModelLayer {
        let spec = TinySpec {
            cluster_bits: 9,
            version: Version::V3,
            extended: false,
            disk_bytes: len,
            backing: below.map(|name| (name.to_owned(), "qcow2")),
        };
        let mut image = TinyImage::new(&spec);
        for cluster in (first..len >> 9).step_by(2) {
            image.set(cluster, L2Entry::Zero);
        }
        ModelLayer { len, image: Image::Qcow2(image) }
    }
    scenario(1, |world| async move {
        let len = 480 << 20;
        let layers = [
            striped(len, 0, None),
            striped(len - 1024, 1, Some("0.qcow2")),
            striped(1 << 20, 1, Some("1.qcow2")),
        ];
        put(&world, &layers);
        let chain = open(&world, &layers, IndexUse::Read).await;
        assert_eq!(build(&chain, usize::MAX).await.unwrap(), 2);
        assert_eq!(chain.indexed_layers(), 2);
        compare(&chain, &layers).await;
    });
}

/// An image of a terabyte in three clusters: every entry of its L1 table is `l1_entry`.
fn repeated(l1_entry: impl Fn(HostOffset) -> L1Entry) -> TinyImage {
    let spec = TinySpec {
        cluster_bits: 16,
        version: Version::V3,
        extended: false,
        disk_bytes: 1 << 40,
        backing: None,
    };
    let mut image = TinyImage::new(&spec);
    let at = image.set(0, L2Entry::Zero) as u64;
    for index in 0..image.l1_entries() {
        let entry = l1_entry(HostOffset::new(at));
        image.put(image.l1_at(index), &entry.0.to_be_bytes());
    }
    image
}

/// A small file whose L1 table names one L2 table thousands of times, or unreadable tables,
/// required a sidecar of any size, which is made in memory.
#[test]
fn table_that_is_named_a_thousand_times_is_read_and_never_indexed() {
    scenario(1, |world| async move {
        for entry in [|at| L1Entry::encode(at, true), |_| L1Entry(0x200)] {
            let image = repeated(entry);
            let base = ModelLayer { len: 1 << 40, image: Image::Qcow2(image) };
            let mut layers = vec![base];
            layers.extend(plain_chain(&[plain(16, 1, 0..0), plain(16, 64, 3..4)]).drain(1..));
            put(&world, &layers);
            let chain = open(&world, &layers, IndexUse::Read).await;
            let error = build(&chain, usize::MAX).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            assert!(world.sidecar(path(0, &layers[0])).is_none());
            compare(&chain, &layers).await;
        }
    });
}

/// The length of a snapshot's disk is in the table of snapshots and was trusted: beyond 2^63 the
/// arithmetic of slices overflows, and beyond its L1 table there is nothing to read.
#[test]
fn snapshot_of_an_impossible_length_is_refused() {
    scenario(1, |world| async move {
        for (disk_bytes, is_good) in [(1 << 20, true), (1 << 45, false), (u64::MAX - 511, false)] {
            let spec = TinySpec {
                cluster_bits: 16,
                version: Version::V3,
                extended: false,
                disk_bytes: 1 << 20,
                backing: None,
            };
            let mut image = TinyImage::new(&spec);
            let l1_offset = HostOffset::new(image.l1_at(0) as u64);
            let entry = SnapshotEntry {
                id: "1".to_owned(),
                name: "before".to_owned(),
                l1_offset,
                l1_entries: 1,
                date_seconds: 0,
                date_nanoseconds: 0,
                vm_clock_nanoseconds: 0,
                vm_state_bytes: 0,
                disk_bytes: Some(disk_bytes),
                icount: None,
                extra_bytes: 16,
                unknown_extra: Vec::new(),
            };
            let mut table = Vec::new();
            entry.encode(&mut table);
            let at = image.allocate();
            image.put(at.bytes() as usize, &table);
            image.put(60, &1_u32.to_be_bytes());
            image.put(64, &at.bytes().to_be_bytes());
            world.put("/snapshot.qcow2", image.bytes().to_vec());
            let images: Arc<dyn Images> = Arc::new(world.clone());
            let options = ChainOptions {
                snapshot: Some(SnapshotSelector::Id("1".to_owned())),
                ..ChainOptions::default()
            };
            let opened = Chain::open(images, "/snapshot.qcow2".as_ref(), &options).await;
            assert_eq!(opened.is_ok(), is_good, "{disk_bytes:#x}");
            assert!(opened.is_err() || opened.is_ok_and(|chain| chain.geometry().len == 1 << 20));
        }
    });
}
