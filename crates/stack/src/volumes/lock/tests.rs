use super::*;

fn run<T>(test: impl Future<Output = T>) -> T {
    mica_rt::Executor::new(mica_rt::Backend::Pool).expect("threads").block_on(test)
}

#[test]
fn note_is_read_as_it_was_written() {
    let machine = Machine { host: "web 1".to_owned(), id: Some("4cd0".to_owned()), boot: None };
    for writer in [
        Writer::default(),
        Writer { log: Some("/a b/log".into()), ..Writer::default() },
        Writer { log: None, is_import: true, machine: Some(machine.clone()) },
        Writer { log: Some("/log".into()), is_import: true, machine: Some(machine) },
    ] {
        let note = Note { process: Some(17), writer, passed: Some(".web.17.0".into()) };
        assert_eq!(Note::decode(&note.encode()), note);
    }
}

#[test]
fn note_of_an_older_version_and_no_note_are_understood() {
    let note = Note::decode(b"17\nlog /a/log\n");
    assert_eq!((note.process, note.writer.log), (Some(17), Some("/a/log".into())));
    assert_eq!(note.writer.machine, None);
    assert_eq!(Note::decode(b""), Note::default());
}

fn store() -> (tempfile::TempDir, VolumeName) {
    let folder = tempfile::tempdir().expect("a folder");
    (folder, VolumeName::new("web").expect("a name"))
}

/// The files of locks in the store at `directory`.
fn files(directory: &Path) -> Vec<OsString> {
    let entries = std::fs::read_dir(directory.join(FOLDER)).expect("listed");
    let names = entries.map(|entry| entry.expect("listed").file_name());
    names.filter(|name| name != GATE).collect()
}

/// The story: the file of a lock that was passed by was moved aside, and for an instant the
/// volume had no lock.
#[test]
fn lock_that_is_passed_by_has_a_file_at_all_times() {
    let (folder, name) = store();
    let path = path_of(folder.path(), &name);
    run(async {
        let held = VolumeLock::take(folder.path(), &name).await.expect("free");
        let is_over = std::sync::atomic::AtomicBool::new(false);
        let order = std::sync::atomic::Ordering::Relaxed;
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                let mut missing = 0;
                while !is_over.load(order) {
                    // One that is open and not locked is found by nobody who takes it.
                    missing += u32::from(path.symlink_metadata().is_err());
                }
                missing
            });
            for _ in 0..500 {
                let lock = VolumeLock::pass_by(&path, "web", File::sync_all).expect("passed by");
                lock.expect("nobody else does").give_back();
            }
            is_over.store(true, order);
            assert_eq!(looks.join().expect("it ends"), 0);
        });
        assert!(is_at(&path, &held.file), "it was given back");
        assert_eq!(files(folder.path()), ["web"], "nothing is left aside");
    });
}

/// The story: a process that took a volume by force was killed before it fenced, and the next
/// one took the writer, which went on, for dead.
#[test]
fn lock_of_one_killed_while_it_passed_by_goes_back_to_the_living() {
    let (folder, name) = store();
    run(async {
        let held = VolumeLock::take(folder.path(), &name).await.expect("free");
        held.sign(Some(Path::new("/log")), false).expect("signed");
        drop(VolumeLock::take_by_force(folder.path(), &name).await.expect("by force"));
        let refused = VolumeLock::take(folder.path(), &name).await.expect_err("it is alive");
        assert_eq!(refused.kind(), ErrorKind::Denied);
        assert!(is_at(&held.path, &held.file));
        drop(VolumeLock::take_by_force(folder.path(), &name).await.expect("by force"));
        drop(held);
        let next = VolumeLock::take(folder.path(), &name).await.expect("it has ended");
        assert_eq!(next.found().log.as_deref(), Some(Path::new("/log")));
        assert_eq!(files(folder.path()), ["web"], "nothing is left aside");
    });
}

/// The story: the folder could not be synced, and the file that was removed after that was the one
/// of the process that had the volume.
#[test]
fn lock_whose_passing_by_fails_late_is_that_of_its_holder_again() {
    let (folder, name) = store();
    run(async {
        let held = VolumeLock::take(folder.path(), &name).await.expect("free");
        let fails = |_: &File| Err(io::Error::other("no sync"));
        VolumeLock::pass_by(&held.path, "web", fails).expect_err("it is not durable");
        assert!(is_at(&held.path, &held.file));
        assert_eq!(files(folder.path()), ["web"]);
        let refused = VolumeLock::take(folder.path(), &name).await.expect_err("it is held");
        assert_eq!(refused.kind(), ErrorKind::Denied);
    });
}

/// A lock of `name` that was killed, or failed, between two renames: see [`swap`].
fn half_passed(held: &VolumeLock) -> (VolumeLock, PathBuf) {
    let (file, aside) = new_aside(&held.path, "web").expect("made");
    let (path, passed_by) = (held.path.clone(), Some(aside.clone()));
    let lock = VolumeLock { file, path, found: Writer::default(), passed_by };
    flock(&lock.file, FlockOperation::NonBlockingLockExclusive).expect("locked");
    lock.restore();
    let [_, third] = places_of(&aside);
    link(&held.path, &third).expect("linked");
    rename(&aside, &held.path).expect("renamed");
    (lock, aside)
}

/// The story: where files cannot change places at once, the note named a file that was not there
/// yet, and the next one took the living writer for dead.
#[test]
fn lock_of_one_killed_between_two_renames_goes_back_to_the_living() {
    let (folder, name) = store();
    run(async {
        let held = VolumeLock::take(folder.path(), &name).await.expect("free");
        drop(half_passed(&held));
        let refused = VolumeLock::take(folder.path(), &name).await.expect_err("it is alive");
        assert_eq!(refused.kind(), ErrorKind::Denied);
        assert!(is_at(&held.path, &held.file));
        let (failed, aside) = half_passed(&held);
        failed.undo(&held.file, &aside);
        assert!(is_at(&held.path, &held.file));
        assert_eq!(files(folder.path()), ["web"]);
        drop(half_passed(&held));
        drop(held);
        drop(VolumeLock::take(folder.path(), &name).await.expect("it has ended"));
        assert_eq!(files(folder.path()), ["web"]);
    });
}

/// The story: of three that took a volume by force one was late, and removed the file of another,
/// which went on without a lock.
#[test]
fn locks_taken_by_force_at_the_same_time_all_keep_their_files() {
    let (folder, name) = store();
    run(async {
        for _ in 0..50 {
            let held = VolumeLock::take(folder.path(), &name).await.expect("free");
            let all = std::sync::Barrier::new(3);
            let pass_by = || {
                all.wait();
                VolumeLock::pass_by(&held.path, "web", |_| Ok(())).expect("passed by")
            };
            let locks: Vec<_> = std::thread::scope(|scope| {
                let threads = [(); 3].map(|()| scope.spawn(pass_by));
                threads.into_iter().filter_map(|thread| thread.join().expect("ends")).collect()
            });
            assert!(!locks.is_empty());
            for lock in &locks {
                assert!(lock.place().is_some(), "{lock:?} has no name");
            }
            locks.into_iter().for_each(|mut lock| lock.keep());
            drop(held);
            assert_eq!(files(folder.path()), ["web"]);
        }
    });
}

/// The story: the second of two that took a volume by force had no lock once the first one gave up.
#[test]
fn lock_that_is_given_back_takes_no_name_from_who_passed_that_by() {
    let (folder, name) = store();
    run(async {
        for is_first_first in [true, false] {
            let held = VolumeLock::take(folder.path(), &name).await.expect("free");
            let mut first = VolumeLock::take_by_force(folder.path(), &name).await.expect("taken");
            let mut second = VolumeLock::take_by_force(folder.path(), &name).await.expect("taken");
            if is_first_first {
                first.give_back();
                assert!(is_at(&second.path, &second.file));
                second.give_back();
            } else {
                second.give_back();
                assert!(is_at(&first.path, &first.file));
                first.give_back();
            }
            assert!(is_at(&held.path, &held.file));
            assert_eq!(files(folder.path()), ["web"]);
        }
    });
}
