//! The world: the store, requests that are still under way, hosts and collectors; and what is fixed
//! of each in a run of the checker.

use crate::rules::Rules;
use crate::store::{
    Body, Head, History, HostId, Kind, Outcome, Place, Put, Record, Sequence, Snapshot, State,
    Store, Volume, Writer,
};

/// What a host wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Goal {
    Open,
    Create,
    Delete,
    /// To clone the snapshot of this volume.
    Clone(Volume),
    /// A writer number only.
    Claim,
}

/// What a record does besides writing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Build {
    Write,
    TakeSnapshot,
    DropSnapshot,
}

/// How a session ends, if it does not go on for ever.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    Never,
    Close,
    HandTo(HostId),
}

/// What a host does, at most.
#[derive(Clone, Debug)]
pub(crate) struct Role {
    pub(crate) goal: Goal,
    pub(crate) volume: Volume,
    /// Whether it takes a volume away from a writer that may be alive.
    pub(crate) force: bool,
    pub(crate) builds: Vec<Build>,
    /// Extents under way at once, at most.
    pub(crate) window: usize,
    pub(crate) checkpoints: u8,
    pub(crate) end: End,
    /// How often it reads again after it lost.
    pub(crate) tries: u8,
    /// It is started on the machine of this host, whose process is gone, and has its log.
    pub(crate) log_of: Option<HostId>,
}

/// What a collector collects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Collects {
    Extents,
    ExtentsAndHeads,
    Heads,
    Claims,
}

/// What a collector does, at most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CollectorRole {
    pub(crate) collects: Collects,
    pub(crate) rounds: u8,
}

/// What is fixed in a run.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) rules: Rules,
    pub(crate) hosts: Vec<Role>,
    pub(crate) collectors: Vec<CollectorRole>,
    pub(crate) volumes: u8,
    /// Puts whose answer is lost or that arrive late, at most.
    pub(crate) faults: u8,
    /// Whether host 0 begins with volume 0 open.
    pub(crate) is_open: bool,
    /// Whether volume 0 begins with two extents, and a snapshot that has the first.
    pub(crate) has_snapshot: bool,
    /// Whether the guest's disk has two blocks instead of one.
    pub(crate) has_two_blocks: bool,
    /// Whether collectors read the heads of volumes beginning with the last.
    pub(crate) is_read_backwards: bool,
}

/// A session: what a writer has in memory.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Session {
    /// Number of its last head, and the head.
    pub(crate) n: u8,
    pub(crate) head: Head,
    pub(crate) durable: State,
    pub(crate) durable_sequence: Sequence,
    /// Extents after `durable`: content, state, and whether the put was answered.
    pub(crate) recent: Vec<(Record, State, bool)>,
    /// Records replayed from a log, which precede its own.
    pub(crate) replayed: u8,
    /// A head that it is putting beside its extents.
    pub(crate) head_put: Option<(u8, Head)>,
    pub(crate) checkpoints: u8,
}

impl Session {
    pub(crate) fn last_state(&self) -> State {
        self.recent.last().map_or(self.durable, |&(_, state, _)| state)
    }

    pub(crate) fn last_sequence(&self) -> Sequence {
        // The model is bounded: a handful.
        self.durable_sequence + u8::try_from(self.recent.len()).expect("few")
    }
}

/// What a host is about to do.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Phase {
    /// Not started yet: it is not before the process whose log it has is gone.
    Waiting,
    ListClaims,
    PutClaim(Writer),
    LookUpClaim(Writer),
    ReadSource,
    ReadHead,
    /// Looks for the end of the old writer's extents, and puts the fence there.
    Walk {
        n: u8,
        head: Head,
        writer: Writer,
        at: Sequence,
        state: State,
    },
    PutHead {
        n: u8,
        head: Head,
        has_extent: bool,
    },
    LookUpHead {
        n: u8,
        head: Head,
        has_extent: bool,
    },
    /// Only without [`Rule::FenceBeforeHead`](crate::rules::Rule::FenceBeforeHead).
    FenceLate {
        n: u8,
        head: Head,
        writer: Writer,
        at: Sequence,
    },
    LookBack {
        n: u8,
        head: Head,
    },
    Active(Session),
    Over(Ending),
}

/// How it ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Ending {
    Claimed,
    Lost,
    Fenced,
    Closed,
    Deleted,
    Cloned,
    NotCloned,
    Gone,
}

/// A local log: records of `session`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Log {
    pub(crate) session: HostId,
    /// The writer numbers that it names, as bits.
    pub(crate) writers: u8,
    /// Records up to this one are no longer in it.
    pub(crate) freed: u8,
    pub(crate) last: u8,
}

impl Log {
    pub(crate) fn names(&self, writer: Writer) -> bool {
        self.writers >> writer & 1 == 1
    }
}

/// A host, or rather one process on it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Host {
    pub(crate) phase: Phase,
    pub(crate) tries: u8,
    pub(crate) writer: Option<Writer>,
    /// Whom it took the volume over from: the writer of the head before its own.
    pub(crate) over: Option<Writer>,
    pub(crate) was_handed: bool,
    /// The volume's identity, and what it acknowledged as durable in the store.
    pub(crate) acknowledged: Option<(u8, History)>,
    pub(crate) log: Option<Log>,
    /// It set a log aside after whose writer there was no other: what must not happen.
    pub(crate) has_lost_log: bool,
    /// Records that its log has no longer, for who gets the log.
    pub(crate) freed: u8,
    /// For a clone: identity of the source, and the snapshot.
    pub(crate) source: Option<(u8, Snapshot)>,
}

/// What a collector is about to do. Names of extents are bits: `writer * NAMES + sequence`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum CollectorPhase {
    Idle,
    /// Reads heads, one volume after the other.
    ReadHeads {
        listed: u64,
        pass: Pass,
        before: Option<Pass>,
    },
    /// Only without [`Rule::ListBeforeHeads`](crate::rules::Rule::ListBeforeHeads).
    ListLate {
        pass: Pass,
    },
    Sweep {
        dead: u64,
        heads: Vec<(Volume, u8)>,
    },
    PutBoundary(Writer),
    SweepClaims(Writer),
}

/// What a pass over the heads has found: of each volume the number of the highest and the identity,
/// both 0 if there is none, and names of extents to keep.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Pass {
    pub(crate) numbers: Vec<u8>,
    pub(crate) identities: Vec<u8>,
    pub(crate) keep: u64,
}

/// A collector.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Collector {
    pub(crate) phase: CollectorPhase,
    pub(crate) rounds: u8,
    pub(crate) has_freed: bool,
}

/// A state of the model.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct World {
    pub(crate) store: Store,
    /// Requests that no process waits for any longer, and that may arrive at any time.
    pub(crate) late: Vec<Put>,
    pub(crate) faults: u8,
    pub(crate) hosts: Vec<Host>,
    pub(crate) collectors: Vec<Collector>,
}

/// How a put comes back to who sent it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Delivery {
    Answered,
    /// Done or refused in the store, but nobody is told.
    AnswerLost,
    /// It is still under way when its sender gives up waiting.
    Late,
}

impl World {
    /// The first state.
    pub(crate) fn new(setup: &Setup) -> Self {
        let hosts = setup.hosts.iter().map(|role| Host::new(setup, role)).collect();
        let collectors = setup.collectors.iter().map(|role| Collector {
            phase: CollectorPhase::Idle,
            rounds: role.rounds,
            has_freed: false,
        });
        let collectors = collectors.collect();
        let store = Store::default();
        let mut world = Self { store, late: Vec::new(), faults: setup.faults, hosts, collectors };
        if setup.is_open {
            world.open_first(setup);
        }
        world
    }

    /// Host 0 has volume 0 open, as writer 1.
    fn open_first(&mut self, setup: &Setup) {
        let (mut state, mut sequence) = (State::default(), 0);
        if setup.has_snapshot {
            for build in [Build::Write, Build::TakeSnapshot] {
                sequence += 1;
                let record = Record::new(0, sequence);
                state = setup.state_after(state, build, 1, sequence, record);
                self.store.put(Put::Extent(1, sequence, Body::Extent { record, state }));
            }
        }
        let kind = Kind::Open { writer: 1, sequence };
        let head = Head { kind, identity: 0, origin: History::default(), state, by: 0 };
        self.store.put(Put::Head(0, 1, head));
        let host = &mut self.hosts[0];
        host.writer = Some(1);
        host.acknowledged = Some((0, state.history));
        host.freed = sequence;
        host.phase = Phase::Active(Session {
            n: 1,
            head,
            durable: state,
            durable_sequence: sequence,
            recent: Vec::new(),
            replayed: 0,
            head_put: None,
            checkpoints: 0,
        });
    }

    /// Sends `put`. `None` if its sender learns nothing.
    pub(crate) fn send(&mut self, put: Put, delivery: Delivery) -> Option<Outcome> {
        match delivery {
            Delivery::Answered => Some(self.store.put(put)),
            Delivery::AnswerLost => {
                self.faults -= 1;
                self.store.put(put);
                None
            }
            Delivery::Late => {
                self.faults -= 1;
                self.linger(put);
                None
            }
        }
    }

    /// Leaves `put` under way.
    pub(crate) fn linger(&mut self, put: Put) {
        let at = self.late.partition_point(|other| *other < put);
        self.late.insert(at, put);
    }

    /// The ways in which a put may be delivered now.
    pub(crate) fn deliveries(&self) -> &'static [Delivery] {
        const ALL: &[Delivery] = &[Delivery::Answered, Delivery::AnswerLost, Delivery::Late];
        if self.faults > 0 { ALL } else { &ALL[..1] }
    }
}

impl Host {
    /// The log that the process leaves on its machine, if it has one.
    pub(crate) fn log_left(&self, id: HostId) -> Option<Log> {
        let Phase::Active(session) = &self.phase else { return self.log };
        let first = Log {
            session: id,
            writers: 1 << self.writer?,
            freed: self.freed,
            last: session.last_sequence(),
        };
        let log = self.log.unwrap_or(first);
        let freed = log.freed.max(session.durable.history.last_of(log.session));
        Some(if self.log.is_some() { Log { freed, ..log } } else { log })
    }

    fn new(setup: &Setup, role: &Role) -> Self {
        let mut host = Self {
            phase: Phase::ReadHead,
            tries: role.tries,
            writer: None,
            over: None,
            was_handed: false,
            acknowledged: None,
            log: None,
            has_lost_log: false,
            freed: 0,
            source: None,
        };
        host.phase = match role.goal {
            Goal::Claim => Phase::ListClaims,
            Goal::Clone(_) => Phase::ReadSource,
            _ if role.log_of.is_some() => Phase::Waiting,
            Goal::Open | Goal::Create | Goal::Delete => Phase::ReadHead,
        };
        debug_assert!(setup.volumes <= 3);
        host
    }
}

impl Setup {
    /// The state after one more record, in extent `sequence` of `writer`.
    pub(crate) fn state_after(
        &self,
        before: State,
        build: Build,
        writer: Writer,
        sequence: Sequence,
        record: Record,
    ) -> State {
        let snapshot = match build {
            Build::Write => before.snapshot,
            Build::TakeSnapshot => {
                before.live.map(|place| Snapshot { place, history: before.history })
            }
            Build::DropSnapshot => None,
        };
        let live = Some(Place { writer, sequence, record });
        let other = before.live.filter(|_| self.has_two_blocks);
        State { history: before.history.with(record), live, other, snapshot }
    }

    /// The volume whose head a collector reads as number `at`, and the other way round.
    pub(crate) fn read_at(&self, at: u8) -> Volume {
        if self.is_read_backwards { self.volumes - 1 - at } else { at }
    }
}
