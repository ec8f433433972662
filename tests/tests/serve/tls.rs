//! NBD over TLS: other projects' clients get in with certificates, and no client without.

use mica_tests::server::Server;
use mica_tests::{clock, command, mica, nbd, qemu, tools};
use std::fs;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const TOOLS: [tools::Tool; 6] = [
    tools::QEMU_IMG,
    tools::QEMU_IO,
    tools::NBDINFO,
    tools::NBDCOPY,
    tools::QEMU_STORAGE_DAEMON,
    tools::OPENSSL,
];

#[track_caller]
fn openssl(dir: &Path, args: &[&str]) {
    let mut command = Command::new("openssl");
    command.current_dir(dir).args(args);
    command::finish(&mut command).ok();
}

/// A CA in `dir`, with folders for a server and a client that it certifies.
pub(crate) fn certify(dir: &Path) {
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
    let ca = ["req", "-x509", "-days", "30", "-subj", "/CN=a test", "-keyout", "ca-key.pem"];
    openssl(dir, &[&ca[..], &key, &["-out", "ca-cert.pem"]].concat());
    for (role, usage) in [("server", "serverAuth"), ("client", "clientAuth")] {
        let folder = dir.join(role);
        fs::create_dir(&folder).expect("a folder");
        let extensions = format!(
            "basicConstraints=critical,CA:FALSE\nextendedKeyUsage={usage}\n\
             keyUsage=critical,digitalSignature,keyEncipherment\n\
             subjectAltName=DNS:localhost,IP:127.0.0.1\n"
        );
        fs::write(folder.join("extensions"), extensions).expect("written");
        fs::copy(dir.join("ca-cert.pem"), folder.join("ca-cert.pem")).expect("copied");
        let subject = format!("/CN={role}");
        let key_file = format!("{role}-key.pem");
        let request = ["req", "-new", "-subj", &subject, "-keyout", &key_file, "-out", "request"];
        openssl(&folder, &[&request[..], &key].concat());
        let certificate = format!("{role}-cert.pem");
        let sign = ["x509", "-req", "-days", "30", "-in", "request", "-out", &certificate];
        let by = ["-CA", "../ca-cert.pem", "-CAkey", "../ca-key.pem", "-CAcreateserial"];
        openssl(&folder, &[&sign[..], &by, &["-extfile", "extensions"]].concat());
    }
}

/// A disk behind TLS on its own port.
struct Served {
    dir: TempDir,
    server: Server,
    port: u16,
}

fn free_port() -> u16 {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    free.local_addr().expect("an address").port()
}

impl Served {
    fn start(more: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        certify(dir.path());
        qemu::create(dir.path(), "disk.qcow2", &[], "24M");
        qemu::io(dir.path(), &[], "disk.qcow2", &["write -P 1 1M 3M", "write -P 2 16M 1M"]);
        qemu::flatten(dir.path(), "disk.qcow2", "flat.raw");
        let port = free_port();
        let (address, certificates) = (format!("tcp:127.0.0.1:{port}"), dir.path().join("server"));
        let certificates = certificates.display().to_string();
        let secured = ["--nbd", &address, "--tls-certificates", &certificates];
        let image = dir.path().join("disk.qcow2");
        let server = Server::mica_writable(&image, "qcow2", &[&secured[..], more].concat());
        Self { server: server.expect("served"), dir, port }
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// As libnbd's programs take it, with the certificates in folder `name`.
    fn uri(&self, name: &str) -> String {
        let folder = self.folder(name);
        format!("nbds://127.0.0.1:{}/?tls-certificates={}", self.port, folder.display())
    }

    /// The options of QEMU's programs, with the certificates in folder `name`.
    fn qemu_options(&self, name: &str) -> [String; 3] {
        let folder = self.folder(name);
        [
            "--object".to_owned(),
            format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", folder.display()),
            format!(
                "driver=nbd,server.type=inet,server.host=127.0.0.1,server.port={},tls-creds=tls0",
                self.port
            ),
        ]
    }

    /// Earlier clients did no harm.
    #[track_caller]
    fn end(self) {
        self.server.connect(&nbd::Wish::default()).expect("it serves");
        let stopped = self.server.stop().expect("it stops");
        assert!(stopped.status.success(), "{stopped:?}");
        assert!(!stopped.log.contains("panicked"), "{stopped:?}");
    }
}

#[test]
fn other_clients_read_and_write_over_tls() {
    if !tools::present(&TOOLS) {
        return;
    }
    let served = Served::start(&[]);
    let said = command::run("nbdinfo", ["--json", &served.uri("client")]).json();
    assert_eq!(said["TLS"], true, "{said}");
    assert_eq!(said["exports"][0]["export-size"], 24 << 20, "{said}");
    let copied = served.folder("copied.raw").display().to_string();
    command::run("nbdcopy", [&served.uri("client"), &copied]).ok();
    let flat = fs::read(served.folder("flat.raw")).expect("flat");
    assert!(fs::read(&copied).expect("a copy") == flat);

    let [object, credentials, options] = served.qemu_options("client");
    let info = ["info", "--output=json", &object, &credentials, "--image-opts", &options];
    let said = command::run("qemu-img", info).json();
    assert_eq!(said["virtual-size"], 24 << 20, "{said}");
    let changes = ["-c", "write -P 7 5M 2M", "-c", "flush", "-c", "read -P 7 5M 2M"];
    let open = [&object, &credentials, "--image-opts", options.as_str()];
    command::run("qemu-io", open.iter().copied().chain(changes)).ok();
    command::run("nbdcopy", [&served.uri("client"), &copied]).ok();
    let copy = fs::read(&copied).expect("a copy");
    assert!(copy[5 << 20..7 << 20].iter().all(|byte| *byte == 7));
    assert!(copy[..5 << 20] == flat[..5 << 20] && copy[7 << 20..] == flat[7 << 20..]);
    served.end();
}

#[test]
fn nobody_gets_in_without_tls_or_a_certificate_of_the_right_ca() {
    if !tools::present(&TOOLS) {
        return;
    }
    let served = Served::start(&[]);
    let plain = command::run("nbdinfo", [format!("nbd://127.0.0.1:{}", served.port)]);
    assert_ne!(plain.code(), Some(0), "{plain}");
    let plain = command::run("nbdinfo", ["--list", &format!("nbd://127.0.0.1:{}", served.port)]);
    assert_ne!(plain.code(), Some(0), "{plain}");
    // No certificate, and one from another CA.
    fs::create_dir(served.folder("nobody")).expect("a folder");
    fs::copy(served.folder("ca-cert.pem"), served.folder("nobody/ca-cert.pem")).expect("copied");
    let other = tempfile::tempdir().expect("a folder");
    certify(other.path());
    fs::create_dir(served.folder("stranger")).expect("a folder");
    fs::copy(served.folder("ca-cert.pem"), served.folder("stranger/ca-cert.pem")).expect("copied");
    for name in ["client-cert.pem", "client-key.pem"] {
        let to = served.folder("stranger").join(name);
        fs::copy(other.path().join("client").join(name), to).expect("copied");
    }
    for name in ["nobody", "stranger"] {
        let said = command::run("nbdinfo", ["--list", &served.uri(name)]);
        assert_ne!(said.code(), Some(0), "{name}: {said}");
        let [object, credentials, options] = served.qemu_options(name);
        let said =
            command::run("qemu-img", ["info", &object, &credentials, "--image-opts", &options]);
        assert_ne!(said.code(), Some(0), "{name}: {said}");
    }
    served.end();

    let served = Served::start(&["--tls-verify-peer=off"]);
    fs::create_dir(served.folder("nobody")).expect("a folder");
    fs::copy(served.folder("ca-cert.pem"), served.folder("nobody/ca-cert.pem")).expect("copied");
    command::run("nbdinfo", [&served.uri("nobody")]).ok();
    served.end();
    let served = Served::start(&["--tls", "on"]);
    command::run("nbdinfo", [format!("nbd://127.0.0.1:{}", served.port)]).ok();
    command::run("nbdinfo", [&served.uri("client")]).ok();
    served.end();
}

#[test]
fn mica_reads_over_tls_what_it_trusts() {
    if !tools::present(&TOOLS) || !tools::present(&[tools::QEMU_NBD]) {
        return;
    }
    let served = Served::start(&[]);
    let copied = served.folder("copied.raw").display().to_string();
    let convert = |uri: &str| mica::run(["convert", "-q", "-O", "raw", uri, &copied]);
    let flat = fs::read(served.folder("flat.raw")).expect("flat");
    convert(&served.uri("client")).ok();
    assert!(fs::read(&copied).expect("a copy") == flat);

    // Another name, another CA, no certificate of its own, no TLS.
    let other = tempfile::tempdir().expect("a folder");
    certify(other.path());
    let stranger = other.path().join("client").display().to_string();
    let nobody = served.folder("nobody");
    fs::create_dir(&nobody).expect("a folder");
    fs::copy(served.folder("ca-cert.pem"), nobody.join("ca-cert.pem")).expect("copied");
    let plain = format!("nbd://127.0.0.1:{}", served.port);
    for (uri, why) in [
        (format!("{}&tls-hostname=elsewhere", served.uri("client")), "not valid for name"),
        (format!("nbds://127.0.0.1:{}/?tls-certificates={stranger}", served.port), "invalid peer"),
        (served.uri("nobody"), "server"),
        (plain, "write nbds://"),
    ] {
        let said = mica::run(["info", &uri]).refusal();
        assert!(said.contains(why), "{uri}: {said}");
    }
    served.server.stop().expect("it stops");

    let socket = served.dir.path().join("socket");
    let object = format!("tls-creds-x509,id=t,endpoint=server,dir={}", served.dir.path().display());
    for name in ["server-cert.pem", "server-key.pem"] {
        fs::copy(served.dir.path().join("server").join(name), served.dir.path().join(name))
            .expect("copied");
    }
    let mut qemu = Command::new("qemu-nbd");
    qemu.args(["--object", &object, "--tls-creds", "t", "-r", "-t", "-f", "raw", "-k"]);
    qemu.arg(&socket).arg(served.dir.path().join("flat.raw"));
    let qemu = Killed(qemu.spawn().expect("started"));
    let there = || socket.exists().then_some(());
    clock::poll(Duration::from_secs(60), Duration::from_millis(5), there).expect("it serves");
    let certificates = served.dir.path().join("client");
    let uri = format!(
        "nbds+unix:///?socket={}&tls-certificates={}",
        socket.display(),
        certificates.display()
    );
    let said = mica::run(["compare", &uri, &copied, "-F", "raw"]);
    said.ok();
    drop(qemu);
}

/// A process that ends with the test.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts TLS at the server for a client that connects here and then talks to the server.
fn starting_tls(port: u16) -> io::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let own = listener.local_addr()?.port();
    std::thread::spawn(move || -> io::Result<()> {
        let (client, _) = listener.accept()?;
        let mut server = TcpStream::connect(("127.0.0.1", port))?;
        server.read_exact(&mut [0; 18])?;
        server.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0")?;
        server.read_exact(&mut [0; 20])?;
        let (mut from, mut to) = (client.try_clone()?, server.try_clone()?);
        let there = std::thread::spawn(move || {
            let _ = io::copy(&mut from, &mut to);
            let _ = to.shutdown(std::net::Shutdown::Write);
        });
        let (mut from, mut to) = (server, client);
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(std::net::Shutdown::Both);
        let _ = there.join();
        Ok(())
    });
    Ok(own)
}

#[test]
fn client_that_wants_to_renegotiate_gets_nowhere() {
    if !tools::present(&TOOLS) {
        return;
    }
    let served = Served::start(&[]);
    let port = starting_tls(served.port).expect("a port");
    let mut openssl = Command::new("openssl");
    openssl.current_dir(served.folder("client"));
    openssl.args(["s_client", "-connect", &format!("127.0.0.1:{port}"), "-tls1_2"]);
    openssl.args(["-cert", "client-cert.pem", "-key", "client-key.pem", "-CAfile", "ca-cert.pem"]);
    let log = served.folder("client").join("openssl.log");
    let said = fs::File::create(&log).expect("made");
    openssl.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(said);
    let mut child = openssl.spawn().expect("openssl");
    let mut input = child.stdin.take().expect("piped");
    // A line that begins with R renegotiates; it is looked at when the handshake is over.
    input.write_all(b"R\n").expect("it runs");
    let said = || fs::read_to_string(&log).unwrap_or_default();
    let wishes = || said().contains("RENEGOTIATING").then_some(());
    let asked = clock::poll(Duration::from_secs(60), Duration::from_millis(10), wishes);
    assert!(asked.is_some(), "it does not ask: {}", said());
    // It would wait for an answer until the server's deadline for the handshake, and the absence of
    // an answer cannot be awaited.
    clock::sleep(Duration::from_secs(1));
    child.kill().expect("ours");
    child.wait().expect("it ends");
    let said = said();
    assert!(said.contains("verify return:1") && said.contains("RENEGOTIATING"), "{said}");
    assert_eq!(said.matches("verify return:1").count(), 2, "no second handshake: {said}");
    served.end();
}

#[test]
fn what_cannot_be_secured_is_refused_in_one_line() {
    if !tools::present(&TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    certify(dir.path());
    qemu::create(dir.path(), "disk.qcow2", &[], "8M");
    let image = dir.path().join("disk.qcow2").display().to_string();
    let refusal = |options: &[&str]| {
        let serve = ["serve", "-r", "--redo-dir", "off"];
        let said = mica::run(serve.iter().chain(options).chain(&[image.as_str()]));
        said.refusal()
    };
    let server = dir.path().join("server").display().to_string();
    let client = dir.path().join("client").display().to_string();
    let anywhere = "tcp:0.0.0.0:0";
    let said = refusal(&["--nbd", anywhere]);
    assert!(said.contains("--tls-certificates") && said.contains("--allow-plain-tcp"), "{said}");
    // Where plain text is possible, a man in the middle can enforce it.
    let said = refusal(&["--nbd", anywhere, "--tls", "on", "--tls-certificates", &server]);
    assert!(said.contains("--allow-plain-tcp"), "{said}");
    let local = "tcp:127.0.0.1:0";
    let said = refusal(&["--nbd", local, "--tls", "require"]);
    assert!(said.contains("--tls-certificates"), "{said}");
    let said = refusal(&["--nbd", local, "--tls-certificates", &client]);
    assert!(said.contains("server-cert.pem"), "{said}");
    fs::copy(dir.path().join("client/client-key.pem"), dir.path().join("server/server-key.pem"))
        .expect("copied");
    let said = refusal(&["--nbd", local, "--tls-certificates", &server]);
    assert!(said.contains("does not belong to the certificate"), "{said}");
}
