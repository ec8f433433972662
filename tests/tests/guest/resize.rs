//! A disk becomes longer under a guest that uses it.

use super::host::{self, MIB, Verdict, random};
use mica_tests::machine::{self, Disk, Machine, Work};
use mica_tests::{mica, qemu, tools};

/// The guest learns the new length through an interrupt; it does not poll for it.
const SCRIPT: &str = r#"
dd if=/host/data of=/dev/vda bs=1M oflag=direct 2>/dev/null
echo "SECTORS-BEFORE $(cat /sys/block/vda/size)"
tries=0
while [ "$(cat /sys/block/vda/size)" = 32768 ] && [ $tries -lt 1200 ]; do
    usleep 50000
    tries=$((tries + 1))
done
echo "SECTORS-AFTER $(cat /sys/block/vda/size)"
dd if=/host/data of=/dev/vda bs=1M seek=20 conv=fsync 2>/dev/null
echo 3 > /proc/sys/vm/drop_caches
dd if=/dev/vda bs=1M skip=20 count=2 2>/dev/null | cmp - /host/data
dd if=/dev/vda bs=1M count=2 2>/dev/null | cmp - /host/data
"#;

#[test]
fn a_disk_grows_under_a_guest() {
    if !machine::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let data = random(11, 2 * MIB);
    qemu::create(dir, "disk.qcow2", &[], "16M");
    let control = dir.join("control").display().to_string();
    let server = host::serve(dir, "disk.qcow2", "qcow2", &["--control", &control]);
    let socket = host::vhost_socket(dir);
    let work = Work { script: SCRIPT, files: &[("data", &data)], ..Work::default() };
    let mut machine = Machine::boot(Disk::VhostUser(&socket), &work).expect("a machine");
    machine.wait_for(|console| console.contains("SECTORS-BEFORE 32768").then_some(()));
    mica::run(["ctl", "--control", &control, "resize", "disk", "24M"]).ok();
    let console = machine.finish();
    host::stop(server);

    assert_eq!(host::said(&console, "SECTORS-AFTER"), "49152");
    let content = host::content(dir, "disk.qcow2", "qcow2", Verdict::Clean);
    assert_eq!(content.len(), 24 * MIB);
    assert!(content[..2 * MIB] == data && content[20 * MIB..22 * MIB] == data);
}
