//! A server that is killed before it has closed a layer that it froze: whoever opens the disk next
//! closes it, so that layers can be merged into it, and QEMU takes its bitmaps for what they are.

use crate::world::{World, layer};
use mica_gen::Rng;
use mica_tests::server::Server;
use mica_tests::{clock, command, mica, qemu, tools};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const MIB: usize = 1 << 20;
/// Every operation on a file takes so long while a layer is frozen.
const DELAY: &str = "delay=4ms";

/// The autoclear bits of an image.
fn autoclear(folder: &Path, image: &str) -> u64 {
    let header = fs::read(folder.join(image)).expect("an image");
    u64::from_be_bytes(*header[88..].first_chunk().expect("a header"))
}

/// Whether QEMU finds its bitmap consistent, as it is in the file now.
fn is_consistent(folder: &Path, image: &str) -> bool {
    let info = qemu::img(folder, ["info", "-U", "--output=json", image]).json();
    let flags = info["format-specific"]["data"]["bitmaps"][0]["flags"].as_array().cloned();
    let flags = flags.expect("a bitmap");
    assert!(flags.contains(&"auto".into()), "{flags:?}");
    !flags.contains(&"in-use".into())
}

/// How many bytes are dirty in the bitmap of the image, to QEMU, in this part.
fn dirty_bytes(folder: &Path, image: &str, part: (usize, usize)) -> usize {
    let server = Server::start("", |socket| {
        let mut nbd = Command::new("qemu-nbd");
        nbd.args(["-r", "-t", "-f", "qcow2", "-B", "b", "-k"]).arg(socket).arg(folder.join(image));
        nbd
    });
    let server = server.expect("served");
    let map = ["--map=qemu:dirty-bitmap:b", "--json", &server.uri()];
    let map = command::run("nbdinfo", map).json();
    let number = |value: &Value| {
        let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
        number.expect("a number")
    };
    let dirty = map.as_array().expect("a list").iter().filter(|run| run["type"] == 1);
    let within = dirty.map(|run| {
        let (start, len) = (number(&run["offset"]), number(&run["length"]));
        (start + len).min(part.1).saturating_sub(start.max(part.0))
    });
    within.sum()
}

/// A disk of two layers whose server was killed when the lower one was frozen, and not closed.
fn left_unclosed() -> Option<World> {
    if !tools::present(&[tools::QEMU_NBD, tools::NBDINFO]) {
        return None;
    }
    let mut rng = Rng::new(5);
    for _ in 0..40 {
        let mut world = World::of_image(&[], &[])?;
        world.stop();
        qemu::img(world.folder(), ["bitmap", "--add", &layer(0), "b"]).ok();
        world.options = ["--inject", DELAY].map(str::to_owned).to_vec();
        world.start();
        assert_eq!(world.guest().write(0, &[1; MIB]).expect("served"), 0);
        let mark = world.folder().join("vm.qcow2.mica-above");
        let wait = Duration::from_millis(rng.below(20));
        std::thread::scope(|scope| {
            scope.spawn(|| world.snapshot(&layer(1), &[]));
            let limit = Duration::from_secs(20);
            clock::poll(limit, Duration::from_millis(1), || mark.exists().then_some(()))
                .expect("the layer is frozen");
            clock::sleep(wait);
            world.server.as_ref().expect("it is served").signal(Signal::KILL);
        });
        world.server = None;
        world.options.clear();
        if autoclear(world.folder(), &layer(0)) >> 32 != 0 {
            return Some(world);
        }
    }
    panic!("it is always closed before the server dies");
}

#[test]
fn next_server_closes_a_layer_that_a_killed_one_froze() {
    let Some(mut world) = left_unclosed() else { return };
    let mut disk = vec![0; crate::world::SIZE];
    disk[..MIB].fill(1);
    assert!(!is_consistent(world.folder(), &layer(0)), "to QEMU it is in use");
    world.start();
    assert_eq!(autoclear(world.folder(), &layer(0)), 1);
    assert!(is_consistent(world.folder(), &layer(0)));
    let log = world.server.as_ref().expect("it is served").log();
    assert!(log.contains("closed a frozen layer"), "{log}");
    assert_eq!(world.guest().write(2 << 20, &[2; MIB]).expect("served"), 0);
    disk[2 * MIB..3 * MIB].fill(2);
    world.ctl(&["commit", "vm"]).ok();
    assert!(world.disk() == disk);
    world.stop();
    for image in [layer(0), layer(1)] {
        // Clusters that were counted ahead.
        let said = qemu::img(world.folder(), ["check", &image]);
        assert!(matches!(said.code(), Some(0 | 3)), "{said}");
        assert!(is_consistent(world.folder(), &image), "{image}");
    }
    assert!(world.content(&layer(0)) == disk);
    let changed = dirty_bytes(world.folder(), &layer(0), (2 * MIB, 3 * MIB));
    assert_eq!(changed, MIB, "what was merged is dirty");
}

#[test]
fn verbs_and_qemu_merge_into_a_layer_that_a_killed_server_froze() {
    let Some(mut world) = left_unclosed() else { return };
    let folder = world.folder().to_owned();
    let copy = tempfile::tempdir().expect("a folder");
    for name in [layer(0), layer(1), format!("{}.mica-above", layer(0))] {
        fs::copy(folder.join(&name), copy.path().join(&name)).expect("copied");
    }
    // A copy has no log, as after a power cut.
    let path = |name: &str| copy.path().join(name).display().to_string();
    qemu::io(copy.path(), &[], &layer(1), &["write -P 3 4M 64k"]);
    mica::run(["commit", &path(&layer(1))]).ok();
    assert!(is_consistent(copy.path(), &layer(0)));
    assert_eq!(dirty_bytes(copy.path(), &layer(0), (4 * MIB, 4 * MIB + 65536)), 65536);

    // QEMU opens the base for reading, and writes it later: it records what it merges.
    world.start();
    world.stop();
    qemu::io(&folder, &[], &layer(1), &["write -P 3 4M 64k"]);
    qemu::img(&folder, ["commit", "-q", "-d", &layer(1)]).ok();
    assert!(is_consistent(&folder, &layer(0)));
    assert_eq!(dirty_bytes(&folder, &layer(0), (4 * MIB, 4 * MIB + 65536)), 65536);
}

#[test]
fn layer_that_somebody_else_reads_stays_unclosed_and_its_disk_is_served() {
    let Some(mut world) = left_unclosed() else { return };
    let image = world.folder().join(layer(0));
    let start = || {
        let server = Server::start("", |socket| {
            let mut nbd = Command::new("qemu-nbd");
            nbd.args(["-r", "-t", "-f", "qcow2", "-k"]).arg(socket).arg(&image);
            nbd
        });
        server.ok()
    };
    // The killed server may hold its locks for a moment more, and QEMU does not wait for them.
    let reader = clock::poll(Duration::from_secs(10), Duration::from_millis(20), start);
    let reader = reader.expect("served");
    world.start();
    let log = world.server.as_ref().expect("it is served").log();
    assert!(log.contains("it stays so") && log.contains("qemu-nbd"), "{log}");
    assert!(!is_consistent(world.folder(), &layer(0)));
    reader.stop().expect("it stops");
    // What is merged into it needs it alone, too.
    world.ctl(&["commit", "vm"]).ok();
    world.stop();
    assert!(is_consistent(world.folder(), &layer(0)));
    assert_eq!(autoclear(world.folder(), &layer(0)), 1);
}
