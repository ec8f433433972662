//! Loop devices, file systems and QEMU's own tools on the file.

use super::served::{Served, may_run};
use mica_tests::mounts::Mount;
use mica_tests::{command, qemu, tools};
use std::fs;
use std::path::Path;
use std::process::Command;

/// A loop device, detached when dropped.
struct Loop(String);

impl Loop {
    fn attach(file: &Path, options: &[&str]) -> Self {
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show"]).args(options).arg(file);
        Self(command::finish(&mut losetup).ok().trim().to_owned())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

fn bytes_of(number: usize) -> Vec<u8> {
    let mut rng = mica_gen::Rng::new(number as u64);
    let words = std::iter::repeat_with(|| rng.next_u64().to_le_bytes());
    words.take(1000 + number * 997).flatten().collect()
}

fn judge_ext4(file: &Path) {
    let program = tools::E2FSCK.find().expect("present").display().to_string();
    command::run(&program, ["-f", "-n", &file.display().to_string()]).ok();
}

#[test]
fn ext4_on_a_loop_device_keeps_its_files() {
    let needed = [tools::QEMU_IMG, tools::MKE2FS, tools::E2FSCK, tools::BLKDISCARD];
    if !may_run(&needed) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "top.qcow2", &[], "96M");
    let served = Served::start(dir, "top.qcow2", &[]);
    let device = Loop::attach(served.file(), &[]);
    let run = |tool: tools::Tool, arguments: &[&str]| {
        let mut program = Command::new(tool.find().expect("present"));
        command::finish(program.args(arguments).arg(&device.0)).ok()
    };
    run(tools::BLKDISCARD, &["--offset", "0", "--length", "8388608"]);
    run(tools::MKE2FS, &["-q", "-F", "-t", "ext4", "-E", "discard"]);
    drop(device);

    let mount = Mount::ext4(served.file(), &dir.join("mounted")).expect("mounted");
    for number in 0..60 {
        fs::write(mount.folder().join(number.to_string()), bytes_of(number)).expect("written");
    }
    for number in (0..60).step_by(7) {
        fs::remove_file(mount.folder().join(number.to_string())).expect("removed");
    }
    mount.unmount();
    judge_ext4(served.file());
    served.stop();

    let served = Served::start(dir, "top.qcow2", &["--read-only"]);
    let folder = dir.join("read");
    fs::create_dir(&folder).expect("made");
    let device = Loop::attach(served.file(), &["--read-only"]);
    let mut mount = Command::new("mount");
    mount.args(["-t", "ext4", "-o", "ro,noload", &device.0]).arg(&folder);
    command::finish(&mut mount).ok();
    let read = |number: usize| fs::read(folder.join(number.to_string()));
    let wrong = (0..60).filter(|number| match number % 7 {
        0 => read(*number).is_ok(),
        _ => read(*number).ok() != Some(bytes_of(*number)),
    });
    let wrong: Vec<_> = wrong.collect();
    command::run("umount", [&folder]).ok();
    assert_eq!(wrong, [0_usize; 0], "files that are not as they were written");
    drop(device);
    served.stop();

    qemu::flatten(dir, "top.qcow2", "flat.raw");
    judge_ext4(&dir.join("flat.raw"));
    let said = qemu::img(dir, ["check", "-f", "qcow2", "top.qcow2"]);
    assert_eq!(said.code(), Some(0), "{said}");
}

#[test]
fn qemu_writes_to_the_file_as_to_any_raw_image() {
    if !may_run(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "source.qcow2", &[], "16M");
    let writes = ["write -P 9 1M 3M", "write -P 8 8000k 5k", "write -P 7 15M 1M"];
    qemu::io(dir, &["-f", "qcow2"], "source.qcow2", &writes);
    qemu::create(dir, "top.qcow2", &[], "16M");
    qemu::io(dir, &["-f", "qcow2"], "top.qcow2", &["write -P 1 0 16M"]);

    let served = Served::start(dir, "top.qcow2", &[]);
    let into = ["convert", "-n", "-f", "qcow2", "-O", "raw", "source.qcow2", "disk"];
    qemu::img(dir, into).ok();
    qemu::io(dir, &["-f", "raw"], "disk", &["write -P 6 2M 4k", "discard 3M 64k", "flush"]);
    served.stop();

    qemu::io(dir, &["-f", "qcow2"], "source.qcow2", &["write -P 6 2M 4k", "write -z 3M 64k"]);
    let said =
        qemu::img(dir, ["compare", "-f", "qcow2", "-F", "qcow2", "source.qcow2", "top.qcow2"]);
    assert_eq!(said.code(), Some(0), "{said}");
    let said = qemu::img(dir, ["check", "-f", "qcow2", "top.qcow2"]);
    assert_eq!(said.code(), Some(0), "{said}");
}
