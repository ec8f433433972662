//! Runs a program to its end, with a time limit, and captures its output.

use crate::clock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a program may take unless its caller sets another limit.
const LIMIT: Duration = Duration::from_secs(120);

/// A program that has ended.
#[derive(Debug)]
pub struct Finished {
    /// What was run, for messages.
    pub command: String,
    /// How it ended.
    pub status: ExitStatus,
    /// What it wrote to standard output.
    pub stdout: String,
    /// What it wrote to standard error.
    pub stderr: String,
    /// How long it took.
    pub wall: Duration,
}

impl Finished {
    /// Its exit code; `None` if a signal ended it.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// The signal that ended it.
    pub fn signal(&self) -> Option<i32> {
        self.status.signal()
    }

    /// Its standard output.
    ///
    /// # Panics
    /// If it failed; with its whole output.
    #[track_caller]
    pub fn ok(self) -> String {
        assert!(self.status.success(), "{self}");
        self.stdout
    }

    /// Its standard output as JSON.
    ///
    /// # Panics
    /// If it failed or wrote something else.
    #[track_caller]
    pub fn json(self) -> serde_json::Value {
        let said = self.ok();
        serde_json::from_str(&said).unwrap_or_else(|error| panic!("no JSON ({error}):\n{said}"))
    }

    /// Its standard error, which must be one clear line.
    ///
    /// # Panics
    /// If it succeeded, was ended by a signal, panicked, or printed nothing or too much.
    #[track_caller]
    pub fn refusal(self) -> String {
        assert!(self.code().is_some_and(|code| code != 0), "not refused: {self}");
        assert!(!self.stderr.contains("panicked"), "a panic is no refusal: {self}");
        let lines: Vec<_> = self.stderr.lines().filter(|line| !line.trim().is_empty()).collect();
        assert_eq!(lines.len(), 1, "one clear line is wanted: {self}");
        self.stderr
    }
}

impl std::fmt::Display for Finished {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}\n{}{}", self.command, self.status, self.stdout, self.stderr)
    }
}

/// Runs `program` with `args`.
///
/// # Panics
/// If it cannot be started or takes longer than two minutes.
#[track_caller]
pub fn run<S: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = S>) -> Finished {
    let mut command = Command::new(program);
    command.args(args);
    finish(&mut command)
}

/// Runs `command` to its end.
///
/// # Panics
/// If it cannot be started or takes longer than two minutes.
#[track_caller]
pub fn finish(command: &mut Command) -> Finished {
    finish_within(command, LIMIT)
}

/// Runs `command` to its end.
///
/// # Panics
/// If it cannot be started or takes longer than `limit`; it is killed then.
#[track_caller]
pub fn finish_within(command: &mut Command, limit: Duration) -> Finished {
    run_to_end(command.stdin(Stdio::null()), limit)
}

/// Runs `command` to its end, with the content of `input` as its standard input.
///
/// # Panics
/// As [`finish`].
#[track_caller]
pub fn finish_with(command: &mut Command, input: File) -> Finished {
    run_to_end(command.stdin(input), LIMIT)
}

#[track_caller]
fn run_to_end(command: &mut Command, limit: Duration) -> Finished {
    let name = format!("{command:?}");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = clock::now();
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
    let stdout = gather(child.stdout.take());
    let stderr = gather(child.stderr.take());
    let Some(status) = wait(&mut child, limit) else {
        panic!("{name} still runs after {limit:?}");
    };
    let wall = start.elapsed();
    let [stdout, stderr] = [stdout, stderr].map(|said| said.join().unwrap_or_default());
    Finished { command: name, status, stdout, stderr, wall }
}

/// Waits for `child` to end; kills it and returns `None` if it has not ended after `limit`.
pub fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let start = clock::now();
    let process = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    // Without one, its state is looked at from time to time.
    let process = process.and_then(|id| pidfd_open(id, PidfdFlags::empty()).ok());
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        let Some(left) = limit.checked_sub(start.elapsed()) else {
            // An error means that it ended just now.
            let _ = child.kill();
            let _ = child.wait();
            return None;
        };
        match &process {
            Some(process) => {
                let left = Timespec::try_from(left).ok();
                // Whatever ends the wait, the state of the child decides.
                let _ = poll(&mut [PollFd::new(process, PollFlags::IN)], left.as_ref());
            }
            None => clock::sleep(left.min(Duration::from_millis(5))),
        }
    }
}

fn gather(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut said = Vec::new();
        if let Some(mut pipe) = pipe {
            // Output from before an error is still worth showing.
            let _ = pipe.read_to_end(&mut said);
        }
        String::from_utf8_lossy(&said).into_owned()
    })
}

/// Signals that end a program here: in the background of a shell some are ignored, by verbs, too.
///
/// # Panics
/// If the system does not say which.
pub fn ending_signals() -> Vec<Signal> {
    let status = std::fs::read_to_string("/proc/self/status").expect("readable");
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("a mask");
    let ignored = u64::from_str_radix(ignored.trim(), 16).expect("a mask");
    let is_taken = |signal: &Signal| ignored >> (signal.as_raw() - 1) & 1 == 0;
    [Signal::INT, Signal::TERM, Signal::HUP].into_iter().filter(is_taken).collect()
}
