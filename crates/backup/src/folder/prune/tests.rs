use super::super::tests::{back_up, back_up_at, restored};
use super::*;
use crate::packing::Packing;
use crate::testing::{MemorySource, change};
use crate::verify::verify_state;
use mica_units::Rng;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

const LEN: usize = 1 << 20;

/// A folder with states, most of which go on from another, of a disk that grows; what each has.
fn filled(path: &Path, rng: &mut Rng, count: usize) -> BTreeMap<String, Vec<u8>> {
    let folder = Folder::make(path).unwrap();
    let mut states: Vec<Vec<u8>> = Vec::new();
    for number in 0..count {
        let base = match states.len() {
            0 => None,
            _ if rng.percent(10) => None,
            there if rng.percent(80) => Some(there - 1),
            there => Some(usize::try_from(rng.below(there as u64)).unwrap()),
        };
        let mut disk = states.last().cloned().unwrap_or_else(|| vec![0; LEN]);
        if rng.percent(20) {
            disk.resize(disk.len() + 512 * usize::try_from(rng.below(100)).unwrap(), 0);
        }
        change(&mut disk, rng);
        let mut source = match base {
            Some(base) => MemorySource::since(&disk, &states[base]),
            None => MemorySource::whole(&disk),
        };
        let (name, base) = (format!("s{number}"), base.map(|base| format!("s{base}")));
        let packing = rng.choose(&[Packing::Plain, Packing::Zstd]);
        back_up(&folder, (&name, base.as_deref()), &mut source, packing).unwrap();
        states.push(disk);
    }
    (0..).map(|number| format!("s{number}")).zip(states).collect()
}

fn some_of(states: &BTreeMap<String, Vec<u8>>, rng: &mut Rng) -> BTreeSet<String> {
    let newest = format!("s{}", states.len() - 1);
    states.keys().filter(|state| **state != newest && rng.percent(50)).cloned().collect()
}

/// Makes sure that the folder has these states, with what they have, and nothing else.
fn check(folder: &Folder, states: &BTreeMap<String, Vec<u8>>, note: &str) {
    let there = folder.states().unwrap();
    assert!(there.damaged.is_empty(), "{note}");
    let names: BTreeSet<_> =
        there.whole.iter().map(|stored| stored.begin().state.clone()).collect();
    assert_eq!(names, states.keys().cloned().collect(), "{note}");
    for stored in &there.whole {
        let state = &stored.begin().state;
        assert!(verify_state(stored, |_| {}).is_empty(), "{note}, {state}");
        assert!(restored(folder, state) == states[state], "{note}, {state}");
    }
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

#[test]
fn states_that_stay_are_as_they_were_and_nothing_is_left_of_the_others() {
    for seed in 0..12 {
        let mut rng = Rng::new(seed);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web");
        let mut states = filled(&path, &mut rng, 7);
        let folder = Folder::open(&path).unwrap();
        let unwanted = some_of(&states, &mut rng);
        let would = folder.prunable(&unwanted).unwrap();
        let pruned = folder.prune(&unwanted, |_, _| {}).unwrap();
        let names = |stored: &[Stored]| -> Vec<String> {
            stored.iter().map(|stored| stored.begin().state.clone()).collect()
        };
        assert_eq!(names(&pruned.removed), names(&would.removed), "seed {seed}");
        assert_eq!(names(&pruned.merged), names(&would.merged), "seed {seed}");
        states.retain(|state, _| !unwanted.contains(state));
        check(&folder, &states, &format!("seed {seed}"));
        // Each has a manifest and a data file; and there is the lock.
        assert_eq!(fs::read_dir(&path).unwrap().count(), 2 * states.len() + 1, "seed {seed}");
        // The next backup goes on from the newest.
        let (newest, before) = ("s6", states["s6"].clone());
        let mut disk = before.clone();
        change(&mut disk, &mut rng);
        let mut source = MemorySource::since(&disk, &before);
        back_up(&folder, ("later", Some(newest)), &mut source, Packing::Plain).unwrap();
        states.insert("later".to_owned(), disk);
        check(&folder, &states, &format!("seed {seed}, later"));
    }
}

/// At every step of it, what stays is there; the next call does the rest.
#[test]
fn a_kill_at_any_step_loses_no_state() {
    let mut rng = Rng::new(3);
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("whole");
    let states = filled(&whole, &mut rng, 6);
    let unwanted: BTreeSet<String> = ["s0", "s1", "s3"].map(str::to_owned).into();
    let mut is_killed = true;
    let mut steps = 0;
    while is_killed {
        let path = dir.path().join(format!("{steps}"));
        copy_folder(&whole, &path);
        let folder = Folder::open(&path).unwrap();
        let mut left = steps;
        let killed = catch_unwind(AssertUnwindSafe(|| {
            let at = |_: &Begin, _| {
                assert!(left > 0, "killed");
                left -= 1;
            };
            folder.prune(&unwanted, at).unwrap();
        }));
        is_killed = killed.is_err();
        let there = folder.states().unwrap();
        assert!(there.damaged.is_empty(), "{steps}");
        let names: BTreeSet<_> =
            there.whole.iter().map(|stored| stored.begin().state.clone()).collect();
        let wanted: BTreeSet<_> = states.keys().cloned().collect();
        assert!(wanted.difference(&unwanted).all(|state| names.contains(state)), "{steps}");
        let those: BTreeMap<_, _> =
            states.iter().filter(|(state, _)| names.contains(*state)).map(to_owned).collect();
        check(&folder, &those, &format!("step {steps}"));
        let rest: BTreeSet<_> = unwanted.intersection(&names).cloned().collect();
        folder.prune(&rest, |_, _| {}).unwrap();
        let stay = those.into_iter().filter(|(state, _)| !unwanted.contains(state)).collect();
        check(&folder, &stay, &format!("step {steps}, done"));
        assert_eq!(fs::read_dir(&path).unwrap().count(), 2 * stay.len() + 1, "step {steps}");
        fs::remove_dir_all(&path).unwrap();
        steps += 1;
    }
    assert!(steps > 10, "only {steps} steps");
}

fn to_owned((state, bytes): (&String, &Vec<u8>)) -> (String, Vec<u8>) {
    (state.clone(), bytes.clone())
}

#[test]
fn what_must_not_be_removed_is_refused_and_stays() {
    let mut rng = Rng::new(5);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("web");
    let states = filled(&path, &mut rng, 4);
    let folder = Folder::open(&path).unwrap();
    let set = |names: &[&str]| -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    };
    let refused = |names: &[&str]| folder.prune(&set(names), |_, _| {}).unwrap_err();
    assert_eq!(refused(&["s3"]).kind(), ErrorKind::Invalid);
    assert_eq!(refused(&["s1", "other"]).kind(), ErrorKind::NotFound);
    check(&folder, &states, "refused");
    // While a backup is written.
    let lock = folder.lock().unwrap();
    assert_eq!(refused(&["s1"]).kind(), ErrorKind::Denied);
    drop(lock);
    // What is needed of a state is damaged: it is not removed.
    let there = folder.states().unwrap().whole;
    let base = there.iter().find_map(|stored| stored.begin().base.clone());
    let base = base.expect("one goes on from another");
    let data = folder.find(&base).unwrap().data_path();
    let mut bytes = fs::read(&data).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&data, bytes).unwrap();
    assert!(!folder.prunable(&set(&[&base])).unwrap().merged.is_empty());
    assert_eq!(refused(&[&base]).kind(), ErrorKind::Corrupt);
    assert!(folder.find(&base).is_ok());
    // Of a damaged manifest nobody knows what its state goes on from.
    fs::write(folder.manifest_path("s2"), "damaged").unwrap();
    assert_eq!(refused(&["s1"]).kind(), ErrorKind::Corrupt);
}

/// The story: a backup without --as was killed. Nothing ever went on with it, or removed it. Then
/// one was removed that was younger than all states: the newest had got another manifest.
#[test]
fn step_that_was_cut_off_goes_when_a_later_state_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::make(&dir.path().join("web")).unwrap();
    let disk = vec![5; LEN];
    back_up(&folder, ("a", None), &mut MemorySource::whole(&disk), Packing::Plain).unwrap();
    let cut = |name: &str| {
        let mut broken = MemorySource::whole(&disk);
        broken.reads_max = 0;
        back_up(&folder, (name, None), &mut broken, Packing::Plain).unwrap_err();
    };
    let date = |ending: &str, seconds: u64| {
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        for entry in fs::read_dir(dir.path().join("web")).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if name.ends_with(ending) {
                File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
            }
        }
    };
    cut("b");
    date(".data", 200);
    let count = || fs::read_dir(dir.path().join("web")).unwrap().count();
    assert_eq!(count(), 4, "a lock, and a state that is whole, and one that is not");
    folder.prune(&BTreeSet::new(), |_, _| {}).unwrap();
    assert_eq!(count(), 4, "it may be gone on with");
    let mut source = MemorySource::since(&disk, &disk);
    let at = 300_000_000_000;
    back_up_at(&folder, ("c", Some("a")), &mut source, Packing::Plain, at).unwrap();
    fs::write(dir.path().join("web/d.manifest.new"), "cut off").unwrap();
    assert_eq!(count(), 7);
    folder.prune(&BTreeSet::new(), |_, _| {}).unwrap();
    assert_eq!(count(), 5);
    cut("e");
    date(".data", 400);
    folder.prune(&["a".to_owned()].into(), |_, _| {}).unwrap();
    assert_eq!(count(), 4, "what is left has another step");
    folder.prune(&BTreeSet::new(), |_, _| {}).unwrap();
    assert_eq!(count(), 4, "it may be gone on with");
}

/// The story: files in the folder that were no backup's went with what killed calls had left.
#[test]
fn only_what_is_called_as_a_backup_calls_it_goes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("web");
    let folder = Folder::make(&path).unwrap();
    let disk = vec![5; LEN];
    let mut source = MemorySource::whole(&disk);
    back_up_at(&folder, ("a", None), &mut source, Packing::Plain, 1 << 62).unwrap();
    let long = "x".repeat(201);
    let others = [
        "mine.data",
        "mine.0123456789ABCDEF.data",
        ".0123456789abcdef.data",
        ".mine.0123456789abcdef.data",
        ".manifest.new",
        ".mine.manifest.new",
        ".mine.manifest.gone",
        &format!("{long}.0123456789abcdef.data"),
        &format!("{long}.manifest.new"),
    ];
    let own = ["b.0123456789abcdef.data", "b.manifest.new", "b.manifest.gone"];
    for name in others.iter().chain(&own) {
        fs::write(path.join(name), "something").unwrap();
    }
    folder.prune(&BTreeSet::new(), |_, _| {}).unwrap();
    assert!(others.iter().all(|name| path.join(name).exists()));
    assert!(own.iter().all(|name| !path.join(name).exists()));
}

/// The story: after a state had got another step, nothing in the folder told any more which state
/// of the disk it was, and increments over NBD were refused.
#[test]
fn state_with_another_step_is_known_to_be_of_the_same_content() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::make(&dir.path().join("web")).unwrap();
    let disk = vec![5; LEN];
    back_up(&folder, ("a", None), &mut MemorySource::whole(&disk), Packing::Plain).unwrap();
    let mut changes = MemorySource::since(&disk, &vec![0; LEN]);
    back_up(&folder, ("b", Some("a")), &mut changes, Packing::Plain).unwrap();
    let prune = || folder.prune(&["a".to_owned()].into(), |_, _| {}).unwrap();
    let merged = prune().merged.remove(0);
    for stored in [merged, folder.find("b").unwrap()] {
        let is_of = |content: &[u8]| stored.is_of(&Content::lasting(content));
        assert!(is_of(b"content") && !is_of(b"other") && !stored.is_unproved());
    }
    // An older mica did not note it.
    let stored = folder.find("b").unwrap();
    let manifest = Manifest { content: 0, ..stored.manifest().unwrap() };
    fs::write(folder.manifest_path("b"), manifest.encode()).unwrap();
    let stored = folder.find("b").unwrap();
    assert!(stored.is_unproved() && !stored.is_of(&Content::lasting(b"content")));
    // What it has is proved all the same.
    assert!(verify_state(&stored, |_| {}).is_empty());
    let mut data = fs::read(stored.data_path()).unwrap();
    let middle = data.len() / 2;
    data[middle] ^= 1;
    fs::write(stored.data_path(), data).unwrap();
    let damage = verify_state(&stored, |_| {});
    assert!(damage.iter().any(|damage| damage.extent.is_some()), "{damage:?}");
}
