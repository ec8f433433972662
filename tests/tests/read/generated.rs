//! Chains that `mica gen chain` makes: QEMU finds no fault with any layer, and QEMU and mica both
//! read from them what the owner map says.

use mica_gen::{ChainSpec, Distribution, Feature, Features, generate};
use mica_tests::server::Server;
use mica_tests::{mica, nbd, qemu, tools};
use std::fs;
use tempfile::TempDir;

/// Makes the chain of `spec` in a new folder and judges it: every layer by `qemu-img check`, the
/// disk as QEMU and as mica read it.
#[track_caller]
fn judge(spec: &ChainSpec) {
    let dir = tempfile::tempdir().expect("a folder");
    let manifest =
        generate(&ChainSpec { dir: dir.path().to_owned(), ..spec.clone() }, |_| {}).expect("made");
    for layer in manifest.layer.iter().filter(|layer| layer.format == "qcow2") {
        let said = qemu::img(dir.path(), ["check", "-f", "qcow2", &layer.file]);
        assert_eq!(said.code(), Some(0), "{}: {said}", layer.file);
    }
    let owners = manifest.load_owners(dir.path()).expect("owners");
    qemu::flatten(dir.path(), &manifest.top, "flat.raw");
    let flat = fs::read(dir.path().join("flat.raw")).expect("flat");
    assert_eq!(flat.len() as u64, spec.disk_bytes);
    assert_eq!(owners.verify(&flat, 0), Ok(()), "as QEMU reads it");

    let server = Server::mica(&dir.path().join(&manifest.top), "qcow2", &[]).expect("served");
    let served = server.connect(&nbd::Wish::default()).and_then(|mut client| client.read_all());
    assert_eq!(owners.verify(&served.expect("read"), 0), Ok(()), "as mica reads it");
}

fn small(features: Features) -> ChainSpec {
    ChainSpec { layers: 10, disk_bytes: 24 << 20, features, ..ChainSpec::new("unused") }
}

#[test]
fn a_plain_chain_is_sound() {
    if tools::present(&[tools::QEMU_IMG]) {
        judge(&small(Features::default()));
        let distribution = Distribution::NewestHeavy;
        judge(&ChainSpec { distribution, fill: 1.0, ..small(Features::default()) });
    }
}

#[test]
fn every_feature_alone_is_sound() {
    if tools::present(&[tools::QEMU_IMG]) {
        for &feature in Feature::ALL {
            judge(&small([feature].into_iter().collect()));
        }
    }
}

#[test]
fn all_features_together_are_sound_whatever_the_seed() {
    if tools::present(&[tools::QEMU_IMG]) {
        for seed in 0..12 {
            judge(&ChainSpec { seed, layers: 20, ..small(Features::all()) });
        }
    }
}

#[test]
fn all_features_together_are_sound_whatever_the_cluster_size() {
    if tools::present(&[tools::QEMU_IMG]) {
        for bits in 9..=21 {
            let disk_bytes = (24 << 20) + 512;
            judge(&ChainSpec { cluster_bytes: 1 << bits, disk_bytes, ..small(Features::all()) });
        }
    }
}

#[test]
fn the_verb_makes_what_the_library_makes() {
    let [by_verb, by_library]: [TempDir; 2] =
        [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let words = ["gen", "chain", "--layers", "4", "--size", "8M", "--cluster-size", "16k"];
    let more = ["--features", "zero,deflate,lengths", "--seed", "9", "--fill", "0.5"];
    let folder = by_verb.path().to_str().expect("a plain name");
    mica::run(words.iter().chain(&more).chain([&folder])).ok();
    let spec = ChainSpec {
        dir: by_library.path().to_owned(),
        layers: 4,
        disk_bytes: 8 << 20,
        cluster_bytes: 16 << 10,
        features: "zero,deflate,lengths".parse().expect("features"),
        seed: 9,
        fill: 0.5,
        ..ChainSpec::new("")
    };
    generate(&spec, |_| {}).expect("made");
    for file in ["layer-0000.qcow2", "layer-0003.qcow2", "owner.i32", "chain.json"] {
        let [verb, library] =
            [&by_verb, &by_library].map(|dir| fs::read(dir.path().join(file)).expect(file));
        assert!(verb == library, "{file} differs");
    }
}

#[test]
fn a_chain_is_overwritten_only_by_force_and_never_while_it_is_in_use() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().join("chain");
    let generate = |more: &[&str]| {
        let words = ["gen", "chain", "--layers", "3", "--size", "8M"];
        let named = folder.to_str().expect("a plain name");
        mica::run(words.iter().chain(more).chain([&named]))
    };
    let contents = || {
        let files = ["layer-0000.qcow2", "layer-0001.qcow2", "layer-0002.qcow2", "chain.json"];
        files.map(|file| fs::read(folder.join(file)).expect(file))
    };
    generate(&[]).ok();
    let first = contents();
    let said = generate(&["--seed", "2"]).refusal();
    assert!(said.contains("not empty") && said.contains("--force"), "{said}");
    assert!(contents() == first, "a refused command changed the chain");

    let image = folder.join("layer-0002.qcow2");
    let server = Server::mica_writable(&image, "qcow2", &[]).expect("mica serves");
    let served = contents();
    let said = generate(&["--seed", "2", "--force"]).refusal();
    assert!(said.contains("layer-0000.qcow2: another process"), "{said}");
    assert!(contents() == served, "a chain in use was overwritten");
    server.stop().expect("it ends");

    generate(&["--seed", "2", "--force"]).ok();
    assert!(contents() != first);
    mica::run(["check", image.to_str().expect("a plain name")]).ok();
}
