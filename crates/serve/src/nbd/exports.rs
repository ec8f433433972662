//! The exports of an address: which names there are, and what stands behind each.
//!
//! A disk takes a [`Seat`] here for as long as it belongs to the address, served or not. So a
//! client that asks for one that is not served learns why, and the empty name does not change its
//! meaning when a disk is drained.
//!
//! Invariants
//! - I1 A name belongs to one seat. The empty name is also the only seat's; where there are
//!   several, it is that of the one which is called so, if any.
//! - I2 Clients are let in only while a disk is served and nothing holds them back. They wait in
//!   front of the address otherwise, and those that have not chosen an export are dismissed when
//!   that ends.
//! - I3 A client that asks for an export that is about to be served waits for it, with the
//!   [`Patience`] of its handshake. A list waits for nothing: it names what is served and what is
//!   about to be, so that it is whole as soon as the first disk is open, and a disk that hangs in
//!   opening hides no other.
//! - I4 Nobody holds an export while it waits for a client: a list is encoded page by page, each
//!   beginning behind the last name of the one before.

use super::entry::Entry;
use super::limits::{AWAITED_MAX, EXPORTS_MAX, NAME_BYTES_MAX};
use mica_block::{Error, ErrorKind, Result};
use mica_rt::sync::{Signal, Waiters};
use mica_rt::{now, timeout};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

/// The exports of an address.
#[derive(Default)]
pub struct Exports {
    table: Mutex<Table>,
    /// Wait for the table to change.
    waiters: Waiters,
}

#[derive(Default)]
struct Table {
    /// In the order in which they are listed.
    seats: BTreeMap<String, Standing>,
    served: usize,
    is_held_back: bool,
    /// Raised when clients are no longer let in; there is one while they are.
    open: Option<Arc<Signal>>,
}

/// What stands behind a name.
enum Standing {
    /// It is about to be served: clients wait.
    Awaited,
    /// It is not served, for this reason.
    Absent(&'static str),
    Served(Arc<Entry>),
}

/// What a name is, after a wait.
pub(super) enum Found {
    Served(Arc<Entry>),
    /// There is none to be had; here is what to tell the client.
    None(String),
}

/// How much longer a client waits for exports that are about to be served, all together: whoever
/// asks for the details of each that is listed gets to the end of the list.
pub(super) struct Patience(Duration);

impl Default for Patience {
    fn default() -> Self {
        Self(AWAITED_MAX)
    }
}

/// An export in a list.
pub(super) enum Listed {
    Served(Arc<Entry>),
    /// It is about to be served, under this name.
    Awaited(String),
}

impl Listed {
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Served(entry) => &entry.export.name,
            Self::Awaited(name) => name,
        }
    }

    pub(super) fn description(&self) -> &str {
        match self {
            Self::Served(entry) => &entry.export.description,
            Self::Awaited(_) => "",
        }
    }
}

/// Some of the exports, in their order.
pub(super) struct Page {
    pub(super) exports: Vec<Listed>,
    /// The last name that was looked at, if there may be more behind it.
    pub(super) last: Option<String>,
}

impl Exports {
    /// Takes a seat for `name`. What is behind it is awaited.
    ///
    /// # Errors
    /// `Invalid` if the name is taken or too long, `Limit` if there are too many.
    pub fn join(self: &Arc<Self>, name: &str) -> Result<Seat> {
        let invalid = |what: String| Err(Error::new(ErrorKind::Invalid, what));
        if name.len() > NAME_BYTES_MAX {
            return invalid(format!("an export's name has at most {NAME_BYTES_MAX} bytes"));
        }
        self.change(|table| {
            if table.seats.contains_key(name) {
                return invalid(format!("there is an export named {name:?} already"));
            }
            if table.seats.len() >= EXPORTS_MAX {
                let what = format!("an address has at most {EXPORTS_MAX} exports");
                return Err(Error::new(ErrorKind::Limit, what));
            }
            table.seats.insert(name.to_owned(), Standing::Awaited);
            Ok(Seat { exports: Arc::clone(self), name: name.to_owned() })
        })
    }

    /// How many there are, served or not.
    #[expect(clippy::len_without_is_empty, reason = "nobody asks for that")]
    pub fn len(&self) -> usize {
        self.lock().seats.len()
    }

    /// Lets no clients in until [`Self::let_in`]: those that connect wait.
    pub fn hold_back(&self) {
        self.change(|table| table.is_held_back = true);
    }

    /// Ends [`Self::hold_back`].
    pub fn let_in(&self) {
        self.change(|table| table.is_held_back = false);
    }

    /// Waits until clients are let in. What it gives is raised when they no longer are.
    pub(super) async fn opened(&self) -> Arc<Signal> {
        self.waiters.until(|| self.lock().open.clone()).await
    }

    /// The export called `name`, once it is settled whether there is one.
    pub(super) async fn find(&self, name: &[u8], patience: &mut Patience) -> Found {
        let settled = || {
            let table = self.lock();
            match table.named(name) {
                Some((_, Standing::Awaited)) => None,
                Some((_, Standing::Served(entry))) => Some(Found::Served(Arc::clone(entry))),
                Some((name, Standing::Absent(why))) => {
                    Some(Found::None(format!("{} is not served: {why}", shown(name))))
                }
                None => Some(Found::None(table.describe(name))),
            }
        };
        let begin = now();
        let found = timeout(patience.0, self.waiters.until(settled)).await;
        patience.0 = patience.0.saturating_sub(now().saturating_since(begin));
        found
            .unwrap_or_else(|_| Found::None("it is still being opened: try again later".to_owned()))
    }

    /// Up to `count` exports behind the name `after`.
    pub(super) fn page(&self, after: Option<&str>, count: usize) -> Page {
        let table = self.lock();
        let begin = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut page = Page { exports: Vec::new(), last: None };
        for (looked_at, (name, standing)) in
            table.seats.range::<str, _>((begin, Bound::Unbounded)).enumerate()
        {
            if looked_at >= count {
                return page;
            }
            page.last = Some(name.clone());
            page.exports.extend(match standing {
                Standing::Served(entry) => Some(Listed::Served(Arc::clone(entry))),
                Standing::Awaited => Some(Listed::Awaited(name.clone())),
                Standing::Absent(_) => None,
            });
        }
        page.last = None;
        page
    }

    /// The only export, if it is served: it is meant by clients that have not chosen. Of several
    /// nobody can tell which one is.
    pub(super) fn only(&self) -> Option<Arc<Entry>> {
        let table = self.lock();
        let mut standings = table.seats.values();
        match (standings.next(), standings.next()) {
            (Some(Standing::Served(entry)), None) => Some(Arc::clone(entry)),
            _ => None,
        }
    }

    fn change<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        let (changed, dismissed) = {
            let mut table = self.lock();
            let changed = change(&mut table);
            let is_open = table.served > 0 && !table.is_held_back;
            let dismissed = match (is_open, table.open.is_some()) {
                (true, false) => {
                    table.open = Some(Arc::default());
                    None
                }
                (false, true) => table.open.take(),
                (true, true) | (false, false) => None,
            };
            (changed, dismissed)
        };
        if let Some(dismissed) = dismissed {
            dismissed.raise();
        }
        self.waiters.wake_all();
        changed
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }
}

impl Table {
    /// The seat called `name` (I1).
    fn named(&self, name: &[u8]) -> Option<(&str, &Standing)> {
        let found = match (name, self.seats.len()) {
            (b"", 1) => self.seats.iter().next(),
            (name, _) => self.seats.get_key_value(std::str::from_utf8(name).ok()?),
        };
        found.map(|(name, standing)| (name.as_str(), standing))
    }

    /// What to tell a client that asks for what is not there. The name itself is not repeated: it
    /// may be long, and is the client's own.
    fn describe(&self, name: &[u8]) -> String {
        /// How much is told of names.
        const TOLD_BYTES_MAX: usize = 160;
        let why = match name {
            b"" => "there is no default among several exports",
            _ => "there is no export with that name",
        };
        let mut told = String::new();
        let mut more = self.seats.len();
        for name in self.seats.keys() {
            let name = shown(name);
            if told.len() + name.len() > TOLD_BYTES_MAX {
                break;
            }
            let separator = if told.is_empty() { "" } else { ", " };
            told = told + separator + &name;
            more -= 1;
        }
        match (told.is_empty(), more) {
            (true, _) => why.to_owned(),
            (false, 0) => format!("{why}: there is {told}"),
            (false, _) => format!("{why}: there is {told}, and {more} more"),
        }
    }

    /// Puts something else behind a name, and drops what was there.
    fn set(&mut self, name: &str, standing: Option<Standing>) -> Option<Standing> {
        let served = usize::from(matches!(standing, Some(Standing::Served(_))));
        let before = match standing {
            Some(standing) => std::mem::replace(self.seats.get_mut(name)?, standing),
            None => self.seats.remove(name)?,
        };
        self.served += served;
        if let Standing::Served(_) = before {
            self.served -= 1;
        }
        Some(before)
    }
}

/// A name as it is told, which does not become long.
fn shown(name: &str) -> String {
    /// How much of a name is told.
    const BYTES_MAX: usize = 72;
    let mut shown = format!("{name:?}");
    if shown.len() > BYTES_MAX {
        let end = (0..BYTES_MAX).rev().find(|end| shown.is_char_boundary(*end)).unwrap_or(0);
        shown.truncate(end);
        shown.push('…');
    }
    shown
}

/// The place of one disk among the exports of an address. It is free again when dropped.
pub struct Seat {
    exports: Arc<Exports>,
    name: String,
}

impl Seat {
    /// The name of the export.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes clients that ask for the disk wait: it is about to be served.
    pub fn mark_opening(&self) {
        self.set(Standing::Awaited);
    }

    /// Tells clients that ask for the disk `why` it is not served.
    pub fn mark_absent(&self, why: &'static str) {
        self.set(Standing::Absent(why));
    }

    pub(super) fn serves(&self, entry: &Arc<Entry>) {
        self.set(Standing::Served(Arc::clone(entry)));
    }

    /// Serves `entry` no longer, if it does.
    pub(super) fn leaves(&self, entry: &Arc<Entry>) {
        let _dropped = self.exports.change(|table| match table.seats.get(&self.name) {
            Some(Standing::Served(served)) if Arc::ptr_eq(served, entry) => {
                table.set(&self.name, Some(Standing::Awaited))
            }
            _ => None,
        });
    }

    fn set(&self, standing: Standing) {
        let _dropped = self.exports.change(|table| table.set(&self.name, Some(standing)));
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let _dropped = self.exports.change(|table| table.set(&self.name, None));
    }
}

impl fmt::Debug for Exports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exports({})", self.lock().seats.len())
    }
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Seat({:?})", self.name)
    }
}

#[cfg(test)]
mod tests;
