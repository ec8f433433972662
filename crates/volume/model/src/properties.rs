//! What must always hold, and what must be possible.

use crate::store::{Body, Head, History, Kind, Record};
use crate::world::{Ending, Host, Phase, Session, Setup, World};

/// What a host acknowledged as durable in the store is in what anybody finds who opens the volume
/// now, at its beginning.
pub(crate) fn what_was_acknowledged_is_kept(setup: &Setup, world: &World) -> bool {
    setup.hosts.iter().zip(&world.hosts).all(|(role, host)| {
        let Some((identity, history)) = host.acknowledged else { return true };
        match world.store.recovered(role.volume) {
            None => false,
            Some((head, _)) if head.identity != identity => true,
            Some((_, state)) => state.history.starts_with(&history),
        }
    })
}

/// Every state that a head has, and every one that would be found now, is a prefix of what each of
/// its writers wrote, one writer after the other.
pub(crate) fn states_are_prefixes(setup: &Setup, world: &World) -> bool {
    let found = (0..setup.volumes).filter_map(|volume| world.store.recovered(volume));
    let found = found.map(|(_, state)| state.history);
    let heads = world.store.heads.values().map(|head| head.state.history);
    heads.chain(found).all(|history| is_prefix(&history))
}

fn is_prefix(history: &History) -> bool {
    let mut before: Option<Record> = None;
    let mut ended = Vec::new();
    history.records().iter().all(|record| {
        let last = before.replace(*record);
        match last {
            Some(last) if last.session() == record.session() => record.index() == last.index() + 1,
            _ => {
                ended.extend(last.map(Record::session));
                record.index() == 1 && !ended.contains(&record.session())
            }
        }
    })
}

/// Once there is a head after that of a writer, none of its extents is counted that the head does
/// not have.
pub(crate) fn nothing_counts_after_a_head(_: &Setup, world: &World) -> bool {
    let heads = &world.store.heads;
    heads.iter().all(|(&(volume, n), head)| {
        let Some(next) = heads.get(&(volume, n + 1)) else { return true };
        let strays = &world.store.strays;
        if strays.contains(&(volume, n)) || strays.contains(&(volume, n + 1)) {
            return true;
        }
        let is_reuse = head.identity != next.identity;
        let has = |history: &History| next.state.history.starts_with(history);
        let is_checkpoint = writer(head).is_some() && writer(head) == writer(next);
        is_reuse
            || has(&head.state.history) && (is_checkpoint || has(&world.store.walk(head).0.history))
    })
}

fn writer(head: &Head) -> Option<u8> {
    match head.kind {
        Kind::Open { writer, .. } => Some(writer),
        _ => None,
    }
}

/// What a volume's head and the state found from it name is there.
pub(crate) fn nothing_reachable_is_deleted(setup: &Setup, world: &World) -> bool {
    (0..setup.volumes).filter_map(|volume| world.store.recovered(volume)).all(|(head, state)| {
        let is_ready = !matches!(head.kind, Kind::Pinned | Kind::Deleted);
        let mut places = head.state.places().chain(state.places());
        !is_ready || places.all(|place| world.store.extent(place.writer, place.sequence).is_some())
    })
}

/// A name never goes back to a volume that it had before. What is read is what the pointer means,
/// and was written by those who had the volume under its present identity, or is what it was cloned
/// from.
pub(crate) fn nothing_foreign_is_read(setup: &Setup, world: &World) -> bool {
    // In the model a name is used again once at most, and its first volume has the identity 0.
    let goes_back = setup.hosts.iter().zip(&world.hosts).any(|(role, host)| {
        let now = world.store.highest(role.volume).map(|(_, head)| head.identity);
        host.acknowledged.is_some_and(|(identity, _)| now.is_some_and(|now| now < identity))
    });
    if goes_back {
        return false;
    }
    (0..setup.volumes).filter_map(|volume| world.store.recovered(volume)).all(|(head, state)| {
        let origin = head.origin.records().len();
        let is_own = |record: &Record| {
            let session = &world.hosts[usize::from(record.session())];
            session.acknowledged.is_some_and(|(identity, _)| identity == head.identity)
        };
        let is_meant = state.places().all(|place| {
            let found = world.store.extent(place.writer, place.sequence);
            found.is_none_or(|(record, _)| record == place.record)
        });
        is_meant
            && state.history.starts_with(&head.origin)
            && state.history.records()[origin..].iter().all(is_own)
    })
}

/// No two sessions have one writer number.
pub(crate) fn numbers_are_used_once(_: &Setup, world: &World) -> bool {
    let mut used = [false; 16];
    let mut is_new = |writer| !std::mem::replace(&mut used[usize::from(writer)], true);
    world.hosts.iter().filter_map(|host| host.writer).all(&mut is_new)
}

/// A writer after which there is another head learns it from the first put that could count.
pub(crate) fn a_fenced_writer_learns_it(setup: &Setup, world: &World) -> bool {
    setup.hosts.iter().zip(&world.hosts).all(|(role, host)| {
        let (Phase::Active(session), Some(own)) = (&host.phase, host.writer) else { return true };
        let Some((n, head)) = world.store.highest(role.volume) else { return false };
        writer(&head) == Some(own) || n <= session.n || meets_fence(world, session, own, &head)
    })
}

fn meets_fence(world: &World, session: &Session, own: u8, head: &Head) -> bool {
    let is_fence = |sequence| world.store.extents.get(&(own, sequence)) == Some(&Body::Fence);
    if head.identity != session.head.identity {
        return (session.durable_sequence + 1..=session.last_sequence() + 1).any(is_fence);
    }
    let mut sequence = session.durable_sequence + 1;
    for (_, state, _) in &session.recent {
        if !head.state.history.starts_with(&state.history) {
            break;
        }
        sequence += 1;
    }
    is_fence(sequence)
}

/// Who is started on the machine of the old writer, and comes directly after it, has all that the
/// guest was told is in the log.
pub(crate) fn what_the_log_had_is_kept(_: &Setup, world: &World) -> bool {
    world.hosts.iter().all(|host| {
        if host.has_lost_log {
            return false;
        }
        let (Phase::Active(session), Some(log)) = (&host.phase, host.log) else { return true };
        let last = session.last_state().history.last_of(log.session);
        !host.over.is_some_and(|over| log.names(over)) || last == log.last
    })
}

fn is_active(host: &Host) -> bool {
    matches!(host.phase, Phase::Active(_))
}

pub(crate) fn a_take_over_succeeds(_: &Setup, world: &World) -> bool {
    world.hosts.iter().any(|host| is_active(host) && host.over.is_some())
}

/// Also with something acknowledged before.
pub(crate) fn a_hand_over_succeeds(_: &Setup, world: &World) -> bool {
    let has_more =
        |host: &Host| host.acknowledged.is_some_and(|(_, history)| history.records().len() > 1);
    world.hosts.iter().any(|host| is_active(host) && host.was_handed && has_more(host))
}

/// Without force, after another that closed it with something acknowledged.
pub(crate) fn what_was_closed_is_opened(setup: &Setup, world: &World) -> bool {
    let mut hosts = setup.hosts.iter().zip(&world.hosts).skip(1);
    let has_closed = world.hosts[0].phase == Phase::Over(Ending::Closed);
    let has_some = world.hosts[0].acknowledged.is_some_and(|(_, it)| !it.records().is_empty());
    has_closed && has_some && hosts.any(|(role, host)| !role.force && is_active(host))
}

pub(crate) fn a_race_has_a_loser(setup: &Setup, world: &World) -> bool {
    let has_lost = |host: &Host| host.phase == Phase::Over(Ending::Lost);
    world.hosts.iter().any(has_lost) && a_take_over_succeeds(setup, world)
}

pub(crate) fn something_is_freed(_: &Setup, world: &World) -> bool {
    world.collectors.iter().any(|collector| collector.has_freed)
}

pub(crate) fn a_clone_succeeds(_: &Setup, world: &World) -> bool {
    world.hosts.iter().any(|host| host.phase == Phase::Over(Ending::Cloned))
}

pub(crate) fn a_clone_is_refused(_: &Setup, world: &World) -> bool {
    world.hosts.iter().any(|host| host.phase == Phase::Over(Ending::NotCloned))
}

/// A volume was created under a name that was deleted, and written.
pub(crate) fn a_name_is_used_again(setup: &Setup, world: &World) -> bool {
    (0..setup.volumes)
        .filter_map(|volume| world.store.highest(volume))
        .any(|(n, head)| head.identity != 0 && n > 2 && writer(&head).is_some())
}

/// A log is replayed.
pub(crate) fn a_log_is_replayed(_: &Setup, world: &World) -> bool {
    world.hosts.iter().any(|host| match &host.phase {
        Phase::Active(session) => session.replayed > 0 && session.recent.is_empty(),
        _ => false,
    })
}

/// Claims were deleted, and a number was claimed afterwards.
pub(crate) fn a_number_is_claimed_above_a_boundary(_: &Setup, world: &World) -> bool {
    let boundary = world.store.boundary();
    boundary > 0 && world.hosts.iter().any(|host| host.writer.is_some_and(|own| own >= boundary))
}
