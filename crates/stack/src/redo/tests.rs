use super::*;

fn identity(inode: u64) -> Identity {
    Identity { device: 7, inode, len: 0, mtime_ns: 0, ctime_ns: 0 }
}

#[test]
fn file_is_there_from_the_first_write_on_and_is_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = RedoPlace::Directory(folder.path().to_owned());
    let count = || {
        let folders = std::fs::read_dir(folder.path()).expect("it is there");
        let folders = folders.map(|folder| folder.expect("read").path());
        folders.map(|folder| std::fs::read_dir(folder).expect("a folder").count()).sum::<usize>()
    };
    let one = RedoFile::new(&place, identity(1)).expect("there is a place");
    let mut bytes = [1; 4];
    one.read_at(10, &mut bytes).expect("reads");
    assert_eq!((bytes, count()), ([0; 4], 0));
    one.write_at(12, b"ab").expect_err("there is no file yet");
    let origin = one.renew().expect("made");
    one.write_at(12, b"ab").expect("writes");
    let again = RedoFile::new(&place, identity(1)).expect("there is a place");
    drop(one);
    assert_eq!(again.origin().expect("it is there"), origin);
    again.read_at(10, &mut bytes).expect("reads");
    assert_eq!(bytes, *b"\0\0ab");
    let other = RedoFile::new(&place, identity(2)).expect("there is a place");
    other.read_at(10, &mut bytes).expect("reads");
    assert_eq!(bytes, [0; 4]);
    again.remove();
    assert_eq!(count(), 0);
    assert!(RedoFile::new(&RedoPlace::Nowhere, identity(1)).is_none());
}

#[test]
fn log_of_limited_memory_is_found_only_with_the_same_limit() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = RedoPlace::Directory(folder.path().to_owned());
    let limited = place.clone().limited(CAPACITY_MIN);
    let small = RedoFile::new(&limited, identity(1)).expect("there is a place");
    small.renew().expect("made");
    small.write_at(12, b"ab").expect("writes");
    let usual = RedoFile::new(&place, identity(1)).expect("there is a place");
    assert_eq!([small.capacity(), usual.capacity()], [CAPACITY_MIN, CAPACITY]);
    assert_eq!(usual.origin().expect("none").memory, 0);
    drop(small);
    let found = RedoFile::orphaned(&limited, identity(1), own_user()).expect("read");
    let mut bytes = [0; 2];
    found[0].read_at(12, &mut bytes).expect("reads");
    assert_eq!(bytes, *b"ab");
}

fn write(file: &RedoFile, content: &[u8]) {
    file.renew().expect("made");
    file.write_at(0, content).expect("writes");
}

#[test]
fn origin_is_that_of_this_file_and_not_of_a_copy() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = RedoPlace::Directory(folder.path().to_owned());
    let make = || RedoFile::new(&place, identity(1)).expect("there is a place");
    let one = make();
    let origin = one.renew().expect("made");
    one.write_at(0, b"log").expect("writes");
    drop(one);
    let away = folder.path().join("away");
    std::fs::rename(make().path(), &away).expect("moved");
    std::fs::rename(&away, make().path()).expect("moved back");
    assert_eq!(make().origin().expect("it is there"), origin);
    std::fs::copy(make().path(), &away).expect("copied");
    std::fs::rename(&away, make().path()).expect("put in its place");
    let there = make().origin().expect("it is there");
    assert_ne!(there, origin);
    assert_ne!(make().renew().expect("made"), there);
}

#[test]
fn log_is_since_what_was_there_before_it_was_written() {
    use std::time::Duration;
    let folder = tempfile::tempdir().expect("a folder");
    let place = RedoPlace::Directory(folder.path().to_owned());
    let one = RedoFile::new(&place, identity(1)).expect("there is a place");
    assert!(!one.is_since(SystemTime::UNIX_EPOCH), "it is not there");
    write(&one, b"log");
    let written = one.path().metadata().and_then(|found| found.modified()).expect("written");
    assert!(one.is_since(written) && one.is_since(SystemTime::UNIX_EPOCH));
    assert!(!one.is_since(written + Duration::from_secs(1)));
}

#[test]
fn search_in_another_place_finds_where_the_file_is() {
    let folder = || tempfile::tempdir().expect("a folder");
    let (usual, other) = (folder(), folder());
    let place = |folder: &tempfile::TempDir| RedoPlace::Directory(folder.path().into());
    let usual_folder = folder::path_of(usual.path(), own_user());
    let elsewhere = |place| RedoFile::elsewhere_than(&place, &usual_folder, identity(1));
    let mut file = RedoFile::new(&place(&other), identity(1)).expect("there is a place");
    file.usual = Some(usual_folder.clone());
    assert_eq!(elsewhere(place(&usual)), None);
    write(&file, b"a");
    assert_eq!(elsewhere(place(&usual)), Some(file.path()));
    assert_eq!(elsewhere(RedoPlace::Nowhere), Some(file.path()));
    assert_eq!(elsewhere(place(&other)), None, "it is there");
    file.remove();
    assert_eq!(elsewhere(place(&usual)), None);
    let there = RedoFile::new(&place(&usual), identity(1)).expect("there is a place");
    write(&there, b"a");
    assert_eq!(elsewhere(place(&other)), Some(there.path()));
    assert_eq!(elsewhere(RedoPlace::Nowhere), Some(there.path()));
    there.remove();
    let limited = place(&other).limited(CAPACITY_MIN);
    let mut small = RedoFile::new(&limited, identity(1)).expect("there is a place");
    small.usual = Some(usual_folder.clone());
    write(&small, b"a");
    assert_eq!(elsewhere(place(&usual)), Some(small.path()), "of another capacity");
}

#[test]
fn file_of_another_is_not_believed() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = tempfile::tempdir().expect("a folder");
    let place = RedoPlace::Directory(folder.path().to_owned());
    let one = RedoFile::new(&place, identity(1)).expect("there is a place");
    folder::redo_folder(folder.path()).expect("made");
    std::fs::write(one.path(), b"mine").expect("writes");
    let open_to_all = std::fs::Permissions::from_mode(0o666);
    std::fs::set_permissions(one.path(), open_to_all).expect("ours");
    let mut bytes = [1; 4];
    one.read_at(0, &mut bytes).expect("it is as if there were none");
    assert_eq!(bytes, [0; 4]);
    assert!(one.renew().is_err());
    std::fs::remove_file(one.path()).expect("ours");
    symlink(folder.path().join("elsewhere"), one.path()).expect("a link");
    one.read_at(0, &mut bytes).expect("it is as if there were none");
    assert!(bytes == [0; 4] && one.renew().is_err());
    assert!(!folder.path().join("elsewhere").exists());
}

#[test]
fn file_that_lost_its_name_is_noticed_and_made_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = RedoPlace::Directory(folder.path().to_owned());
    let one = RedoFile::new(&place, identity(1)).expect("there is a place");
    write(&one, b"head");
    std::fs::remove_file(one.path()).expect("it is there");
    one.write_at(0, b"head").expect_err("nobody would find it");
    write(&one, b"head");
    assert_eq!(std::fs::read(one.path()).expect("it is there"), b"head");
    std::fs::rename(one.path(), folder.path().join("away")).expect("it is there");
    one.write_at(0, b"head").expect_err("it is elsewhere now");
}

#[test]
fn only_the_file_that_is_locked_is_taken_away() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = RedoPlace::Directory(folder.path().to_owned());
    let one = RedoFile::new(&place, identity(1)).expect("there is a place");
    write(&one, b"first");
    std::fs::remove_file(one.path()).expect("it is there");
    let other = RedoFile::new(&place, identity(1)).expect("there is a place");
    write(&other, b"second");
    one.remove();
    assert_eq!(std::fs::read(one.path()).expect("it is there"), b"second");
    one.remove();
    assert_eq!(std::fs::read(one.path()).expect("its writer lives"), b"second");
    assert_eq!(one.set_aside(), None);
    other.remove();
    assert!(!one.path().exists());
}

#[test]
fn log_that_is_set_aside_is_kept_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = RedoPlace::Directory(folder.path().to_owned());
    let one = RedoFile::new(&place, identity(1)).expect("there is a place");
    assert_eq!(one.set_aside(), None, "there is none");
    for content in [b"first", b"other"] {
        write(&one, content);
        let kept = one.set_aside().expect("it is kept");
        assert_eq!(std::fs::read(&kept).expect("it is there"), content);
        assert!(!one.path().exists() && kept.to_string_lossy().ends_with(".lost"));
        let there = std::fs::read_dir(&one.folder).expect("a folder").count();
        assert_eq!(there, 1);
        let mut bytes = [1; 4];
        one.read_at(0, &mut bytes).expect("it is as if there were none");
        assert_eq!(bytes, [0; 4]);
    }
}

#[test]
fn file_of_another_user_is_reported_if_the_image_is_theirs() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = RedoPlace::Directory(folder.path().to_owned());
    let user = rustix::process::geteuid().as_raw();
    let their_folder = folder::path_of(folder.path(), user.wrapping_add(1));
    let theirs = their_folder.join(name_of(identity(1)));
    std::fs::create_dir(&their_folder).expect("made");
    std::fs::write(&theirs, b"log").expect("writes");
    // It claims to be another's, and is not: somebody put it there.
    assert_eq!(RedoFile::of_another(&place, identity(1), user.wrapping_add(1)), None);
    if user == 0 {
        std::os::unix::fs::chown(&theirs, Some(1), None).expect("root may");
        assert_eq!(RedoFile::of_another(&place, identity(1), 1), None, "not their folder");
        std::os::unix::fs::chown(&their_folder, Some(1), None).expect("root may");
        assert_eq!(RedoFile::of_another(&place, identity(1), 1), Some(theirs));
        assert_eq!(RedoFile::of_another(&place, identity(1), 2), None);
    }
}
