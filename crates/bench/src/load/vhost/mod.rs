//! A load generator for vhost-user-blk: the monitor and the guest's driver in one, without a guest.
//!
//! ```text
//! drive: what, where, how many ─▶ Ring: split virtqueue ─▶ memfd ◀─ the server
//!                                  Device: messages, memory, kick and call
//! ```
//!
//! One thread drives all queues: on a machine with few processors the server gets the others. The
//! rings are driven as Linux drives them: calls are asked for only when nothing is left to take,
//! and kicks are omitted when the server does not want them (`VIRTIO_RING_F_EVENT_IDX`).

mod drive;
mod ring;

pub(crate) use drive::{Absence, Access, DiskLoad, Done, run};
pub(crate) use ring::BLOCK_BYTES;

use anyhow::{Context, Result, bail, ensure};
use mica_tests::clock;
use ring::Ring;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

/// Memory that is shared with the server.
type Memory = GuestRegionMmap<()>;

/// Virtio features, by the number of their bit.
const F_FLUSH: u64 = 1 << 9;
const F_MQ: u64 = 1 << 12;
const F_EVENT_IDX: u64 = 1 << 29;
const F_PROTOCOL_FEATURES: u64 = 1 << 30;
const F_VERSION_1: u64 = 1 << 32;

/// Descriptors of a queue.
const QUEUE_SIZE: u16 = 128;
/// Requests in flight on a queue at most: each takes three descriptors.
pub(crate) const DEPTH_MAX: usize = QUEUE_SIZE as usize / 3;
/// Bytes of the configuration space that both servers have.
const CONFIG_BYTES: u32 = 60;
/// How long a server may take to answer a message, or any of the requests in flight.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// How long a server may be away.
const AWAY_LIMIT: Duration = Duration::from_secs(30);
/// How often a monitor checks whether it is back.
const RECONNECT_PAUSE: Duration = Duration::from_millis(5);
/// Epoll's token for a call.
const CALLED: u64 = 0;
/// Epoll's token for the connection, of which only the end matters.
const GONE: u64 = 1;

/// What ended a wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wake {
    /// The server called.
    Called,
    /// The server is gone.
    Gone,
}

/// A disk that a server serves, and the memory that is shared with it.
pub(crate) struct Device {
    socket: PathBuf,
    memory: Arc<Memory>,
    rings: Vec<Ring>,
    /// All queues call by the same event: the waiter checks all of them anyway.
    call: EventFd,
    wait: Epoll,
    /// The server's record of requests in flight, kept for its successor.
    inflight: Option<(VhostUserInflight, File)>,
    /// Ends with the server. `None` before the first, and after the last.
    session: Option<Session>,
    /// Length of the disk.
    pub(crate) disk_bytes: u64,
    /// Bytes of each request.
    request_bytes: usize,
}

struct Session {
    /// The connection itself, to see its end.
    stream: UnixStream,
    /// Dropping it ends the session.
    _front_end: Frontend,
}

impl Device {
    /// Connects to the server at `socket` with `queues` queues, for requests of `request_bytes`.
    ///
    /// # Errors
    /// If it does not speak as a vhost-user-blk server does.
    pub(crate) fn connect(socket: &Path, queues: u16, request_bytes: usize) -> Result<Self> {
        let memory = Arc::new(share(usize::from(queues) * ring::bytes(request_bytes))?);
        let call = EventFd::new(nonblocking())?;
        let wait = Epoll::new()?;
        // Edges: an event is reported once only, and needs no read.
        let events = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, CALLED);
        wait.ctl(ControlOperation::Add, call.as_raw_fd(), events)?;
        let event = || EventFd::new(nonblocking());
        let ring = |index| Ok(Ring::new(&memory, index, request_bytes, event()?));
        let mut device = Self {
            socket: socket.to_owned(),
            rings: (0..queues).map(ring).collect::<Result<_>>()?,
            memory,
            call,
            wait,
            inflight: None,
            session: None,
            disk_bytes: 0,
            request_bytes,
        };
        device.open()?;
        Ok(device)
    }

    /// Connects to the successor of a server that is gone, which has to do what was in flight.
    fn reconnect(&mut self) -> Result<()> {
        self.session = None;
        let mut refusal = None;
        let back = clock::poll(AWAY_LIMIT, RECONNECT_PAUSE, || {
            self.open().map_err(|error| refusal = Some(error)).ok()
        });
        match (back, refusal) {
            (Some(()), _) => Ok(()),
            (None, Some(error)) => Err(error.context("the server does not come back")),
            (None, None) => bail!("the server does not come back"),
        }
    }

    fn open(&mut self) -> Result<()> {
        let stream = UnixStream::connect(&self.socket)?;
        // A server that is stopped is a failed run, not a hanging one.
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        let queues = self.rings.len() as u64;
        let mut front_end = Frontend::from_stream(stream.try_clone()?, queues);
        self.negotiate(&mut front_end).context("negotiating")?;
        self.start(&mut front_end).context("starting queues")?;
        let events = EpollEvent::new(EventSet::READ_HANG_UP | EventSet::HANG_UP, GONE);
        self.wait.ctl(ControlOperation::Add, stream.as_raw_fd(), events)?;
        self.session = Some(Session { stream, _front_end: front_end });
        Ok(())
    }

    fn negotiate(&mut self, front_end: &mut Frontend) -> Result<()> {
        let offered = front_end.get_features()?;
        let needed = F_VERSION_1 | F_PROTOCOL_FEATURES;
        ensure!(offered & needed == needed, "features {offered:#x} are too few");
        let features = offered & (needed | F_EVENT_IDX | F_FLUSH | F_MQ);
        front_end.set_owner()?;
        let known = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        let protocol = front_end.get_protocol_features()? & known;
        front_end.set_protocol_features(protocol)?;
        if protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            // Refusals are reported.
            front_end.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        if self.rings.len() > 1 {
            let queues = front_end.get_queue_num()?;
            ensure!(queues >= self.rings.len() as u64, "it has only {queues} queues");
        }
        let room = vec![0; CONFIG_BYTES as usize];
        let flags = VhostUserConfigFlags::empty();
        let (_, config) = front_end.get_config(0, CONFIG_BYTES, flags, &room)?;
        let sectors = config.first_chunk().context("no configuration")?;
        self.disk_bytes = u64::from_le_bytes(*sectors) * 512;
        front_end.set_features(features)?;
        for ring in &mut self.rings {
            ring.event_idx = features & F_EVENT_IDX != 0;
        }
        if protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD) {
            if self.inflight.is_none() {
                let queues = u16::try_from(self.rings.len())?;
                let wish = VhostUserInflight::new(0, 0, queues, QUEUE_SIZE);
                self.inflight = Some(front_end.get_inflight_fd(&wish)?);
            }
            if let Some((what, file)) = &self.inflight {
                front_end.set_inflight_fd(what, file.as_raw_fd())?;
            }
        }
        Ok(())
    }

    fn start(&self, front_end: &mut Frontend) -> Result<()> {
        front_end.set_mem_table(&[VhostUserMemoryRegionInfo::from_guest_region(&self.memory)?])?;
        for (index, ring) in self.rings.iter().enumerate() {
            let [desc_table_addr, avail_ring_addr, used_ring_addr] = ring.addresses();
            let (queue_max_size, queue_size) = (QUEUE_SIZE, QUEUE_SIZE);
            let config = VringConfigData {
                queue_max_size,
                queue_size,
                flags: 0,
                desc_table_addr,
                used_ring_addr,
                avail_ring_addr,
                log_addr: None,
            };
            front_end.set_vring_num(index, QUEUE_SIZE)?;
            // As QEMU does after a server that did not exit cleanly: everything given back is done.
            front_end.set_vring_base(index, ring.used_idx())?;
            front_end.set_vring_addr(index, &config)?;
            front_end.set_vring_call(index, &self.call)?;
            front_end.set_vring_kick(index, &ring.kick)?;
            front_end.set_vring_enable(index, true)?;
        }
        Ok(())
    }

    /// Waits until the server calls or is gone.
    fn wait(&self) -> Result<Wake> {
        let mut events = [EpollEvent::default(); 2];
        let limit = i32::try_from(ANSWER_LIMIT.as_millis())?;
        let count = self.wait.wait(limit, &mut events)?;
        ensure!(count > 0, "no answer within {ANSWER_LIMIT:?}");
        let gone = events[..count].iter().any(|event| event.data() == GONE);
        Ok(if gone { Wake::Gone } else { Wake::Called })
    }

    /// Forgets the session of a server that is gone.
    fn lose(&mut self) -> Result<()> {
        if let Some(session) = self.session.take() {
            let nothing = EpollEvent::default();
            self.wait.ctl(ControlOperation::Delete, session.stream.as_raw_fd(), nothing)?;
        }
        Ok(())
    }
}

/// Memory that a server can map too.
fn share(bytes: usize) -> Result<Memory> {
    let file: File = memfd_create("mica-load", MemfdFlags::CLOEXEC)?.into();
    ftruncate(&file, bytes as u64)?;
    let file = FileOffset::new(file, 0);
    Ok(Memory::from_range(GuestAddress(0), bytes, Some(file))?)
}

fn nonblocking() -> i32 {
    i32::try_from(rustix::event::EventfdFlags::NONBLOCK.bits()).unwrap_or(0)
}
