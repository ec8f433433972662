//! `mica convert` onto block devices, and with -n into images that exist.

use mica_tests::mounts::Mount;
use mica_tests::{command, mica, qemu, tools};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::UNIX_EPOCH;

#[track_caller]
fn mica_in(dir: &Path, args: &[&str]) -> command::Finished {
    command::finish(Command::new(mica::binary()).current_dir(dir).args(args))
}

/// A loop device, detached when dropped.
pub(crate) struct Loop(pub(crate) String);

impl Loop {
    /// `None` if none can be had here.
    pub(crate) fn attach(file: &Path) -> Option<Self> {
        Self::attach_part(file, &[])
    }

    /// The same with `more` options.
    fn attach_part(file: &Path, more: &[&str]) -> Option<Self> {
        let mut command = Command::new("losetup");
        let attached = command.args(["--find", "--show"]).args(more).arg(file).output();
        let attached = attached.ok().filter(|output| output.status.success())?;
        Some(Self(String::from_utf8_lossy(&attached.stdout).trim().to_owned()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

/// A disk of 8 MiB and a bit with data, zeros and holes, and the same as `flat.raw`.
fn source(dir: &Path) -> Vec<u8> {
    qemu::create(dir, "base.qcow2", &[], "8389120");
    qemu::io(dir, &[], "base.qcow2", &["write -P 1 0 1M", "write -P 2 5M 100k"]);
    qemu::overlay(dir, "source.qcow2", "base.qcow2", &[]);
    qemu::io(dir, &[], "source.qcow2", &["write -z 64k 64k", "write -P 3 8388608 512"]);
    qemu::flatten(dir, "source.qcow2", "flat.raw");
    fs::read(dir.join("flat.raw")).expect("written")
}

#[test]
fn a_disk_is_written_onto_a_device_and_nothing_beyond_it() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::MKE2FS]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let wanted = source(dir);
    let file = dir.join("device");
    fs::write(&file, vec![9; 16 << 20]).expect("there is room");
    let Some(device) = Loop::attach(&file) else {
        return tools::skip("no loop device can be had here");
    };
    let convert = |more: &[&str]| {
        let onto = ["convert", "-O", "raw", "source.qcow2", &device.0];
        mica_in(dir, &[&onto[..], more].concat())
    };
    for more in [&[][..], &["-n"], &["-S", "0"], &["-S", "512", "--aio", "threads"]] {
        fs::write(&file, vec![9; 16 << 20]).expect("there is room");
        command::run("blockdev", ["--flushbufs", &device.0]).ok();
        convert(more).ok();
        let bytes = fs::read(&device.0).expect("readable");
        assert!(bytes[..wanted.len()] == wanted, "{more:?}: the disk differs");
        assert!(bytes[wanted.len()..].iter().all(|byte| *byte == 9), "{more:?}: more was written");
    }
    // What the user says is zero stays as it is.
    command::run("dd", ["if=/dev/zero", "bs=1M", "count=16", &format!("of={}", device.0)]).ok();
    convert(&["-n", "--target-is-zero"]).ok();
    assert!(fs::read(&device.0).expect("readable")[..wanted.len()] == wanted);

    let said = mica_in(dir, &["convert", "source.qcow2", &device.0]).refusal();
    assert!(said.contains("-O raw"), "{said}");
    let said = convert(&["-o", "preallocation=full"]).refusal();
    assert!(said.contains("-o"), "{said}");
    let said = mica_in(dir, &["convert", "-f", "raw", "-O", "raw", &device.0, &device.0]).refusal();
    assert!(said.contains("part of the source"), "{said}");
    qemu::create(dir, "long.qcow2", &[], "16777728");
    let said = mica_in(dir, &["convert", "-O", "raw", "long.qcow2", &device.0]).refusal();
    assert!(said.contains("too small"), "{said}");

    // A mounted device is in use.
    let before = fs::read(&file).expect("readable");
    let mke2fs = tools::MKE2FS.find().expect("present").display().to_string();
    command::run(&mke2fs, ["-q", "-F", &device.0]).ok();
    let mounted = Mount::device(&device.0, &dir.join("mounted")).expect("mounted");
    let said = convert(&[]).refusal();
    assert!(said.contains("in use"), "{said}");
    mounted.unmount();
    assert_ne!(fs::read(&file).expect("readable"), before);
    convert(&[]).ok();
}

#[test]
fn an_image_that_exists_is_written_in_place() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let wanted = source(dir);
    qemu::create(dir, "old.qcow2", &["-o", "compat=0.10"], "9M");
    qemu::create(dir, "below.qcow2", &[], "12M");
    qemu::io(dir, &[], "below.qcow2", &["write -P 7 0 12M"]);
    qemu::overlay(dir, "over.qcow2", "below.qcow2", &[]);
    qemu::create(dir, "split.qcow2", &["-o", "data_file=split.data"], "9M");
    for image in ["old.qcow2", "split.qcow2"] {
        qemu::io(dir, &[], image, &["write -P 7 0 9M"]);
    }
    for image in ["old.qcow2", "over.qcow2", "split.qcow2"] {
        mica_in(dir, &["convert", "-n", "source.qcow2", image]).ok();
        let said = qemu::img(dir, ["check", image]);
        assert_eq!(said.code(), Some(0), "{image}: {said}");
        qemu::flatten(dir, image, "copy.raw");
        let copy = fs::read(dir.join("copy.raw")).expect("written");
        assert!(copy[..wanted.len()] == wanted, "{image}: the disk differs");
        assert!(copy[wanted.len()..].iter().all(|byte| *byte == 7), "{image}: more was written");
    }
    fs::write(dir.join("image.raw"), vec![9; 9 << 20]).expect("there is room");
    mica_in(dir, &["convert", "-n", "-O", "raw", "source.qcow2", "image.raw"]).ok();
    let copy = fs::read(dir.join("image.raw")).expect("there");
    assert!(copy.len() == 9 << 20 && copy[..wanted.len()] == wanted);
    assert!(copy[wanted.len()..].iter().all(|byte| *byte == 9));

    for args in [
        &["-n", "source.qcow2", "none.qcow2"][..],
        &["-n", "source.qcow2", "source.qcow2"],
        &["-n", "source.qcow2", "base.qcow2"],
        &["-n", "split.qcow2", "source.qcow2"],
        &["-n", "-O", "raw", "split.qcow2", "split.data"],
    ] {
        mica_in(dir, &[&["convert"], args].concat()).refusal();
    }
    for args in [&["-n", "-c"][..], &["-n", "-o", "compat=1.1"], &["--target-is-zero"]] {
        let said = mica_in(dir, &[&["convert"], args, &["source.qcow2", "old.qcow2"]].concat());
        assert_eq!(said.code(), Some(1), "{said}");
    }
    qemu::flatten(dir, "source.qcow2", "after.raw");
    assert!(fs::read(dir.join("after.raw")).expect("written") == wanted);
}

#[test]
fn a_device_becomes_a_qcow2_image_if_it_is_large_enough() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    source(dir);
    let file = dir.join("device");
    fs::write(&file, vec![9; 16 << 20]).expect("there is room");
    let Some(device) = Loop::attach(&file) else {
        return tools::skip("no loop device can be had here");
    };
    let onto = ["convert", "-O", "qcow2", "source.qcow2", &device.0];
    for more in [&[][..], &["-c"], &["-o", "extended_l2=on,cluster_size=128k"]] {
        fs::write(&file, vec![9; 16 << 20]).expect("there is room");
        mica_in(dir, &[&onto[..], more].concat()).ok();
        qemu::img(dir, ["check", "-f", "qcow2", &device.0]).ok();
        mica_in(dir, &["check", &device.0]).ok();
        let compare = ["compare", "-f", "raw", "-F", "qcow2", "flat.raw", &device.0];
        qemu::img(dir, compare).ok();
        mica_in(dir, &["compare", "source.qcow2", &device.0]).ok();
    }
    let base = ["-B", "base.qcow2", "-F", "qcow2"];
    let absolute = dir.join("base.qcow2").display().to_string();
    let base = base.map(|word| if word == "base.qcow2" { &*absolute } else { word });
    mica_in(dir, &[&onto[..], &base].concat()).ok();
    qemu::img(dir, ["compare", "-f", "raw", "-F", "qcow2", "flat.raw", &device.0]).ok();
    let before = fs::read(&device.0).expect("readable");
    let create = ["create", "-f", "qcow2", &device.0, "1G"];
    let said = mica_in(dir, &create).refusal();
    assert!(said.contains("--force"), "{said}");
    assert!(fs::read(&device.0).expect("readable") == before, "it was written to");
    mica_in(dir, &[&create[..], &["--force"]].concat()).ok();
    qemu::img(dir, ["check", "-f", "qcow2", &device.0]).ok();
    preallocated_image_shows_nothing_of_the_device(dir, &device.0);
    drop(device);

    let small = dir.join("small");
    fs::write(&small, vec![9; 1 << 20]).expect("there is room");
    let Some(device) = Loop::attach(&small) else { return };
    let said = mica_in(dir, &["convert", "-O", "qcow2", "source.qcow2", &device.0]).refusal();
    assert!(said.contains("is too small: it holds 1048576 bytes"), "{said}");
    assert!(said.contains("the image needs"), "{said}");
    assert!(fs::read(&small).expect("there") == vec![9; 1 << 20], "it was written to");
}

/// The story: a device for the tables alone was refused, because the data did not fit.
#[test]
fn a_device_needs_no_room_for_what_is_in_a_data_file() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    source(dir);
    let file = dir.join("device");
    fs::write(&file, vec![9; 2 << 20]).expect("there is room");
    let Some(device) = Loop::attach(&file) else {
        return tools::skip("no loop device can be had here");
    };
    let data = format!("data_file={}", dir.join("d.raw").display());
    for more in ["", ",preallocation=falloc"] {
        let options = format!("{data}{more}");
        let words =
            ["convert", "--force", "-O", "qcow2", "-o", &options, "source.qcow2", &device.0];
        mica_in(dir, &words).ok();
        mica_in(dir, &["check", &device.0]).ok();
        let allowed = dir.display().to_string();
        let compare = ["compare", "--allow-path", &allowed, "source.qcow2", &device.0];
        mica_in(dir, &compare).ok();
    }
    let end = fs::read(&device.0).expect("readable");
    assert!(end[1 << 20..].iter().all(|byte| *byte == 9), "what it does not need was zeroed");
}

/// The story: the image was complete on its device when there was no room for the bitmaps: the verb
/// failed, and left it there without them.
#[test]
fn a_device_without_room_for_bitmaps_is_no_image() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "source.qcow2", &[], "8M");
    mica_in(dir, &["bitmap", "--add", "source.qcow2", "b"]).ok();
    qemu::io(dir, &[], "source.qcow2", &["write -P 1 0 64k"]);
    let measured = mica_in(dir, &["measure", "--output", "json", "source.qcow2"]).json();
    let required = measured["required"].as_u64().expect("a number");
    let convert = ["convert", "-O", "qcow2", "--bitmaps", "source.qcow2"];
    let file = dir.join("device");
    let len = usize::try_from(required).expect("small");
    for (more, is_written) in [(&[][..], false), (&["-c"], true)] {
        fs::write(&file, vec![9; len]).expect("there is room");
        let Some(device) = Loop::attach(&file) else {
            return tools::skip("no loop device can be had here");
        };
        mica_in(dir, &[&convert[..], more, &[&device.0]].concat()).refusal();
        let left = fs::read(&device.0).expect("readable");
        assert_eq!(left != vec![9; len], is_written, "{more:?}");
        mica_in(dir, &["info", &device.0]).refusal();
    }
    let bitmaps = measured["bitmaps"].as_u64().expect("a number");
    let len = len + usize::try_from(bitmaps).expect("small");
    fs::write(&file, vec![9; len]).expect("there is room");
    let Some(device) = Loop::attach(&file) else { return };
    mica_in(dir, &[&convert[..], &[&device.0]].concat()).ok();
    qemu::img(dir, ["check", "-f", "qcow2", &device.0]).ok();
}

/// The story: nobody had counted what counts the clusters of the bitmaps, nor the directory that is
/// there while the next one is written: the device was written until it was full.
#[test]
fn a_device_without_room_for_what_many_bitmaps_need_is_refused_before_it_is_touched() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let small = ["-o", "cluster_size=512"];
    qemu::create(dir, "source.qcow2", &small, "8M");
    qemu::io(dir, &[], "source.qcow2", &["write -P 1 0 8M"]);
    for number in 0..60 {
        let name = format!("bitmap{number}");
        mica_in(dir, &["bitmap", "--add", "-g", "512", "source.qcow2", &name]).ok();
    }
    let dirty: Vec<_> = (0..8).map(|at| format!("write -P 1 {at}M 512k")).collect();
    let dirty: Vec<_> = dirty.iter().map(String::as_str).collect();
    qemu::io(dir, &[], "source.qcow2", &dirty);
    let measure = ["measure", "--output", "json", "-O", "qcow2"];
    let measured = mica_in(dir, &[&measure[..], &small, &["source.qcow2"]].concat()).json();
    let number = |of: &str| usize::try_from(measured[of].as_u64().expect("a number"));
    let len = number("required").expect("small") + number("bitmaps").expect("small");
    let convert = |len| {
        fs::write(dir.join("device"), vec![9; len]).expect("there is room");
        let device = Loop::attach(&dir.join("device"))?;
        let convert = ["convert", "-O", "qcow2", "--bitmaps"];
        let words = [&convert[..], &small, &["source.qcow2", &device.0]].concat();
        Some((mica_in(dir, &words), device))
    };
    let Some((refused, device)) = convert(len) else {
        return tools::skip("no loop device can be had here");
    };
    let said = refused.refusal();
    assert!(said.contains("is too small") && said.contains("the image needs"), "{said}");
    assert!(fs::read(&device.0).expect("readable") == vec![9; len], "it was written to");
    let needed = said.split("the image needs ").nth(1).expect("a number");
    let needed = needed.split(' ').next().expect("a number").parse().expect("a number");
    drop(device);
    let (done, device) = convert(needed).expect("another one");
    done.ok();
    qemu::img(dir, ["check", "-f", "qcow2", &device.0]).ok();
}

/// The story: the base was being merged when its new overlay was complete. The verb was refused,
/// and left a device that anybody would take for the disk.
#[test]
fn a_device_whose_image_may_not_be_kept_is_no_image() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    mica_in(dir, &["create", "-q", "-f", "qcow2", "base.qcow2", "8M"]).ok();
    let found = fs::metadata(dir.join("base.qcow2")).expect("there");
    let made = found.created().expect("a time").duration_since(UNIX_EPOCH).expect("after that");
    let mark = format!("base\nfile: {} {}\n", found.ino(), made.as_nanos());
    fs::write(dir.join("base.qcow2.mica-merged"), mark).expect("written");
    fs::write(dir.join("device"), vec![9; 16 << 20]).expect("there is room");
    let Some(device) = Loop::attach(&dir.join("device")) else {
        return tools::skip("no loop device can be had here");
    };
    let base = dir.join("base.qcow2").display().to_string();
    let stands_on = |size: &'static str| {
        let words = ["create", "-q", "--force", "-f", "qcow2", "-b", &base, "-F", "qcow2"];
        mica_in(dir, &[&words[..], &[&device.0, size]].concat())
    };
    let copied = || {
        let words = ["convert", "--force", "-O", "qcow2", "-B", &base, "-F", "qcow2"];
        mica_in(dir, &[&words[..], &["base.qcow2", &device.0]].concat())
    };
    for refused in [stands_on("8M"), copied()] {
        let said = refused.refusal();
        assert!(said.contains("base.qcow2.mica-merged says so"), "{said}");
        mica_in(dir, &["info", "-f", "qcow2", &device.0]).refusal();
        let first = fs::read(&device.0).expect("readable");
        assert!(first[..512].iter().all(|byte| *byte == 0), "it has a header");
    }
    fs::remove_file(dir.join("base.qcow2.mica-merged")).expect("there");
    stands_on("8M").ok();
    mica_in(dir, &["check", &device.0]).ok();
}

/// The story: of a device that consists of the source all was zeroed before it was copied.
#[test]
fn a_device_that_consists_of_the_source_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let file = dir.join("source.raw");
    let mut bytes = vec![9; 1 << 20];
    fs::write(&file, &bytes).expect("there is room");
    // With a hole, so that there would be room for it as qcow2.
    bytes.resize(4 << 20, 0);
    let opened = fs::OpenOptions::new().write(true).open(&file).expect("there");
    opened.set_len(4 << 20).expect("a hole");
    let Some(whole) = Loop::attach(&file) else {
        return tools::skip("no loop device can be had here");
    };
    let attach = |more: &[&str]| Loop::attach_part(&file, more).expect("another one");
    let half = (2 << 20).to_string();
    let (other, first) = (attach(&[]), attach(&["--sizelimit", &half]));
    let second = attach(&["--offset", &half]);
    let refused = |words: &[&str]| {
        let said = mica_in(dir, &[&["convert", "-f", "raw"], words].concat()).refusal();
        assert!(said.contains("part of the source"), "{said}");
        assert!(fs::read(&file).expect("there") == bytes, "{words:?}: it was written to");
        assert!(fs::read(&whole.0).expect("readable") == bytes, "{words:?}: it was written to");
    };
    for target in [&whole, &first, &second] {
        refused(&["-O", "raw", "source.raw", &target.0]);
        refused(&["-O", "qcow2", "--force", "source.raw", &target.0]);
    }
    refused(&["-O", "raw", &whole.0, &other.0]);
    refused(&["-O", "raw", &first.0, &whole.0]);
    refused(&["-n", "-O", "raw", &whole.0, "source.raw"]);
    // Two parts of a file have nothing in common.
    mica_in(dir, &["convert", "-f", "raw", "-O", "raw", &first.0, &second.0]).ok();
}

/// The story: the device was written until it was full, as zeros were not counted.
#[test]
fn a_device_that_is_too_small_for_zeros_that_are_kept_is_refused_before_it_is_touched() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    fs::File::create(dir.join("zeros.raw")).and_then(|file| file.set_len(8 << 20)).expect("made");
    let small = dir.join("small");
    fs::write(&small, vec![9; 4 << 20]).expect("there is room");
    let Some(device) = Loop::attach(&small) else {
        return tools::skip("no loop device can be had here");
    };
    let onto = ["convert", "-f", "raw", "-O", "qcow2", "--force", "zeros.raw", &device.0];
    let said = mica_in(dir, &[&onto[..], &["-S", "0"]].concat()).refusal();
    assert!(said.contains("is too small"), "{said}");
    assert!(fs::read(&small).expect("there") == vec![9; 4 << 20], "it was written to");
    mica_in(dir, &onto).ok();
}

/// Its tables lead to space of the device that was never written.
fn preallocated_image_shows_nothing_of_the_device(dir: &Path, device: &str) {
    for how in ["metadata", "falloc", "full"] {
        fs::write(device, vec![9; 16 << 20]).expect("there is room");
        let preallocation = format!("preallocation={how}");
        let create = |size| {
            let options = ["-f", "qcow2", "--force", "-o", &preallocation, device, size];
            mica_in(dir, &[&["create"][..], &options].concat())
        };
        let said = create("16M").refusal();
        assert!(said.contains("is too small"), "{how}: {said}");
        assert!(fs::read(device).expect("readable").iter().all(|byte| *byte == 9), "{how}");
        create("8M").ok();
        qemu::img(dir, ["check", "-f", "qcow2", device]).ok();
        qemu::io(dir, &["-f", "qcow2"], device, &["read -P 0 0 8M"]);
    }
}

/// What a writer prepares in the background, here blocks of counts, is carried out by the thread of
/// the copy whose request began it. A thread that had nothing left to copy took that with it, and
/// the image accepted no more writes: with tables as tiny as these in seven of ten conversions.
#[test]
fn copy_into_an_image_does_not_end_before_what_it_began_in_the_background() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let wanted: Vec<u8> = (0_u32..3 << 20).flat_map(u32::to_le_bytes).collect();
    fs::write(dir.join("source.raw"), &wanted).expect("there is room");
    let len = wanted.len().to_string();
    for _ in 0..10 {
        qemu::create(dir, "image.qcow2", &["-o", "cluster_size=512"], &len);
        mica_in(dir, &["convert", "-n", "-f", "raw", "source.raw", "image.qcow2"]).ok();
        qemu::flatten(dir, "image.qcow2", "copy.raw");
        assert!(fs::read(dir.join("copy.raw")).expect("written") == wanted, "the disk differs");
    }
    let said = qemu::img(dir, ["check", "image.qcow2"]);
    assert_eq!(said.code(), Some(0), "{said}");
}
