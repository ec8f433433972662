//! `mica serve`: a disk over NBD, until SIGTERM or SIGINT.
//!
//! Order: the image is opened, then the socket appears; so whoever can connect is served. At the
//! end the socket goes first, requests in flight are answered, the queues end, and the disk is
//! closed, once, whatever went wrong before. The exit code is 0 if all that was written is in the
//! image.

use crate::args::{DiscardChoice, IndexChoice, ServeArgs};
use crate::failure::Failure;
use crate::stats;
use mica_block::ErrorKind;
use mica_qcow2::{Chain, IndexUse};
use mica_rt::{Backend, Executor};
use mica_serve::nbd::{Export, Limits, Server, ServerConfig};
use mica_serve::{Discard, Listener, Rates, Workers, vhost_user};
use mica_stack::OpenDisk;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Most queues that are started without being asked for.
const QUEUES_DEFAULT_MAX: usize = 8;

pub(crate) fn run(args: ServeArgs) -> Result<ExitCode, Failure> {
    let executor = args.images.executor()?;
    let opened = open(&args, &executor)?;
    let served = serve(&args, &opened);
    let closed = executor.block_on(opened.disk.close()).map_err(|error| {
        let image = args.image.display();
        Failure::from(error.wrap(format!("closing {image}: not all that was written is in it")))
    });
    // Of two failures the one that may have cost data is told.
    closed.and(served)?;
    Ok(ExitCode::SUCCESS)
}

/// Serves until a signal comes. No queue runs any more when it returns.
fn serve(args: &ServeArgs, opened: &OpenDisk) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let listeners = args.nbd.iter().map(|name| listen(name)).collect::<Result<Vec<_>, _>>()?;
    let discard = match args.discard {
        DiscardChoice::Ignore => Discard::Ignore,
        DiscardChoice::Unmap => Discard::Unmap,
    };
    let export = Export {
        disk: Arc::clone(&opened.disk),
        name: args.export_name.clone(),
        description: args.description.clone(),
        discard,
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let queues = args.queues.unwrap_or(processors.min(QUEUES_DEFAULT_MAX));
    let device = match &args.vhost_user {
        Some(path) => {
            let workers = Workers::start(queues, args.images.backend())?;
            Some(vhost_user::Server::start(vhost_user::ServerConfig {
                listener: Listener::unix(path)?,
                disk: Arc::clone(&opened.disk),
                queues: args.num_queues,
                serial: "mica".to_owned(),
                discard,
                rates: Rates::default(),
                workers,
            })?)
        }
        None => None,
    };
    let server = Server::start(ServerConfig {
        listeners,
        exports: vec![export],
        queues,
        backend: args.images.backend(),
        limits: Limits { connections_max: args.shared, ..Limits::default() },
    })?;
    let indexer = match (&opened.chain, args.index) {
        (Some(chain), IndexChoice::Auto) => Some(Indexer::start(Arc::clone(chain))?),
        _ => None,
    };
    let signal = signals.forever().next();
    tracing::info!(?signal, "stopping");
    if let Some(indexer) = indexer {
        indexer.stop();
    }
    let device = device.map(vhost_user::Running::shutdown);
    let counters = server.shutdown();
    if let Some(file) = &args.stats_file {
        let document = stats::document(&*opened.disk, &counters, device.as_ref());
        write_stats(file, &document)?;
    }
    Ok(())
}

fn open(args: &ServeArgs, executor: &Executor) -> Result<OpenDisk, Failure> {
    let index = match args.index {
        IndexChoice::Auto | IndexChoice::Read => IndexUse::Read,
        IndexChoice::Off => IndexUse::Ignore,
    };
    let mut chain = args.images.chain_options(index)?;
    chain.snapshot.clone_from(&args.load_snapshot);
    let images = args.images.image_options()?;
    let format = args.images.format()?;
    let writes = !args.read_only && args.load_snapshot.is_none();
    let opened = executor.block_on(async {
        match writes {
            true => mica_stack::open_writable(&args.image, format, images, &chain).await,
            false => mica_stack::open(&args.image, format, images, &chain).await,
        }
    })?;
    if args.load_snapshot.is_some() && opened.chain.is_none() {
        return Err(Failure::new("--load-snapshot: only a qcow2 image has snapshots"));
    }
    if writes && !opened.disk.is_writable() {
        tracing::warn!("{} is served read-only", args.image.display());
    }
    Ok(opened)
}

fn listen(name: &str) -> Result<Listener, Failure> {
    let Some(address) = name.strip_prefix("tcp:") else {
        return Ok(Listener::unix(Path::new(name))?);
    };
    let address: SocketAddr = address.parse().map_err(|_| {
        Failure::new(format!("--nbd {name}: write a TCP address like tcp:127.0.0.1:10809"))
    })?;
    if !address.ip().is_loopback() {
        let what = format!("--nbd {name}: NBD without TLS is served on the loopback only");
        return Err(Failure::new(what));
    }
    Ok(Listener::tcp(address)?)
}

fn write_stats(file: &Path, document: &serde_json::Value) -> Result<(), Failure> {
    std::fs::write(file, format!("{document}\n"))
        .map_err(|error| Failure::new(format!("writing {}: {error}", file.display())))
}

/// The thread that keeps the sidecars of a chain up to date.
struct Indexer {
    chain: Arc<Chain>,
    stopping: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Indexer {
    fn start(chain: Arc<Chain>) -> Result<Self, Failure> {
        let stopping = Arc::new(AtomicBool::new(false));
        let (indexed, flag) = (Arc::clone(&chain), Arc::clone(&stopping));
        let thread =
            std::thread::Builder::new().name("mica-index".to_owned()).spawn(move || {
                // Large reads in a row, one at a time: plain threads serve that as well as a ring
                // does, and leave the guests' rings alone.
                match Executor::new(Backend::Pool) {
                    Ok(executor) => executor.block_on(keep_index(&indexed, &flag)),
                    Err(error) => tracing::warn!(%error, "no index is written"),
                }
            })?;
        Ok(Self { chain, stopping, thread })
    }

    /// Stops after the layer that is being written.
    fn stop(self) {
        self.stopping.store(true, Ordering::Release);
        self.chain.call_for_index();
        if self.thread.join().is_err() {
            tracing::warn!("the index thread failed");
        }
    }
}

async fn keep_index(chain: &Chain, stopping: &AtomicBool) {
    let is_stopping = || stopping.load(Ordering::Acquire);
    while !is_stopping() {
        let mut go_on = |_| match is_stopping() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        match chain.build_index(&mut go_on).await {
            Ok(0) => {}
            Ok(built) => tracing::info!(built, "the index is written"),
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                tracing::warn!(%error, "the index is not complete");
            }
            Err(error) => {
                tracing::warn!(
                    "the index is not written, so that the chain is walked at each start: \
                     {error:?}; --index-dir names another place for it"
                );
                return;
            }
        }
        // A damaged sidecar calls, or the end.
        chain.index_called_for().await;
    }
}
