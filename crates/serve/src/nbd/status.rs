//! Block status: what holds for which parts of the disk, in each context that the client selected
//! ("Metadata querying").

use super::contexts::{ContextNumber, Contexts, Part};
use super::limits::{
    STATUS_EXTENTS_CHARGED, STATUS_EXTENTS_MAX, STATUS_FIRST_BYTES, STATUS_STEP_BYTES,
    STATUS_WINDOW_BYTES,
};
use super::protocol::{Done, STATUS_EXTENT_BYTES};
use super::shared::{Charge, Failure, Shared};
use super::write::Outcome;
use mica_block::windows;
use mica_rt::yield_now;
use mica_units::{GuestOffset, GuestRange};
use std::rc::Rc;

/// A block status request that was found valid.
#[derive(Clone, Copy)]
pub(super) struct Status {
    pub(super) cookie: u64,
    pub(super) range: GuestRange,
    /// Maximum number of descriptors that the client takes.
    pub(super) extents_max: usize,
}

/// Serves `status`: a chunk for each context that was `selected`. Each describes at least one byte,
/// and never more than was requested. Unless one descriptor is wanted of each, all describe the
/// same bytes: the protocol does not ask for that, but clients that put them side by side rely on
/// it.
pub(super) async fn block_status<'a>(
    shared: Rc<Shared<'a>>,
    (status, selected): (Status, Rc<[ContextNumber]>),
    mut charge: Charge<'a>,
) -> Result<Outcome, Failure> {
    let Status { mut range, extents_max, .. } = status;
    let charged = STATUS_EXTENTS_CHARGED / selected.len().max(1);
    let mut all = Vec::with_capacity(selected.len());
    for context in selected.iter() {
        let mut descriptors = Descriptors::new(extents_max.min(STATUS_EXTENTS_MAX), charged);
        describe(&shared, (range, *context), (&mut descriptors, &mut charge)).await?;
        if extents_max > 1 {
            let end = GuestOffset::new(range.start().bytes() + descriptors.len());
            range = GuestRange::between(range.start(), end).expect("within the request");
        }
        all.push((context, descriptors));
    }
    let last = all.len().saturating_sub(1);
    for (index, (context, mut descriptors)) in all.into_iter().enumerate() {
        if extents_max > 1 {
            descriptors.truncate(range.len());
        }
        let done = if index == last { Done::Yes } else { Done::No };
        let encoded = descriptors.encode();
        shared.outgoing.borrow_mut().status(status.cookie, context.id(), (done, &encoded));
    }
    drop(charge);
    Ok(Outcome::Answered)
}

/// Gathers in `descriptors` what holds for the range in the context, as far as there is room.
async fn describe(
    shared: &Shared<'_>,
    (range, context): (GuestRange, ContextNumber),
    (descriptors, charge): (&mut Descriptors, &mut Charge<'_>),
) -> Result<(), Failure> {
    let contexts = Contexts(shared.contexts);
    // A survey takes in about as much as the answer can hold.
    let mut piece_bytes = STATUS_FIRST_BYTES;
    'windows: for window in windows(range, STATUS_WINDOW_BYTES) {
        let mut at = window.start();
        while let Some(left) = GuestRange::between(at, window.end()).filter(|left| !left.is_empty())
        {
            let piece = left.start().bytes().saturating_add(piece_bytes).min(left.end().bytes());
            let left = GuestRange::between(at, GuestOffset::new(piece)).expect("a part of it");
            let parts = match contexts.parts(context, shared.disk, left).await {
                Ok(parts) => parts,
                // What is known already is an answer; the client asks again for the rest.
                Err(_) if !descriptors.list.is_empty() => break 'windows,
                Err(error) => return Err(Failure::at(error, window.start())),
            };
            let len: u64 = parts.iter().map(|part| part.len).sum();
            assert!((1..=left.len()).contains(&len), "a context broke its contract");
            if !parts.into_iter().all(|part| descriptors.push(part, charge)) {
                break 'windows;
            }
            at = GuestOffset::new(at.bytes() + len);
            piece_bytes = (piece_bytes * 2).min(STATUS_WINDOW_BYTES);
        }
        if window.end() < range.end() {
            // A request may cover many windows: other tasks run between them.
            yield_now().await;
        }
    }
    assert!(!descriptors.list.is_empty(), "a status describes at least one byte");
    Ok(())
}

/// What a list of descriptors is charged to.
trait Room {
    /// Makes room for [`STATUS_EXTENTS_CHARGED`] more, if there is any.
    fn grow(&mut self) -> bool;
}

impl Room for Charge<'_> {
    fn grow(&mut self) -> bool {
        Charge::grow(self, STATUS_STEP_BYTES)
    }
}

/// Descriptors in order, neighbours with the same flags joined.
struct Descriptors {
    /// Lengths and flags. All lengths together are within a request, which has 32 bits for them.
    list: Vec<(u32, u32)>,
    count_max: usize,
    /// How many are paid for.
    charged: usize,
}

impl Descriptors {
    /// At most `count_max`, of which some are `charged` already.
    fn new(count_max: usize, charged: usize) -> Self {
        Self { list: Vec::new(), count_max, charged: charged.max(1) }
    }

    /// Bytes of the disk that they describe.
    fn len(&self) -> u64 {
        self.list.iter().map(|(len, _)| u64::from(*len)).sum()
    }

    /// Appends `part`; `false` if there is no room for it.
    fn push(&mut self, part: Part, room: &mut impl Room) -> bool {
        let len = u32::try_from(part.len).expect("within a request");
        let count = self.list.len();
        match self.list.last_mut() {
            Some((before, flags)) if *flags == part.flags => *before += len,
            _ if count == self.count_max => return false,
            _ => {
                if count == self.charged {
                    if !room.grow() {
                        return false;
                    }
                    self.charged += STATUS_EXTENTS_CHARGED;
                }
                self.list.push((len, part.flags));
            }
        }
        true
    }

    /// Keeps the descriptors of the first `len` bytes, which are not zero.
    fn truncate(&mut self, len: u64) {
        let mut end = self.len();
        while let Some((last, _)) = self.list.last_mut().filter(|_| end > len) {
            let excess = end - len;
            match u64::from(*last).checked_sub(excess).and_then(|left| u32::try_from(left).ok()) {
                Some(left) if left > 0 => {
                    *last = left;
                    return;
                }
                _ => {
                    end -= u64::from(*last);
                    self.list.pop();
                }
            }
        }
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.list.len() * STATUS_EXTENT_BYTES);
        for (len, flags) in &self.list {
            out.extend(len.to_be_bytes());
            out.extend(flags.to_be_bytes());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many steps.
    impl Room for usize {
        fn grow(&mut self) -> bool {
            self.checked_sub(1).map(|left| *self = left).is_some()
        }
    }

    fn descriptors(count_max: usize, lens: &[u64]) -> Descriptors {
        let mut descriptors = Descriptors::new(count_max, count_max);
        for (flags, len) in (0..).zip(lens) {
            assert!(descriptors.push(Part { len: *len, flags }, &mut 0));
        }
        descriptors
    }

    #[test]
    fn neighbours_with_the_same_flags_are_joined() {
        let mut descriptors = Descriptors::new(2, 2);
        let mut push = |len, flags| descriptors.push(Part { len, flags }, &mut 0);
        assert!(push(512, 3));
        assert!(push(1024, 3));
        assert!(push(512, 0));
        assert!(!push(512, 3));
        assert_eq!(descriptors.list, [(1536, 3), (512, 0)]);
    }

    #[test]
    fn list_ends_where_nobody_pays_for_more() {
        let mut descriptors = Descriptors::new(usize::MAX, 1);
        let mut steps = 1;
        let pushed = (0..)
            .take_while(|number| descriptors.push(Part { len: 512, flags: *number }, &mut steps));
        assert_eq!(pushed.count(), 1 + STATUS_EXTENTS_CHARGED);
    }

    #[test]
    fn what_is_left_of_a_list_is_what_describes_so_many_bytes() {
        let cut = |len| {
            let mut descriptors = descriptors(3, &[512, 1024, 512]);
            descriptors.truncate(len);
            descriptors.list
        };
        assert_eq!(cut(2048), [(512, 0), (1024, 1), (512, 2)]);
        assert_eq!(cut(1536), [(512, 0), (1024, 1)]);
        assert_eq!(cut(1024), [(512, 0), (512, 1)]);
        assert_eq!(cut(1), [(1, 0)]);
    }
}
