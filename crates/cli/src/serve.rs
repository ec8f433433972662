//! `mica serve`: disks over NBD and as devices of machines, until SIGTERM or SIGINT.
//!
//! The exit code is 0 if all that was written is in the images.

use crate::failure::Failure;
use crate::fork::{Fork, Waiting};
use crate::images::ImageArgs;
use clap::Args;
use mica_daemon::{
    Config, Daemon, Discards, DiskConfig, IndexMode, LogSwitch, OtherUsers, SandboxMode, Size,
    TlsMode, VerifyPeer, has_inherited_sockets,
};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// What is said of one disk, and has a key of its own in a configuration.
const OF_ONE_DISK: [&str; 34] = [
    "nbd",
    "tls",
    "tls_certificates",
    "tls_verify_peer",
    "allow_plain_tcp",
    "vhost_user",
    "ublk",
    "fuse",
    "allow_other",
    "num_queues",
    "serial",
    "iops",
    "iops_burst",
    "bps",
    "bps_burst",
    "read_only",
    "discard",
    "load_snapshot",
    "export_name",
    "description",
    "shared",
    "index",
    "stats_file",
    "image",
    "format",
    "names",
    "allow_path",
    "cache",
    "force_share",
    "aio",
    "index_cache",
    "index_dir",
    "redo_dir",
    "inject",
];

/// Serve a disk, or many: over NBD, and to virtual machines.
#[derive(Args)]
pub(crate) struct ServeArgs {
    /// Serve what this TOML file says: one table "disk" for each, whose keys are name, image and
    /// the options of this verb. Paths in it start from its folder.
    #[arg(long, conflicts_with_all = OF_ONE_DISK, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Threads that serve, for all disks and clients together. As many as processors by default.
    #[arg(long, value_name = "COUNT")]
    queues: Option<usize>,
    /// Listen on this unix socket for `mica ctl` and `mica top`, of root and of this user alone.
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// Show figures on this TCP address: to Prometheus at /metrics, to people with a browser at /.
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
    /// Let the figures be seen from beyond this machine.
    #[arg(long)]
    metrics_public: bool,
    /// Whether the process gives up, before it reads an image, what serving does not need: files
    /// elsewhere, other programs, the network. On, as far as the kernel knows how; require, or
    /// serve nothing; off.
    #[arg(long, value_enum, value_name = "WHETHER")]
    sandbox: Option<SandboxMode>,
    /// Take over from the server at the --control socket: its sockets, and the disks once it has
    /// closed them. Guests only wait. If this server cannot serve, that one goes on.
    #[arg(long)]
    takeover: bool,
    /// End once the disks are served, or cannot be: the server is another process, in the
    /// background. With --takeover it is what systemd runs to reload.
    #[arg(long)]
    fork: bool,
    #[command(flatten)]
    disk: DiskArgs,
}

// What is said of one disk. (Words for rustdoc would become the verb's help.)
#[derive(Args)]
struct DiskArgs {
    /// Where NBD clients connect: the path of a unix socket, or tcp:ADDRESS:PORT, beyond the
    /// loopback with TLS. Can be given more than once.
    #[arg(long, value_name = "SOCKET")]
    nbd: Vec<String>,
    /// Whether NBD clients use TLS: off; on, if they like; require, over TCP, which is so as soon
    /// as there are certificates. On a unix socket they never have to.
    #[arg(long, value_enum, value_name = "MODE")]
    tls: Option<TlsMode>,
    /// The directory of server-cert.pem and server-key.pem, and, to verify clients, ca-cert.pem and
    /// perhaps ca-crl.pem: the layout of QEMU's tls-creds-x509.
    #[arg(long, value_name = "DIR")]
    tls_certificates: Option<PathBuf>,
    /// Whether NBD clients have to show a certificate that ca-cert.pem vouches for. They do by
    /// default.
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "on", value_name = "WHETHER")]
    tls_verify_peer: Option<VerifyPeer>,
    /// Let plain text leave this machine over TCP: for networks on which everybody may read and
    /// change the disk.
    #[arg(long)]
    allow_plain_tcp: bool,
    /// Where the monitor of a virtual machine connects (QEMU, cloud-hypervisor, Firecracker), to
    /// have the disk as a vhost-user-blk device: the path of a unix socket.
    #[arg(long, value_name = "SOCKET")]
    vhost_user: Option<PathBuf>,
    /// Serve the disk as a block device of this machine. Not in this build.
    #[arg(long)]
    ublk: bool,
    /// Serve the disk as this file too, by FUSE: a raw image for foreign tools and loop mounts. The
    /// file must be there; while mica serves, it is the disk.
    #[arg(long, value_name = "FILE")]
    fuse: Option<PathBuf>,
    /// Whether other users may use that file; auto by default.
    #[arg(long, value_enum, value_name = "WHETHER")]
    allow_other: Option<OtherUsers>,
    /// Virtqueues of the vhost-user-blk device; 4 by default.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    num_queues: Option<u16>,
    /// What the machine is told as the serial number of the device; at most 20 bytes count. The
    /// image's name without its ending by default.
    #[arg(long, value_name = "TEXT")]
    serial: Option<String>,
    /// Most operations per second of the vhost-user-blk device.
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "COUNT")]
    iops: u64,
    /// Operations that may come at once; a tenth of a second's by default.
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "COUNT")]
    iops_burst: u64,
    /// Most bytes per second of the vhost-user-blk device, read and written together.
    #[arg(long, default_value = "0", hide_default_value = true, value_name = "SIZE")]
    bps: Size,
    /// Bytes that may come at once; a tenth of a second's by default.
    #[arg(long, default_value = "0", hide_default_value = true, value_name = "SIZE")]
    bps_burst: Size,
    /// Refuse to write. Without it the image is opened for writing, as by qemu-nbd.
    #[arg(short = 'r', long)]
    read_only: bool,
    /// What becomes of space that clients do not need any more: unmap gives it back, ignore keeps
    /// it.
    #[arg(long, value_enum, default_value = "unmap", value_name = "MODE")]
    discard: Discards,
    /// Serve an internal snapshot of the image, by id or name, instead of its present state. It
    /// cannot be written.
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    load_snapshot: Option<String>,
    /// Name of the NBD export; it is also served under the empty name.
    #[arg(short = 'x', long, value_name = "NAME")]
    export_name: Option<String>,
    /// Text that NBD clients show with the export.
    #[arg(short = 'D', long, value_name = "TEXT")]
    description: Option<String>,
    /// Most NBD clients at one time; 256 by default.
    #[arg(short = 'e', long, value_name = "COUNT")]
    shared: Option<usize>,
    /// Whether sidecars of the chain's index are used, and written in the background.
    #[arg(long, value_enum, default_value = "auto", value_name = "WHETHER")]
    index: IndexMode,
    /// Write figures of this run as JSON to this file at the end.
    #[arg(long, value_name = "FILE")]
    stats_file: Option<PathBuf>,
    #[command(flatten)]
    images: ImageArgs,
    /// The image: for a chain, its active layer.
    #[arg(value_name = "IMAGE", required_unless_present = "config")]
    image: Option<PathBuf>,
}

pub(crate) fn run(args: ServeArgs, log: Arc<dyn LogSwitch>) -> Result<ExitCode, Failure> {
    let fork = match args.fork {
        true => Fork::here()?,
        false => Fork::Server(None),
    };
    let Fork::Server(waiting) = fork else { return Ok(fork.outcome()) };
    let daemon = Daemon::start(config(args)?, log)?;
    waiting.into_iter().for_each(Waiting::end);
    daemon.run()?;
    Ok(ExitCode::SUCCESS)
}

/// What a server has another process of this program do.
pub(crate) fn run_helper() -> Result<ExitCode, Failure> {
    mica_daemon::run_helper()?;
    Ok(ExitCode::SUCCESS)
}

fn config(args: ServeArgs) -> Result<Config, Failure> {
    let mut config = match (&args.config, args.disk.image.clone()) {
        (Some(file), _) => Config::read(file)?,
        (None, Some(image)) => args.disk.alone(image)?,
        (None, None) => return Err(Failure::new("nothing to serve: name an image, or --config")),
    };
    config.queues = args.queues.or(config.queues);
    config.control = args.control.or(config.control);
    config.metrics = args.metrics.or(config.metrics);
    config.metrics_public |= args.metrics_public;
    config.takeover = args.takeover;
    // This very program, also where another has its name by now.
    config.helper = Some(PathBuf::from("/proc/self/exe"));
    config.sandbox = args.sandbox.unwrap_or(config.sandbox);
    Ok(config)
}

impl DiskArgs {
    /// A configuration of this disk alone.
    fn alone(self, image: PathBuf) -> Result<Config, Failure> {
        let is_placed = !self.nbd.is_empty()
            || self.vhost_user.is_some()
            || self.fuse.is_some()
            || self.ublk
            || has_inherited_sockets();
        if !is_placed {
            return Err(Failure::new(
                "nothing says where the disk is served: add --nbd SOCKET, --vhost-user SOCKET or \
                 --fuse FILE",
            )
            .with_code(2));
        }
        let images = self.images.config();
        let disk = DiskConfig {
            nbd: self.nbd,
            tls: self.tls,
            tls_certificates: self.tls_certificates,
            tls_verify_peer: self.tls_verify_peer,
            allow_plain_tcp: self.allow_plain_tcp,
            vhost_user: self.vhost_user,
            ublk: self.ublk,
            fuse: self.fuse,
            allow_other: self.allow_other,
            num_queues: self.num_queues,
            serial: self.serial,
            iops: self.iops,
            iops_burst: self.iops_burst,
            bps: self.bps,
            bps_burst: self.bps_burst,
            read_only: self.read_only,
            discard: self.discard,
            load_snapshot: self.load_snapshot,
            export_name: self.export_name,
            description: self.description,
            shared: self.shared,
            index: self.index,
            ..DiskConfig::new(name_of(&image), image)
        };
        Ok(Config {
            disks: vec![disk.with_images(images)],
            aio: self.images.aio,
            stats_file: self.stats_file,
            ..Config::default()
        })
    }
}

/// What a disk is called that has no other name: its image's name without its ending.
fn name_of(image: &Path) -> String {
    let stem = image.file_stem().unwrap_or_default().to_string_lossy();
    let plain = |letter: char| match letter {
        '-' | '_' | '.' => letter,
        letter if letter.is_ascii_alphanumeric() => letter,
        _ => '_',
    };
    let name: String = stem.chars().take(64).map(plain).collect();
    if name.is_empty() { "disk".to_owned() } else { name }
}
