//! Images made in memory: what they hold, and what a store that fills up holds.

use super::*;
use crate::check::{Finding, Observer, check};
use crate::measure::{Measure, measure};
use futures_util::FutureExt;
use mica_block::{ErrorKind, Passphrase, read_exact};
use mica_crypt::luks::{NewLuks, NewSlot, Wish};
use mica_crypt::{CipherName, Hash};
use mica_qcow2_format::{Compression, Header, Version};
use mica_store::MemoryStore;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::Arc;
use zeroize::Zeroizing;

fn memory(len_max: u64) -> Arc<MemoryStore> {
    Arc::new(MemoryStore::new_writable("image", Vec::new()).limited(len_max))
}

fn content(store: &MemoryStore) -> Buf {
    let len = usize::try_from(store.len().expect("memory")).expect("small");
    run(read_exact(store, HostOffset::ZERO, len)).expect("memory is read")
}

struct Nothing;

impl Observer for Nothing {
    fn finding(&mut self, finding: Finding) {
        panic!("the check found {finding:?}");
    }
}

/// Everything here is ready at once.
fn run<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().expect("a store of memory never waits")
}

fn make(wish: &ImageWish, size: u64, image: &MemoryStore, data: &MemoryStore) -> Result<()> {
    let plan = wish.plan(size).expect("a plan");
    let data = plan.data_file.as_ref().map(|_| data as &dyn Store);
    run(create(plan, Stores { image, data }))
}

#[test]
fn images_of_every_shape_are_whole() {
    let modes = [Preallocation::Off, Preallocation::Metadata, Preallocation::Falloc];
    for preallocation in [modes.as_slice(), &[Preallocation::Full]].concat() {
        for cluster_bytes in [512, 4096, 65536, 2 << 20] {
            for refcount_bits in [1, 16, 64] {
                for extended in [false, true] {
                    if extended && cluster_bytes < 1 << 14 {
                        continue;
                    }
                    let wish = ImageWish {
                        cluster_bytes: Some(cluster_bytes),
                        refcount_bits: Some(refcount_bits),
                        extended_l2: Some(extended),
                        preallocation: Some(preallocation),
                        ..ImageWish::default()
                    };
                    let image = memory(u64::MAX);
                    make(&wish, (1 << 20) + 512, &image, &image).expect("there is room");
                    let bytes = content(&image);
                    let header = Header::decode(&bytes, bytes.len() as u64).expect("a header");
                    assert_eq!(header.size, (1 << 20) + 512);
                    let report = run(check(image, &header, &mut Nothing)).expect("it is checked");
                    let clusters = header.size.div_ceil(cluster_bytes);
                    let wanted = if preallocation == Preallocation::Off { 0 } else { clusters };
                    assert_eq!(report.allocated_clusters, wanted);
                }
            }
        }
    }
}

#[test]
fn a_store_that_fills_up_is_left_without_a_header() {
    let wish = ImageWish { preallocation: Some(Preallocation::Full), ..ImageWish::default() };
    for len_max in [0, 65536, 200_000, 1 << 20] {
        let image = memory(len_max);
        let error = make(&wish, 1 << 20, &image, &image).expect_err("there is no room");
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        let bytes = content(&image);
        assert!(bytes.iter().take(4).all(|byte| *byte == 0), "no header, so no image");
    }
}

#[test]
fn an_overlay_has_subclusters_of_4_kib_unless_someone_says_otherwise() {
    let overlay = ImageWish {
        backing_name: Some("base".into()),
        backing_format: Some("raw".to_owned()),
        ..ImageWish::default()
    };
    let shape = |wish: &ImageWish| {
        let l2 = wish.plan(1 << 30).expect("a plan").l2;
        (l2.cluster_bits.bytes(), l2.extended)
    };
    assert_eq!(shape(&overlay), (128 << 10, true));
    assert_eq!(shape(&ImageWish::default()), (64 << 10, false));
    let stated = ImageWish { cluster_bytes: Some(64 << 10), ..overlay.clone() };
    assert_eq!(shape(&stated), (64 << 10, true));
    let small = ImageWish { cluster_bytes: Some(4 << 10), ..overlay.clone() };
    assert_eq!(shape(&small), (4 << 10, false));
    let plain = ImageWish { extended_l2: Some(false), ..overlay.clone() };
    assert_eq!(shape(&plain), (64 << 10, false));
    let old = ImageWish { version: Some(Version::V2), ..overlay };
    assert_eq!(shape(&old), (64 << 10, false));
}

#[test]
fn what_does_not_go_together_is_refused() {
    let refused = |wish: ImageWish| wish.plan(1 << 30).expect_err("refused").to_string();
    let v2 = ImageWish { version: Some(Version::V2), ..ImageWish::default() };
    let zstd = Some(Compression::Zstd);
    assert!(refused(ImageWish { compression: zstd, ..v2.clone() }).contains("Non-zlib"));
    assert!(refused(ImageWish { extended_l2: Some(true), ..v2 }).contains("Extended L2"));
    let overlay = ImageWish { backing_name: Some("base".into()), ..ImageWish::default() };
    assert!(refused(overlay).contains("without backing format"));
    let raw = ImageWish { data_file_raw: true, ..ImageWish::default() };
    assert!(refused(raw).contains("requires data-file"));
    assert!(ImageWish::default().plan(u64::MAX).is_err());
}

/// The plan of an image that is encrypted.
fn encrypted(wish: &ImageWish, size: u64) -> ImagePlan {
    let wished = Wish {
        cipher: CipherName::of_name("xts-plain64").expect("a cipher"),
        aes_bits: 256,
        hash: Hash::Sha256,
        slot: NewSlot::Iterations(NonZeroU32::MIN),
    };
    let passphrase = Passphrase::new("a test", Zeroizing::new(b"secret".to_vec()));
    let luks = NewLuks::make(wished, &passphrase).expect("random numbers");
    wish.plan(size).expect("a plan").encrypted(luks).expect("it can be encrypted")
}

#[test]
fn measure_of_an_encrypted_image_is_what_create_makes() {
    for cluster_bytes in [512, 4096, 65536, 2 << 20] {
        let wish = ImageWish {
            cluster_bytes: Some(cluster_bytes),
            preallocation: Some(Preallocation::Full),
            ..ImageWish::default()
        };
        let plan = encrypted(&wish, 4 << 20);
        let Measure { required, fully_allocated } = measure(&plan, 0);
        let image = memory(u64::MAX);
        run(create(plan, Stores { image: &*image, data: None })).expect("there is room");
        assert_eq!(image.len().expect("memory"), fully_allocated, "clusters of {cluster_bytes}");
        assert_eq!(required, fully_allocated);
    }
}

#[test]
fn what_a_device_held_is_no_part_of_the_tables_of_its_image() {
    for cluster_bytes in [4096, 65536] {
        let wish = ImageWish { cluster_bytes: Some(cluster_bytes), ..ImageWish::default() };
        for plan in [wish.plan(1 << 20).expect("a plan"), encrypted(&wish, 1 << 20)] {
            let image = Arc::new(MemoryStore::new_writable("device", vec![u8::MAX; 8 << 20]));
            run(create(plan, Stores { image: &*image, data: None })).expect("there is room");
            let bytes = content(&image);
            let header = Header::decode(&bytes, bytes.len() as u64).expect("a header");
            let table = |at: HostOffset, used: usize| {
                let at = usize::try_from(at.bytes()).expect("small");
                let cluster = usize::try_from(cluster_bytes).expect("small");
                bytes[at + used..at + cluster].iter().all(|byte| *byte == 0)
            };
            // One block counts all of it.
            assert!(table(header.refcount_table_offset, 8), "entries that name anything");
            assert!(table(header.l1_offset, header.l1_entries as usize * 8));
            run(check(image, &header, &mut Nothing)).expect("it is checked");
        }
    }
}
