//! How one disk is served, and where.

use super::{Discards, IndexMode, OtherUsers, Size, TlsMode, VerifyPeer};
use clap::Args;
use mica_serve::Rates;
use serde::Deserialize;
use std::path::{Path, PathBuf};

// (Documentation of the struct would become the help of the verb that has these options.)
#[expect(missing_docs, reason = "it would become the help of the verb that has these options")]
#[derive(Args, Deserialize, Clone, Default, Debug)]
#[serde(default, rename_all = "kebab-case")]
pub struct DiskSettings {
    /// Where NBD clients connect: the path of a unix socket, or tcp:ADDRESS:PORT, beyond the
    /// loopback with TLS. Can be given more than once.
    #[arg(long, value_name = "SOCKET")]
    pub nbd: Vec<String>,
    /// Whether NBD clients use TLS: off; on, if they like; require, over TCP, which is so as soon
    /// as there are certificates. On a unix socket they never have to.
    #[arg(long, value_enum, value_name = "MODE")]
    pub tls: Option<TlsMode>,
    /// The directory of server-cert.pem and server-key.pem, and, to verify clients, ca-cert.pem and
    /// perhaps ca-crl.pem: the layout of QEMU's tls-creds-x509.
    #[arg(long, value_name = "DIR")]
    pub tls_certificates: Option<PathBuf>,
    /// Whether NBD clients have to show a certificate that ca-cert.pem vouches for. They do by
    /// default.
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "on", value_name = "WHETHER")]
    pub tls_verify_peer: Option<VerifyPeer>,
    /// Let plain text leave this machine over TCP: for networks on which everybody may read and
    /// change the disk.
    #[arg(long)]
    pub allow_plain_tcp: bool,
    /// Where the monitor of a virtual machine connects (QEMU, cloud-hypervisor, Firecracker), to
    /// have the disk as a vhost-user-blk device: the path of a unix socket.
    #[arg(long, value_name = "SOCKET")]
    pub vhost_user: Option<PathBuf>,
    /// Serve the disk as a block device of this machine. Not in this build.
    #[arg(long)]
    pub ublk: bool,
    /// Serve the disk as this file too, by FUSE: a raw image for foreign tools and loop mounts. The
    /// file must be there; while mica serves, it is the disk.
    #[arg(long, value_name = "FILE")]
    pub fuse: Option<PathBuf>,
    /// Whether other users may use that file; auto by default.
    #[arg(long, value_enum, value_name = "WHETHER")]
    pub allow_other: Option<OtherUsers>,
    /// Virtqueues of the vhost-user-blk device; 4 by default.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub num_queues: Option<u16>,
    /// What the machine is told as the serial number of the device; at most 20 bytes count. The
    /// image's name without its ending by default.
    #[arg(long, value_name = "TEXT")]
    pub serial: Option<String>,
    /// Most operations per second of the vhost-user-blk device.
    #[arg(long, default_value_t, hide_default_value = true, value_name = "COUNT")]
    pub iops: u64,
    /// Operations that may come at once; a tenth of a second's by default.
    #[arg(long, default_value_t, hide_default_value = true, value_name = "COUNT")]
    pub iops_burst: u64,
    /// Most bytes per second of the vhost-user-blk device, read and written together.
    #[arg(long, default_value_t, hide_default_value = true, value_name = "SIZE")]
    pub bps: Size,
    /// Bytes that may come at once; a tenth of a second's by default.
    #[arg(long, default_value_t, hide_default_value = true, value_name = "SIZE")]
    pub bps_burst: Size,
    /// Refuse to write. Without it the image is opened for writing, as by qemu-nbd.
    #[arg(short = 'r', long)]
    pub read_only: bool,
    /// What becomes of space that clients do not need any more: unmap gives it back, ignore keeps
    /// it.
    #[arg(long, value_enum, default_value_t, value_name = "MODE")]
    pub discard: Discards,
    /// Serve an internal snapshot of the image, by id or name, instead of its present state. It
    /// cannot be written.
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    pub load_snapshot: Option<String>,
    /// Name of the NBD export; it is also served under the empty name.
    #[arg(short = 'x', long, value_name = "NAME")]
    pub export_name: Option<String>,
    /// Text that NBD clients show with the export.
    #[arg(short = 'D', long, value_name = "TEXT")]
    pub description: Option<String>,
    /// Most NBD clients at one time; 256 by default.
    #[arg(short = 'e', long, value_name = "COUNT")]
    pub shared: Option<usize>,
    /// Whether sidecars of the chain's index are used, and written in the background.
    #[arg(long, value_enum, default_value_t, value_name = "WHETHER")]
    pub index: IndexMode,
}

impl DiskSettings {
    /// Virtqueues of the device.
    pub(crate) fn num_queues(&self) -> u16 {
        self.num_queues.unwrap_or(4)
    }

    /// Most NBD clients at one time.
    pub(crate) fn clients_max(&self) -> usize {
        self.shared.unwrap_or(256)
    }

    /// Whether the image is opened for writing.
    pub(crate) fn writes(&self) -> bool {
        !self.read_only && self.load_snapshot.is_none()
    }

    /// Whether anything says where the disk is served.
    pub fn has_place(&self) -> bool {
        !self.nbd.is_empty() || self.vhost_user.is_some() || self.fuse.is_some()
    }

    /// How much a machine may do.
    pub(crate) fn rates(&self) -> Rates {
        Rates {
            iops: self.iops,
            bps: self.bps.0,
            iops_burst: self.iops_burst,
            bps_burst: self.bps_burst.0,
        }
    }

    /// Starts relative paths from `folder`.
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
