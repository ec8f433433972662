//! From a request's bytes to the action: every check that needs no I/O.

use super::limits::{
    BUDGET_BYTES, PAYLOAD_BYTES_MAX, PIECE_BYTES, STATUS_CHARGE_BYTES, ZEROES_CHARGE_BYTES,
};
use super::protocol::{ErrorCode, Request, command, command_flag};
use super::read::{Fragments, Read};
use super::reply::ReplyStyle;
use super::status::Status;
use super::write::{Answer, Change, ChangeKind, Divided, Write, is_whole};
use crate::discard::Discard;
use mica_block::Zeroes;
use mica_rt::BUF_ALIGN;
use mica_units::{GuestOffset, GuestRange};
use std::rc::Rc;

/// A checked request: the action, with everything needed to execute it.
pub(super) enum Action {
    Read(Read),
    Status(Status),
    /// Its payload follows.
    Write(Write),
    /// The rest of a write whose first pieces are being written.
    Rest(Rc<Divided>),
    Change(Change),
    Succeed {
        cookie: u64,
    },
    Refuse {
        cookie: u64,
        error: ErrorCode,
    },
}

impl Action {
    /// What it is charged to the budget.
    pub(super) fn charge_bytes(&self) -> usize {
        match self {
            Self::Read(read) => {
                let len = usize::try_from(read.range.len()).expect("at most the payload");
                len.max(BUF_BYTES_MIN)
            }
            Self::Status(_) => STATUS_CHARGE_BYTES,
            Self::Write(write) => charge_of(write.range),
            Self::Rest(write) => charge_of(write.rest()),
            Self::Change(Change { kind: ChangeKind::Zeroes(range, _), .. }) => {
                usize::try_from(range.len())
                    .map_or(ZEROES_CHARGE_BYTES, |len| len.min(ZEROES_CHARGE_BYTES))
            }
            Self::Change(_) => 0,
            Self::Succeed { .. } | Self::Refuse { .. } => 0,
        }
    }
}

/// The shortest buffer takes a page.
const BUF_BYTES_MIN: usize = BUF_ALIGN;

/// What the next piece of a write to `range` counts for.
fn charge_of(range: GuestRange) -> usize {
    let len = usize::try_from(range.len()).expect("at most the payload").min(PIECE_BYTES);
    // Parts of sectors are put into a buffer with the rest of theirs.
    let len = if is_whole(range) { len } else { 2 * len };
    len.max(BUF_BYTES_MIN)
}

/// The rules that requests are checked against.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    pub(super) disk_len: u64,
    pub(super) is_writable: bool,
    pub(super) discard: Discard,
    pub(super) style: ReplyStyle,
    /// Whether block status was negotiated.
    pub(super) status: bool,
}

impl Rules {
    /// Checks a request against the protocol and the disk. "Error values" says which error is
    /// whose.
    pub(super) fn check(&self, request: &Request) -> Action {
        match request.command {
            command::WRITE | command::TRIM | command::WRITE_ZEROES => self.check_change(request),
            command::FLUSH => self.check_flush(request),
            command::READ | command::BLOCK_STATUS => self.check_read(request),
            _ => Action::Refuse { cookie: request.cookie, error: ErrorCode::Inval },
        }
    }

    fn check_flush(&self, request: &Request) -> Action {
        let cookie = request.cookie;
        if request.flags & !command_flag::FUA != 0 {
            return Action::Refuse { cookie, error: ErrorCode::Inval };
        }
        if !self.is_writable {
            // Nothing is ever written here, so everything is stable.
            return Action::Succeed { cookie };
        }
        Action::Change(Change { cookie, kind: ChangeKind::Flush, answer: Answer::Done })
    }

    fn check_change(&self, request: &Request) -> Action {
        let Request { flags, command, cookie, offset, len } = *request;
        let refuse = |error| Action::Refuse { cookie, error };
        if !self.is_writable {
            return refuse(ErrorCode::Perm);
        }
        let flags_known = match command {
            command::WRITE_ZEROES => {
                command_flag::FUA | command_flag::NO_HOLE | command_flag::FAST_ZERO
            }
            _ => command_flag::FUA,
        };
        if flags & !flags_known != 0 {
            return refuse(ErrorCode::Inval);
        }
        let range = GuestRange::new(GuestOffset::new(offset), u64::from(len));
        let Some(range) = range.filter(|range| range.end().bytes() <= self.disk_len) else {
            // "NBD_CMD_WRITE", "NBD_CMD_TRIM": beyond the end is no space for the one, and
            // nonsense for the other.
            let is_trim = command == command::TRIM;
            return refuse(if is_trim { ErrorCode::Inval } else { ErrorCode::NoSpc });
        };
        if command == command::WRITE && len > PAYLOAD_BYTES_MAX {
            return refuse(ErrorCode::Inval);
        }
        if len == 0 {
            return Action::Succeed { cookie };
        }
        let is_durable = flags & command_flag::FUA != 0;
        let answer = if is_durable { Answer::Durable } else { Answer::Done };
        let kind = match command {
            command::WRITE => return Action::Write(Write { cookie, range, answer }),
            command::TRIM if self.discard == Discard::Ignore => return Action::Succeed { cookie },
            command::TRIM => ChangeKind::Discard(range),
            _ => {
                let may_unmap =
                    flags & command_flag::NO_HOLE == 0 && self.discard == Discard::Unmap;
                let fast = flags & command_flag::FAST_ZERO != 0;
                ChangeKind::Zeroes(range, Zeroes { may_unmap, fast })
            }
        };
        Action::Change(Change { cookie, kind, answer })
    }

    fn check_read(&self, request: &Request) -> Action {
        let Request { flags, command, cookie, offset, len } = *request;
        let refuse = |error| Action::Refuse { cookie, error };
        let is_status = command == command::BLOCK_STATUS;
        let flags_known = match self.style {
            _ if is_status => command_flag::FUA | command_flag::REQ_ONE,
            ReplyStyle::Structured => command_flag::FUA | command_flag::DF,
            ReplyStyle::Simple => command_flag::FUA,
        };
        if flags & !flags_known != 0 {
            return refuse(ErrorCode::Inval);
        }
        let range = GuestRange::new(GuestOffset::new(offset), u64::from(len));
        let Some(range) = range.filter(|range| range.end().bytes() <= self.disk_len) else {
            return refuse(ErrorCode::Inval);
        };
        if is_status {
            if !self.status || len == 0 {
                return refuse(ErrorCode::Inval);
            }
            let one = flags & command_flag::REQ_ONE != 0;
            return Action::Status(Status {
                cookie,
                range,
                extents_max: if one { 1 } else { usize::MAX },
            });
        }
        let fragments = if flags & command_flag::DF == 0 { Fragments::Any } else { Fragments::One };
        match fragments {
            // "Error values": only where a client wants its bytes in one chunk.
            Fragments::One if len as usize > BUDGET_BYTES => refuse(ErrorCode::Overflow),
            _ if len > PAYLOAD_BYTES_MAX => refuse(ErrorCode::Inval),
            _ if len == 0 => Action::Succeed { cookie },
            _ => Action::Read(Read { cookie, range, fragments }),
        }
    }
}
