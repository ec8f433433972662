//! The certificates of a server, in the layout of QEMU's `tls-creds-x509`.
//!
//! A directory holds `server-cert.pem` (with the certificates between it and the CA behind it, if
//! there are any), `server-key.pem`, and, for clients to be verified, `ca-cert.pem`; the revoked
//! ones of those are in `ca-crl.pem` if that is there. All of it is read when an address begins to
//! listen, and again for [`Tls::renew`]: certificates are renewed while clients are served.
//! Connections that there are keep what they began with.
//!
//! What would make every client fail is an error here, in one line that says which file, what is
//! wrong with it, and what to do. What would make some clients fail, or lets others read the
//! key, is a warning.

use mica_block::{Error, ErrorKind, Result};
use parking_lot::RwLock;
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{CertificateError, RootCertStore, ServerConfig};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The server's credentials, and the clients that it admits. Clones share them.
#[derive(Clone)]
pub struct Tls {
    source: Arc<CertificateSource>,
    /// What the next client gets.
    config: Arc<RwLock<Arc<ServerConfig>>>,
}

/// Where credentials come from.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct CertificateSource {
    /// The directory with the files.
    pub directory: PathBuf,
    /// Who is admitted by them.
    pub clients: Clients,
}

/// Opens a file for reading, without waiting for whatever else may be at its path.
pub type OpenFile<'a> = &'a dyn Fn(&Path) -> Result<OwnedFd>;

/// The clients that may connect.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Clients {
    /// Those with a certificate that a CA in `ca-cert.pem` vouches for.
    Verified,
    /// Anybody: only the server is authenticated.
    Any,
}

impl Tls {
    /// Reads the certificates that `source` names, opening each file by `open`.
    ///
    /// # Errors
    /// `NotFound` or `Denied` for a file that cannot be read, `Invalid` for one that is not what
    /// its name says, is expired, or does not fit the others.
    pub fn load(source: CertificateSource, open: OpenFile<'_>) -> Result<Self> {
        let config = Arc::new(RwLock::new(Arc::new(Files { source: &source, open }.config()?)));
        Ok(Self { source: Arc::new(source), config })
    }

    /// Where they come from.
    pub fn source(&self) -> &CertificateSource {
        &self.source
    }

    /// Gives clients from now on what `newer` has, which has the same source.
    pub fn renew(&self, newer: &Self) {
        let config = newer.config();
        *self.config.write() = config;
    }

    pub(super) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config.read())
    }
}

/// The files of a directory.
struct Files<'a> {
    source: &'a CertificateSource,
    open: OpenFile<'a>,
}

impl Files<'_> {
    fn config(&self) -> Result<ServerConfig> {
        let CertificateSource { directory, clients } = self.source;
        let provider = Arc::new(ring::default_provider());
        let chain = self.certificates(directory.join(SERVER_CERT), "the server's certificate")?;
        let key = self.key(&directory.join(SERVER_KEY))?;
        let issuers = match clients {
            Clients::Verified => Some(self.issuers(&directory.join(CA_CERT), &provider)?),
            Clients::Any => None,
        };
        let roots = issuers.unwrap_or_else(RootCertStore::empty);
        chain.check(&roots, *clients, &provider)?;
        let verifier = match clients {
            Clients::Verified => self.verifier(roots, &provider)?,
            Clients::Any => WebPkiClientVerifier::no_client_auth(),
        };
        let builder = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| invalid(format!("TLS: {error}")))?
            .with_client_cert_verifier(verifier);
        let Certificates { path, list } = chain;
        let mut config = builder.with_single_cert(list, key).map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => invalid(format!(
                "the key in {} does not belong to the certificate in {}: put the two together that \
                 were made together",
                directory.join(SERVER_KEY).display(),
                path.display()
            )),
            error => invalid(format!(
                "{} and {SERVER_KEY} beside it cannot be used: {error}; RSA, ECDSA with P-256 or \
                 P-384, and Ed25519 can",
                path.display()
            )),
        })?;
        // Connections of disks are few and long: a resumed session would save little, and would
        // outlive the revocation of its certificate.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    /// The bytes of a file, and the file.
    fn read(&self, path: &Path, role: &str) -> Result<(Vec<u8>, File)> {
        let context = || {
            format!(
                "reading {}, {role}; a directory for TLS holds {SERVER_CERT}, {SERVER_KEY} and, to \
                 verify clients, {CA_CERT}",
                path.display()
            )
        };
        let file = File::from((self.open)(path).map_err(|error| error.wrap(context()))?);
        let mut bytes = Vec::new();
        let result = (&file).take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes);
        result.map_err(|error| Error::from_io(context(), error))?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(invalid(format!("{} is too large for {role}", path.display())));
        }
        Ok((bytes, file))
    }

    fn key(&self, path: &Path) -> Result<PrivateKeyDer<'static>> {
        let (bytes, file) = self.read(path, "the server's private key")?;
        let mode = file.metadata().map_or(0, |found| found.mode());
        if mode & MODE_OTHERS != 0 {
            let path = path.display();
            tracing::warn!("every user of this machine can read the key in {path}: chmod 600 it");
        }
        PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| {
            let is_encrypted = bytes.windows(9).any(|window| window == b"ENCRYPTED");
            let why = match is_encrypted {
                true => "it has a passphrase, which nobody can type here: store it without one",
                false => "a PEM file that begins with BEGIN PRIVATE KEY is expected",
            };
            invalid(format!(
                "{} holds no private key that can be used ({error}): {why}",
                path.display()
            ))
        })
    }

    /// The CAs that vouch for clients.
    fn issuers(&self, path: &Path, provider: &CryptoProvider) -> Result<RootCertStore> {
        let role = "the CA of the clients' certificates";
        let certificates = self.certificates(path.to_owned(), role)?;
        let mut roots = RootCertStore::empty();
        let mut expired = None;
        for certificate in certificates.list {
            // Verification takes the CA as it is, whatever its dates: they are looked at here.
            if let Err(error @ Unfit::Date(_)) = fitness(&certificate, &[], &roots, provider, now())
            {
                tracing::warn!("ignoring a CA in {}: its certificate {error}", path.display());
                expired = Some(error);
                continue;
            }
            roots.add(certificate).map_err(|error| {
                invalid(format!(
                    "{} holds a certificate that cannot be used: {error}",
                    path.display()
                ))
            })?;
        }
        match expired {
            Some(error) if roots.is_empty() => {
                Err(invalid(format!("{} {error}; no client can be verified by it", path.display())))
            }
            _ => Ok(roots),
        }
    }

    fn verifier(
        &self,
        roots: RootCertStore,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Arc<dyn ClientCertVerifier>> {
        let path = self.source.directory.join(CA_CRL);
        let revoked = match path.symlink_metadata() {
            Ok(_) => {
                let (bytes, _) = self.read(&path, "the list of revoked certificates")?;
                let lists: Vec<_> = CertificateRevocationListDer::pem_slice_iter(&bytes)
                    .collect::<std::result::Result<_, _>>()
                    .map_err(|error| {
                        invalid(format!("{} is not a PEM file: {error}", path.display()))
                    })?;
                // Nobody puts a file there that is meant to revoke nothing.
                if lists.is_empty() {
                    let what = "a PEM file that begins with BEGIN X509 CRL is expected";
                    return Err(invalid(format!("{} holds no list: {what}", path.display())));
                }
                lists
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                return Err(Error::from_io(format!("checking {}", path.display()), error));
            }
        };
        let builder =
            WebPkiClientVerifier::builder_with_provider(roots.into(), Arc::clone(provider));
        // As in GnuTLS: a CA whose list is out of date admits no clients, one without a list all.
        builder
            .with_crls(revoked)
            .allow_unknown_revocation_status()
            .enforce_revocation_expiration()
            .build()
            .map_err(|error| invalid(format!("{CA_CERT} and {CA_CRL} cannot be used: {error}")))
    }

    fn certificates(&self, path: PathBuf, role: &str) -> Result<Certificates> {
        let (bytes, _) = self.read(&path, role)?;
        let list = CertificateDer::pem_slice_iter(&bytes)
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(|error| invalid(format!("{} is not a PEM file: {error}", path.display())))?;
        if list.is_empty() {
            let what = "a PEM file that begins with BEGIN CERTIFICATE is expected";
            return Err(invalid(format!("{} holds no certificate: {what}", path.display())));
        }
        Ok(Certificates { path, list })
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

/// The names of all files in a directory.
pub const CERTIFICATE_FILES: [&str; 4] = [SERVER_CERT, SERVER_KEY, CA_CERT, CA_CRL];
const SERVER_CERT: &str = "server-cert.pem";
const SERVER_KEY: &str = "server-key.pem";
const CA_CERT: &str = "ca-cert.pem";
const CA_CRL: &str = "ca-crl.pem";
/// Largest of these files that is read.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// A certificate that expires within this is warned of.
const EXPIRY_WARNING: Duration = Duration::from_secs(14 * 24 * 3600);
const MODE_OTHERS: u32 = 0o007;

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::Invalid, what)
}

/// The certificates in one file.
struct Certificates {
    path: PathBuf,
    list: Vec<CertificateDer<'static>>,
}

impl Certificates {
    /// Finds out whether clients will take the first of them for a server's.
    fn check(&self, roots: &RootCertStore, clients: Clients, with: &CryptoProvider) -> Result<()> {
        let path = self.path.display();
        let (first, between) = self.list.split_first().expect("at least one");
        let fitness = |at| fitness(first, between, roots, with, at);
        match fitness(now()) {
            Ok(()) => {}
            Err(error @ (Unfit::Date(_) | Unfit::Purpose)) => {
                return Err(invalid(format!("the certificate in {path} {error}")));
            }
            // Its issuer is unknown here if no CA is given.
            Err(Unfit::Issuer) if clients == Clients::Any => {}
            Err(error) => tracing::warn!("the certificate in {path} {error}"),
        }
        let later = UnixTime::since_unix_epoch(
            Duration::from_secs(now().as_secs()).saturating_add(EXPIRY_WARNING),
        );
        if let Err(Unfit::Date(_)) = fitness(later) {
            tracing::warn!("the certificate in {path} expires within {}", Days(EXPIRY_WARNING));
        }
        Ok(())
    }
}

fn now() -> UnixTime {
    UnixTime::now()
}

/// What is wrong with a certificate.
enum Unfit {
    Date(Date),
    Purpose,
    Issuer,
    Other(rustls::Error),
}

enum Date {
    Expired(Duration),
    NotYet(Duration),
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Date(Date::Expired(ago)) => {
                write!(f, "expired {} ago: get a new one", Days(*ago))
            }
            Self::Date(Date::NotYet(from_now)) => {
                let when = Days(*from_now);
                write!(f, "is valid only in {when}: is the clock of this machine right?")
            }
            Self::Purpose => f.write_str(
                "is not for servers (its extended key usage says so): get one with serverAuth",
            ),
            Self::Issuer => write!(
                f,
                "has no issuer in {CA_CERT}: clients that know no other CA will not connect"
            ),
            Self::Other(error) => write!(f, "may be refused by clients: {error}"),
        }
    }
}

/// A span of time for people.
struct Days(Duration);

impl fmt::Display for Days {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        match (seconds / 86_400, seconds / 3600) {
            (0, 0) => write!(f, "{} minutes", seconds / 60),
            (0, hours) => write!(f, "{hours} hours"),
            (days, _) => write!(f, "{days} days"),
        }
    }
}

/// Judges `certificate` as a client will, at the time `at`, but for its name.
fn fitness(
    certificate: &CertificateDer<'_>,
    between: &[CertificateDer<'_>],
    roots: &RootCertStore,
    provider: &CryptoProvider,
    at: UnixTime,
) -> std::result::Result<(), Unfit> {
    let algorithms = provider.signature_verification_algorithms.all;
    let verified = ParsedCertificate::try_from(certificate).and_then(|parsed| {
        verify_server_cert_signed_by_trust_anchor(&parsed, roots, between, at, algorithms)
    });
    let Err(error) = verified else { return Ok(()) };
    let rustls::Error::InvalidCertificate(why) = &error else { return Err(Unfit::Other(error)) };
    let between = |from: &UnixTime, to: &UnixTime| {
        Duration::from_secs(to.as_secs().saturating_sub(from.as_secs()))
    };
    Err(match why {
        CertificateError::ExpiredContext { time, not_after } => {
            Unfit::Date(Date::Expired(between(not_after, time)))
        }
        CertificateError::NotValidYetContext { time, not_before } => {
            Unfit::Date(Date::NotYet(between(time, not_before)))
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            Unfit::Purpose
        }
        CertificateError::UnknownIssuer => Unfit::Issuer,
        _ => Unfit::Other(error),
    })
}
