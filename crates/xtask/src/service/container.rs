//! A system that is booted in a container, and commands in it.
//!
//! Invariants
//! - I1 It ends with this program, however that ends: dropped, or killed (`setpriv`).
//! - I2 Only processes that were started here are signalled, by their ids.

use anyhow::{Context, Result, bail, ensure};
use mica_tests::{clock, command};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How long it may take to boot, and to end.
const BOOT_MAX: Duration = Duration::from_secs(120);
const END_MAX: Duration = Duration::from_secs(60);
/// How long a command in it may take: a package that is upgraded is not installed for minutes.
const COMMAND_MAX: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(50);
/// What mica asks of the kernel, and nspawn of old does not know.
const CALLS: &str = "--system-call-filter=io_uring_setup io_uring_enter io_uring_register \
                     landlock_create_ruleset landlock_add_rule landlock_restrict_self";

/// It runs while this lives.
pub(super) struct Container {
    nspawn: Nspawn,
    /// Its first process, as this machine counts.
    leader: Pid,
}

/// What a command in it said.
pub(super) struct Said {
    /// 0 for success.
    pub(super) code: i32,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

impl Container {
    /// Boots the system in `root`; `console` gets what it writes meanwhile.
    pub(super) fn boot(root: &Path, console: &Path) -> Result<Self> {
        let log = File::create(console).with_context(|| console.display().to_string())?;
        let mut nspawn = Command::new("setpriv");
        nspawn.args(["--pdeathsig", "KILL", "systemd-nspawn", "--quiet", "--register=no"]);
        nspawn.args(["--keep-unit", "--private-network", "--link-journal=no", CALLS]);
        nspawn.args(["--machine=mica-service", "--resolv-conf=off", "--timezone=off"]);
        nspawn.arg("--directory").arg(root).arg("--boot");
        nspawn.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // An interrupt at the terminal is for this program, whose end is that of the container.
        let child = nspawn.process_group(0).spawn().context("starting systemd-nspawn")?;
        let mut nspawn = Nspawn { child, console: console.to_owned() };
        let leader = nspawn.wait_for_leader()?;
        let container = Self { nspawn, leader };
        let up = clock::poll(BOOT_MAX, PAUSE * 4, || {
            let state = container.run(["systemctl", "is-system-running"]).ok()?;
            ["running", "degraded"].contains(&state.stdout.trim()).then_some(())
        });
        up.with_context(|| format!("it does not boot: see {}", console.display()))?;
        Ok(container)
    }

    /// Which systemd it has.
    pub(super) fn version(&self) -> Result<String> {
        let said = self.ok(["systemctl", "--version"])?;
        Ok(said.lines().next().unwrap_or_default().to_owned())
    }

    /// Where this machine finds a file of it, also one in memory.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        format!("/proc/{}/root{path}", self.leader.as_raw_nonzero()).into()
    }

    /// Runs a command in it.
    pub(super) fn run<'a>(&self, words: impl IntoIterator<Item = &'a str>) -> Result<Said> {
        let words: Vec<_> = words.into_iter().collect();
        let [mut stdout, mut stderr] = [tempfile::tempfile()?, tempfile::tempfile()?];
        let mut inside = Command::new("nsenter");
        inside.arg("--target").arg(self.leader.as_raw_nonzero().to_string()).arg("--all");
        inside.args(&words).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        inside.env("HOME", "/root").env("LC_ALL", "C.UTF-8");
        inside.env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
        inside.stdout(stdout.try_clone()?).stderr(stderr.try_clone()?);
        let mut child = inside.spawn().context("starting nsenter")?;
        let status = command::wait(&mut child, COMMAND_MAX);
        let [stdout, stderr] = [text(&mut stdout)?, text(&mut stderr)?];
        let code = status.and_then(|status| status.code()).with_context(|| {
            format!("{:?} has not ended after {COMMAND_MAX:?}: {stdout}{stderr}", words.join(" "))
        })?;
        Ok(Said { code, stdout, stderr })
    }

    /// Runs a command in it that has to succeed, and returns its output.
    pub(super) fn ok<'a>(&self, words: impl IntoIterator<Item = &'a str>) -> Result<String> {
        let words: Vec<_> = words.into_iter().collect();
        let Said { code, stdout, stderr } = self.run(words.iter().copied())?;
        ensure!(code == 0, "{:?} fails with {code}: {}{}", words.join(" "), stdout, stderr.trim());
        Ok(stdout)
    }

    /// Runs a line of shell in it that has to succeed.
    pub(super) fn shell(&self, line: &str) -> Result<String> {
        self.ok(["sh", "-ec", line])
    }

    /// Shuts it down.
    pub(super) fn end(mut self) -> Result<()> {
        self.nspawn.shut_down()
    }
}

/// The program that holds the container; dropping it ends both.
struct Nspawn {
    child: Child,
    /// The file with what the system writes.
    console: PathBuf,
}

impl Nspawn {
    /// The child that is the first process of others.
    fn wait_for_leader(&mut self) -> Result<Pid> {
        let id = self.child.id();
        let found = clock::poll(BOOT_MAX, PAUSE, || {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(Err(status));
            }
            let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
            let children = children.unwrap_or_default();
            children.split_whitespace().find(|child| is_first(child))?.parse().ok().map(Ok)
        });
        let console = self.console.display();
        match found {
            Some(Ok(leader)) => Pid::from_raw(leader).context("a process has no id"),
            Some(Err(status)) => bail!("systemd-nspawn: {status}: see {console}"),
            None => bail!("systemd-nspawn starts no system: see {console}"),
        }
    }

    /// nspawn has the system power off.
    fn shut_down(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_some() {
            return Ok(());
        }
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(id.context("a process has no id")?, Signal::TERM)?;
        let status = command::wait(&mut self.child, END_MAX);
        ensure!(status.is_some(), "it had to be killed: see {}", self.console.display());
        Ok(())
    }
}

impl Drop for Nspawn {
    fn drop(&mut self) {
        if self.shut_down().is_err() {
            // An error means that it has ended.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Whether a process is the first one of a container: any other would be in this machine's name
/// spaces, at least in part.
fn is_first(process: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let of = |key| status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
    let mut ids = of("NSpid:").split_whitespace();
    of("Name:").trim() == "systemd" && ids.clone().count() > 1 && ids.next_back() == Some("1")
}

fn text(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
