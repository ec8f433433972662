//! The files that a store in a directory makes, and what it makes of others'.

use super::new::FOLDER as TMP;
use super::*;
use crate::object::testing::conform;
use mica_block::{ErrorKind, Put};
use mica_rt::{Backend, Executor, Part, join_all};
use rustix::fs::{Timespec, Timestamps, UTIME_OMIT};
use rustix::io::Errno;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;

struct Place {
    folder: tempfile::TempDir,
    handles: Arc<Handles>,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("made");
        Self { folder, handles: Handles::new(8) }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn open(&self) -> DirectoryObjects {
        DirectoryObjects::open(self.folder.path(), &self.handles).expect("opened")
    }

    /// Without the space in reserve.
    fn new_files(&self) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(self.at(TMP)) else { return Vec::new() };
        let paths = entries.map(|entry| entry.expect("listed").path());
        paths.filter(|path| *path != self.reserve()).collect()
    }

    fn reserve(&self) -> PathBuf {
        self.at(TMP).join(super::reserve::NAME)
    }
}

fn name(text: &str) -> ObjectName {
    ObjectName::new(text).expect("a name")
}

fn run<T>(future: impl Future<Output = T>) -> T {
    Executor::new(Backend::Pool).expect("threads").block_on(future)
}

async fn put(objects: &DirectoryObjects, text: &str, bytes: &[u8]) -> Result<Put> {
    objects.put_if_absent(&name(text), Buf::from_slice(bytes)).await.0
}

async fn read(objects: &DirectoryObjects, text: &str) -> Result<Vec<u8>> {
    let (end, buf) = objects.open(&name(text)).read_end(Buf::new(100)).await;
    end.map(|len| buf[..usize::try_from(len).expect("short")].to_vec())
}

#[test]
fn directory_keeps_the_promises_of_a_store() {
    for backend in [Backend::Uring, Backend::Pool] {
        if let Err(error) = Executor::new(backend) {
            eprintln!("skipped on {backend:?}: {error}");
            continue;
        }
        let place = Place::new();
        conform(backend, &(Arc::new(place.open()) as _));
        assert!(place.new_files().is_empty(), "{:?}", place.new_files());
        run(crate::object::probe(&place.open(), 1)).expect("it passes the probe");
        assert!(place.handles.open_count() <= 8);
    }
}

/// The story: each store had an empty folder of probes for good, and one in it for each of them.
#[test]
fn probes_leave_no_folders_also_beside_each_other() {
    let place = Place::new();
    std::thread::scope(|scope| {
        for probe in 0..4 {
            let place = &place;
            scope.spawn(move || {
                for round in 0..8 {
                    let probed = run(crate::object::probe(&place.open(), probe * 100 + round));
                    probed.expect("the store keeps its promises");
                }
            });
        }
    });
    assert!(!place.at(mica_block::PROBE_FOLDER).exists());
    run(async {
        let objects = place.open();
        put(&objects, "a/b", b"here").await.expect("put");
        objects.delete(&name("a/b")).await.expect("deleted");
    });
    assert!(place.at("a").exists(), "somebody may be about to put something there");
}

#[test]
fn object_of_parts_has_them_one_after_the_other() {
    let place = Place::new();
    run(async {
        let objects = place.open();
        // Longer than what is written at once, in pieces that do not end where that does.
        let bytes = (0..3_000_000_u32).map(|at| (at / 7).to_le_bytes()[0]).collect::<Vec<_>>();
        let (buf, mut content) = (Arc::new(Buf::from_slice(&bytes)), Parts::default());
        for start in (0..bytes.len()).step_by(100_000).rev() {
            content.push(Part::new(Arc::clone(&buf), start..start + 100_000));
        }
        let (content, object) = (Arc::new(content), name("v/e/0"));
        let put = objects.put_parts(&object, &content).expect("it takes parts");
        assert_eq!(put.await.expect("put"), Put::Done);
        let there = fs::read(place.at("v/e/0")).expect("read");
        let wanted = bytes.chunks(100_000).rev().flatten().copied().collect::<Vec<_>>();
        assert!(there == wanted, "other bytes");
        let again = objects.put_parts(&object, &content).expect("it takes parts");
        assert_eq!(again.await.expect("put"), Put::Exists);
        assert!(place.new_files().is_empty(), "{:?}", place.new_files());
    });
}

/// The story: a clone made its first head durable by itself, and then the second beside it.
#[test]
fn early_object_is_seen_at_once_and_durable_with_the_next_of_its_folder() {
    let place = Place::new();
    run(async {
        let objects = place.open();
        let early = async |text: &str| {
            objects.put_early(&name(text), Buf::from_slice(b"early")).await.0.expect("put")
        };
        let names = |text: &str| fs::metadata(place.at(text)).expect("there").nlink();
        assert_eq!(early("v/c/0").await, Put::Done);
        assert!(!objects.root.knows_durable("v/c"));
        assert_eq!(early("v/c/0").await, Put::Exists);
        assert!(objects.root.knows_durable("v/c"), "so that this is true after a power cut");
        assert_eq!(read(&objects, "v/c/0").await.expect("seen"), b"early");
        assert_eq!(early("v/d/0").await, Put::Done);
        put(&objects, "v/e/0", b"elsewhere").await.expect("put");
        assert_eq!((names("v/d/0"), place.new_files().len()), (2, 2), "whoever finds it syncs");
        put(&objects, "v/d/1", b"next").await.expect("put");
        assert_eq!((names("v/d/0"), names("v/d/1")), (1, 1));
        put(&objects, "v/c/1", b"next").await.expect("put");
        assert_eq!((names("v/c/0"), place.new_files().len()), (1, 0));
        // More than are left to others.
        for number in 0..10 {
            early(&format!("f{number}/0")).await;
        }
        assert_eq!((names("f0/0"), names("f9/0")), (2, 1));
    });
}

#[test]
fn long_object_is_as_long_as_what_was_put() {
    let place = Place::new();
    run(async {
        let content: Vec<u8> = (0..(3 << 20) + 77_u32)
            .map(|at| u8::try_from(at / 4096 % 251).expect("small"))
            .collect();
        put(&place.open(), "long", &content).await.expect("put");
        assert!(fs::read(place.at("long")).expect("there") == content);
    });
}

#[test]
fn folder_of_an_object_with_one_name_needs_no_sync() {
    let place = Place::new();
    run(async {
        put(&place.open(), "v/web/0", b"head").await.expect("put");
        let objects = place.open();
        assert!(!objects.root.knows_durable("v"));
        read(&objects, "v/web/0").await.expect("there");
        assert!(objects.root.knows_durable("v") && objects.root.knows_durable("v/web"));
        // Nobody knows what became of one with two.
        fs::create_dir(place.at("w")).expect("made");
        fs::write(place.at("w/0"), "head").expect("written");
        fs::hard_link(place.at("w/0"), place.at(TMP).join("0".repeat(32))).expect("linked");
        let objects = place.open();
        read(&objects, "w/0").await.expect("there");
        assert!(objects.root.knows_durable("w"), "it was synced");
    });
}

#[test]
fn object_is_a_file_of_its_name_for_its_owner_alone() {
    let place = Place::new();
    run(async {
        let objects = place.open();
        assert!(objects.name().starts_with("file:///"));
        assert_eq!(put(&objects, "a/b-1/c.x", b"bytes").await.expect("put"), Put::Done);
        let path = place.at("a/b-1/c.x");
        assert_eq!(fs::read(&path).expect("there"), b"bytes");
        let facts = fs::metadata(&path).expect("there");
        assert_eq!((facts.permissions().mode() & 0o777, facts.nlink()), (0o600, 1));
        assert!(place.new_files().is_empty());
        // Another process sees the same.
        assert_eq!(read(&place.open(), "a/b-1/c.x").await.expect("read"), b"bytes");
    });
}

#[test]
fn directory_that_is_not_there_is_not_made() {
    let place = Place::new();
    let missing = DirectoryObjects::open(&place.at("missing"), &place.handles);
    assert_eq!(missing.err().expect("an error").kind(), ErrorKind::NotFound);
    fs::write(place.at("file"), "").expect("written");
    assert!(DirectoryObjects::open(&place.at("file"), &place.handles).is_err());
}

#[test]
fn many_objects_are_read_through_few_descriptors() {
    let place = Place::new();
    run(async {
        let objects = place.open();
        let names: Vec<_> = (0..40).map(|number| format!("o/{number}")).collect();
        for name in &names {
            put(&objects, name, name.as_bytes()).await.expect("put");
        }
        let opened: Vec<_> = names.iter().map(|text| objects.open(&name(text))).collect();
        for _ in 0..3 {
            let reads = opened.iter().map(|object| object.read_at(Buf::new(4), 0));
            for (name, (read, buf)) in names.iter().zip(join_all(reads).await) {
                read.expect("read");
                assert_eq!(&buf[..name.len()], name.as_bytes());
            }
            assert!(place.handles.open_count() <= place.handles.bound());
        }
    });
}

#[test]
fn symbolic_links_and_other_files_are_no_objects_and_no_folders() {
    let (place, outside) = (Place::new(), tempfile::tempdir().expect("made"));
    fs::write(outside.path().join("secret"), "secret").expect("written");
    symlink(outside.path(), place.at("folder")).expect("linked");
    symlink(outside.path().join("secret"), place.at("link")).expect("linked");
    symlink(outside.path().join("new"), place.at("dangling")).expect("linked");
    fs::create_dir(place.at("directory")).expect("made");
    run(async {
        let objects = place.open();
        for bad in ["folder/secret", "link", "dangling", "directory", "link/x"] {
            let error = read(&objects, bad).await.expect_err(bad);
            assert_eq!(error.kind(), ErrorKind::Invalid, "{bad}: {error:?}");
            let error = put(&objects, bad, b"x").await.expect_err(bad);
            assert_eq!(error.kind(), ErrorKind::Invalid, "{bad}: {error:?}");
            let error = objects.delete(&name(bad)).await.expect_err(bad);
            assert_eq!(error.kind(), ErrorKind::Invalid, "{bad}: {error:?}");
        }
        let error = objects.list(None, None).await.expect_err("links are there");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(objects.list(Some(&name("folder")), None).await.is_err());
    });
    assert_eq!(fs::read_dir(outside.path()).expect("there").count(), 1);
    assert_eq!(fs::read(outside.path().join("secret")).expect("there"), b"secret");
}

#[test]
fn names_that_no_object_has_are_not_listed() {
    let place = Place::new();
    run(async {
        let objects = place.open();
        put(&objects, "good", b"").await.expect("put");
        for other in ["lost+found", ".hidden", "Upper"] {
            fs::create_dir(place.at(other)).expect("made");
            fs::write(place.at(other).join("a"), "").expect("written");
        }
        fs::create_dir_all(place.at("empty/in/it")).expect("made");
        fs::write(place.at("empty/in/.a"), "").expect("written");
        let listed = objects.list(None, None).await.expect("listed");
        assert_eq!(listed, [Entry::Object { name: name("good"), len: 0 }]);
    });
}

#[test]
fn object_of_a_killed_process_is_there_and_its_second_name_stays_for_a_while() {
    let place = Place::new();
    run(async {
        let objects = place.open();
        put(&objects, "first", b"").await.expect("put");
        // Killed between the link and the sync.
        let new = place.at(TMP).join("0123456789abcdef0123456789abcdef");
        fs::write(&new, "bytes").expect("written");
        fs::create_dir(place.at("folder")).expect("made");
        fs::hard_link(&new, place.at("folder/object")).expect("linked");
        assert_eq!(put(&objects, "folder/object", b"other").await.expect("put"), Put::Exists);
        assert_eq!(read(&objects, "folder/object").await.expect("read"), b"bytes");
        assert_eq!(objects.list(Some(&name("folder")), None).await.expect("listed").len(), 1);
        assert_eq!(place.new_files(), [new]);
    });
}

#[test]
fn new_files_of_killed_processes_are_removed_later_and_nothing_else_is() {
    let place = Place::new();
    let old = |path: &PathBuf| {
        let time = Timespec { tv_sec: 1_000_000, tv_nsec: 0 };
        let keep = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        let times = Timestamps { last_access: keep, last_modification: time };
        let flags = rustix::fs::AtFlags::empty();
        rustix::fs::utimensat(rustix::fs::CWD, path, &times, flags).expect("set");
    };
    let file = |name: &str| {
        let path = place.at(TMP).join(name);
        fs::write(&path, "left").expect("written");
        path
    };
    fs::create_dir(place.at(TMP)).expect("made");
    let (abandoned, linked) = (file(&"a".repeat(32)), file(&"b".repeat(32)));
    let (young, other) = (file(&"c".repeat(32)), file("some-other-file"));
    fs::hard_link(&linked, place.at("object")).expect("linked");
    for path in [&abandoned, &linked, &other] {
        old(path);
    }
    run(async {
        let objects = place.open();
        put(&objects, "new", b"").await.expect("put");
        let mut left = place.new_files();
        left.sort();
        assert_eq!(left, [young.clone(), other]);
        assert_eq!(read(&objects, "object").await.expect("read"), b"left");
        // Not again until an hour later.
        old(&young);
        put(&objects, "newer", b"").await.expect("put");
        assert!(young.exists());
        put(&place.open(), "newest", b"").await.expect("put");
        assert!(!young.exists(), "another process begins with it");
    });
}

/// The story: servers were killed and started again, and their store got no space back for an hour
/// whatever was collected: objects that were deleted had their second names.
#[test]
fn object_of_a_killed_process_takes_no_space_once_it_is_deleted_or_has_holes() {
    let place = Place::new();
    run(async {
        let objects = place.open();
        put(&objects, "first", b"").await.expect("put");
        for (number, name) in ["deleted", "punched"].into_iter().enumerate() {
            let new = place.at(TMP).join(format!("{number:032x}"));
            fs::write(&new, [7; 65_536]).expect("written");
            fs::hard_link(&new, place.at(name)).expect("linked");
        }
        assert_eq!(place.new_files().len(), 2);
        objects.delete(&name("deleted")).await.expect("deleted");
        assert_eq!(place.new_files().len(), 1);
        if objects.punch(&name("punched"), &[]).await.is_err() {
            return eprintln!("skipped: the file system makes no holes");
        }
        let range = 0..32_768;
        objects.punch(&name("punched"), std::slice::from_ref(&range)).await.expect("punched");
        assert!(place.new_files().is_empty());
        assert_ne!(fs::read(place.at("punched")).expect("read"), [7; 65_536]);
    });
}

#[test]
fn put_that_fails_leaves_nothing() {
    let place = Place::new();
    run(async {
        let objects = place.open();
        put(&objects, "file", b"").await.expect("put");
        assert!(put(&objects, "file/below", b"x").await.is_err());
        assert!(place.new_files().is_empty());
        assert_eq!(objects.list(None, None).await.expect("listed").len(), 1);
    });
}

/// The story: what was to be put on a file system that is read-only was tried for a quarter of a
/// minute, and dozens of lines said so.
#[test]
fn file_system_that_is_read_only_is_an_answer_and_no_outage() {
    let place = Place::new();
    let root = Root::open(place.folder.path(), &place.handles).expect("opened");
    let kind = |errno: Errno| root.failed("putting", "a", errno.into()).kind();
    assert_eq!(kind(Errno::ROFS), ErrorKind::Denied);
    assert_eq!(kind(Errno::IO), ErrorKind::Io);
}

#[test]
fn put_that_nobody_waits_for_ends_and_leaves_nothing_half_done() {
    let place = Place::new();
    let executor = Executor::new(Backend::Pool).expect("threads");
    executor.block_on(async {
        let objects = place.open();
        drop(objects.put_if_absent(&name("a/b"), Buf::zeroed(1 << 20)));
        let object = objects.open(&name("a/b"));
        loop {
            match object.read_end(Buf::new(0)).await.0 {
                Ok(len) => break assert_eq!(len, 1 << 20),
                Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound),
            }
        }
    });
    drop(executor);
    assert!(place.new_files().is_empty());
}

#[test]
fn object_that_is_deleted_can_still_be_read_by_those_who_have_read_it() {
    let place = Place::new();
    run(async {
        let objects = place.open();
        put(&objects, "a", b"bytes").await.expect("put");
        let object = objects.open(&name("a"));
        assert_eq!(object.read_end(Buf::new(5)).await.0.expect("read"), 5);
        objects.delete(&name("a")).await.expect("deleted");
        let (read_again, buf) = object.read_at(Buf::new(5), 0).await;
        read_again.expect("its file is open");
        assert_eq!(*buf, *b"bytes");
        assert_eq!(read(&objects, "a").await.unwrap_err().kind(), ErrorKind::NotFound);
    });
}

/// The story: a directory on a file system without holes was believed to make them, and each
/// collection failed. Of those that Linux always has, that of processes is such a one.
#[test]
fn file_system_that_makes_no_holes_is_asked() {
    run(async {
        let objects = DirectoryObjects::open(std::path::Path::new("/proc/self"), &Handles::new(8));
        let asked = objects.expect("opened").punch(&name("comm"), &[]).await;
        assert_eq!(asked.expect_err("it has none").kind(), ErrorKind::Unsupported);
        let place = Place::new();
        let objects = place.open();
        assert_eq!(objects.punch(&name("a"), &[]).await.expect("nothing is there"), 0);
        put(&objects, "a", &[7; 100]).await.expect("put");
        match objects.punch(&name("a"), &[]).await {
            Ok(freed) => assert_eq!(freed, 0),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}"),
        }
        assert_eq!(read(&objects, "a").await.expect("read"), [7; 100]);
    });
}

/// The story: a store was copied with `cp -al`, and a collection of the one made holes in both.
#[test]
fn object_that_has_another_name_keeps_all_that_it_has() {
    run(async {
        let place = Place::new();
        let objects = place.open();
        put(&objects, "a", &[7; 65_536]).await.expect("put");
        if objects.punch(&name("a"), &[]).await.is_err() {
            return eprintln!("skipped: the file system makes no holes");
        }
        fs::hard_link(place.at("a"), place.at("copy")).expect("linked");
        let range = 4096..32_768;
        let freed = objects.punch(&name("a"), std::slice::from_ref(&range)).await;
        assert_eq!(freed.expect("nothing is done"), 0);
        assert_eq!(fs::read(place.at("copy")).expect("read"), [7; 65_536]);
        fs::remove_file(place.at("copy")).expect("removed");
        objects.punch(&name("a"), std::slice::from_ref(&range)).await.expect("done");
        assert_ne!(fs::read(place.at("a")).expect("read"), [7; 65_536]);
    });
}

#[test]
fn store_has_space_in_reserve_until_that_is_given_up() {
    let place = Place::new();
    let objects = place.open();
    let has = || fs::metadata(place.reserve()).is_ok_and(|found| found.blocks() >= 512);
    run(async {
        assert!(!has());
        put(&objects, "a/0", &[1]).await.expect("put");
        if !has() {
            eprintln!("skipped: this file system sets no space aside");
            return;
        }
        assert_eq!(objects.list(None, None).await.expect("listed").len(), 1);
        // Another process has it, too.
        let other = place.open();
        put(&other, "a/1", &[1]).await.expect("put");
        assert!(other.give_up_reserve().await.expect("given up") && !has());
        assert!(!objects.give_up_reserve().await.expect("there is none"));
        put(&other, "a/2", &[1]).await.expect("put");
        assert!(!has(), "who gave it up may need the room still");
        other.delete(&name("a/2")).await.expect("deleted");
        assert!(has(), "there is room again");
        // A copy has it, too.
        fs::hard_link(place.reserve(), place.at("copy")).expect("linked");
        put(&place.open(), "a/2", &[1]).await.expect("put");
        let inode = |path: PathBuf| fs::metadata(path).expect("there").ino();
        assert!(has() && inode(place.reserve()) != inode(place.at("copy")));
        // What a killed process left of it.
        fs::write(place.reserve(), []).expect("shorter");
        put(&place.open(), "a/3", &[1]).await.expect("put");
        assert!(has());
    });
}
