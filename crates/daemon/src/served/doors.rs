//! Where the clients of a disk come in: the socket of its device, and its part in the addresses of
//! NBD.
//!
//! Invariants
//! - I1 A socket of a systemd unit stays open while the disk is closed: systemd holds it, too, so
//!   that it cannot be created again.
//! - I2 Locks are taken in the order `device`, `memberships`, `listening`.

use crate::addresses::{Listening, Memberships};
use crate::config::DiskConfig;
use crate::held::{Held, Origin, device_name};
use crate::servers::Resources;
use crate::sockets::Sockets;
use crate::systemd;
use mica_block::Result;
use mica_serve::nbd::Seat;
use mica_serve::{Listener, SocketUsers};
use parking_lot::{Mutex, MutexGuard};
use std::path::PathBuf;
use std::sync::Arc;

/// Where the clients of a disk come in.
pub(crate) struct Doors {
    disk: String,
    /// Where the front end of a virtual machine connects, if one may.
    vhost_user: Option<PathBuf>,
    /// The socket of its device.
    device: Mutex<Option<Held>>,
    /// Its part in the addresses where NBD clients connect, until it is removed.
    memberships: Mutex<Option<Memberships>>,
    /// It listens there while it is open. Cleared before it leaves them.
    listening: Mutex<Vec<Listening>>,
}

impl Doors {
    /// Those of `disk`, with `inherited` sockets where there are some. It listens nowhere yet.
    ///
    /// # Errors
    /// As [`Addresses::join`](crate::addresses::Addresses::join).
    pub(super) fn new(
        disk: &DiskConfig,
        inherited: &mut Sockets,
        resources: &Resources,
    ) -> Result<Self> {
        let memberships = resources.addresses.join(disk, inherited)?;
        Ok(Self {
            disk: disk.name.clone(),
            vhost_user: disk.settings.vhost_user.clone(),
            device: Mutex::new(inherited.take_device_of(disk)),
            memberships: Mutex::new(Some(memberships)),
            listening: Mutex::default(),
        })
    }

    /// Makes clients that ask for the disk wait: it is about to be served.
    pub(super) fn mark_opening(&self) {
        if let Some(memberships) = &*self.memberships() {
            memberships.mark_opening();
        }
    }

    /// Listens for the front end of a virtual machine, and for NBD clients where no other disk does
    /// already. What there is already is kept.
    pub(super) fn listen(&self, resources: &Resources) -> Result<()> {
        let mut device = self.device();
        if let (None, Some(path)) = (&*device, &self.vhost_user) {
            let listener = Listener::unix_for(path, SocketUsers::AsUmask)?;
            *device = Some(Held::new(device_name(&self.disk), Origin::Here, listener));
        }
        drop(device);
        let listening = match &*self.memberships() {
            Some(memberships) => memberships.listen(&resources.workers, &resources.handles)?,
            None => Vec::new(),
        };
        *self.listening() = listening;
        Ok(())
    }

    /// Its seats in the tables of exports.
    pub(crate) fn seats(&self) -> Vec<Arc<Seat>> {
        self.memberships().as_ref().map(Memberships::seats).unwrap_or_default()
    }

    /// Closes its sockets, but for those of systemd's units and those that other disks share. Of
    /// these, clients that ask for this one are told `why` it is not served.
    pub(super) fn close(&self, why: &'static str) {
        self.mark_absent(why);
        systemd::close(self.device().take_if(|held| held.origin != Origin::Unit));
        self.listening().clear();
    }

    /// Tells clients that ask for it at a shared address `why` it is not served.
    pub(super) fn mark_absent(&self, why: &'static str) {
        if let Some(memberships) = &*self.memberships() {
            memberships.mark_absent(why);
        }
    }

    /// Closes what was inherited for a disk that could not be opened, for this reason: nobody is to
    /// wait there.
    pub(super) fn discard(&self, why: &'static str) {
        for held in self.device().iter().filter(|held| held.origin != Origin::Unit) {
            held.listener.own_file();
            systemd::forget(&held.name);
        }
        self.close(why);
    }

    /// Closes the socket of its device, whoever's it is.
    pub(super) fn remove_device(&self) {
        *self.device() = None;
    }

    /// Leaves its addresses for good. The disk is closed.
    pub(crate) fn leave_addresses(&self) {
        self.listening().clear();
        *self.memberships() = None;
    }

    /// Whether a socket was inherited for it: somebody may wait there. If the process that passed
    /// it `tells_served` disks, one at a shared address is not meant for this one.
    pub(crate) fn has_inherited(&self, tells_served: bool) -> bool {
        let of_clients =
            |all: &Memberships| all.has_inherited() && !(tells_served && all.are_shared());
        self.device().is_some() || self.memberships().as_ref().is_some_and(of_clients)
    }

    /// Whether another disk is at one of its addresses.
    pub(crate) fn are_shared(&self) -> bool {
        self.memberships().as_ref().is_some_and(Memberships::are_shared)
    }

    /// The socket of its device.
    pub(crate) fn device(&self) -> MutexGuard<'_, Option<Held>> {
        self.device.lock()
    }

    /// Where it listens for NBD clients.
    pub(crate) fn listening(&self) -> MutexGuard<'_, Vec<Listening>> {
        self.listening.lock()
    }

    fn memberships(&self) -> MutexGuard<'_, Option<Memberships>> {
        self.memberships.lock()
    }
}
