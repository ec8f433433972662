//! A guest finds its disk as it is, and writes patterns to it in all the ways of a block device.

use super::host::{self, MIB, Verdict, random};
use mica_tests::machine::{self, Disk, Machine, Work};
use mica_tests::{judge, qemu, tools};

/// Neither a whole number of clusters nor of pages.
const DISK_BYTES: usize = 64 * MIB + 3 * 512;

const SCRIPT: &str = r#"
D=/dev/vda
echo "SIZE $(cat /sys/block/vda/size)"
echo "SERIAL $(cat /sys/block/vda/serial)"
echo "QUEUES $(ls /sys/block/vda/mq | wc -l)"
echo "READ-ONLY $(cat /sys/block/vda/ro)"

# What an image without a byte has.
[ "$(dd if=$D bs=64k count=16 iflag=direct 2>/dev/null | tr -d '\0' | wc -c)" = 0 ]

# Past the page cache, in small and in large requests, from both processors; and through the cache.
dd if=/host/a of=$D bs=4k seek=256 oflag=direct &
first=$!
dd if=/host/b of=$D bs=1M seek=8 oflag=direct &
second=$!
wait $first
wait $second
dd if=/host/c of=$D bs=512 seek=40961 conv=fsync
dd if=/host/tail of=$D bs=512 seek=131072 oflag=direct conv=fsync
# The whole of it moves on by a sector: every cluster is read, changed and written.
dd if=/host/a of=$D bs=512 seek=81921 conv=fsync

echo 3 > /proc/sys/vm/drop_caches
dd if=$D bs=64k skip=16 count=32 iflag=direct | cmp - /host/a
dd if=$D bs=1M skip=8 count=4 iflag=direct | cmp - /host/b
dd if=$D bs=512 skip=40961 count=2048 | cmp - /host/c
dd if=$D bs=512 skip=131072 | cmp - /host/tail

# A part of b goes away, another becomes zeros.
/host/blkdiscard -o $((9 << 20)) -l $((1 << 20)) $D
/host/blkdiscard -z -o $((10 << 20)) -l $((1 << 20)) $D
sync
echo 3 > /proc/sys/vm/drop_caches
[ "$(dd if=$D bs=1M skip=9 count=2 iflag=direct | tr -d '\0' | wc -c)" = 0 ]
echo "SUM $(sha256sum $D)"
"#;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Transport {
    VhostUser,
    Nbd,
}

#[track_caller]
fn patterns_over(transport: Transport) {
    if !machine::present(&[tools::QEMU_IMG, tools::BLKDISCARD]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let [a, b, c, tail] =
        [(1, 2 * MIB), (2, 4 * MIB), (3, MIB), (4, 3 * 512)].map(|(seed, len)| random(seed, len));
    qemu::create(dir, "disk.qcow2", &[], &DISK_BYTES.to_string());
    let server = host::serve(dir, "disk.qcow2", "qcow2", &[]);
    let socket = host::vhost_socket(dir);
    let disk = match transport {
        Transport::VhostUser => Disk::VhostUser(&socket),
        Transport::Nbd => Disk::Nbd(&server),
    };
    let files: &[(&str, &[u8])] = &[("a", &a), ("b", &b), ("c", &c), ("tail", &tail)];
    let work = Work { script: SCRIPT, files, programs: &[tools::BLKDISCARD], ..Work::default() };
    let console = Machine::boot(disk, &work).expect("a machine").finish();
    host::stop(server);

    assert_eq!(host::said(&console, "SIZE"), (DISK_BYTES / 512).to_string());
    assert_eq!(host::said(&console, "QUEUES"), "2");
    assert_eq!(host::said(&console, "READ-ONLY"), "0");
    let serial = if transport == Transport::VhostUser { "disk" } else { "over-nbd" };
    assert_eq!(host::said(&console, "SERIAL"), serial);
    let mut wanted = vec![0; DISK_BYTES];
    for (at, bytes) in [(MIB, &a), (8 * MIB, &b), (40_961 * 512, &c), (81_921 * 512, &a)] {
        wanted[at..at + bytes.len()].copy_from_slice(bytes);
    }
    wanted[9 * MIB..11 * MIB].fill(0);
    wanted[131_072 * 512..].copy_from_slice(&tail);
    let content = host::content(dir, "disk.qcow2", "qcow2", Verdict::Clean);
    judge::same_bytes("disk.qcow2", &content, &wanted);
    let sum = host::said(&console, "SUM").split(' ').next();
    assert_eq!(sum, Some(&*host::sha256(dir, "flat.raw")));
}

#[test]
fn a_guest_writes_patterns_over_vhost_user() {
    patterns_over(Transport::VhostUser);
}

#[test]
fn a_guest_writes_patterns_over_nbd() {
    patterns_over(Transport::Nbd);
}
