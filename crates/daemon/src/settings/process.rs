//! Settings of a process that serves, whatever its disks are.

use super::{Aio, SandboxMode};
use clap::Args;
use mica_rt::Backend;
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

#[expect(
    missing_docs,
    reason = "documentation would become the help of the verb that has these options"
)]
#[derive(Args, Deserialize, Clone, Default, Debug)]
#[serde(default, rename_all = "kebab-case")]
pub struct ProcessSettings {
    /// Worker threads for all disks and clients together. One per processor by default, 8 at most.
    #[arg(long, value_name = "COUNT")]
    pub queues: Option<usize>,
    /// Listen on this unix socket for `mica ctl` and `mica top`, run by root or this user.
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Serve metrics at this TCP address: for Prometheus at /metrics, for browsers at /.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<SocketAddr>,
    /// Allow other machines to read the metrics.
    #[arg(long)]
    pub metrics_public: bool,
    /// Whether the process gives up what serving does not need (other files, other programs, the
    /// network) before it reads an image: on, as far as the kernel can; require, or serve nothing;
    /// off.
    #[arg(long, value_enum, value_name = "on|require|off")]
    pub sandbox: Option<SandboxMode>,
}

impl ProcessSettings {
    /// These settings, with those of `others` where they are not set.
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

    /// Resolves relative paths against `folder`.
    pub(crate) fn resolve(&mut self, folder: &Path) {
        self.control.iter_mut().for_each(|path| *path = folder.join(&*path));
    }
}

#[expect(
    missing_docs,
    reason = "documentation would become the help of the verb that has this option"
)]
#[derive(Args, Deserialize, Clone, Default, Debug)]
#[serde(default, rename_all = "kebab-case")]
pub struct StatsSettings {
    /// Write statistics of this run to this file as JSON at the end.
    #[arg(long, value_name = "FILE")]
    pub stats_file: Option<PathBuf>,
}

impl StatsSettings {
    /// Resolves relative paths against `folder`.
    pub(crate) fn resolve(&mut self, folder: &Path) {
        self.stats_file.iter_mut().for_each(|path| *path = folder.join(&*path));
    }
}

#[expect(
    missing_docs,
    reason = "documentation would become the help of the verb that has this option"
)]
#[derive(Args, Deserialize, Clone, Default, Debug)]
#[serde(default, rename_all = "kebab-case")]
pub struct IoSettings {
    /// How I/O is done: by io_uring, by threads, or by io_uring where the system permits it.
    #[arg(long, value_enum, default_value_t, value_name = "BACKEND")]
    #[arg(hide_short_help = true, help_heading = "Engine")]
    pub aio: Aio,
}

impl IoSettings {
    /// The backend of the runtime.
    pub fn backend(&self) -> Backend {
        match self.aio {
            Aio::Auto => Backend::Auto,
            Aio::IoUring => Backend::Uring,
            Aio::Threads => Backend::Pool,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_takes_precedence_over_the_configuration() {
        let command_line = ProcessSettings { queues: Some(2), ..ProcessSettings::default() };
        let file = ProcessSettings {
            queues: Some(3),
            control: Some("/file".into()),
            metrics_public: true,
            sandbox: Some(SandboxMode::Off),
            ..ProcessSettings::default()
        };
        let both = command_line.or(file);
        assert_eq!((both.queues, both.sandbox()), (Some(2), SandboxMode::Off));
        assert_eq!(both.control.as_deref(), Some(Path::new("/file")));
        assert!(both.metrics_public && both.metrics.is_none());
    }
}
