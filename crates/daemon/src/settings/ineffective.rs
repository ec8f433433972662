//! Options without effect: those of a server that the disk does not have.

use super::{DiskSettings, NbdPlace, ZeroDetection};

impl DiskSettings {
    /// Describes an option that is given without what it belongs to, if there is one. Sockets that
    /// systemd passes may be for NBD or for a device.
    pub(crate) fn ineffective_option(&self, has_inherited_sockets: bool) -> Option<String> {
        let has_nbd = !self.nbd.is_empty() || has_inherited_sockets;
        let is_tcp = |place: &NbdPlace| matches!(place, NbdPlace::Tcp(_));
        let has_tcp = self.nbd.iter().any(is_tcp) || has_inherited_sockets;
        let has_device = self.vhost_user.is_some() || has_inherited_sockets;
        let vhost_user = "vhost-user, which the disk does not use: add vhost-user";
        let clients = "NBD, which the disk does not use: add nbd";
        let all = [
            (self.num_queues.is_some(), "num-queues", has_device, vhost_user),
            (self.serial.is_some(), "serial", has_device, vhost_user),
            (self.export_name.is_some(), "export-name", has_nbd, clients),
            (self.description.is_some(), "description", has_nbd, clients),
            (self.allocation_depth, "allocation-depth", has_nbd, clients),
            (!self.bitmap.is_empty(), "bitmap", has_nbd, clients),
            (self.shared.is_some(), "shared", has_nbd, clients),
            (self.tls.is_some(), "tls", has_nbd, clients),
            (self.tls_certificates.is_some(), "tls-certificates", has_nbd, clients),
            (
                self.tls_verify_peer.is_some(),
                "tls-verify-peer",
                self.tls_certificates.is_some(),
                "TLS, which needs tls-certificates: add them",
            ),
            (
                self.allow_plain_tcp,
                "allow-plain-tcp",
                has_tcp,
                "NBD over TCP, which the disk does not use: add nbd with tcp:ADDRESS:PORT",
            ),
            (
                self.allow_other.is_some(),
                "allow-other",
                self.fuse.is_some(),
                "FUSE, which the disk does not use: add fuse",
            ),
            (
                self.detect_zeroes != ZeroDetection::Off,
                "detect-zeroes",
                !self.read_only && self.load_snapshot.is_none(),
                "a disk that is written: leave out read-only",
            ),
            (self.iops_burst > 0, "iops-burst", self.iops > 0, "a limit that is not set: add iops"),
            (self.bps_burst.0 > 0, "bps-burst", self.bps.0 > 0, "a limit that is not set: add bps"),
        ];
        let (_, option, _, of) =
            all.into_iter().find(|(is_given, _, has_effect, _)| *is_given && !has_effect)?;
        Some(format!("{option} belongs to {of}, or leave {option} out"))
    }
}
