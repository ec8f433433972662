//! Memory for what clients send and request: one budget for the whole process.
//!
//! ```text
//! pool     of the process
//!   └ party    the server of one disk: at most as much as it leaves to the others
//!       └ share    one connection, queue or file: its own reserve, and what it has of the pool
//! ```
//!
//! Each share has a **reserve** of its own, so that its small requests proceed no matter what
//! others take, and large ones do too, piece by piece. Anything beyond that comes from the pool. A
//! share gets at most a fraction of what is free, and a party at most all of it: so there is always
//! something left for the next client, no client waits for another to release memory, and a client
//! that hoards memory slows down only itself and, somewhat, the other clients of its own disk.
//!
//! The total is at most [`POOL_BYTES`] plus the reserves of all shares that may exist, whose
//! numbers are bounded where they are created.
//!
//! Invariants
//! - I1 What the shares hold of the pool together is at most the pool.
//! - I2 A share releases what it holds when it is dropped, and what it does not need when it is
//!   [trimmed](Share::trim).
//! - I3 A request within the reserve touches no memory that is shared with another thread.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of bytes that all clients of a process hold, in addition to their reserves.
pub(crate) const POOL_BYTES: usize = 256 << 20;
/// Granularity of the pool: small requests take many requests' worth at once, and rarely.
const STEP_BYTES: usize = 256 << 10;
/// A share may take this fraction of what is free: one part in this many.
const PART: usize = 8;
/// What a share in use keeps beyond its current need.
const SLACK_BYTES: usize = 1 << 20;

/// Memory that the clients of a process share.
pub(crate) struct Pool {
    bytes: usize,
    taken: AtomicUsize,
}

impl Pool {
    pub(crate) fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self { bytes, taken: AtomicUsize::new(0) })
    }

    /// Bytes in use.
    #[cfg(test)]
    pub(crate) fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }
}

/// The part of the pool that the clients of one disk hold.
pub(crate) struct Party {
    pool: Arc<Pool>,
    taken: AtomicUsize,
}

impl Party {
    pub(crate) fn new(pool: &Arc<Pool>) -> Arc<Self> {
        Arc::new(Self { pool: Arc::clone(pool), taken: AtomicUsize::new(0) })
    }

    /// Takes between `least` and `most` for a share that holds `has`; zero if that is not possible.
    fn take(&self, has: usize, least: usize, most: usize) -> usize {
        let Pool { bytes, taken } = &*self.pool;
        let mut got = 0;
        // Shares of one party that ask at the same moment may together get a little too much of
        // what is free, but never of the pool (I1).
        let of_party = self.taken.load(Ordering::Relaxed);
        let take = |taken: usize| {
            let free = bytes - taken;
            let to_share = (free / PART).saturating_sub(has);
            let to_party = free.saturating_sub(of_party) / 2;
            got = most.min(to_share).min(to_party);
            (got >= least.max(1)).then(|| taken + got)
        };
        let (success, failure) = (Ordering::Relaxed, Ordering::Relaxed);
        if taken.fetch_update(success, failure, take).is_err() {
            return 0;
        }
        self.taken.fetch_add(got, Ordering::Relaxed);
        got
    }

    fn give_back(&self, bytes: usize) {
        self.taken.fetch_sub(bytes, Ordering::Relaxed);
        self.pool.taken.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The memory that one client may hold.
pub(crate) struct Share {
    party: Arc<Party>,
    reserve: usize,
    most: usize,
    /// What it holds of the pool.
    taken: Cell<usize>,
}

impl Share {
    /// A share with `reserve` bytes of its own that never holds more than `most`.
    pub(crate) fn new(party: &Arc<Party>, reserve: usize, most: usize) -> Self {
        Self { party: Arc::clone(party), reserve, most, taken: Cell::new(0) }
    }

    /// Bytes that it may hold now.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.reserve + self.taken.get()
    }

    /// Whether it may hold `bytes`; takes more from the pool if necessary.
    #[inline]
    pub(crate) fn covers(&self, bytes: usize) -> bool {
        bytes <= self.bytes() || self.grow(bytes, bytes)
    }

    /// As much of `bytes` as it may hold: at least its reserve.
    pub(crate) fn up_to(&self, bytes: usize) -> usize {
        if bytes > self.bytes() {
            self.grow(0, bytes.min(self.most));
        }
        bytes.min(self.bytes())
    }

    fn grow(&self, least: usize, wanted: usize) -> bool {
        let missing = |bytes: usize| bytes.saturating_sub(self.bytes());
        let whole_steps = missing(wanted).next_multiple_of(STEP_BYTES);
        let most = whole_steps.min(missing(self.most));
        if missing(least) > most {
            return false;
        }
        let got = self.party.take(self.taken.get(), missing(least), most);
        self.taken.set(self.taken.get() + got);
        self.bytes() >= least
    }

    /// Releases what is not needed to hold `used` bytes, except a little slack while it is in use.
    #[inline]
    pub(crate) fn trim(&self, used: usize) {
        if self.taken.get() > 0 {
            self.trim_to(if used == 0 { 0 } else { used + SLACK_BYTES });
        }
    }

    fn trim_to(&self, kept: usize) {
        let excess = self.bytes().saturating_sub(kept).min(self.taken.get());
        // Not for small amounts: they would be taken again right away.
        if excess >= STEP_BYTES || kept == 0 {
            self.taken.set(self.taken.get() - excess);
            self.party.give_back(excess);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.trim_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::random::Random;

    const KIB: usize = 1 << 10;
    const MIB: usize = 1 << 20;

    fn share(party: &Arc<Party>) -> Share {
        Share::new(party, 512 * KIB, 8 * MIB)
    }

    #[test]
    fn one_client_alone_has_all_that_it_may_ever_have_and_gives_it_back() {
        let pool = Pool::new(POOL_BYTES);
        let share = share(&Party::new(&pool));
        assert!(share.covers(8 * MIB) && !share.covers(8 * MIB + 1));
        assert_eq!(pool.taken(), 8 * MIB - 512 * KIB);
        share.trim(4 * MIB);
        assert_eq!(share.bytes(), 5 * MIB);
        share.trim(0);
        assert_eq!((share.bytes(), pool.taken()), (512 * KIB, 0));
        assert!(share.covers(8 * MIB));
        drop(share);
        assert_eq!(pool.taken(), 0);
    }

    #[test]
    fn what_is_within_the_reserve_takes_nothing() {
        let pool = Pool::new(POOL_BYTES);
        let share = share(&Party::new(&pool));
        assert!(share.covers(512 * KIB));
        assert_eq!(share.up_to(512 * KIB), 512 * KIB);
        assert_eq!(pool.taken(), 0);
    }

    /// However many a peer opens, and whatever they hold.
    #[test]
    fn many_greedy_clients_leave_something_to_each_other_and_more_to_other_disks() {
        let pool = Pool::new(POOL_BYTES);
        let (greedy, other) = (Party::new(&pool), Party::new(&pool));
        let shares: Vec<_> = (0..256).map(|_| share(&greedy)).collect();
        for _ in 0..100 {
            shares.iter().for_each(|share| _ = share.up_to(8 * MIB));
        }
        assert!(pool.taken() <= POOL_BYTES / 2, "{} are taken", pool.taken());
        let last = share(&greedy);
        assert_eq!(last.up_to(8 * MIB).max(512 * KIB), last.bytes());
        assert!(share(&other).covers(8 * MIB), "another disk's clients notice nothing");
    }

    #[test]
    fn disks_that_are_all_greedy_leave_something_to_the_next() {
        let pool = Pool::new(POOL_BYTES);
        let mut all = Vec::new();
        for _ in 0..20 {
            let party = Party::new(&pool);
            let shares: Vec<_> = (0..64).map(|_| share(&party)).collect();
            shares.iter().for_each(|share| _ = share.up_to(8 * MIB));
            all.push((party, shares));
            assert!(pool.taken() < POOL_BYTES);
        }
    }

    #[test]
    fn whatever_is_taken_and_given_back_the_pool_knows_it() {
        let pool = Pool::new(16 * MIB);
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let pool = &pool;
                scope.spawn(move || {
                    let mut random = Random(seed);
                    let party = Party::new(pool);
                    let mut shares: Vec<_> = (0..8).map(|_| share(&party)).collect();
                    for _ in 0..20_000 {
                        let index = random.index(shares.len());
                        let bytes = random.index(9 * MIB);
                        match random.below(4) {
                            0 => _ = shares[index].covers(bytes),
                            1 => _ = shares[index].up_to(bytes),
                            2 => shares[index].trim(bytes),
                            _ => shares[index] = share(&party),
                        }
                        assert!(pool.taken() <= 16 * MIB);
                        assert!(shares[index].bytes() >= 512 * KIB);
                        assert!(shares[index].bytes() <= 8 * MIB);
                    }
                });
            }
        });
        assert_eq!(pool.taken(), 0);
    }
}
