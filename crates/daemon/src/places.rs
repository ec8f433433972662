//! Which disk may be served where. Plain values: nothing listens.
//!
//! Invariants
//! - I1 A vhost-user socket and a file belong to one disk. A socket of NBD is for any number of
//!   disks, each with an export name of its own.
//! - I2 All disks at one address of NBD secure it in the same way: a client has not said which one
//!   it wants when TLS begins.

use crate::address::Address;
use crate::settings::{DiskSettings, NbdPlace};
use crate::tls::{AddressSecurity, Security};
use std::collections::{BTreeMap, BTreeSet};

/// Where the NBD clients of a disk connect, as far as its settings say.
pub(crate) fn nbd_addresses(settings: &DiskSettings) -> impl Iterator<Item = Address> {
    settings.nbd.iter().filter_map(NbdPlace::address)
}

/// The sockets of all servers of a disk, as far as its settings say.
pub(crate) fn socket_addresses(settings: &DiskSettings) -> impl Iterator<Item = Address> {
    nbd_addresses(settings).chain(settings.vhost_user.iter().filter_map(|path| Address::unix(path)))
}

/// A disk, as far as it matters here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resident<'a> {
    pub(crate) disk: &'a str,
    /// The name under which NBD clients find it.
    pub(crate) export: &'a str,
    pub(crate) settings: &'a DiskSettings,
}

/// Which disks are where.
#[derive(Default, Debug)]
pub(crate) struct Places {
    taken: BTreeMap<Address, Taken>,
}

#[derive(Debug)]
enum Taken {
    /// By this disk alone.
    Alone(String),
    Shared(Sharing),
}

#[derive(Debug)]
struct Sharing {
    security: AddressSecurity,
    /// The names of exports, and of their disks.
    exports: BTreeMap<String, String>,
}

/// Why a disk cannot be where it is to be.
#[derive(Debug)]
pub(crate) struct Conflict {
    pub(crate) at: Address,
    /// The disk that is there.
    pub(crate) with: String,
    pub(crate) kind: ConflictKind,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ConflictKind {
    /// It or the other one does not share the place.
    Place,
    /// The place is named twice by the same disk.
    Twice,
    Security,
    /// They have this export name in common.
    Export(String),
}

impl Conflict {
    /// What is wrong with the disk, the other one being `shown` like this.
    pub(crate) fn describe(&self, shown: &str) -> String {
        let at = &self.at;
        match &self.kind {
            ConflictKind::Twice => format!("{at} is used twice"),
            ConflictKind::Place => {
                format!("{shown} is served at {at}: only NBD sockets are shared, with NBD")
            }
            ConflictKind::Security => format!(
                "{shown} is served at {at}, too, with other settings of TLS: give both the same \
                 tls, tls-certificates, tls-verify-peer and allow-plain-tcp"
            ),
            ConflictKind::Export(name) => format!(
                "{shown} is served at {at}, too, with the same export name {name:?}: give one of \
                 them another export-name"
            ),
        }
    }
}

impl Places {
    /// Puts a disk where its settings say, and at `more` addresses of NBD, or nowhere.
    pub(crate) fn add(&mut self, disk: Resident<'_>, more: &[Address]) -> Result<(), Conflict> {
        let conflict = |at: &Address, with: &str, kind| {
            Err(Conflict { at: at.clone(), with: with.to_owned(), kind })
        };
        let (alone, shared) = (alone(disk.settings), shared(disk.settings, more));
        let mut own = BTreeSet::new();
        for at in alone.iter().chain(&shared) {
            if !own.insert(at) {
                return conflict(at, disk.disk, ConflictKind::Twice);
            }
        }
        for at in &alone {
            if let Some(with) = self.taken.get(at).and_then(Taken::any) {
                return conflict(at, with, ConflictKind::Place);
            }
        }
        let (export, security) = (disk.export, Security::of(disk.settings));
        for at in &shared {
            let sharing = match self.taken.get(at) {
                None => continue,
                Some(Taken::Alone(with)) => return conflict(at, with, ConflictKind::Place),
                Some(Taken::Shared(sharing)) => sharing,
            };
            if let Some(with) = sharing.exports.get(export) {
                return conflict(at, with, ConflictKind::Export(export.to_owned()));
            }
            if let Some(with) = sharing.exports.values().next()
                && sharing.security != security.at(at)
            {
                return conflict(at, with, ConflictKind::Security);
            }
        }
        for at in alone {
            self.taken.insert(at, Taken::Alone(disk.disk.to_owned()));
        }
        for at in shared {
            let new =
                || Taken::Shared(Sharing { security: security.at(&at), exports: BTreeMap::new() });
            if let Taken::Shared(sharing) = self.taken.entry(at.clone()).or_insert_with(new) {
                sharing.exports.insert(export.to_owned(), disk.disk.to_owned());
            }
        }
        Ok(())
    }

    /// Takes a disk away from where [`Self::add`] has put it.
    pub(crate) fn remove(&mut self, disk: Resident<'_>, more: &[Address]) {
        for at in alone(disk.settings) {
            self.taken.remove(&at);
        }
        for at in shared(disk.settings, more) {
            if let Some(Taken::Shared(sharing)) = self.taken.get_mut(&at) {
                sharing.exports.remove(disk.export);
                if sharing.exports.is_empty() {
                    self.taken.remove(&at);
                }
            }
        }
    }

    /// Whether a disk is at this address.
    pub(crate) fn is_taken(&self, at: &Address) -> bool {
        self.taken.contains_key(at)
    }
}

impl Taken {
    /// A disk that is there.
    fn any(&self) -> Option<&str> {
        match self {
            Self::Alone(disk) => Some(disk),
            Self::Shared(sharing) => sharing.exports.values().next().map(String::as_str),
        }
    }
}

/// Where no other disk can be.
fn alone(settings: &DiskSettings) -> Vec<Address> {
    let paths = settings.vhost_user.iter().chain(&settings.fuse);
    paths.filter_map(|path| Address::unix(path)).collect()
}

fn shared(settings: &DiskSettings, more: &[Address]) -> Vec<Address> {
    let known = nbd_addresses(settings).filter(|at| !at.is_any_port());
    known.chain(more.iter().cloned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DiskConfig;
    use crate::settings::TlsMode;
    use std::path::PathBuf;

    fn disk(name: &str, nbd: &[&str]) -> DiskConfig {
        let mut disk = DiskConfig::new(name.to_owned(), PathBuf::from("image"));
        disk.settings.nbd = nbd.iter().map(|place| place.parse().expect("a place")).collect();
        disk
    }

    #[test]
    fn disks_share_an_address_under_different_names_only() {
        let mut places = Places::default();
        places.add(disk("a", &["/s", "tcp:127.0.0.1:1"]).resident(), &[]).expect("free");
        places.add(disk("b", &["/s"]).resident(), &[]).expect("shared");
        let mut other = disk("c", &["tcp:127.0.0.1:1", "/s"]);
        other.settings.export_name = Some("b".to_owned());
        let conflict = places.add(other.resident(), &[]).expect_err("b has that name");
        assert_eq!((&*conflict.with, conflict.kind), ("b", ConflictKind::Export("b".to_owned())));
        other.settings.export_name = None;
        places.add(other.resident(), &[]).expect("nothing was left of the attempt");
        let twice = places.add(disk("d", &["/t", "/t"]).resident(), &[]).expect_err("once");
        assert_eq!(twice.kind, ConflictKind::Twice);
        places.add(disk("d", &["tcp:127.0.0.1:0"]).resident(), &[]).expect("a port of its own");
        places.add(disk("e", &["tcp:127.0.0.1:0"]).resident(), &[]).expect("a port of its own");
    }

    #[test]
    fn socket_of_a_machine_belongs_to_one_disk_until_that_is_gone() {
        let mut places = Places::default();
        let mut machine = disk("a", &[]);
        machine.settings.vhost_user = Some(PathBuf::from("/s"));
        places.add(machine.resident(), &[]).expect("free");
        for other in [disk("b", &["/s"]), DiskConfig { name: "b".to_owned(), ..machine.clone() }] {
            let conflict = places.add(other.resident(), &[]).expect_err("it is a's");
            assert_eq!((&*conflict.with, conflict.kind), ("a", ConflictKind::Place));
        }
        places.remove(machine.resident(), &[]);
        places.add(disk("b", &["/s"]).resident(), &[]).expect("free again");
        assert_eq!(places.add(machine.resident(), &[]).expect_err("b's").kind, ConflictKind::Place);
    }

    #[test]
    fn all_disks_at_an_address_secure_it_in_the_same_way() {
        let mut places = Places::default();
        let secured = |name: &str, mode| {
            let mut disk = disk(name, &["/s", "tcp:127.0.0.1:1"]);
            disk.settings.tls_certificates = Some(PathBuf::from("/pki"));
            disk.settings.tls = mode;
            disk
        };
        places.add(secured("a", None).resident(), &[]).expect("the first");
        places.add(secured("b", Some(TlsMode::Require)).resident(), &[]).expect("the default");
        for other in [secured("c", Some(TlsMode::On)), disk("c", &["/s"])] {
            let conflict = places.add(other.resident(), &[]).expect_err("other settings");
            assert_eq!(conflict.kind, ConflictKind::Security);
        }
        let mut on_unix = secured("c", Some(TlsMode::On));
        on_unix.settings.nbd.pop();
        places.add(on_unix.resident(), &[]).expect("on a unix socket TLS is never required");
    }
}
