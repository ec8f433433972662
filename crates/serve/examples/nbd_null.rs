//! Serves a disk of zeros that pretends to be data, to see what the server itself costs.
//!
//! `nbd_null SOCKET [--size BYTES] [--queues N] [--backend uring|pool] [--holes] [--tcp ADDRESS]
//! [--tls DIRECTORY]`
//!
//! Ends when its standard input does.

use mica_block::{Disk, Error, Extent, ExtentKind, Geometry, IoFuture, Plan, Planned, ready};
use mica_rt::{Backend, Buf};
use mica_serve::nbd::{Address, Discard, Export, Exports, Limits, Server, ServerConfig};
use mica_serve::{CertificateSource, Clients, Listener, Tls, TlsPolicy, Workers};
use mica_units::GuestRange;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

struct Null {
    len: u64,
    kind: ExtentKind,
}

impl Disk for Null {
    fn geometry(&self) -> Geometry {
        Geometry { len: self.len, preferred_bytes: 4096 }
    }

    fn plan(&self, range: GuestRange, mut extents: Vec<Extent>) -> Planned<'_> {
        extents.push(Extent::unplaced(range, self.kind));
        Planned::Ready(Ok(Plan::untracked(extents)))
    }

    fn read(&self, _extent: &Extent, mut buf: Buf) -> IoFuture {
        buf.fill(0);
        ready(Ok(()), buf)
    }
}

fn open(path: &Path) -> Result<OwnedFd, Error> {
    File::open(path).map(OwnedFd::from).map_err(|error| Error::from_io("opening it", error))
}

type AnyError = Box<dyn std::error::Error>;

fn main() -> Result<(), AnyError> {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next().ok_or("which socket?")?;
    let mut listeners = vec![Listener::unix(Path::new(&socket))?];
    let mut null = Null { len: 10 << 30, kind: ExtentKind::Data };
    let (mut queues, mut backend) = (1, Backend::Auto);
    let mut tls = None;
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or("a value is missing");
        match argument.as_str() {
            "--size" => null.len = value()?.parse()?,
            "--queues" => queues = value()?.parse()?,
            "--backend" if value()? == "pool" => backend = Backend::Pool,
            "--backend" => backend = Backend::Uring,
            "--holes" => null.kind = ExtentKind::Hole,
            "--tcp" => listeners.push(Listener::tcp(value()?.parse()?)?),
            "--tls" => {
                let directory = value()?.into();
                let source = CertificateSource { directory, clients: Clients::Verified };
                tls = Some(Tls::load(source, &open)?);
            }
            other => return Err(format!("what is {other}?").into()),
        }
    }
    if let Some(tls) = tls {
        let secured = |listener: Listener| listener.with_tls(&tls, TlsPolicy::Offered);
        listeners = listeners.into_iter().map(secured).collect();
    }
    let export = Export {
        disk: Arc::new(null),
        name: "null".to_owned(),
        description: "zeros without end".to_owned(),
        edges: Arc::default(),
        discard: Discard::default(),
        contexts: Vec::new(),
    };
    let (workers, limits) = (Workers::start(queues, backend)?, Limits::default());
    let exports = Arc::<Exports>::default();
    let open = |listener| Address::open(listener, &exports, &workers, &limits);
    let _addresses = listeners.into_iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let seats = vec![Arc::new(exports.join("null")?)];
    let config = ServerConfig { seats, export, workers: Arc::clone(&workers), limits };
    let running = Server::start(config)?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    println!("{:?}", running.shutdown());
    Ok(())
}
