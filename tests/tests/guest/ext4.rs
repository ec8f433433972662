//! A guest makes ext4 on its disk and works with it; on the host e2fsck finds nothing to repair.

use super::host::{self, MIB, Verdict, random};
use mica_tests::machine::{self, Disk, Machine, Work};
use mica_tests::{command, qemu, tools};
use std::fs;

const SCRIPT: &str = r#"
/host/mke2fs -q -F -t ext4 -E discard /dev/vda
# What mke2fs leaves to the kernel is zeroed at once, by requests for zeros.
mount -t ext4 -o discard,init_itable=0 /dev/vda /mnt
number=0
while [ $number -lt 60 ]; do
    folder=/mnt/folder-$((number % 7))
    mkdir -p $folder
    dd if=/host/data of=$folder/file-$number bs=4093 skip=$number count=$((number % 23)) 2>/dev/null
    number=$((number + 1))
done
cp /host/data /mnt/first
sync
# Files go and others come where they were.
rm -r /mnt/folder-3 /mnt/first
cp /host/data /mnt/second
echo more >> /mnt/folder-5/file-5
dd if=/host/data of=/mnt/folder-5/file-12 bs=1000 seek=7 count=40 conv=notrunc,fsync 2>/dev/null
(cd /mnt && find . -type f | sort | xargs sha256sum) > /tmp/sums
cp /tmp/sums /mnt/sums
umount /mnt

mount -t ext4 -o discard /dev/vda /mnt
cd /mnt
sha256sum -c -s /tmp/sums
cmp /host/data second
fstrim /mnt
cd /
umount /mnt
"#;

#[test]
fn ext4_of_a_guest_is_sound() {
    let needed = [tools::QEMU_IMG, tools::MKE2FS, tools::E2FSCK, tools::DEBUGFS];
    if !machine::present(&needed) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let data = random(7, 6 * MIB);
    // What is below is no file system: the guest has to write everything that it needs.
    fs::write(dir.join("below.raw"), vec![0x55; 20 * MIB]).expect("written");
    let backing = ["-o", "extended_l2=on", "-b", "below.raw", "-F", "raw"];
    qemu::create(dir, "disk.qcow2", &backing, "96M");
    let server = host::serve(dir, "disk.qcow2", "qcow2", &[]);
    let socket = host::vhost_socket(dir);
    let work = Work {
        script: SCRIPT,
        files: &[("data", &data)],
        programs: &[tools::MKE2FS],
        ..Work::default()
    };
    Machine::boot(Disk::VhostUser(&socket), &work).expect("a machine").finish();
    host::stop(server);

    host::content(dir, "disk.qcow2", "qcow2", Verdict::Clean);
    let flat = dir.join("flat.raw").display().to_string();
    let program = |tool: tools::Tool| tool.find().expect("present").display().to_string();
    command::run(&program(tools::E2FSCK), ["-f", "-n", &flat]).ok();
    let out = dir.join("out");
    let mut sums = 0;
    let dump = |inside: &str| {
        let request = format!("dump {inside} {}", out.display());
        command::run(&program(tools::DEBUGFS), ["-R", &request, &flat]).ok();
        fs::read(&out).expect("dumped")
    };
    for line in String::from_utf8(dump("/sums")).expect("text").lines() {
        let (sum, file) = line.split_once("  .").expect("a sum and a file");
        dump(file);
        assert_eq!(host::sha256(dir, "out"), sum, "{file}");
        sums += 1;
    }
    assert!(sums > 40, "{sums} files");
    assert!(dump("/second") == data, "the large file");
}
