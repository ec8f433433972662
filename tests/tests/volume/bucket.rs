//! Volumes in a bucket.

use mica_tests::bucket::BucketServer;
use mica_tests::command::{self, Finished};
use mica_tests::guest::Guest;
use mica_tests::server::Server;
use mica_tests::{clock, mica, nbd};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::Duration;

const URL: &str = "s3://bucket/volumes/web";

fn run(server: &BucketServer, words: &[&str]) -> Finished {
    let mut mica = Command::new(mica::binary());
    command::finish(mica.arg("volume").args(words).envs(server.environment()))
}

fn serve(server: &BucketServer, more: &[&str]) -> anyhow::Result<Server> {
    Server::start("", |socket| {
        let mut serve = Command::new(mica::binary());
        serve.args(["serve", "--volume", URL]).args(more).arg("--nbd").arg(socket);
        serve.envs(server.environment());
        serve
    })
}

#[test]
fn volume_in_a_bucket_is_served_from_inside_the_sandbox() {
    let Some(moto) = BucketServer::start() else { return };
    moto.make_bucket("bucket");
    run(&moto, &["create", URL, "1G"]).ok();
    let server = serve(&moto, &["--sandbox", "require"]).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!(guest.write(1 << 20, &[7; 1 << 20]).expect("written"), 0);
    assert_eq!(guest.flush().expect("flushed"), 0);
    drop(guest);
    let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, Signal::KILL).expect("killed");
    drop(server);

    let server = serve(&moto, &["--sandbox", "require"]).expect("served without --force");
    let refused = serve(&moto, &[]).map(drop).expect_err("it is alive");
    assert!(format!("{refused:#}").contains("--force takes it over"), "{refused:#}");
    let mut client = server.connect(&nbd::Wish::default()).expect("served");
    assert_eq!(client.read(1 << 20, 1 << 20).expect("read"), vec![7; 1 << 20]);
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));

    let listed = run(&moto, &["list", "s3://bucket/volumes", "--output", "json"]).json();
    assert_eq!((&listed[0]["url"], &listed[0]["state"]), (&URL.into(), &"closed".into()));
    let checked = run(&moto, &["check", URL, "--output", "json"]).json();
    assert_eq!(checked[0]["damaged-count"], 0);
    run(&moto, &["delete", URL]).ok();
}

/// Every other piece of 64 KiB is overwritten.
fn make_sparse(server: &BucketServer) {
    const PIECE: usize = 64 << 10;
    let served = serve(server, &[]).expect("served");
    let mut guest = Guest::connect(&served).expect("served");
    for (byte, step) in [(1, 1), (2, 2)] {
        for at in (0..48_u64 << 20).step_by(PIECE * step) {
            assert_eq!(guest.write(at, &[byte; PIECE]).expect("written"), 0);
        }
        assert_eq!(guest.flush().expect("flushed"), 0);
    }
    drop(guest);
    assert_eq!(served.stop().expect("it stops").status.code(), Some(0));
}

/// The story: a collection that compacts was killed, and no other compacted the volume before
/// somebody served it. One that lives is left alone, however slow it is.
#[test]
fn collection_in_a_bucket_goes_on_with_what_a_killed_one_had_open() {
    let Some(moto) = BucketServer::start() else { return };
    moto.make_bucket("bucket");
    run(&moto, &["create", URL, "64M"]).ok();
    let compact = ["gc", "--compact", "--output", "json", "s3://bucket/volumes"];
    let is_open = || run(&moto, &["info", "--output", "json", URL]).json()["state"] == "open";
    let caught = (0..5).find_map(|_| {
        make_sparse(&moto);
        let mut gc = Command::new(mica::binary());
        gc.arg("volume").args(compact).envs(moto.environment());
        let mut gc = gc.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("started");
        while !is_open() && gc.try_wait().expect("known").is_none() {}
        // An error means that it has ended.
        let _ = kill_process(Pid::from_child(&gc), Signal::STOP);
        if is_open() {
            return Some(gc);
        }
        let _ = kill_process(Pid::from_child(&gc), Signal::CONT);
        gc.wait().expect("ended");
        None
    });
    let mut gc = caught.expect("one is caught in the middle");
    run(&moto, &compact).ok();
    assert!(is_open(), "it lives");
    gc.kill().expect("killed");
    gc.wait().expect("ended");
    let report = run(&moto, &compact).json();
    assert!(report["freed-bytes"].as_u64() > Some(16 << 20), "{report}");
    assert!(!is_open());
    run(&moto, &["scrub", "s3://bucket/volumes"]).ok();
}

/// The story: what answers at the endpoint took connections and said nothing, and neither did the
/// verb.
#[test]
fn verb_says_that_it_waits_for_a_service_that_hangs() {
    let hanging = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("http://{}", hanging.local_addr().expect("bound"));
    for words in [&["list", "s3://bucket/volumes"][..], &["create", URL, "1G"], &["info", URL]] {
        let mut mica = Command::new(mica::binary());
        mica.arg("volume").args(words).stdout(Stdio::null()).stderr(Stdio::piped());
        mica.env("AWS_ENDPOINT_URL", &endpoint).env("AWS_ACCESS_KEY_ID", "test");
        let mut verb = mica.env("AWS_SECRET_ACCESS_KEY", "test").spawn().expect("started");
        let mut said = String::new();
        let stderr = verb.stderr.take().expect("piped");
        BufReader::new(stderr).read_line(&mut said).expect("a line");
        let is_running = verb.try_wait().expect("known").is_none();
        verb.kill().expect("killed");
        verb.wait().expect("ended");
        assert!(is_running, "{words:?}: {said}");
        assert!(said.contains("waiting for s3://bucket/volumes"), "{words:?}: {said}");
        assert!(said.contains("no answer for 3 s") && said.contains("60 s"), "{words:?}: {said}");
    }
}

/// The story: the service was down, and a server did not end on SIGTERM.
#[test]
fn server_with_a_log_ends_soon_while_the_bucket_is_away() {
    let Some(moto) = BucketServer::start() else { return };
    moto.make_bucket("bucket");
    run(&moto, &["create", URL, "1G"]).ok();
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log").display().to_string();
    let with_log = ["--log-device", &*log, "--log-size", "64M"];
    let server = serve(&moto, &with_log).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!(guest.write(0, &[7; 4096]).expect("written"), 0);
    let info = run(&moto, &["info", URL, "--output", "json"]).json();
    assert_eq!(info["log"], log);
    let read = run(&moto, &["diff", URL, URL]);
    assert!(read.stderr.contains(&log) && read.stderr.contains("may be older"), "{read}");
    moto.pause();
    assert_eq!(guest.write(8192, &[8; 4096]).expect("written"), 0);
    assert_eq!(guest.flush().expect("it is in the log"), 0);
    drop(guest);
    let begun = clock::now();
    let stopped = server.stop().expect("it stops");
    assert_eq!(stopped.status.code(), Some(0), "{stopped:?}");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    assert!(stopped.log.contains("the log has them"), "{stopped:?}");
    moto.go_on();
    let server = serve(&moto, &with_log).expect("served, without --force");
    let mut client = server.connect(&nbd::Wish::default()).expect("served");
    assert_eq!(client.read(0, 4096).expect("read"), [7; 4096]);
    assert_eq!(client.read(8192, 4096).expect("read"), [8; 4096]);
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
}

#[test]
fn second_signal_ends_a_server_whose_bucket_is_away_and_says_what_is_lost() {
    let Some(moto) = BucketServer::start() else { return };
    moto.make_bucket("bucket");
    run(&moto, &["create", URL, "1G"]).ok();
    let server = serve(&moto, &[]).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    moto.pause();
    assert_eq!(guest.write(0, &[7; 4096]).expect("written"), 0);
    drop(guest);
    let begun = clock::now();
    let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, Signal::TERM).expect("signalled");
    clock::sleep(Duration::from_millis(2500));
    let stopped = server.stop().expect("it stops");
    assert_eq!(stopped.status.code(), Some(1), "{stopped:?}");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    assert!(stopped.log.contains("they are lost"), "{stopped:?}");
}

#[test]
fn wrong_places_and_dead_services_are_named_in_one_line() {
    let mut bare = Command::new(mica::binary());
    for name in ["AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3"] {
        bare.env_remove(name);
    }
    let nowhere = command::finish(bare.args(["volume", "info", URL])).refusal();
    assert!(nowhere.contains("AWS_ENDPOINT_URL"), "{nowhere}");
    let Some(moto) = BucketServer::start() else { return };
    let missing = run(&moto, &["create", "s3://missing/web", "1G"]).refusal();
    assert!(missing.contains("s3://missing") && missing.contains("no such bucket"), "{missing}");
    let environment = moto.environment();
    drop(moto);
    let mut info = Command::new(mica::binary());
    let dead = command::finish(info.args(["volume", "info", URL]).envs(environment));
    assert_eq!(dead.code(), Some(1), "{dead}");
    // Before that it says that it tries again.
    let last = dead.stderr.lines().last().expect("a line");
    assert!(last.starts_with("mica: ") && last.contains("s3://bucket"), "{dead}");
}
