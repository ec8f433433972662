//! How one disk is served, and where.

use super::{
    Discards, IndexMode, NbdPlace, OtherUsers, Size, TlsMode, VerifyPeer, ZeroDetection,
    one_or_many,
};
use crate::overlay::Overlay;
use clap::Args;
use mica_serve::Rates;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Headings in the help.
const NBD: &str = "NBD";
const DEVICE: &str = "Virtual machine";
const LIMITS: &str = "Limits";
const PART: &str = "Part of the disk";

#[expect(
    missing_docs,
    reason = "documentation would become the help of the verb that has these options"
)]
#[derive(Args, Deserialize, Serialize, Clone, PartialEq, Eq, Default, Debug)]
#[serde(default, rename_all = "kebab-case")]
pub struct DiskSettings {
    /// Serve over NBD at unix:PATH or tcp:HOST:PORT.
    ///
    /// PATH alone is a unix socket, too. TCP needs TLS, unless the address is a loopback address.
    /// Can be repeated. In a configuration several disks may share a socket: clients choose by
    /// export name, and all of these disks need the same TLS settings.
    #[arg(long, value_name = "SOCKET")]
    #[serde(deserialize_with = "one_or_many")]
    pub nbd: Vec<NbdPlace>,
    /// Serve a virtual machine at this unix socket.
    ///
    /// Its monitor (QEMU, cloud-hypervisor, Firecracker) connects there to use the disk as a
    /// vhost-user-blk device.
    #[arg(long, value_name = "SOCKET")]
    pub vhost_user: Option<PathBuf>,
    /// Serve the disk as this file, a raw image.
    ///
    /// By FUSE, for other tools and loop mounts. The file must exist; while mica serves, it is the
    /// disk. Programs can map it into shared memory only if the disk is served in no other way:
    /// what others write would not show there.
    #[arg(long, value_name = "FILE")]
    pub fuse: Option<PathBuf>,
    /// Whether other users may use the file of --fuse; auto by default.
    #[arg(long, value_enum, value_name = "on|off|auto", hide_short_help = true)]
    pub allow_other: Option<OtherUsers>,
    /// Serve read-only.
    ///
    /// Otherwise the image is opened for writing, as by qemu-nbd.
    #[arg(short = 'r', long)]
    pub read_only: bool,
    /// Discard what clients write when the server exits.
    ///
    /// The image stays as it is: writes go to a temporary file without a name (in TMPDIR, or else
    /// /tmp), which disappears with the server, however that ends. For `mica ctl add` and a reload
    /// its file system must support such files (O_TMPFILE); NFS, for example, does not.
    #[arg(short = 's', long, alias = "snapshot")]
    #[arg(conflicts_with_all = ["read_only", "load_snapshot"])]
    pub ephemeral: bool,
    /// The overlay of an ephemeral disk: its server's, not stated by anybody.
    #[arg(skip)]
    #[serde(skip)]
    pub(crate) overlay: Option<Overlay>,
    /// Serve this internal snapshot, read-only.
    ///
    /// By ID or name, or as snapshot.id=ID or snapshot.name=NAME (or both), instead of the current
    /// state of the image.
    #[arg(short = 'l', long, value_name = "NAME", hide_short_help = true)]
    pub load_snapshot: Option<String>,
    /// Serve this partition of the disk.
    ///
    /// Numbered as by Linux, in an MBR or GPT that is read when the disk is opened.
    #[arg(long, value_name = "NUMBER", conflicts_with_all = ["offset", "size"])]
    #[arg(hide_short_help = true, help_heading = PART)]
    pub partition: Option<u32>,
    /// Serve the disk from this byte on.
    #[arg(short = 'o', long, value_name = "OFFSET", hide_short_help = true, help_heading = PART)]
    pub offset: Option<Size>,
    /// Serve this many bytes of the disk; by default everything after --offset.
    #[arg(long, value_name = "SIZE", hide_short_help = true, help_heading = PART)]
    pub size: Option<Size>,
    /// What happens to space that clients no longer need.
    #[arg(long, value_enum, default_value_t, value_name = "MODE", hide_short_help = true)]
    pub discard: Discards,
    /// Whether zeros that clients write become zeros of the image, which need no space.
    ///
    /// With unmap their space is freed, too, unless --discard ignore is given.
    #[arg(long, value_enum, default_value_t, value_name = "off|on|unmap")]
    #[arg(hide_short_help = true, hide_possible_values = true, hide_default_value = true)]
    pub detect_zeroes: ZeroDetection,
    /// Name of the NBD export.
    ///
    /// If no other disk is served, it is also available under the empty name. By default the
    /// image's name without its extension; in a configuration the disk's name.
    #[arg(short = 'x', long, value_name = "NAME", help_heading = NBD, hide_short_help = true)]
    pub export_name: Option<String>,
    /// Description of the export that clients can show.
    #[arg(short = 'D', long, value_name = "TEXT", help_heading = NBD, hide_short_help = true)]
    pub description: Option<String>,
    /// Let clients query which layer owns what: the context qemu:allocation-depth.
    #[arg(short = 'A', long, help_heading = NBD, hide_short_help = true)]
    pub allocation_depth: bool,
    /// Let clients query this dirty bitmap of the image: qemu:dirty-bitmap:NAME.
    ///
    /// Can be repeated. Combines the bitmaps of this name in all layers, as they are now.
    #[arg(short = 'B', long, value_name = "NAME", help_heading = NBD, hide_short_help = true)]
    pub bitmap: Vec<String>,
    /// Maximum number of clients of this export; 256 by default.
    ///
    /// Counted for each disk, over all its sockets, even where disks share one. Further clients are
    /// refused when they choose the export.
    #[arg(short = 'e', long, value_name = "COUNT", help_heading = NBD, hide_short_help = true)]
    pub shared: Option<usize>,
    /// Serve with the certificates in this directory.
    ///
    /// It has server-cert.pem and server-key.pem and, to verify clients, ca-cert.pem and optionally
    /// ca-crl.pem: the layout of QEMU's tls-creds-x509. They are read again on `mica ctl reload`
    /// and SIGHUP.
    #[arg(long, value_name = "DIR", help_heading = NBD, hide_short_help = true)]
    pub tls_certificates: Option<PathBuf>,
    /// Whether clients use TLS; with certificates they must, by default.
    ///
    /// On a unix socket it is never required.
    #[arg(long, value_enum, value_name = "MODE", help_heading = NBD, hide_short_help = true)]
    pub tls: Option<TlsMode>,
    /// Whether clients must present a certificate signed by ca-cert.pem; on by default.
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "on", value_name = "on|off")]
    #[arg(help_heading = NBD, hide_short_help = true)]
    pub tls_verify_peer: Option<VerifyPeer>,
    /// Allow unencrypted TCP from other machines: only for networks on which anybody may read and
    /// change the disk.
    #[arg(long, help_heading = NBD, hide_short_help = true)]
    pub allow_plain_tcp: bool,
    /// Virtqueues of the vhost-user-blk device; 4 by default.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    #[arg(help_heading = DEVICE, hide_short_help = true)]
    pub num_queues: Option<u16>,
    /// Serial number that the virtual machine sees, truncated to 20 bytes.
    ///
    /// By default the image's name without its extension; in a configuration the disk's name.
    #[arg(long, value_name = "TEXT", help_heading = DEVICE, hide_short_help = true)]
    pub serial: Option<String>,
    /// Limit on operations per second.
    ///
    /// For all clients of the disk together. Long requests over NBD and to a file are split into
    /// several operations.
    #[arg(long, default_value_t, hide_default_value = true, value_name = "COUNT")]
    #[arg(help_heading = LIMITS, hide_short_help = true)]
    pub iops: u64,
    /// Burst size, in operations; a tenth of a second's worth by default.
    #[arg(long, default_value_t, hide_default_value = true, value_name = "COUNT")]
    #[arg(help_heading = LIMITS, hide_short_help = true)]
    pub iops_burst: u64,
    /// Limit on bytes per second.
    ///
    /// For reads and writes together.
    #[arg(long, default_value_t, hide_default_value = true, value_name = "SIZE")]
    #[arg(help_heading = LIMITS, hide_short_help = true)]
    pub bps: Size,
    /// Burst size, in bytes; a tenth of a second's worth by default.
    #[arg(long, default_value_t, hide_default_value = true, value_name = "SIZE")]
    #[arg(help_heading = LIMITS, hide_short_help = true)]
    pub bps_burst: Size,
    /// Whether sidecars of the chain's index are used, and written in the background.
    #[arg(long, value_enum, default_value_t, value_name = "MODE")]
    #[arg(help_heading = "Engine", hide_short_help = true)]
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

    /// Whether the image is opened for writing.
    pub(crate) fn writes(&self) -> bool {
        let has_place = !self.ephemeral || self.overlay.is_some();
        !self.read_only && self.load_snapshot.is_none() && has_place
    }

    /// Whether the settings name any place to serve it.
    pub fn has_place(&self) -> bool {
        !self.nbd.is_empty() || self.vhost_user.is_some() || self.fuse.is_some()
    }

    /// Whether only a part of the disk is served.
    pub(crate) fn has_part(&self) -> bool {
        self.partition.is_some() || self.offset.is_some() || self.size.is_some()
    }

    /// Rate limits of all clients.
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
        self.nbd.iter_mut().for_each(|place| *place = place.resolved(folder));
    }
}
