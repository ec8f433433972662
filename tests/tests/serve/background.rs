//! Servers that others start: in the background, for a command, until their parent ends.

use mica_tests::{clock, command, mica, nbd};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(5);

/// `mica serve` of a disk of zeros, with these options and in `dir`.
fn serve(dir: &Path, options: &[&str]) -> Command {
    let mut serve = Command::new(mica::binary());
    serve.current_dir(dir).args(["serve", "--sandbox", "require", "--format", "null"]);
    serve.args(options).arg("1M").stdin(Stdio::null());
    serve
}

/// The process that a file names.
fn process_in(file: &Path) -> Pid {
    let text = fs::read_to_string(file).expect("a file with a process");
    text.trim().parse().ok().and_then(Pid::from_raw).expect("a process")
}

#[track_caller]
fn ends(process: Pid) {
    let gone = || test_kill_process(process).is_err().then_some(());
    assert!(clock::poll(LIMIT, PAUSE, gone).is_some(), "{process:?} still runs");
}

fn read_from(socket: &Path) {
    let mut client = nbd::Connection::open(socket, "", &nbd::Wish::default()).expect("served");
    client.read(0, 4096).expect("read");
    client.disconnect().expect("left");
}

/// The story: `mica serve --fork … 2>&1 | cat` never ended, as the server kept the pipe.
#[test]
fn server_in_the_background_lets_go_of_the_output_of_its_caller() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let options = ["--fork", "--pid-file", "pid", "--log-file", "log", "--nbd", "socket"];
    // This returns when both outputs are closed.
    let begun = command::finish_within(&mut serve(dir, &options), LIMIT);
    assert_eq!(begun.code(), Some(0), "{begun}");
    read_from(&dir.join("socket"));
    let process = process_in(&dir.join("pid"));
    kill_process(process, Signal::TERM).expect("it runs");
    ends(process);
    for name in ["pid", "socket"] {
        assert!(!dir.join(name).exists(), "{name} is left");
    }
    assert_eq!(fs::read_dir(dir).expect("a folder").count(), 1, "the log, and nothing else");
}

#[test]
fn log_is_in_its_file_and_on_stderr_until_all_is_served() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let options = ["--log-file", "log", "--log-level", "debug", "--nbd", "socket"];
    fs::write(dir.join("log"), "before\n").expect("written");
    let said = fs::File::create(dir.join("said")).expect("made");
    let mut child = serve(dir, &options).stderr(said).spawn().expect("started");
    let there = || dir.join("socket").exists().then_some(());
    clock::poll(LIMIT, PAUSE, there).expect("it serves");
    read_from(&dir.join("socket"));
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, Signal::TERM).expect("signalled");
    assert!(command::wait(&mut child, LIMIT).expect("it stops").success());
    let (log, said) = (dir.join("log"), dir.join("said"));
    let [log, said] = [log, said].map(|file| fs::read_to_string(file).expect("there"));
    assert!(log.starts_with("before\n") && log.contains("stopping on SIGTERM"), "{log}");
    assert!(!said.contains("stopping"), "{said}");
}

/// The story: an image whose name had line breaks wrote lines of its own into the log.
#[test]
fn names_make_no_lines_of_the_log() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let forged = "\n ERROR forged\r";
    let [image, socket] = ["image", "socket"].map(|name| format!("{name}{forged}.qcow2"));
    let path = dir.join(&image).display().to_string();
    mica::run(["create", "-q", &path, "1M"]).ok();
    let said = fs::File::create(dir.join("said")).expect("made");
    let mut serve = Command::new(mica::binary());
    serve.current_dir(dir).args(["--log-level", "debug", "serve", "--export-name"]);
    serve.args([&format!("export{forged}"), "--nbd", &socket, &image]);
    let mut child = serve.stdin(Stdio::null()).stderr(said).spawn().expect("started");
    let there = || dir.join(&socket).exists().then_some(());
    clock::poll(LIMIT, PAUSE, there).expect("it serves");
    for export in [format!("export{forged}"), format!("other{forged}")] {
        let client = nbd::Connection::open(&dir.join(&socket), &export, &nbd::Wish::default());
        assert_eq!(client.is_ok(), export.starts_with("export"), "{export:?}");
    }
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, Signal::TERM).expect("signalled");
    assert!(command::wait(&mut child, LIMIT).expect("it stops").success());
    let failed = mica::run(["info", &format!("none{forged}")]);
    let said = fs::read_to_string(dir.join("said")).expect("there") + &failed.refusal();
    for name in ["serving", "image", "socket", "export", "none"] {
        assert!(said.contains(name), "{name} is not in the log:\n{said}");
    }
    assert!(!said.lines().any(|line| line.starts_with(" ERROR")), "{said}");
    assert!(!said.contains('\r'), "{said}");
}

#[test]
fn files_that_cannot_be_made_are_reported_before_anything_is_served() {
    let dir = tempfile::tempdir().expect("a folder");
    for option in ["--pid-file", "--log-file"] {
        let options = [option, "none/file", "--nbd", "socket"];
        for fork in [&["--fork"][..], &[]] {
            let mut serve = serve(dir.path(), &[&options, fork].concat());
            let said = command::finish_within(&mut serve, LIMIT).refusal();
            assert!(said.contains(option) && said.contains("none/file"), "{said}");
            assert!(!dir.path().join("socket").exists());
        }
    }
}

#[test]
fn command_finds_the_disk_and_its_exit_code_is_that_of_the_server() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let script = "test -S \"$unixsocket\" && echo \"$uri $nbd\"; exit 7";
    let mut serve = serve(dir, &["--run", script]);
    let ended = command::finish_within(serve.env("TMPDIR", dir), LIMIT);
    assert_eq!(ended.code(), Some(7), "{ended}");
    let said = &ended.stdout;
    assert!(said.starts_with("nbd+unix:///?socket=") && said.contains(" nbd:unix:"), "{ended}");
    assert_eq!(fs::read_dir(dir).expect("a folder").count(), 0, "nothing is left");
}

#[test]
fn foreign_clients_use_the_disk_of_a_command() {
    use mica_tests::tools;
    if !tools::present(&[tools::QEMU_IMG, tools::NBDINFO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let script = "nbdinfo --size \"$uri\" && qemu-img info \"$nbd\"";
    let ended = command::finish_within(&mut serve(dir.path(), &["--run", script]), LIMIT);
    assert!(ended.ok().starts_with("1048576\n"));
}

#[test]
fn command_ended_by_a_signal_is_reported_as_by_a_shell_and_one_is_not_run_without_a_disk() {
    let dir = tempfile::tempdir().expect("a folder");
    let ended = command::finish_within(&mut serve(dir.path(), &["--run", "kill -9 $$"]), LIMIT);
    assert_eq!(ended.code(), Some(137), "{ended}");
    let mut none = Command::new(mica::binary());
    none.current_dir(dir.path()).args(["serve", "--run", "touch made", "none.qcow2"]);
    let said = command::finish_within(&mut none, LIMIT).refusal();
    assert!(said.contains("none.qcow2"), "{said}");
    assert!(!dir.path().join("made").exists());
}

/// SIGTERM to the process that runs the command ends that, and the server.
#[test]
fn signal_ends_the_command_and_its_server() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let script = "echo $$ > command; exec sleep 600";
    let mut child = serve(dir, &["--pid-file", "pid", "--run", script]).spawn().expect("started");
    let begun = || fs::read_to_string(dir.join("command")).ok().filter(|text| text.ends_with('\n'));
    clock::poll(LIMIT, PAUSE, begun).expect("it runs");
    let server = process_in(&dir.join("pid"));
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, Signal::TERM).expect("signalled");
    assert_eq!(command::wait(&mut child, LIMIT).expect("it ends").code(), Some(143));
    ends(server);
    ends(process_in(&dir.join("command")));
    assert!(!dir.join("pid").exists());
}

/// The story: Ctrl-C while the server was still opening a long chain did nothing, as only the
/// command hears the terminal, and there was none yet.
#[test]
fn interrupt_before_the_command_begins_ends_it_all() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    mica::run([
        "create".as_ref(),
        "-q".as_ref(),
        dir.join("disk.qcow2").as_os_str(),
        "1M".as_ref(),
    ])
    .ok();
    let mut serve = Command::new(mica::binary());
    serve.current_dir(dir).args(["serve", "--inject", "delay=300ms", "--pid-file", "pid"]);
    let mut child = serve.args(["--run", "touch ran", "disk.qcow2"]).spawn().expect("started");
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process");
    let children = format!("/proc/{0}/task/{0}/children", child.id());
    let server = || fs::read_to_string(&children).ok()?.trim().parse().ok().and_then(Pid::from_raw);
    let server = clock::poll(LIMIT, PAUSE, server).expect("a server");
    kill_process(pid, Signal::INT).expect("signalled");
    assert_eq!(command::wait(&mut child, LIMIT).expect("it ends").code(), Some(130));
    ends(server);
    assert!(!dir.join("ran").exists() && !dir.join("pid").exists());
}

#[test]
fn server_ends_cleanly_with_its_parent() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let mut parent = Command::new("sh");
    let script = "\"$0\" serve --exit-with-parent --sandbox require --pid-file pid --nbd socket \
                  --format null 1M & exec sleep 600";
    parent.current_dir(dir).arg("-c").arg(script).arg(mica::binary());
    let mut parent = parent.stdin(Stdio::null()).spawn().expect("started");
    let there = || dir.join("pid").exists().then_some(());
    clock::poll(LIMIT, PAUSE, there).expect("it serves");
    let server = process_in(&dir.join("pid"));
    parent.kill().expect("killed");
    parent.wait().expect("ended");
    ends(server);
    assert_eq!(fs::read_dir(dir).expect("a folder").count(), 0, "it removed its files");
}
