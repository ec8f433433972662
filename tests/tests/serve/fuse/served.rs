//! `mica serve --fuse`, and the file that it serves.

use mica_tests::{clock, command, mica, tools};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// What the file holds while no disk is mounted over it.
pub(super) const UNDERNEATH: &[u8] = b"what lies underneath";
const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(2);

/// Whether this process may mount, and has `needed`; prints why if not.
pub(super) fn may_run(needed: &[tools::Tool]) -> bool {
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let mut missing = tools::missing(needed);
    if !rustix::process::geteuid().is_root() || device.is_err() {
        missing.push("root and /dev/fuse".to_owned());
    }
    tools::none_missing(&missing)
}

/// A server that was started here.
pub(super) struct Served {
    child: Child,
    file: PathBuf,
    log: PathBuf,
}

impl Served {
    /// Serves `image` in `dir` as the file `disk` there, with `more` options.
    #[track_caller]
    pub(super) fn start(dir: &Path, image: &str, more: &[&str]) -> Self {
        let mut served = Self::begin(dir, image, more);
        let there = clock::poll(LIMIT, PAUSE, || {
            let ended = served.child.try_wait().expect("a child");
            assert!(ended.is_none(), "it does not serve: {}", served.log());
            let len = served.file.metadata().ok()?.len();
            (len != UNDERNEATH.len() as u64).then_some(())
        });
        assert!(there.is_some(), "no disk appears: {}", served.log());
        served
    }

    fn begin(dir: &Path, image: &str, more: &[&str]) -> Self {
        let file = dir.join("disk");
        // A dead mount cannot be written to; the server has to remove it.
        if !is_mounted(&file) {
            fs::write(&file, UNDERNEATH).expect("written");
        }
        let log = dir.join("log");
        let said = File::create(&log).expect("made");
        let mut serve = command(&file, &dir.join(image), more);
        serve.stdin(Stdio::null()).stdout(said.try_clone().expect("cloned")).stderr(said);
        Self { child: serve.spawn().expect("started"), file, log }
    }

    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    pub(super) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The disk, to be read and written.
    pub(super) fn open(&self) -> File {
        OpenOptions::new().read(true).write(true).open(&self.file).expect("opened")
    }

    /// Asks it to stop. Afterwards the file is as it was before.
    #[track_caller]
    pub(super) fn stop(mut self) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process"), Signal::TERM).expect("it runs");
        let status = command::wait(&mut self.child, LIMIT).expect("it stops");
        assert!(status.success(), "{status}: {}", self.log());
        assert_eq!(fs::read(&self.file).expect("unmounted"), UNDERNEATH);
    }

    /// Kills it, which leaves its mount behind.
    pub(super) fn kill(mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("a child");
        // Without the cleanup of `drop`: the next server has to find what this one left.
        std::mem::forget(self);
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // It has ended unless a test failed; nothing must stay mounted then.
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        unmount_all(&self.file);
    }
}

/// How `image` is served as `file`.
pub(super) fn command(file: &Path, image: &Path, more: &[&str]) -> Command {
    let mut serve = Command::new(mica::binary());
    serve.args(["serve", "--format", "qcow2", "--fuse"]).arg(file).args(more).arg(image);
    serve
}

fn is_mounted(file: &Path) -> bool {
    let name = file.display().to_string();
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("readable");
    mounts.lines().any(|line| line.split(' ').nth(4) == Some(&name))
}

fn unmount_all(file: &Path) {
    while is_mounted(file) {
        let status = Command::new("umount").arg("-l").arg(file).stderr(Stdio::null()).status();
        if !status.is_ok_and(|status| status.success()) {
            return;
        }
    }
}

/// Kills what is left of a mount when a test ends, however it ends.
pub(super) struct Cleared<'a>(pub(super) &'a Path);

impl Drop for Cleared<'_> {
    fn drop(&mut self) {
        unmount_all(self.0);
    }
}
