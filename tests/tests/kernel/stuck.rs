//! The file system of one disk is frozen. Writes to that disk wait; the other disks of the server
//! do not.

use mica_rt::{
    Access, Backend, Buf, Executor, FallocateFlags, fallocate, join_all, spawn, timeout, write_at,
    yield_now,
};
use mica_tests::guest::{Guest, Request};
use mica_tests::mounts::{Frozen, Mount, make_ext4};
use mica_tests::server::Server;
use mica_tests::{clock, mica, nbd, qemu, tools};
use rustix::fs::OFlags;
use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: usize = 4096;
/// More than an image gets longer by at once.
const CLUSTERS: u64 = 100;
/// How long the server may take until it serves both.
const LIMIT: Duration = Duration::from_secs(60);

/// A file system of its own, in a file in `dir`, mounted there. `None` where that is not allowed.
fn mounted_ext4(dir: &Path) -> Option<Mount> {
    let (file, folder) = (dir.join("ext4.img"), dir.join("mounted"));
    make_ext4(&file, 128 << 20, &[]).expect("made");
    let mount = Mount::ext4(&file, &folder).ok();
    if mount.is_none() {
        tools::skip("mounting a file system is not allowed here");
    }
    mount
}

#[test]
fn a_frozen_file_system_delays_no_other_disk() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::MKE2FS]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let Some(mount) = mounted_ext4(dir) else { return };
    let folder = mount.folder().to_owned();
    // Its writes make it longer, too.
    qemu::create(&folder, "stuck.qcow2", &[], "8M");
    qemu::create(dir, "other.qcow2", &["-o", "preallocation=full"], "8M");
    // One executor serves both.
    let server = Server::start("", |socket| {
        let config = format!(
            "queues = 1\n\
             [[disk]]\nname = \"other\"\nimage = \"other.qcow2\"\nnbd = [\"{}\"]\n\
             [[disk]]\nname = \"stuck\"\nimage = \"mounted/stuck.qcow2\"\nnbd = [\"stuck.nbd\"]\n",
            socket.display()
        );
        fs::write(dir.join("mica.toml"), config).expect("written");
        let mut serve = Command::new(mica::binary());
        serve.arg("serve").arg("--config").arg(dir.join("mica.toml"));
        serve
    });
    let server = server.expect("served");
    let mut other = Guest::connect(&server).expect("served");
    // The first disk may be served a moment before the second is.
    let served = || nbd::Connection::open(&dir.join("stuck.nbd"), "", &nbd::Wish::default()).ok();
    let connection = clock::poll(LIMIT, Duration::from_millis(5), served);
    let mut stuck = Guest::on(connection.expect("served"));
    assert_eq!(stuck.write(0, &[1; BLOCK]).expect("answered"), 0);

    let frozen = Frozen::new(&folder).expect("frozen");
    for place in 0..CLUSTERS {
        let request = Request::Write { offset: place << 16, bytes: vec![2; BLOCK], fua: false };
        stuck.send(&request).expect("sent");
    }
    for round in 0..50 {
        assert_eq!(other.write(round * BLOCK as u64, &[3; BLOCK]).expect("answered"), 0);
    }
    assert_eq!(other.flush().expect("answered"), 0);
    drop(frozen);
    for _ in 0..CLUSTERS {
        assert_eq!(stuck.receive().expect("answered").1.errno(), 0);
    }
    assert_eq!(stuck.flush().expect("answered"), 0);
    assert!(server.stop().expect("it stops").status.success());
    mount.unmount();
    qemu::io(dir, &["-r"], "other.qcow2", &["read -P 3 0 200k"]);
}

/// The kernel sorts the changes of files into 64 buckets, and those of one bucket wait for each
/// other; threads that all wait for frozen files have no time for the others.
#[test]
fn changes_of_a_frozen_file_system_delay_no_other_file() {
    if !tools::present(&[tools::MKE2FS]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let Some(mount) = mounted_ext4(dir.path()) else { return };
    let open = |folder: &Path, name: usize| {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        // Each fifth past the page cache.
        let (access, flags) = match name % 5 {
            0 => (Access::Direct, OFlags::DIRECT),
            _ => (Access::Buffered, OFlags::empty()),
        };
        options.custom_flags(flags.bits().cast_signed());
        let file = options.open(folder.join(name.to_string())).expect("made");
        Arc::new(mica_rt::File::new(file.into(), access))
    };
    let stuck: Vec<_> = (0..40).map(|name| open(mount.folder(), name)).collect();
    let others: Vec<_> = (0..400).map(|name| open(dir.path(), name)).collect();
    for backend in [Backend::Uring, Backend::Pool] {
        let Ok(executor) = Executor::new(backend) else {
            tools::skip("io_uring is not allowed here");
            continue;
        };
        executor.block_on(async {
            let frozen = Frozen::new(mount.folder()).expect("frozen");
            let change = |file: &Arc<mica_rt::File>, block: u64| {
                let file = Arc::clone(file);
                async move {
                    let offset = block * BLOCK as u64;
                    let written = write_at(&file, Buf::zeroed(BLOCK), offset);
                    fallocate(&file, FallocateFlags::empty(), 0, offset + BLOCK as u64).await?;
                    written.await.0
                }
            };
            let changes = |file| (0..10).map(move |block| spawn(change(file, block)));
            let waiting: Vec<_> = stuck.iter().flat_map(changes).collect();
            // So that they come first.
            yield_now().await;
            let changes = join_all(others.iter().map(|other| change(other, 0)));
            let changed = timeout(LIMIT, changes).await.unwrap_or_default();
            assert_eq!(changed.len(), others.len(), "{backend:?}: one waits for a frozen file");
            for written in changed {
                assert_eq!(written.expect("no error"), BLOCK);
            }
            drop(frozen);
            for waiting in waiting {
                assert_eq!(waiting.await.expect("no error"), BLOCK);
            }
        });
    }
    drop((stuck, others));
    mount.unmount();
}
