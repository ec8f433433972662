//! Encrypted images: what mica writes QEMU reads, and the reverse; what is said without the
//! passphrase; and that nothing which a guest wrote is in a file in plain form.

use mica_tests::server::Server;
use mica_tests::{mica, nbd, qemu, tools};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const MARKER: &[u8] = b"what a guest wrote and nobody is to see.";

struct Room {
    folder: tempfile::TempDir,
}

impl Room {
    /// With two passphrases, in the files `s` and `t`.
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("s"), "secret words").expect("written");
        fs::write(folder.path().join("t"), "other words\n").expect("written");
        for name in ["s", "t"] {
            let private = fs::Permissions::from_mode(0o600);
            fs::set_permissions(folder.path().join(name), private).expect("its own");
        }
        Self { folder }
    }

    fn dir(&self) -> &Path {
        self.folder.path()
    }

    fn path(&self, name: &str) -> String {
        self.dir().join(name).display().to_string()
    }

    /// QEMU's new image, encrypted with what is in `s`.
    fn qemu(&self, name: &str, options: &str, more: &[&str]) {
        let options =
            format!("encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10{options}");
        let mut args = vec!["create", "-q", "-f", "qcow2"];
        args.extend(["--object", "secret,id=s,file=s", "-o", &options]);
        args.extend_from_slice(more);
        qemu::img(self.dir(), args).ok();
        assert!(self.dir().join(name).exists());
    }

    fn mica(&self, args: &[&str]) -> String {
        mica::run(args).ok()
    }

    fn qemu_io(&self, image: &str, driver: &str, commands: &[&str]) {
        let key = if driver == "luks" { "key-secret" } else { "encrypt.key-secret" };
        let options = format!("driver={driver},file.filename={image},{key}=s");
        let secret = ["--object", "secret,id=s,file=s", "--image-opts"];
        qemu::io(self.dir(), &secret, &options, commands);
    }

    fn check(&self, image: &str) {
        let options = format!("driver=qcow2,file.filename={image},encrypt.key-secret=s");
        let args = ["check", "-q", "--object", "secret,id=s,file=s", "--image-opts", &options];
        qemu::img(self.dir(), args).ok();
        self.mica(&["check", "-q", &self.path(image)]);
    }

    /// The same of one on `base.luks`, which has the same passphrase.
    fn check_on_luks(&self, image: &str) {
        let base = "backing.driver=luks,backing.file.filename=base.luks,backing.key-secret=s";
        let options = format!("driver=qcow2,file.filename={image},encrypt.key-secret=s,{base}");
        let args = ["check", "-q", "--object", "secret,id=s,file=s", "--image-opts", &options];
        qemu::img(self.dir(), args).ok();
        self.mica(&["check", "-q", &self.path(image)]);
    }

    fn shows_marker(&self, image: &str) -> bool {
        let bytes = fs::read(self.dir().join(image)).expect("readable");
        bytes.windows(MARKER.len()).any(|window| window == MARKER)
    }

    fn write(&self, image: &str, secret: &str, at: &str, bytes: &[u8]) {
        let input = self.dir().join("input");
        fs::write(&input, bytes).expect("written");
        let mut command = Command::new(mica::binary());
        command.args(["write", "--secret", &self.path(secret), &self.path(image), at]);
        let input = fs::File::open(input).expect("readable");
        mica_tests::command::finish_with(&mut command, input).ok();
    }
}

#[test]
fn mica_and_qemu_read_and_write_each_others_encrypted_images() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let room = Room::new();
    for (number, options) in [
        "",
        ",encrypt.cipher-alg=aes-128,encrypt.hash-alg=sha1",
        ",encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=sha256",
        ",encrypt.hash-alg=sha512,cluster_size=4k",
        ",extended_l2=on,cluster_size=16k",
    ]
    .into_iter()
    .enumerate()
    {
        let image = format!("{number}.qcow2");
        if number % 2 == 0 {
            room.qemu(&image, options, &[&image, "16M"]);
        } else {
            let options = format!("encrypt.format=luks,encrypt.iter-time=10{options}");
            let secret = room.path("s");
            room.mica(&[
                "create",
                "-q",
                "--secret",
                &secret,
                "-o",
                &options,
                &room.path(&image),
                "16M",
            ]);
        }
        room.qemu_io(&image, "qcow2", &["write -P 7 64k 192k", "write -z 128k 64k"]);
        // Neither begins nor ends with a sector.
        let marked: Vec<u8> = MARKER.iter().copied().cycle().take(100_001).collect();
        room.write(&image, "s", "199999", &marked);
        room.write(&image, "s", "3000001", &marked[..77]);
        room.check(&image);
        assert!(!room.shows_marker(&image), "{options}");
        let source = format!("driver=qcow2,file.filename={image},encrypt.key-secret=s");
        let args = ["convert", "--object", "secret,id=s,file=s", "--image-opts", &source];
        qemu::img(room.dir(), args.into_iter().chain(["-O", "raw", "flat"])).ok();
        let read = room.path("read");
        room.mica(&[
            "convert",
            "-q",
            "--force",
            "--secret",
            &room.path("s"),
            "-O",
            "raw",
            &room.path(&image),
            &read,
        ]);
        let (flat, read) = (fs::read(room.dir().join("flat")), fs::read(read));
        let (flat, read) = (flat.expect("readable"), read.expect("readable"));
        assert!(flat == read, "{options}: both read the same");
        assert_eq!(flat[199_999..300_000], marked[..], "{options}");
        assert_eq!(flat[65536], 7);
    }
}

#[test]
fn wrong_missing_and_visible_passphrases_are_refused_in_one_line() {
    let room = Room::new();
    let image = room.path("a.qcow2");
    let options = "encrypt.format=luks,encrypt.iter-time=10";
    let secret = room.path("s");
    room.mica(&["create", "-q", "--secret", &secret, "-o", options, &image, "1M"]);
    let said = mica::run(["read", &image, "0", "1"]).refusal();
    assert!(said.contains("the image is encrypted: add --secret FILE"), "{said}");
    let said = mica::run(["read", "--secret", &room.path("t"), &image, "0", "1"]).refusal();
    assert!(said.contains("does not open its only active key slot"), "{said}");
    assert!(said.contains("ends with a line break, which counts"), "{said}");
    let said = mica::run(["read", "--secret", "data=hunter2", &image, "0", "1"]).refusal();
    assert!(said.contains("takes no passphrase") && !said.contains("hunter2"), "{said}");
    let said = mica::run(["create", "-o", options, &room.path("b.qcow2"), "1M"]).refusal();
    assert!(said.contains("will be encrypted: name the file"), "{said}");
    let other = format!("b*={secret}");
    let said = mica::run(["read", "--secret", &other, &image, "0", "1"]).refusal();
    assert!(said.contains("the image is encrypted"), "it is for other images: {said}");
    let said = mica::run(["create", "-o", "encrypt.iter-time=10", &room.path("b.qcow2"), "1M"]);
    assert!(said.refusal().contains("encrypt.format=luks is missing"));
}

#[test]
fn encryption_is_shown_as_qemu_shows_it() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let room = Room::new();
    room.qemu("a.qcow2", "", &["a.qcow2", "1M"]);
    let args = ["create", "-q", "-f", "luks", "--object", "secret,id=s,file=s"];
    let args = args.into_iter().chain(["-o", "key-secret=s,iter-time=10", "l.luks", "4M"]);
    qemu::img(room.dir(), args).ok();
    for (image, format) in [("a.qcow2", "qcow2"), ("l.luks", "luks")] {
        let path = room.path(image);
        let info = |said: String| serde_json::from_str::<Value>(&said).expect("JSON");
        let ours = info(room.mica(&["info", "-f", format, "--output", "json", &path]));
        let args = ["info", "-f", format, "--output", "json", &path];
        let theirs = info(qemu::img(room.dir(), args).ok());
        assert_eq!(ours, theirs, "{image}");
        let ours = room.mica(&["info", "-f", format, &path]);
        assert_eq!(ours, qemu::img(room.dir(), ["info", "-f", format, &path]).ok(), "{image}");
    }
}

/// What would show noise afterwards, or leave plain text behind, is refused.
#[test]
fn what_cannot_be_encrypted_is_refused() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let room = Room::new();
    let (secret, luks) = (room.path("s"), "encrypt.format=luks,encrypt.iter-time=10");
    let given = ["--secret", &*secret];
    let refused = |args: &[&str]| mica::run(args).refusal();
    // Zeros that have a place would be decrypted.
    let disk = room.path("disk.qcow2");
    let options = format!("{luks},preallocation=metadata");
    room.mica(&["create", "-q", "--secret", &secret, "-o", &options, &disk, "4M"]);
    let said = refused(&[&["amend"], &given[..], &["-o", "compat=0.10", &disk]].concat());
    assert!(said.contains("mica convert"), "{said}");
    assert_eq!(room.mica(&["read", "--secret", &secret, &disk, "0", "4"]).as_bytes(), [0; 4]);
    // The old AES is never written, by merges neither.
    let aes = ["create", "-q", "-f", "qcow2", "--object", "secret,id=s,file=s"];
    let aes_options = ["-o", "encrypt.format=aes,encrypt.key-secret=s", "aes.qcow2", "1M"];
    qemu::img(room.dir(), aes.into_iter().chain(aes_options)).ok();
    let above = room.path("above.qcow2");
    let create = ["create", "-q", "-o", "encrypt.format=off", "-b", "aes.qcow2", "-F", "qcow2"];
    room.mica(&[&create[..], &given, &[&above]].concat());
    room.write("above.qcow2", "s", "0", MARKER);
    let said = refused(&[&["commit"], &given[..], &[&above]].concat());
    assert!(said.contains("old AES encryption is only read"), "{said}");
    let read = mica::run([&["read"], &given[..], &[&above, "0", "10"]].concat()).ok();
    assert_eq!(read.as_bytes(), &MARKER[..10]);
    // Standard input goes to a plain file first.
    let new = room.path("new.qcow2");
    let convert = ["convert", "--format", "raw", "-O", "qcow2", "-o", luks];
    let said = refused(&[&convert[..], &given, &["-", &new]].concat());
    assert!(said.contains("not encrypted: store it"), "{said}");
    // So it is where only the base, or what is there, says that the target is encrypted.
    let convert = ["convert", "--format", "raw", "-B", "disk.qcow2", "-F", "qcow2"];
    let said = refused(&[&convert[..], &given, &["-", &new]].concat());
    assert!(said.contains("not encrypted: store it"), "{said}");
    let convert = ["convert", "--format", "raw", "-n"];
    let said = refused(&[&convert[..], &given, &["-", &disk]].concat());
    assert!(said.contains("not encrypted: store it"), "{said}");
    let raw = ["create", "-q", "-f", "luks", "--object", "secret,id=s,file=s"];
    let raw_options = ["-o", "key-secret=s,iter-time=10", "raw.luks", "1M"];
    qemu::img(room.dir(), raw.into_iter().chain(raw_options)).ok();
    let (socket, raw) = (room.path("sock"), room.path("raw.luks"));
    let serve = ["serve", "--ephemeral", "--format", "luks", "--nbd", &socket, &raw];
    let said = refused(&[&serve[..], &given].concat());
    assert!(said.contains("LUKS image has no key"), "{said}");
}

/// Keys come and go, and the last one only if it is to.
#[test]
fn copies_in_plain_form_are_named_and_encrypted_ones_are_not() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let room = Room::new();
    room.qemu("disk.qcow2", "", &["disk.qcow2", "1M"]);
    let [disk, secret] = ["disk.qcow2", "s"].map(|name| room.path(name));
    let warned = |args: &[&str]| {
        let said = mica::run(args.iter().chain(&["--secret", &secret]));
        assert!(said.status.success(), "{said}");
        said.stderr.lines().filter(|line| line.contains("is not encrypted")).count()
    };
    let [copies, others, plain, block, luks] =
        ["copies", "others", "plain.qcow2", "block.raw", "luks.qcow2"].map(|name| room.path(name));
    assert_eq!(warned(&["backup", &disk, &copies]), 1);
    assert_eq!(warned(&["backup", &disk, "-"]), 1);
    assert_eq!(warned(&["dd", &format!("if={disk}"), &format!("of={block}"), "bs=64k"]), 1);
    assert_eq!(warned(&["convert", "-O", "qcow2", &disk, &plain]), 1);
    assert_eq!(warned(&["convert", "-n", "-O", "qcow2", &disk, &plain]), 1);
    let encrypted = ["-o", "encrypt.format=luks,encrypt.iter-time=10"];
    let convert = [&["convert", "-O", "qcow2"], &encrypted[..], &[&disk, &luks]].concat();
    assert_eq!(warned(&convert), 0);
    assert_eq!(warned(&["convert", "-n", "-O", "qcow2", &disk, &luks]), 0);
    assert_eq!(warned(&["backup", &plain, &others]), 0);
}

#[test]
fn keys_are_added_and_removed() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let room = Room::new();
    fs::write(room.dir().join("new"), "another passphrase").expect("written");
    let private = fs::Permissions::from_mode(0o600);
    fs::set_permissions(room.dir().join("new"), private).expect("its own");
    let (image, new) = (room.path("disk.qcow2"), room.path("new"));
    let options = "encrypt.format=luks,encrypt.iter-time=10";
    room.mica(&["create", "-q", "--secret", &room.path("s"), "-o", options, &image, "4M"]);
    room.write("disk.qcow2", "s", "0", MARKER);
    let amend = |secret: &str, options: &str, more: &[&str]| {
        let secret = room.path(secret);
        let args = ["amend", "--secret", &secret, "-o", options];
        mica::run(args.into_iter().chain(more.iter().copied()).chain([&*image]))
    };
    let add = format!("encrypt.state=active,encrypt.new-secret={new},encrypt.iter-time=10");
    amend("s", &add, &[]).ok();
    let read =
        |secret: &str| mica::run(["read", "--secret", &room.path(secret), &image, "0", "10"]);
    assert_eq!(read("s").ok().as_bytes(), &MARKER[..10]);
    assert_eq!(read("new").ok().as_bytes(), &MARKER[..10]);
    let remove = format!("encrypt.state=inactive,encrypt.old-secret={}", room.path("s"));
    amend("new", &remove, &[]).ok();
    assert!(read("s").refusal().contains("passphrase"));
    assert_eq!(read("new").ok().as_bytes(), &MARKER[..10]);
    let secret = format!("secret,id=s,file={new}");
    let given = format!("driver=qcow2,file.filename={image},encrypt.key-secret=s");
    qemu::img(room.dir(), ["check", "--object", &secret, "--image-opts", &given]).ok();
    // Whoever names a wrong slot must not believe that the passphrase is worth nothing now.
    let unused = "encrypt.state=inactive,encrypt.keyslot=5";
    let said = amend("new", unused, &[]).ok();
    assert!(said.contains("slot 5 was not in use: no key was removed"), "{said}");
    let said = amend("new", unused, &["--output", "json"]).ok();
    let said: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(said["keys"], 0);
    assert_eq!(read("new").ok().as_bytes(), &MARKER[..10]);
    let last = format!("encrypt.state=inactive,encrypt.old-secret={new}");
    let said = amend("new", &last, &[]).refusal();
    assert!(said.contains("--force"), "{said}");
    assert_eq!(read("new").ok().as_bytes(), &MARKER[..10]);
    amend("new", &last, &["--force"]).ok();
    read("new").refusal();
    let said = amend("new", "encrypt.state=active", &[]).refusal();
    assert!(said.contains("new-secret=FILE is missing"), "{said}");
}

#[test]
fn luks_image_is_a_disk_and_a_base() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let room = Room::new();
    let args = ["create", "-q", "-f", "luks", "--object", "secret,id=s,file=s"];
    let args = args.into_iter().chain(["-o", "key-secret=s,iter-time=10", "base.luks", "4M"]);
    qemu::img(room.dir(), args).ok();
    room.qemu_io("base.luks", "luks", &["write -P 3 0 4M"]);
    let (base, secret, top) = (room.path("base.luks"), room.path("s"), room.path("top.qcow2"));
    let mut command = Command::new(mica::binary());
    command.args(["write", "-f", "luks", "--secret", &secret, &base, "1001"]);
    fs::write(room.dir().join("input"), MARKER).expect("written");
    let input = fs::File::open(room.dir().join("input")).expect("readable");
    mica_tests::command::finish_with(&mut command, input).ok();
    room.qemu_io("base.luks", "luks", &["read -P 3 0 1001", "read -P 3 1041 1M"]);
    assert!(!room.shows_marker("base.luks"));
    let options = "encrypt.iter-time=10";
    let create =
        ["create", "-q", "--secret", &secret, "-o", options, "-b", "base.luks", "-F", "luks"];
    let create: Vec<&str> = create.into_iter().chain([&*top]).collect();
    room.mica(&create);
    assert!(room.mica(&["info", &top]).contains("encrypted: yes"), "as its base is");
    room.write("top.qcow2", "s", "2097152", MARKER);
    room.check_on_luks("top.qcow2");
    assert!(!room.shows_marker("top.qcow2"));
    let read = room.mica(&["read", "--secret", &secret, &top, "1001", "40"]);
    assert_eq!(read.as_bytes(), MARKER);
}

#[test]
fn layers_with_different_keys_and_plain_ones_are_one_disk() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let room = Room::new();
    let (s, t) = (room.path("s"), room.path("t"));
    let of = |name: &str, secret: &str| format!("{name}={secret}");
    let secrets = [of("base.qcow2", &s), of("mid.qcow2", &t)];
    let given = ["--secret", &secrets[0], "--secret", &secrets[1]];
    let luks = "encrypt.format=luks,encrypt.iter-time=10";
    let make = |args: &[&str]| {
        let args: Vec<&str> = ["create", "-q"].iter().chain(&given).chain(args).copied().collect();
        mica::run(args).ok()
    };
    make(&["-o", luks, &room.path("base.qcow2"), "8M"]);
    room.write("base.qcow2", "s", "0", &[1; 9000]);
    make(&["-o", luks, "-b", "base.qcow2", "-F", "qcow2", &room.path("mid.qcow2")]);
    let off = "encrypt.format=off";
    let top = room.path("top.qcow2");
    make(&["-o", off, "-b", "mid.qcow2", "-F", "qcow2", &top]);
    let mut command = Command::new(mica::binary());
    command.arg("write").args(given).args([&room.path("mid.qcow2"), "4000"]);
    fs::write(room.dir().join("input"), [2; 100]).expect("written");
    let input = fs::File::open(room.dir().join("input")).expect("readable");
    // Named as a disk of its own, it is the active layer.
    mica_tests::command::finish_with(&mut command, input).ok();
    let flat = room.path("flat");
    let args: Vec<&str> = ["convert", "-q"].iter().chain(&given).copied().collect();
    mica::run(args.into_iter().chain(["-O", "raw", &top, &flat])).ok();
    let read = fs::read(flat).expect("readable");
    assert_eq!((read[3999], read[4000], read[4099], read[4100]), (1, 2, 2, 1));
    assert_eq!((read[8999], read[9000]), (1, 0));
}

#[test]
fn old_aes_is_read_and_not_written() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let room = Room::new();
    let args = ["create", "-q", "-f", "qcow2", "--object", "secret,id=s,file=s"];
    let args = args.into_iter().chain(["-o", "encrypt.format=aes,encrypt.key-secret=s"]);
    qemu::img(room.dir(), args.chain(["old.qcow2", "4M"])).ok();
    room.qemu_io("old.qcow2", "qcow2", &["write -P 9 100k 300k", "write -z 128k 64k"]);
    let (image, secret) = (room.path("old.qcow2"), room.path("s"));
    let source = "driver=qcow2,file.filename=old.qcow2,encrypt.key-secret=s";
    let args = ["convert", "--object", "secret,id=s,file=s", "--image-opts", source];
    qemu::img(room.dir(), args.into_iter().chain(["-O", "raw", "flat"])).ok();
    room.mica(&["convert", "-q", "--secret", &secret, "-O", "raw", &image, &room.path("read")]);
    let [flat, read] = ["flat", "read"].map(|name| fs::read(room.dir().join(name)).expect("there"));
    assert!(flat == read);
    let read = mica::run(["read", "--secret", &secret, &image, "102401", "3"]).ok();
    assert_eq!(read.as_bytes(), [9; 3]);
    let said = mica::run(["write", "--secret", &secret, &image, "0"]).refusal();
    assert!(said.contains("old AES encryption is only read"), "{said}");
}

/// Served, written, snapshotted and killed: the new layer is encrypted, too.
#[test]
fn served_encrypted_disk_survives_a_kill_and_its_new_layers_are_encrypted() {
    if !tools::present(&[tools::QEMU_IO]) {
        return;
    }
    let room = Room::new();
    let (image, secret) = (room.path("disk.qcow2"), room.path("s"));
    let options = "encrypt.format=luks,encrypt.iter-time=10";
    room.mica(&["create", "-q", "--secret", &secret, "-o", options, &image, "8M"]);
    let path = PathBuf::from(&image);
    let control = room.path("control");
    let more = ["--secret", &*secret, "--control", &*control];
    let server = Server::mica_writable(&path, "qcow2", &more).expect("it is served");
    let mut model = vec![0; 8 << 20];
    let mut rng = mica_gen::Rng::new(1);
    for round in 1..=4 {
        let mut commands = Vec::new();
        for _ in 0..15 {
            let (at, len) = (rng.below((8 << 20) - 70_000), 1 + rng.below(69_000));
            commands.push(format!("write -P {round} {at} {len}"));
            let from = usize::try_from(at).expect("short");
            model[from..from + usize::try_from(len).expect("short")].fill(round);
        }
        let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
        qemu::io(room.dir(), &["-f", "raw"], &server.uri(), &commands);
        if round == 2 {
            let layer = room.path("layer.qcow2");
            room.mica(&["ctl", "--control", &control, "snapshot", "disk", &layer]);
        }
    }
    let pid = i32::try_from(server.pid()).ok().and_then(rustix::process::Pid::from_raw);
    rustix::process::kill_process(pid.expect("a process"), rustix::process::Signal::KILL)
        .expect("killed");
    drop(server);
    let again = Server::mica_writable(&path, "qcow2", &more).expect("it is served again");
    let mut client = again.connect(&nbd::Wish::default()).expect("a client");
    assert!(client.read_all().expect("read") == model, "what was acknowledged is there");
    client.disconnect().expect("it is alive");
    again.stop().expect("it stops");
    for name in ["disk.qcow2", "layer.qcow2"] {
        let bytes = fs::read(room.dir().join(name)).expect("readable");
        let plain = bytes.chunks(64).find(|run| matches!(run[0], 1..=4) && **run == [run[0]; 64]);
        assert_eq!(plain, None, "{name} has what was written");
        assert!(room.mica(&["info", &room.path(name)]).contains("encrypted: yes"), "{name}");
        room.mica(&["check", "-q", &room.path(name)]);
    }
}

/// The story: a LUKS image that was served as a raw one had no partitions, and nothing said why.
#[test]
fn luks_image_that_is_opened_as_raw_is_warned_of() {
    let room = Room::new();
    let [luks, raw, copy, socket] = ["luks", "raw", "copy", "sock"].map(|name| room.path(name));
    let mut content = vec![0; 1 << 20];
    fs::write(&raw, &content).expect("written");
    content[..6].copy_from_slice(b"LUKS\xba\xbe");
    fs::write(&luks, &content).expect("written");
    let top = room.path("top.qcow2");
    mica::run(["create", "-q", "-u", "-b", "luks", "-F", "raw", &top, "1M"]).ok();
    let warnings = |args: &[&str]| {
        let ran = mica::run(args);
        assert!(ran.status.success(), "{ran}");
        ran.stderr.lines().filter(|line| line.contains("begins as a LUKS image does")).count()
    };
    let serve = ["serve", "-f", "raw", "--nbd", &socket, "--run", "true"];
    for verb in
        [&["info", "-f", "raw"][..], &["convert", "--force", "-f", "raw", "-O", "raw"], &serve]
    {
        let target: &[&str] = if verb[0] == "convert" { &[&copy] } else { &[] };
        assert_eq!(warnings(&[verb, &[&luks], target].concat()), 1, "{verb:?}");
        assert_eq!(warnings(&[verb, &[&raw], target].concat()), 0, "{verb:?}");
    }
    let compare = ["compare", "-F", "raw", &top, &luks];
    assert_eq!(warnings(&["info", "--backing-chain", &top]), 1);
    assert_eq!(warnings(&compare), 0, "somebody said that it is raw");
    // As older programs made overlays: an extension of the header that nobody knows.
    let mut header = fs::read(&top).expect("readable");
    let stated = header.windows(4).position(|bytes| bytes == b"\xe2\x79\x2a\xca");
    header[stated.expect("its format is stated")] = 0x12;
    fs::write(&top, header).expect("written");
    assert_eq!(warnings(&compare), 1, "it is guessed");
    assert_eq!(warnings(&["create", "-q", "-f", "raw", "--force", &luks, "1M"]), 0);
}
