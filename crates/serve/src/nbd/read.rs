//! Reads that are more than one extent: planned and read piece by piece.
//!
//! A piece ("window") ends at a multiple of its size on the disk, so that its parts are aligned.
//! With structured replies each piece goes out as chunks as soon as it is there. A simple reply
//! promises all its data with its header, so the pieces are kept until the last one is there; only
//! a read that is larger than the session may hold is sent as it is read, and if that fails midway
//! the connection has to end ("NBD_CMD_READ", Simple replies). So does a structured read
//! that must not be divided.

use super::limits::{WINDOW_BYTES, WINDOW_OPS_MAX, WINDOWS_PER_TURN};
use super::reply::{Content, Outgoing, ReplyStyle};
use super::shared::{Charge, Failure, Shared};
use super::write::Outcome;
use crate::nbd::protocol::Done;
use mica_block::{Disk, Extent, IoFuture, Plan, Result, windows};
use mica_rt::{Buf, Pace};
use mica_units::{GuestOffset, GuestRange};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

/// How many content chunks a structured reply may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fragments {
    Any,
    One,
}

/// A read that was found valid.
#[derive(Clone, Copy)]
pub(super) struct Read {
    pub(super) cookie: u64,
    pub(super) range: GuestRange,
    pub(super) fragments: Fragments,
}

/// How the reply is put together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Assembly {
    /// Chunks, a piece at a time.
    Chunks,
    /// Nothing before everything is there.
    Whole,
    /// The header with the first piece.
    Stream,
}

/// Serves `read`, for which the session holds at most `charge`. `plan` is the plan of its whole
/// range, if that was made already. Each piece is in flight from its plan to its data, and not
/// while the client takes its time.
pub(super) async fn read_long<'a>(
    shared: Rc<Shared<'a>>,
    read: Read,
    mut plan: Option<Plan<'a>>,
    mut charge: Charge<'a>,
) -> std::result::Result<Outcome, Failure> {
    let Read { cookie, range, fragments } = read;
    let style = shared.outgoing.borrow().style();
    let oversize = range.len() > charge.bytes() as u64;
    let assembly = match (style, fragments) {
        (ReplyStyle::Structured, Fragments::Any) => Assembly::Chunks,
        _ if oversize => Assembly::Stream,
        _ => Assembly::Whole,
    };
    let _streaming = (assembly == Assembly::Stream).then(|| shared.stream());
    let header = |outgoing: &mut Outgoing| match style {
        ReplyStyle::Simple => outgoing.simple_header(cookie),
        ReplyStyle::Structured => {
            let len = u32::try_from(range.len()).expect("within a request");
            outgoing.whole_chunk_header(cookie, range.start().bytes(), len);
        }
    };
    let mut pace = Pace::new(WINDOWS_PER_TURN);
    let mut kept = Vec::new();
    // A plan that is there already is for all of the range, which is short then.
    let window_bytes = if plan.is_some() { u64::MAX } else { WINDOW_BYTES };
    for window in windows(range, window_bytes) {
        if oversize {
            shared.room(charge.bytes() / 2).await;
        }
        pace.steps(1).await;
        let contents = read_window(shared.disk, window, plan.take()).await;
        let contents = contents.map_err(|failure| Failure {
            // A header has already promised what cannot be delivered.
            ends_connection: assembly == Assembly::Stream && window.start() > range.start(),
            ..failure
        })?;
        let done = if window.end() == range.end() { Done::Yes } else { Done::No };
        let mut outgoing = shared.outgoing.borrow_mut();
        match assembly {
            Assembly::Chunks => {
                outgoing.chunks(cookie, contents, done);
                if !oversize {
                    charge.release(usize::try_from(window.len()).expect("within a window"));
                }
            }
            Assembly::Whole => kept.extend(contents),
            Assembly::Stream => {
                if window.start() == range.start() {
                    header(&mut outgoing);
                }
                outgoing.plain(contents);
            }
        }
    }
    if assembly == Assembly::Whole {
        let mut outgoing = shared.outgoing.borrow_mut();
        header(&mut outgoing);
        outgoing.plain(kept);
    }
    Ok(Outcome::Read(range.len()))
}

async fn read_window<'a>(
    disk: &'a dyn Disk,
    range: GuestRange,
    plan: Option<Plan<'a>>,
) -> std::result::Result<Vec<Content>, Failure> {
    let plan = match plan {
        Some(plan) => plan,
        None => {
            let planned = disk.plan(range, Vec::new()).finish().await;
            planned.map_err(|error| Failure::at(error, range.start()))?
        }
    };
    assert!(Extent::covers(&plan, range), "a plan covers what was asked");
    let (mut contents, parts) = lay_out(&plan);
    read_parts(disk, parts, &mut contents).await?;
    Ok(contents)
}

/// A part of a run of data, and where its buffer belongs.
struct Part {
    extent: Extent,
    buf: Buf,
    content: usize,
    index: usize,
}

/// Joins neighbours: each run of data gets one buffer, which its parts divide among them.
fn lay_out(extents: &[Extent]) -> (Vec<Content>, Vec<Part>) {
    let mut contents = Vec::new();
    let mut parts = Vec::new();
    for run in extents.chunk_by(|a, b| a.kind.reads_as_zero() == b.kind.reads_as_zero()) {
        let offset = run[0].start.bytes();
        let len: u64 = run.iter().map(|extent| extent.len).sum();
        if run[0].kind.reads_as_zero() {
            contents.push(Content::Zeros { offset, len });
            continue;
        }
        let mut rest = Buf::new(usize::try_from(len).expect("within a window"));
        for (index, extent) in run.iter().enumerate() {
            let len = usize::try_from(extent.len).expect("within a window");
            let buf = rest.split_to(len);
            parts.push(Part { extent: *extent, buf, content: contents.len(), index });
        }
        contents.push(Content::Data { offset, bufs: run.iter().map(|_| Buf::new(0)).collect() });
    }
    (contents, parts)
}

struct Active {
    io: IoFuture,
    start: GuestOffset,
    content: usize,
    index: usize,
}

/// Reads `parts` into their places in `contents`, some of them at once.
async fn read_parts(
    disk: &dyn Disk,
    parts: Vec<Part>,
    contents: &mut [Content],
) -> std::result::Result<(), Failure> {
    let mut waiting = parts.into_iter();
    let mut active: Vec<Active> = Vec::new();
    poll_fn(move |context| {
        loop {
            let room = WINDOW_OPS_MAX - active.len();
            active.extend(waiting.by_ref().take(room).map(|part| {
                let Part { extent, buf, content, index } = part;
                Active { io: disk.read(&extent, buf), start: extent.start, content, index }
            }));
            if active.is_empty() {
                return Poll::Ready(Ok(()));
            }
            let before = active.len();
            if let Err(failure) = poll_active(&mut active, contents, context) {
                return Poll::Ready(Err(failure));
            }
            if active.len() == before {
                return Poll::Pending;
            }
        }
    })
    .await
}

fn poll_active(
    active: &mut Vec<Active>,
    contents: &mut [Content],
    context: &mut Context<'_>,
) -> std::result::Result<(), Failure> {
    let mut outcome = Ok(());
    active.retain_mut(|one| {
        let Poll::Ready((result, buf)) = Pin::new(&mut one.io).poll(context) else { return true };
        if let Err(failure) = place(result, buf, one, contents) {
            outcome = Err(failure);
        }
        false
    });
    outcome
}

fn place(
    result: Result<()>,
    buf: Buf,
    one: &Active,
    contents: &mut [Content],
) -> std::result::Result<(), Failure> {
    result.map_err(|error| Failure::at(error, one.start))?;
    let Content::Data { bufs, .. } = &mut contents[one.content] else {
        unreachable!("only data is read");
    };
    bufs[one.index] = buf;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_block::ExtentKind;

    fn extent(start: u64, len: u64, kind: ExtentKind) -> Extent {
        let range = GuestRange::new(GuestOffset::new(start), len).expect("small");
        Extent::unplaced(range, kind)
    }

    #[test]
    fn neighbours_of_one_nature_become_one_content() {
        let plan = [
            extent(0, 512, ExtentKind::Data),
            extent(512, 512, ExtentKind::Encoded),
            extent(1024, 512, ExtentKind::Hole),
            extent(1536, 512, ExtentKind::ZeroAllocated),
            extent(2048, 512, ExtentKind::Data),
        ];
        let (contents, parts) = lay_out(&plan);
        assert_eq!(contents.len(), 3);
        assert!(matches!(&contents[0], Content::Data { offset: 0, bufs } if bufs.len() == 2));
        assert!(matches!(contents[1], Content::Zeros { offset: 1024, len: 1024 }));
        assert_eq!(parts.len(), 3);
    }
}
