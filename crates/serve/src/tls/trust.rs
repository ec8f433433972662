//! What a client of a server needs for TLS, in the layout of QEMU's `tls-creds-x509` and of libnbd:
//! `ca-cert.pem` with the CAs that may vouch for the server, and, if the server wants to know its
//! clients, `client-cert.pem` and `client-key.pem`.

use mica_block::{Error, ErrorKind, Result};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CA_CERT: &str = "ca-cert.pem";
const CLIENT_CERT: &str = "client-cert.pem";
const CLIENT_KEY: &str = "client-key.pem";
/// Largest of these files that is read.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// The CA that a client trusts, and the certificate that it presents.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Trust {
    /// The directory with the files.
    pub directory: PathBuf,
    /// The name that the server's certificate has to have.
    pub server: String,
}

impl Trust {
    /// A session that has not begun.
    ///
    /// # Errors
    /// If a file is missing, or is not what its name says; if nothing can be called as the server.
    pub(crate) fn session(&self) -> Result<ClientConnection> {
        let failed = |error: rustls::Error| {
            invalid(format!("the files in {} cannot be used: {error}", self.directory.display()))
        };
        let name = ServerName::try_from(self.server.clone())
            .map_err(|_| invalid(format!("{:?} is not a valid name of a server", self.server)))?;
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(failed)?
            .with_root_certificates(self.roots()?);
        let config = match self.identity()? {
            None => builder.with_no_client_auth(),
            Some((chain, key)) => builder.with_client_auth_cert(chain, key).map_err(failed)?,
        };
        ClientConnection::new(Arc::new(config), name).map_err(failed)
    }

    fn roots(&self) -> Result<RootCertStore> {
        let path = self.directory.join(CA_CERT);
        let Some(bytes) = read(&path)? else {
            let what = format!(
                "there is no {}: it holds the CA of the server, beside {CLIENT_CERT} and \
                 {CLIENT_KEY} if the server wants them",
                path.display()
            );
            return Err(Error::new(ErrorKind::NotFound, what));
        };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&path, &bytes)? {
            roots.add(certificate).map_err(|error| {
                let path = path.display();
                invalid(format!("{path} holds a certificate that cannot be used: {error}"))
            })?;
        }
        Ok(roots)
    }

    /// The certificate of the client, with those between it and its CA, and its key.
    fn identity(&self) -> Result<Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>> {
        let [path, key_path] = [CLIENT_CERT, CLIENT_KEY].map(|name| self.directory.join(name));
        let (chain, key) = match (read(&path)?, read(&key_path)?) {
            (None, None) => return Ok(None),
            (Some(chain), Some(key)) => (chain, key),
            (chain, _) => {
                let (there, missing) = match chain {
                    Some(_) => (path, CLIENT_KEY),
                    None => (key_path, CLIENT_CERT),
                };
                let what = format!("{} has no {missing} beside it", there.display());
                return Err(Error::new(ErrorKind::NotFound, what));
            }
        };
        let key = PrivateKeyDer::from_pem_slice(&key).map_err(|error| {
            let path = key_path.display();
            invalid(format!(
                "{path} holds no private key that can be used ({error}): a PEM file without a \
                 passphrase is expected"
            ))
        })?;
        Ok(Some((certificates(&path, &chain)?, key)))
    }
}

fn certificates(path: &Path, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>> {
    let list = CertificateDer::pem_slice_iter(bytes)
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|error| invalid(format!("{} is not a PEM file: {error}", path.display())))?;
    if list.is_empty() {
        let what = "a PEM file that begins with BEGIN CERTIFICATE is expected";
        return Err(invalid(format!("{} holds no certificate: {what}", path.display())));
    }
    Ok(list)
}

/// The bytes of a file, if there is one.
fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    let failed = |error| Error::from_io(format!("reading {}", path.display()), error);
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    match bytes.len() as u64 > FILE_BYTES_MAX {
        true => Err(invalid(format!("{} is too large for certificates", path.display()))),
        false => Ok(Some(bytes)),
    }
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::Invalid, what)
}
