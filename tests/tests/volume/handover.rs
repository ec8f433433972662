//! A served volume is handed to another host, while its guest goes on.

use crate::collection::overwritten;
use mica_tests::bucket::BucketServer;
use mica_tests::guest::{Answer, Guest};
use mica_tests::server::Server;
use mica_tests::volume::{Store, run};
use mica_tests::{command, mica};
use std::process::Command;

/// A server of the volume `web` with a log and a control socket of its own.
fn serve(store: &Store, number: u8, more: &[&str]) -> anyhow::Result<Server> {
    let log = store.folder().join(format!("log{number}")).display().to_string();
    let control = control(store, number);
    let options = ["--log-device", &log, "--log-size", "64M", "--control", &control];
    store.serve("web", &[&options, more].concat())
}

fn control(store: &Store, number: u8) -> String {
    store.folder().join(format!("control{number}")).display().to_string()
}

fn ctl(store: &Store, number: u8, words: &[&str]) -> command::Finished {
    let control = control(store, number);
    let first = ["ctl", "--control", &*control, "--output", "json"];
    mica::run(first.into_iter().chain(words.iter().copied()))
}

fn own_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[test]
fn served_volume_is_handed_to_the_host_that_opens_it_without_force() {
    let store = Store::new();
    store.create("web", "64M");
    let first = serve(&store, 1, &[]).expect("served");
    let mut guest = Guest::connect(&first).expect("served");
    for block in 0..2000_u64 {
        assert_eq!(guest.write(block * 4096, &[7; 4096]).expect("written"), 0);
    }
    let refused = ctl(&store, 1, &["handover", "web", "--to", ""]).refusal();
    assert!(refused.contains("not a valid name of a host"), "{refused}");
    assert_eq!(guest.write(0, &[8; 4096]).expect("written"), 0, "it is served as before");
    let volume = ctl(&store, 1, &["status"]).json()["disks"][0]["volume"].clone();
    assert_eq!(volume["fenced"], 0, "{volume}");
    assert!(volume["log_bytes"].as_u64().expect("a number") > 32 << 20, "{volume}");
    assert!(volume["records"].as_u64().expect("a number") >= 2000, "{volume}");
    let said = mica::run(["ctl", "--control", &control(&store, 1), "status"]).ok();
    assert!(said.contains("NOT STORED") && said.contains(" of 6"), "{said}");
    let handed = ctl(&store, 1, &["handover", "web", "--to", &own_name()]).json();
    assert_eq!((&handed["disk"], &handed["handed_to"]), (&"web".into(), &own_name().into()));
    assert!(handed["pause_ms"].as_u64().expect("a number") < 5000, "{handed}");
    // The first server is alive, and has nothing of it.
    assert_eq!(ctl(&store, 1, &["status"]).json()["disks"][0]["state"], "drained");
    guest.write(0, &[9; 4096]).expect_err("its connection ended");
    let second = serve(&store, 2, &[]).expect("the heir needs no force");
    let mut guest = Guest::connect(&second).expect("served");
    assert_eq!(guest.read(0, 4096).expect("read"), Answer::Done(vec![8; 4096]));
    let last = guest.read(1999 * 4096, 4096).expect("read");
    assert_eq!(last, Answer::Done(vec![7; 4096]));
    let refused = ctl(&store, 1, &["undrain", "web"]).refusal();
    assert!(refused.contains("web"), "{refused}");
    let refused = ctl(&store, 1, &["handover", "web", "--to", "host-2"]).refusal();
    assert!(refused.contains("is not served"), "{refused}");

    // To a host that is not this one.
    drop(guest);
    ctl(&store, 2, &["handover", "web", "--to", "host-2"]).ok();
    let refused = ctl(&store, 2, &["undrain", "web"]).refusal();
    assert!(refused.contains("handed over to host-2"), "{refused}");
    let refused = format!("{:#}", serve(&store, 3, &[]).map(drop).expect_err("not ours"));
    assert!(refused.contains("handed over to host-2"), "{refused}");
    assert_eq!(first.stop().expect("it stops").status.code(), Some(0));
    assert_eq!(second.stop().expect("it stops").status.code(), Some(0));
    let third = serve(&store, 3, &["--force"]).expect("by force");
    assert_eq!(third.stop().expect("it stops").status.code(), Some(0));
    run(["check", &store.volume("web")]).ok();
}

/// The story: the store takes nothing any more, and somebody wants to move the volume away.
#[test]
fn volume_goes_on_being_served_if_the_store_does_not_take_its_writes() {
    const URL: &str = "s3://bucket/volumes/web";
    let Some(moto) = BucketServer::start() else { return };
    moto.make_bucket("bucket");
    let mut create = Command::new(mica::binary());
    let create = create.args(["volume", "create", "-q", URL, "64M"]).envs(moto.environment());
    command::finish(create).ok();
    let folder = Store::new();
    let start = |number: u8| {
        let log = folder.folder().join(format!("log{number}"));
        Server::start("", |socket| {
            let mut serve = Command::new(mica::binary());
            serve.args(["serve", "--volume", URL, "--log-size", "64M", "--log-device"]).arg(log);
            serve.args(["--control", &control(&folder, number), "--nbd"]).arg(socket);
            serve.envs(moto.environment());
            serve
        })
    };
    let first = start(1).expect("served");
    let mut guest = Guest::connect(&first).expect("served");
    assert_eq!(guest.write(0, &[1; 4096]).expect("written"), 0);
    moto.pause();
    assert_eq!(guest.write(4096, &[2; 4096]).expect("written"), 0);
    let words = ["handover", "web", "--to", "host-2", "--limit", "2"];
    let refused = ctl(&folder, 1, &words).refusal();
    assert!(refused.contains("served as before"), "{refused}");
    // The guest has noticed nothing.
    assert_eq!(guest.write(8192, &[3; 4096]).expect("written"), 0);
    assert_eq!(guest.flush().expect("flushed"), 0);
    assert_eq!(guest.read(4096, 4096).expect("read"), Answer::Done(vec![2; 4096]));
    moto.go_on();
    ctl(&folder, 1, &["handover", "web", "--to", &own_name()]).ok();
    let second = start(2).expect("the heir needs no force, while the other server lives");
    let mut guest = Guest::connect(&second).expect("served");
    assert_eq!(guest.read(8192, 4096).expect("read"), Answer::Done(vec![3; 4096]));
    drop(guest);
    assert_eq!(first.stop().expect("it stops").status.code(), Some(0));
    assert_eq!(second.stop().expect("it stops").status.code(), Some(0));
}

/// The story: the heir was mistyped, and what had been handed over could be had by force alone.
#[test]
fn hand_over_to_a_mistyped_host_is_taken_back_and_not_from_an_heir_that_has_opened_the_volume() {
    let store = Store::new();
    store.create("web", "16M");
    let url = store.volume("web");
    let nothing = run(["handover", "--cancel", &url]).refusal();
    assert!(nothing.contains("handed over to no host"), "{nothing}");
    let server = store.serve("web", &[]).expect("served");
    let served = run(["handover", "--cancel", &url]).refusal();
    assert!(served.contains("web"), "{served}");
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
    run(["handover", &url, "hots-2"]).ok();
    let refused = format!("{:#}", store.serve("web", &[]).map(drop).expect_err("not ours"));
    assert!(refused.contains("mica volume handover --cancel"), "{refused}");
    let both = run(["handover", "--cancel", &url, "host-2"]);
    assert_ne!(both.code(), Some(0), "one or the other");
    assert_ne!(run(["handover", &url]).code(), Some(0), "to whom?");
    let back = run(["handover", "--cancel", "--output", "json", &url]).json();
    assert_eq!(back["handed-to"], serde_json::Value::Null, "{back}");
    let info = run(["info", "--output", "json", &url]).json();
    assert_eq!((&info["state"], &info["handed-to"]), (&"closed".into(), &back["handed-to"]));
    let server = store.serve("web", &[]).expect("it is ours without force");
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
}

/// The story: a collection on the host that a volume was handed over to opened and closed the
/// volume, before the server that was to have it: then any host could open it.
#[test]
fn collection_and_verbs_on_the_host_of_the_heir_leave_a_volume_to_its_server() {
    let store = Store::new();
    store.create("web", "16M");
    let (url, whole) = (store.volume("web"), store.url());
    let (server, _) = overwritten(&store, 256, &["--gc", "off"]);
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
    let sparse = || {
        let would = run(["gc", "--dry-run", "--output", "json", &whole]).json();
        would["sparse-bytes"].as_u64().expect("a number")
    };
    assert!(sparse() > 0, "there is something to write again");
    run(["handover", &url, &own_name()]).ok();
    let state = || run(["info", "--output", "json", &url]).json()["state"].clone();
    assert_eq!((sparse(), state()), (0, "handed-over".into()));
    run(["gc", "--compact", &whole]).ok();
    assert_eq!(state(), "handed-over");
    for words in [&["snapshot", &url, "now"][..], &["keep", &url, "1s/1s"], &["delete", &url]] {
        let refused = run(words.iter().copied()).refusal();
        assert!(refused.contains("handed over to"), "{words:?}: {refused}");
        assert!(refused.contains("--force"), "{words:?}: {refused}");
        assert_eq!(refused.trim_end().lines().count(), 1, "{words:?}: {refused}");
    }
    assert_eq!(state(), "handed-over");
    let server = store.serve("web", &[]).expect("the heir needs no force");
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
    run(["gc", &whole]).ok();
    assert_eq!((sparse(), state()), (0, "closed".into()));
    run(["scrub", &whole]).ok();
}
