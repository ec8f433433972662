//! Block status: what holds for which parts of the disk, in each context that the client selected
//! ("Metadata querying").

use super::contexts::{ContextNumber, Contexts, Part};
use super::limits::{STATUS_EXTENTS_MAX, STATUS_WINDOW_BYTES};
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
/// and never more than was requested.
pub(super) async fn block_status<'a>(
    shared: Rc<Shared<'a>>,
    (status, selected): (Status, Rc<[ContextNumber]>),
    charge: Charge<'a>,
) -> Result<Outcome, Failure> {
    let last = selected.len().saturating_sub(1);
    for (index, context) in selected.iter().enumerate() {
        let descriptors = describe(&shared, status, *context).await?;
        let done = if index == last { Done::Yes } else { Done::No };
        let encoded = descriptors.encode();
        shared.outgoing.borrow_mut().status(status.cookie, context.id(), (done, &encoded));
    }
    drop(charge);
    Ok(Outcome::Answered)
}

/// What holds in `context`.
async fn describe(
    shared: &Shared<'_>,
    status: Status,
    context: ContextNumber,
) -> Result<Descriptors, Failure> {
    let Status { range, extents_max, .. } = status;
    let contexts = Contexts(shared.contexts);
    let mut descriptors = Descriptors::new(extents_max.min(STATUS_EXTENTS_MAX));
    'windows: for window in windows(range, STATUS_WINDOW_BYTES) {
        let mut at = window.start();
        while let Some(left) = GuestRange::between(at, window.end()).filter(|left| !left.is_empty())
        {
            let parts = match contexts.parts(context, shared.disk, left).await {
                Ok(parts) => parts,
                // What is known already is an answer; the client asks again for the rest.
                Err(_) if !descriptors.list.is_empty() => break 'windows,
                Err(error) => return Err(Failure::at(error, window.start())),
            };
            let len: u64 = parts.iter().map(|part| part.len).sum();
            assert!((1..=left.len()).contains(&len), "a context broke its contract");
            if !parts.into_iter().all(|part| descriptors.push(part)) {
                break 'windows;
            }
            at = GuestOffset::new(at.bytes() + len);
        }
        if window.end() < range.end() {
            // A request may cover many windows: other tasks run between them.
            yield_now().await;
        }
    }
    assert!(!descriptors.list.is_empty(), "a status describes at least one byte");
    Ok(descriptors)
}

/// Descriptors in order, neighbours with the same flags joined.
struct Descriptors {
    list: Vec<(u64, u32)>,
    count_max: usize,
}

impl Descriptors {
    fn new(count_max: usize) -> Self {
        Self { list: Vec::new(), count_max }
    }

    /// Appends `part`; `false` if there is no room for it.
    fn push(&mut self, part: Part) -> bool {
        let is_full = self.list.len() == self.count_max;
        match self.list.last_mut() {
            Some((len, last)) if *last == part.flags => *len += part.len,
            _ if is_full => return false,
            _ => self.list.push((part.len, part.flags)),
        }
        true
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.list.len() * STATUS_EXTENT_BYTES);
        for (len, flags) in &self.list {
            // All of them together lie within the request, whose length has 32 bits.
            let len = u32::try_from(*len).expect("within a request");
            out.extend(len.to_be_bytes());
            out.extend(flags.to_be_bytes());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_with_the_same_flags_are_joined() {
        let mut descriptors = Descriptors::new(2);
        assert!(descriptors.push(Part { len: 512, flags: 3 }));
        assert!(descriptors.push(Part { len: 1024, flags: 3 }));
        assert!(descriptors.push(Part { len: 512, flags: 0 }));
        assert!(!descriptors.push(Part { len: 512, flags: 3 }));
        assert_eq!(descriptors.list, [(1536, 3), (512, 0)]);
    }
}
