//! Servers of volumes on two hosts. The second one is this machine with another name, and with
//! locks of its own: as far as the store says, another machine that has the same folder mounted.

use super::disk::Disk;
use crate::clock;
use crate::nbd::{self, Connection, Wish};
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::text;
use rustix::process::{Pid, Signal, geteuid, kill_process};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How long a server may take to serve, and to end.
const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(2);
/// How a server says that it cannot begin a log.
pub(super) const NO_ROOM: &str = "has no room for another log";
/// Its name.
pub(super) const SECOND: &str = "storm-second";
/// Makes the second host of this one. Its mounts end with it.
const AS_SECOND: &str = "mount -t tmpfs storm \"$0\" && hostname \"$1\" && shift && exec \"$@\"";

/// Why there can be no second host, if there cannot.
pub(super) fn second_lack() -> Option<&'static str> {
    static LACK: OnceLock<Option<&'static str>> = OnceLock::new();
    *LACK.get_or_init(|| {
        let mut try_it = Command::new("unshare");
        try_it.args(["--mount", "--uts", "--", "true"]).stderr(Stdio::null());
        match geteuid().is_root() && try_it.status().is_ok_and(|status| status.success()) {
            true => None,
            false => Some("only root can give a server another host's name"),
        }
    })
}

/// A program on a host.
pub(super) fn command(binary: &Path, store: &Path, on_second: bool) -> Command {
    if !on_second {
        return Command::new(binary);
    }
    let mut second = Command::new("unshare");
    second.args(["--mount", "--uts", "--propagation", "private", "--", "sh", "-c", AS_SECOND]);
    second.arg(store.join(".locks")).arg(SECOND).arg(binary);
    second
}

/// The log of a host.
#[derive(Clone, Debug)]
pub(super) struct Log {
    pub(super) path: PathBuf,
    pub(super) size: String,
}

/// How one volume is served.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) disk: Arc<Disk>,
    pub(super) log: Option<Log>,
    pub(super) to_store: bool,
    /// Rules for automatic snapshots, and after what else than a time they are taken.
    pub(super) keep: Option<(&'static str, Option<&'static str>)>,
    /// What goes wrong in the store.
    pub(super) faults: Option<&'static str>,
}

impl Plan {
    /// Without a log and all else.
    pub(super) fn plain(disk: Arc<Disk>) -> Self {
        Self { disk, log: None, to_store: true, keep: None, faults: None }
    }

    /// What a flush promises.
    pub(super) fn flushes_to_store(&self) -> bool {
        self.to_store || self.log.is_none()
    }
}

/// Where servers are.
#[derive(Clone, Debug)]
pub(super) struct Site<'a> {
    pub(super) binary: &'a Path,
    pub(super) run: &'a Path,
    pub(super) store: &'a Path,
}

/// A server of some volumes.
#[derive(Debug)]
pub(super) struct Server {
    child: Child,
    pub(super) name: String,
    log: PathBuf,
    pub(super) control: PathBuf,
    pub(super) plans: Vec<Plan>,
}

impl Server {
    /// Starts one.
    ///
    /// # Errors
    /// Trouble of the storm.
    pub(super) fn begin(
        site: &Site<'_>,
        name: &str,
        plans: Vec<Plan>,
        (on_second, by_force): (bool, bool),
    ) -> Outcome<Self> {
        let at = |what: &str| site.run.join(format!("{name}.{what}"));
        let (control, log) = (at("control"), at("log"));
        let mut serve = command(site.binary, site.store, on_second);
        serve.args(["--log-level", "info", "serve", "--control"]).arg(&control);
        if let (true, [plan]) = (by_force, &plans[..]) {
            serve.args(["--force", "--volume", &url(site, plan)?, "--nbd"]);
            serve.arg(socket(site.run, name, plan));
            options(plan)?.iter().for_each(|(key, value)| {
                serve.args([&format!("--{key}"), value]);
            });
            serve.args(plan.faults.iter().flat_map(|faults| ["--inject", faults]));
        } else {
            let config = at("toml");
            fs::write(&config, configuration(site, name, &plans)?)?;
            serve.arg("--config").arg(config);
        }
        let said = File::create(&log)?;
        serve.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
        let child = serve.spawn()?;
        Ok(Self { child, name: name.to_owned(), log, control, plans })
    }

    /// Waits until it serves all; `false` if it ended instead, or says that it does not serve one.
    ///
    /// # Errors
    /// It hangs, or panicked.
    pub(super) fn serves(&mut self, site: &Site<'_>) -> Outcome<bool> {
        for plan in self.plans.clone() {
            let socket = self.socket(site, &plan);
            let start = clock::now();
            while connect(&socket).is_err() {
                if !self.is_running() || self.said().contains("ERROR not served") {
                    self.check()?;
                    return Ok(false);
                }
                if start.elapsed() > LIMIT {
                    return Err(Fault::new(Wrong::Hang, format!("no start: {}", self.said())));
                }
                clock::sleep(PAUSE);
            }
        }
        Ok(true)
    }

    pub(super) fn socket(&self, site: &Site<'_>, plan: &Plan) -> PathBuf {
        socket(site.run, &self.name, plan)
    }

    /// All bytes of one of its disks.
    pub(super) fn read(&self, site: &Site<'_>, plan: &Plan) -> Outcome<Vec<u8>> {
        let read = nbd::read_disk(&self.socket(site, plan));
        read.map_err(|error| {
            Fault::new(Wrong::Failed, format!("reading: {error:#}\n{}", self.said()))
        })
    }

    pub(super) fn is_running(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_none())
    }

    pub(super) fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// It did not panic.
    pub(super) fn check(&self) -> Outcome {
        let said = self.said();
        match said.contains("panicked") {
            true => Err(Fault::new(Wrong::Panicked, said)),
            false => Ok(()),
        }
    }

    pub(super) fn signal(&self, signal: Signal) {
        // It may have ended.
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    /// Kills it.
    pub(super) fn kill(mut self) -> Outcome {
        self.signal(Signal::KILL);
        // An error means that it has ended already.
        let _ = self.child.wait();
        self.check()
    }

    /// Asks it to end; its exit code.
    ///
    /// # Errors
    /// It does not, or panicked.
    pub(super) fn stop(mut self) -> Outcome<(Option<i32>, String)> {
        self.signal(Signal::TERM);
        let Some(status) = crate::command::wait(&mut self.child, LIMIT) else {
            return Err(Fault::new(Wrong::Hang, format!("no end after SIGTERM: {}", self.said())));
        };
        self.check()?;
        Ok((status.code(), self.said()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Connects to one disk.
pub(super) fn connect(socket: &Path) -> anyhow::Result<Connection> {
    Connection::open(socket, "", &Wish::default())
}

fn socket(run: &Path, name: &str, plan: &Plan) -> PathBuf {
    run.join(format!("{name}-{}.sock", plan.disk.name))
}

fn url(site: &Site<'_>, plan: &Plan) -> Outcome<String> {
    Ok(format!("file://{}/{}", text(site.store)?, plan.disk.name))
}

fn options(plan: &Plan) -> Outcome<Vec<(&'static str, String)>> {
    let mut options = Vec::new();
    if let Some(log) = &plan.log {
        options.push(("log-device", text(&log.path)?.to_owned()));
        options.push(("log-size", log.size.clone()));
        options.push(("durability", if plan.to_store { "store" } else { "host" }.to_owned()));
    }
    if let Some((keep, per)) = plan.keep {
        options.push(("keep", keep.to_owned()));
        options.extend(per.map(|per| ("snapshot-per", per.to_owned())));
    }
    Ok(options)
}

fn configuration(site: &Site<'_>, name: &str, plans: &[Plan]) -> Outcome<String> {
    let mut all = String::new();
    for plan in plans {
        let nbd = socket(site.run, name, plan);
        let first = [
            ("name", plan.disk.name.clone()),
            ("volume", url(site, plan)?),
            ("nbd", text(&nbd)?.to_owned()),
        ];
        all += "[[disk]]\n";
        for (key, value) in first.into_iter().chain(options(plan)?) {
            all += &format!("{key} = {value:?}\n");
        }
        all.extend(plan.faults.map(|faults| format!("inject = [{faults:?}]\n")));
    }
    Ok(all)
}
