//! Stores whose file system is full: a volume can be deleted all the same.

use mica_tests::mounts::{Mount, make_ext4};
use mica_tests::tools;
use mica_tests::volume::run;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

/// The room of the file system.
const MIB: u64 = 48;

/// Takes all the room but so many bytes.
fn fill(folder: &Path, left: u64) {
    let mut file = File::create(folder.join("filler")).expect("made");
    for step in [1 << 20, 64 << 10, 4 << 10, 512] {
        while file.write_all(&vec![1; step]).is_ok() {}
        file.sync_all().expect("written");
    }
    let len = file.metadata().expect("there").len();
    file.set_len(len - left).and_then(|()| file.sync_all()).expect("shorter");
}

fn check_deletion(small: &Mount, left: u64) {
    let folder = &small.folder().join(left.to_string());
    std::fs::create_dir(folder).expect("made");
    let store = format!("file://{}/store", folder.display());
    let at = |name: &str| format!("{store}/{name}");
    let data = folder.join("data.raw");
    std::fs::write(&data, vec![7; 4 << 20]).expect("written");
    for name in ["web", "db", "gold"] {
        let data = data.display().to_string();
        run(["import", "-q", "-f", "raw", &data, &at(name)]).ok();
    }
    run(["snapshot", "-q", &at("gold"), "first"]).ok();
    for [verb, name] in [["delete", "web"], ["delete", "db"], ["drop", "gold@first"]] {
        fill(folder, left);
        run([verb, "-q", &at(name)]).ok();
        // What it has in reserve for the next time comes back with what this frees.
        run(["gc", "-q", &store]).ok();
    }
    let copy = folder.join("copy.raw").display().to_string();
    std::fs::remove_file(folder.join("filler")).expect("removed");
    run(["export", "-q", &at("gold"), &copy, "-O", "raw"]).ok();
    assert_eq!(std::fs::read(&copy).expect("read"), vec![7; 4 << 20]);
    std::fs::remove_dir_all(folder).expect("removed");
}

/// The story: nothing could be deleted from a store that was full, and in which nothing was to be
/// collected, since a deletion is recorded by one more object.
#[test]
fn volumes_and_snapshots_of_a_full_store_can_be_deleted() {
    if !tools::present(&[tools::MKE2FS]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let Ok(small) = Mount::memory(&dir.path().join("memory"), MIB) else {
        return tools::skip("mounting a tmpfs is not allowed here");
    };
    // A change of several objects may find room for some of them.
    let all_left = [0, 4 << 10, 8 << 10, 12 << 10, 20 << 10, 40 << 10];
    all_left.into_iter().for_each(|left| check_deletion(&small, left));
    let image = dir.path().join("ext4.raw");
    make_ext4(&image, MIB << 20, &[]).expect("made");
    let Ok(small) = Mount::ext4(&image, &dir.path().join("ext4")) else {
        return tools::skip("mounting an ext4 is not allowed here");
    };
    all_left.into_iter().for_each(|left| check_deletion(&small, left));
}
