//! Images that name files to which the author of the image has no right.

use super::harm::Victim;
use mica_tests::{mica, qemu};
use std::fs;
use std::os::unix::fs::symlink;

/// Names that lead out of the directory, or to a protocol.
const NAMES: &[&str] = &[
    "/etc/shadow",
    "/etc/passwd",
    "../../../../../../etc/passwd",
    "file:/etc/passwd",
    "nbd://127.0.0.1:10809/x",
    "nbd+unix:///?socket=/tmp/x",
    "http://127.0.0.1/x",
    "fat:/etc",
    "/dev/zero",
    "/proc/self/mem",
    "json:{\"driver\":\"nbd\",\"host\":\"127.0.0.1\"}",
    "json:{\"driver\":\"file\",\"filename\":\"/etc/passwd\"}",
    "json:{\"driver\":\"raw\",\"file\":{\"driver\":\"file\",\"filename\":\"/etc/passwd\"}}",
    "json:{",
    "json:",
];

/// Longer than all of them.
fn long_name() -> String {
    format!("{}.data", "n".repeat(150))
}

#[test]
fn a_data_file_is_only_opened_where_it_may_be() {
    // CVE-2024-32498, CVE-2024-4467.
    for name in NAMES {
        let Some(victim) = Victim::new(&format!("data_file={}", long_name())) else { return };
        victim.rename(&long_name(), name);
        println!("{name}");
        victim.refused();
    }
}

#[test]
fn a_data_file_that_is_a_link_out_is_not_followed() {
    let Some(victim) = Victim::new("data_file=disk.data") else { return };
    fs::remove_file(victim.dir().join("disk.data")).expect("removed");
    symlink("/etc/passwd", victim.dir().join("disk.data")).expect("linked");
    victim.refused();
}

#[test]
fn a_backing_file_is_only_opened_where_it_may_be() {
    // CVE-2015-5163, CVE-2015-1851, CVE-2011-3147, CVE-2026-27211.
    for name in NAMES {
        let Some(victim) = Victim::new("cluster_size=64k") else { return };
        for format in ["raw", "qcow2"] {
            let backing = ["-u", "-b", name, "-F", format];
            // What QEMU itself will not write into an image cannot be tested this way.
            let create = ["create", "-q", "-f", "qcow2"];
            let words = create.iter().chain(&backing).chain(&["disk.qcow2", "1M"]);
            if qemu::img(victim.dir(), words).code() == Some(0) {
                println!("{name} as {format}");
                victim.refused();
            }
        }
    }
}

#[test]
fn a_backing_name_with_odd_bytes_stays_one_line() {
    let Some(victim) = Victim::new("cluster_size=64k") else { return };
    let long = "x".repeat(40);
    qemu::create(victim.dir(), "disk.qcow2", &["-u", "-b", &long, "-F", "raw"], "1M");
    victim.rename(&long, "a\nb\x1b[2J\rc");
    let said = victim.refused();
    assert!(!said.contains('\x1b'), "{said:?}");
    // Nor does it look like a line of its own.
    let disk = victim.dir().join("disk.qcow2");
    let shown = mica::run(["info".as_ref(), disk.as_os_str()]).ok();
    let lines = shown.lines().filter(|line| line.starts_with("backing file: a"));
    assert_eq!(lines.count(), 1, "{shown:?}");
    assert!(!shown.contains('\x1b') && !shown.contains("\nb\u{fffd}"), "{shown:?}");
}

#[test]
fn a_backing_name_outside_the_first_cluster_is_refused() {
    for (offset, len) in
        [(65_530_u64, 20_u32), (1 << 40, 8), (u64::MAX - 4, 8), (65_536, 1), (200, 4000)]
    {
        let Some(victim) = Victim::new("cluster_size=64k") else { return };
        victim.patch(8, offset.to_be_bytes()).patch(16, len.to_be_bytes());
        println!("{len} bytes at {offset}");
        victim.refused();
    }
}

/// The story: in a folder with images of two owners the image of one named that of the other, and
/// its server read that.
#[test]
fn an_image_that_may_name_no_files_is_served_alone_or_not_at_all() {
    let Some(victim) = Victim::new("cluster_size=64k") else { return };
    let dir = victim.dir();
    fs::write(dir.join("theirs.raw"), vec![7; 1 << 20]).expect("written");
    qemu::create(dir, "ours.qcow2", &["-u", "-b", "theirs.raw", "-F", "raw"], "1M");
    qemu::create(dir, "data.qcow2", &["-o", "data_file=ours.data"], "1M");
    let path = |name: &str| dir.join(name).display().to_string();
    for image in ["ours.qcow2", "data.qcow2"] {
        for verb in [&["serve", "--nbd", &path("socket")][..], &["map"], &["read"]] {
            let names = ["--names".to_owned(), "none".to_owned(), path(image)];
            let verb = verb.iter().map(|word| (*word).to_owned());
            let mut words: Vec<_> = verb.chain(names).collect();
            if words[0] == "read" {
                words.extend(["0".to_owned(), "512".to_owned()]);
            }
            let line = mica::run(&words).refusal();
            assert!(line.contains("--names none"), "{words:?}: {line}");
        }
        assert!(!dir.join("socket").exists());
    }
    let elsewhere = tempfile::tempdir().expect("a folder");
    let elsewhere = elsewhere.path().display().to_string();
    let said = mica::run(["map", "--names", &elsewhere, &path("ours.qcow2")]).refusal();
    assert!(said.contains("--allow-path"), "{said}");
    mica::run(["map", "--names", &elsewhere, "--names", "beside", &path("ours.qcow2")]).ok();
    mica::run(["map", "--names", "none", &path("disk.qcow2")]).ok();
    let none = ["map", "--names", "none", "--allow-path", &elsewhere, &path("disk.qcow2")];
    assert!(mica::run(none).refusal().contains("--names none"));
}
