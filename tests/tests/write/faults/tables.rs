//! Images with tables that nobody should follow when writing, and marks that forbid it.

use super::image::{self, CLUSTER, COPIED, CORRUPT, DIRTY, Image, make, serve, sound, stop_alive};
use mica_tests::guest::{EIO, Guest};
use mica_tests::server::Server;
use mica_tests::{command, mica, qemu};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// What mica says when it refuses to serve the image in `dir`, to be written.
#[track_caller]
fn refused(dir: &Path) -> String {
    let mut serve = Command::new(mica::binary());
    serve.arg("serve").arg("--nbd").arg(dir.join("socket")).arg(dir.join("disk.qcow2"));
    command::finish_within(&mut serve, Duration::from_secs(60)).refusal()
}

#[test]
fn an_image_that_is_marked_corrupt_is_not_written() {
    if !image::tools_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    make(dir, "cluster_size=64k");
    Image::open(dir).set_incompatible(CORRUPT);
    let said = refused(dir);
    assert!(said.contains("corrupt"), "{said}");
    // It can be read.
    let server = Server::mica(&dir.join("disk.qcow2"), "qcow2", &[]).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!(guest.read(0, 4096).expect("alive").errno(), 0);
    stop_alive(server);
}

#[test]
fn an_image_that_was_not_closed_is_repaired_first() {
    if !image::tools_present() {
        return;
    }
    for options in ["lazy_refcounts=on", "extended_l2=on,lazy_refcounts=on", "cluster_size=4k"] {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        make(dir, options);
        let image = Image::open(dir);
        image.set_incompatible(DIRTY);
        // Refcounts that are too low for what is in use: what an interrupted writer leaves.
        let block = image.word(image.refcount_table());
        for word in 1..4 {
            image.put(block + word * 8, 0);
        }
        let server = serve(dir, &[]);
        let mut guest = Guest::connect(&server).expect("served");
        assert_eq!(guest.write(9 << 20, &[4; 70_000]).expect("alive"), 0);
        let stopped = stop_alive(server);
        assert_eq!(stopped.status.code(), Some(0), "{options}: {stopped:?}");
        sound(dir);
        assert_eq!(image.incompatible() & (DIRTY | CORRUPT), 0, "{options}");
        qemu::io(dir, &["-r"], "disk.qcow2", &["read -P 17 0 2M", "read -P 4 9M 70000"]);
    }
}

/// A write to anything that the damaged entry covers gets EIO, other requests are not affected, and
/// the image is marked.
#[track_caller]
fn fenced(dir: &Path, what: &str, at: u64) {
    let server = serve(dir, &[]);
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!(guest.write(at, &[8; 4096]).expect("alive"), EIO, "{what}");
    // Another connection is served; it may read, and gets answers to writes.
    let mut other = Guest::connect(&server).expect("served");
    let read = other.read(1 << 20, 4096).expect("alive").errno();
    assert!([0, EIO].contains(&read), "{what}: {read}");
    let wrote = other.write(1 << 20, &[8; 4096]).expect("alive");
    assert!([0, EIO].contains(&wrote), "{what}: {wrote}");
    stop_alive(server);
    assert_ne!(Image::open(dir).incompatible() & CORRUPT, 0, "{what}: the corrupt bit is not set");
}

#[test]
fn l1_entries_that_name_no_table_fail_only_the_write() {
    if !image::tools_present() {
        return;
    }
    for entry in [COPIED, COPIED | 0x200, COPIED | 0x7fff_fe00, COPIED | 1 << 50] {
        let dir = tempfile::tempdir().expect("a folder");
        make(dir.path(), "cluster_size=64k");
        let image = Image::open(dir.path());
        image.put(image.l1(), entry);
        fenced(dir.path(), &format!("L1 entry {entry:#x}"), 8 << 20);
    }
}

/// A table, and where it is.
type Place = (&'static str, fn(&Image) -> u64);

#[test]
fn an_entry_that_names_metadata_is_not_written_through() {
    if !image::tools_present() {
        return;
    }
    let places: &[Place] = &[
        ("the L1 table", Image::l1),
        ("the L2 table", Image::l2),
        ("the refcount table", Image::refcount_table),
        ("a refcount block", |image| image.word(image.refcount_table())),
    ];
    for options in ["cluster_size=64k", "extended_l2=on"] {
        for (name, place) in places {
            let dir = tempfile::tempdir().expect("a folder");
            make(dir.path(), options);
            let image = Image::open(dir.path());
            let target = place(&image);
            // The entry that is read by both kinds of tables: the first.
            image.put(image.l2(), COPIED | target);
            let before = image.cluster(target);
            let what = format!("{name}, {options}");
            fenced(dir.path(), &what, 0);
            assert!(image.cluster(target) == before, "{what}: it is written over");
        }
    }
}

#[test]
fn an_entry_that_names_the_header_does_not_harm_it() {
    if !image::tools_present() {
        return;
    }
    for (options, entry) in
        [("cluster_size=64k", COPIED), ("extended_l2=on", COPIED), ("cluster_size=64k", 1)]
    {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        make(dir, options);
        let image = Image::open(dir);
        image.put(image.l2(), entry);
        let header = |image: &Image| {
            let mut bytes = image.cluster(0);
            // Feature bits may change.
            bytes[72..96].fill(0);
            bytes
        };
        let before = header(&image);
        let server = serve(dir, &[]);
        let mut guest = Guest::connect(&server).expect("served");
        let wrote = guest.write(0, &[8; 4096]).expect("alive");
        assert!([0, EIO].contains(&wrote), "{options}, {entry:#x}: {wrote}");
        guest.flush().expect("alive");
        stop_alive(server);
        assert!(header(&image) == before, "{options}, {entry:#x}: the header is written over");
    }
}

#[test]
fn an_unaligned_refcount_table_entry_does_not_end_the_server() {
    if !image::tools_present() {
        return;
    }
    for entry in [0x7fff_fe00, 0x200, 1 << 60, CLUSTER * 1000, 7] {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        make(dir, "cluster_size=64k");
        let image = Image::open(dir);
        image.put(image.refcount_table(), entry);
        let what = format!("refcount table entry {entry:#x}");
        let Ok(server) = Server::mica_writable(&dir.join("disk.qcow2"), "qcow2", &[]) else {
            // It may be refused: in one line, without a signal.
            refused(dir);
            continue;
        };
        let mut guest = Guest::connect(&server).expect("served");
        assert_eq!(guest.read(0, 4096).expect("alive").errno(), 0, "{what}");
        assert_eq!(guest.write(8 << 20, &[8; 4096]).expect("alive"), EIO, "{what}");
        stop_alive(server);
        assert_ne!(image.incompatible() & CORRUPT, 0, "{what}: the corrupt bit is not set");
        qemu::io(dir, &["-r"], "disk.qcow2", &["read -P 17 0 2M"]);
    }
}

#[test]
fn a_cluster_in_use_that_counts_as_free_is_not_allocated() {
    if !image::tools_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    make(dir, "cluster_size=64k");
    let image = Image::open(dir);
    // The image says clean, yet the header and all tables count as free.
    let block = image.word(image.refcount_table());
    for word in 0..2 {
        image.put(block + word * 8, 0);
    }
    let kept: Vec<_> = [image.l1(), image.l2(), image.refcount_table()]
        .map(|place| (place, image.cluster(place)))
        .into();
    let server = serve(dir, &[]);
    let mut guest = Guest::connect(&server).expect("served");
    for number in 0..16 {
        let wrote = guest.write((8 << 20) + number * CLUSTER, &[0xee; 65_536]).expect("alive");
        assert!([0, EIO].contains(&wrote), "{wrote}");
    }
    stop_alive(server);
    for (place, before) in kept {
        let now = image.cluster(place);
        let strange =
            now.iter().zip(&before).filter(|(now, before)| now != before && **now == 0xee);
        assert_eq!(strange.count(), 0, "a guest's bytes are in the table at {place:#x}");
    }
    assert_eq!(image.word(0) >> 32, u64::from(u32::from_be_bytes(*b"QFI\xfb")));
}
