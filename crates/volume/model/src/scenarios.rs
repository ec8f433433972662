//! The scenarios: small worlds that are checked completely.

use crate::model::{Possible, Protocol};
use crate::rules::Rules;
use crate::world::{Build, CollectorRole, Collects, End, Goal, Role, Setup};
use Build::{DropSnapshot, TakeSnapshot, Write};

/// A writer is taken over by two hosts at once, the second of which may try again.
pub(crate) fn take_over(rules: Rules, more: u8) -> Protocol {
    let hosts = vec![
        Role { checkpoints: 1, ..writer(&writes(3 + more)) },
        taker(&[Write]),
        Role { tries: 1, ..taker(&[Write]) },
    ];
    let setup = Setup { faults: 1 + more, has_two_blocks: true, ..Setup::new(rules, hosts) };
    Protocol { setup, possible: vec![Possible::TakeOver, Possible::LostRace] }
}

/// A writer hands over to host 1 while host 2 takes over by force.
pub(crate) fn hand_over(rules: Rules, more: u8) -> Protocol {
    let hosts = vec![
        Role { end: End::HandTo(1), checkpoints: 1, ..writer(&writes(2 + more)) },
        Role { force: false, tries: 1, ..taker(&[Write]) },
        Role { end: End::Close, ..taker(&[Write]) },
    ];
    let setup = Setup { faults: 2, ..Setup::new(rules, hosts) };
    Protocol { setup, possible: vec![Possible::HandOver, Possible::TakeOver] }
}

/// A writer closes; others open, one of them only what is closed.
pub(crate) fn close(rules: Rules, more: u8) -> Protocol {
    let hosts = vec![
        Role { end: End::Close, checkpoints: 1, ..writer(&writes(3 + more)) },
        Role { force: false, tries: 1, end: End::Close, ..taker(&[Write]) },
        taker(&[Write]),
    ];
    let setup = Setup { faults: 1 + more, ..Setup::new(rules, hosts) };
    Protocol { setup, possible: vec![Possible::TakeOver, Possible::OpenAfterClose] }
}

/// A writer's process dies and is started again on its machine, with its log, while another host
/// takes over.
pub(crate) fn restart(rules: Rules, more: u8) -> Protocol {
    let hosts = vec![
        Role { checkpoints: 1, ..writer(&writes(3 + more)) },
        Role { log_of: Some(0), tries: 1, ..taker(&[Write]) },
        Role { end: End::Close, ..taker(&[Write]) },
    ];
    let setup = Setup { faults: 1, ..Setup::new(rules, hosts) };
    Protocol { setup, possible: vec![Possible::Replay, Possible::TakeOver] }
}

/// A process dies, the next one on its machine dies, too, and the third has the log.
pub(crate) fn restart_twice(rules: Rules, more: u8) -> Protocol {
    let hosts = vec![
        Role { checkpoints: 1, ..writer(&writes(2 + more)) },
        Role { log_of: Some(0), tries: 1, ..taker(&[]) },
        Role { log_of: Some(1), tries: 1, ..taker(&[]) },
        Role { end: End::Close, ..taker(&[Write]) },
    ];
    Protocol { setup: Setup::new(rules, hosts), possible: vec![Possible::Replay] }
}

/// A writer with checkpoints, a host that takes over, and two collectors.
pub(crate) fn collection(rules: Rules, more: u8) -> Protocol {
    let hosts =
        vec![Role { checkpoints: 2, ..writer(&writes(3)) }, Role { tries: 1, ..taker(&[Write]) }];
    let collectors = vec![
        CollectorRole { collects: Collects::ExtentsAndHeads, rounds: 1 + more },
        CollectorRole { collects: Collects::Extents, rounds: 1 },
    ];
    let setup = Setup { collectors, faults: more, ..Setup::new(rules, hosts) };
    Protocol { setup, possible: vec![Possible::TakeOver, Possible::Freed] }
}

/// As [`collection`], with one collector and a put that is late or whose answer is lost.
pub(crate) fn late_collection(rules: Rules, more: u8) -> Protocol {
    let hosts =
        vec![Role { checkpoints: 1, ..writer(&writes(3)) }, Role { tries: 1, ..taker(&[Write]) }];
    let collectors = vec![CollectorRole { collects: Collects::ExtentsAndHeads, rounds: 2 + more }];
    let setup = Setup { collectors, faults: 1, ..Setup::new(rules, hosts) };
    Protocol { setup, possible: vec![Possible::TakeOver, Possible::Freed] }
}

/// Old heads are collected while hosts that read them are slow.
pub(crate) fn old_heads(rules: Rules, more: u8) -> Protocol {
    let hosts = vec![
        Role { checkpoints: more, ..writer(&writes(1)) },
        Role { checkpoints: 1, end: End::Close, ..taker(&[Write]) },
        taker(&[Write]),
    ];
    let collectors = vec![CollectorRole { collects: Collects::Heads, rounds: 2 }];
    let setup = Setup { collectors, faults: 1, ..Setup::new(rules, hosts) };
    Protocol { setup, possible: vec![Possible::TakeOver] }
}

/// Snapshots are taken and dropped while a collector runs.
pub(crate) fn snapshots(rules: Rules, more: u8) -> Protocol {
    let builds = [Write, TakeSnapshot, Write, DropSnapshot, Write];
    let faults = more;
    let hosts = vec![Role { checkpoints: 2, ..writer(&builds) }, taker(&[Write])];
    let collectors = vec![CollectorRole { collects: Collects::Extents, rounds: 2 }];
    let setup = Setup { collectors, faults, ..Setup::new(rules, hosts) };
    Protocol { setup, possible: vec![Possible::TakeOver, Possible::Freed] }
}

/// An open volume is deleted, its name is used again, and a host that knew it takes over, while a
/// collector runs.
pub(crate) fn name_used_again(rules: Rules, more: u8) -> Protocol {
    let hosts = vec![
        Role { checkpoints: 1, ..writer(&writes(2)) },
        Role { goal: Goal::Delete, ..taker(&[]) },
        Role { goal: Goal::Create, tries: 1, ..taker(&[Write]) },
        taker(&[Write]),
    ];
    let collectors = vec![CollectorRole { collects: Collects::ExtentsAndHeads, rounds: 1 + more }];
    let setup = Setup { collectors, faults: more, ..Setup::new(rules, hosts) };
    Protocol { setup, possible: vec![Possible::Reuse, Possible::TakeOver, Possible::Freed] }
}

/// A volume with a snapshot, which its writer drops, is cloned, and the clone is cloned and
/// deleted, while a collector runs.
pub(crate) fn clones(rules: Rules, more: u8) -> Protocol {
    let hosts = vec![
        Role { checkpoints: 1, window: 1, ..writer(&[DropSnapshot]) },
        Role { goal: Goal::Clone(0), volume: 1, ..taker(&[]) },
        Role { goal: Goal::Clone(1), volume: 2, ..taker(&[]) },
        Role { goal: Goal::Delete, volume: 1, ..taker(&[]) },
    ];
    let collectors = vec![CollectorRole { collects: Collects::Extents, rounds: 1 }];
    let base = Setup::new(rules, hosts);
    let setup = Setup { collectors, volumes: 3, has_snapshot: true, faults: more, ..base };
    Protocol { setup, possible: vec![Possible::Clone, Possible::NoClone, Possible::Freed] }
}

/// As [`clones`], with collectors that read the newest volume first.
pub(crate) fn clones_backwards(rules: Rules, more: u8) -> Protocol {
    let protocol = clones(rules, more);
    let setup = Setup { is_read_backwards: true, ..protocol.setup };
    Protocol { setup, ..protocol }
}

/// Hosts claim numbers while claims are collected, by two collectors.
pub(crate) fn claims(rules: Rules, more: u8) -> Protocol {
    let hosts = vec![Role { goal: Goal::Claim, ..taker(&[]) }; 2 + usize::from(more)];
    let collectors = vec![
        CollectorRole { collects: Collects::Claims, rounds: 1 },
        CollectorRole { collects: Collects::Claims, rounds: 1 },
    ];
    let base = Setup::new(rules, hosts);
    let setup = Setup { collectors, faults: 1, is_open: false, ..base };
    Protocol { setup, possible: vec![Possible::ClaimAboveBoundary] }
}

fn writes(count: u8) -> Vec<Build> {
    vec![Write; usize::from(count)]
}

/// Host 0, which has volume 0 open.
fn writer(builds: &[Build]) -> Role {
    Role {
        goal: Goal::Open,
        volume: 0,
        force: false,
        builds: builds.to_vec(),
        window: 2,
        checkpoints: 0,
        end: End::Never,
        tries: 0,
        log_of: None,
    }
}

/// A host that opens volume 0, whoever has it.
fn taker(builds: &[Build]) -> Role {
    Role { force: true, ..writer(builds) }
}

impl Setup {
    fn new(rules: Rules, hosts: Vec<Role>) -> Self {
        Self {
            rules,
            hosts,
            collectors: Vec::new(),
            volumes: 1,
            faults: 0,
            is_open: true,
            has_snapshot: false,
            has_two_blocks: false,
            is_read_backwards: false,
        }
    }
}
