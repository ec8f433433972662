//! `mica commit` and `mica rebase`.

use crate::chain::{Chain, KINDS, LAYERS, LEN};
use crate::live::{ctl, serve, stop};
use mica_gen::Rng;
use mica_tests::{clock, command, judge, mica, qemu, tools};
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Command, Stdio};
use std::time::Duration;

const TOOLS: &[tools::Tool] = &[tools::QEMU_IMG, tools::QEMU_IO];

#[test]
fn image_is_merged_into_its_backing_file_and_empty_afterwards() {
    if !tools::present(TOOLS) {
        return;
    }
    for kind in KINDS {
        let chain = Chain::new(kind);
        let said = chain.mica(&["commit", "top.qcow2"]).ok();
        assert_eq!(said, "Image committed.\n");
        chain.judge(&chain.expected());
        qemu::flatten(chain.dir(), LAYERS[3], "three.raw");
        let three = fs::read(chain.path("three.raw")).expect("flat");
        judge::same_bytes("the backing file", &three, &chain.expected());
        let map = qemu::img(chain.dir(), ["map", "--output", "json", LAYERS[4]]).json();
        let own = map.as_array().expect("an array").iter().filter(|run| run["depth"] == 0);
        assert_eq!(own.filter(|run| run["data"] == true).count(), 0, "{kind:?}: {map}");
        let told = chain.mica(&["commit", "-b", chain.base(), "--output", "json", "top.qcow2"]);
        let told = told.json();
        assert_eq!(told["dropped"].as_array().map(Vec::len), Some(3), "{told}");
        assert_eq!(chain.names(LAYERS[4]), [LAYERS[4], chain.base()]);
        chain.judge(&chain.expected());
    }
}

#[test]
fn image_that_is_kept_still_has_everything() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    let before = fs::metadata(chain.top()).expect("there").len();
    chain.mica(&["commit", "-q", "-d", "top.qcow2"]).ok();
    assert!(fs::metadata(chain.top()).expect("there").len() >= before - (1 << 20));
    chain.judge(&chain.expected());
    qemu::flatten(chain.dir(), LAYERS[3], "three.raw");
    let three = fs::read(chain.path("three.raw")).expect("flat");
    judge::same_bytes("the backing file", &three, &chain.expected());
}

#[test]
fn image_shows_the_same_on_another_backing_file() {
    if !tools::present(TOOLS) {
        return;
    }
    for kind in KINDS {
        let chain = Chain::new(kind);
        chain.mica(&["rebase", "-b", "one.qcow2", "-F", "qcow2", "top.qcow2"]).ok();
        assert_eq!(chain.names(LAYERS[4])[1], "one.qcow2");
        chain.judge(&chain.expected());
        qemu::create(chain.dir(), "other.qcow2", &["-o", "cluster_size=8k"], "30M");
        qemu::io(chain.dir(), &[], "other.qcow2", &["write -P 77 0 30M", "write -P 16 3M 1M"]);
        chain.mica(&["rebase", "-q", "-b", "other.qcow2", "-F", "qcow2", "top.qcow2"]).ok();
        assert_eq!(chain.names(LAYERS[4]), [LAYERS[4], "other.qcow2"]);
        chain.judge(&chain.expected());
        chain.mica(&["rebase", "-b", "", "top.qcow2"]).ok();
        assert_eq!(chain.names(LAYERS[4]), [LAYERS[4]]);
        chain.judge(&chain.expected());
    }
}

/// The story: what the new backing file lacked was copied into the image, all of it, before it
/// turned out that there was no room for the name.
#[test]
fn image_without_room_for_the_name_of_the_backing_file_stays_as_it_is() {
    if !tools::present(TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let long = format!("{}.qcow2", "n".repeat(240));
    for name in ["old.qcow2", &long] {
        qemu::create(dir, name, &[], "4M");
    }
    qemu::io(dir, &[], "old.qcow2", &["write -P 1 0 2M"]);
    let over = ["-o", "cluster_size=512", "-b", "old.qcow2", "-F", "qcow2"];
    qemu::create(dir, "top.qcow2", &over, "4M");
    qemu::io(dir, &[], "top.qcow2", &["write -P 2 3M 512"]);
    let before = fs::read(dir.join("top.qcow2")).expect("there");
    let rebase = |base: &str| {
        let mut rebase = Command::new(mica::binary());
        rebase.current_dir(dir).args(["rebase", "-b", base, "-F", "qcow2", "top.qcow2"]);
        command::finish(&mut rebase)
    };
    // So deep that the name fills the first cluster.
    fs::create_dir(dir.join("d".repeat(200))).expect("made");
    let deep = format!("{}/{long}", "d".repeat(200));
    fs::copy(dir.join(&long), dir.join(&deep)).expect("copied");
    let said = rebase(&deep).refusal();
    assert!(said.contains("name"), "{said}");
    let now = fs::read(dir.join("top.qcow2")).expect("there");
    assert!(now == before, "the image has changed: {} and {} bytes", before.len(), now.len());
    qemu::io(dir, &[], "top.qcow2", &["read -P 1 0 2M", "read -P 2 3M 512"]);
}

/// The story: a server began to write between what rebase copied and the name of the new base,
/// and its guest's disk had changed under it.
#[test]
fn image_is_locked_until_it_names_its_new_backing_file() {
    if !tools::present(&[TOOLS, &[tools::STRACE]].concat()) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    // As mica and QEMU lock it: whoever writes has this byte.
    let (writes, file) = (101, fs::File::open(chain.top()).expect("there"));
    let file = mica_rt::File::new(file.into(), mica_rt::Access::Buffered);
    let is_written = || file.is_locked_elsewhere(writes, 1).expect("asked");
    let mut strace = Command::new("strace");
    // Whoever lets go of it, and opens it again, takes time for that.
    let slowly = ["-f", "-qq", "-o", "/dev/null", "-e", "inject=openat:delay_enter=20000"];
    strace.args(slowly).arg(mica::binary()).current_dir(chain.dir());
    strace.args(["rebase", "-b", "one.qcow2", "-F", "qcow2", "top.qcow2"]);
    let mut rebase = strace.stdout(Stdio::null()).spawn().expect("strace starts");
    let mut was_written = false;
    let ended = clock::poll(Duration::from_secs(60), Duration::from_millis(1), || {
        let is_written = is_written();
        was_written |= is_written;
        let let_go = was_written && !is_written;
        (let_go || rebase.try_wait().expect("it runs").is_some()).then_some(let_go)
    });
    let header = fs::read(chain.top()).expect("there");
    assert_eq!(ended, Some(true), "it was written: {was_written}");
    let has = |name: &[u8]| header[..4096].windows(name.len()).any(|part| part == name);
    assert!(has(b"one.qcow2"), "somebody else could have written it before");
    assert!(rebase.wait().expect("it ends").success());
    chain.judge(&chain.expected());
}

/// The story: a gigabyte of holes in a raw base became a gigabyte of zeros on the disk.
#[test]
fn holes_and_zeros_of_a_base_take_no_space_in_the_layer_that_takes_it_over() {
    if !tools::present(TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let at = dir.path();
    let sparse = fs::File::create(at.join("base.raw")).expect("made");
    sparse.set_len((64 << 20) + 512).expect("it is sparse");
    sparse.write_all_at(&[7; 5000], 20 << 20).expect("written");
    qemu::create(at, "base.qcow2", &[], "64M");
    qemu::io(at, &[], "base.qcow2", &["write -P 0 0 32M", "write -P 9 12345 100k"]);
    for (base, format) in [("base.raw", "raw"), ("base.qcow2", "qcow2")] {
        for options in ["compat=1.1", "extended_l2=on", "cluster_size=4k"] {
            let args = ["-o", options, "-b", base, "-F", format];
            qemu::create(at, "top.qcow2", &args, &((64 << 20) + 1024).to_string());
            qemu::io(at, &[], "top.qcow2", &["write -P 5 21M 4k"]);
            qemu::flatten(at, "top.qcow2", "before.raw");
            let top = at.join("top.qcow2").display().to_string();
            mica::run(["rebase", "-b", "", &top]).ok();
            qemu::flatten(at, "top.qcow2", "after.raw");
            let [before, after] = ["before.raw", "after.raw"].map(|flat| fs::read(at.join(flat)));
            judge::same_bytes(options, &after.expect("flat"), &before.expect("flat"));
            qemu::img(at, ["check", "top.qcow2"]).ok();
            let allocated = fs::metadata(at.join("top.qcow2")).expect("there").blocks() * 512;
            assert!(allocated < 2 << 20, "{base} into {options}: {allocated} bytes");
        }
    }
}

#[test]
fn name_alone_is_changed_even_if_the_backing_file_is_gone() {
    if !tools::present(TOOLS) {
        return;
    }
    for kind in KINDS {
        let chain = Chain::new(kind);
        fs::create_dir(chain.path("moved")).expect("made");
        fs::rename(chain.path(LAYERS[3]), chain.path("moved/three.qcow2")).expect("moved");
        for layer in [chain.base(), LAYERS[1], LAYERS[2]] {
            fs::hard_link(chain.path(layer), chain.path("moved").join(layer)).expect("linked");
        }
        let refused =
            chain.mica(&["rebase", "-b", "moved/three.qcow2", "-F", "qcow2", "top.qcow2"]);
        assert!(refused.refusal().contains("three.qcow2"));
        let name = "moved/three.qcow2";
        chain.mica(&["rebase", "-u", "-b", name, "-F", "qcow2", "top.qcow2"]).ok();
        qemu::flatten(chain.dir(), LAYERS[4], "now.raw");
        let now = fs::read(chain.path("now.raw")).expect("flat");
        judge::same_bytes("the image", &now, &chain.expected());
    }
}

#[test]
fn layers_that_other_images_need_are_not_changed() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    qemu::overlay(chain.dir(), "clone.qcow2", "two.qcow2", &[]);
    let refused = chain.mica(&["commit", "-b", "one.qcow2", "top.qcow2"]).refusal();
    assert!(refused.contains("clone.qcow2") && refused.contains("two.qcow2"), "{refused}");
    // Nobody else needs this one.
    chain.mica(&["commit", "top.qcow2"]).ok();
    chain.judge(&chain.expected());
    let refused = chain.mica(&["commit", "-b", "top.qcow2", "top.qcow2"]).refusal();
    assert!(refused.contains("beneath itself"), "{refused}");
    let refused = chain.mica(&["rebase", "-b", "top.qcow2", "-F", "qcow2", "top.qcow2"]).refusal();
    assert!(refused.contains("is the image itself"), "{refused}");
}

/// A commit is killed at random moments. What it leaves keeps nobody from the base unless that was
/// changed, or is about to be, and then the next commit goes through.
#[test]
fn killed_commit_that_changed_nothing_keeps_nobody_from_its_layers() {
    if !tools::present(TOOLS) {
        return;
    }
    let mut rng = Rng::new(14);
    let chain = Chain::new(KINDS[1]);
    let at = |name: &str| chain.path(name).display().to_string();
    for _ in 0..16 {
        let mut commit = Command::new(mica::binary())
            .args(["commit", "-q", "-b", &at(chain.base()), &at("top.qcow2")])
            .stderr(Stdio::null())
            .spawn()
            .expect("started");
        clock::sleep(Duration::from_micros(rng.below(60_000)));
        commit.kill().expect("killed, or over");
        if commit.wait().expect("waited for").success() {
            break;
        }
        let mark = chain.path(&format!("{}.mica-merged", chain.base()));
        let cloned = chain.mica(&["clone", "-q", chain.base(), "clone.qcow2"]);
        if cloned.status.success() {
            assert!(!mark.exists(), "it is taken back");
            fs::remove_file(chain.path("clone.qcow2")).expect("there");
        } else {
            // It may say first that it waits for the dead process to let go.
            assert!(cloned.to_string().contains("merge them again"), "{cloned}");
        }
        let free = clock::poll(Duration::from_secs(10), Duration::from_millis(5), || {
            let said = qemu::img(chain.dir(), ["info", "-f", "qcow2", LAYERS[4]]);
            said.status.success().then_some(())
        });
        assert!(free.is_some(), "the image stays locked");
    }
    // There may be nothing left to be merged.
    let _ = chain.mica(&["commit", "-q", "-b", chain.base(), "top.qcow2"]);
    let names = fs::read_dir(chain.dir()).expect("listed");
    let names = names.map(|entry| entry.expect("listed").file_name().into_string().expect("text"));
    let left: Vec<_> = names.filter(|name| name.ends_with(".tmp")).collect();
    assert!(left.is_empty(), "{left:?}");
    chain.mica(&["clone", "-q", chain.base(), "clone.qcow2"]).ok();
    // A kill may leak space.
    qemu::flatten(chain.dir(), LAYERS[4], "now.raw");
    let now = fs::read(chain.path("now.raw")).expect("flat");
    judge::same_bytes("what is left in the end", &now, &chain.expected());
}

/// What the internal snapshot `name` of an image shows, by QEMU.
#[track_caller]
fn snapshot_content(chain: &Chain, name: &str, image: &str) -> Vec<u8> {
    let args = ["convert", "-f", "qcow2", "-O", "raw", "-l", name, image, "snapshot.raw"];
    qemu::img(chain.dir(), args).ok();
    fs::read(chain.path("snapshot.raw")).expect("read")
}

/// The story: with -u the image named itself, and nothing could open it any more; without, it was
/// said that another process had it, which was this one.
#[test]
fn no_image_gets_to_stand_on_itself() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    std::os::unix::fs::symlink("two.qcow2", chain.path("link.qcow2")).expect("a link");
    for mode in [&[][..], &["-u"]] {
        for (base, why) in [
            ("two.qcow2", "is the image itself"),
            ("link.qcow2", "is the image itself"),
            ("three.qcow2", "stands on the image itself"),
            ("top.qcow2", "stands on the image itself"),
        ] {
            let words = ["rebase", "-F", "qcow2", "-b", base, "two.qcow2"];
            let said = chain.mica(&[&words[..], mode].concat()).refusal();
            assert!(said.contains("two.qcow2: ") && said.contains(why), "{said}");
            assert!(said.contains(base), "{said}");
        }
    }
    chain.judge(&chain.expected());
    // What is not there may become anything.
    chain.mica(&["rebase", "-u", "-F", "qcow2", "-b", "new.qcow2", "top.qcow2"]).ok();
}

#[test]
fn commit_that_is_not_possible_says_of_which_image_and_why() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    for (args, said) in [
        (&["commit", "base.qcow2"][..], "base.qcow2 has no backing file"),
        (&["commit", "-f", "raw", "expected.raw"], "expected.raw has no layers"),
    ] {
        let refused = chain.mica(args).refusal();
        assert!(refused.contains(said), "{refused}");
    }
    chain.judge(&chain.expected());
}

/// The story: a snapshot of the image showed what had been committed into the layer beneath it, and
/// zeros where that was taken away.
#[test]
fn no_internal_snapshot_changes_with_what_lies_beneath_it() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    qemu::create(chain.dir(), "other.qcow2", &[], "30M");
    for image in [LAYERS[2], LAYERS[4]] {
        chain.mica(&["snapshot", "-c", "kept", image]).ok();
    }
    qemu::io(chain.dir(), &[], LAYERS[4], &["write -P 99 0 24M"]);
    let kept = [LAYERS[2], LAYERS[4]].map(|image| snapshot_content(&chain, "kept", image));
    let present = vec![99; LEN];
    let refused = |args: &[&str], image: &str| {
        let said = chain.mica(args);
        assert_eq!(said.code(), Some(1), "{said}");
        let text = format!("{image} has internal snapshots (\"kept\")");
        assert!(said.stderr.contains(&text), "{said}");
        assert!(said.stderr.contains("mica snapshot -d"), "{said}");
        chain.judge(&present);
        for (image, kept) in [LAYERS[2], LAYERS[4]].iter().zip(&kept) {
            judge::same_bytes(image, &snapshot_content(&chain, "kept", image), kept);
        }
    };
    refused(&["commit", "top.qcow2"], LAYERS[4]);
    refused(&["commit", "-d", "top.qcow2"], LAYERS[4]);
    refused(&["rebase", "-b", "", "top.qcow2"], LAYERS[4]);
    refused(&["rebase", "-b", "other.qcow2", "-F", "qcow2", "top.qcow2"], LAYERS[4]);
    let server = serve(&chain);
    refused_while_served(&chain, &["stream", "top"], LAYERS[4]);
    refused_while_served(&chain, &["commit", "top"], LAYERS[4]);
    let down = ["commit", "top", "--top", "three.qcow2", "--base", "one.qcow2"];
    refused_while_served(&chain, &down, LAYERS[2]);
    // The base's own snapshots have their own clusters, and what is above shows the same.
    ctl(&chain, &["commit", "top", "--top", "three.qcow2", "--base", "two.qcow2"]).ok();
    stop(server);
    chain.judge(&present);
    for (image, kept) in [LAYERS[2], LAYERS[4]].iter().zip(&kept) {
        judge::same_bytes(image, &snapshot_content(&chain, "kept", image), kept);
    }
    // Nothing changes with the same name.
    chain.mica(&["rebase", "-b", "two.qcow2", "-F", "qcow2", "top.qcow2"]).ok();
    chain.mica(&["snapshot", "-d", "kept", "top.qcow2"]).ok();
    chain.mica(&["commit", "top.qcow2"]).ok();
    chain.judge(&present);
    judge::same_bytes(LAYERS[2], &snapshot_content(&chain, "kept", LAYERS[2]), &kept[0]);
}

#[track_caller]
fn refused_while_served(chain: &Chain, args: &[&str], image: &str) {
    let said = ctl(chain, args);
    assert_ne!(said.code(), Some(0), "{said}");
    let text = format!("{image} has internal snapshots (\"kept\")");
    assert!(said.stderr.contains(&text), "{said}");
}
