//! What is said of a process that serves, whatever its disks are.

use super::{Aio, SandboxMode};
use clap::Args;
use mica_rt::Backend;
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

// (Documentation of the structs would become the help of the verb that has these options.)
#[expect(missing_docs, reason = "it would become the help of the verb that has these options")]
#[derive(Args, Deserialize, Clone, Default, Debug)]
#[serde(default, rename_all = "kebab-case")]
pub struct ProcessSettings {
    /// Threads that serve, for all disks and clients together. As many as processors by default.
    #[arg(long, value_name = "COUNT")]
    pub queues: Option<usize>,
    /// Listen on this unix socket for `mica ctl` and `mica top`, of root and of this user alone.
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Show figures on this TCP address: to Prometheus at /metrics, to people with a browser at /.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<SocketAddr>,
    /// Let the figures be seen from beyond this machine.
    #[arg(long)]
    pub metrics_public: bool,
    /// Whether the process gives up, before it reads an image, what serving does not need: files
    /// elsewhere, other programs, the network. On, as far as the kernel knows how; require, or
    /// serve nothing; off.
    #[arg(long, value_enum, value_name = "WHETHER")]
    pub sandbox: Option<SandboxMode>,
}

impl ProcessSettings {
    /// These, and the `others` where these say nothing.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self {
            queues: self.queues.or(others.queues),
            control: self.control.or(others.control),
            metrics: self.metrics.or(others.metrics),
            metrics_public: self.metrics_public || others.metrics_public,
            sandbox: self.sandbox.or(others.sandbox),
        }
    }

    pub(crate) fn sandbox(&self) -> SandboxMode {
        self.sandbox.unwrap_or_default()
    }

    /// Starts relative paths from `folder`.
    pub(crate) fn resolve(&mut self, folder: &Path) {
        self.control.iter_mut().for_each(|path| *path = folder.join(&*path));
    }
}

#[expect(missing_docs, reason = "it would become the help of the verb that has this option")]
#[derive(Args, Deserialize, Clone, Default, Debug)]
#[serde(default, rename_all = "kebab-case")]
pub struct StatsSettings {
    /// Write figures of this run as JSON to this file at the end.
    #[arg(long, value_name = "FILE")]
    pub stats_file: Option<PathBuf>,
}

impl StatsSettings {
    /// Starts relative paths from `folder`.
    pub(crate) fn resolve(&mut self, folder: &Path) {
        self.stats_file.iter_mut().for_each(|path| *path = folder.join(&*path));
    }
}

#[expect(missing_docs, reason = "it would become the help of the verb that has this option")]
#[derive(Args, Deserialize, Clone, Default, Debug)]
#[serde(default, rename_all = "kebab-case")]
pub struct IoSettings {
    /// How I/O is done: io_uring, threads, or io_uring where the system lets us.
    #[arg(long, value_enum, default_value_t, value_name = "BACKEND")]
    pub aio: Aio,
}

impl IoSettings {
    /// As the runtime has it.
    pub fn backend(&self) -> Backend {
        match self.aio {
            Aio::Auto => Backend::Auto,
            Aio::IoUring => Backend::Uring,
            Aio::Threads => Backend::Pool,
        }
    }
}
