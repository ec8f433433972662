use super::*;
use crate::spec::{DataMode, Features};

#[test]
fn same_spec_makes_the_same_bytes() {
    let [one, other] = [(); 2].map(|()| {
        let dir = tempfile::tempdir().expect("a folder");
        let spec = ChainSpec {
            layers: 6,
            disk_bytes: 8 << 20,
            features: Features::all(),
            ..ChainSpec::new(dir.path())
        };
        generate(&spec, |_| {}).expect("made");
        let mut files: Vec<_> = fs::read_dir(dir.path())
            .expect("listed")
            .map(|file| file.expect("listed").path())
            .map(|path| (path.file_name().map(ToOwned::to_owned), fs::read(&path).expect("read")))
            .collect();
        files.sort();
        files
    });
    assert!(one == other && one.len() >= 9);
}

#[test]
fn generated_chain_is_loaded_by_its_manifest() {
    let dir = tempfile::tempdir().expect("a folder");
    let spec = ChainSpec { layers: 3, disk_bytes: 1 << 20, ..ChainSpec::new(dir.path()) };
    let mut seen = Vec::new();
    let made = generate(&spec, |layers| seen.push(layers)).expect("made");
    assert_eq!(seen, [1, 2, 3]);
    assert_eq!(Manifest::load(dir.path()).expect("found"), made);
    assert_eq!(made.load_owners(dir.path()).expect("found").disk_bytes(), 1 << 20);
    let top = fs::read_link(dir.path().join(TOP_LINK)).expect("linked");
    assert_eq!(top.to_str(), Some("layer-0002.qcow2"));
}

#[test]
fn data_not_requested_takes_no_space() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().expect("a folder");
    let spec = ChainSpec {
        disk_bytes: 1 << 30,
        fill: 1.0,
        data: DataMode::Holes,
        ..ChainSpec::new(dir.path())
    };
    generate(&spec, |_| {}).expect("made");
    let file = fs::metadata(dir.path().join("layer-0000.qcow2")).expect("there");
    assert!(file.len() > 1 << 30 && file.blocks() * 512 < 2 << 20);
}
