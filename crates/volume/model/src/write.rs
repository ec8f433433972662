//! A writer that has a volume open: extents, checkpoints, closing.

use crate::rules::Rule;
use crate::store::{Body, Head, HostId, Kind, Outcome, Put, Record};
use crate::world::{Build, Delivery, End, Ending, Phase, Role, Session, Setup, World};

/// Accepts the next record of the guest and makes an extent of it, which is then under way.
pub(crate) fn build(setup: &Setup, world: &mut World, id: HostId) -> Option<()> {
    let (role, session, writer) = active(setup, world, id)?;
    let is_leaving = matches!(&session.head_put, Some((_, head)) if head.kind == Kind::Closed)
        && setup.rules.hold(Rule::CloseIsLast);
    if session.recent.len() >= role.window || is_leaving {
        return None;
    }
    let sequence = session.last_sequence() + 1;
    // A replayed record was a plain write: records of a log are not told apart in the model.
    let own = sequence - session.replayed;
    let build: &Build = role.builds.get(usize::from(own - first(setup, id)))?;
    let record = Record::new(id, own);
    let state = setup.state_after(session.last_state(), *build, writer, sequence, record);
    session.recent.push((record, state, false));
    Some(())
}

/// Index of the first record of `id`'s script.
fn first(setup: &Setup, id: HostId) -> u8 {
    if id == 0 && setup.has_snapshot { 3 } else { 1 }
}

/// Puts the extent that is number `at` of those under way.
pub(crate) fn put_extent(
    setup: &Setup,
    world: &mut World,
    id: HostId,
    at: u8,
    delivery: Delivery,
) -> Option<()> {
    let (_, session, writer) = active(setup, world, id)?;
    let &(record, state, is_answered) = session.recent.get(usize::from(at))?;
    if is_answered {
        return None;
    }
    let sequence = session.durable_sequence + at + 1;
    let outcome =
        world.send(Put::Extent(writer, sequence, Body::Extent { record, state }), delivery);
    let outcome = match outcome {
        None if setup.rules.hold(Rule::UnclearIsRepeated) => return Some(()),
        None => Outcome::Done,
        Some(Outcome::Other) if !setup.rules.hold(Rule::RefusedIsRead) => Outcome::Done,
        Some(outcome) => outcome,
    };
    let host = &mut world.hosts[usize::from(id)];
    let Phase::Active(session) = &mut host.phase else { return None };
    if outcome == Outcome::Other {
        fenced(setup, world, id);
        return Some(());
    }
    session.recent[usize::from(at)].2 = true;
    let mut done = session.durable.history;
    let mut freed = session.durable_sequence;
    if !setup.rules.hold(Rule::AckInOrder) && state.history.starts_with(&done) {
        done = state.history;
    }
    if !setup.rules.hold(Rule::LogFreedInOrder) {
        freed = sequence;
    }
    while let Some(&(_, state, true)) = session.recent.first() {
        session.durable = state;
        session.durable_sequence += 1;
        session.recent.remove(0);
    }
    if session.durable.history.starts_with(&done) {
        done = session.durable.history;
    }
    let (identity, before) = host.acknowledged?;
    if done.starts_with(&before) {
        host.acknowledged = Some((identity, done));
    }
    host.freed = host.freed.max(freed).max(session.durable_sequence);
    Some(())
}

/// Begins a checkpoint: a head that says how far the volume is.
pub(crate) fn checkpoint(setup: &Setup, world: &mut World, id: HostId) -> Option<()> {
    let (role, session, writer) = active(setup, world, id)?;
    let head = session.head;
    let Kind::Open { sequence, .. } = head.kind else { return None };
    let is_newer = session.durable_sequence > sequence;
    if session.head_put.is_some() || session.checkpoints >= role.checkpoints || !is_newer {
        return None;
    }
    session.checkpoints += 1;
    let kind = Kind::Open { writer, sequence: session.durable_sequence };
    let head = Head { kind, state: session.durable, by: id, ..head };
    session.head_put = Some((session.n + 1, head));
    Some(())
}

/// Puts the head that is under way beside extents.
pub(crate) fn put_head(
    setup: &Setup,
    world: &mut World,
    id: HostId,
    delivery: Delivery,
) -> Option<()> {
    let (role, session, _) = active(setup, world, id)?;
    let (n, head) = session.head_put?;
    let Some(outcome) = world.send(Put::Head(role.volume, n, head), delivery) else {
        return Some(());
    };
    let host = &mut world.hosts[usize::from(id)];
    let Phase::Active(session) = &mut host.phase else { return None };
    if outcome == Outcome::Other {
        fenced(setup, world, id);
    } else if head.kind == Kind::Closed {
        host.phase = Phase::Over(Ending::Closed);
    } else {
        (session.n, session.head) = (n, head);
        session.head_put = None;
    }
    Some(())
}

/// Stops for good, and puts the head that says so.
pub(crate) fn close(setup: &Setup, world: &mut World, id: HostId) -> Option<()> {
    let (role, session, _) = active(setup, world, id)?;
    let kind = match role.end {
        End::Never => return None,
        End::Close => Kind::Closed,
        End::HandTo(host) => Kind::HandedTo(host),
    };
    if !session.recent.is_empty() || session.head_put.is_some() {
        return None;
    }
    let head = Head { kind, state: session.durable, by: id, ..session.head };
    let n = session.n + 1;
    if setup.rules.hold(Rule::CloseIsLast) {
        world.hosts[usize::from(id)].phase = Phase::PutHead { n, head, has_extent: false };
    } else {
        session.head_put = Some((n, head));
    }
    Some(())
}

/// The writer learns that it was fenced. Its log stays.
fn fenced(setup: &Setup, world: &mut World, id: HostId) {
    let has_heir = setup.hosts.iter().any(|role| role.log_of == Some(id));
    let host = &mut world.hosts[usize::from(id)];
    if has_heir {
        host.log = host.log_left(id);
    }
    host.phase = Phase::Over(Ending::Fenced);
}

fn active<'a, 'b>(
    setup: &'a Setup,
    world: &'b mut World,
    id: HostId,
) -> Option<(&'a Role, &'b mut Session, u8)> {
    let role = &setup.hosts[usize::from(id)];
    let host = &mut world.hosts[usize::from(id)];
    let writer = host.writer?;
    match &mut host.phase {
        Phase::Active(session) => Some((role, session, writer)),
        _ => None,
    }
}
