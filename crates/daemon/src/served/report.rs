//! What a disk says of itself.

use super::{End, SERVING, Served, State};
use crate::addresses::Listening;
use crate::config::LeftClosed;
use crate::held::Held;
use crate::opened::Figures;
use crate::servers::Servers;
use crate::settings::NbdPlace;
use crate::stats::{self, Counts};
use mica_block::Error;
use serde_json::{Map, Value};

impl Served {
    /// What it has lost when it was closed, if anything.
    pub(crate) fn loss(&self) -> Option<Error> {
        match &*self.lock() {
            State::Ended(_, End::Closed(Err(error))) => Some(error.clone()),
            _ => None,
        }
    }

    /// How it is left when it is closed.
    pub(crate) fn left_closed(&self) -> LeftClosed {
        LeftClosed {
            loss: self.loss().map(|error| error.in_one_line()),
            shown: self.image_figures().shown(),
        }
    }

    /// Whether it is open.
    pub(crate) fn is_open(&self) -> bool {
        matches!(&*self.lock(), State::Prepared(_) | State::Serving(_))
    }

    /// Whether somebody has drained it.
    pub(crate) fn is_drained(&self) -> bool {
        matches!(&*self.lock(), State::Ended(_, End::Closing | End::Closed(_)))
    }

    /// Whether it was to be served and could not be opened.
    pub(crate) fn could_not_be_served(&self) -> bool {
        matches!(&*self.lock(), State::Ended(_, End::NotServed(_)))
    }

    /// Says where it is served, if it is.
    pub(crate) fn announce(&self) {
        if !self.is_open() {
            return;
        }
        let device = |held: &Held| format!("vhost-user {}", held.place());
        let mut places: Vec<_> = self.doors.device().iter().map(device).collect();
        let export = match self.export_name() {
            name if name == self.name => String::new(),
            name => format!(" as {name:?}"),
        };
        places
            .extend(self.doors.listening().iter().map(|at| format!("nbd {}{export}", at.place())));
        places.extend(self.settings.fuse.iter().map(|file| format!("fuse {}", file.display())));
        let (image, places) = (self.image(), places.join(", "));
        let how = if self.image_figures().is_writable { "" } else { ", read-only" };
        let (name, image) = (&self.name, image.display());
        tracing::info!(target: SERVING, "serving {name:?} ({image}{how}) at {places}");
    }

    /// Where NBD clients connect: where it listens, or where it will if it is not open.
    pub(crate) fn nbd_places(&self) -> Vec<String> {
        let places: Vec<_> = self.doors.listening().iter().map(Listening::place).collect();
        match places.is_empty() {
            true => self.settings.nbd.iter().map(NbdPlace::to_string).collect(),
            false => places,
        }
    }

    /// The name by which NBD clients choose it.
    pub(crate) fn export_name(&self) -> &str {
        self.settings.export_name.as_deref().unwrap_or(&self.name)
    }

    /// Whether clients are answered.
    pub(crate) fn is_serving(&self) -> bool {
        matches!(&*self.lock(), State::Serving(_))
    }

    /// Its state, as the control socket reports it.
    pub(crate) fn condition(&self) -> &'static str {
        match &*self.lock() {
            State::Opening | State::Prepared(_) => "starting",
            State::Serving(_) => "serving",
            State::Ended(_, End::New) => "starting",
            State::Ended(_, End::Closing) => "draining",
            State::Ended(_, End::Closed(Ok(()))) => "drained",
            State::Ended(_, End::Removed(_)) => "removed",
            State::Ended(_, End::Closed(Err(_)) | End::NotServed(_)) => "failed",
        }
    }

    /// Why it is not served, if it should be.
    pub(crate) fn failure(&self) -> Option<Error> {
        match &*self.lock() {
            State::Ended(_, End::Closed(Err(error)) | End::NotServed(error)) => Some(error.clone()),
            _ => None,
        }
    }

    /// Why the store may lack what was written, of a volume that is not open. What was closed whole
    /// is there.
    pub(super) fn why_not_stored(&self) -> Option<Error> {
        match &*self.lock() {
            State::Ended(_, End::Closed(outcome) | End::Removed(outcome)) => outcome.clone().err(),
            State::Ended(_, End::NotServed(error)) => Some(error.clone()),
            State::Ended(_, End::Closing) => Some(self.denied("is being closed")),
            State::Ended(_, End::New) | State::Opening | State::Prepared(_) | State::Serving(_) => {
                Some(self.denied("is being opened"))
            }
        }
    }

    /// Why its device does not serve, if it does not.
    pub(crate) fn device_error(&self) -> Option<&'static str> {
        let State::Serving(servers) = &*self.lock() else { return None };
        servers.is_device_broken().then_some(
            "its front end took away memory that it had shared: reconnect it to be served again",
        )
    }

    /// Counters so far.
    pub(crate) fn counts(&self) -> Counts {
        match &*self.lock() {
            State::Opening | State::Prepared(_) => Servers::default().counts(),
            State::Serving(servers) => servers.counts(),
            State::Ended(counts, _) => **counts,
        }
    }

    /// Current clients: NBD connections and the front end of a virtual machine.
    pub(crate) fn clients(&self) -> usize {
        match &*self.lock() {
            State::Serving(servers) => servers.clients(),
            State::Opening | State::Prepared(_) | State::Ended(..) => 0,
        }
    }

    /// Whether an NBD client was served since it was opened.
    pub(crate) fn had_clients(&self) -> bool {
        match &*self.lock() {
            State::Serving(servers) => servers.had_clients(),
            State::Opening | State::Prepared(_) | State::Ended(..) => false,
        }
    }

    /// Its figures, as JSON.
    pub(crate) fn figures(&self) -> Map<String, Value> {
        stats::document(&self.image_figures(), &self.counts())
    }

    /// What the disk shows of itself, or showed when it was closed.
    pub(crate) fn image_figures(&self) -> Figures {
        self.opened().figures()
    }
}
