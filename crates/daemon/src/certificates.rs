//! Certificates, which are renewed while clients are served: those who come from now on get what is
//! in the files now, and connections that there are go on.
//!
//! Invariants
//! - I1 Certificates that cannot be used change nothing: clients get what they got before.
//! - I2 Addresses whose certificates are from the same place get the same ones: each folder is read
//!   once.

use crate::addresses::Addresses;
use crate::helper::Outside;
use crate::served::Served;
use mica_serve::{CertificateSource, Tls};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A folder of certificates that was read again.
#[derive(Serialize, Debug)]
pub(crate) struct Renewed {
    pub(crate) folder: String,
    /// Where clients get them.
    pub(crate) addresses: Vec<String>,
    /// Why clients still get those from before, if so.
    pub(crate) error: Option<String>,
}

/// Whether clients may use TLS at one of the `addresses`, or for a backup of one of the `disks`.
pub(crate) fn are_used(addresses: &Addresses, disks: &[Arc<Served>]) -> bool {
    !in_use(addresses, disks).is_empty()
}

/// Reads the certificates of all `addresses`, and of the backups of `disks`, again, by `outside`,
/// and says what came of that.
pub(crate) fn renew(
    addresses: &Addresses,
    disks: &[Arc<Served>],
    outside: &Outside,
) -> Vec<Renewed> {
    let renew = |(source, Use { all, addresses }): (CertificateSource, Use)| {
        let read = Tls::load(source.clone(), &|file| outside.open_certificate(file));
        let renewed = read.map(|newer| all.iter().for_each(|tls| tls.renew(&newer)));
        Renewed {
            folder: source.directory.to_string_lossy().into_owned(),
            addresses,
            error: renewed.err().map(|error| error.in_one_line()),
        }
    };
    in_use(addresses, disks).into_iter().map(renew).collect()
}

/// What clients get, and where.
#[derive(Default)]
struct Use {
    all: Vec<Tls>,
    addresses: Vec<String>,
}

/// What clients get, by where it was read.
fn in_use(addresses: &Addresses, disks: &[Arc<Served>]) -> BTreeMap<CertificateSource, Use> {
    let mut all: BTreeMap<_, Use> = BTreeMap::new();
    let mut add = |tls: &Tls, place: String| {
        let used = all.entry(tls.source().clone()).or_default();
        used.all.push(tls.clone());
        used.addresses.push(place);
    };
    addresses.for_each(|held| {
        if let Some(tls) = held.listener.tls() {
            add(tls, held.place());
        }
    });
    // The address of a backup is its own.
    for (tls, place) in disks.iter().filter_map(|disk| disk.backup_tls()) {
        add(&tls, place);
    }
    all
}
