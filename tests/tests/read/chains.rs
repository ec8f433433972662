//! Chains: how layers find each other, how long a chain may be, and what is refused.

use mica_gen::{ChainSpec, Features, Manifest, generate};
use mica_tests::server::Server;
use mica_tests::{command, judge, mica, nbd, qemu, tools};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// How long a refusal may take.
const REFUSAL_LIMIT: Duration = Duration::from_secs(60);

/// What mica says when it refuses to serve `image` in `dir`.
#[track_caller]
fn refused(dir: &Path, image: &str) -> String {
    let mut serve = Command::new(mica::binary());
    serve.arg("serve").arg("--nbd").arg(dir.join("socket")).arg(dir.join(image));
    let said = command::finish_within(&mut serve, REFUSAL_LIMIT).refusal();
    assert!(!dir.join("socket").exists(), "a refusal leaves no socket");
    said
}

#[test]
fn a_loop_is_refused_however_it_is_closed() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let unsafely = |name: &str, backing: &str| {
        qemu::create(dir, name, &["-u", "-b", backing, "-F", "qcow2"], "1M");
    };
    unsafely("other.qcow2", "self.qcow2");
    fs::rename(dir.join("other.qcow2"), dir.join("self.qcow2")).expect("renamed");
    unsafely("one.qcow2", "two.qcow2");
    unsafely("two.qcow2", "three.qcow2");
    unsafely("three.qcow2", "one.qcow2");
    unsafely("linked.qcow2", "link.qcow2");
    fs::hard_link(dir.join("linked.qcow2"), dir.join("link.qcow2")).expect("linked");
    for image in ["self.qcow2", "one.qcow2", "two.qcow2", "linked.qcow2"] {
        let said = refused(dir, image);
        assert!(said.contains("loop") || said.contains("itself"), "{image}: {said}");
    }
}

/// Its beginning is looked at, and is shorter than what is looked for.
#[test]
fn base_of_a_few_bytes_and_no_stated_format_is_raw() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    for bytes in [&b""[..], b"abcd", b"LUKS\xba", b"LUKS\xba\xbe"] {
        fs::write(dir.join("base"), bytes).expect("written");
        qemu::create(dir, "stated.qcow2", &["-u", "-b", "base", "-F", "raw"], "1M");
        remove_backing_format(dir, "stated.qcow2", "top.qcow2");
        let (top, raw) = (dir.join("top.qcow2"), dir.join("raw"));
        let names = [top.display().to_string(), raw.display().to_string()];
        mica::run(["convert", "-q", "-f", "qcow2", "-O", "raw", &names[0], &names[1]]).ok();
        let content = fs::read(&raw).expect("converted");
        assert!(content.starts_with(bytes) && content.len() == 1 << 20, "{bytes:?}");
        assert!(content.iter().skip(bytes.len()).all(|byte| *byte == 0), "{bytes:?}");
        fs::remove_file(&raw).expect("removed");
    }
}

#[test]
fn a_missing_layer_is_named() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "gone.qcow2", &[], "1M");
    qemu::overlay(dir, "middle.qcow2", "gone.qcow2", &[]);
    qemu::overlay(dir, "top.qcow2", "middle.qcow2", &[]);
    fs::remove_file(dir.join("gone.qcow2")).expect("removed");
    let said = refused(dir, "top.qcow2");
    assert!(said.contains("gone.qcow2"), "{said}");
    let said = refused(dir, "never-was.qcow2");
    assert!(said.contains("never-was.qcow2"), "{said}");
}

#[test]
fn a_backing_format_is_taken_as_declared_and_never_guessed() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "below.qcow2", &[], "1M");
    qemu::io(dir, &[], "below.qcow2", &["write -P 7 0 64k"]);
    // Declared raw: its own bytes are the disk, header and all, as in QEMU.
    qemu::create(dir, "said-raw.qcow2", &["-u", "-b", "below.qcow2", "-F", "raw"], "1M");
    judge::same_as_qemu(dir, "said-raw.qcow2");
    // Nothing declared, where QEMU guesses: raw, and refused if that would be a silent surprise.
    remove_backing_format(dir, "said-raw.qcow2", "said-nothing.qcow2");
    let said = refused(dir, "said-nothing.qcow2");
    assert!(said.contains("below.qcow2") && said.contains("-F qcow2"), "{said}");
    fs::write(dir.join("plain.raw"), vec![7; 1 << 20]).expect("written");
    qemu::create(dir, "plain.qcow2", &["-b", "plain.raw", "-F", "raw"], "1M");
    qemu::flatten(dir, "plain.qcow2", "plain.flat");
    remove_backing_format(dir, "plain.qcow2", "said-nothing.qcow2");
    judge::same_as_raw(dir, "said-nothing.qcow2", "plain.flat", &[]);
    // Declared qcow2, but it is not.
    fs::write(dir.join("noise.raw"), vec![7; 1 << 20]).expect("written");
    qemu::create(dir, "said-qcow2.qcow2", &["-u", "-b", "noise.raw", "-F", "qcow2"], "1M");
    let said = refused(dir, "said-qcow2.qcow2");
    assert!(said.contains("noise.raw"), "{said}");
    // A format that mica does not know.
    qemu::create(dir, "said-vmdk.qcow2", &["-u", "-b", "noise.raw", "-F", "vmdk"], "1M");
    assert!(refused(dir, "said-vmdk.qcow2").contains("vmdk"));
}

/// Copies an image in `dir` without the format of its backing file.
fn remove_backing_format(dir: &Path, from: &str, to: &str) {
    let mut image = fs::read(dir.join(from)).expect("read");
    let magic = 0xe279_2aca_u32.to_be_bytes();
    let at = image.windows(4).position(|bytes| bytes == magic).expect("a backing format");
    // An unknown extension in place of the one that declares the format.
    image[at + 3] = 0;
    fs::write(dir.join(to), image).expect("written");
}

#[test]
fn names_are_relative_to_the_image_that_contains_them() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    fs::create_dir_all(dir.join("a/b")).expect("made");
    qemu::create(&dir.join("a/b"), "base.qcow2", &[], "4M");
    qemu::io(&dir.join("a/b"), &[], "base.qcow2", &["write -P 1 0 1M"]);
    qemu::create(&dir.join("a"), "middle.qcow2", &["-b", "b/base.qcow2", "-F", "qcow2"], "");
    qemu::io(&dir.join("a"), &[], "middle.qcow2", &["write -P 2 1M 1M"]);
    qemu::create(dir, "top.qcow2", &["-b", "a/middle.qcow2", "-F", "qcow2"], "");
    judge::same_as_qemu(dir, "top.qcow2");
    let absolute = dir.join("a/middle.qcow2").display().to_string();
    qemu::create(dir, "absolute.qcow2", &["-b", &absolute, "-F", "qcow2"], "");
    judge::same_as_qemu(dir, "absolute.qcow2");
    // The plain form of a json: name is the same as the name.
    for name in [
        "json:{\"driver\":\"qcow2\",\"file\":{\"driver\":\"file\",\"filename\":\"FILE\"}}",
        "json:{\"driver\":\"qcow2\",\"file.driver\":\"file\",\"file.filename\":\"FILE\"}",
    ] {
        let name = name.replace("FILE", &absolute);
        qemu::create(dir, "json.qcow2", &["-b", &name, "-F", "qcow2"], "");
        judge::same_as_qemu(dir, "json.qcow2");
    }
    // What is outside is reached only if the user allows it.
    fs::create_dir(dir.join("c")).expect("made");
    qemu::create(&dir.join("c"), "top.qcow2", &["-b", "../a/middle.qcow2", "-F", "qcow2"], "");
    assert!(refused(dir, "c/top.qcow2").contains("--allow-path"));
    qemu::flatten(dir, "c/top.qcow2", "flat.raw");
    let allowed = dir.display().to_string();
    judge::same_as_raw(dir, "c/top.qcow2", "flat.raw", &["--allow-path", &allowed]);
}

#[test]
fn a_raw_base_of_any_length_reads_as_in_qemu() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    for len in [1_usize, 511, 100_000, 1 << 20, (1 << 20) + 700] {
        fs::write(dir.join("base.raw"), vec![0xab; len]).expect("written");
        qemu::create(dir, "top.qcow2", &["-b", "base.raw", "-F", "raw"], "2M");
        judge::same_as_qemu(dir, "top.qcow2");
        qemu::create(dir, "short.qcow2", &["-b", "base.raw", "-F", "raw"], "64k");
        judge::same_as_qemu(dir, "short.qcow2");
    }
}

/// A long chain of small layers, for the folder it is made in.
fn long_chain(dir: &Path, layers: u32) -> Manifest {
    let spec = ChainSpec {
        layers,
        disk_bytes: 64 << 20,
        fill: 0.9,
        features: "stale,zero".parse::<Features>().expect("features"),
        ..ChainSpec::new(dir)
    };
    generate(&spec, |_| {}).expect("made")
}

/// Reads all of a generated chain through `server` and verifies it by its owners.
#[track_caller]
fn verify(dir: &Path, manifest: &Manifest, server: &Server) {
    let owners = manifest.load_owners(dir).expect("owners");
    let served = server.connect(&nbd::Wish::default()).and_then(|mut client| client.read_all());
    assert_eq!(owners.verify(&served.expect("read"), 0), Ok(()));
}

#[test]
fn a_thousand_layers_are_served_with_and_without_an_index() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let manifest = long_chain(dir, 1000);
    let top = dir.join(&manifest.top);
    for more in [&["--index", "off"][..], &[], &["--index", "read"]] {
        let server = Server::mica(&top, "qcow2", more).expect("served");
        verify(dir, &manifest, &server);
        assert!(server.stop().expect("it stops").status.success());
    }
    mica::run(["index", "build", &top.display().to_string()]).ok();
    let server = Server::mica(&top, "qcow2", &["--index-cache", "1M"]).expect("served");
    verify(dir, &manifest, &server);
    assert!(server.stop().expect("it stops").status.success());
}

#[test]
fn a_thousand_layers_are_served_under_a_limit_of_256_open_files() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let manifest = long_chain(dir, 1000);
    for index in ["off", "auto"] {
        let server = Server::start("", |socket| {
            let mut serve = Command::new("prlimit");
            serve.arg("--nofile=256:256").arg(mica::binary());
            serve.args(["serve", "--read-only", "--index", index, "--nbd"]).arg(socket);
            serve.arg(dir.join(&manifest.top));
            serve
        });
        let server = server.expect("served");
        verify(dir, &manifest, &server);
        assert!(server.stop().expect("it stops").status.success());
    }
}

#[test]
fn ten_thousand_layers_are_served_under_a_limit_of_256_open_files() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let manifest = long_chain(dir, 10_000);
    let server = Server::start("", |socket| {
        let mut serve = Command::new("prlimit");
        serve.arg("--nofile=256:256").arg(mica::binary());
        serve.args(["serve", "--read-only", "--index", "off", "--nbd"]).arg(socket);
        serve.arg(dir.join(&manifest.top));
        serve
    });
    let server = server.expect("served");
    verify(dir, &manifest, &server);
    assert!(server.stop().expect("it stops").status.success());
}

#[test]
fn a_link_out_of_the_folder_is_not_followed_for_an_image() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let [inside, outside] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    qemu::create(outside.path(), "secret.qcow2", &[], "1M");
    symlink(outside.path().join("secret.qcow2"), inside.path().join("link.qcow2")).expect("linked");
    qemu::create(inside.path(), "top.qcow2", &["-u", "-b", "link.qcow2", "-F", "qcow2"], "1M");
    refused(inside.path(), "top.qcow2");
}

#[test]
fn a_block_device_is_a_base() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    fs::write(dir.join("disk.raw"), vec![0x5a; 1 << 20]).expect("written");
    let file = dir.join("disk.raw").display().to_string();
    let attached = Command::new("losetup").args(["--find", "--show", &file]).output();
    let device = match attached {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        }
        _ => return tools::skip("no loop device can be had here"),
    };
    qemu::create(dir, "top.qcow2", &["-b", &device, "-F", "raw"], "1M");
    qemu::io(dir, &[], "top.qcow2", &["write -P 1 100k 10k"]);
    qemu::flatten(dir, "top.qcow2", "flat.raw");
    judge::same_as_raw(dir, "top.qcow2", "flat.raw", &["--allow-path", "/dev"]);
    command::run("losetup", ["--detach", &device]).ok();
}
