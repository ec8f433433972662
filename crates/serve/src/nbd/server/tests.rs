use super::*;
use crate::discard::Discard;
use crate::listener::Listener;
use crate::nbd::address::Address;
use crate::nbd::exports::Exports;
use crate::nbd::protocol::command;
use crate::nbd::testing::{PatternDisk, info_data, option_header, request};
use mica_block::ErrorKind;
use mica_rt::Backend;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

const LEN: u64 = 64 << 20;

/// A server on a socket of its own, for each backend.
struct Served {
    running: Running,
    addresses: Vec<Address>,
    path: PathBuf,
    tcp: SocketAddr,
    _directory: TempDir,
}

fn served(backend: Backend, limits: Limits) -> Served {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let unix = Listener::unix(&path).expect("a socket");
    let tcp = Listener::tcp("127.0.0.1:0".parse().expect("an address")).expect("a port");
    let address = tcp.tcp_address().expect("an address");
    let export = Export {
        disk: Arc::new(PatternDisk::data(LEN)),
        name: "disk".to_owned(),
        description: String::new(),
        discard: Discard::default(),
        edges: Arc::default(),
        contexts: Vec::new(),
    };
    let workers = Workers::start(2, backend).expect("executors");
    let exports = Arc::<Exports>::default();
    let seat = Arc::new(exports.join("disk").expect("the first"));
    let open = |listener| Address::open(listener, &exports, &workers, &limits).expect("an address");
    let addresses = vec![open(unix), open(tcp)];
    let config = ServerConfig { seats: vec![seat], export, workers, limits };
    let running = Server::start(config).expect("a server");
    Served { running, addresses, path, tcp: address, _directory: directory }
}

/// Runs `test` with each backend that the system has.
fn with_backends(limits: Limits, test: impl Fn(Served)) {
    for backend in [Backend::Auto, Backend::Pool] {
        test(served(backend, limits));
    }
}

trait Connection: Read + Write {}

impl Connection for UnixStream {}
impl Connection for TcpStream {}

impl Served {
    fn unix(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.path).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
        stream.set_write_timeout(Some(Duration::from_secs(60))).expect("a socket");
        stream
    }

    fn tcp(&self) -> TcpStream {
        TcpStream::connect(self.tcp).expect("it listens")
    }

    /// A client in the transmission phase, with simple replies.
    fn session(&self) -> UnixStream {
        let mut client = self.unix();
        negotiate(&mut client);
        client
    }
}

fn negotiate(client: &mut dyn Connection) {
    go(client);
    client.read_exact(&mut [0; 20 + 12 + 20]).expect("replies");
}

/// Asks for the disk.
fn go(client: &mut dyn Connection) {
    let mut greeting = [0; 18];
    client.read_exact(&mut greeting).expect("a greeting");
    let data = info_data(b"disk", &[]);
    let mut bytes = vec![0, 0, 0, 3];
    bytes.extend(option_header(7, u32::try_from(data.len()).expect("short")));
    bytes.extend(data);
    client.write_all(&bytes).expect("connected");
}

fn read(client: &mut dyn Connection, at: u64, len: u32) -> Vec<u8> {
    client.write_all(&request(0, command::READ, at, at, len)).expect("connected");
    let mut reply = vec![0; 16 + len as usize];
    client.read_exact(&mut reply).expect("a reply");
    assert_eq!(reply[4..8], [0; 4]);
    assert_eq!(reply[8..16], at.to_be_bytes());
    reply.split_off(16)
}

/// Whether the server closes the connection; whatever it says before is passed over.
fn is_closed(client: &mut UnixStream) -> bool {
    let mut rest = Vec::new();
    match client.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn disk_is_read_over_both_kinds_of_socket() {
    with_backends(Limits::default(), |served| {
        let disk = PatternDisk::data(LEN);
        let (mut unix, mut tcp) = (served.session(), served.tcp());
        negotiate(&mut tcp);
        for (at, len) in [(0, 512), (1, 1), (4095, 70_000), (0, 32 << 20), (LEN - 100, 100)] {
            let expected = disk.content(at..at + u64::from(len));
            assert!(read(&mut unix, at, len) == expected, "{len} bytes at {at}");
            assert!(read(&mut tcp, at, len) == expected, "{len} bytes at {at}");
        }
        let counters = served.running.shutdown();
        assert_eq!((counters.connections, counters.sessions, counters.reads), (2, 2, 10));
    });
}

#[test]
fn clients_on_all_queues_at_once_get_their_own_bytes() {
    with_backends(Limits::default(), |served| {
        let disk = PatternDisk::data(LEN);
        std::thread::scope(|scope| {
            for client in 0..8_u64 {
                let (served, disk) = (&served, &disk);
                scope.spawn(move || {
                    let mut stream = served.session();
                    for round in 0..100 {
                        let at = (client * 1000 + round) * 997;
                        assert!(read(&mut stream, at, 5000) == disk.content(at..at + 5000));
                    }
                });
            }
        });
        assert_eq!(served.running.counters().reads, 800);
    });
}

#[test]
fn shutdown_ends_open_half_open_and_silent_connections() {
    // CVE-2024-7409.
    with_backends(Limits::default(), |served| {
        let mut silent = served.unix();
        let mut greeted = served.unix();
        greeted.write_all(&[0, 0, 0, 3]).expect("connected");
        let mut idle = served.session();
        let mut partial = served.session();
        partial.write_all(&request(0, command::READ, 0, 0, 512)[..9]).expect("connected");
        let path = served.path.clone();

        drop(served.addresses);
        served.running.shutdown();

        for client in [&mut silent, &mut greeted, &mut idle, &mut partial] {
            assert!(is_closed(client));
        }
        assert!(!path.exists());
    });
}

#[test]
fn clients_beyond_the_cap_are_refused_and_those_within_are_served() {
    with_backends(Limits { connections_max: 3, ..Limits::default() }, |served| {
        let mut within: Vec<UnixStream> = (0..3).map(|_| served.session()).collect();
        for _ in 0..20 {
            let mut beyond = served.unix();
            go(&mut beyond);
            let mut reply = [0; 20];
            beyond.read_exact(&mut reply).expect("a reply");
            assert_eq!(reply[12..16], (1_u32 << 31 | 2).to_be_bytes(), "NBD_REP_ERR_POLICY");
        }
        for client in &mut within {
            assert_eq!(read(client, 0, 512).len(), 512);
        }
        assert_eq!(served.running.counters().connections_refused, 20);
        within.clear();
        while served.running.connections_open() > 0 {
            std::thread::yield_now();
        }
        served.session();
    });
}

#[test]
fn client_that_sends_3000_reads_and_takes_no_reply_harms_nobody() {
    with_backends(Limits::default(), |served| {
        for _ in 0..3 {
            let client = served.session();
            client.set_nonblocking(true).expect("a socket");
            let bytes: Vec<u8> =
                (0..3000).flat_map(|at| request(0, command::READ, at, at * 4096, 65536)).collect();
            let _ = (&client).write_all(&bytes);
            drop(client);
        }
        assert_eq!(read(&mut served.session(), 0, 512).len(), 512);
        while served.running.connections_open() > 0 {
            std::thread::yield_now();
        }
    });
}

#[test]
fn deadlines_hold_over_sockets() {
    // Long enough for the handshake of a well-behaved client, on a busy machine.
    let short = Duration::from_secs(1);
    let limits = Limits {
        handshake_deadline: short,
        request_deadline: short,
        send_deadline: short,
        ..Limits::default()
    };
    with_backends(limits, |served| {
        let mut silent = served.unix();
        let mut partial = served.session();
        partial.write_all(&request(0, command::READ, 0, 0, 512)[..9]).expect("connected");
        let mut deaf = served.session();
        for _ in 0..4 {
            deaf.write_all(&request(0, command::READ, 0, 0, 8 << 20)).expect("connected");
        }
        let mut idle = served.session();
        while served.running.counters().deadlines_passed < 3 {
            std::thread::yield_now();
        }
        for client in [&mut silent, &mut partial, &mut deaf] {
            assert!(is_closed(client));
        }
        assert_eq!(read(&mut idle, 0, 512).len(), 512);
    });
}

#[test]
fn configurations_that_make_no_sense_are_refused() {
    let workers = Workers::start(1, Backend::Pool).expect("an executor");
    let long = "n".repeat(4097);
    for (name, description) in [(&*long, ""), ("a", &*long)] {
        let export = Export {
            disk: Arc::new(PatternDisk::data(LEN)),
            name: name.to_owned(),
            description: description.to_owned(),
            discard: Discard::default(),
            edges: Arc::default(),
            contexts: Vec::new(),
        };
        let (seats, workers) = (Vec::new(), Arc::clone(&workers));
        let config = ServerConfig { seats, export, workers, limits: Limits::default() };
        let error = Server::start(config).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}
