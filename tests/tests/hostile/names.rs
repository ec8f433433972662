//! Images that name files which nobody gave to whoever wrote the image.

use super::harm::Victim;
use mica_tests::qemu;
use std::fs;
use std::os::unix::fs::symlink;

/// Names that lead out, or into a protocol.
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
            // What QEMU itself will not write into an image is no attack by one.
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
