//! Every thread of a server that serves is in the sandbox, and a server in it does everything that
//! it does outside.

use mica_tests::server::Server;
use mica_tests::{clock, command, mica, nbd, qemu, tools};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// Within this time every thread has its name.
const NAMED_MAX: Duration = Duration::from_secs(60);
/// PF_EXITING of Linux: the thread no longer runs any of the program's code.
const EXITING: u64 = 4;

/// A chain of two layers.
fn chain() -> Option<TempDir> {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return None;
    }
    let dir = tempfile::tempdir().expect("a folder");
    qemu::create(dir.path(), "base.qcow2", &[], "8M");
    qemu::io(dir.path(), &[], "base.qcow2", &["write -P 1 0 2M"]);
    qemu::overlay(dir.path(), "disk.qcow2", "base.qcow2", &[]);
    Some(dir)
}

/// What the kernel reports of the threads of a process: name, no new privileges, seccomp mode. A
/// thread that is exiting is left out: after it was joined it is still visible for a moment.
fn threads(process: u32) -> Vec<(String, String, String)> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).expect("it runs");
    let status = |task: &Path| {
        // Fields of proc_pid_stat(5), from the third on: the name may have spaces in it.
        let stat = fs::read_to_string(task.join("stat")).ok()?;
        let flags = stat.rsplit_once(") ")?.1.split(' ').nth(6)?.parse::<u64>().ok()?;
        if flags & EXITING != 0 {
            return None;
        }
        let text = fs::read_to_string(task.join("status")).ok()?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_default().trim().to_owned()
        };
        Some((field("Name:"), field("NoNewPrivs:"), field("Seccomp:")))
    };
    tasks.flatten().filter_map(|task| status(&task.path())).collect()
}

#[test]
fn every_thread_that_serves_is_in_it() {
    let Some(dir) = chain() else { return };
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (control, device) = (path("control"), path("vhost"));
    let options = ["--control", &control, "--vhost-user", &device, "--sandbox", "require"];
    let server = Server::mica_writable(&dir.path().join("disk.qcow2"), "qcow2", &options);
    let server = server.expect("served");

    // A device has a thread while a front end is connected.
    let _front_end = UnixStream::connect(&device).expect("served");
    // A thread has its name only once it runs.
    let names = ["mica", "mica-worker-0", "mica-vhost", "mica-control"];
    let named = clock::poll(NAMED_MAX, Duration::from_millis(10), || {
        let seen = threads(server.pid());
        names.iter().all(|name| seen.iter().any(|thread| thread.0 == *name)).then_some(())
    });
    let threads = threads(server.pid());
    assert!(named.is_some(), "{names:?}: {threads:?}");
    // Threads of the kernel that io_uring starts make no system calls, but have the rules.
    let outside = threads.iter().filter(|(_, privileges, calls)| privileges != "1" || calls != "2");
    assert_eq!(outside.count(), 0, "{threads:?}");
    server.stop().expect("it stops");
}

/// The story: three threads of a server of a file were outside of the sandbox, in the same address
/// space, and took the kernel's requests there.
#[test]
fn what_is_outside_is_another_process_with_few_calls_of_its_own() {
    let Some(dir) = chain() else { return };
    let is_mounted = rustix::process::geteuid().is_root()
        && fs::File::options().read(true).write(true).open("/dev/fuse").is_ok();
    if !is_mounted {
        return tools::skip("needs root and /dev/fuse");
    }
    let file = dir.path().join("file");
    fs::write(&file, b"underneath").expect("written");
    let name = file.display().to_string();
    let options = ["--fuse", &name, "--sandbox", "require"];
    let server = Server::mica_writable(&dir.path().join("disk.qcow2"), "qcow2", &options);
    let server = server.expect("served");
    // NBD is served first.
    let is_disk = || fs::metadata(&file).is_ok_and(|found| found.len() == 8 << 20).then_some(());
    clock::poll(NAMED_MAX, Duration::from_millis(1), is_disk).expect("mounted");
    let mut head = [0; 4096];
    std::os::unix::fs::FileExt::read_exact_at(&fs::File::open(&file).expect("there"), &mut head, 0)
        .expect("read");
    assert_eq!(head, [1; 4096]);

    let helper = helper_of(&server);
    let is_outside =
        |(_, privileges, calls): &(String, String, String)| privileges != "1" || calls != "2";
    for process in [server.pid(), helper] {
        let threads = threads(process);
        assert_eq!(threads.iter().filter(|thread| is_outside(thread)).count(), 0, "{threads:?}");
    }
    assert!(threads(helper).iter().any(|thread| thread.0 == "mica-helper"));
    server.stop().expect("it stops");
    assert_eq!(fs::read(&file).expect("unmounted"), b"underneath");
    let gone = || (!Path::new(&format!("/proc/{helper}/fdinfo/0")).exists()).then_some(());
    assert!(clock::poll(NAMED_MAX, Duration::from_millis(5), gone).is_some(), "it ends with it");
}

/// The only child of a server: its helper.
#[track_caller]
fn helper_of(server: &Server) -> u32 {
    let children = format!("/proc/{0}/task/{0}/children", server.pid());
    let children = fs::read_to_string(children).expect("it runs");
    let [helper] = children.split_whitespace().collect::<Vec<_>>()[..] else {
        panic!("one child: {children:?}")
    };
    helper.parse().expect("a number")
}

/// The story: it stayed as a zombie, and what needed it later failed with a broken pipe.
#[test]
fn helper_that_dies_is_reported_and_reaped() {
    let dir = tempfile::tempdir().expect("a folder");
    let control = dir.path().join("control");
    let options = ["--control", &control.display().to_string()];
    let server = Server::mica(Path::new("1M"), "null", &options).expect("served");
    let helper = helper_of(&server);
    let pid = i32::try_from(helper).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, Signal::KILL).expect("it runs");
    let reaped = || (!Path::new(&format!("/proc/{helper}")).exists()).then_some(());
    clock::poll(NAMED_MAX, Duration::from_millis(5), reaped).expect("nothing of it is left");
    let said = || server.log().contains("sandbox helper has ended: restart").then_some(());
    clock::poll(NAMED_MAX, Duration::from_millis(5), said).expect("it is said");

    let words = ["serve", "--takeover", "--format", "null", "--nbd", "next", "1M"];
    let mut next = Command::new(mica::binary());
    next.args(words).args(options).current_dir(dir.path());
    let said = command::finish_within(&mut next, NAMED_MAX).refusal();
    assert!(said.contains("helper has ended"), "{said}");
    assert!(server.connect(&nbd::Wish::default()).is_ok(), "it still serves");
    server.stop().expect("it stops");
}

#[test]
fn off_leaves_it_out() {
    let Some(dir) = chain() else { return };
    let server = Server::mica(&dir.path().join("disk.qcow2"), "qcow2", &["--sandbox", "off"]);
    let server = server.expect("served");
    let threads = threads(server.pid());
    assert!(threads.iter().all(|(_, privileges, _)| privileges == "0"), "{threads:?}");
    server.stop().expect("it stops");
}

#[test]
fn layers_elsewhere_are_read_where_they_are_allowed_through_a_link() {
    let Some(dir) = chain() else { return };
    let dir = dir.path();
    // The image is named through a link; its backing file is in yet another place.
    for folder in ["bases", "links"] {
        fs::create_dir(dir.join(folder)).expect("made");
    }
    fs::rename(dir.join("base.qcow2"), dir.join("bases/base.qcow2")).expect("moved");
    let rebase = ["rebase", "-u", "-F", "qcow2", "-b", "bases/base.qcow2", "disk.qcow2"];
    qemu::img(dir, rebase).ok();
    let bases = dir.join("bases");
    std::os::unix::fs::symlink(&bases, dir.join("links/bases")).expect("linked");
    std::os::unix::fs::symlink("../disk.qcow2", dir.join("links/disk")).expect("linked");
    let more = ["--sandbox", "require"];
    let server = Server::mica_writable(&dir.join("links/disk"), "qcow2", &more).expect("served");
    let mut client = server.connect(&nbd::Wish::default()).expect("served");
    assert_eq!(client.read(0, 4096).expect("read"), vec![1; 4096]);
    client.disconnect().expect("left");
    server.stop().expect("it stops");
}

#[test]
fn log_of_requests_is_written_wherever_it_was_asked_for() {
    let Some(dir) = chain() else { return };
    let logs = tempfile::tempdir().expect("a folder");
    let log = logs.path().join("log");
    let fault = format!("log={}", log.display());
    let more = ["--sandbox", "require", "--inject", &fault];
    let server = Server::mica_writable(&dir.path().join("disk.qcow2"), "qcow2", &more);
    let mut client =
        server.as_ref().expect("served").connect(&nbd::Wish::default()).expect("served");
    client.read(0, 4096).expect("read");
    server.expect("served").stop().expect("it stops");
    let said = fs::read_to_string(&log).expect("written");
    assert!(said.contains("base.qcow2"), "{said}");

    // What cannot be written is reported.
    let fault = format!("log={}", logs.path().join("none/log").display());
    let more = ["--sandbox", "require", "--inject", &fault];
    let error = Server::mica(&dir.path().join("disk.qcow2"), "qcow2", &more).expect_err("refused");
    assert!(error.to_string().contains("none/log"), "{error}");
}
