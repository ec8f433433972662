//! The verdict that most tests end with: mica serves what QEMU reads.

use crate::server::Server;
use crate::{nbd, qemu};
use std::fs;
use std::path::Path;

/// Compares what mica serves of `image` in `dir` with what QEMU reads of it: byte for byte with our
/// own client, and again with `qemu-img compare` as the client.
///
/// # Panics
/// If they differ, or either cannot read it.
#[track_caller]
pub fn same_as_qemu(dir: &Path, image: &str) {
    let flat = format!("{image}.flat");
    qemu::flatten(dir, image, &flat);
    same_as_raw(dir, image, &flat, &[]);
    // Tests read many images; the flat ones would fill the disk.
    fs::remove_file(dir.join(flat)).expect("it was just written");
}

/// Compares what mica, with `more` options, serves of `image` in `dir` with raw file `raw` there.
///
/// # Panics
/// If they differ, or mica does not serve it.
#[track_caller]
pub fn same_as_raw(dir: &Path, image: &str, raw: &str, more: &[&str]) {
    let server = Server::mica(&dir.join(image), "qcow2", more)
        .unwrap_or_else(|error| panic!("{image} is not served: {error:#}"));
    let wanted = fs::read(dir.join(raw)).expect("the raw file is there");
    let mut client = server.connect(&nbd::Wish::default()).expect("mica serves it");
    let served = client.read_all().unwrap_or_else(|error| panic!("{image}: {error:#}"));
    same_bytes(image, &served, &wanted);
    client.disconnect().expect("mica is alive");
    let said = qemu::img(dir, ["compare", "-f", "raw", "-F", "raw", &server.uri(), raw]);
    assert_eq!(said.code(), Some(0), "{image}: {said}");
    let stopped = server.stop().expect("it stops");
    assert!(stopped.status.success() && !stopped.socket_left, "{stopped:?}");
}

/// # Panics
/// With the first byte that differs.
#[track_caller]
pub fn same_bytes(what: &str, served: &[u8], wanted: &[u8]) {
    // All at once: in this kind of build, byte by byte takes as long as the rest of a test.
    if served == wanted {
        return;
    }
    assert_eq!(served.len(), wanted.len(), "{what}: length of the disk");
    if let Some(at) = served.iter().zip(wanted).position(|(served, wanted)| served != wanted) {
        let (served, wanted) = (served[at], wanted[at]);
        panic!("{what}: byte {at:#x} is {served:#04x}, and QEMU reads {wanted:#04x}");
    }
}
