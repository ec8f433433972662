//! The addresses of NBD, which disks share: no disk owns one.
//!
//! ```text
//! Addresses ── where each disk may be (places), and an Address for each that has disks
//!   Membership   a disk of the set, for as long as it is: its seat in the table of exports
//!   Listening    a disk that is open, for as long as it is: the socket listens while there is one
//! ```
//!
//! A disk joins its addresses before it is opened and leaves them when it is removed; between, it
//! listens or not, and a client that asks for it while others listen learns why it is not served.
//! The address itself listens from the first disk's [`Listening`] to the end of the last. At a
//! takeover the old process holds all clients back first, passes each socket once, and lets them in
//! again if it resumes; in the new one clients that ask for a disk which has not started yet wait.
//!
//! Invariants
//! - I1 A place, and an export name at an address, belongs to one disk ([`Places`]).
//! - I2 A socket is open while a disk listens, and its file is there. The last one to leave closes
//!   it and removes the file, if it is ours and still the same. Sockets of systemd's units stay
//!   open until the last disk has left: they cannot be created again.
//! - I3 What is stored with systemd is what listens: sockets that share the name of one that was
//!   removed from the store are stored again.
//! - I4 Locks are taken in the order `table`, `state`; nothing waits under either but for the
//!   system calls of listening.

use crate::address::Address;
use crate::config::DiskConfig;
use crate::held::{Held, Origin};
use crate::helper::Outside;
use crate::places::{Places, nbd_addresses};
use crate::sockets::Sockets;
use crate::systemd;
use crate::tls::Security;
use mica_block::{Error, ErrorKind, Result};
use mica_serve::Workers;
use mica_serve::nbd::{self, Exports, Limits, Seat};
use mica_store::{Handles, SetAside};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// All addresses of NBD of a process.
#[derive(Default)]
pub(crate) struct Addresses {
    /// Opens certificates.
    outside: Outside,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    places: Places,
    all: BTreeMap<Key, Arc<Place>>,
}

/// What tells addresses apart.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    At(Address),
    /// A port that the system chooses for this disk, and which of several.
    Any(String, usize),
}

/// An address at which disks are served.
struct Place {
    at: Address,
    exports: Arc<Exports>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Disks that listen.
    listening: usize,
    /// The socket, while they do.
    open: Option<Open>,
    /// A socket that was inherited, while none does.
    spare: Option<Held>,
}

struct Open {
    held: Held,
    /// Lets clients in until it is dropped.
    _address: nbd::Address,
    _descriptor: SetAside,
}

impl Addresses {
    pub(crate) fn new(outside: Outside) -> Self {
        Self { outside, table: Mutex::default() }
    }

    /// Makes `disk` a member of its addresses, with `inherited` sockets where there are some.
    ///
    /// # Errors
    /// `Invalid` if another disk is in its way.
    pub(crate) fn join(
        self: &Arc<Self>,
        disk: &DiskConfig,
        inherited: &mut Sockets,
    ) -> Result<Memberships> {
        let mut table = self.lock();
        // Those of socket units that its settings do not name.
        let named = inherited.named(&disk.name);
        let more: Vec<_> = named.iter().filter_map(|held| Address::of(&held.listener)).collect();
        table.places.add(disk.resident(), &more).map_err(|conflict| {
            let shown = format!("the disk {:?}", conflict.with);
            Error::new(ErrorKind::Invalid, conflict.describe(&shown))
        })?;
        let mut all = Memberships {
            addresses: Arc::clone(self),
            disk: disk.clone(),
            more,
            members: Vec::new(),
        };
        let known = nbd_addresses(&disk.settings).map(|at| (at, None));
        let named =
            named.into_iter().filter_map(|held| Some((Address::of(&held.listener)?, Some(held))));
        for (index, (at, held)) in known.chain(named).enumerate() {
            let key = match at.is_any_port() {
                true => Key::Any(disk.name.clone(), index),
                false => Key::At(at.clone()),
            };
            let place = table.all.entry(key.clone()).or_insert_with(|| {
                let spare = held.or_else(|| inherited.nbd(&at));
                let state = Mutex::new(State { spare, ..State::default() });
                Arc::new(Place { at: at.clone(), exports: Arc::default(), state })
            });
            let place = Arc::clone(place);
            match place.exports.join(disk.export_name()) {
                Ok(seat) => all.members.push(Member { key, place, seat: Arc::new(seat) }),
                Err(error) => {
                    // Leaving takes the lock.
                    drop(table);
                    return Err(error);
                }
            }
        }
        Ok(all)
    }

    /// Closes the inherited sockets at which no disk listens, and removes their files: nobody is to
    /// wait there. Call this once every disk was opened, or could not be.
    pub(crate) fn close_unused(&self) {
        for place in self.all() {
            let mut state = place.lock();
            match state.spare.take() {
                Some(held) if held.origin == Origin::Unit => state.spare = Some(held),
                Some(held) => {
                    held.listener.own_file();
                    systemd::forget(&held.name);
                    drop(state);
                    drop(held);
                }
                None => {}
            }
        }
        // What shares a name with one of these is stored once everything is served.
    }

    /// Lets no client in anywhere: those that connect wait.
    pub(crate) fn hold_back(&self) {
        self.all().iter().for_each(|place| place.exports.hold_back());
    }

    /// Ends [`Self::hold_back`].
    pub(crate) fn let_in(&self) {
        self.all().iter().for_each(|place| place.exports.let_in());
    }

    /// Calls `each` for every socket, once.
    pub(crate) fn for_each(&self, mut each: impl FnMut(&mut Held)) {
        for place in self.all() {
            let mut state = place.lock();
            let State { open, spare, .. } = &mut *state;
            open.iter_mut().map(|open| &mut open.held).chain(spare).for_each(&mut each);
        }
    }

    /// Stores the sockets again that systemd has removed together with another one, `name` being
    /// theirs, too (I3).
    fn store_again(&self, name: &str) {
        self.for_each(|held| {
            if held.is_stored && held.name == name {
                systemd::store(held);
            }
        });
    }

    fn all(&self) -> Vec<Arc<Place>> {
        self.lock().all.values().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }
}

/// A disk's part in its addresses, served there or not. It leaves them when this is dropped.
pub(crate) struct Memberships {
    addresses: Arc<Addresses>,
    disk: DiskConfig,
    more: Vec<Address>,
    members: Vec<Member>,
}

struct Member {
    key: Key,
    place: Arc<Place>,
    seat: Arc<Seat>,
}

impl Memberships {
    /// Its seats in the tables of exports.
    pub(crate) fn seats(&self) -> Vec<Arc<Seat>> {
        self.members.iter().map(|member| Arc::clone(&member.seat)).collect()
    }

    /// Makes clients that ask for the disk wait: it is about to be served.
    pub(crate) fn mark_opening(&self) {
        self.members.iter().for_each(|member| member.seat.mark_opening());
    }

    /// Tells clients that ask for the disk `why` it is not served.
    pub(crate) fn mark_absent(&self, why: &'static str) {
        self.members.iter().for_each(|member| member.seat.mark_absent(why));
    }

    /// Whether a socket was inherited that has its name.
    pub(crate) fn has_inherited(&self) -> bool {
        let is_own = |member: &Member| {
            member.place.lock().spare.as_ref().is_some_and(|held| held.name == self.disk.name)
        };
        self.members.iter().any(is_own)
    }

    /// Whether another disk is at one of its addresses.
    pub(crate) fn are_shared(&self) -> bool {
        self.members.iter().any(|member| member.place.exports.len() > 1)
    }

    /// Listens at each of its addresses, as far as no other disk does already.
    ///
    /// # Errors
    /// Whatever prevents that; then it listens nowhere.
    pub(crate) fn listen(
        &self,
        workers: &Workers,
        handles: &Arc<Handles>,
    ) -> Result<Vec<Listening>> {
        let listen = |member: &Member| {
            let place = &member.place;
            place.listen(&self.disk, (workers, handles), &self.addresses.outside)?;
            Ok(Listening { addresses: Arc::clone(&self.addresses), place: Arc::clone(place) })
        };
        self.members.iter().map(listen).collect()
    }
}

impl Drop for Memberships {
    fn drop(&mut self) {
        let mut table = self.addresses.lock();
        table.places.remove(self.disk.resident(), &self.more);
        for Member { key, seat, .. } in self.members.drain(..) {
            let is_last = match &key {
                Key::At(at) => !table.places.is_taken(at),
                Key::Any(..) => true,
            };
            if is_last {
                table.all.remove(&key);
            }
            drop(seat);
        }
    }
}

/// A disk that is open and listens at an address, until this is dropped.
pub(crate) struct Listening {
    addresses: Arc<Addresses>,
    place: Arc<Place>,
}

impl Listening {
    /// Where clients connect, as it is written on the command line.
    pub(crate) fn place(&self) -> String {
        let state = self.place.lock();
        state.open.as_ref().map_or_else(|| self.place.at.to_string(), |open| open.held.place())
    }

    /// Owns its socket file from now on, unless a unit of systemd does, and stores the socket with
    /// systemd.
    pub(crate) fn own(&self) {
        if let Some(Open { held, .. }) = &mut self.place.lock().open {
            if held.origin != Origin::Unit {
                held.listener.own_file();
            }
            if !held.is_stored {
                systemd::store(held);
            }
        }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Some(name) = self.place.leave() {
            self.addresses.store_again(&name);
        }
    }
}

impl Place {
    /// One more disk listens here.
    fn listen(
        &self,
        disk: &DiskConfig,
        (workers, handles): (&Workers, &Arc<Handles>),
        outside: &Outside,
    ) -> Result<()> {
        let mut state = self.lock();
        if state.open.is_none() {
            let security = Security::of(&disk.settings);
            let certificate = |file: &Path| outside.open_certificate(file);
            let held = security.listen(&disk.name, &self.at, &mut state.spare, &certificate)?;
            let exports = &self.exports;
            let opened =
                nbd::Address::open(held.listener.clone(), exports, workers, &Limits::default());
            match opened {
                Ok(address) => {
                    let descriptor = handles.set_aside(1);
                    state.open = Some(Open { held, _address: address, _descriptor: descriptor });
                }
                Err(error) => {
                    // For the next attempt, if it cannot be made again.
                    state.spare = Some(held).filter(|held| held.origin != Origin::Here);
                    return Err(error);
                }
            }
        }
        state.listening += 1;
        Ok(())
    }

    /// One disk less listens here. The name of the socket, if it was stored with systemd and is not
    /// any longer.
    fn leave(&self) -> Option<String> {
        let mut state = self.lock();
        state.listening -= 1;
        if state.listening > 0 {
            return None;
        }
        let Open { held, .. } = state.open.take()?;
        if held.origin == Origin::Unit {
            state.spare = Some(held);
            return None;
        }
        let forgotten = held.is_stored.then(|| held.name.clone());
        systemd::close([held]);
        forgotten
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}
