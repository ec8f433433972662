//! A disk that is served, killed and served again by the same command, under guests that write
//! all the time.

use super::history::{Effect, History, Tick};
use mica_tests::command::Finished;
use mica_tests::guest::{Guest, Request};
use mica_tests::power::{SECTOR, stamps};
use mica_tests::server::Server;
use mica_tests::{clock, mica, qemu};
use mica_units::Rng;
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// Guests that write at once. Each has MiBs of its own.
pub(super) const GUESTS: u64 = 4;
/// Sectors of a MiB, of which one guest writes all.
const STRIPE: u64 = 1 << 11;
/// How long a guest waits for a server.
const PAUSE: Duration = Duration::from_millis(2);

/// A disk of two layers. `disk.qcow2` stays its name, whatever is kept of it.
pub(super) struct Disk {
    pub(super) dir: TempDir,
    sectors: u64,
    server: Mutex<Option<Server>>,
    history: Mutex<History>,
    /// Guests have it shared while a request is under way.
    rest: RwLock<()>,
    has_ended: AtomicBool,
}

/// Ends the guests when it goes, whatever the reason.
pub(super) struct Ending<'a>(&'a Disk);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.has_ended.store(true, Ordering::Relaxed);
    }
}

/// What the base holds: the first quarter of each MiB.
fn is_in_base(sector: u64) -> bool {
    sector % STRIPE < STRIPE / 4
}

impl Disk {
    /// Makes a disk of so many bytes, and serves it.
    pub(super) fn new(bytes: u64) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let sectors = bytes / SECTOR;
        let raw = File::create(dir.path().join("base.raw")).expect("created");
        raw.set_len(bytes).expect("it may be so long");
        for stripe in 0..sectors / STRIPE {
            let first = stripe * STRIPE;
            let stamped = stamps(first..first + STRIPE / 4, 1);
            raw.write_all_at(&stamped, first * SECTOR).expect("written");
        }
        let convert = ["convert", "-f", "raw", "-O", "qcow2", "base.raw", "base.qcow2"];
        qemu::img(dir.path(), convert).ok();
        std::fs::remove_file(dir.path().join("base.raw")).expect("it is there");
        qemu::overlay(dir.path(), "disk.qcow2", "base.qcow2", &[]);
        let history = Mutex::new(History::new(sectors, is_in_base));
        let (server, rest) = (Mutex::new(None), RwLock::new(()));
        let disk = Self { dir, sectors, server, history, rest, has_ended: AtomicBool::new(false) };
        disk.start();
        disk
    }

    /// Guests end with what is returned.
    pub(super) fn until_the_end(&self) -> Ending<'_> {
        Ending(self)
    }

    /// Where a file of this name is.
    pub(super) fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// What is known of its sectors.
    pub(super) fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock()
    }

    /// The present moment.
    pub(super) fn now(&self) -> Tick {
        self.history().now()
    }

    fn server(&self) -> MutexGuard<'_, Option<Server>> {
        self.server.lock()
    }

    /// Serves it, again.
    pub(super) fn start(&self) {
        let image = self.dir.path().join("disk.qcow2");
        let control = self.path("control");
        let server = Server::mica_writable(&image, "qcow2", &["--control", &control]);
        *self.server() = Some(server.expect("served"));
    }

    /// Kills the server.
    pub(super) fn kill(&self) {
        // Guests may be about to connect; they are not to wait for the one that dies.
        let killed = self.server().take();
        drop(killed);
    }

    /// Ends the server well.
    pub(super) fn stop(&self) {
        let server = self.server().take().expect("it runs");
        let stopped = server.stop().expect("it stops");
        assert!(stopped.status.success() && !stopped.log.contains("panicked"), "{stopped:?}");
    }

    /// Asks the server.
    pub(super) fn ctl(&self, verb: &[&str]) -> Finished {
        let control = self.path("control");
        mica::run(["ctl", "--control", &control, "--output", "json"].iter().chain(verb))
    }

    /// A client, once somebody serves; `None` if that is not to be any more.
    fn guest(&self) -> Option<Guest> {
        while !self.has_ended.load(Ordering::Relaxed) {
            let guest = self.server().as_ref().map(Guest::connect);
            // It may be killed just now.
            if let Some(Ok(guest)) = guest {
                return Some(guest);
            }
            clock::sleep(PAUSE);
        }
        None
    }

    /// Writes, zeroes, discards and flushes as guest `number` until the end.
    pub(super) fn work(&self, number: u64, seed: u64) {
        let mut rng = Rng::for_part(seed, 1 + number);
        while let Some(mut guest) = self.guest() {
            while !self.has_ended.load(Ordering::Relaxed)
                && self.request(&mut guest, number, &mut rng)
            {
                clock::sleep(Duration::from_micros(rng.choose(&[0, 500, 2000, 10_000])));
            }
        }
    }

    /// One request; returns whether the server lives.
    fn request(&self, guest: &mut Guest, number: u64, rng: &mut Rng) -> bool {
        let _shared = self.rest.read();
        let len = rng.choose(&[1, 1, 3, 8, 8, 8, 8, 16, 64]);
        let stripe = number + GUESTS * rng.below(self.sectors / STRIPE / GUESTS);
        let first = stripe * STRIPE + rng.below(STRIPE - len + 1);
        let (offset, bytes) = (first * SECTOR, u32::try_from(len * SECTOR).expect("small"));
        let sectors = first..first + len;
        let fua = rng.percent(3);
        let (request, sent) = match rng.below(100) {
            0..4 => (Request::Flush, None),
            4..16 => {
                let sent = self.history().send(sectors, Effect::Zeros);
                let no_hole = rng.percent(50);
                (Request::Zero { offset, len: bytes, no_hole, fua }, Some(sent))
            }
            16..22 => {
                let sent = self.history().send(sectors, Effect::MayZero);
                (Request::Trim { offset, len: bytes, fua }, Some(sent))
            }
            _ => {
                let sent = self.history().send(sectors.clone(), Effect::Stamps);
                let bytes = stamps(sectors, sent.number);
                (Request::Write { offset, bytes, fua }, Some(sent))
            }
        };
        let answer = guest.ask(&request);
        if let Some(sent) = sent {
            match &answer {
                Ok(_) => self.history().answered(&sent),
                Err(_) => self.history().abandoned(&sent),
            }
        }
        match answer {
            Ok(answer) => {
                assert_eq!(answer.errno(), 0, "guest {number} is refused a request");
                true
            }
            Err(_) => false,
        }
    }

    /// What a client reads of it is what was written, while its guests rest.
    #[track_caller]
    pub(super) fn judge(&self, what: &str) {
        let _alone = self.rest.write();
        let client = self.server().as_ref().expect("it runs").connect(&Default::default());
        let shown = client.and_then(|mut client| client.read_all()).expect("read");
        let now = self.now();
        let judged = self.history().judge(&shown, now..now);
        judged.unwrap_or_else(|wrong| panic!("{what}: {wrong}"));
    }
}
