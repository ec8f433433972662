//! `mica ctl stream` and `commit`, while a guest works and mica is killed.

use crate::chain::{Chain, KINDS, LAYERS, LEN};
use mica_gen::Rng;
use mica_tests::flag::RaisedAtEnd;
use mica_tests::guest::{Answer, Guest, Request};
use mica_tests::server::Server;
use mica_tests::{clock, judge, qemu, tools};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const TOOLS: &[tools::Tool] = &[tools::QEMU_IMG, tools::QEMU_IO];
const SECTOR: usize = 512;
const LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn serve(chain: &Chain) -> Server {
    serve_image(chain, &chain.top())
}

/// Serves an image that may stand on layers of `chain`.
pub(crate) fn serve_image(chain: &Chain, image: &Path) -> Server {
    let control = chain.path("ctl");
    let words = ["--control", control.to_str().expect("UTF-8"), "--allow-path"];
    let folder = chain.dir().to_str().expect("UTF-8");
    Server::mica_writable(image, "qcow2", &[&words[..], &[folder]].concat()).expect("served")
}

#[track_caller]
pub(crate) fn stop(server: Server) {
    let stopped = server.stop().expect("it stops");
    assert!(stopped.status.success(), "{stopped:?}");
}

/// Runs `mica ctl`.
#[track_caller]
pub(crate) fn ctl(chain: &Chain, args: &[&str]) -> mica_tests::command::Finished {
    chain.mica(&[&["ctl", "--control", "ctl"], args].concat())
}

#[track_caller]
pub(crate) fn job(chain: &Chain) -> Value {
    ctl(chain, &["jobs", "--output", "json"]).json()[0].clone()
}

/// What a guest wrote: the bytes of the disk, where they are known.
struct Written {
    bytes: Vec<u8>,
    rng: Rng,
}

impl Written {
    /// Writes, zeroes and discards until `is_over`, or until the server is gone.
    fn work(&mut self, server: &Server, is_over: &AtomicBool) {
        let Ok(mut guest) = Guest::connect(server) else { return };
        while !is_over.load(Ordering::Relaxed) && self.burst(&mut guest).is_ok() {}
    }

    fn burst(&mut self, guest: &mut Guest) -> anyhow::Result<()> {
        const BURST: usize = 8;
        let part = LEN / SECTOR / BURST;
        let mut under_way = HashMap::new();
        for number in 0..BURST {
            let first = number * part + usize::try_from(self.rng.below(part as u64 - 64))?;
            let count = self.rng.choose(&[1, 3, 8, 64]);
            let range = first * SECTOR..(first + count) * SECTOR;
            let byte = u8::try_from(self.rng.below(255) + 1)?;
            let offset = range.start as u64;
            let bytes = vec![byte; range.len()];
            let request = Request::Write { offset, bytes, fua: false };
            under_way.insert(guest.send(&request)?, (range, byte));
        }
        // Whatever becomes of them: a sector that was sent may have either content.
        while !under_way.is_empty() {
            let (cookie, answer) = guest.receive()?;
            let (range, byte) = under_way.remove(&cookie).expect("asked");
            assert_eq!(answer, Answer::Done(Vec::new()));
            self.bytes[range].fill(byte);
        }
        Ok(())
    }
}

/// Merges by `args` while a guest writes, and judges.
#[track_caller]
fn merged_under_writes(kind: (&str, &str), args: &[&str], layers: usize) {
    let chain = Chain::new(kind);
    let args: Vec<_> =
        args.iter().map(|arg| if *arg == "BASE" { chain.base() } else { arg }).collect();
    let server = serve(&chain);
    let mut written = Written { bytes: chain.expected(), rng: Rng::new(7) };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| written.work(&server, &is_over));
        let over = RaisedAtEnd(&is_over);
        let said = ctl(&chain, &args);
        drop(over);
        let said = said.ok();
        assert!(said.contains("merged"), "{said}");
    });
    let mut client = server.connect(&Default::default()).expect("served");
    judge::same_bytes("the disk", &client.read_all().expect("read"), &written.bytes);
    drop(client);
    let status = ctl(&chain, &["status", "--output", "json"]).json();
    assert_eq!(status["disks"][0]["layers"], layers, "{status}");
    assert_eq!(job(&chain)["state"], "done");
    stop(server);
    assert_eq!(chain.names(LAYERS[4]).len(), layers);
    chain.judge(&written.bytes);
}

#[test]
fn layers_go_up_while_a_guest_writes() {
    if !tools::present(TOOLS) {
        return;
    }
    for kind in KINDS {
        merged_under_writes(kind, &["stream", "top"], 1);
        merged_under_writes(kind, &["stream", "top", "--base", "one.qcow2"], 3);
        merged_under_writes(kind, &["stream", "top", "--base", "BASE"], 2);
    }
}

#[test]
fn layers_go_down_while_a_guest_writes() {
    if !tools::present(TOOLS) {
        return;
    }
    for kind in KINDS {
        merged_under_writes(kind, &["commit", "top", "--top", "three.qcow2"], 4);
        let args = ["commit", "top", "--top", "two.qcow2", "--base", "BASE"];
        merged_under_writes(kind, &args, 3);
    }
}

#[test]
fn active_layer_goes_down_while_a_guest_writes() {
    if !tools::present(TOOLS) {
        return;
    }
    for kind in KINDS {
        merged_under_writes(kind, &["commit", "top"], 5);
        merged_under_writes(kind, &["commit", "top", "--base", "BASE"], 2);
    }
}

/// Merges again and again, with kills at random moments, until the chain is one image.
#[test]
fn killed_merge_leaves_the_chain_and_everything_acknowledged() {
    if !tools::present(TOOLS) {
        return;
    }
    let mut rng = Rng::new(11);
    for (kind, args) in [
        (KINDS[0], &["stream", "top"][..]),
        (KINDS[1], &["commit", "top", "--top", "three.qcow2", "--base", "BASE"]),
        (KINDS[2], &["commit", "top"]),
        (KINDS[4], &["commit", "top", "--base", "BASE"]),
    ] {
        let chain = Chain::new(kind);
        let args: Vec<_> =
            args.iter().map(|arg| if *arg == "BASE" { chain.base() } else { arg }).collect();
        let expected = chain.expected();
        for _ in 0..6 {
            let server = serve(&chain);
            let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw).expect("a process");
            ctl(&chain, &[&args[..], &["--background"]].concat());
            clock::sleep(Duration::from_micros(rng.below(150_000)));
            kill_process(pid, Signal::KILL).expect("killed");
            drop(server);
            let free = clock::poll(LIMIT, Duration::from_millis(10), || {
                let said = qemu::img(chain.dir(), ["info", "-f", "qcow2", LAYERS[4]]);
                said.status.success().then_some(())
            });
            assert!(free.is_some(), "the image stays locked");
            qemu::flatten(chain.dir(), LAYERS[4], "now.raw");
            let now = std::fs::read(chain.path("now.raw")).expect("flat");
            judge::same_bytes("what is left", &now, &expected);
        }
        let server = serve(&chain);
        let mut client = server.connect(&Default::default()).expect("served");
        judge::same_bytes("the disk", &client.read_all().expect("read"), &expected);
        drop(client);
        // One that was done before it was killed finds nothing to merge.
        let _ = ctl(&chain, &args);
        stop(server);
        qemu::flatten(chain.dir(), LAYERS[4], "now.raw");
        let now = std::fs::read(chain.path("now.raw")).expect("flat");
        judge::same_bytes("what is left in the end", &now, &expected);
    }
}

#[test]
fn merge_can_be_paused_and_cancelled_and_goes_on_when_asked_again() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    let server = serve(&chain);
    let none = ctl(&chain, &["cancel", "top"]).refusal();
    assert!(none.contains("top"), "{none}");
    ctl(&chain, &["stream", "top", "--background", "--rate", "1M"]).ok();
    let second = ctl(&chain, &["commit", "top", "--top", "two.qcow2"]).refusal();
    assert!(second.contains("already"), "{second}");
    ctl(&chain, &["pause", "top"]).ok();
    assert_eq!(job(&chain)["state"], "paused");
    ctl(&chain, &["resume", "top"]).ok();
    assert_eq!(job(&chain)["state"], "running");
    ctl(&chain, &["cancel", "top"]).ok();
    let cancelled = job(&chain);
    assert_eq!((&cancelled["state"], &cancelled["kind"]), (&"cancelled".into(), &"stream".into()));
    assert!(cancelled["done"].as_u64() < cancelled["total"].as_u64(), "{cancelled}");
    // A disk that is drained takes its merge along.
    ctl(&chain, &["stream", "top", "--background", "--rate", "1M"]).ok();
    ctl(&chain, &["drain", "top"]).ok();
    ctl(&chain, &["undrain", "top"]).ok();
    ctl(&chain, &["stream", "top"]).ok();
    let listed = ctl(&chain, &["jobs"]).ok();
    assert!(listed.contains("done") && listed.contains("stream"), "{listed}");
    stop(server);
    assert_eq!(chain.names(LAYERS[4]), [LAYERS[4]]);
    chain.judge(&chain.expected());
}

/// The story: what was copied last was missing from what `ctl` and `jobs` said of a merge that was
/// done, which is all of it where the layers have little.
#[test]
fn merge_that_is_done_tells_all_that_it_copied() {
    if !tools::present(TOOLS) {
        return;
    }
    for words in [&["commit", "gold", "--top", "part.qcow2"][..], &["stream", "gold"]] {
        let chain = Chain::new(KINDS[1]);
        let dir = chain.dir();
        qemu::create(dir, "all.qcow2", &[], "8M");
        qemu::overlay(dir, "part.qcow2", "all.qcow2", &[]);
        qemu::io(dir, &[], "part.qcow2", &["write -P 7 1M 1M"]);
        qemu::overlay(dir, "gold.qcow2", "part.qcow2", &[]);
        let server = serve_image(&chain, &chain.path("gold.qcow2"));
        let said = ctl(&chain, words).ok();
        assert!(said.contains("1 MiB copied"), "{said}");
        assert_eq!(job(&chain)["copied_bytes"], 1 << 20);
        stop(server);
    }
}

#[test]
fn layers_that_others_need_are_named_and_not_merged() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    qemu::overlay(chain.dir(), "clone.qcow2", "one.qcow2", &[]);
    let server = serve(&chain);
    let refused = ctl(&chain, &["commit", "top", "--top", "two.qcow2"]).refusal();
    assert!(refused.contains("clone.qcow2"), "{refused}");
    let refused = ctl(&chain, &["stream", "top", "--base", "clone.qcow2"]).refusal();
    assert!(refused.contains("is not a layer"), "{refused}");
    // Another program that reads the base keeps it from being written.
    let reader = Server::mica(&chain.path("three.qcow2"), "qcow2", &[]).expect("served");
    let refused = ctl(&chain, &["commit", "top", "--top", "three.qcow2"]).refusal();
    assert!(refused.contains("two.qcow2") && refused.contains("another process"), "{refused}");
    stop(reader);
    ctl(&chain, &["commit", "top", "--top", "three.qcow2"]).ok();
    stop(server);
    chain.judge(&chain.expected());
    qemu::flatten(chain.dir(), "clone.qcow2", "clone.raw");
}
