//! Sockets that are there before this process listens: from systemd, or from a process that is
//! taken over.
//!
//! A socket finds its place by its address. One of a socket unit else finds it by its name: a
//! disk's own name serves the disk by NBD, `NAME.vhost-user` is its device.

use crate::config::{Config, DiskConfig};
use crate::held::{Held, Origin};
use crate::settings::DiskSettings;
use crate::systemd;
use mica_block::{Error, ErrorKind, Result};
use mica_serve::{Listener, SocketUsers};
use std::collections::BTreeMap;
use std::fs::Permissions;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// What the name of a device's socket ends in.
const DEVICE: &str = ".vhost-user";
/// The name of the socket by which the process is told what to do.
const CONTROL: &str = "mica.control";
/// The name of the socket at which it shows its figures.
const METRICS: &str = "mica.metrics";

/// What the socket of a disk's device is called.
pub(crate) fn device_name(disk: &str) -> String {
    format!("{disk}{DEVICE}")
}

/// Sockets that came along, each with its place.
#[derive(Default, Debug)]
pub(crate) struct Sockets {
    by_place: BTreeMap<Place, Held>,
    by_name: BTreeMap<String, Vec<Held>>,
    /// Those of an earlier configuration, which go once all is served.
    spare: Vec<Held>,
}

/// An address that can be compared.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Place {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl Place {
    fn unix(path: &Path) -> Option<Self> {
        std::path::absolute(path).ok().map(Self::Unix)
    }

    /// As `--nbd` has it.
    fn nbd(name: &str) -> Option<Self> {
        match name.strip_prefix("tcp:") {
            Some(address) => address.parse().ok().map(Self::Tcp),
            None => Self::unix(Path::new(name)),
        }
    }

    fn of(listener: &Listener) -> Option<Self> {
        let path = listener.path().and_then(Self::unix);
        path.or_else(|| listener.tcp_address().map(Self::Tcp))
    }
}

impl Sockets {
    /// Gives each of those that `came` its place in `config`.
    ///
    /// # Errors
    /// `Invalid` if one has none and nobody but its unit knows what it is for.
    pub(crate) fn assign(came: Vec<Held>, config: &Config) -> Result<Self> {
        let mut sockets = Self::default();
        let mut wanted: Vec<_> =
            config.process.control.iter().filter_map(|path| Place::unix(path)).collect();
        wanted.extend(config.process.metrics.map(Place::Tcp));
        let mut names = Vec::new();
        for disk in &config.disks {
            let DiskSettings { nbd, vhost_user, .. } = &disk.settings;
            wanted.extend(nbd.iter().filter_map(|name| Place::nbd(name)));
            wanted.extend(vhost_user.iter().filter_map(|path| Place::unix(path)));
            names.extend([disk.name.clone(), device_name(&disk.name)]);
        }
        for held in came {
            match Place::of(&held.listener).filter(|place| wanted.contains(place)) {
                // The same socket may come twice: from its unit, and from where it was stored.
                Some(place) => drop(sockets.by_place.entry(place).or_insert(held)),
                // Of what was ours, only what is still said to be served is.
                None if held.origin == Origin::Unit && names.contains(&held.name) => {
                    sockets.by_name.entry(held.name.clone()).or_default().push(held);
                }
                None if held.origin == Origin::Unit => {
                    let Held { name, listener, .. } = &held;
                    let context = format!(
                        "a socket came along that no disk is served at: its name is {name:?} and \
                         its address {:?}; call it as a disk is called, or as a disk's device \
                         (NAME{DEVICE}), or give a disk its address",
                        Place::of(listener)
                    );
                    return Err(Error::new(ErrorKind::Invalid, context));
                }
                None => sockets.spare.push(held),
            }
        }
        Ok(sockets)
    }

    /// Makes sure that the sockets of `config` that did not come along can be made: a process in a
    /// sandbox cannot tell that of a living server from one that was left behind.
    ///
    /// # Errors
    /// As [`Listener::clear_place`].
    pub(crate) fn clear_places(&self, config: &Config) -> Result<()> {
        let of_disk = |disk: &DiskConfig| {
            let DiskSettings { nbd, vhost_user, .. } = &disk.settings;
            let nbd = nbd.iter().filter(|name| !name.starts_with("tcp:")).map(PathBuf::from);
            nbd.chain(vhost_user.clone()).collect::<Vec<_>>()
        };
        let all = config.disks.iter().flat_map(of_disk).chain(config.process.control.clone());
        for path in all {
            let came = Place::unix(&path).is_some_and(|place| self.by_place.contains_key(&place));
            if !came {
                Listener::clear_place(&path)?;
            }
        }
        let Some(control) = &config.process.control else { return Ok(()) };
        match Place::unix(control).and_then(|place| self.by_place.get(&place)) {
            None => Ok(()),
            // One that somebody else made is this user's alone all the same.
            Some(_) => std::fs::set_permissions(control, Permissions::from_mode(0o600))
                .map_err(|error| Error::from_io("starting the control socket", error)),
        }
    }

    /// The unix socket at `path`: one that came along, or a new one.
    ///
    /// # Errors
    /// As [`Listener::unix_for`].
    pub(crate) fn unix(&mut self, name: String, path: &Path, users: SocketUsers) -> Result<Held> {
        match Place::unix(path).and_then(|place| self.by_place.remove(&place)) {
            Some(held) => Ok(Held { name, ..held }),
            None => Ok(Held::new(name, Origin::Here, Listener::unix_for(path, users)?)),
        }
    }

    /// The socket at a TCP `address`: one that came along, or a new one.
    ///
    /// # Errors
    /// As [`Listener::tcp`].
    pub(crate) fn tcp(&mut self, name: String, address: SocketAddr) -> Result<Held> {
        match self.by_place.remove(&Place::Tcp(address)) {
            Some(held) => Ok(Held { name, ..held }),
            None => Ok(Held::new(name, Origin::Here, Listener::tcp(address)?)),
        }
    }

    /// A socket for NBD clients that came along to where `--nbd` has it.
    pub(crate) fn nbd(&mut self, place: &str) -> Option<Held> {
        self.by_place.remove(&Place::nbd(place)?)
    }

    /// Those that are called `name` and came to no place of their own.
    pub(crate) fn named(&mut self, name: &str) -> Vec<Held> {
        self.by_name.remove(name).unwrap_or_default()
    }

    /// The files that are to be removed at some time.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Path> {
        let placed = self.by_place.values().chain(self.by_name.values().flatten());
        let all = placed.chain(&self.spare).filter(|held| held.origin != Origin::Unit);
        all.filter_map(|held| held.listener.path())
    }

    /// Takes away what nothing is served at any more. To be called once all is served.
    pub(crate) fn remove_spare(self) {
        for held in self.spare {
            tracing::info!(name = held.name, "a socket of an earlier configuration is closed");
            held.listener.own_file();
            // Others that are served have the name too, perhaps; they are stored after this.
            systemd::forget(&held.name);
        }
    }
}

/// Where the control thread listens: the unix socket, and the address of the figures.
#[derive(Default)]
pub(crate) struct Places {
    pub(crate) control: Option<Held>,
    pub(crate) metrics: Option<Held>,
}

impl Places {
    /// At the sockets that `came` along, or at new ones.
    ///
    /// # Errors
    /// What keeps it from listening; `Denied` for figures beyond the loopback that nobody allowed.
    pub(crate) fn take(
        control: Option<&Path>,
        metrics: Option<SocketAddr>,
        metrics_public: bool,
        came: &mut Sockets,
    ) -> Result<Self> {
        let mut places = Self::default();
        if let Some(path) = control {
            places.control = Some(came.unix(CONTROL.to_owned(), path, SocketUsers::Own)?);
        }
        if let Some(address) = metrics {
            check_metrics(address, metrics_public)?;
            let held = came.tcp(METRICS.to_owned(), address);
            places.metrics =
                Some(held.map_err(|error| error.wrap(format!("--metrics {address}")))?);
        }
        Ok(places)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Held> {
        self.control.iter().chain(&self.metrics)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Held> {
        self.control.iter_mut().chain(&mut self.metrics)
    }

    /// Listens there no more.
    pub(crate) fn close(&mut self) {
        systemd::close(self.control.take().into_iter().chain(self.metrics.take()));
    }
}

fn check_metrics(address: SocketAddr, is_public: bool) -> Result<()> {
    let context = || format!("--metrics {address}");
    if !is_public && !address.ip().to_canonical().is_loopback() {
        let what = "figures are shown on the loopback only, unless --metrics-public allows more";
        return Err(Error::new(ErrorKind::Denied, what).wrap(context()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn config() -> Config {
        let disk = |name: &str| DiskConfig::new(name.to_owned(), PathBuf::from("image"));
        let mut web1 = disk("web1");
        web1.settings.nbd = vec!["/nowhere/web1.nbd".to_owned()];
        Config { disks: vec![web1, disk("web2")], ..Config::default() }
    }

    fn came(folder: &Path, name: &str, origin: Origin) -> Held {
        let listener = UnixListener::bind(folder.join(format!("{name}.sock"))).expect("bound");
        let listener = Listener::inherited(listener.into()).expect("it listens");
        Held::new(name.to_owned(), origin, listener)
    }

    #[test]
    fn address_counts_before_the_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut config = config();
        config.disks[0].settings.nbd = vec![folder.path().join("web2.sock").display().to_string()];
        let by_address = came(folder.path(), "web2", Origin::Unit);
        let by_name = came(folder.path(), "web2.vhost-user", Origin::Unit);
        let mut sockets = Sockets::assign(vec![by_address, by_name], &config).expect("known");

        assert!(sockets.named("web2").is_empty());
        assert_eq!(sockets.named("web2.vhost-user").len(), 1);
        assert_eq!(sockets.nbd(&config.disks[0].settings.nbd[0]).expect("its place").name, "web2");
    }

    #[test]
    fn socket_that_fits_nothing_is_an_error_unless_it_was_our_own() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = Sockets::assign(vec![came(folder.path(), "x", Origin::Unit)], &config());
        let error = error.expect_err("nobody's");
        assert!(error.to_string().contains("\"x\""), "{error}");

        let spare = ["y", "web1"].map(|name| came(folder.path(), name, Origin::Takeover));
        let sockets = Sockets::assign(spare.into(), &config()).expect("closed later");
        assert_eq!(sockets.files().count(), 2);
        assert!(folder.path().join("y.sock").exists());
        sockets.remove_spare();
        assert!(!folder.path().join("y.sock").exists());
        assert!(!folder.path().join("web1.sock").exists());
        assert!(folder.path().join("x.sock").exists(), "its unit's");
    }

    #[test]
    fn figures_are_for_this_machine_unless_more_is_allowed() {
        let check = |public| check_metrics(SocketAddr::from(([0, 0, 0, 0], 0)), public);
        let refused = check(false).expect_err("refused");
        assert!(refused.to_string().contains("--metrics 0.0.0.0:0"), "{refused}");
        check(true).expect("allowed");
    }
}
