//! Writing: every alignment, neighbours in one block, space, length, and the stores that refuse.

use crate::judged::Judged;
use crate::{on_each_backend, open, pattern, read};
use mica_block::{ErrorKind, Space, Store, write_all};
use mica_rt::{Backend, Buf, Executor, Part, Parts, join_all};
use mica_store::{CacheMode, FileKind, Handles, Located, Locking, MemoryStore, WritableFile};
use mica_units::HostOffset;
use std::path::Path;
use std::sync::Arc;

const MODES: [CacheMode; 2] = [CacheMode::Writeback, CacheMode::None];

fn open_writable(path: &Path, cache: CacheMode) -> WritableFile {
    WritableFile::open(&mut Located::find(path).unwrap(), cache, Locking::On, &Handles::new(4))
        .unwrap()
}

async fn write(store: &dyn Store, offset: u64, bytes: &[u8]) {
    write_all(store, Buf::from_slice(bytes), HostOffset::new(offset)).await.unwrap();
}

/// A small generator (Knuth's MMIX).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// A minimal model of a store.
#[derive(Default)]
struct Model(Vec<u8>);

impl Model {
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.grow(offset + bytes.len());
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn grow(&mut self, len: usize) {
        if self.0.len() < len {
            self.0.resize(len, 0);
        }
    }

    fn space(&mut self, change: Space, offset: usize, len: usize) {
        if change != Space::Punch {
            self.grow(offset + len);
        }
        if change != Space::Allocate {
            let end = (offset + len).min(self.0.len());
            self.0[offset.min(end)..end].fill(0);
        }
    }
}

/// Random operations on `store` and a model, which agree after each.
async fn compare_with_model(store: &dyn Store, seed: u64, rounds: usize) {
    let mut random = Random(seed);
    let mut model = Model::default();
    store.set_len(0).await.unwrap();
    for round in 0..rounds {
        let unit = [1, 512, 4096][usize::try_from(random.below(3)).unwrap()];
        let offset = random.below(40_000 / unit) * unit;
        let len = random.below(20_000 / unit) * unit;
        let (at, count) = (usize::try_from(offset).unwrap(), usize::try_from(len).unwrap());
        match random.below(8) {
            0 => {
                store.set_len(offset).await.unwrap();
                model.0.resize(at, 0);
            }
            1 if count > 0 => {
                let changes = [Space::Punch, Space::Zero, Space::Allocate];
                let change = changes[usize::try_from(random.below(3)).unwrap()];
                match store.space(change, HostOffset::new(offset), len).await {
                    Ok(()) => model.space(change, at, count),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}"),
                }
            }
            2 => store.sync().await.unwrap(),
            _ if count > 0 => {
                let bytes = vec![u8::try_from(1 + round % 255).unwrap(); count];
                write(store, offset, &bytes).await;
                model.write(at, &bytes);
            }
            _ => {}
        }
        assert_eq!(store.len().unwrap(), model.0.len() as u64, "round {round} of seed {seed}");
        let content = read(store, 0, model.0.len() + 100).await.unwrap();
        let (there, beyond) = content.split_at(model.0.len());
        assert!(there == model.0, "round {round} of seed {seed}");
        assert_eq!(beyond, [0; 100]);
    }
}

#[test]
fn random_operations_on_files_do_what_the_model_does() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    std::fs::write(&path, b"").unwrap();
    on_each_backend(|| async {
        for mode in MODES {
            for seed in 0..4 {
                let store = Judged(Arc::new(open_writable(&path, mode)));
                compare_with_model(&store, seed, 100).await;
            }
        }
    });
}

#[test]
fn random_operations_in_memory_do_what_the_model_does() {
    on_each_backend(|| async {
        for seed in 0..4 {
            let memory = MemoryStore::new_writable("memory", vec![1; 10]);
            compare_with_model(&Judged(Arc::new(memory)), seed, 200).await;
        }
    });
}

/// Parts of blocks and whole blocks that are written at once, by two queues, all arrive.
#[test]
fn writes_into_one_block_at_once_do_not_lose_one_another() {
    const LEN: usize = 64 << 10;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let content = pattern(LEN);
    for backend in [Backend::Uring, Backend::Pool] {
        for mode in MODES {
            std::fs::write(&path, vec![0; LEN / 3]).unwrap();
            let store = open_writable(&path, mode);
            let act = |first: usize| {
                let Ok(executor) = Executor::new(backend) else { return false };
                let done = executor.block_on(async {
                    let mut writes = Vec::new();
                    let (mut at, mut number) = (0, 0);
                    while at < LEN {
                        let lens = [100, 412, 512, 3072, 37, 4059, 4096];
                        let end = LEN.min(at + lens[number % lens.len()]);
                        if number % 2 == first {
                            let part = Buf::from_slice(&content[at..end]);
                            writes.push(store.write_at(part, HostOffset::new(at as u64)));
                        }
                        (at, number) = (end, number + 1);
                    }
                    join_all(writes).await
                });
                done.into_iter().for_each(|(result, _)| result.unwrap());
                true
            };
            let both = std::thread::scope(|scope| {
                let [one, other] = [0, 1].map(|first| scope.spawn(move || act(first)));
                one.join().unwrap() && other.join().unwrap()
            });
            assert!(!both || std::fs::read(&path).unwrap() == content, "{backend:?} {mode:?}");
        }
    }
}

#[test]
fn write_of_a_part_continues_without_a_waiter() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    std::fs::write(&path, vec![1; 8192]).unwrap();
    on_each_backend(|| async {
        let store = open_writable(&path, CacheMode::None);
        let part = Buf::from_slice(&[2; 100]);
        let mut dropped = Box::pin(store.write_at(part, HostOffset::new(50)));
        std::future::poll_fn(|context| {
            assert!(dropped.as_mut().poll(context).is_pending());
            std::task::Poll::Ready(())
        })
        .await;
        drop(dropped);
        write(&store, 4000, &[3; 100]).await;
        write(&store, 0, &[4; 10]).await;
        let mut expected = vec![1; 8192];
        expected[50..150].fill(2);
        expected[4000..4100].fill(3);
        expected[..10].fill(4);
        assert!(std::fs::read(&path).unwrap() == expected);
        std::fs::write(&path, vec![1; 8192]).unwrap();
    });
}

#[test]
fn buffer_is_returned_from_every_way_of_writing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    std::fs::write(&path, b"").unwrap();
    on_each_backend(|| async {
        for mode in MODES {
            let store = open_writable(&path, mode);
            for (skip, offset, len) in [(0, 0, 4096), (28, 4096, 4096), (3, 5000, 77), (0, 0, 0)] {
                let mut whole = Buf::zeroed(skip + len);
                let _head = whole.split_to(skip);
                whole.fill(7);
                let address = whole.as_ptr();
                let (result, back) = store.write_at(whole, HostOffset::new(offset)).await;
                result.unwrap();
                assert!((back.as_ptr(), back.len()) == (address, len));
                assert!(back.iter().all(|byte| *byte == 7));
            }
            for offset in [u64::MAX, u64::MAX - 4095, (1 << 63) - 1] {
                let (result, back) = store.write_at(Buf::new(512), HostOffset::new(offset)).await;
                assert_eq!(result.unwrap_err().kind(), ErrorKind::Limit);
                assert_eq!(back.len(), 512);
                assert_eq!(read(&store, offset, 512).await.unwrap(), [0; 512]);
            }
        }
    });
}

#[test]
fn stores_that_were_opened_for_reading_refuse_to_change() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    std::fs::write(&path, b"image").unwrap();
    on_each_backend(|| async {
        let file = open(&path, CacheMode::Writeback, &Handles::new(8)).unwrap();
        let memory = MemoryStore::new("memory", b"image".to_vec());
        for store in [&file as &dyn Store, &memory] {
            let (result, buf) = store.write_at(Buf::zeroed(3), HostOffset::ZERO).await;
            assert_eq!((result.unwrap_err().kind(), buf.len()), (ErrorKind::Denied, 3));
            for result in
                [store.set_len(1).await, store.space(Space::Punch, HostOffset::ZERO, 1).await]
            {
                let error = result.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Denied);
                assert!(error.to_string().contains("reading only"), "{error}");
            }
            assert_eq!(read(store, 0, 5).await.unwrap(), b"image");
        }
        // What another process wrote can be made durable by one that only reads.
        file.sync().await.unwrap();
        assert_eq!(memory.sync().await.unwrap_err().kind(), ErrorKind::Denied);
    });
}

#[test]
fn memory_has_a_maximum() {
    let store = MemoryStore::new_writable("memory", Vec::new());
    on_each_backend(|| async {
        for offset in [1 << 32, u64::MAX - 1, u64::MAX] {
            let (result, _) = store.write_at(Buf::zeroed(1), HostOffset::new(offset)).await;
            assert_eq!(result.unwrap_err().kind(), ErrorKind::NoSpace);
        }
        assert!(store.set_len(u64::MAX).await.is_err());
        assert_eq!(store.len().unwrap(), 0);
    });
}

#[test]
fn block_device_is_written_and_keeps_its_length() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("device");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let Some(device) = crate::files::LoopDevice::over(&path) else {
        eprintln!("skipped: no loop device can be made here");
        return;
    };
    on_each_backend(|| async {
        for mode in MODES {
            let store = open_writable(Path::new(&device.0), mode);
            assert_eq!(Located::find(Path::new(&device.0)).unwrap().kind(), FileKind::BlockDevice);
            write(&store, 0, &[1; 1 << 20]).await;
            write(&store, 513, &[2; 700]).await;
            write(&store, (1 << 20) - 100, &[3; 100]).await;
            match store.space(Space::Zero, HostOffset::new(8192), 4096).await {
                Ok(()) => assert_eq!(read(&store, 8192, 4096).await.unwrap(), [0; 4096]),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}"),
            }
            store.sync().await.unwrap();
            let there = read(&store, 0, 4096).await.unwrap();
            assert!(there[..513] == [1; 513] && there[513..1213] == [2; 700] && there[1213] == 1);
            assert_eq!(read(&store, (1 << 20) - 101, 5).await.unwrap(), [1, 3, 3, 3, 3]);
            let (result, _) = store.write_at(Buf::zeroed(512), HostOffset::new(1 << 20)).await;
            assert_eq!(result.unwrap_err().kind(), ErrorKind::NoSpace);
            store.set_len(1 << 20).await.unwrap();
            assert_eq!(store.set_len(5).await.unwrap_err().kind(), ErrorKind::Unsupported);
        }
    });
}

#[test]
fn writable_file_reads_what_others_wrote_before() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let content = pattern(10_000);
    std::fs::write(&path, &content).unwrap();
    on_each_backend(|| async {
        for mode in MODES {
            let store = Arc::new(open_writable(&path, mode));
            for (offset, len) in [(0_u64, 4096_usize), (1, 9000), (9999, 10), (1 << 33, 5)] {
                let bytes = read(&*store, offset, len).await.unwrap();
                let start = usize::try_from(offset).unwrap().min(content.len());
                let end = (start + len).min(content.len());
                assert!(bytes[..end - start] == content[start..end]);
                assert!(bytes[end - start..].iter().all(|byte| *byte == 0));
            }
            assert_eq!(store.name(), path.display().to_string());
            assert!(store.allocated_bytes().unwrap() >= 8192);
        }
    });
}

/// A file system of 256 KiB in memory, taken down at the end.
struct SmallFileSystem(tempfile::TempDir);

impl SmallFileSystem {
    fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=256k", "none"]).arg(folder.path());
        mount.output().ok()?.status.success().then_some(Self(folder))
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// The next sync of the system succeeds: it has reported the failure once and forgotten it.
#[test]
fn no_sync_succeeds_after_one_that_failed() {
    let skipped = || eprintln!("skipped: no file system or loop device can be made here");
    let Some(small) = SmallFileSystem::mount() else { return skipped() };
    let path = small.0.path().join("device");
    std::fs::File::create(&path).unwrap().set_len(4 << 20).unwrap();
    let Some(device) = crate::files::LoopDevice::over(&path) else { return skipped() };
    on_each_backend(|| async {
        let store = open_writable(Path::new(&device.0), CacheMode::Writeback);
        store.sync().await.unwrap();
        write(&store, 0, &[1; 2 << 20]).await;
        let syncs = join_all((0..4).map(|_| store.sync())).await;
        let error = syncs[0].clone().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        assert!(error.to_string().contains("making durable"), "{error}");
        for result in &syncs[1..] {
            assert!(result.as_ref().unwrap_err().to_string().contains("an earlier sync"));
        }
        assert_eq!(store.sync().await.unwrap_err().kind(), ErrorKind::Io);
    });
}

/// What the system keeps of it after a power cut is tested in a machine; here, that the bytes are
/// there and the file is as long as they say, whichever way it is written.
#[test]
fn sync_of_what_was_written_leaves_the_bytes_and_a_working_store() {
    for cache in MODES {
        on_each_backend(async || {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("image");
            std::fs::write(&path, [1; 5000]).unwrap();
            let store = open_writable(&path, cache);
            for (offset, len) in [(0_u64, 4096_usize), (4999, 3), (1 << 20, 2 << 20), (7, 0)] {
                let bytes = pattern(len);
                let at = HostOffset::new(offset);
                write(&store, offset, &bytes).await;
                store.sync_written(Buf::from_slice(&bytes), at).await.unwrap();
                assert_eq!(read(&store, at.bytes(), len).await.unwrap(), bytes, "{cache:?}");
            }
            assert_eq!(store.len().unwrap(), 3 << 20);
            store.sync().await.unwrap();
        });
    }
}

#[test]
fn parts_are_written_one_after_the_other_or_given_back() {
    on_each_backend(async || {
        for cache in MODES {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("image");
            std::fs::write(&path, [9; 100]).unwrap();
            let Ok(mut located) = Located::find(&path) else { panic!("it is there") };
            let opened = WritableFile::open(&mut located, cache, Locking::On, &Handles::new(4));
            // Not every file system can be written past the page cache.
            let Ok(store) = opened else { continue };
            let (bytes, mut parts) = (Arc::new(Buf::from_slice(&pattern(5000))), Parts::default());
            for range in [4000..5000, 0..1, 7..4000] {
                parts.push(Part::new(Arc::clone(&bytes), range));
            }
            match store.write_parts(parts, HostOffset::new(50)) {
                Ok(written) => {
                    written.await.unwrap();
                    let wanted = [&[9; 50], &bytes[4000..], &bytes[..1], &bytes[7..4000]].concat();
                    assert_eq!(std::fs::read(&path).unwrap(), wanted);
                    assert_eq!(cache, CacheMode::Writeback);
                }
                Err(parts) => {
                    assert_eq!((parts.len(), cache), (4994, CacheMode::None));
                    assert_eq!(std::fs::read(&path).unwrap(), [9; 100]);
                }
            }
        }
    });
}
