//! Snapshots that are sent into another store, judged by what is exported there.

use mica_tests::volume::{Store, run};
use mica_tests::{command, mica, qemu, tools};
use std::fs;
use std::path::Path;

/// Writes `byte` into a part of a volume that nobody has open.
fn write(dir: &Path, store: &Store, name: &str, byte: u8, offset: &str, kib: usize) {
    let content = dir.join("content");
    fs::write(&content, vec![byte; kib << 10]).expect("written");
    let server = store.serve(name, &[]).expect("served");
    let command = format!("write -s {} {offset} {kib}k", content.display());
    qemu::io(dir, &["-f", "raw"], &server.uri(), &[&command]);
    server.stop().expect("stopped");
}

#[track_caller]
fn same(dir: &Path, a: &str, b: &str) {
    let [left, right] = [dir.join("left.raw"), dir.join("right.raw")];
    for (url, file) in [(a, &left), (b, &right)] {
        run(["export", "-q", "-O", "raw", url, &file.display().to_string()]).ok();
    }
    let [left_bytes, right_bytes] = [left, right].map(|file| {
        let bytes = fs::read(&file).expect("an image");
        fs::remove_file(file).expect("removed");
        bytes
    });
    assert!(left_bytes == right_bytes, "{a} and {b} differ");
}

#[test]
fn steps_through_a_pipe_and_through_files_make_the_same_volume() {
    if !tools::present(&[tools::QEMU_IO]) {
        return;
    }
    let [from, to] = [Store::new(), Store::new()];
    let dir = from.folder();
    from.create("web", "64M");
    let (web, copy) = (from.volume("web"), to.volume("copy"));
    for (index, label) in ["monday", "tuesday", "wednesday"].iter().enumerate() {
        let byte = u8::try_from(index + 1).expect("small");
        write(dir, &from, "web", byte, &format!("{}M", 10 * index), 3000);
        run(["snapshot", "-q", &web, label]).ok();
    }
    let file = dir.join("web.stream").display().to_string();
    let monday = format!("{web}@monday");
    let sent = run(["send", "--output", "json", &monday, &file]).json();
    assert_eq!(sent[0]["label"], "monday");
    assert_eq!(sent[0]["since"], serde_json::Value::Null);
    let refused = run(["send", &monday, &file]).refusal();
    assert!(refused.contains("exists"), "{refused}");
    let received = run(["receive", "--output", "json", &copy, &file]).json();
    assert_eq!(
        (&received[0]["label"], &received[0]["was-there"]),
        (&"monday".into(), &false.into())
    );
    same(dir, &web.replace("/web", "/web@monday"), &copy);
    let program = mica::binary();
    let pipe = format!(
        "{0} volume send {web}@wednesday --since monday --each | {0} volume receive {copy}",
        program.display()
    );
    let said = command::run("sh", ["-c", &pipe]).ok();
    assert!(said.contains("@tuesday: received") && said.contains("@wednesday: received"), "{said}");
    for label in ["monday", "tuesday", "wednesday"] {
        same(dir, &format!("{web}@{label}"), &format!("{copy}@{label}"));
    }
    let listed = |url: &str| run(["snapshots", url, "--output", "json"]).json();
    let (here, there) = (listed(&web), listed(&copy));
    for (here, there) in here.as_array().into_iter().zip(there.as_array()) {
        assert_eq!(here.len(), there.len());
        for (here, there) in here.iter().zip(there) {
            assert_eq!((&here["label"], &here["time"]), (&there["label"], &there["time"]));
        }
    }
    // The same again: nothing is to be done.
    let said = command::run("sh", ["-c", &pipe]).ok();
    assert!(said.contains("was there already"), "{said}");
    run(["check", &to.url()]).ok();
}

#[test]
fn stream_that_is_cut_off_or_does_not_fit_leaves_the_volume_as_it_was() {
    if !tools::present(&[tools::QEMU_IO]) {
        return;
    }
    let [from, to] = [Store::new(), Store::new()];
    let dir = from.folder();
    from.create("web", "16M");
    let (web, copy) = (from.volume("web"), to.volume("copy"));
    run(["snapshot", "-q", &web, "a"]).ok();
    write(dir, &from, "web", 7, "1M", 5000);
    run(["snapshot", "-q", &web, "b"]).ok();
    let [whole, step, cut] = ["whole", "step", "cut"].map(|name| dir.join(name));
    let text = |path: &Path| path.display().to_string();
    run(["send", "-q", &format!("{web}@a"), &text(&whole)]).ok();
    run(["send", "-q", "--since", "a", &format!("{web}@b"), &text(&step)]).ok();
    let refused = run(["receive", &copy, &text(&step)]).refusal();
    assert!(refused.contains("receive that one first"), "{refused}");
    run(["receive", "-q", &copy, &text(&whole)]).ok();
    let bytes = fs::read(&step).expect("a stream");
    fs::write(&cut, &bytes[..bytes.len() / 2]).expect("written");
    let refused = run(["receive", &copy, &text(&cut)]).refusal();
    assert!(refused.contains("ends too early"), "{refused}");
    same(dir, &format!("{web}@a"), &copy);
    write(dir, &to, "copy", 9, "2M", 4);
    let refused = run(["receive", &copy, &text(&step)]).refusal();
    assert!(refused.contains("--force"), "{refused}");
    run(["receive", "-q", "--force", &copy, &text(&step)]).ok();
    same(dir, &format!("{web}@b"), &copy);
    let refused = run(["receive", &copy, &text(&whole).replace("whole", "content")]).refusal();
    assert!(refused.contains("not a stream of a volume"), "{refused}");
}
