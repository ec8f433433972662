//! Block status: which parts of the disk are holes or zeros ("Metadata querying").

use super::limits::{STATUS_EXTENTS_MAX, STATUS_WINDOW_BYTES};
use super::protocol::{STATE_HOLE, STATE_ZERO, STATUS_EXTENT_BYTES};
use super::shared::{Charge, Failure, Shared};
use super::write::Outcome;
use mica_block::{Extent, ExtentKind, Survey, windows};
use mica_rt::yield_now;
use mica_units::GuestRange;
use std::rc::Rc;

/// A block status request that was found valid.
#[derive(Clone, Copy)]
pub(super) struct Status {
    pub(super) cookie: u64,
    pub(super) range: GuestRange,
    /// Maximum number of descriptors that the client takes.
    pub(super) extents_max: usize,
}

/// Serves `status`. Describes at least one byte, and never more than was requested.
pub(super) async fn block_status<'a>(
    shared: Rc<Shared<'a>>,
    status: Status,
    charge: Charge<'a>,
) -> Result<Outcome, Failure> {
    let Status { cookie, range, extents_max } = status;
    let mut descriptors = Descriptors::new(extents_max.min(STATUS_EXTENTS_MAX));
    'windows: for window in windows(range, STATUS_WINDOW_BYTES) {
        let mut survey = Survey::new(shared.disk, window);
        loop {
            match survey.next().await {
                Ok(None) => break,
                Ok(Some(extents)) => {
                    if !extents.iter().all(|extent| descriptors.push(extent)) {
                        break 'windows;
                    }
                }
                // What is known already is an answer; the client asks again for the rest.
                Err(_) if !descriptors.list.is_empty() => break 'windows,
                Err(error) => return Err(Failure::at(error, window.start())),
            }
        }
        if window.end() < range.end() {
            // A request may cover many windows: other tasks run between them.
            yield_now().await;
        }
    }
    assert!(!descriptors.list.is_empty(), "a status describes at least one byte");
    shared.outgoing.borrow_mut().status(cookie, &descriptors.encode());
    drop(charge);
    Ok(Outcome::Answered)
}

fn flags_of(kind: ExtentKind) -> u32 {
    // What has no data is a hole, as in QEMU, whether or not a place is kept for it.
    match kind {
        ExtentKind::DataInHole => STATE_ZERO,
        kind if kind.reads_as_zero() => STATE_HOLE | STATE_ZERO,
        _ => 0,
    }
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

    /// Appends `extent`; `false` if there is no room for it.
    fn push(&mut self, extent: &Extent) -> bool {
        let flags = flags_of(extent.kind);
        let is_full = self.list.len() == self.count_max;
        match self.list.last_mut() {
            Some((len, last)) if *last == flags => *len += extent.len,
            _ if is_full => return false,
            _ => self.list.push((extent.len, flags)),
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
    use mica_units::GuestOffset;

    fn push(descriptors: &mut Descriptors, len: u64, kind: ExtentKind) -> bool {
        let range = GuestRange::new(GuestOffset::ZERO, len).expect("fits");
        descriptors.push(&Extent::unplaced(range, kind))
    }

    #[test]
    fn hole_and_zero_look_the_same_and_are_joined() {
        let mut descriptors = Descriptors::new(2);
        assert!(push(&mut descriptors, 512, ExtentKind::Hole));
        assert!(push(&mut descriptors, 512, ExtentKind::Zero));
        assert!(push(&mut descriptors, 512, ExtentKind::ZeroAllocated));
        assert!(push(&mut descriptors, 512, ExtentKind::Data));
        assert!(!push(&mut descriptors, 512, ExtentKind::Zero));
        assert_eq!(descriptors.list, [(1536, STATE_HOLE | STATE_ZERO), (512, 0)]);
    }
}
