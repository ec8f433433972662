//! The index beside the layers: built, reported, dropped, shared, and never trusted when it is
//! wrong.

use mica_gen::{ChainSpec, Features, Manifest, Rng, generate};
use mica_tests::server::Server;
use mica_tests::{clock, mica, nbd, qemu, tools};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A chain of twelve layers with everything in it, old enough for seals to prove something.
fn chain(dir: &Path) -> Manifest {
    let spec = ChainSpec {
        layers: 12,
        disk_bytes: 16 << 20,
        features: Features::all(),
        seed: 3,
        ..ChainSpec::new(dir)
    };
    let manifest = generate(&spec, |_| {}).expect("made");
    clock::sleep(Duration::from_millis(1200));
    manifest
}

fn sidecars(dir: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(dir).expect("listed").map(|file| file.expect("listed").path());
    let mut sidecars: Vec<_> =
        files.filter(|file| file.extension().is_some_and(|end| end == "mica-index")).collect();
    sidecars.sort();
    sidecars
}

/// Everything in `dir` except sidecars, byte for byte.
fn images(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = fs::read_dir(dir).expect("listed").map(|file| file.expect("listed").path());
    let images = files.filter(|file| file.extension().is_none_or(|end| end != "mica-index"));
    images.map(|file| (file.clone(), fs::read(file).expect("read"))).collect()
}

fn index(verb: &str, dir: &Path, manifest: &Manifest, more: &[&str]) -> serde_json::Value {
    let top = dir.join(&manifest.top).display().to_string();
    let words = ["index", verb, "--output", "json"];
    mica::run(words.iter().chain(more).copied().chain([top.as_str()])).json()
}

fn states(dir: &Path, manifest: &Manifest, more: &[&str]) -> Vec<String> {
    let status = index("status", dir, manifest, more);
    let layers = status["layers"].as_array().expect("layers").iter();
    layers.map(|layer| layer["state"].as_str().expect("a state").to_owned()).collect()
}

/// Serves the chain with `more` options and verifies every byte by its owner.
#[track_caller]
fn serves_right(dir: &Path, manifest: &Manifest, more: &[&str]) {
    let server = Server::mica(&dir.join(&manifest.top), "qcow2", more).expect("served");
    let served = server.connect(&nbd::Wish::default()).and_then(|mut client| client.read_all());
    let owners = manifest.load_owners(dir).expect("owners");
    assert_eq!(owners.verify(&served.expect("read"), 0), Ok(()));
    assert!(server.stop().expect("it stops").status.success());
}

#[test]
fn an_index_is_built_reported_and_dropped_and_leaves_images_unchanged() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let manifest = chain(dir);
    let before = images(dir);
    assert!(
        states(dir, &manifest, &[]).iter().all(|state| state == "missing" || state == "sealed")
    );
    index("build", dir, &manifest, &[]);
    assert_eq!(states(dir, &manifest, &[]), ["sealed"; 11]);
    // The base is raw and needs none.
    assert_eq!(sidecars(dir).len(), 10);
    serves_right(dir, &manifest, &[]);
    serves_right(dir, &manifest, &["--index", "read"]);
    let built: Vec<_> = sidecars(dir).iter().map(|file| fs::read(file).expect("read")).collect();
    index("build", dir, &manifest, &[]);
    let again: Vec<_> = sidecars(dir).iter().map(|file| fs::read(file).expect("read")).collect();
    assert!(built == again, "what fits is not rebuilt");
    assert!(images(dir) == before, "images stay as they are");
    index("drop", dir, &manifest, &[]);
    assert!(sidecars(dir).is_empty());
    serves_right(dir, &manifest, &["--index", "off"]);
    assert!(sidecars(dir).is_empty());
}

#[test]
fn qemu_finds_every_layer_clean_beside_an_index() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let manifest = chain(dir.path());
    index("build", dir.path(), &manifest, &[]);
    for layer in manifest.layer.iter().filter(|layer| layer.format == "qcow2") {
        let said = qemu::img(dir.path(), ["check", "-f", "qcow2", &layer.file]);
        assert_eq!(said.code(), Some(0), "{said}");
    }
}

#[test]
fn a_separate_folder_can_hold_the_index() {
    let dir = tempfile::tempdir().expect("a folder");
    let other = tempfile::tempdir().expect("a folder");
    let manifest = chain(dir.path());
    let place = other.path().display().to_string();
    let more = ["--index-dir", place.as_str()];
    index("build", dir.path(), &manifest, &more);
    assert!(sidecars(dir.path()).is_empty());
    assert_eq!(states(dir.path(), &manifest, &more), ["sealed"; 11]);
    serves_right(dir.path(), &manifest, &more);
    index("drop", dir.path(), &manifest, &more);
    assert_eq!(fs::read_dir(other.path()).expect("listed").count(), 0);
}

#[test]
fn a_server_writes_the_index_in_the_background() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let manifest = chain(dir);
    let server = Server::mica(&dir.join(&manifest.top), "qcow2", &[]).expect("served");
    let written = clock::poll(Duration::from_secs(30), Duration::from_millis(50), || {
        (sidecars(dir).len() == 10).then_some(())
    });
    assert!(written.is_some(), "{:?}", sidecars(dir));
    assert!(server.stop().expect("it stops").status.success());
    assert_eq!(states(dir, &manifest, &[]), ["sealed"; 11]);
    serves_right(dir, &manifest, &[]);
}

#[test]
fn chains_that_share_layers_share_their_index() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let manifest = chain(dir);
    for clone in ["one.qcow2", "two.qcow2"] {
        qemu::overlay(dir, clone, &manifest.top, &[]);
        qemu::io(dir, &["-f", "qcow2"], clone, &["write -P 5 1M 64k"]);
    }
    clock::sleep(Duration::from_millis(1200));
    let [one, two] =
        ["one.qcow2", "two.qcow2"].map(|top| Manifest { top: top.into(), ..manifest.clone() });
    index("build", dir, &one, &[]);
    assert_eq!(states(dir, &two, &[]), ["sealed"; 12], "all that the clones share is indexed");
}

#[test]
fn a_wrong_sidecar_is_never_trusted() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let manifest = chain(dir);
    index("build", dir, &manifest, &[]);
    let sidecars = sidecars(dir);
    let good: Vec<Vec<u8>> = sidecars.iter().map(|file| fs::read(file).expect("read")).collect();
    let restore = || {
        for (file, bytes) in sidecars.iter().zip(&good) {
            fs::write(file, bytes).expect("written");
        }
    };
    let mut rng = Rng::new(11);
    let number =
        |below: usize, rng: &mut Rng| usize::try_from(rng.below(below as u64)).expect("small");
    for _ in 0..40 {
        restore();
        let victim = number(sidecars.len(), &mut rng);
        let mut bytes = good[victim].clone();
        match rng.below(5) {
            0 => {
                let at = number(bytes.len(), &mut rng);
                bytes[at] ^= 1 << rng.below(8);
            }
            1 => bytes.truncate(number(bytes.len(), &mut rng)),
            2 => bytes = good[number(good.len(), &mut rng)].clone(),
            3 => {
                let at = number(bytes.len(), &mut rng);
                bytes[at..].fill(0xff);
            }
            _ => bytes.extend([0x55; 4096]),
        }
        fs::write(&sidecars[victim], &bytes).expect("written");
        serves_right(dir, &manifest, &["--index", "read"]);
    }
    restore();
    // All of another chain, which looks just like this one.
    let other = tempfile::tempdir().expect("a folder");
    let spec = ChainSpec {
        layers: 12,
        disk_bytes: 16 << 20,
        features: Features::all(),
        seed: 4,
        ..ChainSpec::new(other.path())
    };
    let strange = generate(&spec, |_| {}).expect("made");
    clock::sleep(Duration::from_millis(1200));
    index("build", other.path(), &strange, &[]);
    for file in self::sidecars(other.path()) {
        fs::copy(&file, dir.join(file.file_name().expect("a name"))).expect("copied");
    }
    serves_right(dir, &manifest, &[]);
    serves_right(dir, &manifest, &[]);
}

/// Several sidecars are written at the same time.
#[test]
fn a_build_that_is_killed_leaves_whole_sidecars_and_the_next_one_goes_on() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let spec = ChainSpec { layers: 200, disk_bytes: 16 << 20, ..ChainSpec::new(dir) };
    let manifest = generate(&spec, |_| {}).expect("made");
    clock::sleep(Duration::from_millis(1200));
    for wanted in [1, 100] {
        index("drop", dir, &manifest, &[]);
        let mut build = Command::new(mica::binary());
        build.args(["index", "build"]).arg(dir.join(&manifest.top)).stdout(Stdio::null());
        let mut build = build.spawn().expect("started");
        let begun = || (sidecars(dir).len() >= wanted).then_some(());
        clock::poll(Duration::from_secs(60), Duration::from_micros(200), begun).expect("it builds");
        build.kill().and_then(|()| build.wait()).expect("killed");

        let states = states(dir, &manifest, &[]);
        let sealed = states.iter().take_while(|state| *state == "sealed").count();
        assert!(sealed >= wanted, "{states:?}");
        assert!(states[sealed..].iter().all(|state| state == "missing"), "{states:?}");
        serves_right(dir, &manifest, &["--index", "read"]);
    }
    index("build", dir, &manifest, &[]);
    assert_eq!(states(dir, &manifest, &[]), vec!["sealed"; 199]);
    serves_right(dir, &manifest, &["--index", "read"]);
}

/// The story: an index built right after the chain was made said "0 of 99 layers ready".
#[test]
fn an_index_of_new_layers_ends_up_sealed_and_an_unproven_one_says_what_it_lacks() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let spec = ChainSpec { layers: 5, disk_bytes: 4 << 20, ..ChainSpec::new(dir) };
    let manifest = generate(&spec, |_| {}).expect("made");
    let built = index("build", dir, &manifest, &[]);
    assert_eq!((&built["indexed"], &built["built"]), (&4.into(), &4.into()), "{built}");
    assert_eq!(built["unproven"], 0, "{built}");
    assert_eq!(states(dir, &manifest, &[]), ["sealed"; 4]);

    // A copy has other timestamps, and the same content.
    let layer = dir.join("layer-0001.qcow2");
    fs::copy(&layer, dir.join("copy"))
        .and_then(|_| fs::rename(dir.join("copy"), &layer))
        .expect("copied");
    let status = index("status", dir, &manifest, &[]);
    assert_eq!(states(dir, &manifest, &[]), ["sealed", "unproven", "sealed", "sealed"]);
    assert_eq!((&status["indexed"], &status["after-reading"]), (&1.into(), &3.into()));
    let top = dir.join(&manifest.top).display().to_string();
    let said = mica::run(["index", "status", &top]).ok();
    assert!(said.contains("1 of 4 frozen layers ready, 3 once their tables are read,"), "{said}");
    serves_right(dir, &manifest, &["--index", "read"]);

    let built = index("build", dir, &manifest, &[]);
    assert_eq!((&built["indexed"], &built["unproven"]), (&4.into(), &0.into()), "{built}");
    let said = mica::run(["index", "status", &top]).ok();
    assert!(said.contains("4 of 4 frozen layers ready, "), "{said}");
}
