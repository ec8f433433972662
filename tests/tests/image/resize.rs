//! `mica resize` of qcow2 images: old content stays, the new part reads as zeros, nothing leaks.

use crate::bitmap;
use crate::existing::Loop;
use mica_tests::{command, mica, qemu, tools};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

#[track_caller]
fn mica_in(dir: &Path, args: &[&str]) -> command::Finished {
    command::finish(Command::new(mica::binary()).current_dir(dir).args(args))
}

/// Resizes `image`, and compares it with a copy resized by QEMU.
#[track_caller]
fn resized(dir: &Path, image: &str, size: &str) {
    fs::copy(dir.join(image), dir.join("theirs.qcow2")).expect("it is there");
    mica_in(dir, &["resize", "-q", "--shrink", image, size]).ok();
    qemu::img(dir, ["resize", "-q", "--shrink", "-f", "qcow2", "theirs.qcow2", size]).ok();
    let said = qemu::img(dir, ["check", image]);
    assert_eq!(said.code(), Some(0), "{image} {size}: {said}");
    let said = qemu::img(dir, ["compare", "-f", "qcow2", "-F", "qcow2", image, "theirs.qcow2"]);
    assert_eq!(said.code(), Some(0), "{image} {size}: {said}");
    assert!(!said.stdout.contains("mismatch"), "{image} {size}: {said}");
}

#[test]
fn what_was_done_is_told_as_json() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    mica_in(dir, &["create", "-q", "image.qcow2", "1M"]).ok();
    fs::write(dir.join("image.raw"), vec![1; 1 << 20]).expect("there is room");
    for (format, image) in [("qcow2", "image.qcow2"), ("raw", "image.raw")] {
        let arguments = ["resize", "-q", "--output", "json", "-f", format, image, "+512k"];
        let done = mica_in(dir, &arguments).json();
        assert_eq!(done["filename"], image);
        assert_eq!(done["virtual-size-before"], 1 << 20, "{image}");
        assert_eq!(done["virtual-size"], 3 << 19, "{image}");
    }
    fs::write(dir.join("bytes"), [7; 1000]).expect("there is room");
    let mut write = Command::new(mica::binary());
    write.current_dir(dir).args(["write", "--output", "json", "image.qcow2", "4k"]);
    let input = File::open(dir.join("bytes")).expect("it is there");
    let done = command::finish_with(&mut write, input).json();
    assert_eq!(done["offset"], 4096);
    assert_eq!(done["written-bytes"], 1000);
}

#[test]
fn images_of_every_shape_get_longer_and_shorter() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for options in [
        "compat=1.1",
        "compat=0.10",
        "extended_l2=on",
        "cluster_size=512",
        "cluster_size=2M",
        "refcount_bits=1",
        "refcount_bits=64,cluster_size=4k",
        "lazy_refcounts=on",
        "preallocation=metadata",
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        qemu::create(dir, "image.qcow2", &["-o", options], "20M");
        qemu::io(dir, &[], "image.qcow2", &["write -P 1 0 3M", "write -P 2 19M 1M"]);
        qemu::img(dir, ["convert", "-c", "-O", "qcow2", "-o", options, "image.qcow2", "c.qcow2"]);
        for image in ["image.qcow2", "c.qcow2"] {
            if !dir.join(image).exists() {
                continue;
            }
            // QEMU takes minutes to shorten large disks of tiny clusters.
            let is_tiny =
                options.contains("cluster_size=512") || options.contains("cluster_size=4k");
            let large = if is_tiny { "60M" } else { "2G" };
            for size in ["+1M", "40M", large, "19500k", "10M", "30M", "2M", "512"] {
                resized(dir, image, size);
            }
            // QEMU shows here what the cluster held before the disk ended in it.
            mica_in(dir, &["resize", "-q", image, "5M"]).ok();
            qemu::io(dir, &[], image, &["read -P 1 0 512", "read -P 0 512 5242368"]);
            qemu::io(dir, &[], image, &["write -P 3 1M 4M", "read -P 3 1M 4M"]);
            let said = qemu::img(dir, ["check", image]);
            assert_eq!(said.code(), Some(0), "{options}: {said}");
        }
    }
}

#[test]
fn over_a_longer_backing_file_the_new_part_reads_as_zeros() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for options in ["extended_l2=on", "extended_l2=off", "cluster_size=4k"] {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        qemu::create(dir, "base.qcow2", &[], "30M");
        qemu::io(dir, &[], "base.qcow2", &["write -P 9 0 30M"]);
        let over = ["-o", options, "-b", "base.qcow2", "-F", "qcow2"];
        qemu::create(dir, "top.qcow2", &over, "10000384");
        qemu::io(dir, &[], "top.qcow2", &["write -P 1 9M 64k"]);
        for size in ["10001408", "12M", "60M", "8M", "20M"] {
            resized(dir, "top.qcow2", size);
        }
        qemu::io(dir, &[], "top.qcow2", &["read -P 9 0 8M", "read -P 0 8M 12M"]);
    }
    // Version 2 has no zero flag, so that QEMU refuses; here zeros are written.
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "base.qcow2", &[], "30M");
    qemu::io(dir, &[], "base.qcow2", &["write -P 9 0 30M"]);
    let over = ["-o", "compat=0.10", "-b", "base.qcow2", "-F", "qcow2"];
    qemu::create(dir, "top.qcow2", &over, "10000384");
    mica_in(dir, &["resize", "-q", "top.qcow2", "40M"]).ok();
    let read = ["read -P 9 0 10000384", "read -P 0 10000384 30M"];
    qemu::io(dir, &[], "top.qcow2", &read);
    let said = qemu::img(dir, ["check", "top.qcow2"]);
    assert_eq!(said.code(), Some(0), "{said}");
}

#[test]
fn an_l1_table_longer_than_a_refcount_block_counts_finds_its_place() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "image.qcow2", &["-o", "cluster_size=512"], "1M");
    qemu::io(dir, &[], "image.qcow2", &["write -P 1 0 1M"]);
    mica_in(dir, &["resize", "-q", "image.qcow2", "1G"]).ok();
    let said = qemu::img(dir, ["check", "image.qcow2"]);
    assert_eq!(said.code(), Some(0), "{said}");
    qemu::io(dir, &[], "image.qcow2", &["read -P 1 0 1M", "read -P 0 1M 4M"]);
}

/// A repair can still save those that are not overwritten.
#[test]
fn clusters_that_no_refcount_counts_stay_when_an_image_gets_longer() {
    const TABLE_AT: u64 = 48;
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "image.qcow2", &["-o", "cluster_size=4k"], "900M");
    qemu::io(dir, &[], "image.qcow2", &["write -P 1 0 64M"]);
    let file = File::options().read(true).write(true).open(dir.join("image.qcow2"));
    let file = file.expect("it is there");
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, TABLE_AT).expect("read");
    let table = u64::from_be_bytes(bytes);
    let mut blocks = [0; 4096];
    file.read_exact_at(&mut blocks, table).expect("read");
    let used = |block: &[u8]| block != [0; 8];
    let last = blocks.chunks(8).rposition(used).expect("a block") as u64;
    file.write_all_at(&[0; 8], table + last * 8).expect("written");

    let before = len(dir, "image.qcow2");
    mica_in(dir, &["resize", "-q", "image.qcow2", "2G"]).ok();
    assert!(len(dir, "image.qcow2") >= before);
}

#[test]
fn snapshots_keep_what_they_have() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "image.qcow2", &["-o", "cluster_size=4k"], "20M");
    qemu::io(dir, &[], "image.qcow2", &["write -P 1 0 20M"]);
    qemu::img(dir, ["snapshot", "-c", "before", "image.qcow2"]).ok();
    qemu::io(dir, &[], "image.qcow2", &["write -P 2 3M 10M"]);
    for size in ["30M", "5000k", "20M", "11M"] {
        resized(dir, "image.qcow2", size);
    }
    qemu::img(dir, ["snapshot", "-a", "before", "image.qcow2"]).ok();
    qemu::io(dir, &[], "image.qcow2", &["read -P 1 0 20M"]);

    qemu::create(dir, "old.qcow2", &["-o", "compat=0.10"], "20M");
    qemu::img(dir, ["snapshot", "-c", "before", "old.qcow2"]).ok();
    let said = mica_in(dir, &["resize", "old.qcow2", "30M"]).refusal();
    assert!(said.contains("v2 image which has snapshots"), "{said}");
    mica_in(dir, &["resize", "image.qcow2", "1M"]).refusal();
}

fn len(dir: &Path, file: &str) -> u64 {
    fs::metadata(dir.join(file)).expect("it is there").len()
}

#[test]
fn an_image_that_gets_shorter_ends_where_its_last_cluster_does() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for options in [
        "cluster_size=64k",
        "cluster_size=2M",
        "cluster_size=4k,refcount_bits=64",
        "cluster_size=512",
        "extended_l2=on",
        "compat=0.10",
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        qemu::create(dir, "image.qcow2", &["-o", options], "64M");
        qemu::io(dir, &[], "image.qcow2", &["write -P 1 0 32M", "write -P 2 60M 1M"]);
        for size in ["40M", "8M", "1M", "512"] {
            resized(dir, "image.qcow2", size);
            let (ours, theirs) = (len(dir, "image.qcow2"), len(dir, "theirs.qcow2"));
            assert!(ours <= theirs, "{options}: shortened to {size}: {ours}, not {theirs}");
        }
        // What was cut off is free, and is reused.
        mica_in(dir, &["resize", "-q", "image.qcow2", "64M"]).ok();
        qemu::io(dir, &[], "image.qcow2", &["read -P 0 512 63M", "write -P 3 1M 40M"]);
        let said = qemu::img(dir, ["check", "image.qcow2"]);
        assert_eq!(said.code(), Some(0), "{options}: {said}");
    }
}

#[test]
fn a_corrupt_table_cannot_free_metadata() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "image.qcow2", &[], "16M");
    qemu::io(dir, &[], "image.qcow2", &["write -P 1 0 1M"]);
    let path = dir.join("image.qcow2");
    let sound = fs::read(&path).expect("it is there");
    let word = |at: usize| {
        let word = u64::from_be_bytes(*sound[at..].first_chunk().expect("8 bytes"));
        usize::try_from(word & 0x00ff_ffff_ffff_fe00).expect("a small image")
    };
    let l2 = word(word(40));
    // Beyond the new end: the header, the L1 table, the refcount table, as data and compressed.
    for place in [0, word(40), word(48)] {
        for flag in [1 << 63, 1_u64 << 62] {
            let mut bytes = sound.clone();
            bytes[l2 + 100 * 8..][..8].copy_from_slice(&(place as u64 | flag).to_be_bytes());
            fs::write(&path, &bytes).expect("a file");
            let _ = mica_in(dir, &["resize", "-q", "--shrink", "image.qcow2", "2M"]);
            let now = fs::read(&path).expect("it is there");
            assert_eq!(now[..8], bytes[..8], "the header is there");
            let refcounts = word(48);
            let kept = now[refcounts..refcounts + 64] == bytes[refcounts..refcounts + 64];
            assert!(kept, "the refcount table is there");
            // Through the L1 table, which may be in another place.
            qemu::io(dir, &["-r"], "image.qcow2", &["read -P 1 0 1M"]);
        }
    }
}

/// The story: the new part of an image that no repair mends was zeroed by a writer that was not
/// shown the bitmaps, repaired once more, and thereby freed them.
#[test]
fn an_image_that_stays_dirty_keeps_its_bitmaps_and_its_length() {
    const DIRTY_AT: u64 = 79;
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::QEMU_NBD, tools::NBDINFO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    fs::write(dir.join("base"), vec![7; 2 << 20]).expect("written");
    qemu::img(dir, ["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "image.qcow2", "1M"])
        .ok();
    mica_in(dir, &["bitmap", "--add", "image.qcow2", "b"]).ok();
    qemu::io(dir, &[], "image.qcow2", &["write 64k 64k"]);
    let dirty = bitmap::dirty(dir, "image.qcow2", "b");

    let file = File::options().read(true).write(true).open(dir.join("image.qcow2")).expect("there");
    let number = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).expect("read");
        u64::from_be_bytes(bytes)
    };
    let l2 = number(number(40)) & !(1 << 63);
    let entry = number(l2 + 8);
    // A reserved bit, which `check -r` does not judge.
    file.write_all_at(&(entry | 2).to_be_bytes(), l2 + 8).expect("written");
    file.write_all_at(&[1], DIRTY_AT).expect("written");
    let refused = mica_in(dir, &["resize", "image.qcow2", "2M"]).refusal();
    assert!(refused.contains("mica check -r all"), "{refused}");

    file.write_all_at(&entry.to_be_bytes(), l2 + 8).expect("written");
    mica_in(dir, &["check", "-q", "-r", "all", "image.qcow2"]).ok();
    assert_eq!(bitmap::dirty(dir, "image.qcow2", "b"), dirty);
    assert_eq!(
        mica_in(dir, &["info", "--output", "json", "image.qcow2"]).json()["virtual-size"],
        1 << 20
    );
}

#[test]
fn an_image_with_a_data_file_changes_both() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for options in ["cluster_size=64k", "extended_l2=on", "cluster_size=4k"] {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        let with_file = format!("data_file=data.raw,{options}");
        qemu::create(dir, "image.qcow2", &["-o", &with_file], "20M");
        qemu::io(dir, &[], "image.qcow2", &["write -P 1 0 3M", "write -P 2 19M 1M"]);
        for (size, bytes) in [
            ("30M", 30 << 20),
            ("19500k", 19500 << 10),
            ("1G", 1 << 30),
            ("2050k", 2050 << 10),
            ("6M", 6 << 20),
        ] {
            mica_in(dir, &["resize", "-q", "--shrink", "image.qcow2", size]).ok();
            assert_eq!(len(dir, "data.raw"), bytes, "{options} {size}");
            let said = qemu::img(dir, ["check", "image.qcow2"]);
            assert_eq!(said.code(), Some(0), "{options} {size}: {said}");
        }
        let read = ["read -P 1 0 2050k", "read -P 0 2050k 4094k"];
        qemu::io(dir, &[], "image.qcow2", &read);
        qemu::io(dir, &[], "image.qcow2", &["write -P 3 5M 1M", "read -P 3 5M 1M"]);
        let said = qemu::img(dir, ["check", "image.qcow2"]);
        assert_eq!(said.code(), Some(0), "{options}: {said}");
    }
}

#[test]
fn over_a_longer_backing_file_a_data_file_shows_zeros() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "base.qcow2", &[], "30M");
    qemu::io(dir, &[], "base.qcow2", &["write -P 9 0 30M"]);
    let over = ["-o", "data_file=data.raw", "-b", "base.qcow2", "-F", "qcow2"];
    qemu::create(dir, "top.qcow2", &over, "10000384");
    qemu::io(dir, &[], "top.qcow2", &["write -P 1 9M 64k"]);
    mica_in(dir, &["resize", "-q", "top.qcow2", "40M"]).ok();
    let read = ["read -P 9 0 9M", "read -P 1 9M 64k", "read -P 0 10000384 30M"];
    qemu::io(dir, &[], "top.qcow2", &read);
    let said = qemu::img(dir, ["check", "top.qcow2"]);
    assert_eq!(said.code(), Some(0), "{said}");
}

/// The story: a disk whose data is on a device could not grow, as the device cannot.
#[test]
fn a_disk_grows_on_the_device_that_has_its_data() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let put = |byte: u8, len: usize| fs::write(dir.join("device"), vec![byte; len]).expect("room");
    put(7, 8 << 20);
    let Some(device) = Loop::attach(&dir.join("device")) else {
        return tools::skip("no loop device can be had here");
    };
    let resize =
        |size| mica_in(dir, &["resize", "-q", "--allow-path", "/dev", "image.qcow2", size]);
    let data_file = format!("data_file={}", device.0);
    // The disk ends within a cluster, the rest of which is of the device.
    qemu::create(dir, "image.qcow2", &["-o", &data_file], "2098176");
    qemu::io(dir, &[], "image.qcow2", &["write -P 1 2M 1k"]);
    for size in ["6M", "8M"] {
        resize(size).ok();
        qemu::io(dir, &[], "image.qcow2", &["read -P 1 2M 1k", "read -P 0 2098176 3999k"]);
        let said = qemu::img(dir, ["check", "image.qcow2"]);
        assert_eq!(said.code(), Some(0), "{said}");
    }
    let said = resize("9M").refusal();
    assert!(said.contains("8388608 bytes") && said.contains(&device.0), "{said}");
    // A raw disk shows all of it.
    let raw = format!("{data_file},data_file_raw=on,preallocation=metadata");
    qemu::create(dir, "image.qcow2", &["-o", &raw], "2098176");
    let said = resize("6M").refusal();
    let cure = format!("`blkdiscard -z -o 2162688 -l 4128768 {}`", device.0);
    assert!(said.contains("behind the end") && said.contains(&cure), "{said}");
    qemu::io(dir, &["-f", "raw"], &device.0, &["write -P 0 2M 6M", "write -P 5 2098176 1k"]);
    resize("6M").ok();
    qemu::io(dir, &[], "image.qcow2", &["read -P 0 2M 4M", "write -P 3 5M 64k"]);
    qemu::io(dir, &["-f", "raw"], &device.0, &["read -P 3 5M 64k", "read -P 0 2M 3M"]);
}

/// The story: the device ended within the last cluster, as the disk did. The first write there was
/// filled with zeros to the end of the cluster, for which there was no room.
#[test]
fn a_disk_is_written_to_its_end_on_a_device_that_ends_there() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    const DEVICE: u64 = (8 << 20) + 1024;
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    fs::write(dir.join("device"), vec![7; usize::try_from(DEVICE).expect("8 MiB")]).expect("room");
    let Some(device) = Loop::attach(&dir.join("device")) else {
        return tools::skip("no loop device can be had here");
    };
    fs::write(dir.join("sector"), [5; 512]).expect("room");
    let write = |image: &str, at: u64| {
        let mut write = Command::new(mica::binary());
        write.current_dir(dir).args(["write", "--allow-path", "/dev", image]);
        let input = File::open(dir.join("sector")).expect("it is there");
        command::finish_with(write.arg(at.to_string()), input).ok();
    };
    for options in ["cluster_size=64k", "cluster_size=2M,extended_l2=on"] {
        let options = format!("data_file={},{options}", device.0);
        // One that is as long from the beginning, and one that grows.
        for (image, len) in [("whole.qcow2", DEVICE), ("grown.qcow2", 2 << 20)] {
            qemu::create(dir, image, &["-o", &options], &len.to_string());
            mica_in(dir, &["resize", "-q", "--allow-path", "/dev", image, &DEVICE.to_string()])
                .ok();
            // The first of its cluster, and then the last of the device.
            write(image, DEVICE - 1024);
            write(image, DEVICE - 512);
            qemu::io(dir, &[], image, &["read -P 0 0 8M", "read -P 5 8M 1k"]);
            let said = qemu::img(dir, ["check", image]);
            assert_eq!(said.code(), Some(0), "{image}: {said}");
        }
        // The last sector alone, with a layer beneath that shows around it.
        qemu::create(dir, "base.qcow2", &[], &DEVICE.to_string());
        qemu::io(dir, &[], "base.qcow2", &["write -P 9 7M 1049600"]);
        let over = ["-o", &options, "-b", "base.qcow2", "-F", "qcow2"];
        qemu::create(dir, "top.qcow2", &over, &DEVICE.to_string());
        write("top.qcow2", DEVICE - 512);
        qemu::io(dir, &[], "top.qcow2", &["read -P 9 7M 1049088", "read -P 5 8389120 512"]);
    }
}

/// Readers of the raw file and of the image see the same.
#[test]
fn a_raw_data_file_stays_the_whole_disk() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for options in ["cluster_size=64k", "extended_l2=on", "cluster_size=4k"] {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        let with_file = format!("data_file=data.raw,data_file_raw=on,{options}");
        // QEMU allocates no place for the clusters of an image with subclusters.
        mica_in(dir, &["create", "-q", "-f", "qcow2", "-o", &with_file, "image.qcow2", "20000k"])
            .ok();
        qemu::io(dir, &[], "image.qcow2", &["write -P 1 0 3M", "write -P 2 19M 256k"]);
        let mut byte = 10;
        for (size, bytes) in [
            ("20001k", 20001_u64 << 10),
            ("30M", 30 << 20),
            ("19500k", 19500 << 10),
            ("600M", 600 << 20),
            ("2050k", 2050 << 10),
            ("16M", 16 << 20),
        ] {
            mica_in(dir, &["resize", "-q", "--shrink", "image.qcow2", size]).ok();
            assert_eq!(len(dir, "data.raw"), bytes, "{options} {size}");
            // Writes to the raw file alone show through the image.
            byte += 1;
            let write = format!("write -P {byte} {} 64k", bytes - (64 << 10));
            qemu::io(dir, &["-f", "raw"], "data.raw", &[&write]);
            let read = format!("read -P {byte} {} 64k", bytes - (64 << 10));
            qemu::io(dir, &[], "image.qcow2", &[&read]);
            let compare = ["compare", "-f", "raw", "-F", "qcow2", "data.raw", "image.qcow2"];
            let said = qemu::img(dir, compare);
            assert_eq!(said.code(), Some(0), "{options} {size}: {said}");
            let said = qemu::img(dir, ["check", "image.qcow2"]);
            assert_eq!(said.code(), Some(0), "{options} {size}: {said}");
            let map = qemu::img(dir, ["map", "--output=json", "image.qcow2"]);
            assert!(!map.stdout.contains("\"data\": false"), "{options} {size}: {map}");
        }
    }
    // Data beyond the end of the disk may be in use: it is neither shown nor cut off.
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let with_file = "data_file=data.raw,data_file_raw=on";
    qemu::create(dir, "image.qcow2", &["-o", with_file], "1M");
    fs::write(dir.join("data.raw"), vec![7; 3 << 20]).expect("a file");
    let said = mica_in(dir, &["resize", "image.qcow2", "4M"]).refusal();
    assert!(said.contains("data.raw"), "{said}");
    assert_eq!(len(dir, "data.raw"), 3 << 20);
}
