//! A disk that is served, and what it should hold.

use mica_gen::Rng;
use mica_tests::command::Finished;
use mica_tests::guest::{Guest, Request};
use mica_tests::takeover::Process;
use mica_tests::{mica, nbd, qemu, tools};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub(crate) const TOOLS: &[tools::Tool] = &[tools::QEMU_IMG, tools::QEMU_IO];
const MB: usize = 1 << 20;
pub(crate) const SIZE: usize = 8 * MB;

/// A server of the disk `vm`, with a control socket.
pub(crate) struct World {
    dir: TempDir,
    pub(crate) server: Option<Process>,
    pub(crate) options: Vec<String>,
    /// The image that the server is started with.
    pub(crate) named: String,
}

impl World {
    /// With `options` of `mica serve`; `None` if QEMU is missing.
    pub(crate) fn new(options: &[&str]) -> Option<Self> {
        Self::of_image(&[], options)
    }

    /// The same, with an image that was made with options of `qemu-img create`.
    pub(crate) fn of_image(made: &[&str], options: &[&str]) -> Option<Self> {
        if !tools::present(TOOLS) {
            return None;
        }
        let dir = tempfile::tempdir().expect("a folder");
        qemu::create(dir.path(), "vm.qcow2", made, "8M");
        Some(Self::served(dir, "vm.qcow2", options))
    }

    /// The same, of the raw image `vm.raw`.
    pub(crate) fn of_raw(options: &[&str]) -> Option<Self> {
        if !tools::present(TOOLS) {
            return None;
        }
        let dir = tempfile::tempdir().expect("a folder");
        fs::write(dir.path().join("vm.raw"), vec![0; SIZE]).expect("there is room");
        let options: Vec<&str> = ["--format", "raw"].iter().chain(options).copied().collect();
        Some(Self::served(dir, "vm.raw", &options))
    }

    /// The same, of the image `named` in `dir`.
    pub(crate) fn served(dir: TempDir, named: &str, options: &[&str]) -> Self {
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        let mut world = Self { dir, server: None, options, named: named.to_owned() };
        world.start();
        world
    }

    pub(crate) fn folder(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn serve(&self, name: &str, more: &[&str]) -> Process {
        let options = ["--nbd", "nbd"].into_iter().chain(more.iter().copied());
        let options = options.chain(self.options.iter().map(|option| &**option));
        let options: Vec<&str> = options.chain([&*self.named]).collect();
        Process::start(self.folder(), name, &options)
    }

    pub(crate) fn start(&mut self) {
        let server = self.serve("log", &[]);
        server.wait_for(&self.folder().join("nbd"));
        self.server = Some(server);
    }

    pub(crate) fn stop(&mut self) {
        self.server.take().expect("it is served").stop();
    }

    pub(crate) fn ctl(&self, verb: &[&str]) -> Finished {
        let control = self.folder().join("control").display().to_string();
        let words = ["ctl"].into_iter().chain(verb.iter().copied());
        mica::run(words.chain(["--control", &control]))
    }

    /// A snapshot, with this file in the folder as the new layer.
    pub(crate) fn snapshot(&self, file: &str, more: &[&str]) -> Finished {
        let path = self.folder().join(file).display().to_string();
        let words: Vec<&str> = ["snapshot", "vm", &path].iter().chain(more).copied().collect();
        self.ctl(&words)
    }

    /// The image that is served now, as `status` says.
    pub(crate) fn image(&self) -> PathBuf {
        let status = self.ctl(&["status", "--output", "json"]).json();
        PathBuf::from(status["disks"][0]["image"].as_str().expect("an image"))
    }

    pub(crate) fn guest(&self) -> Guest {
        guest_at(&self.folder().join("nbd"))
    }

    /// The whole disk, as it is served.
    pub(crate) fn disk(&self) -> Vec<u8> {
        nbd::read_disk(&self.folder().join("nbd")).expect("served")
    }

    /// Nothing is wrong with any of these images, nor does any have leaks.
    #[track_caller]
    pub(crate) fn check(&self, images: impl IntoIterator<Item = String>) {
        for image in images {
            let said = qemu::img(self.folder(), ["check", &image]);
            assert_eq!(said.code(), Some(0), "{said}");
        }
    }

    #[track_caller]
    pub(crate) fn content(&self, image: &str) -> Vec<u8> {
        qemu::flatten(self.folder(), image, "content.raw");
        fs::read(self.folder().join("content.raw")).expect("read")
    }

    /// The active layer, as the marks say.
    pub(crate) fn image_on_disk(&self) -> String {
        let mut image = self.named.clone();
        while let Ok(mark) = fs::read_to_string(self.folder().join(format!("{image}.mica-above"))) {
            image = mark.trim().strip_prefix("above: ").expect("a name").to_owned();
        }
        image
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder()).expect("a folder");
        let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
        let mut names: Vec<_> =
            entries.map(|entry| name(entry).into_string().expect("text")).collect();
        names.retain(|name| name.ends_with(".qcow2") || name.contains("mica-above"));
        names.retain(|name| !name.contains("mica-index"));
        names.sort();
        names
    }
}

pub(crate) fn guest_at(socket: &Path) -> Guest {
    Guest::on(nbd::Connection::open(socket, "", &nbd::Wish::default()).expect("served"))
}

/// A disk as it should be.
pub(crate) struct Model {
    pub(crate) bytes: Vec<u8>,
    /// Where the request is that was not answered, and what was there before.
    unsure: Option<(usize, Vec<u8>)>,
    rng: Rng,
    written: u64,
}

impl Model {
    pub(crate) fn new(seed: u64) -> Self {
        Self { bytes: vec![0; SIZE], unsure: None, rng: Rng::new(seed), written: 0 }
    }

    /// A few writes, zeroes and flushes, all acknowledged.
    pub(crate) fn work(&mut self, guest: &mut Guest) -> anyhow::Result<()> {
        for _ in 0..8 {
            let sectors = self.rng.choose(&[1_usize, 3, 8, 8, 40, 200]);
            let count = u64::try_from(SIZE / 512 - sectors).expect("small");
            let start = usize::try_from(self.rng.below(count)).expect("small") * 512;
            let (offset, len) = (start as u64, sectors * 512);
            self.written += 1;
            let part = &mut self.bytes[start..start + len];
            self.unsure = Some((start, part.to_vec()));
            let request = if self.rng.percent(15) {
                part.fill(0);
                let len = u32::try_from(len)?;
                Request::Zero { offset, len, no_hole: self.rng.percent(50), fua: false }
            } else {
                let stamp = self.written.to_le_bytes();
                part.iter_mut().zip(stamp.iter().cycle()).for_each(|(byte, new)| *byte = *new);
                Request::Write { offset, bytes: part.to_vec(), fua: self.rng.percent(10) }
            };
            assert_eq!(guest.ask(&request)?.errno(), 0);
            self.unsure = None;
        }
        if self.rng.percent(30) {
            assert_eq!(guest.flush()?, 0);
        }
        Ok(())
    }

    /// Compares the disk with what was acknowledged; what was not may be there.
    #[track_caller]
    pub(crate) fn judge(&mut self, now: Vec<u8>, what: &str) {
        let (start, before) = self.unsure.take().unwrap_or_default();
        for at in (0..SIZE).step_by(512) {
            let sector = &now[at..at + 512];
            let old = at.checked_sub(start).and_then(|at| before.get(at..at + 512));
            let is_right = sector == &self.bytes[at..at + 512] || old == Some(sector);
            assert!(is_right, "{what}: the sector at {at} is foreign");
        }
        self.bytes = now;
    }
}

pub(crate) fn layer(number: usize) -> String {
    if number == 0 { "vm.qcow2".to_owned() } else { format!("vm-{number}.qcow2") }
}
