//! A server is killed, and the file system of its image loses what it had not written out: its
//! device went away and returned, while the machine kept running. What the server left in memory is
//! still there, but what it links is not.

use mica_tests::guest::{Answer, Guest};
use mica_tests::mounts::{Mount, make_ext4};
use mica_tests::server::Server;
use mica_tests::{command, qemu, tools};
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

const MIB: usize = 1 << 20;
const BASE: u8 = 0x5a;
const WRITTEN: u8 = 7;

/// Runs a program as root.
#[track_caller]
fn run(tool: tools::Tool, arguments: &[&str], path: &Path) {
    let program = tool.find().expect("it is present");
    command::finish(Command::new(program).args(arguments).arg(path)).ok();
}

/// An ext4 in `file`, mounted at `folder`; `None` if that is not allowed.
fn mounted(file: &Path, folder: &Path) -> Option<Mount> {
    Mount::ext4(file, folder)
        .map_err(|error| tools::skip(&format!("no mount here: {error:#}")))
        .ok()
}

/// Makes a durable image, writes to it through a server, and kills the server.
#[track_caller]
fn written_and_killed(dir: &Path, place: &[&str]) {
    fs::write(dir.join("base.raw"), vec![BASE; 8 * MIB]).expect("written");
    qemu::create(dir, "disk.qcow2", &["-b", "base.raw", "-F", "raw"], "");
    rustix::fs::syncfs(File::open(dir).expect("there")).expect("durable");
    let server = Server::mica_writable(&dir.join("disk.qcow2"), "qcow2", place).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!(guest.write(0, &vec![WRITTEN; MIB]).expect("answered"), 0);
    // Dropping the server kills it.
    drop(server);
}

#[test]
fn no_foreign_data_is_shown_when_the_file_system_lost_writes() {
    let needed = [tools::QEMU_IMG, tools::MKE2FS, tools::XFS_IO];
    if !tools::present(&needed) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let (file, folder) = (dir.path().join("ext4.img"), dir.path().join("mounted"));
    make_ext4(&file, 128 << 20, &[]).expect("made");
    let Some(mount) = mounted(&file, &folder) else { return };
    let logs = dir.path().join("logs");
    fs::create_dir(&logs).expect("made");
    let place = ["--redo-dir", logs.to_str().expect("a plain name")];
    written_and_killed(&folder, &place);
    // The journal has the file's length and times, but not its data.
    let other = File::create(folder.join("other")).expect("made");
    other.sync_all().expect("durable");
    drop(other);
    run(tools::XFS_IO, &["-x", "-c", "shutdown"], &folder);
    mount.unmount();

    let mount = mounted(&file, &folder).expect("as before");
    let image = folder.join("disk.qcow2");
    for options in [&["--read-only"][..], &[]] {
        let options = [&place[..], options].concat();
        let server = Server::mica_writable(&image, "qcow2", &options).expect("served");
        let mut guest = Guest::connect(&server).expect("served");
        let read = guest.read(0, u32::try_from(MIB).expect("small")).expect("answered");
        let Answer::Done(bytes) = read else { panic!("{read:?}") };
        let foreign = bytes.iter().filter(|byte| ![BASE, WRITTEN].contains(byte)).count();
        assert_eq!(foreign, 0, "{options:?}: {}", server.log());
        // The image may have lost the log's last name, too: then nothing fits.
        let told = ["been remounted", "left nothing here that fits"];
        let is_told = told.iter().any(|why| server.log().contains(why));
        assert!(is_told, "{options:?}: {}", server.log());
        // The writer reports where it keeps the log; another one must find what this one found.
        let writes = options == place;
        assert_eq!(server.log().contains(".lost"), writes, "{options:?}: {}", server.log());
        if writes {
            server.stop().expect("it stops");
        }
    }
    qemu::img(&folder, ["check", "-q", "disk.qcow2"]).ok();
    mount.unmount();
}
