//! Starts a block server, waits until it serves, measures and stops it. Only processes that were
//! started here are signalled, through the handle from starting them.

use crate::{clock, command, mica, nbd};
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// How long a server may take until it serves.
const OPEN_LIMIT: Duration = Duration::from_secs(300);
/// How long a server may take to stop.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// A server that was started here. Dropping it kills it.
#[derive(Debug)]
pub struct Server {
    child: Child,
    folder: TempDir,
    export: String,
    /// Time from its start until an NBD client had shaken hands with it.
    pub open: Duration,
}

/// A server that has stopped.
#[derive(Debug)]
pub struct Stopped {
    /// How it ended.
    pub status: ExitStatus,
    /// Its whole output.
    pub log: String,
    /// Whether it left its socket behind.
    pub socket_left: bool,
}

impl Server {
    /// Starts mica on `image`, read-only, with `more` options.
    ///
    /// # Errors
    /// If it does not get to serve.
    pub fn mica(image: &Path, format: &str, more: &[&str]) -> Result<Self> {
        Self::mica_writable(image, format, &[&["--read-only"], more].concat())
    }

    /// Starts mica on `image`, to be written, with `more` options.
    ///
    /// # Errors
    /// If it does not get to serve.
    pub fn mica_writable(image: &Path, format: &str, more: &[&str]) -> Result<Self> {
        Self::start("", |socket| {
            let mut serve = Command::new(mica::binary());
            serve.arg("serve").arg("--nbd").arg(socket).args(["--format", format]).args(more);
            serve.arg(image);
            serve
        })
    }

    /// Starts the server that `command` makes for a socket, and waits until it serves `export`.
    ///
    /// # Errors
    /// If it ends, or does not serve in time; with its output.
    pub fn start(export: &str, command: impl FnOnce(&Path) -> Command) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("mica-").tempdir()?;
        let socket = folder.path().join("socket");
        let log = File::create(folder.path().join("log"))?;
        let mut command = command(&socket);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let start = clock::now();
        let child = command.spawn().with_context(|| format!("starting {command:?}"))?;
        let export = export.to_owned();
        let mut server = Self { child, folder, export, open: Duration::ZERO };
        loop {
            if socket.exists() && server.connect(&nbd::Wish::default()).is_ok() {
                server.open = start.elapsed();
                return Ok(server);
            }
            if let Some(status) = server.child.try_wait()? {
                bail!("{command:?}: {status}\n{}", server.log());
            }
            if start.elapsed() > OPEN_LIMIT {
                bail!("{command:?} does not serve after {OPEN_LIMIT:?}\n{}", server.log());
            }
            clock::sleep(Duration::from_micros(300));
        }
    }

    /// Its socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Its URI, as NBD clients take it.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///{}?socket={}", self.export, self.socket().display())
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Connects our own client.
    ///
    /// # Errors
    /// If the handshake fails.
    pub fn connect(&self, wish: &nbd::Wish) -> Result<nbd::Connection> {
        nbd::Connection::open(&self.socket(), &self.export, wish)
    }

    /// Its output so far.
    pub fn log(&self) -> String {
        let log = fs::read(self.folder.path().join("log")).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    /// Processor time that it has used so far, all threads together.
    pub fn processor_time(&self) -> Duration {
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid()));
        let nanoseconds = threads.into_iter().flatten().flatten().filter_map(|thread| {
            let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
            text.split(' ').next()?.parse::<u64>().ok()
        });
        Duration::from_nanos(nanoseconds.sum())
    }

    /// Memory that it uses now, and its peak, in bytes.
    pub fn memory(&self) -> (u64, u64) {
        let text = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap_or_default();
        let field = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        };
        (field("VmRSS:").unwrap_or(0) * 1024, field("VmHWM:").unwrap_or(0) * 1024)
    }

    /// Asks it to stop (SIGTERM) and waits until it has.
    ///
    /// # Errors
    /// If it does not stop in time; it is killed then.
    pub fn stop(mut self) -> Result<Stopped> {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        kill_process(pid.context("no process")?, Signal::TERM)?;
        let Some(status) = command::wait(&mut self.child, STOP_LIMIT) else {
            bail!("the server still runs {STOP_LIMIT:?} after SIGTERM\n{}", self.log());
        };
        Ok(Stopped { status, log: self.log(), socket_left: self.socket().exists() })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Errors mean that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
