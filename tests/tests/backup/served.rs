//! States of a disk that is served: over NBD, and from their files, while a guest writes on.

use crate::restored::restored;
use mica_tests::kept::{self, World, raw};
use mica_tests::server::Server;
use mica_tests::{command, judge, mica, nbd, qemu, tools};
use std::path::Path;
use std::process::Command;
use std::time::UNIX_EPOCH;

#[test]
fn kept_states_are_backed_up_over_nbd_and_from_their_files() {
    let Some(mut world) = World::new(3, &[]) else { return };
    let folders = ["nbd", "files"];
    for round in 0..4 {
        let mut guest = world.guest();
        (0..30).for_each(|_| world.change(&mut guest));
        let state = format!("s{round}");
        let since = (round > 0).then(|| format!("s{}", round - 1));
        world.begin(since.as_deref(), &state).ok();
        let wanted = world.model.clone();
        (0..10).for_each(|_| world.change(&mut guest));
        for folder in folders {
            let target = world.path(folder).display().to_string();
            let image = format!("{}@{state}", world.path("disk.qcow2").display());
            let source = if folder == "nbd" { world.uri() } else { image };
            let backup = ["backup", "--output", "json", "--since-last", &source, &target];
            let answer = mica::run(backup).json();
            assert_eq!((&answer["disk"], &answer["state"]), (&"disk".into(), &(&*state).into()));
            assert_eq!(answer["since"].as_str(), since.as_deref(), "{answer}");
            let again = mica::run(backup).json();
            assert_eq!(again["was-there"], true, "{again}");
        }
        judge::same_bytes("the state", &world.state(&state), &wanted);
        world.ctl(&["backup", "end", "disk"]).ok();
    }
    world.stop();
    for round in 0..4 {
        let state = format!("s{round}");
        let wanted = world.state(&state);
        for folder in folders {
            let given = restored(world.dir.path(), folder, &state, "qcow2");
            judge::same_bytes(&format!("{state} from {folder}"), &given, &wanted);
        }
    }
}

/// The story: a state was dropped, and another one kept under its name. What had changed since that
/// one was taken for what had changed since the state of that name in the folder.
#[test]
fn what_changed_since_another_state_of_the_same_name_is_not_gone_on_with() {
    let Some(world) = World::new(4, &[]) else { return };
    let sources = ["nbd", "files"].map(|folder| (folder, world.path(folder).display().to_string()));
    let source = |world: &World, folder: &str, state: &str| match folder {
        "nbd" => world.uri(),
        _ => format!("{}@{state}", world.path("disk.qcow2").display()),
    };
    world.begin(None, "mon").ok();
    for (folder, target) in &sources {
        mica::run(["backup", &source(&world, folder, "mon"), target]).ok();
    }
    world.ctl(&["backup", "end", "disk"]).ok();
    world.ctl(&["backup", "drop", "disk", "mon"]).ok();
    // Where the state has nothing.
    let mut guest = world.guest();
    kept::command(&mut guest, nbd::CMD_WRITE, 5 << 20, 4096, &[9; 4096]);
    world.begin(None, "mon").ok();
    world.ctl(&["backup", "end", "disk"]).ok();
    kept::command(&mut guest, nbd::CMD_WRITE, 6 << 20, 4096, &[8; 4096]);
    world.begin(Some("mon"), "tue").ok();
    for (folder, target) in &sources {
        let source = source(&world, folder, "tue");
        let said = mica::run(["backup", "--since", "mon", &source, target]).refusal();
        assert!(said.contains("is not that of"), "{folder}: {said}");
        let full = mica::run(["backup", "--output", "json", "--since-last", &source, target]);
        assert!(full.stderr.contains("making a full backup"), "{full}");
        let given = restored(world.dir.path(), folder, "tue", "raw");
        judge::same_bytes(folder, &given, &world.state("tue"));
    }
}

/// The story's other half: a state is the same though its file is not as it was.
#[test]
fn state_into_which_an_older_one_went_is_gone_on_with() {
    let Some(mut world) = World::new(6, &[]) else { return };
    let mut guest = world.guest();
    let target = world.path("web").display().to_string();
    for (round, state) in ["mon", "tue", "wed"].into_iter().enumerate() {
        (0..20).for_each(|_| world.change(&mut guest));
        let since = ["mon", "tue"].get(round.wrapping_sub(1)).copied();
        world.begin(since, state).ok();
        let backup = ["backup", "--output", "json", "--since-last", &world.uri(), &target];
        let answer = mica::run(backup).json();
        assert_eq!(answer["since"].as_str(), since, "{answer}");
        world.ctl(&["backup", "end", "disk"]).ok();
        if let Some(older) = since {
            world.ctl(&["backup", "drop", "disk", older]).ok();
        }
        // The folder's goes into the new one, too.
        mica::run(["backup", "prune", "--keep", "1", &target]).ok();
        let given = restored(world.dir.path(), "web", state, "raw");
        judge::same_bytes(state, &given, &world.state(state));
    }
}

/// The story: qemu-img committed a disk that nobody served into its newest state, and the next
/// backup over NBD went on from what the folder had of that state.
#[test]
fn state_that_another_program_changed_is_no_base_of_a_backup() {
    let Some(mut world) = World::new(7, &[]) else { return };
    let target = world.path("web").display().to_string();
    let backup = |world: &World, options: &[&str]| {
        let source = world.uri();
        mica::run(["backup"].iter().chain(options).copied().chain([&*source, &*target]))
    };
    for state in ["mon", "tue"] {
        let mut guest = world.guest();
        (0..20).for_each(|_| world.change(&mut guest));
        world.begin(None, state).ok();
        backup(&world, &[]).ok();
        world.ctl(&["backup", "end", "disk"]).ok();
    }
    let mut guest = world.guest();
    kept::command(&mut guest, nbd::CMD_WRITE, 5 << 20, 4096, &[9; 4096]);
    drop(guest);
    world.stop();
    qemu::img(world.dir.path(), ["commit", "disk.qcow2"]).ok();
    world.start();
    let mut guest = world.guest();
    kept::command(&mut guest, nbd::CMD_WRITE, 6 << 20, 4096, &[8; 4096]);
    world.begin(Some("tue"), "wed").ok();
    let said = backup(&world, &["--since", "tue"]).refusal();
    assert!(said.contains("another program has changed the state \"tue\""), "{said}");
    let full = backup(&world, &["--since-last"]);
    assert!(full.stderr.contains("another program has changed"), "{full}");
    assert!(full.stderr.contains("making a full backup"), "{full}");
    let given = restored(world.dir.path(), "web", "wed", "raw");
    judge::same_bytes("wed", &given, &world.state("wed"));
    world.ctl(&["backup", "end", "disk"]).ok();
    // Without `--since` the server tells nothing of older states, which is not their end.
    world.begin(None, "thu").ok();
    let whole = backup(&world, &["--since-last"]);
    assert!(whole.stderr.contains("does not report what changed"), "{whole}");
    assert!(whole.stderr.contains("--since STATE"), "{whole}");
}

#[test]
fn reader_that_dies_over_nbd_goes_on() {
    let Some(mut world) = World::new(5, &[]) else { return };
    let mut guest = world.guest();
    (0..300).for_each(|_| world.change(&mut guest));
    world.begin(None, "mon").ok();
    let target = world.path("web").display().to_string();
    let mut shell = Command::new("sh");
    let script = r#"ulimit -f 4096; exec "$mica" backup "$uri" "$target""#;
    shell.args(["-c", script]).env("mica", mica::binary());
    shell.env("uri", world.uri()).env("target", &target);
    command::finish(&mut shell).refusal();
    // Nor does it matter that the server dies.
    world.kill();
    world.start();
    world.begin(None, "mon").ok();
    let answer = mica::run(["backup", "--output", "json", &world.uri(), &target]).json();
    assert!(answer["resumed-bytes"].as_u64() > Some(1 << 20), "{answer}");
    let wanted = world.state("mon");
    judge::same_bytes("mon", &restored(world.dir.path(), "web", "mon", "raw"), &wanted);
    let missing = mica::run(["backup", "--since", "sun", &world.uri(), &target]).refusal();
    assert!(missing.contains("ctl backup begin"), "{missing}");
}

/// QEMU's server, and its bitmaps.
#[test]
fn bitmaps_of_other_servers_say_what_changed() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::QEMU_NBD]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let at = dir.path();
    qemu::create(at, "disk.qcow2", &[], "32M");
    qemu::io(at, &[], "disk.qcow2", &["write -P 1 0 3M", "write -P 2 20M 1M"]);
    let server = || {
        Server::start("web", |socket| {
            let mut serve = Command::new("qemu-nbd");
            serve.args(["-r", "-t", "-x", "web", "-f", "qcow2", "-k"]).arg(socket);
            if at.join("has-bitmap").exists() {
                serve.args(["-B", "mon"]);
            }
            serve.arg(at.join("disk.qcow2"));
            serve
        })
        .expect("served")
    };
    let target = at.join("web").display().to_string();
    let first = server();
    mica::run(["backup", "--as", "mon", &first.uri(), &target]).ok();
    drop(first);
    qemu::img(at, ["bitmap", "--add", "disk.qcow2", "mon"]).ok();
    qemu::io(at, &[], "disk.qcow2", &["write -P 3 1M 64k", "write -z 20M 512k"]);
    std::fs::write(at.join("has-bitmap"), "").expect("written");
    let second = server();
    let backup = ["backup", "--output", "json", "--since", "mon", "--as", "tue"];
    let answer = mica::run(backup.iter().copied().chain([&*second.uri(), &target])).json();
    assert_eq!((&answer["disk"], &answer["data-bytes"]), (&"web".into(), &(64 << 10).into()));
    drop(second);
    judge::same_bytes("tue", &restored(at, "web", "tue", "raw"), &raw(at, "disk.qcow2"));
}

#[test]
fn only_the_newest_states_stay_when_the_others_are_pruned() {
    let Some(mut world) = World::new(8, &[]) else { return };
    let mut states = Vec::new();
    for state in ["a", "b", "c", "d"] {
        let mut guest = world.guest();
        (0..15).for_each(|_| world.change(&mut guest));
        world.begin(None, state).ok();
        world.ctl(&["backup", "end", "disk"]).ok();
        states.push((state, world.model.clone()));
    }
    // An image that stands on one that goes: nothing else goes either.
    qemu::overlay(world.dir.path(), "clone.qcow2", "disk@b.qcow2", &[]);
    let needed = world.ctl(&["backup", "prune", "--keep", "2", "disk"]).refusal();
    assert!(needed.contains("clone.qcow2"), "{needed}");
    std::fs::remove_file(world.path("clone.qcow2")).expect("it is there");
    // The base has another image on it, too, and stays as it is.
    qemu::overlay(world.dir.path(), "other.qcow2", "base.qcow2", &[]);
    let base = std::fs::read(world.path("base.qcow2")).expect("it is there");
    let pruned = world.ctl(&["backup", "prune", "--keep", "2", "disk"]).json();
    assert_eq!(pruned["dropped"], serde_json::json!(["a", "b"]), "{pruned}");
    assert!(std::fs::read(world.path("base.qcow2")).expect("it is there") == base);
    for (state, wanted) in &states[2..] {
        judge::same_bytes(state, &world.state(state), wanted);
        qemu::img(world.dir.path(), ["check", &format!("disk@{state}.qcow2")]).ok();
    }
    let now = world.guest().read(0, world.model.len() as u64).expect("read");
    judge::same_bytes("the disk", &now, &world.model);
    world.begin(Some("c"), "e").ok();
    world.stop();
}

/// States that are dropped leave what the disk shows, and other states, as they are.
#[test]
fn dropped_states_leave_the_others_as_they_are() {
    let Some(mut world) = World::new(7, &[]) else { return };
    let mut states = Vec::new();
    for state in ["a", "b", "c", "d"] {
        let mut guest = world.guest();
        (0..20).for_each(|_| world.change(&mut guest));
        world.begin(None, state).ok();
        if state == "d" {
            let busy = world.ctl(&["backup", "drop", "disk", "d"]).refusal();
            assert!(busy.contains("end that first"), "{busy}");
        }
        world.ctl(&["backup", "end", "disk"]).ok();
        states.push((state, world.model.clone()));
    }
    let unknown = world.ctl(&["backup", "drop", "disk", "x"]).refusal();
    assert!(unknown.contains("it has d, c, b, a"), "{unknown}");
    // One that others need stays.
    qemu::overlay(world.dir.path(), "clone.qcow2", "disk@d.qcow2", &[]);
    let needed = world.ctl(&["backup", "drop", "disk", "d"]).refusal();
    assert!(needed.contains("clone.qcow2"), "{needed}");
    std::fs::remove_file(world.path("clone.qcow2")).expect("it is there");
    // The one in the middle, the oldest, the newest.
    for dropped in ["b", "a", "d"] {
        let mut guest = world.guest();
        (0..10).for_each(|_| world.change(&mut guest));
        let job = world.ctl(&["backup", "drop", "disk", dropped]).json();
        assert_eq!((&job["kind"], &job["state"]), (&"drop".into(), &"done".into()), "{job}");
        states.retain(|(state, _)| *state != dropped);
        assert!(!world.path(&format!("disk@{dropped}.qcow2")).exists());
        for (state, wanted) in &states {
            judge::same_bytes(&format!("{state} without {dropped}"), &world.state(state), wanted);
        }
        let now = world.guest().read(0, world.model.len() as u64).expect("read");
        judge::same_bytes("the disk", &now, &world.model);
    }
    let listed = world.ctl(&["backup", "list", "disk"]).json();
    assert_eq!(listed["states"].as_array().map(Vec::len), Some(1), "{listed}");
    let pruned = world.ctl(&["backup", "prune", "--keep", "1", "disk"]).json();
    assert_eq!(pruned["dropped"], serde_json::json!([]), "{pruned}");
    // The name is free, and the disk is one that QEMU reads.
    world.begin(Some("c"), "a").ok();
    world.stop();
    let model = world.model.clone();
    judge::same_bytes("the disk", &raw(world.dir.path(), "disk.qcow2"), &model);
    for image in ["base.qcow2", "disk@c.qcow2", "disk@a.qcow2", "disk.qcow2"] {
        qemu::img(world.dir.path(), ["check", image]).ok();
    }
}

/// The story: a server was killed over a drop, and a clone that is gone had stood on the state.
#[test]
fn file_that_a_killed_drop_left_goes_when_the_drop_is_repeated() {
    use std::os::unix::fs::MetadataExt as _;
    let Some(mut world) = World::new(10, &[]) else { return };
    for state in ["a", "b"] {
        let mut guest = world.guest();
        (0..20).for_each(|_| world.change(&mut guest));
        world.begin(None, state).ok();
        world.ctl(&["backup", "end", "disk"]).ok();
    }
    let (file, above) = (world.path("disk@a.qcow2"), world.path("disk@b.qcow2"));
    let bytes = std::fs::read(&file).expect("it is there");
    world.ctl(&["backup", "drop", "disk", "a"]).ok();
    // As it is when the server dies before it removes the file.
    std::fs::write(&file, bytes).expect("there is room");
    let far = tempfile::tempdir().expect("a folder");
    let clone = far.path().join("clone.qcow2");
    mica::run([Path::new("clone"), &file, &clone]).ok();
    std::fs::remove_file(&clone).expect("it is there");
    let found = file.metadata().expect("it is there");
    let made = found.created().ok().and_then(|made| made.duration_since(UNIX_EPOCH).ok());
    let made = made.map_or(0, |made| made.as_nanos());
    let changed = i128::from(found.mtime()) * 1_000_000_000 + i128::from(found.mtime_nsec());
    let (into, inode) = (above.canonicalize().expect("there"), found.ino());
    let mark = format!("dropped into: {}\nfile: {inode} {made} {changed}\n", into.display());
    std::fs::write(world.path("disk@a.qcow2.mica-merged"), mark).expect("written");
    let said = world.ctl(&["backup", "drop", "disk", "a"]).refusal();
    assert!(said.contains("no state \"a\"") && file.exists(), "{said}");
    // Of another state.
    let said = world.ctl(&["backup", "drop", "--ignore-gone", "disk", "A"]).refusal();
    assert!(said.contains("no state \"A\"") && file.exists(), "{said}");
    let said = world.ctl(&["backup", "drop", "--ignore-gone", "disk", "a"]).refusal();
    assert!(said.contains("disk@a.qcow2, which is now removed"), "{said}");
    for left in ["", ".mica-merged", ".mica-overlays"] {
        assert!(!world.path(&format!("disk@a.qcow2{left}")).exists(), "{left}");
    }
    world.stop();
}

/// Also where only the note of the layer knows of it, and where nothing does but who has it open.
#[test]
fn state_that_an_image_in_another_folder_needs_keeps_its_file() {
    let Some(mut world) = World::new(9, &[tools::QEMU_NBD]) else { return };
    let keep = |world: &mut World, state: &str| {
        let mut guest = world.guest();
        (0..20).for_each(|_| world.change(&mut guest));
        world.begin(None, state).ok();
        world.ctl(&["backup", "end", "disk"]).ok();
        world.path(&format!("disk@{state}.qcow2"))
    };
    let file = keep(&mut world, "a");
    let wanted = world.model.clone();
    // The sandbox of the server does not let it read there.
    let far = tempfile::tempdir().expect("a folder");
    let clone = far.path().join("clone.qcow2");
    mica::run([Path::new("clone"), &file, &clone]).ok();
    let needed = world.ctl(&["backup", "drop", "disk", "a"]).refusal();
    assert!(needed.contains("clone.qcow2") && needed.contains("--disks-in"), "{needed}");
    // It may have been moved.
    std::fs::remove_file(&clone).expect("it is there");
    let needed = world.ctl(&["backup", "drop", "disk", "a"]).refusal();
    assert!(needed.contains("clone.qcow2, which is not there any more"), "{needed}");
    assert!(needed.contains("--ignore-gone"), "{needed}");
    // QEMU tells nobody where it makes images.
    let file_name = file.display().to_string();
    qemu::create(far.path(), "own.qcow2", &["-b", &file_name, "-F", "qcow2"], "8M");
    let reader = Server::start("", |socket| {
        let mut nbd = Command::new("qemu-nbd");
        nbd.args(["-r", "-t", "-f", "qcow2", "-k"]).arg(socket).arg(far.path().join("own.qcow2"));
        nbd
    });
    let reader = reader.expect("served");
    let job = world.ctl(&["backup", "drop", "--ignore-gone", "disk", "a"]).json();
    assert_eq!((&job["state"], &job["file"]["removed"]), (&"done".into(), &false.into()), "{job}");
    assert!(!world.path("disk@a.qcow2.mica-overlays").exists());
    assert!(job["file"]["reason"].as_str().is_some_and(|why| why.contains("open")), "{job}");
    drop(reader);
    let other = keep(&mut world, "b");
    mica::run([Path::new("clone"), &other, &clone]).ok();
    std::fs::remove_file(&clone).expect("it is there");
    world.ctl(&["backup", "drop", "disk", "b"]).refusal();
    let job = world.ctl(&["backup", "drop", "--ignore-gone", "disk", "b"]).json();
    assert_eq!(job["file"]["removed"], true, "{job}");
    assert_eq!(job["file"]["path"].as_str(), other.to_str(), "{job}");
    assert!(!other.exists() && file.exists());
    let third = keep(&mut world, "c");
    keep(&mut world, "d");
    mica::run([Path::new("clone"), &third, &clone]).ok();
    std::fs::remove_file(&clone).expect("it is there");
    let needed = world.ctl(&["backup", "prune", "disk", "--keep", "1"]).refusal();
    assert!(needed.contains("--ignore-gone"), "{needed}");
    let pruned = world.ctl(&["backup", "prune", "disk", "--keep", "1", "--ignore-gone"]).json();
    assert_eq!(pruned["dropped"], serde_json::json!(["c"]), "{pruned}");
    assert!(!third.exists());
    judge::same_bytes("the overlay", &raw(far.path(), "own.qcow2"), &wanted);
    world.stop();
}
