use super::*;
use crate::copy::copy;
use crate::packing::Packing;
use crate::restore::{restore_state, restore_step};
use crate::testing::{MemoryDisk, MemorySource, block_on, change};
use crate::verify::verify_state;
use mica_units::Rng;
use std::collections::BTreeSet;

const LEN: usize = 6 << 20;

fn begin(state: &str, base: Option<&str>, len: usize) -> Begin {
    Begin {
        disk: "web".to_owned(),
        state: state.to_owned(),
        base: base.map(str::to_owned),
        len: len as u64,
        time_ns: 1,
    }
}

fn pending(begun: Begun) -> Pending {
    match begun {
        Begun::Pending(pending) => *pending,
        Begun::Whole(stored) => panic!("{} is there", stored.begin().state),
    }
}

/// Writes a state of `source` as `name`.
pub(crate) fn back_up(
    folder: &Folder,
    (name, base): (&str, Option<&str>),
    source: &mut MemorySource,
    packing: Packing,
) -> Result<Stored> {
    back_up_at(folder, (name, base), source, packing, 1)
}

/// As [`back_up`], at that time.
pub(crate) fn back_up_at(
    folder: &Folder,
    (name, base): (&str, Option<&str>),
    source: &mut MemorySource,
    packing: Packing,
    time_ns: u64,
) -> Result<Stored> {
    let begin = Begin { time_ns, ..begin(name, base, source.bytes.len()) };
    let mut pending = pending(folder.begin(begin, Some(&Content::lasting(b"content")))?);
    block_on(copy(source, packing, &mut pending.writer, |_, _| {}))?;
    pending.complete()
}

pub(crate) fn restored(folder: &Folder, state: &str) -> Vec<u8> {
    let line = folder.line(state).unwrap();
    let len = usize::try_from(line.last().unwrap().len()).unwrap();
    let disk = MemoryDisk::new(len);
    for stored in &line {
        block_on(restore_state(stored, &disk, |_, _| {})).unwrap();
    }
    disk.0.into_inner()
}

/// A week of backups, some of which are cut off and gone on with, of a disk that grows: each state
/// is given back, from the folder and as a stream.
#[test]
fn states_are_given_back_whatever_was_cut_off() {
    for seed in 0..6 {
        let mut rng = Rng::new(seed);
        let (dir, mut disk) = (tempfile::tempdir().unwrap(), vec![0; LEN]);
        let folder = Folder::make(&dir.path().join("web")).unwrap();
        let mut states: Vec<Vec<u8>> = Vec::new();
        let mut stream = Vec::new();
        for number in 0..7 {
            if rng.percent(30) {
                let grown = disk.len() + 512 * usize::try_from(rng.below(100)).unwrap();
                disk.resize(grown, 0);
            }
            change(&mut disk, &mut rng);
            let name = format!("s{number}");
            let base = states.last().map(|_| format!("s{}", number - 1));
            let source = || match states.last() {
                Some(before) => MemorySource::since(&disk, before),
                None => MemorySource::whole(&disk),
            };
            let packing = rng.choose(&[Packing::Plain, Packing::Zstd]);
            for _ in 0..rng.below(3) {
                let mut broken = source();
                broken.reads_max = usize::try_from(rng.below(3)).unwrap();
                let named = (&*name, base.as_deref());
                let failed = back_up(&folder, named, &mut broken, packing);
                if failed.is_ok() {
                    // There was nothing left to read.
                    fs::remove_file(folder.manifest_path(&name)).unwrap();
                }
                damage_unfinished(&dir.path().join("web"), &mut rng);
            }
            let named = (&*name, base.as_deref());
            let stored = back_up(&folder, named, &mut source(), packing).unwrap();
            stream.extend(fs::read(stored.data_path()).unwrap());
            states.push(disk.clone());
            assert!(verify_state(&stored, |_| {}).is_empty(), "seed {seed}, {name}");
        }
        for (number, state) in states.iter().enumerate() {
            let given = restored(&folder, &format!("s{number}"));
            assert!(given == *state, "seed {seed}, state {number}");
        }
        let given = streamed(&stream, states.last().unwrap().len());
        assert!(given == *states.last().unwrap(), "seed {seed}, the stream");
    }
}

/// What a kill or a power cut leaves of a file that was not synced.
fn damage_unfinished(folder: &Path, rng: &mut Rng) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_whole = |path: &Path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            let state = name.split('.').next().unwrap();
            folder.join(format!("{state}.manifest")).exists()
        };
        if path.extension().is_some_and(|ending| ending == "data") && !is_whole(&path) {
            let mut bytes = fs::read(&path).unwrap();
            if bytes.is_empty() {
                continue;
            }
            let at = usize::try_from(rng.below(bytes.len() as u64)).unwrap();
            match rng.percent(50) {
                true => bytes.truncate(at),
                false => bytes[at] ^= 1 << rng.below(8),
            }
            fs::write(&path, bytes).unwrap();
        }
    }
}

fn streamed(stream: &[u8], len: usize) -> Vec<u8> {
    let (mut stream, disk) = (StepReader::new(stream), MemoryDisk::new(len));
    let mut last = None;
    while let Some(begin) = stream.begin().unwrap() {
        assert_eq!(begin.base, last, "one is based on the other");
        block_on(restore_step(&mut stream, &disk, |_, _| {})).unwrap();
        last = Some(begin.state);
    }
    disk.0.into_inner()
}

#[test]
fn step_that_was_cut_off_is_gone_on_with_only_if_it_is_of_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::open(dir.path()).unwrap();
    let mut rng = Rng::new(7);
    let disk: Vec<u8> = (0..(24 << 20) / 8).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
    let mut broken = MemorySource::whole(&disk);
    broken.reads_max = 2;
    back_up(&folder, ("mon", None), &mut broken, Packing::Plain).unwrap_err();
    let again = |content: Option<&[u8]>| {
        let content = content.map(Content::lasting);
        let again = folder.begin(begin("mon", None, disk.len()), content.as_ref()).unwrap();
        pending(again).resumed_bytes()
    };
    assert!(again(Some(b"content")) > 15 << 20);
    assert!(folder.states().unwrap().whole.is_empty());
    assert_eq!(again(Some(b"other content")), 0);
    assert_eq!(again(Some(b"content")), 0, "that of the other was removed");
    back_up(&folder, ("mon", None), &mut MemorySource::whole(&disk), Packing::Zstd).unwrap();
    let there =
        folder.begin(begin("mon", None, disk.len()), Some(&Content::lasting(b"content"))).unwrap();
    assert!(matches!(there, Begun::Whole(_)));
    for content in [None, Some(&Content::lasting(b"other"))] {
        let refused = folder.begin(begin("mon", None, disk.len()), content).err().unwrap();
        assert!(refused.to_string().contains("already"), "{refused}");
    }
}

#[test]
fn what_does_not_fit_into_the_folder_is_refused_and_names_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::open(dir.path()).unwrap();
    let mut source = MemorySource::whole(&[1; 8192]);
    back_up(&folder, ("mon", None), &mut source, Packing::Plain).unwrap();
    let refused = |begin: Begin| folder.begin(begin, None).err().unwrap().in_one_line();
    let missing = refused(begin("wed", Some("tue"), 8192));
    assert!(missing.contains("\"tue\"") && missing.contains("has mon (1)"), "{missing}");
    let shorter = refused(begin("wed", Some("mon"), 4096));
    assert!(shorter.contains("full backup"), "{shorter}");
    let other = refused(Begin { disk: "db".to_owned(), ..begin("wed", None, 8192) });
    assert!(other.contains("\"web\"") && other.contains("\"db\""), "{other}");
    let itself = refused(begin("wed", Some("wed"), 8192));
    assert!(itself.contains("on itself"), "{itself}");
    // Longer than its field.
    let long = refused(Begin { disk: "x".repeat(300), ..begin("wed", None, 8192) });
    assert!(long.contains("not a valid name of a disk"), "{long}");
    let first = pending(folder.begin(begin("wed", None, 8192), None).unwrap());
    let second = refused(begin("thu", None, 8192));
    assert!(second.contains("under way"), "{second}");
    drop(first);
    pending(folder.begin(begin("thu", None, 8192), None).unwrap());
    // A state whose base is gone.
    let mut later = MemorySource::since(&[2; 8192], &[1; 8192]);
    back_up(&folder, ("tue", Some("mon")), &mut later, Packing::Plain).unwrap();
    fs::remove_file(folder.manifest_path("mon")).unwrap();
    let orphan = folder.line("tue").unwrap_err().in_one_line();
    assert!(orphan.contains("\"tue\" is based on \"mon\""), "{orphan}");
}

/// The story: all of a manifest was read before anything of it was looked at.
#[test]
fn manifest_is_read_only_as_far_as_its_head_says() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::open(dir.path()).unwrap();
    let mut source = MemorySource::whole(&[1; 8192]);
    let stored = back_up(&folder, ("mon", None), &mut source, Packing::Plain).unwrap();
    let path = folder.manifest_path("mon");
    let len = fs::metadata(&path).unwrap().len();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(1 << 40).unwrap();
    assert_eq!(stored.manifest().unwrap_err().kind(), ErrorKind::Corrupt);
    file.set_len(len).unwrap();
    assert_eq!(stored.manifest().unwrap().entries.len(), 1);
    // Nor is that of a state that is gone.
    file.set_len(1 << 40).unwrap();
    fs::rename(&path, dir.path().join("mon.manifest.gone")).unwrap();
    back_up(&folder, ("tue", None), &mut MemorySource::whole(&[1; 8192]), Packing::Plain).unwrap();
    folder.prune(&BTreeSet::new(), |_, _| {}).unwrap();
    assert!(!stored.data_path().exists());
}

#[test]
fn damage_is_named_down_to_the_extent() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::open(dir.path()).unwrap();
    let mut disk = vec![0; LEN];
    disk[4096..8192].fill(1);
    disk[3 << 20..5 << 20].fill(2);
    let mut source = MemorySource::whole(&disk);
    let stored = back_up(&folder, ("mon", None), &mut source, Packing::Plain).unwrap();
    let good = fs::read(stored.data_path()).unwrap();
    assert_eq!(stored.total().data_bytes, 4096 + (2 << 20), "zeros take no space");
    assert!(stored.file_bytes() < 4096 + (2 << 20) + 2048);
    let manifest = stored.manifest().unwrap();
    let found = |bytes: &[u8]| {
        fs::write(stored.data_path(), bytes).unwrap();
        let damage = verify_state(&stored, |_| {});
        damage.into_iter().map(|damage| damage.extent.map(|it| it.start())).collect::<Vec<_>>()
    };
    assert_eq!(found(&good), []);
    for entry in &manifest.entries {
        for at in [entry.at, entry.at + PART, entry.at + PART + u64::from(entry.piece.stored) - 1] {
            let mut bad = good.clone();
            bad[usize::try_from(at).unwrap()] ^= 4;
            assert_eq!(found(&bad), [Some(entry.start())], "byte {at}");
        }
    }
    let mut bad = good.clone();
    bad[100] ^= 1;
    assert_eq!(found(&bad), [None]);
    *bad.last_mut().unwrap() ^= 1;
    assert_eq!(found(&bad), [None]);
    let mut longer = good.clone();
    longer.push(0);
    assert_eq!(found(&longer), [None], "a byte behind the end");
    let cut = usize::try_from(manifest.entries[1].at).unwrap() + 50;
    assert_eq!(found(&good[..cut])[..2], [Some(3 << 20), Some(4 << 20)]);
    fs::remove_file(stored.data_path()).unwrap();
    let missing = verify_state(&stored, |_| {}).remove(0).error;
    assert!(missing.to_string().contains("is missing"), "{missing}");
    fs::write(stored.data_path(), &good).unwrap();
    let mut bytes = fs::read(folder.manifest_path("mon")).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(folder.manifest_path("mon"), &bytes).unwrap();
    let damage = verify_state(&stored, |_| {}).remove(0).error;
    assert!(damage.to_string().contains("manifest"), "{damage}");
    bytes[3] ^= 1;
    fs::write(folder.manifest_path("mon"), &bytes).unwrap();
    assert_eq!(folder.states().unwrap().damaged.len(), 1);
}

const PART: u64 = crate::format::PART_BYTES as u64;
