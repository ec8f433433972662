//! A front end's setup of a queue, and the descriptors that it passes for it.

use super::control::Control;
use mica_rt::{Doorbell, Socket};
use rustix::fs::FileType;
use std::fs::File;
use std::sync::Arc;
use vhost::vhost_user::{Error, Result};

/// The front end's setup of a queue.
#[derive(Default)]
pub(super) struct Vring {
    pub(super) size: u16,
    /// Addresses of the front end: descriptors, available ring, used ring.
    pub(super) addresses: Option<(u64, u64, u64)>,
    /// Where the used ring is for the log.
    pub(super) used_log_at: Option<u64>,
    pub(super) base: u16,
    pub(super) enabled: bool,
    pub(super) kick: Option<Arc<Socket>>,
    pub(super) call: Option<Arc<Doorbell>>,
    pub(super) error: Option<Arc<Doorbell>>,
    pub(super) running: Option<Arc<Control>>,
}

/// What the driver kicks.
pub(super) fn kick(file: Option<File>) -> Result<Option<Arc<Socket>>> {
    let Some(file) = event_fd(file)? else { return Ok(None) };
    // That it does not block: a front end must not hold up the queue.
    Ok(Some(Arc::new(Socket::new(file).map_err(Error::ReqHandlerError)?)))
}

/// What is rung.
pub(super) fn bell(file: Option<File>) -> Result<Option<Arc<Doorbell>>> {
    Ok(event_fd(file)?.map(|file| Arc::new(Doorbell::new(file.into()))))
}

fn event_fd(file: Option<File>) -> Result<Option<File>> {
    let Some(file) = file else { return Ok(None) };
    let stat = rustix::fs::fstat(&file).map_err(|error| Error::ReqHandlerError(error.into()))?;
    // It has no type of its own; what has one (a file, a pipe, a device) never blocks or always.
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Unknown => Ok(Some(file)),
        _ => Err(Error::InvalidParam),
    }
}
