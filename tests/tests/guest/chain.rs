//! A guest reads a long chain as a whole.

use super::host;
use mica_tests::machine::{self, Disk, Machine, Work};
use mica_tests::{mica, tools};

const LAYERS: &str = "50";
const SCRIPT: &str = r#"
echo "READ-ONLY $(cat /sys/block/vda/ro)"
# Both processors read: in large requests past the page cache, and through it.
dd if=/dev/vda bs=1M iflag=direct 2>/dev/null | sha256sum > /tmp/direct &
dd if=/dev/vda bs=64k 2>/dev/null | sha256sum > /tmp/cached
wait
cmp /tmp/direct /tmp/cached
echo "SUM $(cat /tmp/direct)"
if dd if=/host/sector of=/dev/vda oflag=direct 2>/dev/null; then exit 1; fi
"#;

#[test]
fn a_guest_reads_a_chain_of_50_layers() {
    if !machine::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().join("chain").display().to_string();
    let options = ["--layers", LAYERS, "--size", "64M", "--fill", "0.5", "--output", "json"];
    let made = mica::run(["gen", "chain"].iter().chain(&options).chain(&[&*folder])).json();
    let active = format!("{folder}/{}", made["top"].as_str().expect("the active layer"));
    let raw = dir.path().join("raw").display().to_string();
    mica::run(["convert", "-f", "qcow2", "-O", "raw", &active, &raw]).ok();

    let server = host::serve(dir.path(), &active, "qcow2", &["--read-only"]);
    let socket = host::vhost_socket(dir.path());
    let work = Work { script: SCRIPT, files: &[("sector", &[7; 512])], ..Work::default() };
    let machine = Machine::boot(Disk::VhostUser(&socket), &work).expect("a machine");
    let console = machine.finish();
    host::stop(server);

    assert_eq!(host::said(&console, "READ-ONLY"), "1");
    let sum = host::said(&console, "SUM").split(' ').next();
    assert_eq!(sum, Some(&*host::sha256(dir.path(), "raw")));
}
