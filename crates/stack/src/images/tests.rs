use super::*;
use mica_block::{ErrorKind, NewSidecar, read_exact};
use mica_rt::{Backend, Executor};
use mica_units::HostOffset;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use tempfile::TempDir;

mod redo;

fn folder_with_image() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().canonicalize().expect("a folder").join("top.qcow2");
    std::fs::write(&path, b"image").expect("a file");
    (folder, path)
}

fn options() -> ImageOptions {
    ImageOptions::new(Handles::new(8))
}

fn images(path: &Path) -> FileImages {
    FileImages::to_write(path, options(), MayWrite::new_file()).expect("images")
}

fn read_all(store: &dyn Store) -> Vec<u8> {
    let len = usize::try_from(store.len().unwrap()).unwrap();
    let executor = Executor::new(Backend::Auto).unwrap();
    executor.block_on(read_exact(store, HostOffset::ZERO, len)).unwrap().to_vec()
}

fn sidecar_content(images: &FileImages, path: &Path) -> Option<Vec<u8>> {
    images.sidecars().open(path).unwrap().map(|store| read_all(&*store))
}

fn write_sidecar(images: &FileImages, path: &Path, content: &[u8]) -> mica_block::Result<()> {
    let executor = Executor::new(Backend::Auto).unwrap();
    executor.block_on(images.sidecars().write_all(&[NewSidecar { path, content }]))
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn image_opens_with_its_bytes_and_its_identity() {
    let (_folder, path) = folder_with_image();
    let images = images(&path);
    let image = images.open(&path).unwrap();
    assert_eq!(read_all(&*image.store), b"image");
    let metadata = std::fs::metadata(&path).unwrap();
    let identity = image.identity;
    assert_eq!(identity, images.identify(&path).unwrap());
    assert_eq!((identity.device, identity.inode), (metadata.dev(), metadata.ino()));
    assert_eq!(identity.len, 5);
    assert!(identity.mtime_ns <= images.now_ns() + 1_000_000_000);
    assert!(images.now_ns() - identity.mtime_ns < 60_000_000_000);
}

#[test]
fn image_opens_past_the_page_cache() {
    let (_folder, path) = folder_with_image();
    let options = ImageOptions { cache: CacheMode::None, ..options() };
    let image = FileImages::new(&path, options).unwrap().open(&path).unwrap();
    assert_eq!(read_all(&*image.store), b"image");
}

#[test]
fn fault_that_was_asked_for_happens_to_images_and_not_to_sidecars() {
    let (_folder, path) = folder_with_image();
    let options = ImageOptions { faults: vec!["error=every:1".parse().unwrap()], ..options() };
    let images = FileImages::new(&path, options).unwrap();
    write_sidecar(&images, &path, b"index").unwrap();
    assert_eq!(sidecar_content(&images, &path).unwrap(), b"index");
    let image = images.open(&path).unwrap();
    let executor = Executor::new(Backend::Auto).unwrap();
    let error = executor.block_on(read_exact(&*image.store, HostOffset::ZERO, 5)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
}

#[test]
fn sidecar_is_written_beside_the_layer_whole_and_can_be_removed() {
    let (folder, path) = folder_with_image();
    let images = images(&path);
    assert!(images.sidecars().open(&path).unwrap().is_none());
    images.sidecars().remove(&path).unwrap();
    for content in [b"first".as_slice(), b"the second"] {
        write_sidecar(&images, &path, content).unwrap();
        assert_eq!(sidecar_content(&images, &path).unwrap(), content);
        assert_eq!(names_in(folder.path()), ["top.qcow2", "top.qcow2.mica-index"]);
    }
    images.sidecars().remove(&path).unwrap();
    assert_eq!(names_in(folder.path()), ["top.qcow2"]);
}

#[test]
fn of_many_sidecars_those_that_can_be_written_are_and_nothing_else_is_left() {
    let (folder, path) = folder_with_image();
    let images = images(&path);
    let layers: Vec<_> = (0..40).map(|number| path.with_file_name(format!("{number}"))).collect();
    for layer in &layers[..36] {
        std::fs::write(layer, b"image").unwrap();
    }
    let contents: Vec<_> = (0..40_u8).map(|number| [number; 100]).collect();
    let new: Vec<_> = layers.iter().zip(&contents).collect();
    let new: Vec<_> =
        new.iter().map(|(path, content)| NewSidecar { path, content: *content }).collect();
    let executor = Executor::new(Backend::Auto).unwrap();
    let error = executor.block_on(images.sidecars().write_all(&new)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    for (layer, content) in layers.iter().zip(&contents).take(36) {
        assert_eq!(sidecar_content(&images, layer).as_deref(), Some(&content[..]));
    }
    let is_expected = |name: &String| !name.ends_with(".tmp");
    assert!(names_in(folder.path()).iter().all(is_expected));
}

/// Only files of exactly such names that nobody has locked: another process may be writing those.
#[test]
fn what_a_killed_build_left_is_removed_by_a_later_one() {
    let (folder, path) = folder_with_image();
    let names = [
        ".mica-index-12-0.tmp",
        ".mica-index-4194304-15.tmp",
        ".mica-index-12-1.tmp",
        ".mica-index-12.tmp",
        ".mica-index-12-1-2.tmp",
        ".mica-index-12-x.tmp",
        "other.tmp",
    ];
    let mut alive = Vec::new();
    for name in names {
        let file = std::fs::File::create(folder.path().join(name)).unwrap();
        if name == ".mica-index-12-1.tmp" {
            file.lock().unwrap();
            alive.push(file);
        }
    }
    symlink("other.tmp", folder.path().join(".mica-index-12-3.tmp")).unwrap();
    write_sidecar(&images(&path), &path, b"index").unwrap();
    let left = [
        ".mica-index-12-1-2.tmp",
        ".mica-index-12-1.tmp",
        ".mica-index-12-3.tmp",
        ".mica-index-12-x.tmp",
        ".mica-index-12.tmp",
        "other.tmp",
        "top.qcow2",
        "top.qcow2.mica-index",
    ];
    assert_eq!(names_in(folder.path()), left);
}

#[test]
fn layers_of_a_chain_that_is_open_are_not_kept_in_mind_for_their_sidecars() {
    let (_folder, path) = folder_with_image();
    let images = images(&path);
    images.open(&path).unwrap();
    assert_eq!(images.sidecars.noted_count(), 1);
    images.sidecars().chain_is_open();
    assert_eq!(images.sidecars.noted_count(), 0);
}

#[test]
fn sidecar_is_as_private_as_its_layer() {
    let (folder, path) = folder_with_image();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    write_sidecar(&images(&path), &path, b"index").unwrap();
    let sidecar = folder.path().join("top.qcow2.mica-index");
    assert_eq!(std::fs::metadata(sidecar).unwrap().mode() & 0o777, 0o600);
}

#[test]
fn sidecar_lies_beside_the_file_that_a_link_names() {
    let (folder, path) = folder_with_image();
    let pool = folder.path().join("pool");
    std::fs::create_dir(&pool).unwrap();
    std::fs::rename(&path, pool.join("real")).unwrap();
    symlink(pool.join("real"), &path).unwrap();
    let images = images(&path);
    write_sidecar(&images, &path, b"index").unwrap();
    assert_eq!(names_in(&pool), ["real", "real.mica-index"]);
    assert_eq!(sidecar_content(&images, &path).unwrap(), b"index");
}

/// A link in the place of a sidecar must not make us write, or believe, what it names.
#[test]
fn link_in_the_place_of_a_sidecar_is_neither_followed_nor_read() {
    let (folder, path) = folder_with_image();
    let victim = folder.path().join("victim");
    std::fs::write(&victim, b"precious").unwrap();
    let sidecar = folder.path().join("top.qcow2.mica-index");
    symlink(&victim, &sidecar).unwrap();
    let images = images(&path);
    assert!(images.sidecars().open(&path).unwrap().is_none());
    write_sidecar(&images, &path, b"index").unwrap();
    assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
    assert!(std::fs::symlink_metadata(&sidecar).unwrap().is_file());
    std::fs::remove_file(&sidecar).unwrap();
    symlink(&victim, &sidecar).unwrap();
    images.sidecars().remove(&path).unwrap();
    assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
    assert!(std::fs::symlink_metadata(&sidecar).is_err());
}

#[test]
fn sidecar_that_is_not_a_plain_file_is_ignored() {
    let (folder, path) = folder_with_image();
    let sidecar = folder.path().join("top.qcow2.mica-index");
    let images = images(&path);
    std::fs::create_dir(&sidecar).unwrap();
    assert!(images.sidecars().open(&path).unwrap().is_none());
    assert!(write_sidecar(&images, &path, b"index").is_err());
    assert_eq!(names_in(folder.path()), ["top.qcow2", "top.qcow2.mica-index"]);
    std::fs::remove_dir(&sidecar).unwrap();
    let made = std::process::Command::new("mkfifo").arg(&sidecar).status().unwrap();
    assert!(made.success());
    assert!(images.sidecars().open(&path).unwrap().is_none());
}

#[test]
fn sidecar_that_anyone_could_have_written_is_ignored() {
    let (folder, path) = folder_with_image();
    let images = images(&path);
    write_sidecar(&images, &path, b"index").unwrap();
    let sidecar = folder.path().join("top.qcow2.mica-index");
    std::fs::set_permissions(&sidecar, std::fs::Permissions::from_mode(0o666)).unwrap();
    assert!(images.sidecars().open(&path).unwrap().is_none());
}

#[test]
fn sidecar_of_another_owner_is_ignored() {
    let (folder, path) = folder_with_image();
    let images = images(&path);
    write_sidecar(&images, &path, b"index").unwrap();
    let sidecar = folder.path().join("top.qcow2.mica-index");
    if std::os::unix::fs::chown(&sidecar, Some(12_345), None).is_err() {
        eprintln!("skipped: only root gives files away");
        return;
    }
    assert!(images.sidecars().open(&path).unwrap().is_none());
    std::os::unix::fs::chown(&path, Some(12_345), None).unwrap();
    assert!(images.sidecars().open(&path).unwrap().is_some());
}

#[test]
fn index_dir_keeps_what_is_written_and_layers_keep_theirs() {
    let (folder, path) = folder_with_image();
    let elsewhere = tempfile::tempdir().unwrap();
    let directory = elsewhere.path().join("made/on/demand");
    write_sidecar(&images(&path), &path, b"beside").unwrap();
    let place = SidecarPlace::Directory(directory.clone());
    let images = FileImages::new(&path, ImageOptions { sidecars: place, ..options() }).unwrap();

    assert_eq!(sidecar_content(&images, &path).unwrap(), b"beside");
    write_sidecar(&images, &path, b"elsewhere").unwrap();
    assert_eq!(sidecar_content(&images, &path).unwrap(), b"elsewhere");
    let names = names_in(&directory);
    assert_eq!(names.len(), 1);
    assert!(names[0].ends_with("-top.qcow2.mica-index"), "{names:?}");

    images.sidecars().remove(&path).unwrap();
    assert!(images.sidecars().open(&path).unwrap().is_none());
    assert_eq!(names_in(folder.path()), ["top.qcow2"]);
}

#[test]
fn layers_of_one_name_have_sidecars_of_their_own_in_an_index_dir() {
    let (folder, path) = folder_with_image();
    let below = path.parent().unwrap().join("below");
    std::fs::create_dir(&below).unwrap();
    let twin = below.join("top.qcow2");
    std::fs::write(&twin, b"twin").unwrap();
    let place = SidecarPlace::Directory(folder.path().join("index"));
    let images = FileImages::new(&path, ImageOptions { sidecars: place, ..options() }).unwrap();
    write_sidecar(&images, &path, b"one").unwrap();
    write_sidecar(&images, &twin, b"two").unwrap();
    assert_eq!(sidecar_content(&images, &path).unwrap(), b"one");
    assert_eq!(sidecar_content(&images, &twin).unwrap(), b"two");
}

#[test]
fn layer_with_the_longest_name_works_without_a_sidecar_beside_it() {
    let (folder, path) = folder_with_image();
    let long = path.parent().unwrap().join("n".repeat(255));
    std::fs::write(&long, b"long").unwrap();
    let images = images(&path);
    assert!(images.sidecars().open(&long).unwrap().is_none());
    assert!(write_sidecar(&images, &long, b"index").is_err());
    images.sidecars().remove(&long).unwrap();
    let place = SidecarPlace::Directory(folder.path().join("index"));
    let images = FileImages::new(&path, ImageOptions { sidecars: place, ..options() }).unwrap();
    write_sidecar(&images, &long, b"index").unwrap();
    assert_eq!(sidecar_content(&images, &long).unwrap(), b"index");
}

#[test]
fn sidecars_of_layers_elsewhere_are_as_closed_as_the_layers() {
    let (_folder, path) = folder_with_image();
    let (_other, other_path) = folder_with_image();
    let images = images(&path);
    for error in [
        images.sidecars().open(&other_path).err(),
        write_sidecar(&images, &other_path, b"x").err(),
        images.sidecars().remove(&other_path).err(),
        images.identify(&other_path).err(),
    ] {
        assert_eq!(error.unwrap().kind(), ErrorKind::Denied);
    }
}

fn denied<T>(result: Result<T>) -> String {
    let error = result.err().expect("an error");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    error.to_string()
}

#[test]
fn image_is_opened_for_writing_once_and_its_bytes_change() {
    let (_folder, path) = folder_with_image();
    let ours = images(&path);
    let image = ours.open_writable(&path).unwrap();
    assert_eq!(image.identity, ours.identify(&path).unwrap());
    let executor = Executor::new(Backend::Auto).unwrap();
    let buf = mica_rt::Buf::from_slice(b"IM");
    executor.block_on(mica_block::write_all(&*image.store, buf, HostOffset::ZERO)).unwrap();
    executor.block_on(image.store.sync()).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"IMage");
    assert!(denied(ours.open_writable(&path)).contains("for writing"));
    let theirs = images(&path);
    assert!(denied(theirs.open(&path)).contains("for writing"));
    // The same chain may look at it again, to find that it is its own base.
    assert_eq!(read_all(&*ours.open(&path).unwrap().store), b"IMage");
    drop(image);
    let reader = theirs.open(&path).unwrap();
    assert!(denied(ours.open_writable(&path)).contains("allows nobody to write it"));
    ours.open(&path).unwrap();
    drop(reader);
    ours.open_writable(&path).unwrap();
}

/// The story: a process that had found the image, and was about to lock it, wrote to the state that
/// another one kept of it just then: that has the mark beside its own name.
#[test]
fn state_that_was_kept_while_its_disk_was_opened_is_not_written() {
    let (folder, path) = folder_with_image();
    let ours = images(&path);
    // It is found here.
    ours.resolve(&folder.path().join("above"), &path).unwrap();
    let keeping = crate::keep::Keeping::new(&path, "state").unwrap();
    std::fs::write(keeping.overlay(), b"overlay").unwrap();
    keeping.link().unwrap();
    let executor = Executor::new(Backend::Auto).unwrap();
    executor.block_on(async { mica_block::Renaming::rename(&keeping).await }).unwrap();
    let said = ours.open_writable(&path).err().expect("it is another file by now");
    assert!(mica_block::lock_patience(&said).is_some(), "{said}");
    assert_eq!(read_all(&*ours.open_writable(&path).unwrap().store), b"overlay");
}

/// The story: a snapshot looked at the header of the image that it was about to freeze, between two
/// writes of a guest that made the file longer, and was refused.
#[test]
fn image_that_is_glanced_at_may_get_longer() {
    let (_folder, path) = folder_with_image();
    let images = images(&path);
    let (_, store) = images.glance(&path).unwrap();
    let _other = images.glance(&path).unwrap();
    std::fs::write(&path, b"image that grows").unwrap();
    assert_eq!(read_all(&store), b"image that grows");
    let (_, again) = images.glance(&path).unwrap();
    assert_eq!(read_all(&again), b"image that grows");
}

#[test]
fn locks_are_those_that_were_asked_for() {
    let (_folder, path) = folder_with_image();
    let with = |locking| {
        let options = ImageOptions { locking, ..options() };
        FileImages::to_write(&path, options, MayWrite::new_file()).unwrap()
    };
    let _writer = with(Locking::On).open_writable(&path).unwrap();
    denied(with(Locking::On).open(&path));
    with(Locking::ForceShare).open(&path).unwrap();
    with(Locking::Off).open(&path).unwrap();
    denied(with(Locking::ForceShare).open_writable(&path));
    with(Locking::Off).open_writable(&path).unwrap();
}

#[test]
fn file_that_may_not_be_written_is_refused() {
    let (_folder, path) = folder_with_image();
    let outside = tempfile::NamedTempFile::new().unwrap();
    let ours = images(&path);
    assert!(denied(ours.open_writable(outside.path())).contains("--allow-path"));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o400)).unwrap();
    if std::fs::File::options().write(true).open(&path).is_ok() {
        eprintln!("skipped: root may write every file");
        return;
    }
    assert!(denied(ours.open_writable(&path)).contains("for writing"));
}

#[test]
fn fault_happens_to_writes_of_images() {
    let (_folder, path) = folder_with_image();
    let faults = vec!["error=nth:2,op=write+sync,errno=ENOSPC".parse().unwrap()];
    let options = ImageOptions { faults, ..options() };
    let images = FileImages::to_write(&path, options, MayWrite::new_file()).unwrap();
    let store = images.open_writable(&path).unwrap().store;
    let executor = Executor::new(Backend::Auto).unwrap();
    executor.block_on(store.sync()).unwrap();
    let (result, _) = executor.block_on(async {
        store.write_at(mica_rt::Buf::from_slice(b"IM"), HostOffset::ZERO).await
    });
    assert_eq!(result.unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(std::fs::read(&path).unwrap(), b"image");
}
