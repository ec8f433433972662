//! Backups of one disk that are begun at once, and readers that vanish.

use mica_tests::kept::{LEN, World};
use mica_tests::{clock, judge, nbd};
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

/// Of two that begin at the same instant one has the disk, and nothing is left of the other.
#[test]
fn one_of_two_backups_that_begin_at_once_is_kept_and_exported() {
    let Some(mut world) = World::new(11, &[]) else { return };
    let begin = |world: &World, state: &str, socket: &Path| {
        let socket = socket.display().to_string();
        world.ctl(&["backup", "begin", "disk", "--as", state, "--nbd", &socket])
    };
    for round in 0..8 {
        let mut guest = world.guest();
        (0..10).for_each(|_| world.change(&mut guest));
        let first = format!("s{round}");
        // The same state for two readers, or two states.
        let second = if round % 2 == 0 { first.clone() } else { format!("other{round}") };
        let sockets = ["one", "two"].map(|name| world.path(name));
        let states = [first, second];
        let said = std::thread::scope(|scope| {
            let asked = [0, 1].map(|at| {
                let (world, state, socket) = (&world, &*states[at], &*sockets[at]);
                scope.spawn(move || begin(world, state, socket))
            });
            asked.map(|asked| asked.join().expect("it ends"))
        });
        let won: Vec<_> = (0..2).filter(|at| said[*at].status.success()).collect();
        let [won] = won[..] else { panic!("{said:?}") };
        assert!(said[1 - won].stderr.contains("under way"), "{said:?}");
        let listed = world.ctl(&["backup", "list", "disk"]).json();
        assert_eq!(listed["states"].as_array().map(Vec::len), Some(round + 1), "{listed}");
        assert_eq!(listed["backup"]["state"], *states[won], "{listed}");
        assert!(!sockets[1 - won].exists());
        let wish = nbd::Wish::default();
        let mut export = nbd::Connection::open(&sockets[won], "disk", &wish).expect("exported");
        judge::same_bytes("the export", &export.read_all().expect("read"), &world.model);
        world.ctl(&["backup", "end", "disk"]).ok();
        assert!(!sockets[won].exists());
    }
    world.stop();
}

/// Readers are killed with requests under way, whose answers nobody takes any more.
#[test]
fn readers_that_vanish_leave_nothing_behind_in_the_server() {
    const READERS: usize = 30;
    const REQUESTS: u64 = 64;
    let Some(mut world) = World::new(12, &[]) else { return };
    let mut guest = world.guest();
    (0..50).for_each(|_| world.change(&mut guest));
    world.begin(None, "mon").ok();
    let wanted = world.model.clone();
    let pid = world.server.as_ref().expect("it runs").pid();
    let descriptors = || {
        let all = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
        all.count()
    };
    let before = descriptors();
    for _ in 0..READERS {
        let wish = nbd::Wish::default();
        let socket = world.path("backup");
        let mut reader = nbd::Connection::open(&socket, "disk", &wish).expect("exported");
        for number in 0..REQUESTS {
            let at = number % 8 * (1 << 20);
            let request = nbd::request(nbd::CMD_READ, 0, number, at, 1 << 20);
            // It may not take them all.
            reader.stream.set_nonblocking(true).expect("set");
            let _ = reader.stream.write_all(&request);
        }
        world.change(&mut guest);
    }
    // Layers are opened when they are read first.
    let is_rid_of_them = || (descriptors() < before + READERS / 4).then_some(());
    let rid = clock::poll(Duration::from_secs(60), Duration::from_millis(10), is_rid_of_them);
    assert!(rid.is_some(), "{} descriptors, {before} before", descriptors());
    let mut reader = nbd::Connection::open(&world.path("backup"), "disk", &nbd::Wish::default())
        .expect("exported still");
    judge::same_bytes("the export", &reader.read_all().expect("read"), &wanted);
    // Nor does it need its reader's leave to end.
    world.ctl(&["backup", "end", "disk"]).ok();
    assert!(reader.read(0, LEN as u64).is_err(), "it is over");
    judge::same_bytes("the state", &world.state("mon"), &wanted);
    let job = world.ctl(&["backup", "drop", "disk", "mon"]).json();
    assert_eq!(job["file"]["removed"], true, "{job}");
    let now = world.guest().read_all().expect("read");
    judge::same_bytes("the disk", &now, &world.model);
    world.stop();
}
