//! The examples of every verb's help, pasted one after the other into a folder that has what they
//! name. Man pages have the same ones.

use crate::help::{help, walk};
use mica_tests::tools::{self, JQ, NBDCOPY, NBDINFO, OPENSSL, XXD};
use mica_tests::{command, mica};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Where examples have files that are not in the folder in which they are pasted.
const PLACES: [&str; 6] = ["/srv/", "/backup/", "/var/", "/run/", "/vm/", "/etc/"];

/// What an example has that needs another machine, a guest, or a person who looks.
const NOT_HERE: [&str; 6] = [
    "s3://",
    "ssh ",
    "/dev/vg/",
    "nbd://storage",
    "/run/qga.sock",
    "log drop /var/lib/mica/log 5f0c",
];

/// What is smaller here, or elsewhere.
const INSTEAD: [(&str, &str); 6] = [
    ("falloc disk.raw 20G", "falloc disk.raw 2M"),
    ("--layers 100 --size 1G", "--layers 10 --size 64M"),
    ("--chains 2000", "--chains 20"),
    ("--interval 5 --count 12", "--interval 1 --count 2"),
    ("tcp:127.0.0.1:10809", "tcp:127.0.0.1:0"),
    ("demo/control.sock", "control.sock"),
];

const IMAGES: &str = "
    mica create base.qcow2 64M
    head -c 3M /dev/urandom | mica write base.qcow2 0
    mica create -b base.qcow2 -F qcow2 monday.qcow2
    mica create -b monday.qcow2 -F qcow2 top.qcow2
    mica create disk.qcow2 64M
    head -c 5M /dev/urandom | mica write disk.qcow2 0";

/// A server of a chain and of another image.
const SERVER: &str = "
    mica create base.qcow2 64M
    head -c 3M /dev/urandom | mica write base.qcow2 0
    mica create -b base.qcow2 -F qcow2 sunday.qcow2
    mica create -b sunday.qcow2 -F qcow2 monday.qcow2
    mica create -b monday.qcow2 -F qcow2 friday.qcow2
    mica create -b friday.qcow2 -F qcow2 web.qcow2
    mica create db.qcow2 64M
    for disk in web db; do
        printf '[[disk]]\nname = \"%s\"\nimage = \"%s.qcow2\"\nnbd = \"%s.sock\"\n' $disk $disk $disk
    done > disks
    (echo 'control = \"control.sock\"'; cat disks) > mica.toml
    mica serve --config mica.toml --disks-in . --fork --pid-file server.pid";

/// States of `web`, in the server, in a folder and as streams.
const BACKUPS: &str = "
    mica ctl backup begin web --as monday --nbd unix:first.sock
    mica backup --since-last 'nbd+unix:///web?socket=first.sock' /backup/web
    mica backup web.qcow2@monday - > monday
    mica ctl backup end web
    mica ctl backup begin web --since monday --as tuesday --nbd unix:first.sock
    mica backup --since-last 'nbd+unix:///web?socket=first.sock' /backup/web
    mica backup --since monday web.qcow2@tuesday - > tuesday
    mica ctl backup end web";

const VOLUME: &str = "
    mica volume create file:///srv/volumes/web 64M
    mica volume snapshot file:///srv/volumes/web monday
    mica volume snapshot file:///srv/volumes/web tuesday";

const SERVED_VOLUME: &str = "
    mica volume create file:///srv/volumes/web 64M
    mica serve --volume file:///srv/volumes/web --nbd unix:web.sock --control control.sock \
        --fork --pid-file server.pid
    for label in before-the-update monday tuesday s{1..14}; do mica ctl snapshot web $label; done";

/// What there is before the examples of a verb: of those whose name it has, or begins with.
const WORLDS: &[(&str, &[&str])] = &[
    ("*", &[IMAGES]),
    ("serve", &[
        IMAGES,
        "mica create /var/lib/vm/web.qcow2 64M; mica volume create file:///srv/volumes/web 64M
         truncate -s 64M /var/lib/mica/log
         printf 'control = \"control\"\n[[disk]]\nname = \"web\"\nimage = \"../var/lib/vm/web.qcow2\"
                 vhost-user = \"web.sock\"\n' > /etc/mica.toml",
    ]),
    ("ctl*", &[SERVER]),
    ("ctl cancel", &[SERVER, "mica ctl stream web --rate 4k --background"]),
    ("ctl pause", &[SERVER, "mica ctl stream web --rate 4k --background"]),
    ("ctl resume", &[SERVER, "mica ctl stream web --rate 4k --background; mica ctl pause web"]),
    ("ctl backup end", &[SERVER, "mica ctl backup begin web --as monday --nbd unix:first.sock"]),
    ("ctl backup drop", &[SERVER, BACKUPS]),
    ("ctl backup prune", &[SERVER, BACKUPS]),
    ("ctl backup list", &[SERVER, BACKUPS]),
    ("ctl add", &[
        SERVER,
        "mica create /var/lib/vm/then.qcow2 1M; mica create more.qcow2 1M
         printf '[[disk]]\nname=\"more\"\nimage=\"more.qcow2\"\nnbd=\"more.sock\"\n' > one-more.toml",
    ]),
    ("ctl remove", &[SERVER, "mica create then.qcow2 1M; mica ctl add --nbd then.sock then.qcow2"]),
    ("ctl undrain", &[SERVER, "mica ctl drain web"]),
    ("ctl snapshots", &[SERVED_VOLUME]),
    ("ctl drop", &[SERVED_VOLUME]),
    ("ctl label", &[SERVED_VOLUME]),
    ("ctl clone", &[SERVED_VOLUME]),
    ("ctl diff", &[SERVED_VOLUME]),
    ("ctl rollback", &[SERVED_VOLUME]),
    ("ctl info", &[SERVED_VOLUME]),
    ("ctl tree", &[SERVED_VOLUME]),
    ("ctl check", &[SERVED_VOLUME]),
    ("ctl scrub", &[SERVED_VOLUME]),
    ("ctl gc", &[SERVED_VOLUME]),
    ("ctl stats", &[SERVED_VOLUME]),
    ("ctl handover", &[SERVED_VOLUME]),
    ("top", &[SERVER]),
    ("tree", &[
        "mica gen chain --layers 3 --size 4M chain; mica gen chain --layers 3 --size 4M /srv/vm/web",
    ]),
    ("survey", &["mica gen fleet --chains 5 /srv/vm/fleet"]),
    ("compare", &[
        IMAGES,
        "mica convert disk.qcow2 copy.qcow2; mica convert -O raw disk.qcow2 copy.raw",
    ]),
    ("diff", &[
        IMAGES,
        "mica snapshot -c before disk.qcow2
         mica clone base.qcow2 one-clone.qcow2; mica clone base.qcow2 another.qcow2",
    ]),
    ("create", &[]),
    ("convert", &[
        IMAGES,
        "mica bitmap --add disk.qcow2 monday; mica create served.qcow2 1M
         mica serve --nbd unix:web.sock --export-name web --fork --pid-file server.pid served.qcow2",
    ]),
    ("clone", &["mica create gold.qcow2 1M"]),
    ("bitmap", &[
        IMAGES,
        "mica bitmap --add disk.qcow2 tuesday; mica convert disk.qcow2 copy.qcow2
         mica bitmap --add copy.qcow2 monday",
    ]),
    ("backup", &[SERVER]),
    ("backup list", &[SERVER, BACKUPS]),
    ("backup verify", &[SERVER, BACKUPS]),
    ("backup prune", &[SERVER, BACKUPS]),
    ("restore", &[SERVER, BACKUPS, "mica ctl drain; rm web.qcow2"]),
    ("rebase", &[
        IMAGES,
        "mica create -b monday.qcow2 -F qcow2 other.qcow2; mkdir moved; cp base.qcow2 moved",
    ]),
    ("write", &[IMAGES, "head -c 512 /dev/urandom > boot.bin"]),
    ("bench", &[IMAGES, "mica create scratch.qcow2 64M"]),
    ("gen*", &[]),
    ("volume", &[]),
    ("volume *", &[VOLUME]),
    ("volume create", &[]),
    ("volume import", &[IMAGES, "truncate -s 1M disk.raw"]),
    ("volume snapshot", &["mica volume create file:///srv/volumes/web 64M"]),
    ("volume clone", &[
        "mica volume create file:///srv/volumes/gold 64M
         mica volume snapshot file:///srv/volumes/gold v1",
    ]),
    ("volume receive", &[VOLUME, "mica volume send file:///srv/volumes/web@monday web-monday.stream"]),
    ("volume rekey", &[
        "(umask 077; openssl rand -hex 32 > web.key)
         mica volume create --encrypt --volume-key web.key file:///srv/volumes/web 64M",
    ]),
    ("volume log*", &[
        "mica volume create file:///srv/volumes/web 64M; truncate -s 64M /var/lib/mica/log
         mica serve --volume file:///srv/volumes/web --log-device /var/lib/mica/log \
             --nbd unix:web.sock --run true",
    ]),
];

/// A folder in which examples are pasted.
struct World(TempDir);

impl Drop for World {
    fn drop(&mut self) {
        for entry in fs::read_dir(self.0.path()).into_iter().flatten().flatten() {
            let text = fs::read_to_string(entry.path()).unwrap_or_default();
            let process = entry.path().extension().is_some_and(|it| it == "pid").then_some(text);
            let process = process.and_then(|text| Pid::from_raw(text.trim().parse().ok()?));
            if let Some(process) = process {
                // It may have ended.
                let _ = kill_process(process, Signal::KILL);
            }
        }
    }
}

impl World {
    /// What the verb called `name` has before its examples.
    fn of(name: &str) -> Self {
        let world = Self(tempfile::tempdir().expect("a folder"));
        for folder in ["bin", "srv/vm", "srv/gold", "srv/volumes", "srv/copies", "backup"]
            .iter()
            .chain(&["var/lib/vm", "var/lib/mica", "var/cache/mica", "run/mica", "vm", "etc"])
        {
            fs::create_dir_all(world.0.path().join(folder)).expect("made");
        }
        symlink(mica::binary(), world.0.path().join("bin/mica")).expect("made");
        let fits = |key: &str| match key.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => name == key,
        };
        let (_, setups) = WORLDS
            .iter()
            .filter(|(key, _)| fits(key))
            .max_by_key(|(key, _)| (!key.ends_with('*'), key.len()))
            .expect("one is for all");
        for setup in *setups {
            let failure = world.paste(&format!("set -e\n{setup}"));
            assert_eq!(failure, None, "the world of {name}");
        }
        world
    }

    /// Runs a command as a shell does that it is pasted into. Returns what went wrong.
    fn paste(&self, text: &str) -> Option<String> {
        let folder = self.0.path();
        let mut shell = Command::new("bash");
        shell.args(["-o", "pipefail", "-c", &here(text, folder)]).current_dir(folder);
        let path = std::env::var("PATH").unwrap_or_default();
        shell.env("PATH", format!("{}/bin:{path}", folder.display())).env("HOME", folder);
        shell.env("MICA_CONTROL", folder.join("control.sock")).stdin(Stdio::null());
        let finished = command::finish(&mut shell);
        (finished.code() != Some(0)).then(|| format!("{text}: {finished}"))
    }
}

/// `text` with its places in `folder`.
fn here(text: &str, folder: &Path) -> String {
    let mut text = text.to_owned();
    for place in PLACES {
        for before in [" ", "=", ":", "file://"] {
            text = text.replace(&format!("{before}{place}"), &format!("{before}\0{place}"));
        }
    }
    text.replace('\0', &folder.display().to_string())
}

/// The examples of a verb that can be run here, each in one line.
fn examples(words: &[&str]) -> Vec<String> {
    let help = help(words, "--help", 100);
    let lines = help.lines().skip_while(|line| *line != "EXAMPLES:").skip(1);
    let mut all: Vec<String> = Vec::new();
    for line in lines.take_while(|line| line.starts_with("  ")) {
        match all.last_mut().filter(|last| last.ends_with('|')) {
            Some(last) => last.push_str(line),
            None => all.push(line.trim().to_owned()),
        }
    }
    assert!(!all.is_empty(), "{words:?} has no examples");
    all.retain(|line| !NOT_HERE.iter().any(|part| line.contains(part)) && line != "mica top");
    for line in &mut all {
        for (there, instead) in INSTEAD {
            *line = line.replace(there, instead);
        }
    }
    all
}

/// An example that serves until it is told to end leaves the shell to the next one.
fn in_background(line: &str, number: usize) -> String {
    let command = line.split("  #").next().unwrap_or(line).trim();
    match command.starts_with("mica serve") && !command.contains("--run") {
        true => format!("{} --fork --pid-file {number}.pid", command.replace(" --fork", "")),
        false => command.to_owned(),
    }
}

/// The story: examples named a file that the one before had made, or a state that was not there.
#[test]
fn examples_of_every_verb_work_as_they_are_pasted() {
    if !tools::present(&[NBDCOPY, NBDINFO, OPENSSL, JQ, XXD]) {
        return;
    }
    let mut failures = Vec::new();
    walk(|words, _| {
        let world = World::of(&words.join(" "));
        for (number, line) in examples(words).iter().enumerate() {
            let failure = world.paste(&in_background(line, number));
            failures.extend(failure.map(|failure| format!("{}: {failure}", words.join(" "))));
        }
    });
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
