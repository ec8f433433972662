//! A limit on the threads of a process that runs, as a service manager or a container sets one: a
//! control group with the controller "pids".

use crate::clock;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Where the controller may be: a hierarchy of its own (version 1), or the one of all (version 2).
const ROOTS: [&str; 2] = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"];
/// How long the system may count a process that has ended.
const LIMIT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(2);

/// A control group. Processes stay in it until they end.
#[derive(Debug)]
pub struct TaskGroup(PathBuf);

impl TaskGroup {
    /// Creates one; `None` if the system does not let us, or has no such controller.
    pub fn new() -> Option<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("mica-tests-{}-{number}", std::process::id());
        ROOTS.into_iter().find_map(|root| {
            let folder = Path::new(root).join(&name);
            fs::create_dir(&folder).ok()?;
            let group = Self(folder);
            group.0.join("pids.max").exists().then_some(group)
        })
    }

    /// Lets process `pid` have only `more` threads in addition to what it has, for as long as the
    /// result lives. Its children count as well.
    ///
    /// # Errors
    /// If it has ended.
    pub fn limit(&self, pid: u32, more: u64) -> Result<TaskLimit<'_>> {
        self.set("cgroup.procs", &pid.to_string())?;
        let file = self.0.join("pids.current");
        let now: u64 = fs::read_to_string(&file)?.trim().parse().context("a number of threads")?;
        self.set("pids.max", &(now + more).to_string())?;
        Ok(TaskLimit(self))
    }

    fn set(&self, file: &str, text: &str) -> Result<()> {
        let file = self.0.join(file);
        fs::write(&file, text).with_context(|| format!("{}: {text}", file.display()))
    }
}

impl Drop for TaskGroup {
    fn drop(&mut self) {
        // If a process is still in it, the group stays behind.
        clock::poll(LIMIT, PAUSE, || fs::remove_dir(&self.0).ok());
    }
}

/// A limit that is lifted on drop.
#[derive(Debug)]
pub struct TaskLimit<'a>(&'a TaskGroup);

impl Drop for TaskLimit<'_> {
    fn drop(&mut self) {
        self.0.set("pids.max", "max").expect("what was limited can be unlimited");
    }
}
