//! Claiming, opening, taking over, creating, deleting and cloning: what puts heads and fences.

use crate::rules::Rule;
use crate::store::{
    Body, Head, HostId, Kind, Outcome, Put, Record, Sequence, State, Volume, Writer,
};
use crate::world::{Build, Delivery, Ending, Goal, Host, Log, Phase, Role, Session, Setup, World};

/// The next step of host `id`, if its phase is one of those here. `None` if nothing happens: it
/// waits, or has nothing left to do.
pub(crate) fn step(setup: &Setup, world: &mut World, id: HostId, delivery: Delivery) -> Option<()> {
    let mut run = Run { setup, world, id, delivery };
    match run.host().phase.clone() {
        Phase::Waiting | Phase::Active(_) | Phase::Over(_) => return None,
        Phase::ListClaims => run.list_claims(),
        Phase::PutClaim(writer) => run.put_claim(writer),
        Phase::LookUpClaim(writer) => run.look_up_claim(writer),
        Phase::ReadSource => run.read_source()?,
        Phase::ReadHead => run.read_head()?,
        Phase::Walk { n, head, writer, at, state } => run.walk(n, head, writer, at, state)?,
        Phase::PutHead { n, head, has_extent } => run.put_head(n, head, has_extent),
        Phase::LookUpHead { n, head, has_extent } => run.look_up_head(n, head, has_extent),
        Phase::FenceLate { n, head, writer, at } => run.fence_late(n, head, writer, at),
        Phase::LookBack { n, head } => run.look_back(n, head),
    }
    Some(())
}

/// Whether the next step of a host in `phase` is a put, whose answer may be lost.
pub(crate) fn is_put(phase: &Phase) -> bool {
    use Phase::{FenceLate, PutClaim, PutHead, Walk};
    matches!(phase, PutClaim(_) | PutHead { .. } | Walk { .. } | FenceLate { .. })
}

/// Starts host `id` on the machine of the host whose log it gets, whose process is gone.
pub(crate) fn restart(setup: &Setup, world: &mut World, id: HostId) -> Option<()> {
    let of = setup.hosts[usize::from(id)].log_of?;
    if world.hosts[usize::from(id)].phase != Phase::Waiting {
        return None;
    }
    let dead = &mut world.hosts[usize::from(of)];
    let log = dead.log_left(of)?;
    let writer = dead.writer?;
    let phase = std::mem::replace(&mut dead.phase, Phase::Over(Ending::Gone));
    leave_puts(world, setup.hosts[usize::from(of)].volume, writer, &phase);
    let host = &mut world.hosts[usize::from(id)];
    host.log = Some(log);
    host.phase = Phase::ReadHead;
    Some(())
}

/// What a process that is gone had under way may still arrive.
fn leave_puts(world: &mut World, volume: Volume, own: Writer, phase: &Phase) {
    match phase {
        Phase::Active(session) => {
            for (at, &(record, state, is_answered)) in (1..).zip(&session.recent) {
                if !is_answered {
                    let body = Body::Extent { record, state };
                    world.linger(Put::Extent(own, session.durable_sequence + at, body));
                }
            }
            if let Some((n, head)) = session.head_put {
                world.linger(Put::Head(volume, n, head));
            }
        }
        &Phase::PutHead { n, head, .. } => world.linger(Put::Head(volume, n, head)),
        &Phase::Walk { writer, at, .. } => world.linger(Put::Extent(writer, at, Body::Fence)),
        _ => {}
    }
}

/// Without [`Rule::HeadBeforeExtents`], a host puts its first extent while its head is not won.
pub(crate) fn early_extent(setup: &Setup, world: &mut World, id: HostId) -> Option<()> {
    let role = &setup.hosts[usize::from(id)];
    let Phase::PutHead { head, has_extent, .. } = &mut world.hosts[usize::from(id)].phase else {
        return None;
    };
    let Kind::Open { writer, .. } = head.kind else { return None };
    if setup.rules.hold(Rule::HeadBeforeExtents) || *has_extent || role.builds.is_empty() {
        return None;
    }
    *has_extent = true;
    let (record, state) = first_extent(setup, id, head.state, writer);
    world.store.put(Put::Extent(writer, 1, Body::Extent { record, state }));
    Some(())
}

fn first_extent(setup: &Setup, id: HostId, state: State, writer: Writer) -> (Record, State) {
    let role = &setup.hosts[usize::from(id)];
    let record = Record::new(id, 1);
    (record, setup.state_after(state, role.builds[0], writer, 1, record))
}

struct Run<'a> {
    setup: &'a Setup,
    world: &'a mut World,
    id: HostId,
    delivery: Delivery,
}

impl Run<'_> {
    fn host(&mut self) -> &mut Host {
        &mut self.world.hosts[usize::from(self.id)]
    }

    fn role(&self) -> &Role {
        &self.setup.hosts[usize::from(self.id)]
    }

    fn holds(&self, rule: Rule) -> bool {
        self.setup.rules.hold(rule)
    }

    fn list_claims(&mut self) {
        let store = &self.world.store;
        let after_last = store.claims.keys().next_back().map_or(1, |last| last + 1);
        let next = after_last.max(store.boundary());
        self.host().phase = Phase::PutClaim(next);
    }

    fn put_claim(&mut self, writer: Writer) {
        let id = self.id;
        match self.world.send(Put::Claim(writer, id), self.delivery) {
            None => {}
            Some(Outcome::Other) => self.host().phase = Phase::ListClaims,
            Some(_) if self.holds(Rule::ClaimLooksUp) => {
                self.host().phase = Phase::LookUpClaim(writer);
            }
            Some(_) => self.claimed(writer),
        }
    }

    fn look_up_claim(&mut self, writer: Writer) {
        if writer < self.world.store.boundary() {
            self.host().phase = Phase::ListClaims;
        } else {
            self.claimed(writer);
        }
    }

    fn claimed(&mut self, writer: Writer) {
        let host = self.host();
        host.writer = Some(writer);
        host.phase = Phase::Over(Ending::Claimed);
    }

    /// A clone is made of a snapshot that the source's head has.
    fn read_source(&mut self) -> Option<()> {
        let Goal::Clone(source) = self.role().goal else { return None };
        let (_, head) = self.world.store.highest(source)?;
        if matches!(head.kind, Kind::Pinned | Kind::Deleted) {
            return None;
        }
        let snapshot = head.state.snapshot?;
        let host = self.host();
        host.source = Some((head.identity, snapshot));
        host.phase = Phase::ReadHead;
        Some(())
    }

    fn read_head(&mut self) -> Option<()> {
        let found = self.world.store.highest(self.role().volume);
        let id = self.id;
        // Claiming numbers is checked by itself.
        self.host().writer.get_or_insert(id + 1);
        match (self.role().goal, found) {
            (Goal::Open, Some((n, head))) => self.read_to_open(n, head),
            (Goal::Delete, Some((n, head))) => self.read_to_delete(n, head),
            (Goal::Create | Goal::Clone(_), None) => self.begin(0),
            (Goal::Create | Goal::Clone(_), Some((n, head))) if head.kind == Kind::Deleted => {
                self.begin(n)
            }
            _ => None,
        }
    }

    fn read_to_open(&mut self, n: u8, head: Head) -> Option<()> {
        let id = self.id;
        let force = self.role().force;
        self.host().over = None;
        self.host().was_handed = matches!(head.kind, Kind::HandedTo(_));
        match head.kind {
            Kind::Closed => self.open_after(n, head, head.state),
            Kind::HandedTo(host) if host == id || force => self.open_after(n, head, head.state),
            Kind::Open { writer, sequence } if force => {
                self.host().over = Some(writer);
                let (at, state) = (sequence + 1, head.state);
                self.host().phase = Phase::Walk { n, head, writer, at, state };
            }
            _ => return None,
        }
        Some(())
    }

    fn read_to_delete(&mut self, n: u8, head: Head) -> Option<()> {
        match head.kind {
            Kind::Deleted => return None,
            Kind::Open { writer, sequence } => {
                if !self.role().force {
                    return None;
                }
                if self.holds(Rule::DeleteFences) {
                    let (at, state) = (sequence + 1, head.state);
                    self.host().phase = Phase::Walk { n, head, writer, at, state };
                } else {
                    let state = self.world.store.walk(&head).0;
                    self.put_next(n, Head { kind: Kind::Deleted, state, ..head });
                }
            }
            _ => self.put_next(n, Head { kind: Kind::Deleted, ..head }),
        }
        Some(())
    }

    /// Begins a volume under a name that is free: `n` is its tombstone, or 0.
    fn begin(&mut self, n: u8) -> Option<()> {
        let kind = match self.role().goal {
            Goal::Clone(_) if self.holds(Rule::ClonePins) => Kind::Pinned,
            Goal::Clone(_) => Kind::Closed,
            _ => Kind::Open { writer: self.host().writer?, sequence: 0 },
        };
        let mut state = State::default();
        if let Some((_, snapshot)) = self.host().source {
            let (history, live) = (snapshot.history, Some(snapshot.place));
            state = State { history, live, other: None, snapshot: Some(snapshot) };
        }
        let (origin, identity) = (state.history, self.id + 1);
        self.put_next(n, Head { kind, identity, origin, state, by: self.id });
        Some(())
    }

    /// Opens after `head`, which is number `n`, beginning with `state`.
    fn open_after(&mut self, n: u8, head: Head, state: State) {
        let writer = self.host().writer.expect("has a number before it reads");
        self.decide_on_log(writer);
        self.put_next(n, Head { kind: Kind::Open { writer, sequence: 0 }, state, ..head });
    }

    /// The log goes on under number `writer` too, or is set aside, before a head says so.
    fn decide_on_log(&mut self, writer: Writer) {
        let over = self.host().over;
        let Some(log) = self.host().log else { return };
        if over.is_some_and(|over| log.names(over)) {
            if self.holds(Rule::LogNamesNext) {
                self.name_in_log(writer);
            }
        } else if self.holds(Rule::LogAfterItsWriter) && self.holds(Rule::LogSetAside) {
            self.host().log = None;
            let is_loss = over.is_some_and(|over| self.is_of_machine(over));
            self.host().has_lost_log |= is_loss;
        }
    }

    /// Whether `writer` was a process on this machine.
    fn is_of_machine(&self, writer: Writer) -> bool {
        let before = |id: &HostId| self.setup.hosts[usize::from(*id)].log_of;
        let mut processes = std::iter::successors(before(&self.id), before);
        processes.any(|id| self.world.hosts[usize::from(id)].writer == Some(writer))
    }

    /// Makes the log, if there is one, durably name `writer` as its own.
    fn name_in_log(&mut self, writer: Writer) {
        if let Some(log) = &mut self.host().log {
            log.writers |= 1 << writer;
        }
    }

    /// The head after number `n` will be `head`.
    fn put_next(&mut self, n: u8, head: Head) {
        let head = Head { by: self.id, ..head };
        self.host().phase = Phase::PutHead { n: n + 1, head, has_extent: false };
    }

    fn walk(
        &mut self,
        n: u8,
        head: Head,
        writer: Writer,
        mut at: Sequence,
        mut state: State,
    ) -> Option<()> {
        if !self.holds(Rule::StopAtGap) {
            let last = self.world.store.extents.range((writer, at)..=(writer, u8::MAX));
            let mut extents = last.filter(|(_, body)| **body != Body::Fence);
            if let Some((&(_, sequence), &Body::Extent { state: last, .. })) = extents.next_back() {
                (at, state) = (sequence + 1, last);
            }
        }
        let fences = self.holds(Rule::Fence) && self.holds(Rule::FenceBeforeHead);
        let outcome = match self.world.store.extents.get(&(writer, at)) {
            _ if fences => {
                let fence = Put::Extent(writer, at, Body::Fence);
                // Without an answer, the fence is put again.
                let Some(outcome) = self.world.send(fence, self.delivery) else { return Some(()) };
                outcome
            }
            Some(Body::Extent { .. }) => Outcome::Other,
            Some(Body::Fence) | None => Outcome::Done,
        };
        if outcome != Outcome::Other {
            match self.role().goal {
                Goal::Delete => self.put_next(n, Head { kind: Kind::Deleted, state, ..head }),
                _ => self.open_after(n, head, state),
            }
        } else {
            let (_, state) = self.world.store.extent(writer, at)?;
            self.host().phase = Phase::Walk { n, head, writer, at: at + 1, state };
        }
        Some(())
    }

    fn put_head(&mut self, n: u8, head: Head, has_extent: bool) {
        let put = Put::Head(self.role().volume, n, head);
        match self.world.send(put, self.delivery) {
            None => {}
            Some(Outcome::Other) if self.holds(Rule::LoserReadsAgain) => self.lost(head),
            Some(_) if self.holds(Rule::HeadLooksUp) => {
                self.host().phase = Phase::LookUpHead { n, head, has_extent };
            }
            Some(_) => self.won(n, head, has_extent),
        }
    }

    fn look_up_head(&mut self, n: u8, head: Head, has_extent: bool) {
        let is_highest = self.world.store.highest(self.role().volume);
        match is_highest {
            Some((highest, _)) if highest == n => self.won(n, head, has_extent),
            _ if !self.holds(Rule::LoserReadsAgain) => self.won(n, head, has_extent),
            _ => self.lost(head),
        }
    }

    fn lost(&mut self, head: Head) {
        let is_session_over =
            self.role().goal == Goal::Open && matches!(head.kind, Kind::Closed | Kind::HandedTo(_));
        let host = self.host();
        if is_session_over {
            host.phase = Phase::Over(Ending::Fenced);
        } else if host.tries > 0 {
            host.tries -= 1;
            host.phase = Phase::ReadHead;
        } else {
            host.phase = Phase::Over(Ending::Lost);
        }
    }

    fn won(&mut self, n: u8, head: Head, has_extent: bool) {
        let goal = self.role().goal;
        let over = self.host().over;
        self.host().phase = match (head.kind, goal) {
            (Kind::Open { .. }, _) if !self.holds(Rule::FenceBeforeHead) && over.is_some() => {
                let at = 1;
                Phase::FenceLate { n, head, writer: over.expect("is some"), at }
            }
            (Kind::Open { .. }, _) => return self.begin_session(n, head, has_extent),
            (Kind::Pinned, _) => Phase::LookBack { n, head },
            (Kind::Closed, Goal::Clone(_))
                if !self.holds(Rule::ClonePins) && head.by == self.id =>
            {
                Phase::LookBack { n, head }
            }
            (Kind::Closed, Goal::Clone(_)) => return self.cloned(head),
            (Kind::Deleted, Goal::Clone(_)) => Phase::Over(Ending::NotCloned),
            (Kind::Deleted, _) => Phase::Over(Ending::Deleted),
            (Kind::Closed | Kind::HandedTo(_), _) => Phase::Over(Ending::Closed),
        };
    }

    fn fence_late(&mut self, n: u8, head: Head, writer: Writer, at: Sequence) {
        match self.world.send(Put::Extent(writer, at, Body::Fence), self.delivery) {
            None => {}
            Some(Outcome::Other) => {
                self.host().phase = Phase::FenceLate { n, head, writer, at: at + 1 };
            }
            Some(_) => self.begin_session(n, head, false),
        }
    }

    /// The volume is open. What only the log has is destaged first.
    fn begin_session(&mut self, n: u8, head: Head, has_extent: bool) {
        let Kind::Open { writer, .. } = head.kind else { return };
        let mut session = Session {
            n,
            head,
            durable: head.state,
            durable_sequence: 0,
            recent: Vec::new(),
            replayed: 0,
            head_put: None,
            checkpoints: 0,
        };
        if has_extent {
            session.durable = first_extent(self.setup, self.id, head.state, writer).1;
            session.durable_sequence = 1;
        }
        let is_after = !self.holds(Rule::LogAfterItsWriter);
        let over = self.host().over;
        let is_own = |log: &Log| over.is_some_and(|over| log.names(over));
        let log = self.host().log.filter(|log| is_after || is_own(log));
        self.name_in_log(writer);
        if let Some(log) = log {
            let has = head.state.history.last_of(log.session).max(log.freed);
            for index in has + 1..=log.last {
                let record = Record::new(log.session, index);
                let (last, sequence) = (session.last_state(), session.last_sequence() + 1);
                let setup = self.setup;
                let state = setup.state_after(last, Build::Write, writer, sequence, record);
                session.recent.push((record, state, false));
                session.replayed += 1;
            }
        }
        let host = self.host();
        host.acknowledged = Some((head.identity, session.durable.history));
        host.phase = Phase::Active(session);
    }

    /// The clone's head is there. It is good only if the source's head still has the snapshot.
    fn look_back(&mut self, n: u8, head: Head) {
        let Goal::Clone(source) = self.role().goal else { return };
        let found = self.world.store.highest(source).map(|(_, head)| head);
        let is_there = found.is_some_and(|found| {
            let is_good = !matches!(found.kind, Kind::Pinned | Kind::Deleted);
            let has = found.state.snapshot.map(|snapshot| (found.identity, snapshot));
            is_good && has == self.host().source
        });
        let is_good = is_there || !self.holds(Rule::CloneLooksBack);
        match head.kind {
            Kind::Closed if is_good => self.cloned(head),
            _ if is_good => self.put_next(n, Head { kind: Kind::Closed, ..head }),
            _ => self.put_next(n, Head { kind: Kind::Deleted, ..head }),
        }
    }

    fn cloned(&mut self, head: Head) {
        let host = self.host();
        host.acknowledged = Some((head.identity, head.state.history));
        host.phase = Phase::Over(Ending::Cloned);
    }
}
