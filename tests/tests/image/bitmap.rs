//! `mica bitmap`: what it does to an image QEMU reads, and the other way round.

use mica_tests::command::{self, Finished};
use mica_tests::server::Server;
use mica_tests::{mica, qemu, tools};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;

#[track_caller]
fn mica_in(dir: &Path, args: &[&str]) -> Finished {
    command::finish(Command::new(mica::binary()).current_dir(dir).args(args))
}

/// The bitmaps of an image, as QEMU sees them.
pub(super) fn bitmaps(dir: &Path, image: &str) -> Value {
    let info = qemu::img(dir, ["info", "--output=json", image]).json();
    info["format-specific"]["data"]["bitmaps"].clone()
}

/// What is dirty in a bitmap, as qemu-nbd tells it.
pub(super) fn dirty(dir: &Path, image: &str, name: &str) -> Value {
    let server = Server::start("", |socket| {
        let mut nbd = Command::new("qemu-nbd");
        nbd.args(["-r", "-t", "-f", "qcow2", "-B", name, "-k"]).arg(socket).arg(dir.join(image));
        nbd
    });
    let server = server.expect("served");
    let map = format!("--map=qemu:dirty-bitmap:{name}");
    command::run("nbdinfo", ["--json", &map, &server.uri()]).json()
}

/// Does the same to two copies of `image`, by mica and by QEMU, and compares what is there then.
#[track_caller]
fn alike(dir: &Path, image: &str, name: &str, actions: &[&str]) {
    fs::copy(dir.join(image), dir.join("theirs.qcow2")).expect("it is there");
    mica_in(dir, &[&["bitmap"], actions, &[image, name]].concat()).ok();
    qemu::img(dir, [&["bitmap"], actions, &["theirs.qcow2", name]].concat()).ok();
    assert_eq!(bitmaps(dir, image), bitmaps(dir, "theirs.qcow2"), "{actions:?} {name}");
    for image in [image, "theirs.qcow2"] {
        qemu::img(dir, ["check", image]).ok();
        mica_in(dir, &["check", image]).ok();
    }
    let there = bitmaps(dir, image);
    for bitmap in there.as_array().into_iter().flatten() {
        let name = bitmap["name"].as_str().expect("a name");
        let (ours, theirs) = (dirty(dir, image, name), dirty(dir, "theirs.qcow2", name));
        assert_eq!(ours, theirs, "{actions:?}: {name}");
    }
}

#[test]
fn every_action_has_the_effect_that_it_has_in_qemu() {
    let judges = [tools::QEMU_IMG, tools::QEMU_IO, tools::QEMU_NBD, tools::NBDINFO];
    if !tools::present(&judges) {
        return;
    }
    for options in ["cluster_size=64k", "cluster_size=512", "extended_l2=on,cluster_size=2M"] {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        qemu::create(dir, "image.qcow2", &["-o", options], "20M");
        let write = |what: &str| qemu::io(dir, &[], "image.qcow2", &[what]);
        alike(dir, "image.qcow2", "default", &["--add"]);
        alike(dir, "image.qcow2", "fine", &["--add", "-g", "512"]);
        write("write 1M 5k");
        alike(dir, "image.qcow2", "coarse", &["--add", "-g", "1M", "--disable"]);
        alike(dir, "image.qcow2", "coarse", &["--enable"]);
        write("write 3M 100k");
        alike(dir, "image.qcow2", "fine", &["--disable"]);
        write("write 19M 1M");
        alike(dir, "image.qcow2", "sum", &["--add", "--merge", "fine", "--merge", "coarse"]);
        alike(dir, "image.qcow2", "fine", &["--merge", "default"]);
        alike(dir, "image.qcow2", "default", &["--clear"]);
        alike(dir, "image.qcow2", "coarse", &["--remove"]);
        // From another image.
        fs::copy(dir.join("image.qcow2"), dir.join("other.qcow2")).expect("it is there");
        write("write 7M 3M");
        fs::copy(dir.join("image.qcow2"), dir.join("source.qcow2")).expect("it is there");
        let merge = ["--merge", "default", "-b", "source.qcow2"];
        fs::copy(dir.join("other.qcow2"), dir.join("theirs.qcow2")).expect("it is there");
        mica_in(dir, &[&["bitmap"], &merge[..], &["other.qcow2", "sum"]].concat()).ok();
        let args = [&["bitmap", "-F", "qcow2"], &merge[..], &["theirs.qcow2", "sum"]].concat();
        qemu::img(dir, args).ok();
        assert_eq!(dirty(dir, "other.qcow2", "sum"), dirty(dir, "theirs.qcow2", "sum"));
        for name in ["default", "fine", "sum"] {
            alike(dir, "image.qcow2", name, &["--remove"]);
        }
        assert!(bitmaps(dir, "image.qcow2").is_null());
    }
}

#[test]
fn what_makes_no_sense_is_refused_and_changes_nothing() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "image.qcow2", &[], "20M");
    mica_in(dir, &["bitmap", "--add", "image.qcow2", "b"]).ok();
    let before = fs::read(dir.join("image.qcow2")).expect("read");
    let refuse = |args: &[&str]| mica_in(dir, &[&["bitmap"], args].concat()).refusal();
    assert!(refuse(&["--add", "image.qcow2", "b"]).contains("already"));
    assert!(refuse(&["--clear", "image.qcow2", "c"]).contains("b"));
    assert!(refuse(&["--add", "-g", "1000", "image.qcow2", "c"]).contains("power of two"));
    // The first action is not done either.
    refuse(&["--clear", "--merge", "c", "image.qcow2", "b"]);
    mica_in(dir, &["bitmap", "image.qcow2", "b"]).refusal();
    mica_in(dir, &["bitmap", "-g", "4k", "--clear", "image.qcow2", "b"]).refusal();
    assert_eq!(fs::read(dir.join("image.qcow2")).expect("read"), before);
    qemu::create(dir, "old.qcow2", &["-o", "compat=0.10"], "1M");
    assert!(refuse(&["--add", "old.qcow2", "b"]).contains("version 2"));
    let json = mica_in(dir, &["bitmap", "--disable", "--output", "json", "image.qcow2", "b"]);
    assert_eq!(json.json()["bitmaps"][0]["name"], "b");
    // One of a disk that went back in time can only be removed.
    mica_in(dir, &["snapshot", "-c", "one", "image.qcow2"]).ok();
    mica_in(dir, &["snapshot", "-a", "one", "image.qcow2"]).ok();
    mica_in(dir, &["snapshot", "-d", "one", "image.qcow2"]).ok();
    assert!(refuse(&["--enable", "image.qcow2", "b"]).contains("removed"));
    mica_in(dir, &["bitmap", "--add", "image.qcow2", "new"]).ok();
    let there = bitmaps(dir, "image.qcow2");
    assert_eq!(there[0]["flags"][0], "in-use", "it stays so: {there}");
    assert_eq!(there[1]["flags"], serde_json::json!(["auto"]), "{there}");
    mica_in(dir, &["bitmap", "--remove", "image.qcow2", "b"]).ok();
    assert_eq!(bitmaps(dir, "image.qcow2").as_array().map(Vec::len), Some(1));
    qemu::img(dir, ["check", "image.qcow2"]).ok();
}

/// What is dirty, also in what the disk gained and lost, is what QEMU says of a copy that it
/// resized itself.
/// The story: QEMU did not open the image any more.
#[test]
fn bitmaps_get_the_length_of_their_disk() {
    let judges = [tools::QEMU_IMG, tools::QEMU_IO, tools::QEMU_NBD, tools::NBDINFO];
    if !tools::present(&judges) {
        return;
    }
    for options in ["cluster_size=64k", "cluster_size=512"] {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        qemu::create(dir, "image.qcow2", &["-o", options], "20M");
        for (name, granularity) in [("fine", "512"), ("coarse", "1M"), ("off", "64k")] {
            let add = ["bitmap", "--add", "-g", granularity, "image.qcow2", name];
            qemu::img(dir, add).ok();
        }
        qemu::io(dir, &[], "image.qcow2", &["write 1M 5k", "write 10M 3M", "write 19M 1M"]);
        qemu::img(dir, ["bitmap", "--disable", "image.qcow2", "off"]).ok();
        for size in ["300M", "19500k", "11M", "12M", "512"] {
            fs::copy(dir.join("image.qcow2"), dir.join("theirs.qcow2")).expect("it is there");
            mica_in(dir, &["resize", "-q", "--shrink", "image.qcow2", size]).ok();
            qemu::img(dir, ["resize", "-q", "--shrink", "-f", "qcow2", "theirs.qcow2", size]).ok();
            assert_eq!(bitmaps(dir, "image.qcow2"), bitmaps(dir, "theirs.qcow2"), "{size}");
            for name in ["fine", "coarse", "off"] {
                let (ours, theirs) =
                    (dirty(dir, "image.qcow2", name), dirty(dir, "theirs.qcow2", name));
                assert_eq!(ours, theirs, "{options}: {name} at {size}");
            }
            for check in
                [qemu::img(dir, ["check", "image.qcow2"]), mica_in(dir, &["check", "image.qcow2"])]
            {
                assert_eq!(check.code(), Some(0), "{options} {size}: {check}");
            }
            qemu::io(dir, &[], "image.qcow2", &["write 0 512"]);
        }
    }
}

/// The story: the target was overwritten, and then its bitmap was found.
#[test]
fn copy_onto_an_image_that_has_the_bitmap_is_refused_before_it_is_written() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    for image in ["source.qcow2", "target.qcow2"] {
        mica_in(dir, &["create", "-q", image, "1M"]).ok();
    }
    for image in ["source.qcow2", "target.qcow2"] {
        mica_in(dir, &["bitmap", "--add", image, "b"]).ok();
    }
    let before = std::fs::read(dir.join("target.qcow2")).expect("there");
    let copy = ["convert", "-n", "--bitmaps", "-O", "qcow2", "source.qcow2", "target.qcow2"];
    let said = mica_in(dir, &copy).refusal();
    assert!(said.contains("has a bitmap \"b\" already"), "{said}");
    assert!(std::fs::read(dir.join("target.qcow2")).expect("there") == before);
    mica_in(dir, &["bitmap", "--remove", "target.qcow2", "b"]).ok();
    mica_in(dir, &copy).ok();
    let info = mica_in(dir, &["info", "--output", "json", "target.qcow2"]).ok();
    assert!(info.contains("\"b\""), "{info}");
}

/// Where the directory of the bitmaps is, by the header extension that names it.
fn directory_at(image: &[u8]) -> usize {
    let magic = 0x2385_2875_u32.to_be_bytes();
    let at = image.windows(4).position(|bytes| bytes == magic).expect("it has bitmaps");
    let offset = image[at + 24..].first_chunk().map(|bytes| u64::from_be_bytes(*bytes));
    usize::try_from(offset.expect("a whole extension")).expect("within the file")
}

/// The story: a program that does not know bitmaps had written to the image, and it was said to
/// have none.
#[test]
fn bitmaps_that_another_program_made_inconsistent_are_named_and_can_be_removed() {
    /// The byte with the bit that says that bitmaps are true.
    const CONSISTENT_AT: usize = 95;
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "image.qcow2", &[], "20M");
    for name in ["one", "two"] {
        mica_in(dir, &["bitmap", "--add", "image.qcow2", name]).ok();
    }
    let mut stale = fs::read(dir.join("image.qcow2")).expect("read");
    stale[CONSISTENT_AT] &= !1;
    let put = || fs::write(dir.join("image.qcow2"), &stale).expect("written");
    put();
    let refuse = |args: &[&str]| mica_in(dir, &[&["bitmap"], args].concat()).refusal();
    for action in ["--clear", "--enable", "--disable", "--merge=two"] {
        let refused = refuse(&[action, "image.qcow2", "one"]);
        assert!(refused.contains("\"one\" is inconsistent"), "{refused}");
        assert!(refused.contains("--remove it, and --add it again"), "{refused}");
    }
    for action in ["--clear", "--remove"] {
        let refused = refuse(&[action, "image.qcow2", "three"]);
        assert!(refused.contains("one, two are inconsistent"), "{refused}");
    }
    assert!(fs::read(dir.join("image.qcow2")).expect("read") == stale, "nothing has changed");

    let removed = mica_in(dir, &["bitmap", "--remove", "image.qcow2", "one"]);
    assert!(removed.stderr.contains("removed, too, as QEMU does: two"), "{}", removed.stderr);
    assert!(removed.stderr.contains("-r leaks"), "{}", removed.stderr);
    removed.ok();
    assert!(bitmaps(dir, "image.qcow2").is_null());
    qemu::img(dir, ["check", "-q", "-r", "leaks", "image.qcow2"]).ok();
    mica_in(dir, &["bitmap", "--remove", "image.qcow2", "one"]).refusal();

    put();
    mica_in(dir, &["create", "-q", "source.qcow2", "20M"]).ok();
    mica_in(dir, &["bitmap", "--add", "source.qcow2", "three"]).ok();
    let copied = mica_in(dir, &["convert", "-n", "--bitmaps", "source.qcow2", "image.qcow2"]);
    assert!(copied.stderr.contains("removed, too, as QEMU does: one, two"), "{}", copied.stderr);
    copied.ok();
    assert_eq!(bitmaps(dir, "image.qcow2")[0]["name"], "three");

    put();
    mica_in(dir, &["bitmap", "--remove", "--add", "image.qcow2", "one"]).ok();
    assert_eq!(bitmaps(dir, "image.qcow2").as_array().map(Vec::len), Some(1));
    qemu::io(dir, &[], "image.qcow2", &["write 1M 64k"]);
    qemu::img(dir, ["check", "-q", "-r", "leaks", "image.qcow2"]).ok();

    // Nothing can be read of them.
    let at = directory_at(&stale);
    stale[at..at + 24].fill(0xff);
    fs::write(dir.join("image.qcow2"), &stale).expect("written");
    let refused = refuse(&["--remove", "image.qcow2", "one"]);
    assert!(refused.contains("inconsistent, and cannot be read"), "{refused}");
    mica_in(dir, &["bitmap", "--add", "image.qcow2", "one"]).ok();
    assert_eq!(bitmaps(dir, "image.qcow2").as_array().map(Vec::len), Some(1));
}

/// The story: the image had a bitmap with an empty table, and QEMU did not open it.
#[test]
fn empty_disk_gets_a_bitmap_only_when_it_is_longer() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "theirs.qcow2", &[], "0");
    mica_in(dir, &["create", "-q", "ours.qcow2", "0"]).ok();
    for image in ["theirs.qcow2", "ours.qcow2"] {
        let before = fs::read(dir.join(image)).expect("it is there");
        let add = ["bitmap", "--add", image, "b"];
        let refused = mica_in(dir, &add).refusal();
        assert!(refused.contains("mica resize"), "{refused}");
        assert!(before == fs::read(dir.join(image)).expect("it is there"), "{image}");
        qemu::img(dir, ["check", image]).ok();
        mica_in(dir, &["convert", "--force", "--bitmaps", image, "copy.qcow2"]).ok();
        qemu::img(dir, ["check", "copy.qcow2"]).ok();
        mica_in(dir, &["resize", "-q", image, "1M"]).ok();
        mica_in(dir, &add).ok();
        let shrink = ["resize", "--shrink", image, "0"];
        let refused = mica_in(dir, &shrink).refusal();
        assert!(refused.contains("must be positive"), "{refused}");
        assert_ne!(qemu::img(dir, shrink).code(), Some(0));
        qemu::img(dir, ["check", image]).ok();
    }
}

/// The story: a copy lacked bitmaps, and nothing said so.
#[test]
fn each_bitmap_that_a_copy_lacks_is_named_with_the_reason() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    mica_in(dir, &["create", "-q", "image.qcow2", "1M"]).ok();
    for name in ["broken", "sound"] {
        mica_in(dir, &["bitmap", "--add", "image.qcow2", name]).ok();
    }
    let sound = fs::read(dir.join("image.qcow2")).expect("it is there");
    // In use: its writer has not saved the first one.
    let mut broken = sound.clone();
    broken[directory_at(&sound) + 15] |= 1;
    fs::write(dir.join("broken.qcow2"), broken).expect("written");
    // The length of the disk, as an older mica left it with bitmaps.
    let mut empty = sound;
    empty[24..32].fill(0);
    fs::write(dir.join("empty.qcow2"), empty).expect("written");
    let copy = |image: &str| {
        let words =
            ["convert", "--force", "--bitmaps", "--skip-broken-bitmaps", image, "copy.qcow2"];
        let command = Command::new(mica::binary()).current_dir(dir).args(words).output();
        let done = command.expect("it runs");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{said}");
        said
    };
    let said = copy("broken.qcow2");
    assert!(said.contains("broken.qcow2: the bitmap \"broken\" is left out: it is"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    let info = mica_in(dir, &["info", "--output", "json", "copy.qcow2"]).ok();
    assert!(info.contains("\"sound\"") && !info.contains("\"broken\""), "{info}");
    let said = copy("empty.qcow2");
    for name in ["broken", "sound"] {
        let line = format!("empty.qcow2: the bitmap \"{name}\" is left out: a disk of 0 bytes");
        assert!(said.contains(&line), "{said}");
    }
}
