//! A small public key infrastructure, created for each test, and a client that uses it.

use super::{CertificateSource, Clients, Tls};
use mica_block::{Error, ErrorKind, Result};
use mica_rt::{Buf, Stream};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams,
    SerialNumber, date_time_ymd,
};
use rustls::crypto::ring;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, SupportedProtocolVersion};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

/// What certificates are made with.
pub(crate) type Parameters = CertificateParams;

/// A CA, and the directory of a server that it vouches for.
pub(crate) struct Pki {
    directory: TempDir,
    ca: CertifiedIssuer<'static, KeyPair>,
}

/// The identity of a client.
pub(crate) struct Identity {
    certificate: rcgen::Certificate,
    key: KeyPair,
}

impl Pki {
    pub(crate) fn new() -> Self {
        let mut parameters = CertificateParams::new([]).expect("no names");
        parameters.distinguished_name.push(DnType::CommonName, "a CA of a test");
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect("a key");
        let ca = CertifiedIssuer::self_signed(parameters, key).expect("a CA");
        let made = Self { directory: tempfile::tempdir().expect("a directory"), ca };
        made.write("ca-cert.pem", &made.ca.pem());
        made.certify_server(|_| {});
        made
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn write(&self, name: &str, content: &str) {
        let path = self.path().join(name);
        std::fs::write(&path, content).expect("written");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).expect("ours");
    }

    /// Makes the server's certificate and key, as `change` has it.
    pub(crate) fn certify_server(&self, change: impl FnOnce(&mut Parameters)) {
        let purpose = ExtendedKeyUsagePurpose::ServerAuth;
        let Identity { certificate, key } = self.certify("server.test", purpose, change);
        self.write("server-cert.pem", &certificate.pem());
        self.write("server-key.pem", &key.serialize_pem());
    }

    pub(crate) fn client(&self, change: impl FnOnce(&mut Parameters)) -> Identity {
        self.certify("client.test", ExtendedKeyUsagePurpose::ClientAuth, change)
    }

    fn certify(
        &self,
        name: &str,
        purpose: ExtendedKeyUsagePurpose,
        change: impl FnOnce(&mut Parameters),
    ) -> Identity {
        let mut parameters = CertificateParams::new([name.to_owned()]).expect("a name");
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.extended_key_usages = vec![purpose];
        parameters.serial_number = Some(SerialNumber::from(4711));
        change(&mut parameters);
        let key = KeyPair::generate().expect("a key");
        Identity { certificate: parameters.signed_by(&key, &self.ca).expect("signed"), key }
    }

    /// Revokes every certificate of this CA, in a list that is good until `year`.
    pub(crate) fn revoke(&self, year: i32) {
        let revoked = RevokedCertParams {
            serial_number: SerialNumber::from(4711),
            revocation_time: date_time_ymd(2020, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2020, 1, 1),
            next_update: date_time_ymd(year, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: vec![revoked],
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&self.ca).expect("signed");
        self.write("ca-crl.pem", &list.pem().expect("a list"));
    }

    pub(crate) fn tls(&self, clients: Clients) -> Tls {
        self.load(clients).expect("good certificates")
    }

    pub(crate) fn load(&self, clients: Clients) -> Result<Tls> {
        Tls::load(CertificateSource { directory: self.path().to_owned(), clients }, &open)
    }

    /// A client that trusts this CA and presents a certificate.
    pub(crate) fn connect(
        &self,
        identity: Option<&Identity>,
        version: &'static SupportedProtocolVersion,
    ) -> Box<ClientConnection> {
        let mut roots = RootCertStore::empty();
        roots.add(self.ca.der().clone()).expect("a CA");
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[version])
            .expect("a version")
            .with_root_certificates(roots);
        let config = match identity {
            None => builder.with_no_client_auth(),
            Some(Identity { certificate, key }) => {
                let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
                let chain = vec![certificate.der().clone()];
                builder.with_client_auth_cert(chain, key).expect("they fit")
            }
        };
        let name = ServerName::try_from("server.test").expect("a name");
        Box::new(ClientConnection::new(Arc::new(config), name).expect("a client"))
    }
}

/// Sends what `connection` has to say.
pub(crate) async fn flush(connection: &mut ClientConnection, stream: &Stream) -> io::Result<()> {
    let mut records = Vec::new();
    while connection.wants_write() {
        connection.write_tls(&mut records)?;
    }
    stream.send(VecDeque::from([Buf::from_slice(&records)])).await
}

/// Sends `bytes` over `connection`.
pub(crate) async fn send(
    connection: &mut ClientConnection,
    stream: &Stream,
    mut bytes: &[u8],
) -> io::Result<()> {
    while !bytes.is_empty() {
        let count = connection.writer().write(bytes)?;
        bytes = &bytes[count..];
        flush(connection, stream).await?;
    }
    Ok(())
}

/// Receives once; returns the plain bytes, and whether the connection continues.
pub(crate) async fn receive(
    connection: &mut ClientConnection,
    stream: &Stream,
) -> io::Result<Vec<u8>> {
    if connection.process_new_packets().is_ok_and(|state| state.peer_has_closed()) {
        return Err(io::ErrorKind::ConnectionAborted.into());
    }
    let (result, buf) = stream.recv(Buf::new(64 << 10)).await;
    let mut records = &buf[..result?];
    if records.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut plain = Vec::new();
    while !records.is_empty() {
        connection.read_tls(&mut records)?;
        let outcome = connection.process_new_packets().map_err(io::Error::other);
        flush(connection, stream).await?;
        let state = outcome?;
        let mut part = vec![0; state.plaintext_bytes_to_read()];
        connection.reader().read_exact(&mut part)?;
        plain.extend(part);
        if state.peer_has_closed() && plain.is_empty() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
    }
    Ok(plain)
}

/// Carries out the handshake of the client.
pub(crate) async fn shake_hands(
    connection: &mut ClientConnection,
    stream: &Stream,
) -> io::Result<()> {
    flush(connection, stream).await?;
    while connection.is_handshaking() {
        let plain = receive(connection, stream).await?;
        assert!(plain.is_empty(), "the server speaks when it is asked");
    }
    flush(connection, stream).await
}

fn open(path: &Path) -> Result<OwnedFd> {
    let failed = |error| Error::from_io("opening it", error);
    match path.metadata().map_err(failed)?.is_file() {
        true => File::open(path).map(OwnedFd::from).map_err(failed),
        false => Err(Error::new(ErrorKind::Invalid, "it is not a file")),
    }
}
