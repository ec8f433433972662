//! A disk that is served, whose states are kept and backed up, and a model of what was written.

use crate::command::Finished;
use crate::server::Server;
use crate::{mica, nbd, qemu, tools};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Bytes of the disk.
pub const LEN: usize = 8 << 20;

/// A server of a chain of two layers, `disk`, which can be killed and started again.
#[derive(Debug)]
pub struct World {
    /// Where the images are, and the sockets `control` and `backup`.
    pub dir: TempDir,
    /// The server, while it runs.
    pub server: Option<Server>,
    /// What the guest wrote.
    pub model: Vec<u8>,
    /// Where [`Self::change`] ends: what is beyond is for other clients.
    pub end: usize,
    random: u64,
}

impl World {
    /// Starts one whose changes are those of `seed`; `None` if a tool is missing, or one of `more`.
    ///
    /// # Panics
    /// If it cannot be served, as all of its functions.
    #[track_caller]
    pub fn new(seed: u64, more: &[tools::Tool]) -> Option<Self> {
        if !tools::present(&[&[tools::QEMU_IMG, tools::QEMU_IO][..], more].concat()) {
            return None;
        }
        let dir = tempfile::tempdir().expect("a folder");
        qemu::create(dir.path(), "base.qcow2", &[], &LEN.to_string());
        qemu::io(dir.path(), &[], "base.qcow2", &["write -P 7 1M 2M"]);
        qemu::overlay(dir.path(), "disk.qcow2", "base.qcow2", &[]);
        let mut model = vec![0; LEN];
        model[1 << 20..3 << 20].fill(7);
        let mut world = Self { dir, server: None, model, end: LEN, random: seed };
        world.start();
        Some(world)
    }

    /// Starts the server, again.
    ///
    /// # Panics
    /// If it does not serve.
    #[track_caller]
    pub fn start(&mut self) {
        let control = self.path("control").display().to_string();
        let image = self.path("disk.qcow2");
        let server = Server::mica_writable(&image, "qcow2", &["--control", &control]);
        self.server = Some(server.expect("served"));
    }

    /// Kills the server.
    pub fn kill(&mut self) {
        drop(self.server.take());
    }

    /// Ends the server well.
    ///
    /// # Panics
    /// If it does not end so.
    #[track_caller]
    pub fn stop(&mut self) {
        let stopped = self.server.take().expect("it runs").stop().expect("it stops");
        assert!(stopped.status.success(), "{stopped:?}");
    }

    /// Where a file of this name is.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Asks the server.
    ///
    /// # Panics
    /// If the program cannot be run.
    #[track_caller]
    pub fn ctl(&self, verb: &[&str]) -> Finished {
        let control = self.path("control").display().to_string();
        mica::run(["ctl", "--control", &control, "--output", "json"].iter().chain(verb))
    }

    /// What the server answers to a query for extents, from its first line on.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn extents(&self, query: &str) -> String {
        let mut stream = UnixStream::connect(self.path("control")).expect("it listens");
        let request = format!(
            "GET /v1/disks/disk/extents?{query} HTTP/1.1\r\nhost: localhost\r\n\
             connection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answered");
        answer
    }

    /// Keeps the present state and exports it.
    ///
    /// # Panics
    /// If the program cannot be run.
    #[track_caller]
    pub fn begin(&self, since: Option<&str>, state: &str) -> Finished {
        let socket = self.path("backup").display().to_string();
        let mut verb = vec!["backup", "begin", "disk", "--as", state, "--nbd", &socket];
        verb.extend(since.iter().flat_map(|since| ["--since", since]));
        self.ctl(&verb)
    }

    /// Where the export of a backup is.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.path("backup").display())
    }

    /// The next random number below this.
    ///
    /// # Panics
    /// If that is 0.
    pub fn draw(&mut self, below: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        usize::try_from((self.random >> 33) % below as u64).expect("fits")
    }

    /// A client of the disk.
    ///
    /// # Panics
    /// If nobody serves.
    #[track_caller]
    pub fn guest(&self) -> nbd::Connection {
        let server = self.server.as_ref().expect("it runs");
        server.connect(&nbd::Wish::default()).expect("served")
    }

    /// Writes or zeroes something.
    ///
    /// # Panics
    /// If that fails.
    #[track_caller]
    pub fn change(&mut self, guest: &mut nbd::Connection) {
        const WRITE_ZEROES: u16 = 6;
        let len = 512 * (1 + self.draw(64));
        let at = 512 * self.draw((self.end - len) / 512);
        let (what, payload) = match self.draw(4) {
            0 => (WRITE_ZEROES, Vec::new()),
            _ => {
                let byte = u8::try_from(1 + self.draw(255)).expect("fits");
                (nbd::CMD_WRITE, vec![byte; len])
            }
        };
        command(guest, what, at, len, &payload);
        match payload.is_empty() {
            true => self.model[at..at + len].fill(0),
            false => self.model[at..at + len].copy_from_slice(&payload),
        }
    }

    /// What QEMU reads of the file of a state.
    ///
    /// # Panics
    /// If it cannot.
    #[track_caller]
    pub fn state(&self, state: &str) -> Vec<u8> {
        raw(self.dir.path(), &format!("disk@{state}.qcow2"))
    }
}

/// The disk of an image, as QEMU reads it.
///
/// # Panics
/// If it cannot.
#[track_caller]
pub fn raw(dir: &Path, image: &str) -> Vec<u8> {
    qemu::img(dir, ["convert", "-U", "-O", "raw", image, "judge.raw"]).ok();
    std::fs::read(dir.join("judge.raw")).expect("converted")
}

/// One request that changes a disk, and its answer.
///
/// # Panics
/// If it fails.
#[track_caller]
pub fn command(client: &mut nbd::Connection, command: u16, at: usize, len: usize, payload: &[u8]) {
    let request = nbd::request(command, 0, 1, at as u64, u32::try_from(len).expect("fits"));
    client.stream.write_all(&[&request[..], payload].concat()).expect("sent");
    let mut reply = [0; nbd::SIMPLE_REPLY_BYTES];
    client.stream.read_exact(&mut reply).expect("answered");
    assert_eq!(reply[4..8], [0; 4], "an error");
}
