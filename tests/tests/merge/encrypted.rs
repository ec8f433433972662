//! Chains whose layers are encrypted and plain by turns, each with a key of its own, through what
//! makes layers come and go: QEMU, which gets the passphrases too, reads what a model says.

use mica_gen::Rng;
use mica_tests::command::Finished;
use mica_tests::server::Server;
use mica_tests::{mica, nbd, qemu, tools};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const LEN: usize = 4 << 20;
const LUKS: &str = "encrypt.format=luks,encrypt.iter-time=10";

/// A chain of three layers, `base`, `mid` and `disk`.
struct World {
    dir: tempfile::TempDir,
    model: Vec<u8>,
    rng: Rng,
}

impl World {
    /// An empty folder, with what images are encrypted with: a base has another passphrase than the
    /// others.
    fn empty() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        for (name, words) in [("s", "secret words"), ("t", "other words")] {
            let file = dir.path().join(name);
            fs::write(&file, words).expect("written");
            fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("its own");
        }
        Self { dir, model: vec![0; LEN], rng: Rng::new(6) }
    }

    /// Two layers on a LUKS image.
    fn on_luks() -> Self {
        let mut world = Self::empty();
        let create = [&["create", "-q"], &OBJECTS[..], &["-f", "luks"]].concat();
        let options = ["-o", "key-secret=t,iter-time=10", "base.luks", "4M"];
        qemu::img(world.path(), create.into_iter().chain(options)).ok();
        // What was never written reads as noise.
        world.model.fill(1);
        let objects = [&OBJECTS[..], &["--image-opts"]].concat();
        let base = "driver=luks,key-secret=t,file.filename=base.luks";
        qemu::io(world.path(), &objects, base, &[&format!("write -P 1 0 {LEN}")]);
        for [below, format, layer] in
            [["base.luks", "luks", "mid.qcow2"], ["mid.qcow2", "qcow2", "disk.qcow2"]]
        {
            let below = ["-q", "-o", LUKS, "-b", below, "-F", format, &world.at(layer)];
            world.mica("create", &below).ok();
            world.write_by_qemu(layer);
        }
        world
    }

    /// Those that `are_encrypted` say.
    fn new(are_encrypted: [bool; 3]) -> Self {
        let mut world = Self::empty();
        let layers = ["base.qcow2", "mid.qcow2", "disk.qcow2"];
        for (at, (layer, is_encrypted)) in layers.into_iter().zip(are_encrypted).enumerate() {
            let options = if is_encrypted { LUKS } else { "encrypt.format=off" };
            let (path, len) = (world.at(layer), LEN.to_string());
            match at.checked_sub(1).map(|below| layers[below]) {
                None => world.mica("create", &["-q", "-o", options, &path, &len]),
                Some(below) => {
                    let below = ["-b", below, "-F", "qcow2"];
                    let words = [&["-q", "-o", options][..], &below, &[&*path]].concat();
                    world.mica("create", &words)
                }
            }
            .ok();
            world.write_by_qemu(layer);
        }
        world
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn at(&self, name: &str) -> String {
        self.path().join(name).display().to_string()
    }

    fn secrets(&self) -> [String; 4] {
        let base = format!("base*={}", self.at("t"));
        ["--secret".to_owned(), base, "--secret".to_owned(), self.at("s")]
    }

    fn mica(&self, verb: &str, words: &[&str]) -> Finished {
        let secrets = self.secrets();
        let all = [verb].into_iter().chain(secrets.iter().map(String::as_str));
        mica::run(all.chain(words.iter().copied()))
    }

    /// Places of the next few writes, and what they fill them with; the model has them.
    fn changes(&mut self) -> Vec<(usize, usize, u8)> {
        let change = |_| {
            let len = 512 * usize::try_from(1 + self.rng.below(200)).expect("short");
            let at =
                usize::try_from(self.rng.below((LEN - len) as u64 / 512)).expect("short") * 512;
            let byte = u8::try_from(self.rng.below(256)).expect("a byte");
            self.model[at..at + len].fill(byte);
            (at, len, byte)
        };
        (0..8).map(change).collect()
    }

    /// The options by which QEMU opens the chain of an image, with what each layer needs.
    fn options(&self, image: &str) -> String {
        let info = ["info", "-U", "--backing-chain", "--output", "json", image];
        let layers = qemu::img(self.path(), info).json();
        let mut prefix = String::new();
        let mut options = Vec::new();
        for layer in layers.as_array().expect("a list") {
            let file = layer["filename"].as_str().expect("a name");
            let format = layer["format"].as_str().expect("a format");
            options.push(format!("{prefix}driver={format},{prefix}file.filename={file}"));
            if layer["encrypted"] == true {
                let is_base = Path::new(file)
                    .file_name()
                    .is_some_and(|name| name.to_str().is_some_and(|name| name.starts_with("base")));
                let key = if is_base { "t" } else { "s" };
                let option = if format == "luks" { "key-secret" } else { "encrypt.key-secret" };
                options.push(format!("{prefix}{option}={key}"));
            }
            prefix.push_str("backing.");
        }
        options.join(",")
    }

    fn write_by_qemu(&mut self, image: &str) {
        let writes = self.changes().into_iter().map(|(at, len, byte)| match byte {
            0 => format!("write -z {at} {len}"),
            byte => format!("write -P {byte} {at} {len}"),
        });
        let writes: Vec<_> = writes.collect();
        let writes: Vec<_> = writes.iter().map(String::as_str).collect();
        let objects = [&OBJECTS[..], &["--image-opts"]].concat();
        qemu::io(self.path(), &objects, &self.options(image), &writes);
    }

    /// QEMU finds nothing wrong with an image and reads what the model says, and so does mica.
    fn judge(&self, image: &str, what: &str) {
        let options = self.options(image);
        let check = [&["check", "-q"], &OBJECTS[..], &["--image-opts", &options]].concat();
        assert_eq!(qemu::img(self.path(), check).ok(), "", "{what}");
        let convert = [&["convert"], &OBJECTS[..], &["--image-opts", &options]].concat();
        qemu::img(self.path(), convert.into_iter().chain(["-O", "raw", "flat"])).ok();
        assert!(fs::read(self.path().join("flat")).expect("read") == self.model, "{what}");
        let words = ["-q", "--force", "-O", "raw", &self.at(image), &self.at("read")];
        self.mica("convert", &words).ok();
        assert!(fs::read(self.path().join("read")).expect("read") == self.model, "{what}");
    }

    fn serve(&self) -> Server {
        let secrets = self.secrets();
        let control = self.at("control");
        let secrets = secrets.iter().map(String::as_str);
        let more: Vec<_> = secrets.chain(["--control", &*control]).collect();
        Server::mica_writable(&PathBuf::from(self.at("disk.qcow2")), "qcow2", &more)
            .expect("served")
    }

    fn ctl(&self, words: &[&str]) -> Finished {
        let control = self.at("control");
        mica::run(["ctl", "--control", &control].into_iter().chain(words.iter().copied()))
    }

    fn write_by_guest(&mut self, server: &Server) {
        let mut guest = mica_tests::guest::Guest::connect(server).expect("a client");
        for (at, len, byte) in self.changes() {
            assert_eq!(guest.write(at as u64, &vec![byte; len]).expect("answered"), 0);
        }
        guest.disconnect().expect("it is alive");
    }
}

const OBJECTS: [&str; 4] = ["--object", "secret,id=s,file=s", "--object", "secret,id=t,file=t"];
/// By turns, both ways.
const CHAINS: [[bool; 3]; 2] = [[true, false, true], [false, true, false]];

fn are_there() -> bool {
    tools::present(&[tools::QEMU_IMG, tools::QEMU_IO])
}

#[test]
fn layers_with_keys_are_merged_offline() {
    if !are_there() {
        return;
    }
    for are_encrypted in CHAINS {
        let what = |verb: &str| format!("{verb} of {are_encrypted:?}");
        // What is plain gets what was encrypted, and that is said: in every way but one.
        let says = |said: &Finished, wanted: bool| {
            let says = said.stderr.contains("is not encrypted");
            assert_eq!(says, wanted, "{are_encrypted:?}: {said}");
        };
        let world = World::new(are_encrypted);
        let said = world.mica("commit", &["-b", &world.at("base.qcow2"), &world.at("disk.qcow2")]);
        says(&said, !are_encrypted[0]);
        said.ok();
        world.judge("base.qcow2", &what("commit"));
        world.judge("disk.qcow2", &what("commit, seen from the top"));

        let world = World::new(are_encrypted);
        let said = world.mica("rebase", &["-b", "", &world.at("disk.qcow2")]);
        says(&said, !are_encrypted[2]);
        said.ok();
        world.judge("disk.qcow2", &what("rebase"));

        let mut world = World::new(are_encrypted);
        let base = world.at("base.qcow2");
        let disk = world.at("disk.qcow2");
        let said = world.mica("rebase", &["-b", &base, "-F", "qcow2", &disk]);
        says(&said, !are_encrypted[2]);
        said.ok();
        world.judge("disk.qcow2", &what("rebase onto the base"));
        world.mica("bitmap", &["--add", &disk, "mon"]).ok();
        world.write_by_qemu("disk.qcow2");
        let copy = world.at("copy.qcow2");
        world.mica("convert", &["-q", "--bitmaps", "-o", LUKS, &disk, &copy]).ok();
        world.judge("copy.qcow2", &what("convert"));
        world.mica("clone", &["-q", &disk, &world.at("clone.qcow2")]).ok();
        world.judge("clone.qcow2", &what("clone"));
    }
}

#[test]
fn layers_with_keys_come_and_go_while_they_are_served() {
    if !are_there() {
        return;
    }
    for are_encrypted in CHAINS {
        for verb in ["stream", "commit", "backup"] {
            let mut world = World::new(are_encrypted);
            let server = world.serve();
            world.write_by_guest(&server);
            let next = world.at("next.qcow2");
            world.ctl(&["snapshot", "disk", &next]).ok();
            world.write_by_guest(&server);
            let base = world.at("base.qcow2");
            match verb {
                "stream" => world.ctl(&["stream", "disk", "--base", &base]).ok(),
                "commit" => {
                    let top = world.at("disk.qcow2");
                    world.ctl(&["commit", "disk", "--top", &top, "--base", &base]).ok()
                }
                _ => {
                    let socket = world.at("backup");
                    let begin = ["backup", "begin", "disk", "--as", "mon", "--nbd", &socket];
                    world.ctl(&begin).ok();
                    let kept = world.model.clone();
                    world.write_by_guest(&server);
                    let wish = nbd::Wish::default();
                    let export = nbd::Connection::open(Path::new(&socket), "disk", &wish);
                    assert!(export.expect("exported").read_all().expect("read") == kept);
                    world.ctl(&["backup", "end", "disk"]).ok();
                    let now = std::mem::replace(&mut world.model, kept);
                    world.judge("next@mon.qcow2", "the state");
                    world.model = now;
                    String::new()
                }
            };
            let logged = server.log();
            let is_plain = |position: usize| !are_encrypted[position];
            let wanted = verb == "stream" && is_plain(2) || verb == "commit" && is_plain(0);
            assert_eq!(logged.contains("is not encrypted"), wanted, "{verb}: {logged}");
            world.write_by_guest(&server);
            assert!(server.stop().expect("it stops").status.success());
            world.judge("next.qcow2", &format!("{verb} of {are_encrypted:?}"));
        }
    }
}

#[test]
fn luks_image_is_one_still_when_layers_above_it_have_left() {
    if !are_there() {
        return;
    }
    for verb in ["stream", "commit", "drop", "offline commit", "offline rebase"] {
        let mut world = World::on_luks();
        let [base, mid, disk] =
            ["base.luks", "mid.qcow2", "disk.qcow2"].map(|layer| world.at(layer));
        if let Some(verb) = verb.strip_prefix("offline ") {
            let format = if verb == "rebase" { &["-F", "luks"][..] } else { &[] };
            world.mica(verb, &[format, &["-b", &base, &disk]].concat()).ok();
        } else {
            let server = world.serve();
            world.write_by_guest(&server);
            match verb {
                "stream" => world.ctl(&["stream", "disk", "--base", &base]).ok(),
                "commit" => world.ctl(&["commit", "disk", "--top", &mid, "--base", &base]).ok(),
                _ => {
                    // The layer of the state is right above it then.
                    world.ctl(&["commit", "disk", "--base", &base]).ok();
                    let begin = ["backup", "begin", "disk", "--as", "mon", "--nbd"];
                    world.ctl(&[&begin[..], &[&*world.at("backup")]].concat()).ok();
                    world.ctl(&["backup", "end", "disk"]).ok();
                    world.write_by_guest(&server);
                    world.ctl(&["backup", "drop", "disk", "mon"]).ok()
                }
            };
            world.write_by_guest(&server);
            assert!(server.stop().expect("it stops").status.success());
        }
        world.judge("disk.qcow2", verb);
    }
}
