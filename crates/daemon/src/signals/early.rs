//! Signals while disks are opened, which takes as long as the slowest of their stores.
//!
//! Invariants
//! - I1 A server that was told to end while it opens its disks ends within [`LIMIT`], whatever does
//!   not answer: as a killed one does, which loses nothing, since nobody is served yet.
//! - I2 Signals that came meanwhile are not lost: whoever opened gets them.

use crate::retry::stopwatch;
use signal_hook::iterator::Signals;
use signal_hook::low_level::signal_name;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, Thread};
use std::time::Duration;

/// How long disks may still be opened once the server was told to end.
const LIMIT: Duration = Duration::from_secs(5);
/// How often to look for signals.
const PAUSE: Duration = Duration::from_millis(100);

/// Tells the thread that watches that there is nothing to watch any more, when it is dropped.
struct Opened<'a> {
    is_over: &'a AtomicBool,
    watcher: Thread,
}

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        self.watcher.unpark();
    }
}

/// Calls `open`. Returns what that does, and the signals that came meanwhile. If one of them `ends`
/// the server, and it takes too long from there on, ends the process.
pub(crate) fn open_unless_ended<T>(
    signals: &mut Signals,
    ends: impl Fn(i32) -> bool + Send,
    open: impl FnOnce() -> T,
) -> (T, Vec<i32>) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = || watch(signals, ends, &is_over);
        let watching =
            match Builder::new().name("mica-opening".to_owned()).spawn_scoped(scope, watch) {
                Ok(watching) => watching,
                Err(error) => {
                    tracing::warn!(%error, "signals have no effect until the disks are open");
                    return (open(), Vec::new());
                }
            };
        let over = Opened { is_over: &is_over, watcher: watching.thread().clone() };
        let opened = open();
        drop(over);
        (opened, watching.join().unwrap_or_default())
    })
}

fn watch(signals: &mut Signals, ends: impl Fn(i32) -> bool, is_over: &AtomicBool) -> Vec<i32> {
    let mut heard = Vec::new();
    let mut since_told = None;
    while !is_over.load(Ordering::Acquire) {
        for signal in signals.pending() {
            heard.push(signal);
            if since_told.is_none() && ends(signal) {
                let name = signal_name(signal).unwrap_or("a signal");
                tracing::info!("stopping on {name}, once what is being opened has answered");
                since_told = Some(stopwatch());
            }
        }
        if since_told.as_ref().is_some_and(|since_told| since_told() >= LIMIT) {
            let seconds = LIMIT.as_secs();
            tracing::error!("stopped: not all disks were open {seconds} s later");
            std::process::exit(1);
        }
        std::thread::park_timeout(PAUSE);
    }
    heard
}
