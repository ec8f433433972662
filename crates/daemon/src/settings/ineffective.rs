//! Options that would do nothing: those of a server that the disk does not have.

use super::DiskSettings;

impl DiskSettings {
    /// What is wrong with an option that is given without what it belongs to, if one is. Where
    /// sockets come along, any of them may be for NBD or for a machine.
    pub(crate) fn ineffective_option(&self, has_inherited_sockets: bool) -> Option<String> {
        let has_nbd = !self.nbd.is_empty() || has_inherited_sockets;
        let has_tcp =
            self.nbd.iter().any(|place| place.starts_with("tcp:")) || has_inherited_sockets;
        let has_device = self.vhost_user.is_some() || has_inherited_sockets;
        let device = "a machine's device, which it has none of: add vhost-user";
        let clients = "NBD clients, which cannot connect: add nbd";
        let all = [
            (self.num_queues.is_some(), "num-queues", has_device, device),
            (self.serial.is_some(), "serial", has_device, device),
            (self.iops > 0, "iops", has_device, device),
            (self.iops_burst > 0, "iops-burst", has_device, device),
            (self.bps.0 > 0, "bps", has_device, device),
            (self.bps_burst.0 > 0, "bps-burst", has_device, device),
            (self.export_name.is_some(), "export-name", has_nbd, clients),
            (self.description.is_some(), "description", has_nbd, clients),
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
                "NBD over TCP, which is not served: add nbd with tcp:ADDRESS:PORT",
            ),
            (
                self.allow_other.is_some(),
                "allow-other",
                self.fuse.is_some(),
                "the file that a disk is served as, which there is none of: add fuse",
            ),
            (
                self.iops_burst > 0,
                "iops-burst",
                self.iops > 0,
                "a limit, which there is none of: add iops",
            ),
            (
                self.bps_burst.0 > 0,
                "bps-burst",
                self.bps.0 > 0,
                "a limit, which there is none of: add bps",
            ),
        ];
        let (_, option, _, of) =
            all.into_iter().find(|(is_given, _, has_place, _)| *is_given && !has_place)?;
        Some(format!("{option} is of {of}, or leave {option} out"))
    }
}
