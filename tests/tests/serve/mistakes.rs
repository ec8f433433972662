//! Mistakes in a configuration: where they are, what they do not harm, and how they are mended.

use crate::membership::{World, table};
use mica_tests::{mica, qemu};
use serde_json::Value;
use std::fs;

/// The story: a disk that a reload refused was in no list, so that nothing watched it and nothing
/// could try it again; and correcting the file did not help a disk that had failed.
#[test]
fn refused_disk_is_failed_until_the_file_is_right() {
    let Some(world) = World::new() else { return };
    let server = world.serve(&[]);
    world.configure(&["a", "b", "gone"]);
    let reloaded = world.ctl(&["reload"]);
    assert_eq!(reloaded.code(), Some(1), "{reloaded}");
    assert!(reloaded.stdout.contains("mica.toml: line 10: gone: "), "{reloaded}");
    world.is(&[("a", "serving"), ("b", "serving"), ("gone", "failed")]);
    let failure = world.json(&["status"])["disks"][2]["failure"].to_string();
    assert!(failure.contains("gone.qcow2"), "{failure}");
    let refused = world.ctl(&["undrain", "gone"]).refusal();
    assert!(refused.contains("gone.qcow2"), "{refused}");

    let text = fs::read_to_string(world.at("mica.toml")).expect("there");
    let image = |image: &str| {
        let text = text.replace("gone.qcow2", image);
        fs::write(world.at("mica.toml"), text).expect("written");
        world.ctl(&["reload"])
    };
    let twin = image("a.qcow2");
    assert!(twin.stdout.contains("a.qcow2: the disk \"a\" of this server writes it"), "{twin}");
    world.is(&[("a", "serving"), ("b", "serving"), ("gone", "failed")]);
    image("c.qcow2").ok();
    world.is(&[("a", "serving"), ("b", "serving"), ("gone", "serving")]);
    assert_eq!(world.len("gone"), 3 << 20);
    image("missing.qcow2");
    world.is(&[("a", "serving"), ("b", "serving"), ("gone", "serving")]);

    // What is drained has its new settings when it comes back, and not before.
    world.ctl(&["drain", "b"]).ok();
    let text = format!("control = \"control\"\n{}{}read-only = true\n", table("a"), table("b"));
    fs::write(world.at("mica.toml"), text).expect("written");
    let reloaded = world.json(&["reload"]);
    assert_eq!(reloaded["removed"][0], "gone");
    world.is(&[("a", "serving"), ("b", "drained")]);
    world.ctl(&["undrain", "b"]).ok();
    assert_eq!(world.json(&["status"])["disks"][1]["writable"], false);
    server.stop();
}

#[test]
fn mistakes_are_told_with_file_line_and_disk() {
    let Some(world) = World::new() else { return };
    let config = world.at("mica.toml").display().to_string();
    world.configure(&["gone"]);
    let alone = mica::run(["serve", "--config", &config]).refusal();
    assert!(alone.contains("mica.toml: line 2: disk \"gone\": "), "{alone}");

    world.configure(&["a"]);
    let server = world.serve(&[]);
    let second = mica::run(["serve", "--config", &config]).refusal();
    assert!(second.contains("mica ctl") && second.contains("--takeover"), "{second}");
    let more = world.at("more.toml").display().to_string();
    fs::write(&more, table("b") + &table("gone")).expect("written");
    let added = world.ctl(&["add", "--config", &more]).refusal();
    assert!(added.contains("after b (added): "), "{added}");
    assert!(added.contains("more.toml: line 5: disk \"gone\": "), "{added}");
    for disk in ["a", "b"] {
        world.ctl(&["remove", disk]).ok();
    }
    let none = world.ctl(&["drain", "a"]).refusal();
    assert!(none.contains("this server has no disks"), "{none}");
    server.stop();
}

/// The story: nothing was wrong, and then the server did not start.
#[test]
fn check_finds_what_would_keep_disks_from_being_served() {
    let Some(world) = World::new() else { return };
    let config = world.at("mica.toml").display().to_string();
    for name in ["twin", "open", "far", "part", "late", "secret"] {
        qemu::create(world.path(), &format!("{name}.qcow2"), &[], "1M");
    }
    let at = |name: &str, place: &str| table(name).replace(&format!("{name}.sock"), place);
    let text = format!(
        "control = \"nowhere/control\"\nmetrics = \"0.0.0.0:9000\"\nqueues = 0\n\
         {}{}{}{}fuse = \"nothing\"\n{}partition = 3\n{}offset = \"2M\"\n{}bitmap = [\"b0\"]\n\
         {}tls-certificates = \"pki\"\n",
        table("a"),
        table("twin").replace("twin.qcow2", "a.qcow2"),
        at("open", "tcp:0.0.0.0:10809"),
        at("far", "nowhere/s"),
        table("part"),
        table("late"),
        table("b"),
        table("secret"),
    );
    fs::write(&config, text).expect("written");
    let check = ["serve", "--check-config", "--config", &config];
    let said = mica::run(check).stderr;
    for wanted in [
        "nowhere/control",
        "--metrics-public",
        "queues 0",
        "line 8: disk \"twin\": ",
        "the image of the disk \"a\" (line 4)",
        "disk \"open\": --nbd tcp:0.0.0.0:10809: except on loopback",
        "disk \"far\": listening on ",
        "disk \"far\": ",
        "the file to mount over has to exist",
        "disk \"part\": --partition 3",
        "disk \"late\": ",
        "disk \"b\": ",
        "disk \"secret\": ",
    ] {
        assert!(said.contains(wanted), "{wanted}: {said}");
    }
    let checked = mica::run(check.into_iter().chain(["--output", "json"]));
    assert_eq!(checked.code(), Some(1));
    let answer: Value = serde_json::from_str(&checked.stdout).expect("JSON");
    assert_eq!(answer["problems"].as_array().map(Vec::len), Some(said.lines().count()), "{answer}");

    // What is not understood is told for every disk.
    let text = table("a") + "shared = \"x\"\n" + &table("b") + "read_only = true\n";
    fs::write(&config, text).expect("written");
    let said = mica::run(check).stderr;
    assert!(said.contains("line 5: disk \"a\": expected a number from 0 on"), "{said}");
    assert!(said.contains("line 10: disk \"b\": unknown key `read_only`"), "{said}");

    // Nor does a key that is unknown make the others what they are not.
    fs::write(&config, format!("queus = 2\nqueues = 0\n{}", table("a"))).expect("written");
    let said = mica::run(check).stderr;
    assert!(said.contains("unknown key `queus`") && said.contains("queues 0"), "{said}");

    // It does not hide what is wrong with the others.
    let text = table("a") + "shared = \"x\"\n" + &table("gone") + &table("b");
    fs::write(&config, text).expect("written");
    let said = mica::run(check).stderr;
    assert!(said.contains("line 5: disk \"a\": expected a number from 0 on"), "{said}");
    assert!(said.contains("line 6: disk \"gone\": "), "{said}");
    assert_eq!(said.lines().count(), 2, "{said}");
}

/// The story: the folder of the configuration was put before a URL, and the file that it made was
/// said to be missing.
#[test]
fn url_where_an_image_belongs_is_told_as_such() {
    let Some(world) = World::new() else { return };
    let config = world.at("mica.toml").display().to_string();
    let export = "nbd+unix:///web?socket=/run/nbd.sock";
    let cure = |url: &str| format!("disk \"gone\": {url} is an export of a server");
    let configure = |disks: &str, url: &str| {
        let text = format!("control = \"control\"\n{disks}{}", table("gone"));
        fs::write(&config, text.replace("gone.qcow2", url)).expect("written");
    };
    let check = ["serve", "--check-config", "--config", &config];
    for url in ["nbd://storage/web", export] {
        configure("", url);
        for said in
            [mica::run(check).refusal(), mica::run(["serve", "--config", &config]).refusal()]
        {
            assert!(said.contains(&cure(url)) && said.contains("mica convert"), "{said}");
        }
    }
    configure("", "file:///srv/volumes/web");
    let said = mica::run(check).refusal();
    assert!(said.contains("web is the URL of a volume") && said.contains("`volume`"), "{said}");

    // Beside others, it is the one that fails.
    configure(&table("a"), export);
    let server = world.serve(&[]);
    world.is(&[("a", "serving"), ("gone", "failed")]);
    let failure = world.json(&["status"])["disks"][1]["failure"].to_string();
    assert!(failure.contains("is an export of a server"), "{failure}");
    let more = world.at("more.toml").display().to_string();
    fs::write(&more, table("b").replace("b.qcow2", "nbd://storage/b")).expect("written");
    for added in [
        world.ctl(&["add", "nbd://storage/b", "--name", "b", "--nbd", "b.sock"]),
        world.ctl(&["add", "--config", &more]),
    ] {
        let said = added.refusal();
        assert!(said.contains("nbd://storage/b is an export of a server"), "{said}");
    }
    world.is(&[("a", "serving"), ("gone", "failed")]);
    server.stop();

    // Who has a file of that name has it served.
    fs::create_dir(world.at("nbd:")).expect("made");
    fs::rename(world.at("b.qcow2"), world.at("nbd:/b.qcow2")).expect("renamed");
    fs::write(&config, table("b").replace("b.qcow2", "nbd://b.qcow2")).expect("written");
    mica::run(check).ok();
}
