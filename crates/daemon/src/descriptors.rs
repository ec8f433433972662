//! How many descriptors disks need, besides those through which layers are read: of these there are
//! as many as the limit leaves, and they are opened and closed as needed.

use crate::address::Address;
use crate::config::Config;
use crate::places::nbd_addresses;
use crate::settings::{DESCRIPTORS_RESERVE, DiskSettings, SandboxMode};
use mica_block::{Error, ErrorKind, Result};
use mica_store::Handles;
use std::collections::BTreeSet;

/// The need of one disk, or of several.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Need {
    /// As long as nobody uses it: the sockets that it has for itself, and the files that it writes.
    at_rest: usize,
    /// What a client of each socket adds.
    clients: usize,
}

/// Connection, its copy for the end, and the back channel of a front end.
const SESSION: usize = 3;
/// Kick, call and error of a virtqueue.
const QUEUE: usize = 3;
/// The memory of requests in flight, and the log of a migration.
const SHARED_FILES: usize = 2;
/// What a process without disks cannot do without.
const PROCESS_MIN: usize = 48;
/// The active layer and its redo log.
const WRITTEN: usize = 2;
/// The file of an ephemeral disk's overlay: as the server keeps it, and as the active layer. It has
/// no redo log.
const THROWN_AWAY: usize = 2;

impl Need {
    pub(crate) fn of(settings: &DiskSettings) -> Self {
        let sockets = usize::from(settings.vhost_user.is_some());
        let file = usize::from(settings.fuse.is_some());
        // Its overlay may not be there yet.
        let written = match settings.ephemeral {
            true => THROWN_AWAY,
            false if settings.writes() => WRITTEN,
            false => 0,
        };
        let queues = usize::from(settings.num_queues());
        let device = SESSION + SHARED_FILES + QUEUE * queues;
        Self {
            at_rest: sockets + file + written,
            clients: settings.nbd.len() + settings.vhost_user.as_ref().map_or(0, |_| device),
        }
    }

    /// All of it.
    pub(crate) fn total(self) -> usize {
        self.at_rest + self.clients
    }

    fn and(self, other: Self) -> Self {
        let Self { at_rest, clients } = other;
        Self { at_rest: self.at_rest + at_rest, clients: self.clients + clients }
    }
}

/// The sockets at which NBD clients connect, of which disks may share one.
fn addresses(config: &Config) -> Need {
    let settings = config.disks.iter().map(|disk| &disk.settings);
    let any_port =
        |settings: &DiskSettings| nbd_addresses(settings).filter(Address::is_any_port).count();
    let own: usize = settings.clone().map(any_port).sum();
    let shared: BTreeSet<_> =
        settings.clone().flat_map(nbd_addresses).filter(|at| !at.is_any_port()).collect();
    // Sockets may also come from systemd.
    let unnamed = settings.filter(|settings| !settings.has_place()).count();
    Need { at_rest: own + shared.len() + unnamed, clients: 0 }
}

/// Everything that the disks of `config` need.
fn need(config: &Config) -> Need {
    let needs = config.disks.iter().map(|disk| Need::of(&disk.settings));
    needs.fold(addresses(config), Need::and)
}

/// Rings that are made for the devices of `config` before the sandbox forbids that, in a process
/// that may have `allowed` files open: second ones for the same queues only as far as there is room
/// for them. Without its own a bell is rung by one that all such share.
pub(crate) fn rings(config: &Config, allowed: usize) -> usize {
    let first = first_rings(config);
    let needed = need(config).total() + first + Handles::BOUND_MIN + DESCRIPTORS_RESERVE;
    match first {
        0 => 0,
        first => first + config.second_doorbells().min(allowed.saturating_sub(needed)),
    }
}

/// Those that there have to be.
fn first_rings(config: &Config) -> usize {
    match config.process.sandbox() {
        SandboxMode::Off => 0,
        SandboxMode::On | SandboxMode::Require => config.doorbells(),
    }
}

/// Checks that a process that may have `allowed` files open can serve the disks of `config`.
///
/// # Errors
/// `Limit` if they cannot all be open. If only their clients would find none left, that is logged.
pub(crate) fn check(config: &Config, allowed: usize) -> Result<()> {
    let need = need(config);
    let (disks, others) = (config.disks.len(), first_rings(config) + Handles::BOUND_MIN);
    let lack = |count: usize| {
        let needed = count + others + DESCRIPTORS_RESERVE;
        format!(
            "{disks} disks need {needed} open files, and this process may have {allowed}: raise \
             LimitNOFILE= in its unit, or `ulimit -n` (its hard limit is set in \
             /etc/security/limits.conf)"
        )
    };
    if need.at_rest + others + PROCESS_MIN > allowed {
        return Err(Error::new(ErrorKind::Limit, lack(need.at_rest)));
    }
    if need.total() + others + DESCRIPTORS_RESERVE > allowed && disks > 1 {
        let what = lack(need.total());
        tracing::warn!("not all clients can connect at once: with a client each, {what}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DiskConfig;
    use crate::settings::NbdPlace;
    use std::path::PathBuf;

    fn config(disks: usize) -> Config {
        let disk = |number: usize| {
            let mut disk = DiskConfig::new(format!("d{number}"), PathBuf::from("image"));
            disk.settings.nbd = vec![NbdPlace::Unix(format!("s{number}").into())];
            disk
        };
        Config { disks: (0..disks).map(disk).collect(), ..Config::default() }
    }

    #[test]
    fn disks_that_cannot_all_be_open_are_refused_with_the_number_that_they_need() {
        let least = 100 * 3 + Handles::BOUND_MIN + PROCESS_MIN;
        check(&config(100), least).expect("it suffices");
        let error = check(&config(100), least - 1).expect_err("one is missing");
        assert_eq!(error.kind(), ErrorKind::Limit);
        let needed = 100 * 3 + Handles::BOUND_MIN + DESCRIPTORS_RESERVE;
        let text = error.to_string();
        assert!(text.contains(&format!("need {needed} open files")), "{text}");
        assert!(text.contains(&format!("may have {}", least - 1)), "{text}");
        for place in ["LimitNOFILE=", "ulimit -n", "limits.conf"] {
            assert!(text.contains(place), "{text}");
        }
    }

    #[test]
    fn device_needs_more_with_each_queue_once_a_front_end_is_there() {
        let mut settings = DiskSettings { num_queues: Some(2), ..DiskSettings::default() };
        settings.vhost_user = Some(PathBuf::from("s"));
        let two = Need::of(&settings);
        settings.num_queues = Some(3);
        let three = Need::of(&settings);
        assert_eq!(three.at_rest, two.at_rest);
        assert_eq!(three.total(), two.total() + QUEUE);
        settings.read_only = true;
        assert_eq!(Need::of(&settings).at_rest, three.at_rest - WRITTEN);
    }

    /// The story: a second ring for each queue was made a condition, and hosts refused to serve
    /// what they had served before.
    #[test]
    fn second_rings_are_made_only_if_the_limit_leaves_room() {
        let mut config = config(100);
        config.process.sandbox = Some(SandboxMode::On);
        for disk in &mut config.disks {
            disk.settings.vhost_user = Some(PathBuf::from("s"));
            disk.settings.num_queues = Some(2);
        }
        let least = need(&config).at_rest + 200 + Handles::BOUND_MIN + PROCESS_MIN;
        check(&config, least).expect("it suffices");
        check(&config, least - 1).expect_err("one is missing");
        assert_eq!(rings(&config, least), 200);
        let all = need(&config).total() + 200 + Handles::BOUND_MIN + DESCRIPTORS_RESERVE;
        let made = [0, 7, 200, 5000].map(|more| rings(&config, all + more));
        assert_eq!(made, [200, 207, 400, 400]);
        config.process.sandbox = Some(SandboxMode::Off);
        assert_eq!(rings(&config, 1 << 20), 0);
    }

    #[test]
    fn ephemeral_disk_needs_its_overlay_before_that_is_made() {
        let with = |ephemeral, read_only| {
            let settings = DiskSettings { ephemeral, read_only, ..DiskSettings::default() };
            Need::of(&settings).at_rest
        };
        assert_eq!(with(true, false), with(false, true) + THROWN_AWAY);
        let mut config = config(100);
        config.disks.iter_mut().for_each(|disk| disk.settings.ephemeral = true);
        let least = 100 * (1 + THROWN_AWAY) + Handles::BOUND_MIN + PROCESS_MIN;
        check(&config, least).expect("it suffices");
        check(&config, least - 1).expect_err("one is missing");
    }
}
