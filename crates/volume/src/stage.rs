//! In which stage of its life here an open volume is.
//!
//! ```text
//! Open ⇄ Leaving     everything is accepted
//!   └──┬───┘
//!   Closing          nothing more is accepted; what was done is put, and then the last head
//!      ▼
//!    Ended           the last head is put, and the log is ended
//!
//! each of them ─▶ Failed     nothing is acknowledged any more
//! ```
//!
//! Invariants
//! - I1 There is no way back, but from Leaving to Open.
//! - I2 The first reason of a failure stays: what follows from it is no news. That another writer
//!   has the volume is remembered nevertheless, because what is here is old then.

use mica_block::{Error, ErrorKind, Result};

/// See the module.
#[derive(Clone, Default, Debug)]
pub(crate) enum Stage {
    /// Everything is accepted. If the volume is only read, it is read.
    #[default]
    Open,
    /// As open, but it is about to be handed over: little waits for the store.
    Leaving,
    /// Nothing more is accepted.
    Closing,
    /// Its writer's time is over. If it is only read, that is.
    Ended,
    /// Nothing is acknowledged any more.
    Failed(Failure),
}

/// Why nothing is acknowledged any more.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    why: Error,
    how: Failed,
    /// Whether nothing was accepted any more already.
    was_ending: bool,
}

/// What a failure means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Failed {
    /// What was acknowledged may not be in the store.
    Latched,
    /// It was given up, with all that was promised in the log.
    LeftToLog,
    /// Another writer has the volume.
    Fenced,
}

impl Stage {
    /// The handover of the volume begins, or is given up.
    pub(crate) fn expect_handover(&mut self, is_leaving: bool) {
        match (&self, is_leaving) {
            (Self::Open, true) => *self = Self::Leaving,
            (Self::Leaving, false) => *self = Self::Open,
            _ => {}
        }
    }

    /// Nothing more is accepted.
    pub(crate) fn close(&mut self) {
        match self {
            Self::Open | Self::Leaving => *self = Self::Closing,
            Self::Failed(failure) => failure.was_ending = true,
            Self::Closing | Self::Ended => {}
        }
    }

    /// The writer's time is over, or nobody reads any more.
    pub(crate) fn end(&mut self) {
        match self {
            Self::Failed(failure) => failure.was_ending = true,
            Self::Open | Self::Leaving | Self::Closing | Self::Ended => *self = Self::Ended,
        }
    }

    /// Nothing is acknowledged any more. Returns whether that is news.
    pub(crate) fn fail(&mut self, why: Error, how: Failed) -> bool {
        if let Self::Failed(failure) = self {
            if (failure.how, how) == (Failed::Latched, Failed::Fenced) {
                failure.how = how;
            }
            return false;
        }
        *self = Self::Failed(Failure { why, how, was_ending: self.is_ending() });
        true
    }

    /// Why nothing is acknowledged any more.
    pub(crate) fn failure(&self) -> Option<&Error> {
        match self {
            Self::Failed(failure) => Some(&failure.why),
            Self::Open | Self::Leaving | Self::Closing | Self::Ended => None,
        }
    }

    /// The same, if it is that another writer has the volume.
    pub(crate) fn fence(&self) -> Option<&Error> {
        self.failure().filter(|_| self.has_failed(Failed::Fenced))
    }

    /// Whether it has failed so.
    pub(crate) fn has_failed(&self, so: Failed) -> bool {
        matches!(self, Self::Failed(failure) if failure.how == so)
    }

    /// Why no change is accepted.
    pub(crate) fn refusal(&self) -> Option<Error> {
        match self {
            Self::Open | Self::Leaving => None,
            Self::Closing | Self::Ended => {
                Some(Error::new(ErrorKind::Denied, "the volume is being closed"))
            }
            Self::Failed(failure) => Some(failure.why.clone()),
        }
    }

    /// Whether changes are accepted.
    pub(crate) fn is_accepting(&self) -> bool {
        matches!(self, Self::Open | Self::Leaving)
    }

    /// Whether little waits for the store.
    pub(crate) fn is_leaving(&self) -> bool {
        matches!(self, Self::Leaving)
    }

    /// Whether it is being closed, or was.
    pub(crate) fn is_ending(&self) -> bool {
        match self {
            Self::Open | Self::Leaving => false,
            Self::Closing | Self::Ended => true,
            Self::Failed(failure) => failure.was_ending,
        }
    }

    /// What came of the end, once nothing more is put: it is well only if the last head was.
    pub(crate) fn outcome(&self) -> Option<Result<()>> {
        match self {
            Self::Open | Self::Leaving | Self::Closing => None,
            Self::Ended => Some(Ok(())),
            Self::Failed(failure) => Some(Err(failure.why.clone())),
        }
    }

    /// Whether nothing more is put, or read.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self, Self::Ended | Self::Failed(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(what: &str) -> Error {
        Error::new(ErrorKind::Io, what)
    }

    /// What is asked of a stage.
    fn said(stage: &Stage) -> String {
        let failure = match stage {
            Stage::Failed(Failure { why, how, .. }) => format!(" {how:?} {why}"),
            _ => String::new(),
        };
        let refused = if stage.refusal().is_some() { " refuses" } else { "" };
        let is = [
            (stage.is_leaving(), " leaving"),
            (stage.is_ending(), " ending"),
            (stage.is_over(), " over"),
            (matches!(stage.outcome(), Some(Ok(()))), " well"),
            (matches!(stage.outcome(), Some(Err(_))), " badly"),
            (stage.fence().is_some(), " fenced"),
        ];
        let is: String = is.into_iter().filter(|(is, _)| *is).map(|(_, text)| text).collect();
        format!("{refused}{is}{failure}")
    }

    #[test]
    fn each_event_in_each_stage() {
        type Event = fn(&mut Stage);
        let events: [(&str, Event); 7] = [
            ("expect", |stage| stage.expect_handover(true)),
            ("stay", |stage| stage.expect_handover(false)),
            ("close", Stage::close),
            ("end", Stage::end),
            ("latch", |stage| _ = stage.fail(error("latch"), Failed::Latched)),
            ("leave", |stage| _ = stage.fail(error("leave"), Failed::LeftToLog)),
            ("fence", |stage| _ = stage.fail(error("fence"), Failed::Fenced)),
        ];
        let after = |names: &[&str]| {
            names.iter().fold(Stage::Open, |mut stage, name| {
                let (_, event) = events.iter().find(|(known, _)| known == name).expect("known");
                event(&mut stage);
                stage
            })
        };
        let latched = " refuses over badly Latched latch";
        for (names, wanted) in [
            (&[][..], ""),
            (&["expect"], " leaving"),
            (&["expect", "stay"], ""),
            (&["stay"], ""),
            (&["close"], " refuses ending"),
            (&["expect", "close"], " refuses ending"),
            (&["close", "expect"], " refuses ending"),
            (&["expect", "close", "stay"], " refuses ending"),
            (&["end"], " refuses ending over well"),
            (&["close", "end"], " refuses ending over well"),
            (&["end", "close"], " refuses ending over well"),
            (&["end", "expect"], " refuses ending over well"),
            (&["latch"], latched),
            (&["latch", "expect"], latched),
            (&["latch", "leave"], latched),
            (&["expect", "latch", "stay"], latched),
            (&["close", "latch"], " refuses ending over badly Latched latch"),
            (&["latch", "close"], " refuses ending over badly Latched latch"),
            (&["latch", "end"], " refuses ending over badly Latched latch"),
            (&["end", "latch"], " refuses ending over badly Latched latch"),
            (&["close", "leave"], " refuses ending over badly LeftToLog leave"),
            (&["close", "leave", "latch"], " refuses ending over badly LeftToLog leave"),
            // What its log has is still there.
            (&["close", "leave", "fence"], " refuses ending over badly LeftToLog leave"),
            (&["fence"], " refuses over badly fenced Fenced fence"),
            (&["fence", "latch"], " refuses over badly fenced Fenced fence"),
            (&["latch", "fence"], " refuses over badly fenced Fenced latch"),
        ] {
            assert_eq!(said(&after(names)), wanted, "{names:?}");
        }
    }
}
