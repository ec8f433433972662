//! Stores that misbehave because the user wants it.

use mica_tests::mounts::Mount;
use mica_tests::volume::{Store, run};
use mica_tests::{command, mica, tools};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

const TOOLS: &[tools::Tool] = &[tools::QEMU_IO, tools::QEMU_IMG];

#[test]
fn store_that_is_slow_fails_and_loses_answers_costs_nothing_but_time() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "16M");
    let faults = [
        "delay=5ms",
        "error=10%,op=put,seed=2",
        "lost=20%,op=put,seed=3",
        "slow=20%,by=50ms,seed=4",
    ];
    let options: Vec<_> = faults.iter().flat_map(|fault| ["--inject", *fault]).collect();
    let server = store.serve("web", &options).expect("served");
    let uri = server.uri();
    let io = |acts: &[&str]| {
        let acts = acts.iter().flat_map(|act| ["-c", *act]);
        command::run("qemu-io", ["-f", "raw"].into_iter().chain(acts).chain([&*uri])).ok();
    };
    for round in 1..=8 {
        let write = format!("write -P {round} {round}M 1M");
        let read = format!("read -P {round} {round}M 1M");
        io(&[&write, "flush", &read]);
    }
    let stopped = server.stop().expect("stopped");
    assert!(stopped.status.success(), "{}", stopped.log);
    let server = store.serve("web", &["--read-only"]).expect("served");
    for round in 1..=8 {
        let read = format!("read -P {round} {round}M 1M");
        command::run("qemu-io", ["-r", "-f", "raw", "-c", &read, &server.uri()]).ok();
    }
}

/// The story: the server of a folder hung, and a server that was to serve a volume there said
/// nothing for as long as somebody waited, and did not end when it was told to.
#[test]
fn server_says_that_it_waits_for_a_folder_that_hangs_and_ends_when_it_is_told_to() {
    let store = Store::new();
    store.create("web", "16M");
    let socket = store.folder().join("socket");
    let mut serve = Command::new(mica::binary());
    serve.args(["serve", "--inject", "hang=100%", "--volume", &store.volume("web"), "--nbd"]);
    let mut serve = serve.arg(&socket).stderr(Stdio::piped()).spawn().expect("started");
    let mut said = String::new();
    let mut stderr = BufReader::new(serve.stderr.take().expect("piped"));
    stderr.read_line(&mut said).expect("a line");
    let is_running = serve.try_wait().expect("known").is_none();
    assert!(is_running, "{said}");
    let waits = format!("volume web is not open after 10 s: still waiting for {}", store.url());
    assert!(said.contains(&waits), "{said}");
    kill_process(Pid::from_child(&serve), Signal::TERM).expect("it runs");
    // It ends, or this test does not.
    stderr.read_to_string(&mut said).expect("lines");
    assert_eq!(serve.wait().expect("ended").code(), Some(1), "{said}");
    assert!(said.contains("not all disks were open"), "{said}");
}

#[test]
fn fault_that_no_store_has_is_refused_with_those_that_it_may_have() {
    let store = Store::new();
    store.create("web", "16M");
    let (url, socket) = (store.volume("web"), store.folder().join("socket"));
    let socket = socket.display().to_string();
    for fault in ["delay=5", "error=nth:3", "redo-memory=16K"] {
        let words = ["serve", "--nbd", &socket, "--volume", &url, "--inject", fault];
        let refused = mica::run(words).refusal();
        assert!(refused.contains(fault) && refused.contains("delay=TIME"), "{refused}");
    }
}

/// The story: five lines said what the parts of the program saw, and none what to do.
#[test]
fn import_into_a_store_that_is_full_says_in_one_line_what_to_do() {
    let store = Store::new();
    let Ok(mount) = Mount::memory(&store.folder().join("small"), 8) else {
        eprintln!("skipped: no file system can be mounted");
        return;
    };
    let image = store.folder().join("image");
    let mut rng = mica_gen::Rng::new(3);
    let bytes: Vec<_> = (0..2_u64 << 20).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
    std::fs::write(&image, bytes).expect("written");
    let url = format!("file://{}/store", mount.folder().display());
    let (volume, image) = (format!("{url}/web"), image.display().to_string());
    let refused = run(["import", "-q", "-f", "raw", &image, &volume]).refusal();
    for part in [&*format!("{volume} was not imported"), "is full", "mica volume gc"] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
    let listed = run(["list", "--output", "json", &url]).json();
    assert_eq!(listed.as_array().map(Vec::len), Some(0), "{listed}");
    mount.unmount();
}
