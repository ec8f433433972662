//! Who may do what with the image of a disk whose states are kept: it becomes a new file.

use mica_tests::server::Server;
use mica_tests::{mica, qemu, tools};
use rustix::fs::{XattrFlags, getxattr, setxattr};
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::process::Command;

const LIST: &str = "system.posix_acl_access";

/// A list (version 2) by which user 12345 may write, too.
fn list() -> Vec<u8> {
    let mut list = vec![2, 0, 0, 0];
    // Of the owner, that user, the group, the mask and others.
    for (tag, rights, id) in
        [(1, 6, u32::MAX), (2, 6, 12345), (4, 4, u32::MAX), (16, 6, u32::MAX), (32, 4, u32::MAX)]
    {
        list.extend([u16::to_le_bytes(tag), u16::to_le_bytes(rights)].concat());
        list.extend(u32::to_le_bytes(id));
    }
    list
}

/// The story: after a backup the virtual machines of another user could not open their disk.
#[test]
fn disk_whose_state_is_kept_keeps_its_rights() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let image = dir.path().join("disk.qcow2");
    let (control, backup) = (dir.path().join("control"), dir.path().join("backup"));
    for sandbox in ["require", "off"] {
        qemu::create(dir.path(), "disk.qcow2", &[], "1M");
        fs::set_permissions(&image, Permissions::from_mode(0o664)).expect("set");
        // Only root may.
        let group = chown(&image, None, Some(12345)).is_ok().then_some(12345);
        let has_list = setxattr(&image, LIST, &list(), XattrFlags::empty()).is_ok();
        let server = Server::start("", |socket| {
            let mut shell = Command::new("sh");
            shell.args(["-c", "umask 077; exec \"$@\"", "sh"]).arg(mica::binary());
            shell.args(["serve", "--sandbox", sandbox, "--nbd"]).arg(socket);
            shell.arg("--control").arg(&control).arg(&image);
            shell
        });
        let server = match server {
            Err(error) if sandbox == "require" && format!("{error:?}").contains("lacks") => {
                tools::skip("this system has no sandbox");
                continue;
            }
            server => server.expect("served"),
        };
        let ctl = |verb: &[&str]| {
            let control = control.display().to_string();
            mica::run(["ctl", "--control", &control].iter().chain(verb)).ok()
        };
        let place = backup.display().to_string();
        ctl(&["backup", "begin", "disk", "--as", "mon", "--nbd", &place]);
        ctl(&["backup", "end", "disk"]);
        let state = dir.path().join("disk@mon.qcow2");
        for file in [&image, &state] {
            let mode = fs::metadata(file).expect("there").permissions().mode();
            assert_eq!(mode & 0o7777, 0o664, "{}: {}", file.display(), server.log());
            let gid = fs::metadata(file).expect("there").gid();
            assert!(group.is_none_or(|group| group == gid), "{gid}: {}", server.log());
            let mut now = [0; 256];
            let found = getxattr(file, LIST, &mut now[..]);
            let now = found.map(|len| &now[..len]);
            let wanted = list();
            assert_eq!(now.ok(), has_list.then_some(&wanted[..]), "{}", file.display());
        }
        assert!(!server.log().contains("rights"), "{}", server.log());
        server.stop().expect("it stops");
        fs::remove_file(&image).expect("there");
        fs::remove_file(&state).expect("there");
        let _ = fs::remove_file(dir.path().join("disk@mon.qcow2.mica-above"));
    }
}
