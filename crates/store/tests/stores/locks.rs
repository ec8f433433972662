//! QEMU's image locks, between stores of one process: they conflict like those of two processes.

use crate::{on_each_backend, read};
use mica_block::{Error, ErrorKind, Result, Store, lock_patience};
use mica_rt::{Access, Buf, File};
use mica_store::{CacheMode, FileStore, Handles, Located, Locking, WritableFile};
use mica_units::HostOffset;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn image(folder: &Path) -> PathBuf {
    let path = folder.join("image");
    std::fs::write(&path, vec![1; 4096]).unwrap();
    path
}

fn open_shared(path: &Path, locking: Locking, handles: &Arc<Handles>) -> Result<FileStore> {
    FileStore::new_shared(&mut Located::find(path)?, CacheMode::Writeback, locking, handles)
}

fn reader(path: &Path, locking: Locking) -> Result<FileStore> {
    open_shared(path, locking, &Handles::new(8))
}

fn writer(path: &Path, locking: Locking) -> Result<WritableFile> {
    WritableFile::open(&mut Located::find(path)?, CacheMode::Writeback, locking, &Handles::new(4))
}

#[track_caller]
fn assert_denied<T>(result: Result<T>, words: &str) {
    let error = result.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Denied);
    let (text, me) = (error.to_string(), std::process::id());
    assert!(text.contains(words) && text.contains("image"), "{text}");
    assert!(text.contains(&format!("process {me})")), "it says who: {text}");
}

#[test]
fn writer_keeps_out_readers_and_writers_until_it_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path());
    let first = writer(&path, Locking::On).unwrap();
    assert_denied(writer(&path, Locking::On), "holds the image for writing");
    assert_denied(writer(&path, Locking::ForceShare), "holds the image for writing");
    assert_denied(reader(&path, Locking::On), "holds the image for writing");
    reader(&path, Locking::ForceShare).unwrap();
    reader(&path, Locking::Off).unwrap();
    writer(&path, Locking::Off).unwrap();
    drop(first);
    reader(&path, Locking::On).unwrap();
    writer(&path, Locking::On).unwrap();
}

#[test]
fn readers_share_and_keep_out_writers() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path());
    let readers = [(); 3].map(|()| reader(&path, Locking::On).unwrap());
    assert_denied(writer(&path, Locking::On), "allows nobody to write it");
    drop(readers);
    let _lenient = reader(&path, Locking::ForceShare).unwrap();
    writer(&path, Locking::On).unwrap();
}

fn alone(path: &Path) -> Result<WritableFile> {
    WritableFile::open_alone(&mut Located::find(path)?, CacheMode::Writeback, &Handles::new(4))
}

#[test]
fn who_is_alone_with_an_image_is_waited_for_and_keeps_away_from_who_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path());
    for other in [Locking::On, Locking::ForceShare] {
        let other = reader(&path, other).unwrap();
        assert_denied(alone(&path), "has the image open");
        drop(other);
    }
    let other = writer(&path, Locking::On).unwrap();
    assert_denied(alone(&path), "has the image open");
    drop(other);
    let first = alone(&path).unwrap();
    assert_denied(alone(&path), "has the image open");
    let refused =
        [writer(&path, Locking::On).err().unwrap(), reader(&path, Locking::On).err().unwrap()];
    for error in refused {
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(lock_patience(&error).is_some(), "it is not for long: {error}");
    }
    drop(first);
    assert_eq!(lock_patience(&Error::new(ErrorKind::Denied, "for good")), None);
    drop(reader(&path, Locking::On).unwrap());
    // A disk of this process, whose descriptor may be closed.
    let handles = Handles::new(4);
    let _reader = open_shared(&path, Locking::On, &handles).unwrap();
    let mut located = Located::find(&path).unwrap();
    let error = WritableFile::open_alone(&mut located, CacheMode::Writeback, &handles).err();
    assert_eq!(error.unwrap().kind(), ErrorKind::Denied);
}

/// The story: who had waited for a process that replaced an image served the old one, which had no
/// name any more.
#[test]
fn image_that_lost_its_name_before_it_was_locked_is_looked_for_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path());
    let found = || Located::find(&path).unwrap();
    let (mut to_write, mut to_read) = (found(), found());
    let new = folder.path().join("new");
    std::fs::write(&new, "new").unwrap();
    std::fs::rename(&new, &path).unwrap();
    let (cache, handles) = (CacheMode::Writeback, Handles::new(4));
    for locking in [Locking::On, Locking::Off] {
        let said = WritableFile::open(&mut to_write, cache, locking, &handles).err().unwrap();
        assert!(lock_patience(&said).is_some() && said.to_string().contains("replaced"), "{said}");
    }
    let said = FileStore::new_shared(&mut to_read, cache, Locking::On, &handles).err().unwrap();
    assert!(lock_patience(&said).is_some(), "{said}");
    assert_eq!(writer(&path, Locking::On).unwrap().len().unwrap(), 3);
    // One that never had another name is what its descriptor says.
    let nameless = tempfile::tempfile_in(folder.path()).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&nameless));
    writer(Path::new(&path), Locking::On).unwrap();
}

/// What becomes of the name of an image, and of that of another file.
type Rename<'a> = &'a dyn Fn(&Path, &Path) -> std::io::Result<()>;

/// The stories, of one process that found `image` and was stopped before it locked it. Another one
/// kept a state, `image@state`, and ended: the first wrote to that. Another one replaced the image
/// and was killed before it could remove the old file: the first served that. Another one made a
/// layer, which had `image` as its name until then: the first emptied it.
#[test]
fn image_that_has_another_name_by_the_time_it_is_locked_is_looked_for_again() {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    let keep = |path: &Path, other: &Path| {
        std::fs::hard_link(path, path.with_file_name("image@state")).unwrap();
        std::fs::rename(other, path)
    };
    let exchange = |path: &Path, other: &Path| {
        Ok(renameat_with(CWD, other, CWD, path, RenameFlags::EXCHANGE)?)
    };
    let name = |path: &Path, other: &Path| std::fs::rename(path, other);
    let ways: [Rename<'_>; 3] = [&keep, &exchange, &name];
    for (number, rename) in ways.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let path = image(folder.path());
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let found = || [&path, &link].map(|name| Located::find(name).unwrap());
        let (to_write, to_read) = (found(), found());
        let other = folder.path().join("other");
        std::fs::write(&other, "other").unwrap();
        rename(&path, &other).unwrap();
        let (cache, handles) = (CacheMode::Writeback, Handles::new(4));
        for mut located in to_write {
            let said = WritableFile::open(&mut located, cache, Locking::On, &handles).err();
            let said = said.unwrap_or_else(|| panic!("{number}: {located:?} is opened"));
            assert!(lock_patience(&said).is_some(), "{number}: {said}");
        }
        for mut located in to_read {
            let said = FileStore::new_shared(&mut located, cache, Locking::On, &handles).err();
            let said = said.unwrap_or_else(|| panic!("{number}: {located:?} is opened"));
            assert!(lock_patience(&said).is_some(), "{number}: {said}");
        }
        // Whatever is there now, one of several names is as good as the only one.
        let now = if path.exists() { path } else { other };
        std::fs::hard_link(&now, folder.path().join("second")).unwrap();
        drop(writer(&now, Locking::On).unwrap());
        reader(&folder.path().join("second"), Locking::On).unwrap();
    }
}

/// The bytes that QEMU's raw driver locks and checks.
#[test]
fn locked_bytes_are_those_of_qemu() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path());
    let observer = File::new(std::fs::File::open(&path).unwrap().into(), Access::Buffered);
    let locked = || -> Vec<u64> {
        (0..300).filter(|byte| observer.is_locked_elsewhere(*byte, 1).unwrap()).collect()
    };
    let store = reader(&path, Locking::On).unwrap();
    assert_eq!(locked(), [100, 201, 203]);
    drop(store);
    let store = writer(&path, Locking::On).unwrap();
    assert_eq!(locked(), [100, 101, 103, 201, 203]);
    drop(store);
    let store = reader(&path, Locking::ForceShare).unwrap();
    assert_eq!(locked(), [100]);
    drop(store);
    assert_eq!(locked(), [0; 0]);
}

#[test]
fn refused_opener_leaves_no_locks_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path());
    let first = writer(&path, Locking::On).unwrap();
    assert!(reader(&path, Locking::On).is_err());
    drop(first);
    writer(&path, Locking::On).unwrap();
}

/// A permission that somebody uses or does not share, without a whole opener around it.
#[test]
fn each_conflicting_lock_of_others_is_honoured() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path());
    for (byte, reads, writes) in [
        (100, true, true),
        (101, false, false),
        (102, true, true),
        (103, false, false),
        (200, false, false),
        (201, true, false),
        (202, true, true),
        (203, true, false),
    ] {
        let other = File::new(std::fs::File::open(&path).unwrap().into(), Access::Buffered);
        other.lock_shared(byte, 1).unwrap();
        assert_eq!(reader(&path, Locking::On).is_ok(), reads, "reading beside {byte}");
        assert_eq!(writer(&path, Locking::On).is_ok(), writes, "writing beside {byte}");
    }
}

/// Descriptors are scarce, so that a layer's is closed, which releases its locks. They are taken
/// again with the next descriptor, or the read says why not.
#[test]
fn locks_are_taken_again_when_a_layer_is_opened_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path());
    let others: Vec<PathBuf> =
        (0..10).map(|number| folder.path().join(format!("other{number}"))).collect();
    others.iter().for_each(|other| std::fs::write(other, vec![2; 4096]).unwrap());
    on_each_backend(|| async {
        let handles = Handles::new(4);
        let store = open_shared(&path, Locking::On, &handles).unwrap();
        let others: Vec<_> =
            others.iter().map(|other| open_shared(other, Locking::On, &handles).unwrap()).collect();
        assert!(handles.open_count() <= 4);
        let second = writer(&path, Locking::On).unwrap();
        assert_denied(read(&store, 0, 10).await, "holds the image for writing");
        drop(second);
        assert_eq!(read(&store, 0, 10).await.unwrap(), [1; 10]);
        assert_denied(writer(&path, Locking::On), "allows nobody to write it");
        for other in &others {
            read(other, 0, 10).await.unwrap();
        }
        assert_eq!(read(&store, 0, 10).await.unwrap(), [1; 10]);
        for other in &others {
            read(other, 0, 10).await.unwrap();
        }
        // Nobody kept this writer out. What it wrote is not mistaken for the layer.
        mica_rt::sleep(std::time::Duration::from_millis(20)).await;
        let third = writer(&path, Locking::On).unwrap();
        third.write_at(Buf::from_slice(&[1; 10]), HostOffset::ZERO).await.0.unwrap();
        drop(third);
        let error = read(&store, 0, 10).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.to_string().contains("was written to while it was in use"), "{error}");
    });
}

/// Some hypervisors lock the whole file exclusively.
#[test]
fn file_that_is_locked_as_a_whole_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path());
    for open in [&|| reader(&path, Locking::On).map(drop) as Result<()>, &|| {
        writer(&path, Locking::On).map(drop)
    }] as [&dyn Fn() -> Result<()>; 2]
    {
        let holder = std::fs::File::options().write(true).open(&path).unwrap();
        let exclusive = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        rustix::fs::fcntl_lock(&holder, exclusive).unwrap();
        assert_denied(open(), "has locked the image exclusively");
    }
}
