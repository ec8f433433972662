//! Internal snapshots: what mica makes of an image is what QEMU makes of it, and each goes on with
//! what the other left.

use mica_gen::Rng;
use mica_tests::command::Finished;
use mica_tests::{mica, qemu, tools};
use serde_json::Value;
use std::fs;
use std::path::Path;

const TOOLS: &[tools::Tool] = &[tools::QEMU_IMG, tools::QEMU_IO];
const JUDGES: &[tools::Tool] = &[tools::QEMU_IMG, tools::QEMU_IO, tools::QEMU_NBD, tools::NBDINFO];

/// Who changes an image.
#[derive(Clone, Copy)]
enum Tool {
    Mica,
    Qemu,
}

fn snapshot(tool: Tool, folder: &Path, words: &[&str], image: &str) -> Finished {
    let path = folder.join(image).display().to_string();
    match tool {
        Tool::Mica => mica::run(["snapshot"].iter().chain(words).copied().chain([&*path])),
        Tool::Qemu => qemu::img(folder, ["snapshot"].iter().chain(words).copied().chain([image])),
    }
}

#[track_caller]
fn check(folder: &Path, image: &str, what: &str) {
    let said = qemu::img(folder, ["check", image]);
    assert_eq!(said.code(), Some(0), "{what}: {said}");
}

/// Ids and names of the snapshots of an image, as a tool lists them.
fn listed(tool: Tool, folder: &Path, image: &str) -> Vec<(String, String)> {
    let all = match tool {
        Tool::Mica => snapshot(tool, folder, &["-l", "--output", "json"], image).json(),
        Tool::Qemu => {
            qemu::img(folder, ["info", "--output=json", image]).json()["snapshots"].clone()
        }
    };
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let all = all.as_array().cloned().unwrap_or_default();
    all.iter().map(|one| (text(&one["id"]), text(&one["name"]))).collect()
}

/// What the disk shows, or a snapshot of it.
fn content(folder: &Path, image: &str, snapshot: Option<&str>) -> Vec<u8> {
    let mut args = vec!["convert", "-f", "qcow2", "-O", "raw"];
    if let Some(name) = snapshot {
        args.extend(["-l", name]);
    }
    args.extend([image, "content.raw"]);
    qemu::img(folder, args).ok();
    fs::read(folder.join("content.raw")).expect("read")
}

fn one_of(rng: &mut Rng, names: &[String]) -> String {
    names[usize::try_from(rng.below(names.len() as u64)).expect("few")].clone()
}

#[test]
fn image_that_mica_changes_is_the_one_that_qemu_would_make() {
    if !tools::present(TOOLS) {
        return;
    }
    for options in [
        "compat=1.1",
        "compat=0.10",
        "cluster_size=4k,refcount_bits=8",
        "cluster_size=128k,extended_l2=on",
        "lazy_refcounts=on",
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path();
        qemu::create(folder, "ours.qcow2", &["-o", options], "24M");
        fs::copy(folder.join("ours.qcow2"), folder.join("theirs.qcow2")).expect("copied");
        let mut rng = Rng::new(5);
        let mut names: Vec<String> = Vec::new();
        for step in 0..18 {
            let byte = step + 1;
            let write = format!("write -P {byte} {}k {}k", rng.below(20 << 10), 1 + rng.below(900));
            let discard = format!("discard {}M 1M", rng.below(20));
            for image in ["ours.qcow2", "theirs.qcow2"] {
                qemu::io(folder, &[], image, &[&write, &discard]);
            }
            let words = match rng.below(4) {
                0 if !names.is_empty() => vec!["-a".to_owned(), one_of(&mut rng, &names)],
                1 if names.len() > 1 => {
                    let at = usize::try_from(rng.below(names.len() as u64)).expect("few");
                    vec!["-d".to_owned(), names.remove(at)]
                }
                _ => {
                    names.push(format!("state {step}"));
                    vec!["-c".to_owned(), format!("state {step}")]
                }
            };
            let words: Vec<&str> = words.iter().map(|word| &**word).collect();
            snapshot(Tool::Mica, folder, &words, "ours.qcow2").ok();
            snapshot(Tool::Qemu, folder, &words, "theirs.qcow2").ok();
            let what = format!("{options}: {words:?}");
            check(folder, "ours.qcow2", &what);
            let ours = listed(Tool::Mica, folder, "ours.qcow2");
            assert_eq!(ours, listed(Tool::Qemu, folder, "theirs.qcow2"), "{what}");
            assert_eq!(ours, listed(Tool::Qemu, folder, "ours.qcow2"), "{what}");
            let now = content(folder, "ours.qcow2", None);
            assert!(now == content(folder, "theirs.qcow2", None), "{what}");
        }
        for name in &names {
            let ours = content(folder, "ours.qcow2", Some(name));
            assert!(ours == content(folder, "theirs.qcow2", Some(name)), "{options}: {name}");
        }
        // The other way round: QEMU takes away what mica made, and nothing is left of it.
        for name in &names {
            snapshot(Tool::Qemu, folder, &["-d", name], "ours.qcow2").ok();
            check(folder, "ours.qcow2", options);
        }
    }
}

#[test]
fn what_cannot_be_done_is_said_and_changes_nothing() {
    if !tools::present(TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path();
    qemu::create(folder, "disk.qcow2", &[], "8M");
    qemu::io(folder, &[], "disk.qcow2", &["write -P 1 0 1M"]);
    snapshot(Tool::Mica, folder, &["-c", "one"], "disk.qcow2").ok();
    let before = fs::read(folder.join("disk.qcow2")).expect("read");
    for words in [["-a", "two"], ["-d", "two"], ["-c", "one"], ["-c", "1"], ["-c", ""]] {
        snapshot(Tool::Mica, folder, &words, "disk.qcow2").refusal();
    }
    assert!(fs::read(folder.join("disk.qcow2")).expect("read") == before);
    assert_eq!(snapshot(Tool::Mica, folder, &["-c", "a", "-d", "b"], "disk.qcow2").code(), Some(1));
    qemu::create(folder, "narrow.qcow2", &["-o", "refcount_bits=1"], "8M");
    qemu::io(folder, &[], "narrow.qcow2", &["write -P 1 0 1M"]);
    let said = snapshot(Tool::Mica, folder, &["-c", "one"], "narrow.qcow2").refusal();
    assert!(said.contains("no room"), "{said}");
    check(folder, "narrow.qcow2", "refused");
    qemu::create(folder, "data.qcow2", &["-o", "data_file=data.raw"], "8M");
    let said = snapshot(Tool::Mica, folder, &["-c", "one"], "data.qcow2").refusal();
    assert!(said.contains("external"), "{said}");
    // An image that contradicts itself is left alone.
    let at = before.iter().position(|byte| *byte == 0).expect("a zero");
    assert!(at > 0);
    let mut broken = before;
    broken[0x20010..0x20012].copy_from_slice(&[0, 7]);
    fs::write(folder.join("broken.qcow2"), &broken).expect("written");
    if qemu::img(folder, ["check", "broken.qcow2"]).code() == Some(2) {
        let said = snapshot(Tool::Mica, folder, &["-d", "one"], "broken.qcow2").refusal();
        assert!(said.contains("contradicts"), "{said}");
    }
    // A person reads what QEMU would print.
    let text = snapshot(Tool::Mica, folder, &[], "disk.qcow2").ok();
    assert!(text.starts_with("Snapshot list:") && text.contains("one"), "{text}");
}

/// Bitmaps say what changed since a backup: of a disk that goes back in time they know nothing.
#[test]
fn all_of_a_disk_is_dirty_after_a_snapshot_was_applied() {
    if !tools::present(JUDGES) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path();
    qemu::create(folder, "disk.qcow2", &[], "8M");
    qemu::img(folder, ["bitmap", "--add", "disk.qcow2", "on"]).ok();
    qemu::img(folder, ["bitmap", "--add", "--disable", "disk.qcow2", "off"]).ok();
    qemu::io(folder, &[], "disk.qcow2", &["write 1M 64k"]);
    snapshot(Tool::Mica, folder, &["-c", "one"], "disk.qcow2").ok();
    let is_in_use = |at: usize| {
        let info = qemu::img(folder, ["info", "--output=json", "disk.qcow2"]).json();
        let flags = info["format-specific"]["data"]["bitmaps"][at]["flags"].to_string();
        flags.contains("in-use")
    };
    assert!(!is_in_use(0) && !is_in_use(1));
    snapshot(Tool::Mica, folder, &["-a", "one"], "disk.qcow2").ok();
    assert!(!is_in_use(0) && is_in_use(1), "only what is enabled is true");
    check(folder, "disk.qcow2", "applied");
    let server = mica_tests::server::Server::start("", |socket| {
        let mut nbd = std::process::Command::new("qemu-nbd");
        nbd.args(["-r", "-t", "-f", "qcow2", "-B", "on", "-k"]).arg(socket);
        nbd.arg(folder.join("disk.qcow2"));
        nbd
    });
    let uri = server.as_ref().expect("served").uri();
    let map = ["--map=qemu:dirty-bitmap:on", "--json", &uri];
    let map = mica_tests::command::run("nbdinfo", map).json();
    assert_eq!(map.as_array().map(Vec::len), Some(1), "{map}");
    assert_eq!((&map[0]["type"], &map[0]["length"]), (&1.into(), &(8 << 20).into()), "{map}");
}
