//! Changes of files that fail, and power failures.

use super::World;
use super::file::SharedFile;
use crate::Loss;
use crate::power::Change;
use parking_lot::Mutex;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

/// When set, the world prints what it does.
const TRACE_VARIABLE: &str = "MICA_SIM_TRACE";

/// An operation that changes a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Bytes are written.
    Write,
    /// What is volatile is made durable.
    Sync,
    /// Space is allocated or freed.
    Space,
    /// The length is set.
    SetLen,
}

/// The faults of changes of files: of all files, counted together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChangeFault {
    /// Which operation fails.
    pub operation: Operation,
    /// The number of the first that fails, counted from 1 as of now.
    pub nth: u64,
    /// Whether all later ones fail, too.
    pub lasting: bool,
    /// How.
    pub errno: i32,
}

/// The error number of a full device.
pub const ENOSPC: i32 = 28;

/// The record of changes in a world.
#[derive(Default)]
pub(super) struct Changes {
    /// With the count of operations of its kind when it was added, and whether it struck.
    faults: Vec<(ChangeFault, u64, bool)>,
    started: [u64; 4],
    completed: u64,
    /// Changes of the memory that outlives the process.
    remembered: u64,
    kill_after: Option<u64>,
    cut_after: Option<(u64, Loss)>,
    cut_after_syncs: Option<(u64, u64, Loss)>,
    /// One sync in this many is acknowledged and not done; 0 for none.
    syncs_ignored_one_in: u64,
    /// There is no space for writes before this place in a file.
    pub(super) full_before: usize,
    cuts: u64,
    /// How many times the power went.
    pub(super) boots: u64,
    /// How many times file systems were remounted.
    pub(super) lives: u64,
    waiting: Vec<Waker>,
}

impl World {
    /// Adds a fault.
    pub fn inject_change(&self, fault: ChangeFault) {
        let changes = &mut self.state.lock().changes;
        let before = changes.started[fault.operation as usize];
        changes.faults.push((fault, before, false));
    }

    /// From now on there is no space for writes that begin before `at` in a file: one that is
    /// shared with a copy needs new space wherever it is written. 0 ends that.
    pub fn fill_before(&self, at: usize) {
        self.state.lock().changes.full_before = at;
    }

    /// Removes all faults of changes. Returns whether one of them struck.
    pub fn heal_changes(&self) -> bool {
        let faults = std::mem::take(&mut self.state.lock().changes.faults);
        faults.iter().any(|(_, _, struck)| *struck)
    }

    /// Whether a fault of changes struck that was not removed.
    pub fn fault_struck(&self) -> bool {
        self.state.lock().changes.faults.iter().any(|(_, _, struck)| *struck)
    }

    /// From now on one sync in `count`, at random, is acknowledged and not done: a disk that lies.
    pub fn ignore_syncs(&self, count: u64) {
        self.state.lock().changes.syncs_ignored_one_in = count;
    }

    /// Whether the sync that completes now is one that is not done.
    pub(super) fn ignores_sync(&self) -> bool {
        let count = self.state.lock().changes.syncs_ignored_one_in;
        count > 0 && self.random_below(count) == 0
    }

    /// How many operations that change files have completed.
    pub fn changes_completed(&self) -> u64 {
        self.state.lock().changes.completed
    }

    /// The power goes when this many more operations that change files have completed.
    pub fn cut_power_after(&self, operations: u64, loss: Loss) {
        let changes = &mut self.state.lock().changes;
        changes.cut_after = Some((changes.completed + operations, loss));
    }

    /// The process dies when this many more operations that change files, and changes of the memory
    /// that outlives it, have completed.
    pub fn kill_after(&self, operations: u64) {
        let changes = &mut self.state.lock().changes;
        changes.kill_after = Some(changes.completed + changes.remembered + operations);
    }

    /// A change of the memory that outlives the process is done.
    pub(super) fn complete_memory_change(&self) {
        self.state.lock().changes.remembered += 1;
        self.kill_if_due();
    }

    /// Whether the process dies with the change of memory that is made now.
    pub(super) fn dies_with_memory_change(&self) -> bool {
        let changes = &self.state.lock().changes;
        changes.kill_after.is_some_and(|after| changes.completed + changes.remembered + 1 >= after)
    }

    fn kill_if_due(&self) {
        let is_due = {
            let changes = &mut self.state.lock().changes;
            let done = changes.completed + changes.remembered;
            changes.kill_after.take_if(|after| done >= *after).is_some()
        };
        if is_due {
            self.kill();
        }
    }

    /// How many operations that change files, or the memory that outlives the process, are done.
    pub fn steps_completed(&self) -> u64 {
        let changes = &self.state.lock().changes;
        changes.completed + changes.remembered
    }

    /// The power goes when this many more syncs, and then this many operations, have completed: the
    /// next write after a sync is the one that depends on it.
    pub fn cut_power_after_syncs(&self, syncs: u64, then: u64, loss: Loss) {
        self.state.lock().changes.cut_after_syncs = Some((syncs, then, loss));
    }

    /// The power is not cut after all.
    pub fn keep_power(&self) {
        let changes = &mut self.state.lock().changes;
        (changes.cut_after, changes.cut_after_syncs) = (None, None);
        changes.kill_after = None;
    }

    /// The power goes, and returns: stores that are open give errors from now on, and a file that
    /// is opened holds what `loss` left of it.
    pub fn cut_power(&self, loss: Loss) {
        self.trace(|| format!("the power goes, losing {loss:?}"));
        self.restart(Some(loss), true);
    }

    /// The device goes away and returns while the machine keeps running: what `loss` selects is
    /// lost, and memory stays. The process that has files open dies.
    pub fn lose_device(&self, loss: Loss) {
        self.trace(|| format!("the device goes, losing {loss:?}"));
        self.restart(Some(loss), false);
    }

    /// The process that has files open dies: stores that are open give errors from now on, and a
    /// file that is opened holds what was written.
    pub fn kill(&self) {
        self.trace(|| "the process dies".to_owned());
        self.restart(None, false);
    }

    /// How many times the power went or the process died.
    pub fn cuts(&self) -> u64 {
        self.state.lock().changes.cuts
    }

    /// Ready when the power goes, or the process dies, next.
    pub fn power_cut(&self) -> PowerCut {
        PowerCut { world: self.clone(), before: self.cuts() }
    }

    /// Prints `event` if the user wants a trace.
    pub fn trace(&self, event: impl FnOnce() -> String) {
        static WANTED: OnceLock<bool> = OnceLock::new();
        if *WANTED.get_or_init(|| std::env::var_os(TRACE_VARIABLE).is_some()) {
            eprintln!("{}", event());
        }
    }

    fn restart(&self, loss: Option<Loss>, is_boot: bool) {
        if loss.is_some() && is_boot {
            self.lose_names();
        }
        let files: Vec<(PathBuf, SharedFile)> =
            self.state.lock().files.clone().into_iter().collect();
        // By the file that it was: one with two names stays one.
        let mut all_reborn: Vec<(SharedFile, SharedFile)> = Vec::new();
        for (path, shared) in files {
            let known = all_reborn.iter().find(|(before, _)| Arc::ptr_eq(before, &shared));
            if let Some((_, reborn)) = known {
                self.state.lock().files.insert(path, Arc::clone(reborn));
                continue;
            }
            let mut file = shared.lock();
            if file.journal.is_none() {
                continue;
            }
            let mut reborn = file.reborn(loss, &mut |bound| self.random_below(bound));
            if loss.is_some() && !is_boot {
                reborn.ctime_ns = reborn.durable_ctime_ns;
            }
            drop(file);
            let reborn = Arc::new(Mutex::new(reborn));
            self.state.lock().files.insert(path, Arc::clone(&reborn));
            all_reborn.push((shared, reborn));
        }
        let waiting = {
            let changes = &mut self.state.lock().changes;
            changes.cuts += 1;
            changes.boots += u64::from(is_boot);
            changes.lives += u64::from(loss.is_some());
            (changes.cut_after, changes.cut_after_syncs) = (None, None);
            changes.kill_after = None;
            changes.faults.clear();
            std::mem::take(&mut changes.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    /// The errno with which the change fails that starts now.
    pub(super) fn start_change(&self, operation: Operation) -> Option<i32> {
        let changes = &mut self.state.lock().changes;
        let count = &mut changes.started[operation as usize];
        *count += 1;
        let mut errno = None;
        let of_kind = |(fault, ..): &&mut (ChangeFault, u64, bool)| fault.operation == operation;
        for (fault, before, struck) in changes.faults.iter_mut().filter(of_kind) {
            let number = *count - *before;
            if number == fault.nth || (fault.lasting && number > fault.nth) {
                *struck = true;
                errno = Some(fault.errno);
            }
        }
        errno
    }

    /// The errno of a write for which there is no space.
    pub(super) fn lacks_space(&self, change: &Change) -> Option<i32> {
        let full_before = self.state.lock().changes.full_before;
        matches!(change, Change::Data { at, .. } if *at < full_before).then_some(ENOSPC)
    }

    /// A change completed, whatever became of it.
    pub(super) fn complete_change(&self, operation: Operation) {
        let due = {
            let changes = &mut self.state.lock().changes;
            changes.completed += 1;
            if operation == Operation::Sync
                && let Some((syncs, then, loss)) = &mut changes.cut_after_syncs
            {
                *syncs = syncs.saturating_sub(1);
                if *syncs == 0 {
                    changes.cut_after = Some((changes.completed + *then, *loss));
                    changes.cut_after_syncs = None;
                }
            }
            changes.cut_after.filter(|(after, _)| changes.completed >= *after)
        };
        match due {
            Some((_, loss)) => self.cut_power(loss),
            None => self.kill_if_due(),
        }
    }
}

/// See [`World::power_cut`].
#[must_use]
pub struct PowerCut {
    world: World,
    before: u64,
}

impl Future for PowerCut {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let changes = &mut self.world.state.lock().changes;
        if changes.cuts > self.before {
            return Poll::Ready(());
        }
        if !changes.waiting.iter().any(|waker| waker.will_wake(context.waker())) {
            changes.waiting.push(context.waker().clone());
        }
        Poll::Pending
    }
}
