//! A device as its front end sees it: the messages of a session, and what they do to the queues.
//!
//! One thread per session takes the messages (`server`); the queues run on executors (`placement`).
//! Whatever changes what a running queue works on (memory, addresses, its kick) stops it, waits
//! until nothing of it is in flight, and starts it again where it stopped: so a reply promises that
//! what was taken away is touched no more.
//!
//! Section names are those of QEMU's vhost-user specification.

use super::common::{Common, DeviceLogs};
use super::config::{self, F_LOG_ALL, F_PROTOCOL_FEATURES, has};
use super::control::{Control, Ending, QueueSettings};
use super::inflight::{Inflight, QueuesShape};
use super::log::DirtyLog;
use super::lost::{FilePart, Lost};
use super::memory::{Memory, REGIONS_MAX, Region};
use super::queue::{self, Setup};
use super::vring::{self, Vring};
use mica_block::ErrorKind;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Backend, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestAddress;

/// Descriptors of a queue at most.
pub(super) const QUEUE_SIZE_MAX: u16 = 1024;
/// Queues of a device at most.
pub(super) const QUEUES_MAX: u16 = 64;

/// One session of a device.
pub(super) struct Device {
    common: Arc<Common>,
    features: u64,
    protocol_features: u64,
    /// The descriptor of the current message, if it opens the back channel.
    pub(super) peeked: Option<OwnedFd>,
    regions: Vec<Region>,
    memory: Option<Arc<Memory>>,
    vrings: Vec<Vring>,
    inflight: Option<Inflight>,
    log: Option<Arc<DirtyLog>>,
    /// Whether any memory of this session is gone.
    lost: Arc<Lost>,
}

fn invalid(logs: &DeviceLogs, error: &mica_block::Error) -> Error {
    if let Some(omitted) = logs.refusals.admit() {
        tracing::warn!(%error, "invalid request from the front end{omitted}");
    }
    Error::InvalidParam
}

impl Device {
    pub(super) fn new(common: Arc<Common>) -> Self {
        common.losses.is_broken.store(false, Ordering::Relaxed);
        let vrings = common.stats.iter().map(|_| Vring::default()).collect();
        Self {
            common,
            features: 0,
            protocol_features: 0,
            peeked: None,
            regions: Vec::new(),
            memory: None,
            vrings,
            inflight: None,
            log: None,
            lost: Arc::default(),
        }
    }

    /// Fails if some memory of the session is gone.
    fn check_lost(&self) -> Result<()> {
        if self.lost.is_lost() {
            self.common.note_lost();
            return Err(Error::InvalidParam);
        }
        Ok(())
    }

    /// Stops all queues; nothing of them is in flight when it returns.
    pub(super) fn stop_all(&mut self) {
        for index in 0..self.vrings.len() {
            self.stop(index);
        }
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        let index = usize::try_from(index).map_err(|_| Error::InvalidParam)?;
        self.vrings.get_mut(index).ok_or(Error::InvalidParam)
    }

    /// Stops a queue, if it runs.
    fn stop(&mut self, index: usize) -> bool {
        let vring = &mut self.vrings[index];
        let Some(control) = vring.running.take() else { return false };
        match control.stop() {
            Some(base) => vring.base = base,
            None => {
                if let Some(omitted) = self.common.logs.panics.admit() {
                    tracing::error!(index, "the server panicked on a queue{omitted}");
                }
                // Its position is unknown: it starts when the front end sets it up again.
                vring.kick = None;
            }
        }
        true
    }

    /// Does `change` while queue `index` is stopped.
    fn while_stopped(
        &mut self,
        index: u32,
        change: impl FnOnce(&mut Vring) -> Result<()>,
    ) -> Result<()> {
        self.vring(index)?;
        let index = usize::try_from(index).map_err(|_| Error::InvalidParam)?;
        let was_running = self.stop(index);
        change(&mut self.vrings[index])?;
        if was_running { self.start(index) } else { Ok(()) }
    }

    /// Starts a queue if all that it needs is known and it does not run ("Ring states": it is
    /// started by its first kick, and does nothing while it is not enabled).
    fn start(&mut self, index: usize) -> Result<()> {
        let number = u16::try_from(index).map_err(|_| Error::InvalidParam)?;
        let vring = &self.vrings[index];
        let (Some(memory), Some(kick), Some(addresses)) =
            (&self.memory, &vring.kick, vring.addresses)
        else {
            return Ok(());
        };
        if vring.running.is_some() || vring.size == 0 {
            return Ok(());
        }
        let mut queue = Queue::new(QUEUE_SIZE_MAX).map_err(|_| Error::InvalidParam)?;
        let at = |user: u64| memory.guest_address(user).ok_or(Error::InvalidParam);
        let (descriptors, available, used): (GuestAddress, GuestAddress, GuestAddress) =
            (at(addresses.0)?, at(addresses.1)?, at(addresses.2)?);
        let is_set = queue.try_set_size(vring.size).is_ok()
            && queue.try_set_desc_table_address(descriptors).is_ok()
            && queue.try_set_avail_ring_address(available).is_ok()
            && queue.try_set_used_ring_address(used).is_ok();
        queue.set_ready(true);
        if !is_set || !queue.is_valid(&memory.guest) {
            return Err(Error::InvalidParam);
        }
        // Without marks its requests would be lost with the server, unnoticed.
        let marks = self.inflight.as_ref().map(|all| all.queue(number, vring.size));
        let inflight = match marks {
            Some(None) => {
                let what = "the region for requests in flight has no room for this queue";
                let error = mica_block::Error::new(ErrorKind::Invalid, what);
                return Err(invalid(&self.common.logs, &error));
            }
            marks => marks.flatten(),
        };
        queue.set_next_avail(vring.base);
        let used_idx = queue.used_idx(&memory.guest, Ordering::Acquire);
        queue.set_next_used(used_idx.map_err(|_| Error::InvalidParam)?.0);
        // That was the first look at the rings.
        self.check_lost()?;
        let mut settings = QueueSettings::new(Arc::clone(memory));
        settings.enabled = vring.enabled || !has(self.features, F_PROTOCOL_FEATURES);
        settings.log = self.log.clone().filter(|_| has(self.features, F_LOG_ALL));
        settings.used_log_at = vring.used_log_at;
        settings.set_call(vring.call.clone());
        settings.set_error(vring.error.clone());
        let control = Control::new(settings);
        let setup = Setup {
            common: Arc::clone(&self.common),
            index,
            lost: Arc::clone(&self.lost),
            ending: Ending(Arc::clone(&control)),
            queue,
            features: self.features,
            kick: Arc::clone(kick),
            inflight,
        };
        self.vrings[index].running = Some(control);
        queue::start(setup);
        Ok(())
    }

    /// Changes settings of a running queue that need no stop.
    fn update(&mut self, index: u32, change: impl FnOnce(&mut QueueSettings)) -> Result<()> {
        if let Some(control) = &self.vring(index)?.running {
            control.update(change);
        }
        Ok(())
    }

    /// Does `change` while all queues are stopped, and starts all that can run then.
    fn while_all_stopped(&mut self, change: impl FnOnce(&mut Self)) -> Result<()> {
        let was_running: Vec<bool> = (0..self.vrings.len()).map(|index| self.stop(index)).collect();
        change(self);
        // One that cannot start (its rings are in memory that went away) keeps no other from it.
        let mut all = Ok(());
        for (index, was_running) in was_running.into_iter().enumerate() {
            let started = self.start(index);
            if was_running && started.is_err() {
                all = started;
            }
        }
        all
    }

    /// Switches all queues to `regions`.
    fn set_regions(&mut self, regions: Vec<Region>) -> Result<()> {
        if regions.len() > REGIONS_MAX {
            return Err(Error::InvalidParam);
        }
        let memory = Arc::new(
            Memory::new(regions.clone(), &self.lost)
                .map_err(|error| invalid(&self.common.logs, &error))?,
        );
        self.while_all_stopped(|device| {
            device.regions = regions;
            device.memory = Some(memory);
        })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.stop_all();
    }
}

impl VhostUserBackendReqHandlerMut for Device {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.stop_all();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all();
        self.vrings.fill_with(Vring::default);
        self.features = 0;
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(config::features(self.common.disk.is_writable()))
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !config::features(self.common.disk.is_writable()) != 0 {
            return Err(Error::FeatureMismatch);
        }
        if self.features == features {
            return Ok(());
        }
        self.while_all_stopped(|device| device.features = features)
    }

    fn set_mem_table(
        &mut self,
        message: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<vhost::VhostUserMemoryRegionBase>>> {
        if message.len() != files.len() {
            return Err(Error::IncorrectFds);
        }
        let regions = message
            .iter()
            .zip(files)
            .map(|(message, file)| Region::map(*message, file, &self.lost));
        let regions: mica_block::Result<Vec<_>> = regions.collect();
        self.set_regions(regions.map_err(|error| invalid(&self.common.logs, &error))?)?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let size = u16::try_from(num).map_err(|_| Error::InvalidParam)?;
        if !size.is_power_of_two() || size > QUEUE_SIZE_MAX {
            return Err(Error::InvalidParam);
        }
        self.while_stopped(index, |vring| {
            vring.size = size;
            Ok(())
        })
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let used_log_at = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(log);
        let addresses = Some((descriptor, available, used));
        let vring = self.vring(index)?;
        if (vring.addresses, vring.used_log_at) == (addresses, used_log_at) {
            return Ok(());
        }
        self.while_stopped(index, |vring| {
            (vring.addresses, vring.used_log_at) = (addresses, used_log_at);
            Ok(())
        })
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        self.while_stopped(index, |vring| {
            vring.base = base;
            Ok(())
        })
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.vring(index)?;
        let number = usize::try_from(index).map_err(|_| Error::InvalidParam)?;
        self.stop(number);
        let vring = &mut self.vrings[number];
        // It starts again with a new kick.
        (vring.kick, vring.call) = (None, None);
        Ok(VhostUserVringState::new(index, u32::from(vring.base)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let kick = vring::kick(fd)?;
        if kick.is_none()
            && let Some(omitted) = self.common.logs.refusals.admit()
        {
            tracing::warn!(
                "the front end asked for a polled queue, which is not supported{omitted}"
            );
        }
        self.while_stopped(u32::from(index), |vring| {
            vring.kick = kick;
            Ok(())
        })?;
        self.start(usize::from(index))
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let call = vring::bell(fd)?;
        self.vring(u32::from(index))?.call.clone_from(&call);
        // If the server died before it notified the driver of a completion, that is done now. A
        // running queue rings the new descriptor once more when it has adopted it.
        if let Some(call) = &call {
            call.ring();
        }
        self.update(u32::from(index), |settings| settings.set_call(call))
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let error = vring::bell(fd)?;
        self.vring(u32::from(index))?.error.clone_from(&error);
        self.update(u32::from(index), |settings| settings.set_error(error))
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let offered = self.get_protocol_features()?.bits();
        if features & !offered != 0 {
            return Err(Error::FeatureMismatch);
        }
        self.protocol_features = features;
        Ok(())
    }

    /// The sender that `vhost` passes cannot send the message that is needed, so the descriptor was
    /// peeked at before.
    fn set_backend_req_fd(&mut self, _backend: Backend) {
        let negotiated = VhostUserProtocolFeatures::from_bits_truncate(self.protocol_features);
        if let Some(socket) = self.peeked.take()
            && negotiated.contains(VhostUserProtocolFeatures::CONFIG)
        {
            let gives_replies = negotiated.contains(VhostUserProtocolFeatures::REPLY_ACK);
            self.common.back_channel.open(socket, gives_replies);
        }
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.vrings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.vring(index)?.enabled = enable;
        self.update(index, |settings| settings.enabled = enable)?;
        self.start(usize::try_from(index).map_err(|_| Error::InvalidParam)?)
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let queues = u16::try_from(self.vrings.len()).map_err(|_| Error::InvalidParam)?;
        let space = config::space(self.common.disk.geometry(), queues);
        // What lies beyond is for features that are not offered.
        let all = space.into_iter().chain(std::iter::repeat(0));
        let (offset, size) = (offset as usize, size as usize);
        Ok(all.skip(offset).take(size).collect())
    }

    fn set_config(&mut self, _offset: u32, _bytes: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        Err(Error::InvalidOperation("the configuration is read-only"))
    }

    fn set_gpu_socket(&mut self, _backend: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("the device is not a GPU"))
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("there are no shared objects"))
    }

    fn get_inflight_fd(&mut self, asked: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, queue_size) = (asked.num_queues, asked.queue_size);
        if queues > QUEUES_MAX || queue_size > QUEUE_SIZE_MAX {
            return Err(Error::InvalidParam);
        }
        let shape = QueuesShape { queues, queue_size };
        let (len, file) =
            Inflight::create(shape).map_err(|error| invalid(&self.common.logs, &error))?;
        Ok((VhostUserInflight::new(len, 0, queues, queue_size), file))
    }

    fn set_inflight_fd(&mut self, message: &VhostUserInflight, file: File) -> Result<()> {
        let (queues, queue_size) = (message.num_queues, message.queue_size);
        if queues > QUEUES_MAX || queue_size > QUEUE_SIZE_MAX {
            return Err(Error::InvalidParam);
        }
        let part = FilePart { offset: message.mmap_offset, len: message.mmap_size };
        let inflight = Inflight::map(file, part, QueuesShape { queues, queue_size }, &self.lost);
        self.inflight = Some(inflight.map_err(|error| invalid(&self.common.logs, &error))?);
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        message: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<vhost::VhostUserMemoryRegionBase>> {
        let region = Region::map(**message, file, &self.lost)
            .map_err(|error| invalid(&self.common.logs, &error))?;
        let mut regions = self.regions.clone();
        regions.push(region);
        self.set_regions(regions)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, message: &VhostUserSingleMemoryRegion) -> Result<()> {
        let key = |message: &VhostUserMemoryRegion| {
            (message.guest_phys_addr, message.memory_size, message.user_addr)
        };
        let mut regions = self.regions.clone();
        let Some(index) = regions.iter().position(|region| key(&region.layout) == key(message))
        else {
            return Err(Error::InvalidParam);
        };
        regions.remove(index);
        self.set_regions(regions)
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("the device has no state besides its queues"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("the device has no state besides its queues"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("there is no shared memory"))
    }

    fn set_log_base(&mut self, message: &VhostUserLog, file: File) -> Result<()> {
        let Some(memory) = &self.memory else { return Err(Error::InvalidParam) };
        let part = FilePart { offset: message.mmap_offset, len: message.mmap_size };
        let log = DirtyLog::map(file, part, memory, &self.lost);
        let log = Arc::new(log.map_err(|error| invalid(&self.common.logs, &error))?);
        // Whatever ends after the reply is in this log, so that none is lost between two.
        self.while_all_stopped(|device| device.log = Some(log))
    }
}
