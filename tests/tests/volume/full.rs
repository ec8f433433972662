//! Stores whose file system is full: a volume can be deleted all the same.

use mica_tests::mounts::{Mount, make_ext4};
use mica_tests::tools;
use mica_tests::volume::run;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

/// The room of the file system.
const MIB: u64 = 48;

/// Takes all the room that there is.
fn fill(folder: &Path) {
    let mut file = File::create(folder.join("filler")).expect("made");
    for step in [64 << 10, 4 << 10, 512] {
        while file.write_all(&vec![1; step]).and_then(|()| file.sync_data()).is_ok() {}
    }
}

fn check_deletion(small: &Mount) {
    let folder = small.folder();
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
        fill(folder);
        run([verb, "-q", &at(name)]).ok();
        // What it has in reserve for the next time comes back with what this frees.
        run(["gc", "-q", &store]).ok();
    }
    let copy = folder.join("copy.raw").display().to_string();
    std::fs::remove_file(folder.join("filler")).expect("removed");
    run(["export", "-q", &at("gold"), &copy, "-O", "raw"]).ok();
    assert_eq!(std::fs::read(&copy).expect("read"), vec![7; 4 << 20]);
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
    check_deletion(&small);
    let image = dir.path().join("ext4.raw");
    make_ext4(&image, MIB << 20, &[]).expect("made");
    let Ok(small) = Mount::ext4(&image, &dir.path().join("ext4")) else {
        return tools::skip("mounting an ext4 is not allowed here");
    };
    check_deletion(&small);
}
