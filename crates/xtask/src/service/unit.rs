//! mica's service, as systemd sees it.

use super::container::Container;
use anyhow::{Context, Result, bail, ensure};
use mica_tests::clock;
use std::collections::BTreeMap;
use std::time::Duration;

const NAME: &str = "mica.service";
/// How long systemd and a server may take for what is a matter of a second.
const SOON: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_millis(50);

/// The unit in a container.
#[derive(Clone, Copy)]
pub(super) struct Unit<'a> {
    container: &'a Container,
}

/// A state of it.
pub(super) struct State(BTreeMap<String, String>);

impl State {
    /// The value of a property.
    pub(super) fn of(&self, property: &str) -> &str {
        self.0.get(property).map_or("", String::as_str)
    }

    /// Its main process, if there is one.
    pub(super) fn main(&self) -> Option<u32> {
        self.of("MainPID").parse().ok().filter(|main| *main != 0)
    }

    /// As `running`, or `stop-sigterm`.
    fn is(&self, active: &str, sub: &str) -> bool {
        (self.of("ActiveState"), self.of("SubState")) == (active, sub)
    }
}

impl<'a> Unit<'a> {
    pub(super) fn new(container: &'a Container) -> Self {
        Self { container }
    }

    pub(super) fn state(&self) -> Result<State> {
        let said = self.container.ok(["systemctl", "show", NAME])?;
        let pairs = said.lines().filter_map(|line| line.split_once('='));
        Ok(State(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()))
    }

    /// Its main process.
    pub(super) fn main(&self) -> Result<u32> {
        self.state()?.main().context("the service has no main process")
    }

    /// Waits until it runs, as another process than `old`, and systemd has nothing left to do.
    /// Returns the process.
    pub(super) fn runs_again(&self, old: Option<u32>) -> Result<u32> {
        let mut last = String::new();
        let found = clock::poll(SOON, PAUSE, || {
            let (state, jobs) = match self.state().and_then(|state| Ok((state, self.jobs()?))) {
                Ok(seen) => seen,
                Err(error) => return Some(Err(error)),
            };
            let main = state.main().filter(|main| Some(*main) != old);
            if main.is_some() && jobs.is_empty() && state.is("active", "running") {
                return main.map(Ok);
            }
            let (active, sub) = (state.of("ActiveState"), state.of("SubState"));
            last =
                format!("{active} ({sub}), main process {}, jobs: {jobs:?}", state.of("MainPID"));
            None
        });
        match found {
            Some(found) => found,
            None => bail!(
                "the service does not run again (before: {old:?}): {last}; its log: {}",
                self.log()?
            ),
        }
    }

    /// Fails unless it runs as `main`, and systemd has nothing left to do.
    pub(super) fn runs_still(&self, main: u32) -> Result<()> {
        let state = self.state()?;
        ensure!(state.is("active", "running"), "{}: {}", state.of("SubState"), self.log()?);
        ensure!(state.main() == Some(main), "{:?}, not {main}: {}", state.main(), self.log()?);
        let jobs = self.jobs()?;
        ensure!(jobs.is_empty(), "a job is left: {jobs}");
        Ok(())
    }

    /// Fails unless it has ended as it should.
    pub(super) fn has_stopped(&self) -> Result<()> {
        let state = self.state()?;
        ensure!(state.is("inactive", "dead"), "{}: {}", state.of("SubState"), self.log()?);
        let end = [state.of("Result"), state.of("ExecMainCode"), state.of("ExecMainStatus")];
        // CLD_EXITED, with 0.
        ensure!(end == ["success", "1", "0"], "it ended with {end:?}: {}", self.log()?);
        Ok(())
    }

    /// What systemd has yet to do.
    fn jobs(&self) -> Result<String> {
        Ok(self.container.ok(["systemctl", "list-jobs", "--no-legend"])?.trim().to_owned())
    }

    /// The newest lines of its log.
    pub(super) fn log(&self) -> Result<String> {
        self.container.ok(["journalctl", "--unit", NAME, "--lines=30", "--output=cat"])
    }
}
