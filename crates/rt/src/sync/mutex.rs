//! A mutex for tasks on any thread: one at a time, in the order in which they asked. It holds no
//! data: what only one task at a time does is mostly more than to change a value in memory.
//!
//! Invariants
//! - I1 A place in the queue stands from the request until it is dropped, even if that is before
//!   its turn came; whoever stands first has the mutex.
//! - I2 A task waits for the end of the place just before its own, and then looks where it stands:
//!   one that gives up its place, granted or not, wakes the next, and takes nothing with it.
//! - I3 A task that waits listens to that end before it releases the lock of the queue, so that no
//!   wake-up is lost.

use event_listener::{Event, IntoNotification};
use parking_lot::MutexGuard;
use std::collections::VecDeque;

/// The mutex.
#[derive(Default)]
pub struct Mutex {
    queue: parking_lot::Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    /// In the order of the requests; the first has the mutex.
    places: VecDeque<Place>,
    next_ticket: u64,
}

struct Place {
    ticket: u64,
    /// Notified when the place is given up.
    end: Event,
}

/// The mutex, as soon as it is granted; released on drop.
#[must_use = "the mutex is released when this is dropped"]
pub struct Locked<'a> {
    mutex: &'a Mutex,
    ticket: u64,
}

impl Mutex {
    /// Has the mutex once everybody is done who asked before.
    pub async fn lock(&self) -> Locked<'_> {
        let (locked, mut before) = {
            let mut queue = self.lock_queue();
            let before = queue.places.back().map(|place| place.end.listen());
            (self.join(&mut queue), before)
        };
        while let Some(end) = before {
            end.await;
            let queue = self.lock_queue();
            let at = queue.position(locked.ticket).expect("it stands until it is dropped");
            // The one that gave up its place may have waited itself.
            before = at.checked_sub(1).map(|before| queue.places[before].end.listen());
        }
        locked
    }

    /// Has the mutex if nobody has it or waits for it. Otherwise waits until who asked last before
    /// is done, or gives up; `None` then, as there may be nothing left to do.
    pub async fn lock_or_wait(&self) -> Option<Locked<'_>> {
        let end = {
            let mut queue = self.lock_queue();
            match queue.places.back() {
                Some(place) => place.end.listen(),
                None => return Some(self.join(&mut queue)),
            }
        };
        end.await;
        None
    }

    /// Has the mutex if nobody has it or waits for it.
    pub fn try_lock(&self) -> Option<Locked<'_>> {
        let mut queue = self.lock_queue();
        queue.places.is_empty().then(|| self.join(&mut queue))
    }

    fn join<'a>(&'a self, queue: &mut Queue) -> Locked<'a> {
        let ticket = queue.next_ticket;
        queue.next_ticket += 1;
        queue.places.push_back(Place { ticket, end: Event::new() });
        Locked { mutex: self, ticket }
    }

    fn lock_queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }
}

impl Queue {
    fn position(&self, ticket: u64) -> Option<usize> {
        self.places.binary_search_by_key(&ticket, |place| place.ticket).ok()
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let place = {
            let mut queue = self.mutex.lock_queue();
            let at = queue.position(self.ticket).expect("it stands until it is dropped");
            queue.places.remove(at).expect("it is there")
        };
        // Listeners register under the lock, so no fence is needed.
        place.end.notify(usize::MAX.relaxed());
    }
}

#[cfg(test)]
mod tests;
