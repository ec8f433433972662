//! Room for a log that is begun later, when what comes before it cannot be undone.

use super::begin::NewLog;
use super::device::LogDevice;
use super::handle::Log;
use super::slots::Purpose;
use mica_block::Result;
use mica_rt::spawn;
use std::sync::Arc;

/// Room on a device for a log of one volume, that nobody else takes. Dropping it gives it back.
#[must_use]
pub(crate) struct PromisedStart {
    device: Arc<LogDevice>,
    /// Whether a log has it.
    is_taken: bool,
}

impl PromisedStart {
    /// Of what was just promised in the slots of `device`.
    pub(super) fn new(device: &Arc<LogDevice>) -> Self {
        Self { device: Arc::clone(device), is_taken: false }
    }

    /// As [`LogDevice::start`], of a log of the volume for which this is. One of it that was found
    /// is set aside by then.
    ///
    /// # Errors
    /// `Denied` if there is one that is not over; what the device reports.
    pub(crate) async fn start(mut self, new: NewLog) -> Result<Log> {
        spawn(async move {
            let segment = self.device.take_first(new, Purpose::Promised).await?;
            self.is_taken = true;
            self.device.begin_first(new, segment).await
        })
        .await
    }
}

impl Drop for PromisedStart {
    fn drop(&mut self) {
        if !self.is_taken {
            self.device.slots().withdraw();
            self.device.room.wake_all();
        }
    }
}
