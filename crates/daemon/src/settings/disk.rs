//! How one disk is served, and where.

use super::place::{nbd_place, nbd_places};
use super::{Discards, IndexMode, OtherUsers, Size, TlsMode, VerifyPeer};
use clap::Args;
use mica_block::Result;
use mica_serve::Rates;
use serde::Deserialize;
use std::path::{Path, PathBuf};

#[expect(
    missing_docs,
    reason = "documentation would become the help of the verb that has these options"
)]
#[derive(Args, Deserialize, Clone, Default, Debug)]
#[serde(default, rename_all = "kebab-case")]
pub struct DiskSettings {
    /// Where NBD clients connect: the path of a unix socket (or unix:PATH), or tcp:HOST:PORT, which
    /// needs TLS unless it is a loopback address. Can be repeated.
    #[arg(long, value_name = "SOCKET")]
    #[serde(deserialize_with = "nbd_places")]
    pub nbd: Vec<String>,
    /// Whether NBD clients use TLS: off; on (they may); require (over TCP they must, the default
    /// with certificates). On a unix socket it is never required.
    #[arg(long, value_enum, value_name = "MODE")]
    pub tls: Option<TlsMode>,
    /// The directory of server-cert.pem and server-key.pem and, to verify clients, ca-cert.pem and
    /// optionally ca-crl.pem: the layout of QEMU's tls-creds-x509.
    #[arg(long, value_name = "DIR")]
    pub tls_certificates: Option<PathBuf>,
    /// Whether NBD clients must present a certificate signed by ca-cert.pem; on by default.
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "on", value_name = "on|off")]
    pub tls_verify_peer: Option<VerifyPeer>,
    /// Allow unencrypted TCP from other machines: for networks on which anybody may read and change
    /// the disk.
    #[arg(long)]
    pub allow_plain_tcp: bool,
    /// Where the monitor of a virtual machine (QEMU, cloud-hypervisor, Firecracker) connects to use
    /// the disk as a vhost-user-blk device: the path of a unix socket.
    #[arg(long, value_name = "SOCKET")]
    pub vhost_user: Option<PathBuf>,
    /// Also serve the disk as this file, by FUSE: a raw image for other tools and loop mounts. The
    /// file must exist; while mica serves, it is the disk.
    #[arg(long, value_name = "FILE")]
    pub fuse: Option<PathBuf>,
    /// Whether other users may use that file; auto by default.
    #[arg(long, value_enum, value_name = "on|off|auto")]
    pub allow_other: Option<OtherUsers>,
    /// Virtqueues of the vhost-user-blk device; 4 by default.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub num_queues: Option<u16>,
    /// Serial number that the virtual machine sees, truncated to 20 bytes. By default the image's
    /// name without its extension; in a configuration the disk's name.
    #[arg(long, value_name = "TEXT")]
    pub serial: Option<String>,
    /// Limit on operations per second for the vhost-user-blk device.
    #[arg(long, default_value_t, hide_default_value = true, value_name = "COUNT")]
    pub iops: u64,
    /// Burst size, in operations; a tenth of a second's worth by default.
    #[arg(long, default_value_t, hide_default_value = true, value_name = "COUNT")]
    pub iops_burst: u64,
    /// Limit on bytes per second for the vhost-user-blk device, reads and writes together.
    #[arg(long, default_value_t, hide_default_value = true, value_name = "SIZE")]
    pub bps: Size,
    /// Burst size, in bytes; a tenth of a second's worth by default.
    #[arg(long, default_value_t, hide_default_value = true, value_name = "SIZE")]
    pub bps_burst: Size,
    /// Serve read-only. Otherwise the image is opened for writing, as by qemu-nbd.
    #[arg(short = 'r', long)]
    pub read_only: bool,
    /// Leave the image as it is: what clients write goes to a temporary file (in TMPDIR, or else
    /// /tmp) and is lost at the end.
    #[arg(long, conflicts_with_all = ["read_only", "load_snapshot"])]
    pub ephemeral: bool,
    /// Where the overlay of an ephemeral disk is: made at the start, not stated by anybody.
    #[arg(skip)]
    #[serde(skip)]
    pub(crate) overlay_folder: Option<PathBuf>,
    /// What happens to space that clients no longer need: unmap frees it, ignore keeps it.
    #[arg(long, value_enum, default_value_t, value_name = "MODE")]
    pub discard: Discards,
    /// Serve an internal snapshot of the image, by id or name, instead of its current state. It is
    /// read-only.
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    pub load_snapshot: Option<String>,
    /// Name of the NBD export, which is also served under the empty name. By default the image's
    /// name without its extension; in a configuration the disk's name.
    #[arg(short = 'x', long, value_name = "NAME")]
    pub export_name: Option<String>,
    /// Description of the NBD export that clients can show.
    #[arg(short = 'D', long, value_name = "TEXT")]
    pub description: Option<String>,
    /// Maximum number of concurrent NBD clients, at least 1; 256 by default.
    #[arg(short = 'e', long, value_name = "COUNT")]
    pub shared: Option<usize>,
    /// Whether sidecars of the chain's index are used, and written in the background.
    #[arg(long, value_enum, default_value_t, value_name = "auto|read|off")]
    pub index: IndexMode,
}

impl DiskSettings {
    /// Virtqueues of the device.
    pub(crate) fn num_queues(&self) -> u16 {
        self.num_queues.unwrap_or(4)
    }

    /// Maximum number of concurrent NBD clients.
    pub(crate) fn clients_max(&self) -> usize {
        self.shared.unwrap_or(256)
    }

    /// Brings what the command line says into the form that a configuration has.
    ///
    /// # Errors
    /// `Invalid` if it has no such form.
    pub fn normalize(&mut self) -> Result<()> {
        for place in &mut self.nbd {
            *place = nbd_place(place)?;
        }
        Ok(())
    }

    /// Whether the image is opened for writing.
    pub(crate) fn writes(&self) -> bool {
        let has_place = !self.ephemeral || self.overlay_folder.is_some();
        !self.read_only && self.load_snapshot.is_none() && has_place
    }

    /// Whether the settings name any place to serve it.
    pub fn has_place(&self) -> bool {
        !self.nbd.is_empty() || self.vhost_user.is_some() || self.fuse.is_some()
    }

    /// Rate limits of the device.
    pub(crate) fn rates(&self) -> Rates {
        Rates {
            iops: self.iops,
            bps: self.bps.0,
            iops_burst: self.iops_burst,
            bps_burst: self.bps_burst.0,
        }
    }

    /// Resolves relative paths against `folder`.
    pub(crate) fn resolve(&mut self, folder: &Path) {
        let resolve = |path: &mut PathBuf| *path = folder.join(&*path);
        self.tls_certificates.iter_mut().for_each(resolve);
        self.vhost_user.iter_mut().for_each(resolve);
        self.fuse.iter_mut().for_each(resolve);
        for socket in &mut self.nbd {
            if !socket.starts_with("tcp:") {
                *socket = folder.join(&*socket).display().to_string();
            }
        }
    }
}
