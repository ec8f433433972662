//! Files: every alignment, the end, holes, and files that are not images.

use crate::{on_each_backend, open, pattern, read};
use mica_block::{ErrorKind, Run, RunKind, Store};
use mica_rt::{Backend, Buf, Executor};
use mica_store::{CacheMode, FileKind, Handles, Located, MemoryStore};
use mica_units::HostOffset;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

const MODES: [CacheMode; 2] = [CacheMode::Writeback, CacheMode::None];

fn write_file(folder: &Path, content: &[u8]) -> PathBuf {
    let path = folder.join("image");
    std::fs::write(&path, content).unwrap();
    path
}

/// The result of a read of `content`: its bytes, then zeros.
fn expected(content: &[u8], offset: u64, len: usize) -> Vec<u8> {
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let there = content.get(start..).unwrap_or_default();
    let mut bytes = there[..there.len().min(len)].to_vec();
    bytes.resize(len, 0);
    bytes
}

#[test]
fn hint_brings_bytes_to_the_cache_and_changes_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let bytes = pattern(1 << 20);
    std::fs::write(&path, &bytes).unwrap();
    on_each_backend(async || {
        let store = open(&path, CacheMode::Writeback, &Handles::new(8)).unwrap();
        // Beyond the end as well: a hint has no errors.
        for (offset, len) in [(0, 1 << 20), (1 << 19, 4096), (1 << 30, 4096), (0, u64::MAX)] {
            store.read_ahead(HostOffset::new(offset), len).await;
        }
        assert!(store.is_cached(HostOffset::ZERO), "written just now");
        assert_eq!(read(&store, 0, 1 << 20).await.unwrap(), bytes);
        let direct = open(&path, CacheMode::None, &Handles::new(8));
        if let Ok(direct) = direct {
            assert!(direct.is_cached(HostOffset::ZERO), "past the page cache hints are useless");
            direct.read_ahead(HostOffset::ZERO, 4096).await;
        }
    });
}

/// The story: an image above one on squashfs could be written no more from its first flush on.
#[test]
fn file_of_a_file_system_without_syncs_has_nothing_to_make_durable() {
    let path = Path::new("/proc/version");
    let refused = std::fs::File::open(path).unwrap().sync_data().unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::InvalidInput);
    on_each_backend(async || {
        let store = open(path, CacheMode::Writeback, &Handles::new(8)).unwrap();
        store.sync().await.unwrap();
    });
}

#[test]
fn every_alignment_reads_the_bytes_and_zeros_past_the_end() {
    let folder = tempfile::tempdir().unwrap();
    for file_len in [0, 1, 511, 512, 4096, 5000, 3 * 4096, 3 * 4096 + 513] {
        let content = pattern(file_len);
        let path = write_file(folder.path(), &content);
        on_each_backend(|| async {
            for mode in MODES {
                let store = open(&path, mode, &Handles::new(8)).unwrap();
                assert_eq!(store.len().unwrap(), file_len as u64);
                for offset in [0, 1, 511, 512, 513, 4095, 4096, 8192, 12_288, 1 << 33] {
                    for len in [0, 1, 511, 512, 4096, 4097, 16_384] {
                        let bytes = read(&store, offset, len).await.unwrap();
                        let same = bytes == expected(&content, offset, len);
                        assert!(same, "{mode:?}: {len} at {offset} of {file_len}");
                    }
                }
            }
        });
    }
}

#[test]
fn direct_read_into_an_unaligned_part_of_a_buffer_returns_that_part() {
    let folder = tempfile::tempdir().unwrap();
    let content = pattern(16_384);
    let path = write_file(folder.path(), &content);
    on_each_backend(|| async {
        let store = open(&path, CacheMode::None, &Handles::new(8)).unwrap();
        let mut whole = Buf::zeroed(9000);
        let _header = whole.split_to(28);
        let address = whole.as_ptr();
        let (result, whole) = store.read_at(whole, HostOffset::new(4096)).await;
        result.unwrap();
        assert_eq!(whole.as_ptr(), address);
        assert_eq!(*whole, content[4096..4096 + 8972]);
    });
}

#[test]
fn offsets_that_no_file_reaches_read_as_zeros() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_file(folder.path(), b"x");
    on_each_backend(|| async {
        for mode in MODES {
            let store = open(&path, mode, &Handles::new(8)).unwrap();
            for offset in [u64::MAX, u64::MAX - 511, 1 << 63, (1 << 63) - 1, (1 << 63) - 512] {
                assert_eq!(read(&store, offset, 512).await.unwrap(), [0; 512], "{offset:#x}");
            }
        }
    });
}

#[test]
fn runs_distinguish_holes_from_data() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sparse");
    let mut file = std::fs::File::create(&path).unwrap();
    file.seek(SeekFrom::Start(1 << 20)).unwrap();
    file.write_all(&pattern(65_536)).unwrap();
    file.set_len(2 << 20).unwrap();
    file.sync_all().unwrap();
    for mode in MODES {
        let store = open(&path, mode, &Handles::new(8)).unwrap();
        let run = |offset, len| store.run_at(HostOffset::new(offset), len).unwrap();
        let hole = |len| Run { kind: RunKind::Hole, len };
        let data = |len| Run { kind: RunKind::Data, len };
        if run(0, 1 << 30) == data(2 << 20) {
            eprintln!("skipped: this file system does not report holes");
            return;
        }
        assert_eq!(run(0, 1 << 30), hole(1 << 20));
        assert_eq!(run(5, 10), hole(10));
        assert_eq!(run(1 << 20, 1 << 30), data(65_536));
        assert_eq!(run((1 << 20) + 100, 1 << 30), data(65_436));
        assert_eq!(run((1 << 20) + 65_536, 1 << 30), hole(1 << 30));
        assert_eq!(run(2 << 20, 7), hole(7));
        assert_eq!(run(u64::MAX, u64::MAX), hole(u64::MAX));
        let error = store.run_at(HostOffset::ZERO, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}

#[test]
fn anything_but_an_image_is_refused_without_being_opened() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let socket = folder.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    for (path, what) in [
        (folder.path(), "a directory"),
        (&fifo, "a FIFO"),
        (&socket, "a socket"),
        (Path::new("/dev/null"), "a character device"),
    ] {
        let error = Located::find(path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(what), "{error}");
    }
    let error = Located::find(&folder.path().join("nothing")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[test]
fn symbolic_link_is_distinguished_from_its_target() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_file(folder.path(), b"abc");
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let located = Located::find(&link).unwrap();
    assert_eq!(located.path(), link);
    assert_eq!(located.real_path().unwrap(), path.canonicalize().unwrap());
    assert_eq!(located.known_len(), Some(3));
    assert_eq!(Located::find_no_follow(&link).unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn identity_changes_with_the_content() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_file(folder.path(), b"abc");
    let identity = || Located::find(&path).unwrap().identity(3);
    let before = identity();
    assert_eq!(before, identity());
    // Longer than a tick of the clock that stamps files.
    let pause = async { mica_rt::sleep(std::time::Duration::from_millis(20)).await };
    Executor::new(Backend::Pool).unwrap().block_on(pause);
    std::fs::write(&path, b"xyz").unwrap();
    let after = identity();
    assert_eq!(before.inode, after.inode);
    assert!(before.mtime_ns < after.mtime_ns && before.ctime_ns < after.ctime_ns);
}

/// A loop device over a file, taken down at the end.
pub(crate) struct LoopDevice(pub(crate) String);

impl LoopDevice {
    pub(crate) fn over(path: &Path) -> Option<Self> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(path).output().ok()?;
        let name = String::from_utf8(made.stdout).ok()?.trim().to_owned();
        (made.status.success() && !name.is_empty()).then_some(Self(name))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn block_device_has_a_length_and_reads() {
    let folder = tempfile::tempdir().unwrap();
    let content = pattern(1 << 20);
    let path = write_file(folder.path(), &content);
    let Some(device) = LoopDevice::over(&path) else {
        eprintln!("skipped: no loop device can be made here");
        return;
    };
    on_each_backend(|| async {
        for mode in MODES {
            let located = Located::find(Path::new(&device.0)).unwrap();
            assert_eq!(located.kind(), FileKind::BlockDevice);
            assert_eq!(located.identity(1).mtime_ns, i128::MAX);
            let store = open(Path::new(&device.0), mode, &Handles::new(8)).unwrap();
            assert_eq!(store.len().unwrap(), 1 << 20);
            for (offset, len) in [(0, 4096), (513, 700), ((1 << 20) - 100, 200), (1 << 20, 10)] {
                let bytes = read(&store, offset, len).await.unwrap();
                assert!(bytes == expected(&content, offset, len), "{mode:?}: {len} at {offset}");
            }
            let run = store.run_at(HostOffset::new(4096), 1 << 30).unwrap();
            assert_eq!(run, Run { kind: RunKind::Data, len: (1 << 20) - 4096 });
        }
    });
}

#[test]
fn memory_is_read_like_a_file() {
    let content = pattern(1000);
    let store = MemoryStore::new("memory", content.clone());
    on_each_backend(|| async {
        for (offset, len) in [(0, 1000), (990, 20), (1000, 5), (u64::MAX, 5), (3, 0)] {
            assert_eq!(read(&store, offset, len).await.unwrap(), expected(&content, offset, len));
        }
    });
    let run = |offset, len| store.run_at(HostOffset::new(offset), len).unwrap();
    assert_eq!(run(10, 5000), Run { kind: RunKind::Data, len: 990 });
    assert_eq!(run(1000, 5000), Run { kind: RunKind::Hole, len: 5000 });
}
