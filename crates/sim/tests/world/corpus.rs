//! Replays the corpus of the fuzz targets: what was found stays fixed. New seeds are made by
//! `MICA_SEEDS=write cargo test -p mica-sim --test world corpus`.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot continue")]

use mica_block::{Disk, Images, Manage, Objects, Store, Which, read_exact};
use mica_gen::{ChainSpec, Feature, Features, generate};
use mica_qcow2_format::{L1Entry, L2Entry, Version};
use mica_qcow2_tools::bitmaps::{BitmapAction, edit_bitmap};
use mica_qcow2_tools::create::{ImageWish, Stores, create};
use mica_rt::{Backend, Buf, Executor};
use mica_sim::{TinyImage, TinySpec, World, hostile};
use mica_store::MemoryStore;
use mica_store::object::MemoryObjects;
use mica_units::{GuestOffset, GuestRange, HostOffset};
use mica_volume::{
    Claimed, Compression, Environment, LogDevice, NewVolume, Record, VolumeName, Volumes, Writer,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

type Target = (&'static str, fn(&[u8]));

const TARGETS: [Target; 13] = [
    ("qcow2_header", hostile::header),
    ("qcow2_open_read", hostile::open_read),
    ("qcow2_check", hostile::check),
    ("sidecar", hostile::sidecar),
    ("image_name", hostile::image_name),
    ("log", hostile::log),
    ("volume_stream", hostile::stream),
    ("volume_boot", mica_volume::hostile::boot_record),
    ("volume_head", mica_volume::hostile::head),
    ("volume_snapshot", mica_volume::hostile::snapshot_record),
    ("volume_frame", mica_volume::hostile::frame),
    ("bitmaps", hostile::bitmaps),
    ("backup", hostile::backup),
];

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

#[test]
fn corpus_is_survived() {
    if std::env::var_os("MICA_SEEDS").is_some() {
        write_seeds();
    }
    for (target, survive) in TARGETS {
        let seeds: Vec<_> = std::fs::read_dir(corpus().join(target)).unwrap().collect();
        assert!(!seeds.is_empty(), "{target} has seeds");
        for seed in seeds {
            let path = seed.unwrap().path();
            println!("{}", path.display());
            survive(&std::fs::read(path).unwrap());
        }
    }
}

/// Every target with every seed of the others, cut and with bits flipped: a little fuzzing without
/// a fuzzer.
#[test]
fn corpus_with_random_faults_is_survived() {
    let mut random = mica_gen::Rng::new(1);
    for (target, survive) in TARGETS {
        for seed in std::fs::read_dir(corpus().join(target)).unwrap() {
            let seed = std::fs::read(seed.unwrap().path()).unwrap();
            for _ in 0..8 {
                let mut bytes = seed.clone();
                for _ in 0..random.below(6) {
                    // Headers and tables come first, and there the bits count.
                    let most = [64, 600, 1 << 20][usize::try_from(random.below(3)).unwrap()];
                    let at = random.below(most.min(bytes.len() as u64 + 1));
                    if let Some(byte) = bytes.get_mut(usize::try_from(at).unwrap()) {
                        *byte ^= 1 << random.below(8);
                    }
                }
                if random.percent(10) {
                    bytes.truncate(usize::try_from(random.below(bytes.len() as u64 + 1)).unwrap());
                }
                survive(&bytes);
            }
        }
    }
}

/// A log of two volumes: of one that has gone on once, and of one that was ended.
fn log() -> Vec<u8> {
    let executor = Executor::new(Backend::Sim { seed: 1 }).unwrap();
    executor.block_on(async {
        let len = 4096 + 6 * (16 << 10);
        let file: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", vec![0; len]));
        let writer = Writer::new(7).unwrap();
        let (one, two, label) = ([1; 16], [2; 16], "a label");
        for process in 0..2 {
            let device = LogDevice::open(Arc::clone(&file), [process; 16]).await.unwrap();
            let log = match process {
                0 => device.start([9; 16], one, writer, 5).await.unwrap(),
                _ => device.go_on(one, (Writer::FIRST, writer), 5).await.unwrap(),
            };
            for record in [
                Record::Take { number: 1, time_ns: 2, label },
                Record::Nothing { first: 3, count: 4 },
                Record::Data { block: 5, bytes: &[0; 4096] },
                Record::Label { number: 1, label },
                Record::Drop { number: 1 },
                Record::Length { bytes: 1 << 30 },
            ] {
                log.push(record).unwrap();
            }
            log.sync().await.unwrap();
            if process == 0 {
                device.start([9; 16], two, writer, 0).await.unwrap().end().await.unwrap();
            }
        }
        let bytes = read_exact(&*file, HostOffset::ZERO, len).await.unwrap();
        let end = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1;
        bytes[..end].to_vec()
    })
}

/// What is of a volume that is compressed, with two snapshots, and boots: a stream, a record of a
/// snapshot, a frame, a boot record, and the head of a clone.
fn of_a_volume() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let executor = Executor::new(Backend::Sim { seed: 1 }).unwrap();
    executor.block_on(async {
        let objects = Arc::new(MemoryObjects::new("memory"));
        let next = AtomicU64::new(1);
        let random = move || u128::from(next.fetch_add(1, Ordering::Relaxed)).to_le_bytes();
        let environment = Environment::new("host-1", || 1, random);
        let store = Arc::clone(&objects) as Arc<dyn Objects>;
        let volumes = Volumes::open_or_make(store, environment, 1 << 20).await.unwrap();
        let volumes = volumes.with_boot_fetch(1 << 20);
        let web = VolumeName::new("web").unwrap();
        let new = NewVolume { compression: Compression::Zstd, ..NewVolume::default() };
        volumes.create_as(&web, 1 << 20, new).await.unwrap();
        for (byte, label) in [(1, "one"), (2, "two")] {
            let volume = volumes.open_volume(&web, Claimed::Refuse).await.unwrap();
            let content = Buf::from_slice(&[byte; 16384]);
            volume.write(GuestOffset::new(u64::from(byte) * 8192), content).await.0.unwrap();
            volume.discard(GuestRange::new(GuestOffset::ZERO, 4096).unwrap()).await.unwrap();
            volume.snapshots().unwrap().take(label).await.unwrap();
            let range = GuestRange::new(GuestOffset::new(8192), 8192).unwrap();
            let plan = volume.plan(range, Vec::new()).finish().await.unwrap();
            mica_block::read_whole(&volume, &plan).await.unwrap();
            volume.close().await.unwrap();
        }
        let mut stream = Vec::new();
        let (one, two) = (Which::Number(1), Which::Number(2));
        for (which, since) in [(&one, None), (&two, Some(&one))] {
            let put = |part: &[u8]| {
                stream.extend_from_slice(part);
                Ok(())
            };
            volumes.send(&web, which, (since, false), put, |_| {}).await.unwrap();
        }
        let copy = VolumeName::new("copy").unwrap();
        volumes.clone_volume(&web, Some(&one), &copy).await.unwrap();
        let mut seeds = vec![("volume_stream", "two_steps", stream)];
        for (name, content) in objects.contents() {
            if name.as_str().starts_with("boots/") {
                seeds.push(("volume_boot", "one", content.to_vec()));
            }
            if name.as_str() == "volumes/copy/0000000000000001" {
                seeds.push(("volume_head", "clone", content.to_vec()));
            }
            // What is in an extent begins anywhere: at 64 bytes a frame, at 16 a record.
            let extent = content.get(512..).filter(|_| name.as_str().starts_with("extents/"));
            let Some(extent) = extent else { continue };
            if let Some(at) = extent.windows(4).position(|it| it == [0x28, 0xb5, 0x2f, 0xfd]) {
                seeds.push(("volume_frame", "zeros", extent[at - 16..].to_vec()));
            }
            if let Some(at) = extent.windows(3).position(|it| it == b"two") {
                seeds.push(("volume_snapshot", "two", extent[at - 56..at + 3].to_vec()));
            }
        }
        seeds
    })
}

/// A small image with two bitmaps.
fn with_bitmaps() -> Vec<u8> {
    let executor = Executor::new(Backend::Sim { seed: 0 }).unwrap();
    executor.block_on(async {
        let (world, path) = (World::new(0), Path::new("/chain/image.qcow2"));
        world.put(path, Vec::new());
        let wish = ImageWish { cluster_bytes: Some(512), ..ImageWish::default() };
        let image = world.open_writable(path).unwrap().store;
        let plan = wish.plan(1 << 20).unwrap();
        create(plan, Stores { image: &*image, data: None }).await.unwrap();
        drop(image);
        for name in ["a", "b"] {
            edit_bitmap(&world, path, name, vec![BitmapAction::Add(Some(512))]).await.unwrap();
        }
        world.files().remove(0).1
    })
}

fn write_seeds() {
    let write = |target: &str, name: &str, bytes: &[u8]| {
        let folder = corpus().join(target);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(name), bytes).unwrap();
    };
    write("log", "two_volumes", &log());
    for (target, name, bytes) in of_a_volume() {
        write(target, name, &bytes);
    }
    write("bitmaps", "two", &with_bitmaps());
    for (name, bytes) in images() {
        write("qcow2_header", &name, &bytes[..bytes.len().min(1024)]);
        write("qcow2_open_read", &name, &bytes);
        if bytes.len() < 20_000 {
            write("qcow2_check", &name, &bytes);
        }
    }
    write("sidecar", "empty", &[1]);
    write("sidecar", "header_bit", &[4, 40, 0, 1]);
    write("sidecar", "node_bit", &[5, 0x20, 1, 0xff, 0x30, 1, 7]);
    write("sidecar", "liar", &[0xd, 0x0a, 1, 0xff, 0x10, 1, 3, 0x20, 2, 1]);
    let names: [(&str, &[u8]); 5] = [
        ("plain", b"../a b/base.qcow2"),
        ("protocol", b"nbd:localhost:10809"),
        ("json", br#"json:{"driver":"qcow2","file":{"driver":"file","filename":"/a:b"}}"#),
        ("json_flat", br#"json:{"driver":"raw","file.driver":"file","file.filename":"/a"}"#),
        ("json_deep", b"json:[[[[[[[[{\"file\":{\"file\":1}}]]]]]]]]"),
    ];
    for (name, bytes) in names {
        write("image_name", name, bytes);
    }
}

/// Small images: those of a generated chain, which are sound, and some which are not.
fn images() -> Vec<(String, Vec<u8>)> {
    let folder = tempfile::tempdir().unwrap();
    let mut spec = ChainSpec::new(folder.path());
    spec.layers = 4;
    spec.disk_bytes = 24 << 10;
    spec.cluster_bytes = 512;
    spec.fill = 0.3;
    spec.features = Features::all()
        .iter()
        .filter(|feature| {
            !matches!(
                feature,
                Feature::ClusterSizes
                    | Feature::ExtendedL2
                    | Feature::DataFiles
                    | Feature::RawBase
                    | Feature::Lengths
            )
        })
        .collect();
    let manifest = generate(&spec, |_| {}).unwrap();
    let read = |file: &str| std::fs::read(folder.path().join(file)).unwrap();
    let mut images: Vec<_> =
        manifest.layer.iter().map(|layer| (layer.file.clone(), read(&layer.file))).collect();
    let tiny = |cluster_bits, extended, disk_bytes| TinySpec {
        cluster_bits,
        version: Version::V3,
        extended,
        disk_bytes,
        backing: Some(("base.raw".to_owned(), "raw")),
    };
    let mut extended = TinyImage::new(&tiny(14, true, 1 << 20));
    extended.set(0, L2Entry::Zero);
    let host = Some(extended.allocate());
    extended.set(1, L2Entry::Subclusters { host, allocated: 0xff, zero: 0xff00 });
    // Data in the table itself keeps the seed small.
    let at = extended.l1_at(0) as u64;
    extended.set(2, L2Entry::Data(mica_units::HostOffset::new(at & !0x3fff)));
    let end = extended.bytes().iter().rposition(|byte| *byte != 0).unwrap() + 1;
    images.push(("extended".to_owned(), extended.bytes()[..end].to_vec()));
    let mut shared = TinyImage::new(&tiny(9, false, 1 << 20));
    let table = shared.set(0, L2Entry::Zero) as u64;
    for index in 0..shared.l1_entries() {
        let entry = L1Entry::encode(mica_units::HostOffset::new(table), true);
        let at = shared.l1_at(index);
        shared.put(at, &entry.0.to_be_bytes());
    }
    images.push(("shared_table".to_owned(), shared.bytes().to_vec()));
    let mut malformed = TinyImage::new(&tiny(9, false, 1 << 20));
    malformed.set(0, L2Entry::Data(mica_units::HostOffset::new(1 << 55)));
    let at = malformed.l1_at(1);
    malformed.put(at, &0x8000_0000_0000_0200_u64.wrapping_add(256).to_be_bytes());
    images.push(("malformed".to_owned(), malformed.bytes().to_vec()));
    images
}
