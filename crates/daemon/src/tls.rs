//! How NBD connections are secured: what the settings ask for, and what follows for a socket.
//!
//! Over TCP, TLS is required as soon as there are certificates. On a unix socket it is offered: the
//! permissions of its file say who may connect, and nothing leaves the machine.

use crate::address::Address;
use crate::held::{Held, Origin};
use crate::settings::{DiskSettings, TlsMode, VerifyPeer};
use mica_block::{Error, ErrorKind, Result};
use mica_serve::{CertificateSource, Clients, Listener, OpenFile, Tls, TlsPolicy};
use std::path::{Path, PathBuf};

/// What the security settings of a disk mean at an address: all disks there agree on it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct AddressSecurity {
    /// The certificates, whether clients need some, and whether they need TLS.
    tls: Option<(PathBuf, VerifyPeer, TlsPolicy)>,
    is_plain_allowed: bool,
}

/// The security settings of a disk.
pub(crate) struct Security<'a> {
    mode: Option<TlsMode>,
    certificates: Option<&'a Path>,
    verify_peer: VerifyPeer,
    allow_plain_tcp: bool,
}

impl<'a> Security<'a> {
    pub(crate) fn of(disk: &'a DiskSettings) -> Self {
        Self {
            mode: disk.tls,
            certificates: disk.tls_certificates.as_deref(),
            verify_peer: disk.tls_verify_peer.unwrap_or_default(),
            allow_plain_tcp: disk.allow_plain_tcp,
        }
    }

    /// What they mean at an address.
    pub(crate) fn at(&self, at: &Address) -> AddressSecurity {
        let is_tcp = matches!(at, Address::Tcp(_));
        let is_off = self.mode == Some(TlsMode::Off);
        let certificates = self.certificates.filter(|_| !is_off);
        let policy = if is_tcp { self.policy() } else { TlsPolicy::Offered };
        AddressSecurity {
            tls: certificates.map(|folder| (folder.to_owned(), self.verify_peer, policy)),
            is_plain_allowed: is_tcp && self.allow_plain_tcp,
        }
    }

    /// Listens for NBD clients `at` an address. An `inherited` socket is used as it is. A new one
    /// is named after `disk`. Certificates are opened by `open`.
    ///
    /// # Errors
    /// Whatever prevents that; the inherited socket then stays where it is.
    pub(crate) fn listen(
        &self,
        disk: &str,
        at: &Address,
        inherited: &mut Option<Held>,
        open: OpenFile<'_>,
    ) -> Result<Held> {
        let tls = self.tls(open)?;
        let held = match inherited.take() {
            Some(held) => held,
            None => {
                self.permit(at, tls.is_some())?;
                let listener = match at {
                    Address::Tcp(address) => Listener::tcp(*address)?,
                    Address::Unix(path) => Listener::unix(path)?,
                };
                Held::new(disk.to_owned(), Origin::Here, listener)
            }
        };
        let listener = self.secure(held.listener, tls.as_ref());
        Ok(Held { listener, ..held })
    }

    /// Checks whether NBD clients could be let in `at` an address, as [`Self::listen`] does.
    ///
    /// # Errors
    /// If they could not be.
    pub(crate) fn check(&self, at: &Address, open: OpenFile<'_>) -> Result<()> {
        let tls = self.tls(open)?;
        self.permit(at, tls.is_some())
    }

    fn tls(&self, open: OpenFile<'_>) -> Result<Option<Tls>> {
        let clients = match self.verify_peer {
            VerifyPeer::On => Clients::Verified,
            VerifyPeer::Off => Clients::Any,
        };
        match (self.mode, self.certificates) {
            (Some(TlsMode::Off), _) | (None, None) => Ok(None),
            (_, Some(directory)) => {
                Tls::load(CertificateSource { directory: directory.to_owned(), clients }, open)
                    .map(Some)
            }
            (Some(_), None) => Err(Error::new(
                ErrorKind::Invalid,
                "--tls needs certificates: add --tls-certificates DIR",
            )),
        }
    }

    /// Refuses an address at which others could read what is sent.
    fn permit(&self, at: &Address, has_tls: bool) -> Result<()> {
        let Address::Tcp(address) = at else { return Ok(()) };
        let is_secured = has_tls && self.policy() == TlsPolicy::Required;
        if is_secured || self.allow_plain_tcp || address.ip().to_canonical().is_loopback() {
            return Ok(());
        }
        let context = format!(
            "--nbd {at}: except on loopback addresses NBD needs TLS: add --tls-certificates DIR \
             (without --tls, or with --tls require), or --allow-plain-tcp if everyone on that \
             network may read and change the disk"
        );
        Err(Error::new(ErrorKind::Denied, context))
    }

    /// What is demanded of TCP clients where there are certificates.
    fn policy(&self) -> TlsPolicy {
        match self.mode {
            Some(TlsMode::On) => TlsPolicy::Offered,
            _ => TlsPolicy::Required,
        }
    }

    fn secure(&self, mut listener: Listener, tls: Option<&Tls>) -> Listener {
        let is_tcp = listener.tcp_address().is_some();
        if is_tcp && self.allow_plain_tcp {
            listener = listener.allow_plain();
        }
        let policy = if is_tcp { self.policy() } else { TlsPolicy::Offered };
        match tls {
            Some(tls) => listener.with_tls(tls, policy),
            None => listener,
        }
    }
}
