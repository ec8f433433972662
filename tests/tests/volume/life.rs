//! The life of a volume, from its creation to its deletion.

use mica_tests::guest::{Answer, Guest, Request};
use mica_tests::server::Server;
use mica_tests::volume::{Store, run};
use mica_tests::{clock, command, mica, nbd, tools};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// What has to be installed.
const TOOLS: &[tools::Tool] = &[tools::NBDCOPY, tools::QEMU_IO, tools::QEMU_IMG];

#[track_caller]
fn stop(server: Server) {
    let stopped = server.stop().expect("it stops");
    assert_eq!(stopped.status.code(), Some(0), "{stopped:?}");
}

/// Copies what is served into a file, by libnbd.
#[track_caller]
pub(super) fn copied(server: &Server, file: &Path) -> Vec<u8> {
    command::run("nbdcopy", [&*server.uri(), &file.display().to_string()]).ok();
    fs::read(file).expect("copied")
}

#[track_caller]
fn io(server: &Server, commands: &[&str]) {
    let mut words = vec!["-f", "raw"];
    if commands.iter().all(|command| command.starts_with("read")) {
        words.push("-r");
    }
    commands.iter().for_each(|command| words.extend(["-c", command]));
    let uri = server.uri();
    words.push(&uri);
    let said = command::run("qemu-io", words).ok();
    assert!(!said.contains("failed"), "{said}");
}

/// The story: a server that could not serve its volume left an empty log.
#[test]
fn start_that_is_refused_leaves_no_log_that_it_made() {
    let store = Store::new();
    store.create("web", "16M");
    let server = store.serve("web", &[]).expect("served");
    let at = |name: &str| store.folder().join(name);
    let serve = |sandbox: &str, log: &Path, volume: &str| {
        let (log, socket) = (log.display().to_string(), at("refused").display().to_string());
        let volume = store.volume(volume);
        let options = ["--volume", &volume, "--log-device", &log, "--sandbox", sandbox, "--nbd"];
        mica::run(["serve"].iter().chain(&options).copied().chain([&*socket])).refusal()
    };
    for sandbox in ["on", "off"] {
        for volume in ["web", "missing"] {
            let refused = serve(sandbox, &at("log"), volume);
            assert!(!at("log").exists(), "{sandbox}: {refused}");
            // What was there before stays.
            fs::write(at("old"), "").expect("made");
            serve(sandbox, &at("old"), volume);
            assert!(at("old").exists(), "{sandbox}");
        }
    }
    stop(server);
    let (log, mut started) = (at("log"), Vec::new());
    for _ in 0..2 {
        let server = store.serve("web", &["--log-device", &log.display().to_string()]);
        stop(server.expect("served"));
        started.push(fs::metadata(&log).expect("it stays").len());
    }
    assert!(started[0] > 0 && started[0] == started[1], "{started:?}");
}

#[test]
fn volume_is_created_served_listed_checked_and_deleted() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    let made = run(["create", "--output", "json", &store.volume("web"), "64M"]).json();
    assert_eq!(made["virtual-size"], 64 << 20);
    let server = store.serve("web", &[]).expect("served");
    io(&server, &["write -P 7 1M 3M", "write -z 2M 64k", "write -P 8 63M 1M", "flush"]);
    let listed = run(["list", &store.url(), "--output", "json"]).json();
    assert_eq!((&listed[0]["name"], &listed[0]["state"]), (&"web".into(), &"open".into()));
    let open = run(["delete", &store.volume("web")]).refusal();
    assert!(open.contains("is open"), "{open}");
    stop(server);

    let server = store.serve("web", &["--read-only"]).expect("served");
    io(&server, &["read -P 7 1M 1M", "read -P 0 2M 64k", "read -P 8 63M 1M", "read -P 0 8M 1M"]);
    let bytes = copied(&server, &store.folder().join("copy.raw"));
    assert_eq!(bytes.len(), 64 << 20);
    stop(server);

    let info = run(["info", &store.volume("web"), "--output", "json"]).json();
    assert_eq!((&info["state"], &info["open-on"]), (&"closed".into(), &Value::Null));
    let checked = run(["check", &store.volume("web"), "--output", "json"]).json();
    assert_eq!(checked[0]["damaged-count"], 0);
    let blocks = checked[0]["data-bytes"].as_u64().expect("a number");
    assert_eq!(blocks, (4 << 20) - (64 << 10), "zeros take no space");
    run(["check", &store.url()]).ok();
    run(["delete", &store.volume("web")]).ok();
    assert_eq!(run(["list", &store.url(), "--output", "json"]).json(), serde_json::json!([]));
    assert!(store.serve("web", &[]).is_err());
}

/// The story: a bit flips in the folder of the store.
#[test]
fn damage_is_named_by_check_and_by_its_exit_code() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "16M");
    let server = store.serve("web", &[]).expect("served");
    io(&server, &["write -P 7 0 1M", "flush"]);
    stop(server);
    let extents = store.folder().join("store/extents");
    let writer = fs::read_dir(extents).expect("there").next().expect("a writer").expect("read");
    let extent = fs::read_dir(writer.path()).expect("there");
    let extent = extent.map(|entry| entry.expect("read").path()).min().expect("an extent");
    let mut bytes = fs::read(&extent).expect("read");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&extent, bytes).expect("written");
    let checked = run(["check", &store.volume("web")]);
    assert_eq!(checked.code(), Some(2), "{checked}");
    assert!(checked.stderr.contains("of the disk"), "{checked}");
}

#[test]
fn volume_is_added_drained_and_reported_like_an_image() {
    let store = Store::new();
    store.create("web", "1G");
    store.create("db", "2G");
    let control = store.folder().join("control");
    let folder = store.folder().display().to_string();
    let control_option = control.display().to_string();
    let more = ["--control", &control_option, "--disks-in", &folder];
    let server = store.serve("web", &more).expect("served");
    let ctl = |words: &[&str]| {
        mica::run([&["ctl", "--control", &control_option, "--output", "json"], words].concat())
    };
    let socket = store.folder().join("db.sock").display().to_string();
    ctl(&["add", "--volume", &store.volume("db"), "--nbd", &socket]).json();
    let connect = || nbd::Connection::open(Path::new(&socket), "", &nbd::Wish::default());
    let mut guest = Guest::on(connect().expect("served"));
    assert_eq!(guest.write(4096, &[9; 4096]).expect("written"), 0);
    let status = ctl(&["status"]).json();
    let disks = status["disks"].as_array().expect("disks");
    let told = |key: &str| disks.iter().map(|disk| disk[key].clone()).collect::<Vec<_>>();
    assert_eq!(told("name"), ["web", "db"]);
    assert_eq!(told("format"), ["volume", "volume"]);
    assert_eq!(told("image"), [store.volume("web"), store.volume("db")]);
    assert_eq!(told("length"), [1 << 30, 2_u64 << 30]);
    ctl(&["drain", "db"]).json();
    let info = run(["info", &store.volume("db"), "--output", "json"]).json();
    assert_eq!(info["state"], "closed");
    ctl(&["undrain", "db"]).json();
    let mut client = connect().expect("served");
    assert_eq!(client.read(4096, 4096).expect("read"), [9; 4096]);
    ctl(&["resize", "db", "3G"]).json();
    stop(server);
    let info = run(["info", &store.volume("db"), "--output", "json"]).json();
    assert_eq!((&info["state"], &info["virtual-size"]), (&"closed".into(), &(3_u64 << 30).into()));
}

#[test]
fn server_takes_over_from_another_with_its_volume() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "64M");
    let control = store.folder().join("control").display().to_string();
    let first = store.serve("web", &["--control", &control]).expect("served");
    io(&first, &["write -P 1 0 1M", "write -P 2 9M 1M"]);
    let socket = first.socket().display().to_string();
    let mut second = std::process::Command::new(mica::binary());
    let url = store.volume("web");
    second.args(["serve", "--takeover", "--fork", "--control", &control, "--nbd", &socket]);
    let taken = command::finish(second.args(["--volume", &url]));
    assert_eq!(taken.code(), Some(0), "{taken}");
    io(&first, &["read -P 1 0 1M", "read -P 2 9M 1M", "write -P 3 0 4k", "flush"]);
    let drained = mica::run(["ctl", "--control", &control, "drain"]);
    assert_eq!(drained.code(), Some(0), "{drained}");
    let info = run(["info", &url, "--output", "json"]).json();
    assert_eq!(info["state"], "closed");
}

/// Sparse from birth to the end of what a volume can have: a trim is one record, whatever it
/// covers.
#[test]
fn volume_of_256_tebibytes_is_written_and_trimmed_at_both_ends() {
    const END: u64 = 1 << 48;
    const TRIM: u32 = 1 << 31;
    let store = Store::new();
    store.create("large", "256T");
    let server = store.serve("large", &[]).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!(guest.len(), END);
    for at in [0, END / 2, END - 4096] {
        assert_eq!(guest.write(at, &[1; 4096]).expect("written"), 0);
    }
    let trims = (0..512).map(|number| number * u64::from(TRIM));
    for offset in trims.chain([END - u64::from(TRIM)]) {
        let trim = Request::Trim { offset, len: TRIM, fua: false };
        assert_eq!(guest.ask(&trim).expect("answered").errno(), 0);
    }
    assert_eq!(guest.flush().expect("flushed"), 0);
    for (at, byte) in [(0, 0), (END / 2, 1), (END - 4096, 0)] {
        assert_eq!(guest.read(at, 4096).expect("read"), Answer::Done(vec![byte; 4096]), "{at}");
    }
    drop(guest);
    stop(server);
    let checked = run(["check", &store.volume("large"), "--output", "json"]).json();
    assert_eq!(
        (&checked[0]["damaged-count"], &checked[0]["data-bytes"]),
        (&0.into(), &4096.into())
    );
}

#[test]
fn volume_that_was_handed_to_another_host_is_left_to_it() {
    let store = Store::new();
    store.create("web", "64M");
    let url = store.volume("web");
    let server = store.serve("web", &[]).expect("served");
    assert_ne!(run(["handover", &url, "host-2"]).code(), Some(0), "it is served");
    stop(server);
    run(["handover", &url, "host-2"]).ok();
    let refused = format!("{:#}", store.serve("web", &[]).map(drop).expect_err("not ours"));
    assert!(refused.contains("host-2"), "{refused}");
    stop(store.serve("web", &["--force"]).expect("by force"));
}

/// The story: timeout(1) signals its child and then its whole group, of which the child is one. The
/// server took the second signal for impatience, and gave up what it had acknowledged.
#[test]
fn signal_that_comes_twice_at_once_is_one() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "64M");
    let slow = ["--inject", "delay=300ms,op=put", "--log-level", "info"];
    let server = store.serve("web", &slow).expect("served");
    let mut guest = Guest::connect(&server).expect("connected");
    let write = Request::Write { offset: 0, bytes: vec![7; 64 << 10], fua: false };
    assert_eq!(guest.ask(&write).expect("an answer").errno(), 0);
    let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, Signal::TERM).expect("signalled");
    // Two that wait at one time are one for the system; this one comes when the first was heard.
    let (limit, pause) = (Duration::from_secs(10), Duration::from_millis(5));
    let heard = || server.log().contains("stopping on SIGTERM").then_some(());
    clock::poll(limit, pause, heard).expect("it was heard");
    kill_process(pid, Signal::TERM).expect("signalled");
    drop(guest);
    stop(server);
    let server = store.serve("web", &["--read-only"]).expect("served");
    io(&server, &["read -P 7 0 64k"]);
    stop(server);
}

#[test]
fn export_of_an_nbd_server_becomes_a_volume() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::QEMU_NBD]) {
        return;
    }
    let store = Store::new();
    let file = store.folder().join("disk.raw");
    fs::write(&file, vec![0; 8 << 20]).expect("made");
    let path = file.display().to_string();
    command::run("qemu-io", ["-f", "raw", "-c", "write -P 7 1M 3M", &path]).ok();
    let server = Server::start("gold", |socket| {
        let mut nbd = std::process::Command::new("qemu-nbd");
        nbd.args(["-r", "-t", "-f", "raw", "-x", "gold", "-k"]).arg(socket).arg(&file);
        nbd
    });
    let server = server.expect("served");
    let uri = format!("nbd+unix:///gold?socket={}", server.socket().display());
    let made = run(["import", "--output", "json", &uri, &store.volume("web")]).json();
    assert_eq!(made["virtual-size"], 8 << 20);
    assert_eq!(made["snapshots"], serde_json::json!(["gold"]));
    let copy = store.folder().join("copy.raw").display().to_string();
    run(["export", "-O", "raw", &store.volume("web@gold"), &copy]).ok();
    assert!(fs::read(&copy).expect("copied") == fs::read(&file).expect("there"));
    let refused = run(["import", "-f", "qcow2", &uri, &store.volume("db")]).refusal();
    assert!(refused.contains("an NBD export is raw"), "{refused}");
    let gone = format!("{uri}-2");
    run(["import", &gone, &store.volume("db")]).refusal();
    assert!(run(["info", &store.volume("db")]).status.code() == Some(1), "nothing is left of it");
}
