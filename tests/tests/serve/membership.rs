//! Disks that come and go while a server runs: by command, by its configuration, and across a
//! takeover.

use mica_tests::command::Finished;
use mica_tests::takeover::Process;
use mica_tests::{clock, mica, nbd, qemu, tools};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(60);

/// A folder with images a.qcow2, b.qcow2 and c.qcow2, and a configuration.
pub(crate) struct World(TempDir);

impl World {
    pub(crate) fn new() -> Option<Self> {
        if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
            return None;
        }
        let world = Self(tempfile::tempdir().expect("a folder"));
        for (name, size) in [("a", "1M"), ("b", "2M"), ("c", "3M")] {
            qemu::create(world.path(), &format!("{name}.qcow2"), &[], size);
        }
        world.configure(&["a", "b"]);
        Some(world)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Writes the configuration: disks of the images of these names.
    pub(crate) fn configure(&self, names: &[&str]) {
        let disks: String = names.iter().map(|name| table(name)).collect();
        fs::write(self.at("mica.toml"), format!("control = \"control\"\n{disks}"))
            .expect("written");
    }

    pub(crate) fn serve(&self, options: &[&str]) -> Process {
        self.serve_by(Command::new(mica::binary()), options)
    }

    /// The same, by a command that may have an environment of its own.
    pub(crate) fn serve_by(&self, command: Command, options: &[&str]) -> Process {
        let config = self.at("mica.toml").display().to_string();
        let options = [&["--config", &config], options].concat();
        let process = Process::start_command(command, self.path(), "log", &options);
        let answers = || (self.ctl(&["status"]).code() == Some(0)).then_some(());
        let answered = clock::poll(LIMIT, Duration::from_millis(10), answers);
        assert!(answered.is_some(), "not served: {}", process.log());
        process
    }

    /// `mica ctl VERB…`
    pub(crate) fn ctl(&self, verb: &[&str]) -> Finished {
        let control = self.at("control").display().to_string();
        mica::run(["ctl"].iter().chain(verb).copied().chain(["--control", &control]))
    }

    pub(crate) fn json(&self, verb: &[&str]) -> Value {
        self.ctl(&[verb, &["--output", "json"]].concat()).json()
    }

    pub(crate) fn add(&self, name: &str, more: &[&str]) -> Finished {
        let (image, socket) = (self.at(&format!("{name}.qcow2")), self.at(&format!("{name}.sock")));
        let (image, socket) = (image.display().to_string(), socket.display().to_string());
        self.ctl(&[&["add", &image, "--nbd", &socket], more].concat())
    }

    /// The names of the disks and their states.
    pub(crate) fn states(&self) -> Vec<(String, String)> {
        let status = self.json(&["status"]);
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        let disks = status["disks"].as_array().expect("a list");
        disks.iter().map(|disk| (text(&disk["name"]), text(&disk["state"]))).collect()
    }

    pub(crate) fn is(&self, wanted: &[(&str, &str)]) {
        let states = self.states();
        let states: Vec<_> = states.iter().map(|(name, state)| (&**name, &**state)).collect();
        assert_eq!(states, wanted);
    }

    /// The length of a disk, as a client sees it.
    pub(crate) fn len(&self, name: &str) -> u64 {
        let socket = self.at(&format!("{name}.sock"));
        nbd::Connection::open(&socket, "", &nbd::Wish::default()).expect("served").len
    }
}

pub(crate) fn table(name: &str) -> String {
    format!("[[disk]]\nname = \"{name}\"\nimage = \"{name}.qcow2\"\nnbd = [\"{name}.sock\"]\n")
}

#[test]
fn disks_are_added_removed_drained_and_undrained_while_others_are_served() {
    let Some(world) = World::new() else { return };
    let server = world.serve(&[]);
    let stays = UnixStream::connect(world.at("a.sock")).expect("served");
    assert_eq!(world.add("c", &[]).ok(), "c: added and served\n");
    assert_eq!(world.len("c"), 3 << 20);
    world.is(&[("a", "serving"), ("b", "serving"), ("c", "serving")]);

    let same_name = world.add("c", &[]).refusal();
    assert!(same_name.contains("there is a disk named \"c\" already"), "{same_name}");
    let same_image = world.add("a", &["--name", "d"]).refusal();
    assert!(same_image.contains("the disk \"a\" of this server writes it"), "{same_image}");
    let socket = world.at("e.sock").display().to_string();
    let image = world.at("missing.qcow2").display().to_string();
    let missing = world.ctl(&["add", &image, "--nbd", &socket]).refusal();
    assert!(missing.contains("missing.qcow2") && !world.at("e.sock").exists(), "{missing}");
    let nowhere = world.ctl(&["add", &image]).refusal();
    assert!(nowhere.contains("nowhere to serve it"), "{nowhere}");

    world.ctl(&["drain", "c"]).ok();
    assert!(!world.at("c.sock").exists());
    world.is(&[("a", "serving"), ("b", "serving"), ("c", "drained")]);
    // Somebody else may have it meanwhile.
    qemu::io(world.path(), &[], "c.qcow2", &["write -P 7 0 64k"]);
    world.ctl(&["undrain", "c"]).ok();
    let socket = world.at("c.sock");
    let mut client = nbd::Connection::open(&socket, "", &nbd::Wish::default()).expect("served");
    assert_eq!(client.read(0, 512).expect("read"), [7; 512]);
    let served = world.ctl(&["undrain", "c"]).refusal();
    assert!(served.contains("is served"), "{served}");

    assert_eq!(world.ctl(&["remove", "c"]).ok(), "c: removed, and its image closed\n");
    world.is(&[("a", "serving"), ("b", "serving")]);
    qemu::img(world.path(), ["check", "c.qcow2"]).ok();
    world.ctl(&["remove", "c"]).refusal();
    world.add("c", &[]).ok();
    drop(stays);
    server.stop();
    for name in ["a", "b", "c"] {
        assert!(!world.at(&format!("{name}.sock")).exists());
        qemu::img(world.path(), ["check", &format!("{name}.qcow2")]).ok();
    }
}

#[test]
fn sandbox_allows_disks_where_it_was_told_and_nowhere_else() {
    let Some(world) = World::new() else { return };
    // What is beside the images of the configuration, or below, is allowed in any case.
    let elsewhere = tempfile::tempdir().expect("a folder");
    let [other, further] = ["other", "further"].map(|name| elsewhere.path().join(name));
    for folder in [&other, &further] {
        fs::create_dir(folder).expect("made");
        qemu::create(folder, "d.qcow2", &[], "4M");
    }
    let allowed = other.display().to_string();
    let server = world.serve(&["--disks-in", &allowed, "--sandbox", "require"]);
    let add = |folder: &Path| {
        let at = |name: &str| folder.join(name).display().to_string();
        world.ctl(&["add", &at("d.qcow2"), "--nbd", &at("d.sock")])
    };
    add(&other).ok();
    let refused = add(&further).refusal();
    let option = format!("--disks-in {}", further.canonicalize().expect("there").display());
    assert!(refused.contains(&option), "{refused}");
    let link = other.join("link");
    std::os::unix::fs::symlink(&further, &link).expect("made");
    let refused = add(&link).refusal();
    assert!(refused.contains(&option), "by another way: {refused}");
    let tcp = world.add("c", &["--nbd", "tcp:127.0.0.1:0"]).refusal();
    assert!(tcp.contains("no further TCP ports"), "{tcp}");
    let fuse = world.add("c", &["--fuse", &world.at("file").display().to_string()]).refusal();
    assert!(fuse.contains("no further FUSE files"), "{fuse}");

    // The socket of a server that was killed is known from that of one that lives.
    let dead = world.at("c.sock");
    drop(UnixListener::bind(&dead).expect("bound"));
    world.add("c", &[]).ok();
    assert_eq!(world.len("c"), 3 << 20);
    world.ctl(&["remove", "c"]).ok();
    let _living = UnixListener::bind(&dead).expect("bound");
    let taken = world.add("c", &[]).refusal();
    assert!(taken.contains("another server listens there"), "{taken}");
    server.stop();
}

/// The story: such a disk was refused by `add`, and served by `undrain`; that it had no log was
/// said after its first write.
#[test]
fn drained_disk_whose_folder_of_logs_was_replaced_stays_drained() {
    let Some(world) = World::new() else { return };
    // What is beside an image is allowed in any case.
    let elsewhere = tempfile::tempdir().expect("a folder");
    let logs = elsewhere.path().join("logs");
    fs::create_dir(&logs).expect("made");
    let disk = format!("{}redo-dir = {:?}\n", table("a"), logs.display().to_string());
    fs::write(world.at("mica.toml"), format!("control = \"control\"\n{disk}")).expect("written");
    let server = world.serve(&["--sandbox", "require"]);
    world.ctl(&["drain", "a"]).ok();

    let (folder, aside) = (only_one_in(&logs), elsewhere.path().join("aside"));
    fs::rename(&folder, &aside).expect("renamed");
    fs::create_dir(&folder).expect("made");
    fs::set_permissions(&folder, fs::metadata(&aside).expect("there").permissions()).expect("set");
    let refused = world.ctl(&["undrain", "a"]).refusal();
    assert!(refused.contains("restart the server"), "{refused}");
    world.is(&[("a", "drained")]);

    fs::remove_dir(&folder).expect("empty");
    fs::rename(&aside, &folder).expect("renamed");
    world.ctl(&["undrain", "a"]).ok();
    world.is(&[("a", "serving")]);
    server.stop();
}

fn only_one_in(folder: &Path) -> PathBuf {
    let mut found =
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("read").path());
    let one = found.next().expect("one");
    assert!(found.next().is_none(), "{} holds one", folder.display());
    one
}

#[test]
fn one_image_that_is_missing_keeps_no_other_disk_from_being_served() {
    let Some(world) = World::new() else { return };
    world.configure(&["a", "missing", "b"]);
    let config = world.at("mica.toml").display().to_string();
    let strict = mica::run(["serve", "--config", &config, "--strict"]).refusal();
    assert!(strict.contains("disk \"missing\""), "{strict}");

    let server = world.serve(&[]);
    world.is(&[("a", "serving"), ("missing", "failed"), ("b", "serving")]);
    let says = || server.log().contains(" WARN serving 2 of 3 disks\n").then_some(());
    assert!(clock::poll(LIMIT, Duration::from_millis(10), says).is_some(), "{}", server.log());
    let status = world.json(&["status"]);
    let failure = status["disks"][1]["failure"].as_str().expect("a reason");
    assert!(failure.contains("missing.qcow2"), "{failure}");
    assert_eq!(status["disks"][0]["failure"], Value::Null);
    assert!(world.ctl(&["status"]).ok().contains(&format!("missing: {failure}")));
    assert!(!world.at("missing.sock").exists());

    world.ctl(&["undrain", "missing"]).refusal();
    qemu::create(world.path(), "missing.qcow2", &[], "5M");
    // Who drains it does not want it to come back.
    world.ctl(&["drain", "missing"]).ok();
    world.ctl(&["reload"]).ok();
    world.is(&[("a", "serving"), ("missing", "drained"), ("b", "serving")]);
    world.ctl(&["undrain", "missing"]).ok();
    assert_eq!(world.len("missing"), 5 << 20);
    server.stop();

    for name in ["a", "missing", "b"] {
        fs::remove_file(world.at(&format!("{name}.qcow2"))).expect("removed");
    }
    let none = mica::run(["serve", "--config", &config]).refusal();
    assert!(none.contains("a.qcow2"), "{none}");
}

#[test]
fn configuration_is_checked_as_a_whole() {
    let Some(world) = World::new() else { return };
    world.configure(&["a", "missing", "b", "gone", "b"]);
    let config = world.at("mica.toml").display().to_string();
    let check = || mica::run(["serve", "--config", &config, "--check-config"]);
    let checked = check();
    assert_eq!(checked.code(), Some(1));
    let said = checked.stderr;
    for wanted in ["missing.qcow2", "gone.qcow2", "disk \"b\": another disk has this name"] {
        assert!(said.contains(wanted), "{wanted}: {said}");
    }
    assert!(!world.at("a.sock").exists());
    world.configure(&["a", "b"]);
    let server = world.serve(&[]);
    assert!(check().ok().contains("2 disks, nothing wrong"), "while it is served");
    server.stop();
}

#[test]
fn configuration_is_read_again() {
    let Some(world) = World::new() else { return };
    let server = world.serve(&[]);
    qemu::create(world.path(), "d.qcow2", &[], "4M");
    world.add("d", &[]).ok();
    world.configure(&["b", "c"]);
    assert_eq!(
        world.json(&["reload"]),
        json!({"added": ["c"], "removed": ["a"], "unchanged": 1, "refused": [], "certificates": [],
               "notes": []})
    );
    world.is(&[("b", "serving"), ("d", "serving"), ("c", "serving")]);
    assert_eq!(world.len("c"), 3 << 20);

    // What is not understood changes nothing.
    fs::write(world.at("mica.toml"), "control = \"control\"\n[[disk]]\nnam = 1\n")
        .expect("written");
    let refused = world.ctl(&["reload"]).refusal();
    assert!(refused.contains("mica.toml: line 3"), "{refused}");
    world.is(&[("b", "serving"), ("d", "serving"), ("c", "serving")]);

    // A disk that has changed stays as it is, until it is removed; a file that was replaced is
    // read, and a signal does the same.
    let changed = format!(
        "queues = 1\ncontrol = \"control\"\n{}{}read-only = true\n",
        table("b"),
        table("c")
    );
    fs::write(world.at("new.toml"), changed).expect("written");
    fs::rename(world.at("new.toml"), world.at("mica.toml")).expect("renamed");
    let reloaded = world.ctl(&["reload", "--output", "json"]);
    assert_eq!(reloaded.code(), Some(1));
    let answer: Value = serde_json::from_str(&reloaded.stdout).expect("JSON");
    assert_eq!(answer["refused"][0]["disk"], "c");
    let why = answer["refused"][0]["error"].as_str().expect("text");
    assert!(why.contains("other settings (read-only)"), "{why}");
    assert!(answer["notes"][0].as_str().expect("text").contains("next start"), "{answer}");
    world.ctl(&["remove", "c"]).ok();
    server.signal(Signal::HUP);
    let is_read_only = || {
        let status = world.json(&["status"]);
        let disk = status["disks"].as_array()?.iter().find(|disk| disk["name"] == "c")?.clone();
        (disk["writable"] == false).then_some(())
    };
    clock::poll(LIMIT, Duration::from_millis(10), is_read_only).expect("reloaded");
    server.stop();
}

/// The story: a signal that came while the configuration was being read was an error in the log,
/// and what had been changed for it stayed as it was.
#[test]
fn last_of_many_hang_ups_is_heard() {
    let Some(world) = World::new() else { return };
    let server = world.serve(&[]);
    let rounds = [&["a", "b", "c"][..], &["a"]].into_iter().cycle().take(20);
    for names in rounds.chain([&["b", "c"][..]]) {
        // Never seen half-written.
        let disks: String = names.iter().map(|name| table(name)).collect();
        fs::write(world.at("next.toml"), format!("control = \"control\"\n{disks}")).expect("made");
        fs::rename(world.at("next.toml"), world.at("mica.toml")).expect("renamed");
        server.signal(Signal::HUP);
    }
    let is_reloaded = || {
        let states = world.states();
        (states.iter().map(|(name, _)| &**name).eq(["b", "c"])).then_some(())
    };
    clock::poll(LIMIT, Duration::from_millis(10), is_reloaded).expect("reloaded");
    assert!(!server.log().contains("not reloaded"), "{}", server.log());
    server.stop();
}

#[test]
fn disks_are_kept_across_a_restart_when_asked() {
    let Some(world) = World::new() else { return };
    let server = world.serve(&[]);
    let saved = world.add("c", &["--save", "--read-only"]).ok();
    assert!(saved.contains("saved in"), "{saved}");
    world.ctl(&["remove", "a", "--save"]).ok();
    qemu::create(world.path(), "d.qcow2", &[], "4M");
    world.add("d", &[]).ok();
    server.stop();
    let server = world.serve(&[]);
    world.is(&[("b", "serving"), ("c", "serving")]);
    assert_eq!(world.json(&["status"])["disks"][1]["writable"], false);
    let reloaded = world.json(&["reload"]);
    assert_eq!(reloaded["unchanged"], 2, "{reloaded}");

    // The table of a disk that was removed only for now is not replaced by another.
    world.ctl(&["remove", "c"]).ok();
    let refused = world.add("c", &["--save"]).refusal();
    assert!(refused.contains("\"c\" with other settings"), "{refused}");
    world.is(&[("b", "serving")]);
    server.stop();
}

/// The story: each removal read the whole configuration, and wrote it if it was to be saved.
#[test]
fn several_disks_are_removed_at_once_up_to_one_that_is_not_there() {
    let Some(world) = World::new() else { return };
    world.configure(&["a", "b", "c"]);
    let server = world.serve(&[]);
    let refused = world.ctl(&["remove", "--save", "a", "gone", "b"]).refusal();
    assert!(refused.contains("after a (removed)") && refused.contains("\"gone\""), "{refused}");
    world.is(&[("b", "serving"), ("c", "serving")]);
    let removed = world.json(&["remove", "--save", "b", "c"]);
    assert_eq!(removed["removed"], json!(["b", "c"]), "{removed}");
    assert_eq!(removed["saved"], world.at("mica.toml").display().to_string());
    let saved = fs::read_to_string(world.at("mica.toml")).expect("there");
    assert!(!saved.contains("[[disk]]"), "{saved}");
    world.is(&[]);
    server.stop();
}

#[test]
fn takeover_leaves_what_was_done_by_command_as_it_is() {
    let Some(world) = World::new() else { return };
    world.configure(&["a", "b"]);
    let allowed = world.path().display().to_string();
    let options = ["--disks-in", &allowed];
    let old = world.serve(&options);
    world.add("c", &["--read-only"]).ok();
    qemu::create(world.path(), "d.qcow2", &[], "4M");
    world.add("d", &[]).ok();
    world.ctl(&["drain", "d"]).ok();
    world.ctl(&["remove", "b"]).ok();
    // The configuration got this one by command.
    qemu::create(world.path(), "e.qcow2", &[], "1M");
    world.add("e", &["--save"]).ok();
    world.ctl(&["remove", "e"]).ok();
    let config = world.at("mica.toml").display().to_string();
    let take_over = ["--config", &config, "--takeover", "--disks-in", &allowed];
    let new = Process::start(world.path(), "new", &take_over);
    let has_taken_over = || (world.json(&["status"])["pid"] == new.pid()).then_some(());
    clock::poll(LIMIT, Duration::from_millis(20), has_taken_over).expect("taken over");
    let before = [("a", "serving"), ("b", "drained"), ("e", "drained")];
    world.is(&[&before[..], &[("c", "serving"), ("d", "drained")]].concat());
    assert_eq!(world.json(&["status"])["disks"][4]["length"], 4 << 20, "it is told");
    assert_eq!(world.len("c"), 3 << 20);
    world.ctl(&["undrain", "d"]).ok();
    assert_eq!(world.len("d"), 4 << 20);
    // Nobody else has its image: it was not opened.
    qemu::io(world.path(), &[], "b.qcow2", &["write -P 7 0 64k"]);
    let reloaded = world.json(&["reload"]);
    assert_eq!(reloaded["removed"], json!([]), "what was added stays: {reloaded}");
    drop(old);
    new.stop();
    assert!(!world.at("c.sock").exists());
}

#[test]
fn server_without_disks_waits_for_them() {
    let Some(world) = World::new() else { return };
    fs::write(world.at("mica.toml"), "control = \"control\"\ndisks-in = [\".\"]\n")
        .expect("written");
    let server = world.serve(&[]);
    world.is(&[]);
    world.add("a", &[]).ok();
    assert_eq!(world.len("a"), 1 << 20);
    // Killed, it leaves sockets and an image that was not closed.
    server.signal(Signal::KILL);
    drop(server);
    let server = world.serve(&[]);
    world.add("a", &[]).ok();
    assert_eq!(world.len("a"), 1 << 20);
    server.stop();
    qemu::img(world.path(), ["check", "a.qcow2"]).ok();
}

/// The story: the disk was gone from the server, and a later reload served what was drained.
#[test]
fn drained_disk_whose_new_place_is_taken_stays_drained_until_it_is_free() {
    let Some(world) = World::new() else { return };
    let server = world.serve(&[]);
    let taken = world.at("taken.sock").display().to_string();
    let image = world.at("c.qcow2").display().to_string();
    world.ctl(&["add", &image, "--vhost-user", &taken]).ok();
    world.ctl(&["drain", "b"]).ok();
    let moved = table("b").replace("b.sock", "taken.sock");
    let config = format!("control = \"control\"\n{}{moved}", table("a"));
    fs::write(world.at("mica.toml"), config).expect("written");
    let said = world.ctl(&["reload"]);
    assert!(said.to_string().contains("taken.sock"), "{said}");
    let states = |state| [("a", "serving"), ("b", state), ("c", "serving")];
    let named = |state| states(state).map(|(name, state)| (name.to_owned(), state.to_owned()));
    let sorted = || {
        let mut found = world.states();
        found.sort();
        found
    };
    assert_eq!(sorted(), named("drained"));
    world.ctl(&["remove", "c"]).ok();
    world.ctl(&["reload"]).ok();
    world.is(&[("a", "serving"), ("b", "drained")]);
    world.ctl(&["undrain", "b"]).ok();
    assert!(world.at("taken.sock").exists());
    server.stop();
}

#[test]
fn drained_disk_stays_drained_under_another_name() {
    let Some(world) = World::new() else { return };
    let old = world.serve(&[]);
    world.ctl(&["drain", "b"]).ok();
    let text = fs::read_to_string(world.at("mica.toml")).expect("there");
    let rename = |to: &str| {
        let renamed = text.replace("name = \"b\"", &format!("name = \"{to}\""));
        assert!(renamed != text, "{text}");
        fs::write(world.at("mica.toml"), renamed).expect("written");
    };
    rename("x");
    let reloaded = world.json(&["reload"]);
    assert_eq!((&reloaded["added"], &reloaded["removed"]), (&json!([]), &json!(["b"])));
    let note = reloaded["notes"][0].as_str().expect("a note");
    assert!(note.contains("\"x\" has the image of \"b\", which was drained"), "{note}");
    world.is(&[("a", "serving"), ("x", "drained")]);
    assert_eq!(world.json(&["status"])["disks"][1]["length"], 2 << 20);

    rename("y");
    let config = world.at("mica.toml").display().to_string();
    let new = Process::start(world.path(), "new", &["--config", &config, "--takeover"]);
    let has_taken_over = || (world.json(&["status"])["pid"] == new.pid()).then_some(());
    clock::poll(LIMIT, Duration::from_millis(20), has_taken_over).expect("taken over");
    drop(old);
    world.is(&[("a", "serving"), ("y", "drained")]);
    assert_eq!(world.json(&["status"])["disks"][1]["length"], 2 << 20);
    world.ctl(&["undrain", "y"]).ok();
    world.is(&[("a", "serving"), ("y", "serving")]);
    new.stop();
}

/// The story: two disks of one image were in the configuration, the one drained and the other
/// served in its place. When the drained one left the configuration, a process that took over held
/// the other for it under a new name, and left it closed.
#[test]
fn disk_beside_a_drained_one_of_its_image_goes_on_when_that_leaves_the_configuration() {
    let Some(world) = World::new() else { return };
    let own = table("b");
    let beside = own.replace("name = \"b\"", "name = \"x\"").replace("b.sock", "x.sock");
    let write = |disks: &[&str]| {
        let text = format!("control = \"control\"\n{}", disks.concat());
        fs::write(world.at("mica.toml"), text).expect("written");
    };
    let (a, c) = (table("a"), table("c"));
    write(&[&a, &own, &c]);
    let old = world.serve(&[]);
    world.ctl(&["drain", "b"]).ok();
    write(&[&a, &own, &c, &beside]);
    assert_eq!(world.json(&["reload"])["added"], json!(["x"]));
    write(&[&a, &c, &beside]);
    let config = world.at("mica.toml").display().to_string();
    let new = Process::start(world.path(), "new", &["--config", &config, "--takeover"]);
    let has_taken_over = || (world.json(&["status"])["pid"] == new.pid()).then_some(());
    clock::poll(LIMIT, Duration::from_millis(20), has_taken_over).expect("taken over");
    drop(old);
    world.is(&[("a", "serving"), ("c", "serving"), ("x", "serving")]);
    assert_eq!(world.len("x"), 2 << 20);
    new.stop();
}

/// The story: a drained disk that could not come back, as another one had its image, was `failed`
/// and not drained any more, and each process that took over opened it first: then the one that was
/// served could not be.
#[test]
fn disk_that_cannot_come_back_stays_drained_and_hinders_no_takeover() {
    let Some(world) = World::new() else { return };
    let (a, own) = (table("a"), table("b"));
    let beside = own.replace("name = \"b\"", "name = \"x\"").replace("b.sock", "x.sock");
    let write = |disks: &[&str]| {
        let text = format!("control = \"control\"\n{}", disks.concat());
        fs::write(world.at("mica.toml"), text).expect("written");
    };
    write(&[&a, &own]);
    let old = world.serve(&[]);
    world.ctl(&["drain", "b"]).ok();
    write(&[&a, &own, &beside]);
    assert_eq!(world.json(&["reload"])["added"], json!(["x"]));
    let refused = world.ctl(&["undrain", "b"]).refusal();
    assert!(refused.contains("the disk \"x\" of this server"), "{refused}");
    world.is(&[("a", "serving"), ("b", "drained"), ("x", "serving")]);
    let config = world.at("mica.toml").display().to_string();
    let new = Process::start(world.path(), "new", &["--config", &config, "--takeover"]);
    let has_taken_over = || (world.json(&["status"])["pid"] == new.pid()).then_some(());
    clock::poll(LIMIT, Duration::from_millis(20), has_taken_over).expect("taken over");
    drop(old);
    world.is(&[("a", "serving"), ("b", "drained"), ("x", "serving")]);
    new.stop();
}
