//! What the storm knows of the files of a chain as they are now. A copy of the files has its own.

use super::formats::format_of;
use super::loss::{Cause, Loss};
use super::model::Model;
use super::shape::Shape;
use super::stamp::Seq;

/// A layer, from the base up.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    pub(super) name: String,
    /// `None` for a raw file, and a LUKS image.
    pub(super) shape: Option<Shape>,
}

impl Layer {
    pub(super) fn format(&self) -> &'static str {
        format_of(&self.name)
    }
}

/// An internal snapshot of the active layer.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub(super) name: String,
    pub(super) content: Vec<Seq>,
}

/// What a killed server left.
#[derive(Clone, Debug)]
pub(super) struct Left {
    /// What its disk may hold.
    pub(super) model: Model,
    /// What the image holds without the server's log.
    pub(super) content: Vec<Seq>,
}

/// All that belongs to what the files are now; a copy of the files has one of its own.
#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) layers: Vec<Layer>,
    pub(super) model: Model,
    pub(super) snapshots: Vec<Snapshot>,
    /// A server was killed, and none has opened the image since.
    pub(super) is_pending: bool,
    /// Why what was not flushed may be lost by now.
    pub(super) loss: Loss,
    /// Another program wrote to the image since the server was killed.
    pub(super) is_contested: bool,
    /// What that server left, as found before the first commit since.
    pub(super) left: Option<Left>,
    /// The length that the disk has perhaps, beside the model's: somebody was killed over it.
    pub(super) other_len: Option<u64>,
    /// Clusters that leak at most; unknown after a kill.
    pub(super) leaks: Option<u64>,
}

impl State {
    /// Nothing of a killed server is waited for any more.
    pub(super) fn settled(&mut self) {
        (self.is_pending, self.is_contested) = (false, false);
        self.left = None;
        self.loss = Loss::default();
    }

    /// A server was killed, or could not close.
    pub(super) fn was_killed(&mut self, weakness: Option<Cause>) {
        self.is_pending = true;
        self.left = None;
        self.leaks = None;
        weakness.into_iter().for_each(|cause| self.loss.add(cause));
    }

    /// Something that may cost a killed server's unflushed writes, if there was one.
    pub(super) fn endanger(&mut self, cause: Cause) {
        if self.is_pending {
            self.loss.add(cause);
        }
    }
}
