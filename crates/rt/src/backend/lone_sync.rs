//! Syncs done by the executor itself, while it has nothing else to do.
//!
//! The ring has a thread of the kernel do a sync, which costs two trips through the scheduler. A
//! client that waits for each of its syncs, with nothing else under way, pays for both every time,
//! and while it waits the executor has nothing to do. But nobody knows beforehand what comes during
//! a sync, so it is learned from the last ones.
//!
//! Invariants
//! - I1 A sync is done here only if its file says that writes may be done in place: then no other
//!   disk of the process suffers if it takes long.
//! - I2 And only after [`QUIET_MIN`] syncs in a row during which nothing else happened on the
//!   executor. One that was disturbed, or took longer than [`TOOK_MAX`], starts the count again.
//! - I3 Nor if the executor wrote more than [`WRITTEN_MAX`] since its last sync.
//! - I4 It waits until no task is ready, but not for more than [`TURNS_MAX`] turns; and until the
//!   kernel has everything that was submitted before.

use super::now;
use super::threads::code_of;
use crate::file::File;
use crate::op::OpKey;
use rustix::fs::fdatasync;
use std::sync::Arc;
use std::time::Duration;

const QUIET_MIN: u32 = 8;
/// A sync that writes much, or waits for others, is worth a thread: the executor is free meanwhile.
const TOOK_MAX: Duration = Duration::from_millis(2);
const TURNS_MAX: u32 = 4;
/// As much a sync writes out in a moment.
const WRITTEN_MAX: u64 = 1 << 20;

#[derive(Default)]
pub(super) struct LoneSyncs {
    /// Syncs in a row during which nothing else happened.
    quiet: u32,
    /// A sync that the ring has, and whether anything else happened since.
    in_ring: Option<(OpKey, Disturbed)>,
    put_off: Option<PutOff>,
    /// Bytes that were written since the last sync.
    written: u64,
}

/// Whether anything happened on the executor during a sync.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Disturbed {
    Yes,
    No,
}

/// A sync that waits for a moment in which the executor has nothing else to do.
pub(super) struct PutOff {
    pub(super) key: OpKey,
    file: Arc<File>,
    turns: u32,
}

/// What to do with a sync that was put off.
pub(super) enum Due {
    /// The executor does it.
    Here(PutOff),
    /// The ring gets it: there is always something else to do.
    InRing(PutOff),
}

impl PutOff {
    pub(super) fn file(&self) -> &Arc<File> {
        &self.file
    }
}

impl LoneSyncs {
    /// Whether the sync of `file` is put off until [`Self::due`]; otherwise the ring gets it now.
    pub(super) fn put_off(&mut self, key: OpKey, file: &Arc<File>) -> bool {
        let is_little = std::mem::take(&mut self.written) <= WRITTEN_MAX;
        let is_lone = is_little
            && self.quiet >= QUIET_MIN
            && self.in_ring.is_none()
            && self.put_off.is_none();
        if !is_lone || !file.is_written_in_place() {
            return false;
        }
        self.put_off = Some(PutOff { key, file: Arc::clone(file), turns: 0 });
        true
    }

    /// `len` bytes are written.
    #[inline]
    pub(super) fn note_write(&mut self, len: usize) {
        self.written = self.written.saturating_add(len as u64);
    }

    /// The ring gets the sync `key`.
    pub(super) fn note_submitted(&mut self, key: OpKey) {
        match &mut self.in_ring {
            Some((_, disturbed)) => *disturbed = Disturbed::Yes,
            None => self.in_ring = Some((key, Disturbed::No)),
        }
    }

    /// The ring has completed `key`, or the bell rang.
    pub(super) fn note_event(&mut self, key: Option<OpKey>) {
        match &mut self.in_ring {
            Some((sync, disturbed)) if Some(*sync) == key => {
                let disturbed = *disturbed;
                self.in_ring = None;
                self.count(disturbed);
            }
            Some((_, disturbed)) => *disturbed = Disturbed::Yes,
            None => {}
        }
    }

    /// At the end of a turn: what is done now with the sync that was put off, if anything.
    #[inline]
    pub(super) fn due(&mut self, is_idle: bool) -> Option<Due> {
        let put_off = self.put_off.as_mut()?;
        put_off.turns += 1;
        if !is_idle && put_off.turns <= TURNS_MAX {
            return None;
        }
        let put_off = self.put_off.take()?;
        // Another disk may have come meanwhile.
        let is_here = is_idle && put_off.file.is_written_in_place();
        Some(if is_here { Due::Here(put_off) } else { Due::InRing(put_off) })
    }

    /// Whether a sync waits for its moment.
    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        self.put_off.is_some()
    }

    /// Does it, and returns its code. `disturbed` says afterwards whether anything came meanwhile.
    pub(super) fn sync(&mut self, put_off: &PutOff, disturbed: impl FnOnce() -> Disturbed) -> i32 {
        let start = now();
        let code = code_of(fdatasync(&put_off.file).map(|()| 0));
        let is_long = start.elapsed() > TOOK_MAX;
        self.count(if is_long { Disturbed::Yes } else { disturbed() });
        code
    }

    fn count(&mut self, disturbed: Disturbed) {
        self.quiet = match disturbed {
            Disturbed::No => self.quiet.saturating_add(1),
            Disturbed::Yes => 0,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::Access;
    use std::sync::atomic::{AtomicBool, Ordering};

    struct Bench {
        syncs: LoneSyncs,
        file: Arc<File>,
        is_allowed: Arc<AtomicBool>,
        next: u32,
    }

    impl Bench {
        fn new() -> Self {
            let is_allowed = Arc::new(AtomicBool::new(true));
            let file = File::new(tempfile::tempfile().unwrap().into(), Access::Buffered);
            let file = Arc::new(file.write_in_place(Arc::clone(&is_allowed)));
            Self { syncs: LoneSyncs::default(), file, is_allowed, next: 0 }
        }

        fn key(&mut self) -> OpKey {
            self.next += 1;
            OpKey::from_user_data(u64::from(self.next))
        }

        /// A sync by the ring, with `other` during it.
        fn in_ring(&mut self, other: Option<OpKey>) {
            let key = self.key();
            assert!(!self.syncs.put_off(key, &self.file));
            self.syncs.note_submitted(key);
            if other.is_some() {
                self.syncs.note_event(other);
            }
            self.syncs.note_event(Some(key));
        }

        fn is_put_off(&mut self) -> bool {
            let key = self.key();
            self.syncs.put_off(key, &self.file)
        }
    }

    /// A bench that has seen enough quiet syncs.
    fn quiet() -> Bench {
        let mut bench = Bench::new();
        (0..QUIET_MIN).for_each(|_| bench.in_ring(None));
        bench
    }

    #[test]
    fn sync_is_put_off_only_after_enough_that_nothing_disturbed() {
        let mut bench = Bench::new();
        (1..QUIET_MIN).for_each(|_| bench.in_ring(None));
        let other = bench.key();
        bench.in_ring(Some(other));
        (0..QUIET_MIN).for_each(|_| bench.in_ring(None));
        assert!(bench.is_put_off());
    }

    #[test]
    fn bell_and_second_sync_disturb() {
        let mut bench = quiet();
        bench.is_allowed.store(false, Ordering::Relaxed);
        let key = bench.key();
        bench.syncs.note_submitted(key);
        bench.syncs.note_event(None);
        bench.syncs.note_event(Some(key));
        bench.is_allowed.store(true, Ordering::Relaxed);
        assert!(!bench.is_put_off(), "the bell rang");
        let mut bench = quiet();
        bench.is_allowed.store(false, Ordering::Relaxed);
        let (one, other) = (bench.key(), bench.key());
        bench.syncs.note_submitted(one);
        bench.syncs.note_submitted(other);
        bench.syncs.note_event(Some(one));
        bench.syncs.note_event(Some(other));
        bench.is_allowed.store(true, Ordering::Relaxed);
        assert!(!bench.is_put_off(), "there were two");
    }

    #[test]
    fn sync_of_much_is_left_to_the_ring() {
        let mut bench = quiet();
        bench.syncs.note_write(1 << 20);
        bench.syncs.note_write(1);
        bench.in_ring(None);
        assert!(bench.is_put_off(), "it was written by the one before");
    }

    #[test]
    fn disk_that_comes_while_a_sync_waits_sends_it_to_the_ring() {
        let mut bench = quiet();
        assert!(bench.is_put_off());
        bench.is_allowed.store(false, Ordering::Relaxed);
        assert!(matches!(bench.syncs.due(true), Some(Due::InRing(_))));
    }

    #[test]
    fn file_that_may_block_others_is_left_to_the_ring() {
        let mut bench = quiet();
        bench.is_allowed.store(false, Ordering::Relaxed);
        assert!(!bench.is_put_off());
        bench.is_allowed.store(true, Ordering::Relaxed);
        assert!(bench.is_put_off());
        assert!(!bench.is_put_off(), "one at a time");
    }

    #[test]
    fn sync_waits_for_ready_tasks_but_not_for_ever() {
        let mut bench = quiet();
        assert!(bench.is_put_off());
        assert!(bench.syncs.due(false).is_none());
        assert!(matches!(bench.syncs.due(true), Some(Due::Here(_))));
        assert!(bench.is_put_off());
        (0..TURNS_MAX).for_each(|_| assert!(bench.syncs.due(false).is_none()));
        assert!(matches!(bench.syncs.due(false), Some(Due::InRing(_))));
        assert!(bench.syncs.due(true).is_none(), "it is gone");
    }

    #[test]
    fn one_that_was_disturbed_is_the_last_for_a_while() {
        let mut bench = quiet();
        assert!(bench.is_put_off());
        let Some(Due::Here(put_off)) = bench.syncs.due(true) else { panic!("it is due") };
        assert_eq!(bench.syncs.sync(&put_off, || Disturbed::Yes), 0);
        assert!(!bench.is_put_off());
    }
}
