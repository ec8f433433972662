//! From a request's bytes to what is to be done: every check that needs no I/O.

use super::limits::{BUDGET_BYTES, PAYLOAD_BYTES_MAX, STATUS_CHARGE_BYTES};
use super::protocol::{ErrorCode, Request, command, command_flag};
use super::read::{Fragments, Read};
use super::reply::ReplyStyle;
use super::status::Status;
use mica_units::{GuestOffset, GuestRange};

/// A request after it was checked: what is to be done, with all it takes to do it.
pub(super) enum Action {
    Read(Read),
    Status(Status),
    Succeed { cookie: u64 },
    Refuse { cookie: u64, error: ErrorCode },
}

impl Action {
    /// What it counts for in the budget.
    pub(super) fn charge_bytes(&self) -> usize {
        match self {
            Self::Read(read) => usize::try_from(read.range.len()).expect("at most the payload"),
            Self::Status(_) => STATUS_CHARGE_BYTES,
            Self::Succeed { .. } | Self::Refuse { .. } => 0,
        }
    }
}

/// What requests are checked against.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    pub(super) disk_len: u64,
    pub(super) style: ReplyStyle,
    /// Whether block status was negotiated.
    pub(super) status: bool,
}

impl Rules {
    /// Checks a request against the protocol and the disk. "Error values" says which error is
    /// whose.
    pub(super) fn check(&self, request: &Request) -> Action {
        let Request { flags, command, cookie, offset, len } = *request;
        let refuse = |error| Action::Refuse { cookie, error };
        let mut flags_known = command_flag::FUA;
        match command {
            command::WRITE | command::TRIM | command::WRITE_ZEROES => {
                return refuse(ErrorCode::Perm);
            }
            command::READ if self.style == ReplyStyle::Structured => {
                flags_known |= command_flag::DF;
            }
            command::BLOCK_STATUS => flags_known |= command_flag::REQ_ONE,
            command::READ | command::FLUSH => {}
            _ => return refuse(ErrorCode::Inval),
        }
        if flags & !flags_known != 0 {
            return refuse(ErrorCode::Inval);
        }
        if command == command::FLUSH {
            // Nothing is ever written here, so everything written is stable.
            return Action::Succeed { cookie };
        }
        let range = GuestRange::new(GuestOffset::new(offset), u64::from(len));
        let Some(range) = range.filter(|range| range.end().bytes() <= self.disk_len) else {
            return refuse(ErrorCode::Inval);
        };
        if command == command::BLOCK_STATUS {
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
        match self.style {
            ReplyStyle::Simple if len > PAYLOAD_BYTES_MAX => refuse(ErrorCode::Inval),
            ReplyStyle::Structured if len > PAYLOAD_BYTES_MAX => refuse(ErrorCode::Overflow),
            _ if fragments == Fragments::One && len as usize > BUDGET_BYTES => {
                refuse(ErrorCode::Overflow)
            }
            _ if len == 0 => Action::Succeed { cookie },
            _ => Action::Read(Read { cookie, range, fragments }),
        }
    }
}
