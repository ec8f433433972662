//! A round: an image of one shape, and sessions of guests on it until it had its requests.

use super::burst::{Shadow, same};
use super::shapes::{self, Shape, Start};
use anyhow::{Context, Result, ensure};
use mica_gen::Rng;
use mica_tests::guest::Guest;
use mica_tests::server::Server;
use mica_tests::{command, mica, qemu};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Requests of a shape by default; in CI all shapes together take half a minute.
const OPS_DEFAULT: u64 = 240;
/// Requests on one image; for more, another is made, so that a failure is quickly reproduced.
const ROUND_OPS_MAX: u64 = 4000;
/// Maximum number of internal snapshots of an image.
const SNAPSHOTS_MAX: usize = 3;

/// Runs rounds on all `shapes`.
pub(super) fn all(shapes: &[Shape]) {
    if !shapes::tools_present() {
        return;
    }
    let told = |name| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    let ops: u64 = told("MICA_FSX_OPS").unwrap_or(OPS_DEFAULT);
    let first_seed: u64 = told("MICA_FSX_SEED").unwrap_or(1);
    let only = std::env::var("MICA_FSX_SHAPE").ok();
    let wanted = shapes.iter().filter(|shape| only.as_ref().is_none_or(|only| only == shape.name));
    let mut failed = Vec::new();
    for shape in wanted {
        for (seed, number) in (first_seed..).zip(0..ops.div_ceil(ROUND_OPS_MAX)) {
            let ops = (ops - number * ROUND_OPS_MAX).min(ROUND_OPS_MAX);
            let run = std::panic::AssertUnwindSafe(|| round(shape, seed, ops));
            let why = match std::panic::catch_unwind(run) {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => format!("{error:#}"),
                // The panic hook has reported it already.
                Err(_) => "a panic, see above".to_owned(),
            };
            failed.push(format!(
                "{why}\n  MICA_FSX_SHAPE={} MICA_FSX_SEED={seed} MICA_FSX_OPS={ops} \
                 cargo test -p mica-tests --test write fsx",
                shape.name
            ));
            break;
        }
    }
    assert!(failed.is_empty(), "\n{}", failed.join("\n"));
}

/// An image, what is in it, and what is in its snapshots.
struct Round<'a> {
    dir: &'a Path,
    shape: &'a Shape,
    shadow: Shadow,
    snapshots: Vec<(String, Vec<u8>)>,
    sessions: u64,
}

fn round(shape: &Shape, seed: u64, ops: u64) -> Result<()> {
    let mut rng = Rng::for_part(seed, shape.name.bytes().map(u64::from).sum());
    let folder = tempfile::tempdir()?;
    let worked = sessions(shape, folder.path(), ops, &mut rng);
    // The images of a failed round are worth inspecting.
    worked.map_err(|error| error.context(format!("in {}", folder.keep().display())))
}

fn sessions(shape: &Shape, dir: &Path, ops: u64, rng: &mut Rng) -> Result<()> {
    shape.make(dir, rng);
    let bytes = flat(dir, &[])?;
    let shadow = Shadow::new(bytes, shape.cluster_bytes());
    let mut round = Round { dir, shape, shadow, snapshots: Vec::new(), sessions: 0 };
    let mut done = 0;
    while done < ops {
        if round.sessions > 0 || shape.start == Start::Snapshot {
            round.qemu_acts(rng)?;
        }
        round.sessions += 1;
        let wanted = (60 + rng.below(200)).min(ops - done);
        let session = round.session(wanted, rng);
        session.with_context(|| format!("session {}, request {done} and on", round.sessions))?;
        done += wanted;
        round.judge().with_context(|| format!("after session {}", round.sessions))?;
    }
    Ok(())
}

/// What QEMU reads of the disk, or of a snapshot that `more` names.
fn flat(dir: &Path, more: &[&str]) -> Result<Vec<u8>> {
    let convert = ["convert", "-f", "qcow2", "-O", "raw"];
    qemu::img(dir, convert.iter().chain(more).chain(&["disk.qcow2", "flat.raw"])).ok();
    Ok(fs::read(dir.join("flat.raw"))?)
}

impl Round<'_> {
    /// Guests write and read, over two connections, and mica stops.
    fn session(&mut self, ops: u64, rng: &mut Rng) -> Result<()> {
        let aio = rng.choose(&["io_uring", "threads"]);
        let queues = rng.choose(&["1", "2"]);
        let discard = rng.choose(&["unmap", "unmap", "ignore"]);
        let options = ["--aio", aio, "--queues", queues, "--discard", discard];
        let image = self.dir.join("disk.qcow2");
        let server = Server::mica_writable(&image, "qcow2", &options)?;
        let mut guests = [Guest::connect(&server)?, Guest::connect(&server)?];
        ensure!(guests[0].len() == self.shape.bytes(), "length of the disk");
        let mut done = 0;
        let mut work = || -> Result<()> {
            while done < ops {
                done += self.shadow.burst(&mut guests, rng)?;
            }
            Ok(())
        };
        let worked = work();
        worked.with_context(|| format!("{options:?}; {} said: {}", done, server.log()))?;
        if rng.percent(50) {
            let [one, other] = guests;
            one.disconnect()?;
            other.disconnect()?;
        }
        let stopped = server.stop()?;
        ensure!(stopped.status.code() == Some(0), "it ends with {stopped:?}");
        let no_log = "writes that are not flushed are lost if this process is killed";
        let has_log = !self.shape.options.contains("compat=0.10") && self.snapshots.is_empty();
        let warnings = stopped.log.matches(no_log).count();
        ensure!(warnings == usize::from(!has_log), "a log is missing, or not: {}", stopped.log);
        let expected = [" INFO serving "];
        let is_expected = |line: &&str| {
            expected.iter().any(|start| line.starts_with(start)) || line.contains(no_log)
        };
        let complaint = stopped.log.lines().find(|line| !is_expected(line));
        ensure!(complaint.is_none(), "it has something to say: {}", stopped.log);
        Ok(())
    }

    /// QEMU finds nothing wrong, and reads what was written.
    fn judge(&self) -> Result<()> {
        let said = qemu::img(self.dir, ["check", "-f", "qcow2", "disk.qcow2"]);
        ensure!(said.code() == Some(0), "{said}");
        same(0, &flat(self.dir, &[])?, &self.shadow.bytes).context("what QEMU reads")?;
        for (name, wanted) in &self.snapshots {
            same(0, &flat(self.dir, &["-l", name])?, wanted)
                .with_context(|| format!("snapshot {name}"))?;
        }
        if self.shape.options.contains("data_file_raw=on") {
            let data = fs::read(self.dir.join("disk.data"))?;
            same(0, &data, &self.shadow.bytes).context("the raw data file")?;
        }
        let image = self.dir.join("disk.qcow2");
        let ours = command::finish(Command::new(mica::binary()).arg("check").arg(image));
        ensure!(ours.code() == Some(0), "{ours}");
        Ok(())
    }

    /// QEMU writes the image, as another session of the guest or of its owner.
    fn qemu_acts(&mut self, rng: &mut Rng) -> Result<()> {
        let shape = self.shape;
        let mut commands: Vec<_> =
            (0..3).map(|_| shapes::random_write(shape.bytes(), rng)).collect();
        if shape.start == Start::Packed {
            let clusters = shape.bytes() / shape.cluster_bytes();
            let at = rng.below(clusters) * shape.cluster_bytes();
            // QEMU does not compress a cluster again that has its space.
            commands.push(format!("discard {at} {}", shape.cluster_bytes()));
            commands.push(format!("write -c -P 77 {at} {}", shape.cluster_bytes()));
        }
        let commands: Vec<_> = commands.iter().map(String::as_str).collect();
        qemu::io(self.dir, &["-d", "unmap", "-f", "qcow2"], "disk.qcow2", &commands);
        match shape.start {
            Start::Bitmap => {
                let name = format!("bitmap-{}", self.sessions);
                qemu::img(self.dir, ["bitmap", "--add", "disk.qcow2", &name]).ok();
            }
            Start::Snapshot => {
                if self.snapshots.len() >= SNAPSHOTS_MAX {
                    let (name, _) = self.snapshots.remove(0);
                    qemu::img(self.dir, ["snapshot", "-d", &name, "disk.qcow2"]).ok();
                }
                let name = format!("snapshot-{}", self.sessions);
                qemu::img(self.dir, ["snapshot", "-c", &name, "disk.qcow2"]).ok();
                self.snapshots.push((name, flat(self.dir, &[])?));
            }
            Start::Empty | Start::Packed => {}
        }
        self.shadow.bytes = flat(self.dir, &[])?;
        Ok(())
    }
}
