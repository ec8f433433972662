//! Backups of chains that are served: states are kept and exported while clients write on, and
//! neither a server nor a reader that is killed loses the place.

use mica_tests::kept::{self, LEN, command};
use mica_tests::server::Server;
use mica_tests::{clock, judge, mica, nbd, qemu, tools};
use std::fs;
use std::io::{Read, Write};
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Beyond this the disk is written while a backup begins, by a client that nobody waits for.
const QUIET: usize = LEN / 2;

/// A disk whose states are kept, and what is exported of them.
struct World(kept::World);

impl Deref for World {
    type Target = kept::World;

    fn deref(&self) -> &kept::World {
        &self.0
    }
}

impl DerefMut for World {
    fn deref_mut(&mut self) -> &mut kept::World {
        &mut self.0
    }
}

impl World {
    fn new() -> Option<Self> {
        let mut world = kept::World::new(1, &[tools::NBDINFO, tools::NBDCOPY])?;
        world.end = QUIET;
        Some(Self(world))
    }

    fn control(&self) -> PathBuf {
        self.path("control")
    }

    fn backup_socket(&self) -> PathBuf {
        self.path("backup")
    }

    /// What is exported for the backup, read by a client.
    fn export(&self) -> nbd::Connection {
        let wish = nbd::Wish::default();
        nbd::Connection::open(&self.backup_socket(), "disk", &wish).expect("exported")
    }

    /// The parts of the export for which the context says something, as nbdinfo tells them.
    fn map(&self, context: &str) -> Vec<(usize, usize, u64)> {
        let map = format!("--map={context}");
        let parts = mica_tests::command::run("nbdinfo", ["--json", &map, &self.uri()]).json();
        let number = |part: &serde_json::Value, key: &str| part[key].as_u64().expect("a number");
        let part = |part: &serde_json::Value| {
            let at = usize::try_from(number(part, "offset")).expect("fits");
            (at, usize::try_from(number(part, "length")).expect("fits"), number(part, "type"))
        };
        parts.as_array().expect("a list").iter().map(part).collect()
    }

    /// What the control socket tells of extents, and from where on it tells nothing.
    fn extents(&self, query: &str) -> (Vec<(u64, u64)>, Option<u64>) {
        let answer = self.0.extents(query);
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
        assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
        let answer: serde_json::Value = serde_json::from_str(body).expect("JSON");
        assert_eq!(answer["block_metadata_type"], "VARIABLE_LENGTH");
        assert_eq!(answer["volume_capacity_bytes"], LEN);
        let blocks = answer["block_metadata"].as_array().expect("a list").iter();
        let number = |block: &serde_json::Value, key: &str| block[key].as_u64().expect("a number");
        let blocks =
            blocks.map(|block| (number(block, "byte_offset"), number(block, "size_bytes")));
        (blocks.collect(), answer["next_byte_offset"].as_u64())
    }
}

/// The story of a disk that is backed up every night: in full, and then what has changed.
#[test]
fn full_and_incremental_backups_survive_kills_of_server_and_reader() {
    const ROUNDS: usize = 20;
    let Some(mut world) = World::new() else { return };
    let mut copy = vec![0; LEN];
    for round in 0..ROUNDS {
        let state = format!("s{round}");
        let since = round.checked_sub(1).map(|before| format!("s{before}"));
        let mut guest = world.guest();
        for _ in 0..20 {
            world.change(&mut guest);
        }
        keep(&mut world, round, since.as_deref(), &state);
        let kept = world.model.clone();
        // Guests write on.
        let mut guest = world.guest();
        for _ in 0..10 {
            world.change(&mut guest);
        }
        // A reader that dies costs nothing.
        let mut reader = Command::new("nbdcopy");
        reader.arg(world.uri()).arg(world.dir.path().join("half")).stderr(Stdio::null());
        let mut reader = reader.spawn().expect("started");
        clock::sleep(Duration::from_millis(round as u64 % 5));
        reader.kill().expect("ended");
        reader.wait().expect("ended");
        // Nor does a server, before the end.
        if round % 5 == 4 {
            world.kill();
            world.start();
            let again = world.begin(since.as_deref(), &state).json();
            assert_eq!(again["resumed"], true, "{again}");
        }
        let mut client = world.export();
        match &since {
            None => copy = client.read_all().expect("read"),
            Some(since) => {
                for (at, len, flags) in world.map(&format!("qemu:dirty-bitmap:{since}")) {
                    assert!(flags <= 1, "{flags}");
                    if flags == 1 {
                        let bytes = client.read(at as u64, len as u64).expect("read");
                        copy[at..at + len].copy_from_slice(&bytes);
                    }
                }
            }
        }
        judge::same_bytes(&format!("{state}, kept"), &copy[..QUIET], &kept[..QUIET]);
        judge::same_bytes(&format!("{state}, by QEMU"), &copy, &world.state(&state));
        world.ctl(&["backup", "end", "disk"]).ok();
        let refused = world.begin(since.as_deref(), &state).refusal();
        assert!(refused.contains("ended"), "{refused}");
    }
    // A name that is used again is not taken for a backup that was interrupted.
    world.kill();
    world.start();
    let refused = world.begin(None, "s3").refusal();
    assert!(refused.contains("ended"), "{refused}");
    let listed = world.ctl(&["backup", "list", "disk"]).json();
    assert_eq!(listed["states"].as_array().map(Vec::len), Some(ROUNDS), "{listed}");
    let now = world.guest().read(0, QUIET as u64).expect("read");
    judge::same_bytes("the disk", &now, &world.model[..QUIET]);
    assert!(world.server.take().expect("it runs").stop().expect("it stops").status.success());
    check_all(world.dir.path());
}

/// Keeps a state while another client writes, which may see the server die.
fn keep(world: &mut World, round: usize, since: Option<&str>, state: &str) {
    let stop = AtomicBool::new(false);
    let may_die = round % 3 == 1;
    std::thread::scope(|scope| {
        let mut other = world.guest();
        let (stop, world) = (&stop, &*world);
        scope.spawn(move || hammer(&mut other, stop, round));
        if may_die {
            scope.spawn(move || drop(world.begin(since, state)));
            clock::sleep(Duration::from_millis(5 * (round as u64 % 7)));
            let server = world.server.as_ref().expect("it runs");
            let pid = rustix::process::Pid::from_raw(server.pid().cast_signed()).expect("fits");
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("fits");
        } else {
            let begun = world.begin(since, state).json();
            assert_eq!((&begun["resumed"], &begun["length"]), (&false.into(), &LEN.into()));
        }
        stop.store(true, Ordering::Relaxed);
    });
    if may_die {
        world.kill();
        world.start();
        world.begin(since, state).ok();
    }
}

/// Writes beyond the quiet part until it is told to stop, or the server is gone.
fn hammer(client: &mut nbd::Connection, stop: &AtomicBool, seed: usize) {
    const WRITE: usize = 4096;
    let mut number = seed;
    while !stop.load(Ordering::Relaxed) {
        number = number.wrapping_mul(1_103_515_245).wrapping_add(12345);
        let at = QUIET + (number >> 8) % ((LEN - QUIET) / WRITE) * WRITE;
        let request = nbd::request(nbd::CMD_WRITE, 0, 1, at as u64, 4096);
        let bytes = [&request[..], &[number.to_le_bytes()[1]; WRITE]].concat();
        let mut reply = [0; nbd::SIMPLE_REPLY_BYTES];
        let stream = &mut client.stream;
        if stream.write_all(&bytes).and_then(|()| stream.read_exact(&mut reply)).is_err() {
            return;
        }
        assert_eq!(reply[4..8], [0; 4], "an error");
    }
}

/// QEMU finds nothing wrong with any image in `folder`, and no stray files are there.
fn check_all(folder: &Path) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let name = entry.expect("an entry").file_name().into_string().expect("text");
        assert!(!name.ends_with(".new"), "{name}");
        if name.ends_with(".qcow2") {
            // Clusters that a killed server had taken may be lost.
            const LEAKS_ONLY: i32 = 3;
            let checked = qemu::img(folder, ["check", &name]);
            assert!(matches!(checked.code(), Some(0 | LEAKS_ONLY)), "{name}: {checked:?}");
        }
    }
}

#[test]
fn contexts_say_what_has_changed_and_who_has_it() {
    let Some(mut world) = World::new() else { return };
    let mut guest = world.guest();
    command(&mut guest, nbd::CMD_WRITE, 0, 4096, &[1; 4096]);
    world.begin(None, "mon").ok();
    // The export is of this instant.
    command(&mut guest, nbd::CMD_WRITE, 0, 4096, &[2; 4096]);
    let read = world.export().read(0, 4096).expect("read");
    assert_eq!(read, [1; 4096]);
    let info = mica_tests::command::run("nbdinfo", ["--json", &world.uri()]).json();
    let export = &info["exports"][0];
    assert_eq!((&export["export-name"], &export["is_read_only"]), (&"disk".into(), &true.into()));
    let contexts = serde_json::json!(["base:allocation", "qemu:allocation-depth"]);
    assert_eq!(export["contexts"], contexts, "{info}");
    // The base, and the layer above it, which is the upper one of this state.
    let depth = world.map("qemu:allocation-depth");
    assert_eq!(depth[0], (0, 64 << 10, 1), "{depth:?}");
    assert!(depth.contains(&(1 << 20, 2 << 20, 2)), "{depth:?}");
    world.ctl(&["backup", "end", "disk"]).ok();
    assert!(!world.backup_socket().exists(), "the socket is gone");
    command(&mut guest, nbd::CMD_WRITE, 2 << 20, 4096, &[3; 4096]);
    // Discarded, and zeroed.
    const TRIM: u16 = 4;
    const WRITE_ZEROES: u16 = 6;
    command(&mut guest, TRIM, 1 << 20, 128 << 10, &[]);
    command(&mut guest, WRITE_ZEROES, 5 << 19, 64 << 10, &[]);
    world.begin(Some("mon"), "tue").ok();
    let dirty: Vec<_> = world.map("qemu:dirty-bitmap:mon");
    let dirty: Vec<_> = dirty.into_iter().filter(|part| part.2 == 1).collect();
    let wanted =
        [(0, 4096, 1), (1 << 20, 128 << 10, 1), (2 << 20, 4096, 1), (5 << 19, 64 << 10, 1)];
    // Overlays have subclusters: nothing else was copied.
    assert_eq!(dirty, wanted);
    let qemu = format!(
        "driver=nbd,server.type=unix,server.path={},export=disk,\
         x-dirty-bitmap=qemu:dirty-bitmap:mon",
        world.backup_socket().display()
    );
    let map = qemu::img(world.dir.path(), ["map", "--output=json", "--image-opts", &qemu]).json();
    // To it, what is dirty has no data.
    let dirty = map.as_array().expect("a list").iter().filter(|part| part["data"] == false);
    let dirty: Vec<_> = dirty.map(|part| part["start"].as_u64().expect("a number")).collect();
    assert_eq!(dirty, [0, 1 << 20, 2 << 20, 5 << 19], "{map}");
    // The same over HTTP, page by page, of the state and of now.
    command(&mut guest, nbd::CMD_WRITE, 6 << 20, 2048, &[5; 2048]);
    let mut told = world.extents("since=mon&state=tue&max=3");
    let next = told.1.expect("there is more");
    told.0.extend(world.extents(&format!("since=mon&state=tue&start={next}")).0);
    assert_eq!(told.0, wanted.map(|(at, len, _)| (at as u64, len as u64)));
    let now = world.extents("since=tue");
    assert_eq!(now, (vec![(6 << 20, 2048)], None));
    let all = world.extents("state=mon");
    // How much of the cluster is data depends on the blocks of the file system.
    assert!(all.0[0].0 == 0 && (4096..=64 << 10).contains(&all.0[0].1), "{all:?}");
    assert_eq!(all.0[1], (1 << 20, 2 << 20), "{all:?}");
    world.kill();
    check_all(world.dir.path());
}

/// A state is named after the layer that was active then. That may be merged later.
#[test]
fn states_stay_when_the_layers_above_them_are_merged() {
    let Some(mut world) = World::new() else { return };
    let mut guest = world.guest();
    world.begin(None, "mon").ok();
    world.ctl(&["backup", "end", "disk"]).ok();
    command(&mut guest, nbd::CMD_WRITE, 0, 4096, &[1; 4096]);
    let folder = world.dir.path().to_owned();
    let at = |name: &str| folder.join(name).display().to_string();
    world.ctl(&["snapshot", "disk", &at("next.qcow2")]).ok();
    command(&mut guest, nbd::CMD_WRITE, 8192, 4096, &[2; 4096]);
    // `disk.qcow2` leaves the chain, as does the mark that led to it.
    world.ctl(&["stream", "disk", "--base", &at("disk@mon.qcow2")]).ok();
    let states = |world: &World, disk: &str| {
        let listed = world.ctl(&["backup", "list", disk]).json();
        let states = listed["states"].as_array().expect("a list").iter();
        states.map(|state| state["state"].as_str().expect("a name").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(states(&world, "disk"), ["mon"]);
    drop(guest);
    world.kill();
    let control = world.control().display().to_string();
    let image = world.dir.path().join("next.qcow2");
    // The disk is called after it.
    let options = ["--control", &*control];
    world.server = Some(Server::mica_writable(&image, "qcow2", &options).expect("served"));
    assert_eq!(states(&world, "next"), ["mon"]);
    let socket = world.backup_socket().display().to_string();
    let begin = ["backup", "begin", "next", "--as", "tue", "--since", "mon", "--nbd", &socket];
    world.ctl(&begin).ok();
    let uri = format!("nbd+unix:///next?socket={socket}");
    let map = ["--json", "--map=qemu:dirty-bitmap:mon", &uri];
    let map = mica_tests::command::run("nbdinfo", map).json();
    let dirty = map.as_array().expect("a list").iter().filter(|part| part["type"] == 1);
    let dirty: Vec<_> =
        dirty.map(|part| (part["offset"].as_u64(), part["length"].as_u64())).collect();
    let is_told = |at: u64| {
        let has = |part: &(Option<u64>, Option<u64>)| match *part {
            (Some(start), Some(len)) => (start..start + len).contains(&at),
            _ => false,
        };
        dirty.iter().any(has)
    };
    assert!(is_told(0) && is_told(4095) && is_told(8192) && is_told(12287), "{dirty:?}");
    assert!(!is_told(64 << 10), "only a cluster has changed: {dirty:?}");
    world.ctl(&["backup", "end", "next"]).ok();
    // What a merge would change is refused, served or not.
    let refused = world.ctl(&["commit", "next", "--base", "disk@mon.qcow2"]).refusal();
    assert!(refused.contains("keeps its state"), "{refused}");
    world.kill();
    let refused = mica::run(["commit", "-b", &at("disk@mon.qcow2"), &at("next.qcow2")]).refusal();
    assert!(refused.contains("keeps the state"), "{refused}");
}

#[test]
fn cancelled_drop_of_a_state_leaves_its_backup_ended() {
    const MIB: usize = 1 << 20;
    let Some(world) = World::new() else { return };
    let mut guest = world.guest();
    for at in 3..7 {
        command(&mut guest, nbd::CMD_WRITE, at * MIB, MIB, &vec![at.to_le_bytes()[0]; MIB]);
    }
    world.begin(None, "mon").ok();
    world.ctl(&["backup", "end", "disk"]).ok();
    world.ctl(&["backup", "drop", "disk", "mon", "--background", "--rate", "256k"]).ok();
    let cancelled = world.ctl(&["cancel", "disk"]).json();
    assert_eq!(cancelled["state"], "cancelled", "{cancelled}");
    let refused = world.begin(None, "mon").refusal();
    assert!(refused.contains("ended"), "{refused}");
    // When it is gone another may have its name, and is exported again after its reader died.
    world.ctl(&["backup", "drop", "disk", "mon"]).ok();
    assert_eq!(world.begin(None, "mon").json()["resumed"], false);
    assert!(guest.read(3 << 20, 4096).expect("read").iter().all(|byte| *byte == 3));
}

/// The story: a server that was killed at the end of a drop left the state's file, which nobody
/// needed, was told of, or could tell from others.
#[test]
fn file_that_a_killed_drop_left_is_removed_by_the_next_backup() {
    let Some(mut world) = World::new() else { return };
    let mut guest = world.guest();
    world.change(&mut guest);
    world.begin(None, "mon").ok();
    world.ctl(&["backup", "end", "disk"]).ok();
    let at = |name: &str| world.dir.path().join(name);
    let (disk, file, other) = (at("disk.qcow2"), at("disk@mon.qcow2"), at("disk@sun.qcow2"));
    fs::hard_link(&file, at("kept")).expect("linked");
    world.ctl(&["backup", "drop", "disk", "mon"]).ok();
    assert!(!file.exists());
    // As it was when the chain had gone on without it, and the server died.
    fs::hard_link(at("kept"), &file).expect("linked");
    fs::remove_file(at("kept")).expect("removed");
    let inode = file.metadata().expect("there").ino();
    let mark = drop_mark(&file, &disk);
    fs::write(at("disk@mon.qcow2.mica-merged"), mark).expect("marked");
    fs::copy(&file, &other).expect("copied");
    world.kill();
    world.start();
    assert_eq!(world.begin(None, "mon").json()["resumed"], false);
    world.ctl(&["backup", "end", "disk"]).ok();
    assert_ne!(file.metadata().expect("the new one").ino(), inode);
    assert!(!world.dir.path().join("disk@mon.qcow2.mica-merged").exists());
    assert!(other.exists(), "of this nobody says that it is left of a drop");
    world.guest().read_all().expect("read");
}

/// What a drop of the state in `file` puts beside it, which goes into `into`.
fn drop_mark(file: &Path, into: &Path) -> String {
    let found = file.metadata().expect("there");
    let made = found
        .created()
        .map_or(0, |made| made.duration_since(std::time::UNIX_EPOCH).expect("later").as_nanos());
    let changed = i128::from(found.mtime()) * 1_000_000_000 + i128::from(found.mtime_nsec());
    let (into, inode) = (into.canonicalize().expect("there"), found.ino());
    format!("dropped into: {}\nfile: {inode} {made} {changed}\n", into.display())
}

/// The story: a drop was killed, and the user took the layer out of the chain with the server gone.
/// The next backup removed its file, which is the user's.
#[test]
fn file_of_a_state_that_left_by_a_rebase_or_a_commit_stays() {
    for verb in ["rebase", "commit"] {
        let Some(mut world) = World::new() else { return };
        let mut guest = world.guest();
        for state in ["sun", "mon"] {
            world.change(&mut guest);
            world.begin(None, state).ok();
            world.ctl(&["backup", "end", "disk"]).ok();
        }
        let at = |name: &str| world.dir.path().join(name);
        let (disk, file, base) = (at("disk.qcow2"), at("disk@mon.qcow2"), at("disk@sun.qcow2"));
        let mark = at("disk@mon.qcow2.mica-merged");
        world.stop();
        fs::write(&mark, drop_mark(&file, &disk)).expect("marked");
        let [disk, base] = [disk, base].map(|path| path.display().to_string());
        match verb {
            "rebase" => drop(mica::run(["rebase", "-b", &*base, "-F", "qcow2", &disk]).ok()),
            // It is refused, as it would change states, and what is said of them is taken back.
            _ => drop(mica::run(["commit", "-b", &*base, &disk]).refusal()),
        }
        assert!(!mark.exists(), "{verb}");
        world.start();
        world.begin(None, "tue").ok();
        assert!(file.exists(), "{verb}");
    }
}

/// The story: the mark of a layer could not be changed when the state that it led to was dropped.
/// The file of that was removed, and nothing led to the disk any more.
#[test]
fn file_of_a_dropped_state_stays_as_long_as_a_mark_leads_to_it() {
    let Some(mut world) = World::new() else { return };
    let mut guest = world.guest();
    for state in ["sun", "mon"] {
        world.change(&mut guest);
        world.begin(None, state).ok();
        world.ctl(&["backup", "end", "disk"]).ok();
    }
    let at = |name: &str| world.dir.path().join(name);
    let (file, mark) = (at("disk@mon.qcow2"), at("disk@sun.qcow2.mica-above"));
    let in_the_way = at("disk@sun.qcow2.mica-above.tmp");
    // As older versions left it that merged a layer.
    fs::write(&mark, "above: disk@mon.qcow2\n").expect("marked");
    fs::create_dir(&in_the_way).expect("made");
    let dropped = world.ctl(&["backup", "drop", "disk", "mon"]);
    assert!(file.exists(), "{dropped}");
    fs::remove_dir(&in_the_way).expect("removed");
    world.begin(None, "tue").ok();
    assert!(!file.exists());
    assert_eq!(fs::read_to_string(&mark).expect("there"), "above: disk.qcow2\n");
}

#[test]
fn state_with_internal_snapshots_of_the_user_is_not_dropped() {
    let Some(mut world) = World::new() else { return };
    let folder = world.dir.path().to_owned();
    world.stop();
    qemu::img(&folder, ["snapshot", "-c", "mine", "disk.qcow2"]).ok();
    world.start();
    world.begin(None, "mon").ok();
    world.ctl(&["backup", "end", "disk"]).ok();
    let refused = world.ctl(&["backup", "drop", "disk", "mon"]).refusal();
    assert!(refused.contains("internal snapshots (1)"), "{refused}");
    world.begin(None, "tue").ok();
    world.ctl(&["backup", "end", "disk"]).ok();
    let refused = world.ctl(&["backup", "prune", "disk", "--keep", "1"]).refusal();
    assert!(refused.contains("internal snapshots (1)"), "{refused}");
    // What is advised helps.
    world.ctl(&["stream", "disk", "--drop-states"]).ok();
    world.stop();
    let listed = qemu::img(&folder, ["snapshot", "-l", "disk@mon.qcow2"]);
    assert!(listed.stdout.contains("mine"), "{listed}");
}

#[test]
fn what_cannot_be_backed_up_is_refused_and_nothing_changes() {
    let Some(world) = World::new() else { return };
    let nothing = world.begin(Some("mon"), "tue").refusal();
    assert!(nothing.contains("it has none"), "{nothing}");
    world.begin(None, "mon").ok();
    let second = world.begin(None, "tue").refusal();
    assert!(second.contains("\"mon\"") && second.contains("end that first"), "{second}");
    world.ctl(&["backup", "end", "disk"]).ok();
    let unknown = world.begin(Some("sun"), "tue").refusal();
    assert!(unknown.contains("it has mon"), "the states are listed: {unknown}");
    for bad in ["", "a/b", "../up"] {
        world.begin(None, bad).refusal();
    }
    // Where something else is.
    fs::write(world.dir.path().join("disk@tue.qcow2"), "mine").expect("written");
    let taken = world.begin(None, "tue").refusal();
    assert!(taken.contains("no layer of this disk"), "{taken}");
    assert_eq!(fs::read(world.dir.path().join("disk@tue.qcow2")).expect("read"), b"mine");
    let own = world.server.as_ref().expect("it runs").socket().display().to_string();
    let busy = world.ctl(&["backup", "begin", "disk", "--as", "wed", "--nbd", &own]).refusal();
    assert!(!world.dir.path().join("disk@wed.qcow2").exists(), "{busy}");
    world.ctl(&["backup", "end", "disk"]).refusal();
    let status = world.ctl(&["status"]).json();
    assert_eq!(status["disks"][0]["layers"], 3, "{status}");
    assert!(status["disks"][0]["backup"].is_null(), "{status}");
    assert!(!world.dir.path().join(".disk.qcow2.mica-new").exists());
}
