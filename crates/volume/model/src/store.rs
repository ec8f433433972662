//! The store of objects, and what is put into it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Number of a host, which is also the number of its session: each has at most one.
pub(crate) type HostId = u8;
/// Number of a volume's name.
pub(crate) type Volume = u8;
/// A writer number. At most [`NAMES`] - 1, like a sequence.
pub(crate) type Writer = u8;
/// The sequence of an extent, from 1.
pub(crate) type Sequence = u8;

/// Writer numbers and sequences in the model.
pub(crate) const NAMES: u8 = 8;

/// One write of a guest: the session that accepted it, and its index there from 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Record(u8);

impl Record {
    pub(crate) fn new(session: HostId, index: u8) -> Self {
        assert!(session < 16 && (1..16).contains(&index), "the model is bounded");
        Self(session << 4 | index)
    }

    pub(crate) fn session(self) -> HostId {
        self.0 >> 4
    }

    pub(crate) fn index(self) -> u8 {
        self.0 & 15
    }
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.session(), self.index())
    }
}

/// The writes that a state of a volume has, in order. No real object has it: it is what the
/// properties speak of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct History {
    records: [Record; 8],
    len: u8,
}

impl History {
    pub(crate) fn with(mut self, record: Record) -> Self {
        self.records[usize::from(self.len)] = record;
        self.len += 1;
        self
    }

    pub(crate) fn records(&self) -> &[Record] {
        &self.records[..usize::from(self.len)]
    }

    pub(crate) fn starts_with(&self, other: &Self) -> bool {
        self.records().starts_with(other.records())
    }

    /// Index of the last record of `session`, 0 if it has none.
    pub(crate) fn last_of(&self, session: HostId) -> u8 {
        let of_it = self.records().iter().filter(|record| record.session() == session);
        of_it.map(|record| record.index()).max().unwrap_or(0)
    }
}

impl fmt::Debug for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.records())
    }
}

/// Where something is. The record stands for the sum that a pointer carries.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Place {
    pub(crate) writer: Writer,
    pub(crate) sequence: Sequence,
    pub(crate) record: Record,
}

/// A kept root.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Snapshot {
    pub(crate) place: Place,
    pub(crate) history: History,
}

/// A state of a volume. The guest's disk has one block, so that each write makes the extent before
/// it garbage unless a snapshot names it, or two blocks that are written in turn.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub(crate) struct State {
    pub(crate) history: History,
    pub(crate) live: Option<Place>,
    /// The block that was not written last, if there are two.
    pub(crate) other: Option<Place>,
    pub(crate) snapshot: Option<Snapshot>,
}

impl State {
    /// Everything that the state names.
    pub(crate) fn places(&self) -> impl Iterator<Item = Place> {
        let snapshot = self.snapshot.map(|snapshot| snapshot.place);
        self.live.into_iter().chain(self.other).chain(snapshot)
    }
}

/// What a head says of its volume.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Kind {
    /// It has a writer, whose extents above `sequence` count, too.
    Open {
        writer: Writer,
        sequence: Sequence,
    },
    Closed,
    /// Closed, and meant for a host.
    HandedTo(HostId),
    /// A clone that nobody may open or clone yet.
    Pinned,
    Deleted,
}

/// A head record.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Head {
    pub(crate) kind: Kind,
    /// The volume's identity: a name that is used again has another.
    pub(crate) identity: u8,
    /// What the volume began with: nothing, or what it is a clone of.
    pub(crate) origin: History,
    pub(crate) state: State,
    /// Who put it: the nonce by which a host knows its own.
    pub(crate) by: HostId,
}

/// What is at the name of an extent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Body {
    Extent { record: Record, state: State },
    Fence,
}

/// An object with its name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Put {
    Head(Volume, u8, Head),
    Extent(Writer, Sequence, Body),
    Claim(Writer, HostId),
    Boundary(Writer),
}

/// What became of a put.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    Done,
    /// Refused, and what is there is what was to be put.
    Own,
    /// Refused, and something else is there.
    Other,
}

/// The objects.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Store {
    pub(crate) heads: BTreeMap<(Volume, u8), Head>,
    pub(crate) extents: BTreeMap<(Writer, Sequence), Body>,
    pub(crate) claims: BTreeMap<Writer, HostId>,
    pub(crate) boundaries: BTreeSet<Writer>,
    /// Heads that were put when there was a higher one. Nobody knows which these are.
    pub(crate) strays: BTreeSet<(Volume, u8)>,
}

impl Store {
    /// Put if absent. A refused put is answered with what is there: objects do not change, so that
    /// reading it a step later could only find it deleted, which sends every reader back to the
    /// head.
    pub(crate) fn put(&mut self, put: Put) -> Outcome {
        match put {
            Put::Head(volume, n, head) => {
                let is_stray = self.highest(volume).is_some_and(|(highest, _)| highest > n);
                let outcome = put_if_absent(&mut self.heads, (volume, n), head);
                if is_stray && outcome == Outcome::Done {
                    self.strays.insert((volume, n));
                }
                outcome
            }
            Put::Extent(writer, sequence, body) => {
                put_if_absent(&mut self.extents, (writer, sequence), body)
            }
            Put::Claim(writer, host) => put_if_absent(&mut self.claims, writer, host),
            Put::Boundary(writer) if self.boundaries.insert(writer) => Outcome::Done,
            Put::Boundary(_) => Outcome::Own,
        }
    }

    /// The highest head of a volume: a listing, and a read.
    pub(crate) fn highest(&self, volume: Volume) -> Option<(u8, Head)> {
        let mut heads = self.heads.range((volume, 0)..=(volume, u8::MAX));
        heads.next_back().map(|(&(_, n), &head)| (n, head))
    }

    /// Writer numbers below it are void.
    pub(crate) fn boundary(&self) -> Writer {
        self.boundaries.last().copied().unwrap_or(0)
    }

    pub(crate) fn extent(&self, writer: Writer, sequence: Sequence) -> Option<(Record, State)> {
        match self.extents.get(&(writer, sequence)) {
            Some(&Body::Extent { record, state }) => Some((record, state)),
            Some(Body::Fence) | None => None,
        }
    }

    /// The last state that counts under `head`, and its sequence: extents up to the first gap.
    pub(crate) fn walk(&self, head: &Head) -> (State, Sequence) {
        let Kind::Open { writer, mut sequence } = head.kind else { return (head.state, 0) };
        let mut state = head.state;
        while let Some((_, next)) = self.extent(writer, sequence + 1) {
            (state, sequence) = (next, sequence + 1);
        }
        (state, sequence)
    }

    /// What a host would find that opened the volume now.
    pub(crate) fn recovered(&self, volume: Volume) -> Option<(Head, State)> {
        self.highest(volume).map(|(_, head)| (head, self.walk(&head).0))
    }
}

fn put_if_absent<K: Ord, V: PartialEq>(
    objects: &mut BTreeMap<K, V>,
    name: K,
    content: V,
) -> Outcome {
    match objects.get(&name) {
        None => {
            objects.insert(name, content);
            Outcome::Done
        }
        Some(there) if *there == content => Outcome::Own,
        Some(_) => Outcome::Other,
    }
}
