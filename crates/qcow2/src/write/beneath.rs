//! What lies beneath a layer has to be durable before a flush of the layer is acknowledged.
//!
//! When a chain gets a new active layer, changes go on there while what was written to the layer
//! beneath is still being made durable, and with it what says that the new one is written
//! ([`crate::chain`]). The same holds for a process that opens a chain: the one before may have
//! died in between.
//!
//! Invariants
//! - I1 Nothing that a writer flushes is acknowledged before this is [`State::Durable`].
//! - I2 Whoever was to make it durable and did not, for whatever reason, has failed.

use crate::write::Writer;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::sync::{self, Waiters};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What is known of the layers beneath one that is written.
#[derive(Default)]
pub(super) struct Beneath {
    is_durable: AtomicBool,
    state: Mutex<State>,
    ended: Waiters,
    /// The right to make them durable.
    turn: sync::Mutex,
}

#[derive(Default)]
enum State {
    /// An earlier process may have left something in the page cache: the first flush sees to it.
    #[default]
    Unknown,
    /// Somebody makes them durable: whoever has a [`Settling`].
    Settling,
    Durable,
    Failed(Error),
}

/// Flushes of the writer wait until this is ended.
#[must_use = "flushes wait until it is ended"]
pub struct Settling {
    writer: Arc<Writer>,
    is_ended: bool,
}

impl Settling {
    /// What was to be made durable is, or cannot be: then nothing more is acknowledged.
    pub fn end(mut self, settled: &Result<()>) {
        self.is_ended = true;
        self.writer.end_settling(settled);
    }
}

impl Drop for Settling {
    fn drop(&mut self) {
        if !self.is_ended {
            let what = "making the frozen layer durable was abandoned halfway";
            self.writer.end_settling(&Err(Error::new(ErrorKind::Io, what)));
        }
    }
}

impl Beneath {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn set(&self, state: State) {
        self.is_durable.store(matches!(state, State::Durable), Ordering::Release);
        *self.lock() = state;
        self.ended.wake_all();
    }

    /// Whether they are durable, or why not; `None` while somebody sees to it.
    fn outcome(&self) -> Option<Result<bool>> {
        match &*self.lock() {
            State::Settling => None,
            State::Unknown => Some(Ok(false)),
            State::Durable => Some(Ok(true)),
            State::Failed(error) => Some(Err(error.clone())),
        }
    }
}

impl Writer {
    /// From now on flushes wait for the caller to make durable what lies beneath.
    pub(crate) fn begin_settling(self: &Arc<Self>) -> Settling {
        self.beneath.set(State::Settling);
        self.header.note_pushed();
        Settling { writer: Arc::clone(self), is_ended: false }
    }

    fn end_settling(&self, settled: &Result<()>) {
        match settled {
            Ok(()) => self.beneath.set(State::Durable),
            Err(error) => {
                self.fail(error);
                self.beneath.set(State::Failed(error.clone()));
            }
        }
    }

    /// Takes what lies beneath as durable: nobody but the caller's chain has written it, and that
    /// chain does not depend on it.
    pub(crate) fn takes_beneath_as_durable(&self) {
        self.beneath.set(State::Durable);
    }

    /// Makes sure of I1.
    pub(super) async fn settle_beneath(&self) -> Result<()> {
        let beneath = &self.beneath;
        if beneath.is_durable.load(Ordering::Acquire) {
            return Ok(());
        }
        let _turn = beneath.turn.lock().await;
        if beneath.ended.until(|| beneath.outcome()).await? {
            return Ok(());
        }
        let synced = self.sync_layer_beneath().await;
        self.end_settling(&synced);
        synced
    }

    /// Only the layer just beneath can be concerned: another layer is put on top only when the one
    /// before is settled. A raw image can be, too: it may have been the disk before it got a layer.
    async fn sync_layer_beneath(&self) -> Result<()> {
        let layers = self.map.layers();
        let Some(at) = layers.position(self.layer.number).checked_sub(1) else { return Ok(()) };
        let layer = &layers.all()[at];
        layer.store.sync().await.map_err(|error| layer.explain(error))?;
        if layer.data_path.is_some() {
            layer.data.sync().await.map_err(|error| layer.explain(error))?;
        }
        Ok(())
    }
}
