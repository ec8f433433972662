//! What the user names wrongly.

use mica_tests::volume::{Store, run};
use mica_tests::{command, mica};
use std::fs;
use std::path::Path;

/// Each is refused in one line that says what would be right.
#[test]
fn wrong_urls_are_refused_with_what_would_be_right() {
    let store = Store::new();
    let folder = store.folder().display();
    for (url, hint) in [
        (format!("file:/{folder}/web"), "file://"),
        (format!("file:/{folder}"), "three slashes"),
        (format!("{folder}/web"), "file:///"),
        ("web".to_owned(), "s3://BUCKET"),
        ("s3:/bucket/web".to_owned(), "s3://BUCKET/PREFIX/NAME"),
        ("s3://bucket".to_owned(), "s3://bucket/NAME"),
        ("gs://bucket/web".to_owned(), "no store called gs:"),
        ("file:///".to_owned(), "file:///NAME"),
        (store.volume("Web"), "a-z"),
        (store.volume("web@"), "behind the @"),
        (format!("file://{folder}/missing/store/web"), "there is no directory"),
    ] {
        let refusal = run(["create", &url, "1G"]).refusal();
        assert!(refusal.starts_with("mica: "), "{refusal}");
        assert!(refusal.contains(hint), "{url}: {refusal}");
        let mut serve = std::process::Command::new(mica::binary());
        serve.args(["serve", "--nbd"]).arg(store.folder().join("socket")).args(["--volume", &url]);
        command::finish(&mut serve).refusal();
    }
    assert!(!store.folder().join("socket").exists());
}

/// The story: a name with a slash made a store in a store, and its volume was in no list.
#[test]
fn store_is_not_made_inside_another() {
    let store = Store::new();
    store.create("web", "1M");
    let refusal = run(["create", &store.volume("a/b"), "1M"]).refusal();
    assert!(refusal.contains("no slash"), "{refusal}");
    assert!(!store.folder().join("store/a").exists());
}

#[test]
fn what_is_not_there_is_said_to_be_missing() {
    let store = Store::new();
    let missing = run(["list", &store.url()]).refusal();
    assert!(missing.contains("there is no directory"), "{missing}");
    fs::create_dir(store.folder().join("store")).expect("made");
    let empty = run(["info", &store.volume("web")]).refusal();
    assert!(empty.contains("has no volumes"), "{empty}");
    store.create("web", "1M");
    for verb in ["info", "delete", "check"] {
        let missing = run([verb, &store.volume("wob")]).refusal();
        assert!(missing.contains("there is no volume wob"), "{verb}: {missing}");
    }
    let again = run(["create", &store.volume("web"), "1M"]).refusal();
    assert!(again.contains("already"), "{again}");
    let odd = run(["create", &store.volume("odd"), "1000"]).refusal();
    assert!(odd.contains("whole number of sectors"), "{odd}");
    let large = run(["create", &store.volume("large"), "512T"]).refusal();
    assert!(large.contains("281474976710656"), "{large}");
}

/// The story: `gc` of a store whose name had a slip was told that this is a volume; and that a
/// snapshot was no volume, which it does not take either.
#[test]
fn collection_of_what_is_no_store_says_what_that_is() {
    let store = Store::new();
    store.create("web", "1M");
    run(["snapshot", &store.volume("web"), "monday"]).ok();
    for (name, is) in [
        ("wob", "there is no store"),
        ("web", "web is a volume"),
        ("web@monday", "web@monday names a snapshot"),
        ("wob@monday", "no volume wob"),
    ] {
        let refusal = run(["gc", &store.volume(name)]).refusal();
        assert!(refusal.contains(is), "{refusal}");
        assert!(refusal.ends_with(&format!("such as {}\n", store.url())), "{refusal}");
    }
    let missing = run(["gc", &store.volume("web/inner")]).refusal();
    assert!(missing.contains("there is no directory"), "{missing}");
}

/// The story: a length that no volume has was refused, and its store had been made.
#[test]
fn length_that_no_volume_has_makes_no_store() {
    let store = Store::new();
    let image = store.folder().join("image.raw");
    fs::write(&image, []).expect("written");
    let image = image.display().to_string();
    for words in [
        &["create", &*store.volume("web"), "0"][..],
        &["create", &store.volume("web"), "1000"],
        &["create", &store.volume("web"), "512T"],
        &["import", "--format", "raw", &image, &store.volume("web")],
    ] {
        let refusal = run(words.iter().copied()).refusal();
        assert!(refusal.contains("whole number of sectors"), "{refusal}");
        assert!(!store.folder().join("store").exists(), "{words:?}");
    }
}

/// The story: where a file was in place of a folder, it was said that nothing was there.
#[test]
fn file_in_place_of_a_store_is_named_as_one() {
    let store = Store::new();
    fs::write(store.folder().join("store"), "mine").expect("written");
    let refusal = run(["create", &store.volume("web"), "1M"]).refusal();
    assert!(refusal.contains("store is a file, and no directory"), "{refusal}");
}

/// The story: a snapshot without a label was said to be `web@`, which names nothing.
#[test]
fn snapshot_without_a_label_is_named_by_its_number() {
    let store = Store::new();
    store.create("web", "1M");
    let said = run(["snapshot", &store.volume("web"), ""]).ok();
    assert!(said.contains("web@1: taken"), "{said}");
    run(["drop", &store.volume("web@1")]).ok();
}

#[test]
fn folder_with_other_files_does_not_become_a_store() {
    let store = Store::new();
    fs::create_dir(store.folder().join("store")).expect("made");
    fs::write(store.folder().join("store/note"), "mine").expect("written");
    let refusal = run(["create", &store.volume("web"), "1G"]).refusal();
    assert!(refusal.contains("use an empty folder"), "{refusal}");
}

/// The story: any folder called volumes was taken for a store that had lost what says that it is
/// one, as that of another program is none.
#[test]
fn folder_of_another_program_is_not_taken_for_a_damaged_store() {
    let store = Store::new();
    let other = store.folder().join("store/volumes/data/_data");
    fs::create_dir_all(&other).expect("made");
    fs::write(other.with_file_name("note"), "its own").expect("written");
    let refusal = run(["create", &store.volume("web"), "1M"]).refusal();
    assert!(refusal.contains("use an empty folder"), "{refusal}");
    for url in [store.url(), store.volume("web")] {
        let refusal = run(["check", &url]).refusal();
        assert!(refusal.contains("has no volumes"), "{refusal}");
    }
}

/// The story: whether the folder of a volume was a store that is damaged was looked for first, by
/// listing it, which takes as long as a pool is large.
#[test]
fn volume_is_found_without_a_look_for_a_damaged_store_in_its_place() {
    let store = Store::new();
    store.create("web", "1M");
    let inner = store.folder().join("store/web/volumes/a");
    fs::create_dir_all(&inner).expect("made");
    fs::write(inner.join(format!("{:016x}", 1)), "a head").expect("written");
    for verb in ["check", "tree", "stats", "scrub"] {
        run([verb, &store.volume("web")]).ok();
    }
}

#[test]
fn options_that_belong_together_are_asked_for() {
    let store = Store::new();
    store.create("web", "1M");
    let url = store.volume("web");
    let serve = |more: &[&str]| {
        let mut serve = std::process::Command::new(mica::binary());
        serve.args(["serve", "--nbd"]).arg(store.folder().join("socket")).args(more);
        command::finish(&mut serve)
    };
    assert_ne!(serve(&["--volume", &url, "image.qcow2"]).code(), Some(0));
    assert_ne!(serve(&["--force", "image.qcow2"]).code(), Some(0));
    let overlay = serve(&["--volume", &url, "--ephemeral"]).refusal();
    assert!(overlay.contains("ephemeral"), "{overlay}");
    let inner = serve(&["--volume", &url, "--load-snapshot", "a"]).refusal();
    assert!(inner.contains("/web@LABEL"), "{inner}");
    // What is only read has no log, and fences nobody.
    run(["snapshot", &url, "a"]).ok();
    let (snapshot, log) = (format!("{url}@a"), store.folder().join("log").display().to_string());
    for more in [
        ["--log-device", &*log].as_slice(),
        &["--log-device", &log, "--log-size", "64M"],
        &["--durability", "store"],
        &["--force"],
    ] {
        for what in [["--volume", &*snapshot].as_slice(), &["--volume", &url, "-r"]] {
            let refused = serve(&[what, more].concat()).refusal();
            assert!(refused.contains(&more[0][2..]), "{refused}");
            assert!(refused.contains("only read"), "{refused}");
        }
    }
    let short = serve(&["--volume", &url, "--log-device", &log, "--log-size", "4k"]).refusal();
    assert!(short.contains("log-size 4096"), "{short}");
    assert!(!Path::new(&log).exists());
    let config = store.folder().join("mica.toml");
    let text = format!("[[disk]]\nname = 'a'\nvolume = '{url}'\nnbd = '/s'\nforce = true\n");
    fs::write(&config, text).expect("written");
    let mut kept = std::process::Command::new(mica::binary());
    let kept = command::finish(kept.args(["serve", "--config"]).arg(&config)).refusal();
    assert!(kept.contains("line 5") && kept.contains("force applies once"), "{kept}");
    for verb in [["create", "memory:x/web", "1G"].as_slice(), &["list", "memory:x"]] {
        let gone = run(verb.iter().copied()).refusal();
        assert!(gone.contains("memory of one process"), "{gone}");
    }
}
