//! The clients of an address that have not chosen an export.
//!
//! Invariants
//! - I1 There are at most [`HANDSHAKES_MAX`], besides those that were told to leave.
//! - I2 If there are as many, a new one takes the place of the one that has been there longest
//!   without an option: clients that say nothing keep out nobody. Whoever has sent one stays, as
//!   long as the deadline lets it.

use super::limits::HANDSHAKES_MAX;
use mica_rt::sync::Signal;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// All of them.
#[derive(Default)]
pub(super) struct Handshakes(Mutex<Table>);

#[derive(Default)]
struct Table {
    /// In the order in which they came.
    there: BTreeMap<u64, Arc<Place>>,
    next: u64,
}

#[derive(Default)]
struct Place {
    /// Whether an option has arrived.
    is_heard: AtomicBool,
    dismissed: Signal,
}

/// One of them, until this is dropped.
pub(super) struct Handshake {
    all: Arc<Handshakes>,
    number: u64,
    place: Arc<Place>,
}

impl Handshakes {
    /// Takes a client; `None` if there are too many, all of which have sent an option.
    pub(super) fn enter(self: &Arc<Self>) -> Option<Handshake> {
        let place = Arc::<Place>::default();
        let (number, dismissed) = {
            let mut table = self.lock();
            let dismissed = match table.there.len() < HANDSHAKES_MAX {
                true => None,
                false => Some(table.take_silent()?),
            };
            let number = table.next;
            table.next += 1;
            table.there.insert(number, Arc::clone(&place));
            (number, dismissed)
        };
        if let Some(dismissed) = dismissed {
            dismissed.dismissed.raise();
        }
        Some(Handshake { all: Arc::clone(self), number, place })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock()
    }
}

impl Table {
    /// Takes out the one that has been there longest without an option.
    fn take_silent(&mut self) -> Option<Arc<Place>> {
        let is_silent = |place: &Place| !place.is_heard.load(Ordering::Relaxed);
        let silent = self.there.iter().find(|(_, place)| is_silent(place));
        let number = silent.map(|(number, _)| *number)?;
        self.there.remove(&number)
    }
}

impl Handshake {
    /// An option has arrived.
    pub(super) fn hear(&self) {
        self.place.is_heard.store(true, Ordering::Relaxed);
    }

    /// Raised when it is to leave.
    pub(super) fn dismissed(&self) -> &Signal {
        &self.place.dismissed
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.all.lock().there.remove(&self.number);
    }
}
