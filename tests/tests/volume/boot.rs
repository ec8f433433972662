//! A clone in a store that is far serves at once, and the next boot of its image has what the last
//! one read.

use mica_tests::server::Server;
use mica_tests::volume::{Store, run};
use mica_tests::{command, mica, nbd, tools};
use serde_json::Value;

const BOOTS: &[&str] = &["--inject", "delay=20ms", "--boot-fetch", "32M"];

/// A gold image of 16 MiB, each MiB with a byte of its own.
fn gold(store: &Store) {
    store.create("gold", "16M");
    let server = store.serve("gold", &[]).expect("served");
    let writes: Vec<_> =
        (0..16).map(|mib| format!("write -P {} {mib}M 1M", mib + 1)).collect::<Vec<_>>();
    let acts = writes.iter().flat_map(|act| ["-c", act]);
    command::run("qemu-io", ["-f", "raw"].into_iter().chain(acts).chain([&*server.uri()])).ok();
    assert!(server.stop().expect("stopped").status.success());
    run(["snapshot", "-q", &store.volume("gold"), "v1"]).ok();
}

fn clone(store: &Store, name: &str) {
    run(["clone", "-q", &store.volume("gold@v1"), &store.volume(name)]).ok();
}

/// What a boot reads: pieces here and there.
fn boot(server: &Server) {
    let mut connection = server.connect(&nbd::Wish::default()).expect("connected");
    for piece in 0_u64..24 {
        let at = (piece * 7 % 16) * (1 << 20) + piece * 20_480;
        let read = connection.read(at, 12_288).expect("read");
        let byte = u8::try_from(at >> 20).expect("small") + 1;
        assert!(read.iter().all(|it| *it == byte), "piece {piece}");
    }
    connection.disconnect().expect("disconnected");
}

fn info(store: &Store, name: &str) -> Value {
    let said = run(["info", "--output", "json", &store.volume(name)]).ok();
    serde_json::from_str(&said).expect("JSON")
}

#[test]
fn clone_in_a_far_store_serves_at_once_and_the_next_boot_is_fetched_ahead() {
    if !tools::present(&[tools::QEMU_IO]) {
        return;
    }
    let store = Store::new();
    gold(&store);
    clone(&store, "first");
    assert_eq!(info(&store, "first")["boot-record"], Value::Null);
    let server = store.serve("first", BOOTS).expect("served");
    boot(&server);
    assert!(server.stop().expect("stopped").status.success());
    let record = info(&store, "first")["boot-record"].clone();
    let bytes = record["bytes"].as_u64().expect("it has a record");
    assert!(bytes >= 24 * 12_288 && record["boots"] == 1, "{record}");
    assert_eq!(info(&store, "gold")["boot-record"], record, "one for the image");
    clone(&store, "second");
    let control = store.folder().join("control").display().to_string();
    let more = [BOOTS, &["--control", &control]].concat();
    let server = store.serve("second", &more).expect("served");
    boot(&server);
    let said = mica::run(["ctl", "--control", &control, "stats", "--output", "json"]).ok();
    let stats: Value = serde_json::from_str(&said).expect("JSON");
    let figure = |name: &str| find(&stats, name).unwrap_or_else(|| panic!("{name}: {stats}"));
    assert_eq!(figure("boot_record_bytes"), bytes);
    assert!(figure("boot_served_bytes") > 0, "{stats}");
    assert!(figure("boot_fetched_bytes") <= 32 << 20, "{stats}");
    assert!(server.stop().expect("stopped").status.success());
    for name in ["gold", "first", "second"] {
        run(["delete", "-q", &store.volume(name)]).ok();
    }
    let said = run(["gc", "--output", "json", &store.url()]).ok();
    let collected: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(collected["freed-boot-records"], 1, "{collected}");
}

/// A number of this name, wherever it is.
fn find(value: &Value, name: &str) -> Option<u64> {
    match value {
        Value::Object(all) => match all.get(name).and_then(Value::as_u64) {
            Some(found) => Some(found),
            None => all.values().find_map(|inner| find(inner, name)),
        },
        Value::Array(all) => all.iter().find_map(|inner| find(inner, name)),
        _ => None,
    }
}
