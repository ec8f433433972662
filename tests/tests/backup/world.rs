//! A disk that is served, whose states are kept and backed up, and a model of what was written.

use mica_tests::command::Finished;
use mica_tests::server::Server;
use mica_tests::{mica, nbd, qemu, tools};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub(crate) const LEN: usize = 8 << 20;

/// A server of a chain of two layers, `disk`, which can be killed and started again.
pub(crate) struct World {
    pub(crate) dir: TempDir,
    server: Option<Server>,
    pub(crate) model: Vec<u8>,
    random: u64,
}

impl World {
    pub(crate) fn new(seed: u64) -> Option<Self> {
        if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
            return None;
        }
        let dir = tempfile::tempdir().expect("a folder");
        qemu::create(dir.path(), "base.qcow2", &[], &LEN.to_string());
        qemu::io(dir.path(), &[], "base.qcow2", &["write -P 7 1M 2M"]);
        qemu::overlay(dir.path(), "disk.qcow2", "base.qcow2", &[]);
        let mut model = vec![0; LEN];
        model[1 << 20..3 << 20].fill(7);
        let mut world = Self { dir, server: None, model, random: seed };
        world.start();
        Some(world)
    }

    pub(crate) fn start(&mut self) {
        let control = self.path("control").display().to_string();
        let image = self.path("disk.qcow2");
        let server = Server::mica_writable(&image, "qcow2", &["--control", &control]);
        self.server = Some(server.expect("served"));
    }

    pub(crate) fn kill(&mut self) {
        drop(self.server.take());
    }

    pub(crate) fn stop(&mut self) {
        let stopped = self.server.take().expect("it runs").stop().expect("it stops");
        assert!(stopped.status.success(), "{stopped:?}");
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn ctl(&self, verb: &[&str]) -> Finished {
        let control = self.path("control").display().to_string();
        mica::run(["ctl", "--control", &control, "--output", "json"].iter().chain(verb))
    }

    /// Keeps the present state and exports it.
    pub(crate) fn begin(&self, since: Option<&str>, state: &str) -> Finished {
        let socket = self.path("backup").display().to_string();
        let mut verb = vec!["backup", "begin", "disk", "--as", state, "--nbd", &socket];
        verb.extend(since.iter().flat_map(|since| ["--since", since]));
        self.ctl(&verb)
    }

    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.path("backup").display())
    }

    pub(crate) fn draw(&mut self, below: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        usize::try_from((self.random >> 33) % below as u64).expect("fits")
    }

    /// A client of the disk.
    pub(crate) fn guest(&self) -> nbd::Connection {
        let server = self.server.as_ref().expect("it runs");
        server.connect(&nbd::Wish::default()).expect("served")
    }

    /// Writes, zeroes or discards something.
    pub(crate) fn change(&mut self, guest: &mut nbd::Connection) {
        const WRITE_ZEROES: u16 = 6;
        let len = 512 * (1 + self.draw(64));
        let at = 512 * self.draw((LEN - len) / 512);
        let (command, payload) = match self.draw(4) {
            0 => (WRITE_ZEROES, Vec::new()),
            _ => {
                let byte = u8::try_from(1 + self.draw(255)).expect("fits");
                (nbd::CMD_WRITE, vec![byte; len])
            }
        };
        let request = nbd::request(command, 0, 1, at as u64, u32::try_from(len).expect("fits"));
        guest.stream.write_all(&[&request[..], &payload].concat()).expect("sent");
        let mut reply = [0; nbd::SIMPLE_REPLY_BYTES];
        guest.stream.read_exact(&mut reply).expect("answered");
        assert_eq!(reply[4..8], [0; 4], "an error");
        match payload.is_empty() {
            true => self.model[at..at + len].fill(0),
            false => self.model[at..at + len].copy_from_slice(&payload),
        }
    }

    /// What QEMU reads of the state's file.
    pub(crate) fn state(&self, state: &str) -> Vec<u8> {
        raw(self.dir.path(), &format!("disk@{state}.qcow2"))
    }
}

/// The disk of an image, as QEMU reads it.
pub(crate) fn raw(dir: &Path, image: &str) -> Vec<u8> {
    qemu::img(dir, ["convert", "-U", "-O", "raw", image, "judge.raw"]).ok();
    std::fs::read(dir.join("judge.raw")).expect("converted")
}

/// The disk of the state called `state` in `folder`, restored as `format`, as QEMU reads it.
pub(crate) fn restored(dir: &Path, folder: &str, state: &str, format: &str) -> Vec<u8> {
    let (source, file) = (dir.join(folder), dir.join("restored"));
    let source = format!("{}@{state}", source.display());
    let file_name = file.display().to_string();
    mica::run(["restore", "--force", "-q", "-O", format, &source, &file_name]).ok();
    qemu::img(dir, ["check", "-f", format, "restored"]);
    qemu::img(dir, ["convert", "-f", format, "-O", "raw", "restored", "judge.raw"]).ok();
    std::fs::read(dir.join("judge.raw")).expect("converted")
}
