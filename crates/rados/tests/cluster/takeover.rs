//! A volume in a pool is taken over by force from a server that is alive.

use crate::ceph::Ceph;
use mica_tests::command::{self, Finished};
use mica_tests::nbd::Wish;
use mica_tests::server::Server;
use mica_tests::tools::{QEMU_IO, present};
use mica_tests::{clock, mica};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const STORE: &str = "rados://vol/volumes";

/// The program, which finds the cluster.
fn mica_of(ceph: &Ceph) -> Command {
    let mut mica = Command::new(mica::binary());
    mica.env("CEPH_CONF", ceph.configuration());
    mica
}

fn io(uri: &str, act: &str) -> Finished {
    command::run("qemu-io", ["-f", "raw", "-c", act, "-c", "flush", uri])
}

/// One server with two volumes, another with one of them: the cluster shuts the first one's client
/// out, and it goes on with the other volume as another client.
pub(crate) fn taken_over_by_force(ceph: &Ceph) {
    if !present(&[QEMU_IO]) {
        return;
    }
    for name in ["web", "db"] {
        let mut create = mica_of(ceph);
        let url = format!("{STORE}/{name}");
        command::finish(create.args(["volume", "create", "-q", &url, "16M"])).ok();
    }
    let folder = tempfile::tempdir().expect("a folder");
    let db_socket = folder.path().join("db");
    let old = Server::start("web", |socket| {
        let table = |name: &str, socket: &Path| {
            let socket = socket.display().to_string();
            format!("[[disk]]\nname = {name:?}\nvolume = \"{STORE}/{name}\"\nnbd = {socket:?}\n")
        };
        let config = folder.path().join("mica.toml");
        let text =
            format!("sandbox = \"off\"\n{}{}", table("web", socket), table("db", &db_socket));
        std::fs::write(&config, text).expect("written");
        let mut serve = mica_of(ceph);
        serve.arg("serve").arg("--config").arg(config);
        serve
    });
    let old = old.expect("served");
    let is_there = || db_socket.exists().then_some(());
    let found = clock::poll(Duration::from_secs(60), Duration::from_millis(50), is_there);
    assert!(found.is_some(), "{}", old.log());
    let db = format!("nbd+unix:///db?socket={}", db_socket.display());
    for uri in [&*old.uri(), &*db] {
        io(uri, "write -P 1 0 1M").ok();
    }
    let shut_out = || ceph.ceph(&["osd", "blocklist", "ls"]).matches("127.0.0.1:0/").count();
    let before = shut_out();
    let new = Server::start("", |socket| {
        let mut serve = mica_of(ceph);
        let url = format!("{STORE}/web");
        serve.args(["serve", "--sandbox", "off", "--force", "--volume", &url, "--nbd"]).arg(socket);
        serve
    });
    let new = new.expect("served");
    assert_eq!(shut_out(), before + 1, "{}", new.log());
    io(&new.uri(), "write -P 2 0 1M").ok();
    // The guest of the old one sees errors, and never old data for new.
    let refused = io(&old.uri(), "write -P 3 0 1M");
    assert!(format!("{refused}").contains("failed"), "{refused}");
    io(&db, "write -P 4 0 1M").ok();
    io(&db, "read -P 4 0 1M").ok();
    io(&new.uri(), "read -P 2 0 1M").ok();
    assert!(old.log().contains("connected again"), "{}", old.log());
    assert!(new.connect(&Wish::default()).is_ok());
    assert!(new.stop().expect("stopped").status.success());
    drop(old.stop());
}
