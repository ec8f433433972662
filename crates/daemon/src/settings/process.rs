//! Settings of a process that serves, whatever its disks are.

use super::{Aio, GcMode, SandboxMode};
use clap::Args;
use mica_rt::Backend;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// A heading in the help.
const SERVER: &str = "Server";

#[expect(
    missing_docs,
    reason = "documentation would become the help of the verb that has these options"
)]
#[derive(Args, Deserialize, Serialize, Clone, PartialEq, Eq, Default, Debug)]
#[serde(default, rename_all = "kebab-case")]
pub struct ProcessSettings {
    /// Socket for `mica ctl` and `mica top`.
    ///
    /// A unix socket for root and this user.
    #[arg(long, value_name = "SOCKET", help_heading = SERVER)]
    pub control: Option<PathBuf>,
    /// Serve metrics, for Prometheus and browsers.
    ///
    /// At this TCP address: for Prometheus at /metrics, for browsers at /.
    #[arg(long, value_name = "ADDRESS:PORT", help_heading = SERVER)]
    pub metrics: Option<SocketAddr>,
    /// Allow other machines to read the metrics.
    #[arg(long, help_heading = SERVER, hide_short_help = true)]
    pub metrics_public: bool,
    /// Whether the process gives up what serving does not need (other files, other programs, the
    /// network) before it reads an image; on by default.
    #[arg(long, value_enum, value_name = "MODE", help_heading = SERVER, hide_short_help = true)]
    pub sandbox: Option<SandboxMode>,
    /// Serve all disks of the configuration or none. Without this, a disk that cannot be served is
    /// shown as failed, and the others are served.
    #[arg(long, help_heading = SERVER, hide_short_help = true)]
    pub strict: bool,
    /// Allow disks in this directory to be added later.
    ///
    /// By `mica ctl add`: their images, stores of volumes and sockets must be in this directory or
    /// below. The sandbox allows no others; and volumes in buckets only if the server starts with
    /// one. A --log-device must exist. Can be repeated.
    #[arg(long, value_name = "DIR", help_heading = SERVER, hide_short_help = true)]
    pub disks_in: Vec<PathBuf>,
    /// Exit when the last client has disconnected.
    ///
    /// Once there was one. Counts clients over NBD and virtual machines; a file of --fuse has no
    /// clients.
    #[arg(long, help_heading = SERVER, hide_short_help = true)]
    pub exit_after_last: bool,
    /// Append the log to this file.
    ///
    /// Until all is served, it also goes to stderr. In the sandbox the server may write to all
    /// files of the folder: give the log one of its own.
    #[arg(long, value_name = "FILE", help_heading = SERVER, hide_short_help = true)]
    pub log_file: Option<PathBuf>,
    /// Write the process ID to this file.
    ///
    /// Once all disks are served; it is removed at exit.
    #[arg(long, value_name = "FILE", hide_short_help = true, help_heading = SERVER)]
    pub pid_file: Option<PathBuf>,
    /// Whether to free in the background what no volume and no snapshot needs: auto, or off.
    ///
    /// In the stores of volumes that are served for writing, whose sparse extents are rewritten,
    /// too. Guests have priority. `mica volume gc` does it for volumes that are not served.
    #[arg(long, value_enum, value_name = "auto|off", help_heading = SERVER)]
    #[arg(hide_short_help = true, hide_possible_values = true)]
    pub gc: Option<GcMode>,
    /// Worker threads for all disks and clients together. One per processor by default, 8 at most.
    #[arg(long, value_name = "COUNT", hide_short_help = true, help_heading = SERVER)]
    pub queues: Option<usize>,
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
            strict: self.strict || others.strict,
            exit_after_last: self.exit_after_last || others.exit_after_last,
            disks_in: match self.disks_in.is_empty() {
                true => others.disks_in,
                false => self.disks_in,
            },
            log_file: self.log_file.or(others.log_file),
            pid_file: self.pid_file.or(others.pid_file),
            gc: self.gc.or(others.gc),
        }
    }

    pub(crate) fn gc(&self) -> GcMode {
        self.gc.unwrap_or_default()
    }

    pub(crate) fn sandbox(&self) -> SandboxMode {
        self.sandbox.unwrap_or_default()
    }

    /// Resolves relative paths against `folder`.
    pub(crate) fn resolve(&mut self, folder: &Path) {
        let files = [&mut self.control, &mut self.log_file, &mut self.pid_file];
        let all = files.into_iter().flatten().chain(&mut self.disks_in);
        all.for_each(|path| *path = folder.join(&*path));
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
    #[arg(long, value_name = "FILE", help_heading = SERVER, hide_short_help = true)]
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
