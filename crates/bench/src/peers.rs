//! The servers that are measured, and how each is started on an image.

use anyhow::Result;
use mica_tests::server::Server;
use mica_tests::tools::{self, Tool};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A server that is measured.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Peer {
    /// Its name in tables.
    pub(super) name: String,
    kind: Kind,
    access: Access,
    /// Options in addition to those of every run.
    more: Vec<String>,
    /// What QEMU opens instead of the image.
    node: Option<String>,
    /// Where it serves over vhost-user too, and with how many queues.
    vhost_user: Option<(PathBuf, u16)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Mica,
    QemuNbd,
    QemuStorageDaemon,
    Nbdkit,
}

/// What a server may do with its image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Access {
    Read,
    Write,
}

/// mica's name in tables.
pub(super) const MICA: &str = "mica";
/// qemu-nbd's name in tables.
pub(super) const QEMU_NBD: &str = "qemu-nbd";
/// qemu-storage-daemon's name in tables.
pub(super) const QEMU_STORAGE_DAEMON: &str = "qemu-storage-daemon";

impl Peer {
    /// mica with `more` options.
    pub(super) fn mica(more: &[&str]) -> Self {
        Self::new(MICA, Kind::Mica, more)
    }

    /// qemu-nbd with `more` options.
    pub(super) fn qemu_nbd(more: &[&str]) -> Self {
        Self::new(QEMU_NBD, Kind::QemuNbd, more)
    }

    /// qemu-storage-daemon with `more` options.
    pub(super) fn qemu_storage_daemon(more: &[&str]) -> Self {
        Self::new(QEMU_STORAGE_DAEMON, Kind::QemuStorageDaemon, more)
    }

    /// nbdkit with `more` options; the image is its plugin and that plugin's argument.
    pub(super) fn nbdkit(more: &[&str]) -> Self {
        Self::new("nbdkit", Kind::Nbdkit, more)
    }

    /// mica and the programs that read qcow2 chains and are installed.
    pub(super) fn for_chains() -> Vec<Self> {
        let mut peers = vec![Self::mica(&[])];
        let known = [
            (tools::QEMU_NBD, Self::qemu_nbd(&[])),
            (tools::QEMU_STORAGE_DAEMON, Self::qemu_storage_daemon(&[])),
        ];
        for (tool, peer) in known {
            match tool.is_there() {
                true => peers.push(peer),
                false => println!("{} is NOT INSTALLED and not measured", tool.program),
            }
        }
        peers
    }

    /// The same, allowed to write.
    pub(super) fn writable(self) -> Self {
        Self { access: Access::Write, ..self }
    }

    /// The same, also as a vhost-user-blk device with `queues` queues at `socket`.
    pub(super) fn over_vhost_user(self, socket: PathBuf, queues: u16) -> Self {
        Self { vhost_user: Some((socket, queues)), ..self }
    }

    /// The same on one of QEMU's block nodes instead of the image that a run names.
    pub(super) fn on_node(self, node: &str) -> Self {
        Self { node: Some(format!("json:{node}")), ..self }
    }

    fn new(name: &str, kind: Kind, more: &[&str]) -> Self {
        let more = more.iter().map(|&word| word.to_owned()).collect();
        Self {
            name: name.to_owned(),
            kind,
            access: Access::Read,
            more,
            node: None,
            vhost_user: None,
        }
    }

    /// Starts it on `image`; `limit` wraps the command, as `prlimit` does.
    ///
    /// # Errors
    /// If it does not start serving.
    pub(super) fn start(&self, image: &Path, format: &str, limit: &[&str]) -> Result<Running> {
        let stats = tempfile::Builder::new().prefix("mica-bench-").tempdir()?;
        let stats_file = stats.path().join("stats.json");
        let export = if self.kind == Kind::QemuStorageDaemon { "top" } else { "" };
        let server = Server::start(export, |socket| {
            let mut command = match limit.split_first() {
                Some((first, rest)) => {
                    let mut command = Command::new(first);
                    command.args(rest).arg(self.program());
                    command
                }
                None => Command::new(self.program()),
            };
            self.arguments(&mut command, socket, image, format, &stats_file);
            command
        })?;
        Ok(Running { server, _stats: stats, stats_file })
    }

    fn program(&self) -> PathBuf {
        match self.kind {
            Kind::Mica => mica_tests::mica::binary().to_owned(),
            Kind::QemuNbd => tools::QEMU_NBD.program.into(),
            Kind::QemuStorageDaemon => tools::QEMU_STORAGE_DAEMON.program.into(),
            Kind::Nbdkit => tools::NBDKIT.program.into(),
        }
    }

    fn arguments(
        &self,
        command: &mut Command,
        socket: &Path,
        image: &Path,
        format: &str,
        stats: &Path,
    ) {
        let reads = self.access == Access::Read;
        match self.kind {
            Kind::Mica => {
                command.arg("serve").args(reads.then_some("--read-only"));
                command.args(["--format", format, "--nbd"]).arg(socket);
                if let Some((socket, queues)) = &self.vhost_user {
                    command.arg("--vhost-user").arg(socket);
                    command.args(["--num-queues", &queues.to_string()]);
                }
                command.arg("--stats-file").arg(stats).args(&self.more).arg(image);
            }
            Kind::QemuNbd => {
                command.args(reads.then_some("-r")).args(["-t", "-e", "0", "-k"]).arg(socket);
                command.args(&self.more);
                match &self.node {
                    Some(node) => command.arg(node),
                    None => command.args(["-f", format]).arg(image),
                };
            }
            Kind::QemuStorageDaemon => self.storage_daemon(command, socket, image, format),
            Kind::Nbdkit => {
                command.arg("--foreground").args(reads.then_some("--readonly"));
                command.arg("--unix").arg(socket);
                command.args(&self.more);
            }
        }
    }
}

impl Peer {
    fn storage_daemon(&self, command: &mut Command, socket: &Path, image: &Path, format: &str) {
        let (read_only, writable) = match self.access {
            Access::Read => ("on", "off"),
            Access::Write => ("off", "on"),
        };
        // Measured: over vhost-user its own ring takes two thirds of the processor time that its
        // threads take. Each peer is shown at its best.
        let aio = if self.vhost_user.is_some() { "file.aio=io_uring," } else { "" };
        let node = format!(
            "driver={format},node-name=top,read-only={read_only},file.driver=file,{aio}\
             file.filename={}",
            image.display()
        );
        let address = format!("addr.type=unix,addr.path={}", socket.display());
        command.args(["--blockdev", &node, "--nbd-server", &address]);
        let Some((socket, queues)) = &self.vhost_user else {
            let export = format!("type=nbd,id=export,node-name=top,writable={writable}");
            command.args(["--export", &export]).args(&self.more);
            return;
        };
        // NBD only shows that it is up.
        command.args(["--export", "type=nbd,id=export,node-name=top,writable=off"]);
        let export = format!(
            "type=vhost-user-blk,id=device,node-name=top,writable={writable},num-queues={queues},\
             addr.type=unix,addr.path={}",
            socket.display()
        );
        command.args(["--export", &export]).args(&self.more);
    }
}

/// Whether all `tools` are installed; prints which are not.
pub(super) fn all_installed(tools: &[Tool]) -> bool {
    for tool in tools.iter().filter(|tool| !tool.is_there()) {
        println!("{} is NOT INSTALLED: what needs it is not measured", tool.program);
    }
    tools.iter().all(|tool| tool.is_there())
}

/// A server that is being measured.
pub(super) struct Running {
    /// The process.
    pub(super) server: Server,
    _stats: tempfile::TempDir,
    stats_file: PathBuf,
}

impl Running {
    /// Stops it and returns its own figures, if it has any.
    ///
    /// # Errors
    /// If it does not stop, or not cleanly.
    pub(super) fn stop(self) -> Result<Option<Value>> {
        let stopped = self.server.stop()?;
        anyhow::ensure!(stopped.status.success(), "{}\n{}", stopped.status, stopped.log);
        let Ok(text) = fs::read(&self.stats_file) else { return Ok(None) };
        Ok(Some(serde_json::from_slice(&text)?))
    }
}
