//! Inherited sockets: those that are open before this process starts to listen, from systemd or
//! from a process that is taken over. And the sockets of the control thread.
//!
//! An inherited socket is matched by its address. A socket unit's socket that has no matching
//! address is matched by name: a disk's own name is for NBD, `NAME.vhost-user` for its device. One
//! that has no name is for NBD of the only disk, if that is served nowhere else: so programs pass
//! sockets that are no service managers, as libnbd does for the server that it starts.

use crate::address::Address;
use crate::config::{Config, DiskConfig};
use crate::held::{CONTROL, DEVICE, Held, METRICS, Origin, device_name};
use crate::places::socket_addresses;
use crate::settings::{DiskSettings, NbdPlace};
use crate::systemd;
use mica_block::{Error, ErrorKind, Result};
use mica_serve::{Clearing, Listener, SocketUsers};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// What a socket is called to which nobody gave a name.
const NAMELESS: [&str; 2] = ["", "unknown"];

/// Inherited sockets, by what they are for.
#[derive(Default, Debug)]
pub(crate) struct Sockets {
    by_address: BTreeMap<Address, Held>,
    by_name: BTreeMap<String, Vec<Held>>,
    /// Sockets of an earlier configuration, closed once everything is served.
    spare: Vec<Held>,
}

impl Sockets {
    /// Matches each of the `inherited` sockets with its use in `config`.
    ///
    /// # Errors
    /// `Invalid` if a systemd unit passed a socket that nothing in `config` uses, or if `config`
    /// has a disk that would be served nowhere.
    pub(crate) fn assign(inherited: Vec<Held>, config: &Config) -> Result<Self> {
        let mut sockets = Self::default();
        let mut wanted: BTreeSet<_> =
            config.process.control.iter().filter_map(|path| Address::unix(path)).collect();
        wanted.extend(config.process.metrics.map(Address::Tcp));
        let mut names = Vec::new();
        for disk in &config.disks {
            wanted.extend(socket_addresses(&disk.settings));
            names.extend([disk.name.clone(), device_name(&disk.name)]);
        }
        let only = match &config.disks[..] {
            [disk] if !disk.settings.has_place() => Some(&disk.name),
            _ => None,
        };
        for mut held in inherited {
            if let Some(only) = only.filter(|_| NAMELESS.contains(&&*held.name)) {
                held.name.clone_from(only);
            }
            match Address::of(&held.listener).filter(|address| wanted.contains(address)) {
                // The same socket may be passed twice: by its unit and from the store.
                Some(address) => drop(sockets.by_address.entry(address).or_insert(held)),
                // Of our own sockets, only those still configured are served.
                None if held.origin == Origin::Unit && names.contains(&held.name) => {
                    sockets.by_name.entry(held.name.clone()).or_default().push(held);
                }
                None if held.origin == Origin::Unit => {
                    let Held { name, listener, .. } = &held;
                    let context = format!(
                        "systemd passed a socket that no disk uses: its name is {name:?} and its \
                         address {:?}; name it after a disk or a disk's device (NAME{DEVICE}), or \
                         give a disk its address",
                        Address::of(listener)
                    );
                    return Err(Error::new(ErrorKind::Invalid, context));
                }
                None => sockets.spare.push(held),
            }
        }
        let is_placed = |disk: &DiskConfig| {
            let names = [disk.name.clone(), device_name(&disk.name)];
            disk.settings.has_place() || names.iter().any(|name| sockets.by_name.contains_key(name))
        };
        match config.disks.iter().find(|disk| !is_placed(disk)) {
            None => Ok(sockets),
            Some(DiskConfig { name, .. }) => {
                let context = format!(
                    "disk {name:?}: nowhere to serve it, as no socket was passed for \
                     it: add nbd, vhost-user or fuse"
                );
                Err(Error::new(ErrorKind::Invalid, context))
            }
        }
    }

    /// Makes sure that the sockets of `config` that were not inherited can be created: inside the
    /// sandbox, a process cannot tell a living server's socket from a stale one.
    ///
    /// # Errors
    /// As [`Clearing::clear`].
    pub(crate) fn clear_places(&self, config: &Config) -> Result<()> {
        let mut clearing = Clearing::default();
        let mut clear = |path: &Path| match Address::unix(path) {
            Some(address) if self.by_address.contains_key(&address) => Ok(()),
            _ => clearing.clear(path),
        };
        // A server that has this has the others, too, and this says what to do about it.
        if let Some(path) = &config.process.control {
            clear(path).map_err(|error| with_cure(path, error))?;
        }
        let of_disk = |disk: &DiskConfig| {
            let DiskSettings { nbd, vhost_user, .. } = &disk.settings;
            let nbd = nbd.iter().filter_map(|place| match place {
                NbdPlace::Unix(path) => Some(path.clone()),
                NbdPlace::Tcp(_) => None,
            });
            nbd.chain(vhost_user.clone()).collect::<Vec<_>>()
        };
        // One of several disks may fail. Listening there says why.
        let may_fail = config.disks.len() > 1 && !config.process.strict;
        let paths: BTreeSet<_> = config.disks.iter().flat_map(of_disk).collect();
        for path in paths {
            match clear(&path) {
                Err(_) if may_fail => {}
                cleared => cleared?,
            }
        }
        let Some(control) = &config.process.control else { return Ok(()) };
        match Address::unix(control).and_then(|address| self.by_address.get(&address)) {
            None => Ok(()),
            // Whoever created it, it is for this user alone.
            Some(_) => std::fs::set_permissions(control, Permissions::from_mode(0o600))
                .map_err(|error| Error::from_io("starting the control socket", error)),
        }
    }

    /// The unix socket at `path`: the inherited one, or a new one.
    ///
    /// # Errors
    /// As [`Listener::unix_for`].
    pub(crate) fn unix(&mut self, name: String, path: &Path, users: SocketUsers) -> Result<Held> {
        match Address::unix(path).and_then(|address| self.by_address.remove(&address)) {
            Some(held) => Ok(Held { name, ..held }),
            None => Ok(Held::new(name, Origin::Here, Listener::unix_for(path, users)?)),
        }
    }

    /// The socket at a TCP `address`: the inherited one, or a new one.
    ///
    /// # Errors
    /// As [`Listener::tcp`].
    pub(crate) fn tcp(&mut self, name: String, address: SocketAddr) -> Result<Held> {
        match self.by_address.remove(&Address::Tcp(address)) {
            Some(held) => Ok(Held { name, ..held }),
            None => Ok(Held::new(name, Origin::Here, Listener::tcp(address)?)),
        }
    }

    /// The inherited NBD socket at `place`.
    pub(crate) fn nbd(&mut self, place: &Address) -> Option<Held> {
        self.by_address.remove(place)
    }

    /// The socket of the device of `disk`: somebody may wait there.
    pub(crate) fn take_device_of(&mut self, disk: &DiskConfig) -> Option<Held> {
        let name = device_name(&disk.name);
        let at = disk.settings.vhost_user.as_deref().and_then(Address::unix);
        let held = match at {
            Some(at) => self.by_address.remove(&at),
            None => self.named(&name).pop(),
        };
        held.map(|held| Held { name, ..held })
    }

    /// Inherited sockets that are matched by `name`, not by address.
    pub(crate) fn named(&mut self, name: &str) -> Vec<Held> {
        self.by_name.remove(name).unwrap_or_default()
    }

    /// Socket files that this process will remove at some point.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Path> {
        let placed = self.by_address.values().chain(self.by_name.values().flatten());
        let all = placed.chain(&self.spare).filter(|held| held.origin != Origin::Unit);
        all.filter_map(|held| held.listener.path())
    }

    /// Closes the sockets that are no longer configured and removes their files. Call this once
    /// everything is served.
    pub(crate) fn remove_spare(self) {
        for held in self.spare {
            tracing::info!(name = held.name, "closed a socket of an earlier configuration");
            held.listener.own_file();
            // Sockets in use may share the name; they are stored after this.
            systemd::forget(&held.name);
        }
    }
}

/// The sockets of the control thread: the unix socket, and the TCP socket for figures.
#[derive(Default)]
pub(crate) struct ControlSockets {
    pub(crate) control: Option<Held>,
    pub(crate) metrics: Option<Held>,
}

impl ControlSockets {
    /// Takes `inherited` sockets, or creates new ones.
    ///
    /// # Errors
    /// Whatever prevents listening; `Denied` for figures beyond the loopback without permission.
    pub(crate) fn take(
        control: Option<&Path>,
        metrics: Option<SocketAddr>,
        metrics_public: bool,
        inherited: &mut Sockets,
    ) -> Result<Self> {
        let mut sockets = Self::default();
        if let Some(path) = control {
            let held = inherited.unix(CONTROL.to_owned(), path, SocketUsers::Own);
            sockets.control = Some(held.map_err(|error| with_cure(path, error))?);
        }
        if let Some(address) = metrics {
            check_metrics(address, metrics_public)?;
            let held = inherited.tcp(METRICS.to_owned(), address);
            sockets.metrics =
                Some(held.map_err(|error| error.wrap(format!("--metrics {address}")))?);
        }
        Ok(sockets)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Held> {
        self.control.iter().chain(&self.metrics)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Held> {
        self.control.iter_mut().chain(&mut self.metrics)
    }

    /// Closes them.
    pub(crate) fn close(&mut self) {
        systemd::close(self.control.take().into_iter().chain(self.metrics.take()));
    }
}

/// The error of listening at the control socket `path`, with what to do if a server has it.
fn with_cure(path: &Path, error: Error) -> Error {
    if error.held().is_none() {
        return error;
    }
    let what = format!(
        "{error}: change what it serves with `mica ctl --control {}`, or put this server in its \
         place with --takeover",
        path.display()
    );
    Error::new(error.kind(), what)
}

/// Refuses to show the figures beyond the loopback, unless that is permitted.
pub(crate) fn check_metrics(address: SocketAddr, is_public: bool) -> Result<()> {
    let context = || format!("--metrics {address}");
    if !is_public && !address.ip().to_canonical().is_loopback() {
        let what = "metrics are served only on loopback addresses without --metrics-public";
        return Err(Error::new(ErrorKind::Denied, what).wrap(context()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    fn config() -> Config {
        let disk = |name: &str| DiskConfig::new(name.to_owned(), PathBuf::from("image"));
        let (mut web1, mut web2) = (disk("web1"), disk("web2"));
        web1.settings.nbd = vec![NbdPlace::Unix("/nowhere/web1.nbd".into())];
        web2.settings.nbd = vec![NbdPlace::Unix("/nowhere/web2.nbd".into())];
        Config { disks: vec![web1, web2], ..Config::default() }
    }

    fn inherited(folder: &Path, name: &str, origin: Origin) -> Held {
        let listener = UnixListener::bind(folder.join(format!("{name}.sock"))).expect("bound");
        let listener = Listener::inherited(listener.into()).expect("it listens");
        Held::new(name.to_owned(), origin, listener)
    }

    #[test]
    fn socket_without_a_name_is_for_the_only_disk_that_has_no_place() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut config = config();
        let unknown = || vec![inherited(folder.path(), "unknown", Origin::Unit)];
        Sockets::assign(unknown(), &config).expect_err("there are two disks");
        config.disks.truncate(1);
        std::fs::remove_file(folder.path().join("unknown.sock")).expect("bound");
        Sockets::assign(unknown(), &config).expect_err("it is served elsewhere");
        config.disks[0].settings.nbd.clear();
        std::fs::remove_file(folder.path().join("unknown.sock")).expect("bound");
        let mut sockets = Sockets::assign(unknown(), &config).expect("known");
        assert_eq!(sockets.named("web1").first().map(|held| &*held.name), Some("web1"));
    }

    #[test]
    fn address_counts_before_the_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut config = config();
        config.disks[0].settings.nbd = vec![NbdPlace::Unix(folder.path().join("web2.sock"))];
        let by_address = inherited(folder.path(), "web2", Origin::Unit);
        let by_name = inherited(folder.path(), "web2.vhost-user", Origin::Unit);
        let mut sockets = Sockets::assign(vec![by_address, by_name], &config).expect("known");

        assert!(sockets.named("web2").is_empty());
        assert_eq!(sockets.named("web2.vhost-user").len(), 1);
        let place = config.disks[0].settings.nbd[0].address().expect("a path");
        assert_eq!(sockets.nbd(&place).expect("its address").name, "web2");
    }

    #[test]
    fn socket_that_fits_nothing_is_an_error_unless_it_was_our_own() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = Sockets::assign(vec![inherited(folder.path(), "x", Origin::Unit)], &config());
        let error = error.expect_err("it belongs nowhere");
        assert!(error.to_string().contains("\"x\""), "{error}");

        let spare = ["y", "web1"].map(|name| inherited(folder.path(), name, Origin::Takeover));
        let sockets = Sockets::assign(spare.into(), &config()).expect("closed later");
        assert_eq!(sockets.files().count(), 2);
        assert!(folder.path().join("y.sock").exists());
        sockets.remove_spare();
        assert!(!folder.path().join("y.sock").exists());
        assert!(!folder.path().join("web1.sock").exists());
        assert!(folder.path().join("x.sock").exists(), "its unit's");
    }

    #[test]
    fn disk_without_an_address_is_served_at_a_unit_s_socket_of_its_name_or_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut config = config();
        config.disks[1].settings.nbd.clear();
        for name in ["web2", "web2.vhost-user"] {
            let own = inherited(folder.path(), name, Origin::Unit);
            Sockets::assign(vec![own], &config).expect("it has a place");
        }
        let error = Sockets::assign(Vec::new(), &config).expect_err("it has none");
        assert!(error.to_string().contains("\"web2\": nowhere to serve it"), "{error}");
    }

    #[test]
    fn figures_are_for_this_machine_unless_more_is_allowed() {
        let check = |public| check_metrics(SocketAddr::from(([0, 0, 0, 0], 0)), public);
        let refused = check(false).expect_err("refused");
        assert!(refused.to_string().contains("--metrics 0.0.0.0:0"), "{refused}");
        check(true).expect("allowed");
    }
}
