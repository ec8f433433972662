//! `mica serve`: serves disks over NBD, to virtual machines and as files, until SIGTERM or SIGINT.
//!
//! The exit code is 0 if everything acknowledged is in the images.

use crate::captive;
use crate::failure::{Failure, tell};
use crate::fork::{Fork, end_with_parent};
use crate::images::ImageArgs;
use crate::log::Log;
use crate::output::{OutputFormat, print, print_json};
use crate::pid_file::PidFile;
use crate::plain::plain;
use clap::{Args, Command, Id};
use mica_daemon::{
    Config, Daemon, DiskConfig, DiskSettings, NbdPlace, ProcessSettings, StatsSettings,
    VolumeSettings, check_config, has_inherited_sockets,
};
use serde_json::json;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Serve one disk or many: over NBD, to virtual machines, and as files.
///
/// Runs until SIGTERM or SIGINT; then requests in flight are answered and flushed, and the images
/// are closed.
#[derive(Args)]
pub(crate) struct ServeArgs {
    /// Serve the disks that this TOML file lists.
    ///
    /// One table "disk" for each, with the keys name, image and the options of this verb. Relative
    /// paths start from the folder of the file.
    #[arg(long, conflicts_with_all = of_one_disk(), value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check --config, report all errors in it, and exit.
    ///
    /// The images are opened for reading.
    #[arg(long, requires = "config", hide_short_help = true)]
    check_config: bool,
    /// How --check-config prints what it finds: human or json.
    #[arg(long, value_enum, default_value = "human", value_name = "FORMAT")]
    #[arg(requires = "check_config", hide_short_help = true)]
    #[arg(hide_possible_values = true, hide_default_value = true)]
    output: OutputFormat,
    /// Take over from the server at --control.
    ///
    /// Takes its sockets, and its disks once it has closed them. Virtual machines only pause; NBD
    /// clients are disconnected, and find the same disk when they reconnect. If this server cannot
    /// serve, the old one continues. Disks that are served as files cannot be taken over.
    #[arg(long, hide_short_help = true)]
    takeover: bool,
    /// Exit once the disks are served.
    ///
    /// Or once startup has failed. The server itself runs as another process, in the background.
    /// With --takeover this is what systemd runs to reload.
    #[arg(long)]
    fork: bool,
    /// Serve while this shell command runs.
    ///
    /// Then exit with its exit code. It finds the disk at $uri (an NBD URI), $nbd (the same, for
    /// QEMU) and $unixsocket.
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["config", "fork", "takeover"])]
    run: Option<OsString>,
    /// Exit, as on SIGTERM, when the process that started this server exits.
    #[arg(long, conflicts_with = "fork", hide_short_help = true)]
    exit_with_parent: bool,
    #[command(flatten)]
    process: ProcessSettings,
    #[command(flatten)]
    disk: DiskArgs,
}

// What a configuration file would say. (A doc comment would become the help of the verb.)
#[derive(Args)]
struct DiskArgs {
    #[command(flatten)]
    settings: DiskSettings,
    #[command(flatten)]
    stats: StatsSettings,
    #[command(flatten)]
    images: ImageArgs,
    #[command(flatten)]
    volume: VolumeSettings,
    /// The image: for a chain, its active layer.
    #[arg(value_name = "IMAGE", conflicts_with = "volume")]
    #[arg(required_unless_present_any = ["config", "volume"])]
    image: Option<PathBuf>,
}

/// The options that exclude a configuration.
fn of_one_disk() -> Vec<Id> {
    let options = DiskArgs::augment_args(Command::new(""));
    options.get_arguments().map(|option| option.get_id().clone()).collect()
}

pub(crate) fn run(args: ServeArgs, log: &Arc<Log>) -> Result<ExitCode, Failure> {
    if let (true, Some(file)) = (args.check_config, &args.config) {
        return check(file, args.process, args.output);
    }
    if args.exit_with_parent {
        end_with_parent()?;
    }
    let fork = match &args.run {
        Some(command) => captive::here(command)?,
        None if args.fork => Fork::here()?,
        None => Fork::Server(None),
    };
    let waiting = match fork {
        Fork::Server(waiting) => waiting,
        Fork::Ended(code) => return Ok(ExitCode::from(code)),
    };
    let started = start(args, log);
    let nowhere = waiting.and_then(|waiting| waiting.report(&started));
    let (daemon, _pid_file) = started?;
    if let Err(error) = log.settle(nowhere) {
        tracing::warn!(%error, "cannot detach from the output of the process that started this one");
    }
    daemon.run()?;
    Ok(ExitCode::SUCCESS)
}

/// Says all that is wrong with a configuration.
fn check(file: &Path, process: ProcessSettings, output: OutputFormat) -> Result<ExitCode, Failure> {
    let read = Config::read_all(file);
    let (mut config, mut problems) = read.unwrap_or_else(|error| (Config::default(), vec![error]));
    config.process = process.or(config.process);
    let disks = config.disks.len();
    if disks > 0 || problems.is_empty() {
        problems.extend(check_config(&config)?);
    }
    let said: Vec<_> = problems.iter().map(|problem| plain(&problem.in_one_line())).collect();
    match output {
        OutputFormat::Json => {
            let file = file.to_string_lossy();
            print_json(&json!({ "file": file, "disks": disks, "problems": said }))?;
        }
        OutputFormat::Human if said.is_empty() => {
            print(&format!("{}: {disks} disks, nothing wrong\n", file.display()))?;
        }
        OutputFormat::Human => said.iter().for_each(|problem| tell(&format!("mica: {problem}"))),
    }
    Ok(if said.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Serves everything; on failure, nothing.
fn start(args: ServeArgs, log: &Arc<Log>) -> Result<(Daemon, Option<PidFile>), Failure> {
    let config = config(args)?;
    let ProcessSettings { log_file, pid_file, .. } = &config.process;
    if let Some(file) = log_file {
        let real = |path: &Path| path.canonicalize().ok();
        let is_same =
            |image: &Path| real(file).is_some_and(|real_file| real(image) == Some(real_file));
        if let Some(disk) = config.disks.iter().find(|disk| is_same(&disk.image)) {
            let what = format!("that is the image of the disk {:?}", disk.name);
            return Err(Failure::new(what).within(format!("--log-file {}", file.display())));
        }
        log.open_file(file)?;
    }
    let pid_file = pid_file.as_deref().map(PidFile::prepare).transpose()?;
    let daemon = Daemon::start(config, Arc::clone(log) as _)?;
    if let Some(Err(failure)) = pid_file.as_ref().map(PidFile::publish) {
        // The first failure is the one to report.
        let _ = daemon.stop();
        return Err(failure);
    }
    Ok((daemon, pid_file))
}

/// What a server's helper does.
pub(crate) fn run_helper() -> Result<ExitCode, Failure> {
    mica_daemon::run_helper()?;
    Ok(ExitCode::SUCCESS)
}

fn config(args: ServeArgs) -> Result<Config, Failure> {
    let mut config = match &args.config {
        Some(file) => Config::read(file)?,
        None => args.disk.into_config(args.takeover)?,
    };
    config.process = args.process.or(config.process);
    config.takeover = args.takeover;
    // This very program, even if its file has been replaced since.
    config.helper = Some(PathBuf::from("/proc/self/exe"));
    if args.config.is_some() {
        config.check()?;
    }
    Ok(config)
}

impl DiskArgs {
    /// A configuration with this disk only.
    fn into_config(self, takeover: bool) -> Result<Config, Failure> {
        let DiskArgs { mut settings, stats, images, volume, image } = self;
        let disk = named(None, image, volume)?;
        settings.nbd.extend(captive::socket().map(NbdPlace::Unix));
        let has_place = settings.has_place() || takeover || has_inherited_sockets();
        if !has_place {
            return Err(Failure::new(
                "nowhere to serve the disk: add --nbd SOCKET, --vhost-user SOCKET or \
                 --fuse FILE",
            ));
        }
        let ImageArgs { settings: images, io, .. } = images;
        let disk = DiskConfig { settings, images, ..disk };
        let mut config = Config::default();
        (config.disks, config.io, config.stats) = (vec![disk], io, stats);
        Ok(config)
    }
}

/// The disk of an image or a volume, with its default name unless it has one.
pub(crate) fn named(
    name: Option<String>,
    image: Option<PathBuf>,
    volume: VolumeSettings,
) -> Result<DiskConfig, Failure> {
    if let Some(url) = volume.url()? {
        let name = name.unwrap_or_else(|| plain_name(url.name.as_str()));
        return Ok(DiskConfig::of_volume(name, volume));
    }
    let image = image.ok_or_else(|| Failure::new("name an image, a --volume, or --config"))?;
    let name = name.unwrap_or_else(|| name_of(&image));
    Ok(DiskConfig { volume, ..DiskConfig::new(name, image) })
}

/// The default name of a disk: its image's name without the extension.
fn name_of(image: &Path) -> String {
    plain_name(&image.file_stem().unwrap_or_default().to_string_lossy())
}

fn plain_name(stem: &str) -> String {
    let plain = |letter: char| match letter {
        '-' | '_' | '.' => letter,
        letter if letter.is_ascii_alphanumeric() => letter,
        _ => '_',
    };
    let name: String = stem.chars().take(64).map(plain).collect();
    if name.is_empty() { "disk".to_owned() } else { name }
}
