//! The monitor's side of the protocol, a message at a time.

use super::ring::{Ring, Way};
use super::{Guest, USER};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Numbers of messages.
pub(in crate::vhost_user) mod code {
    pub(in crate::vhost_user) const GET_FEATURES: u32 = 1;
    pub(in crate::vhost_user) const SET_FEATURES: u32 = 2;
    pub(in crate::vhost_user) const SET_MEM_TABLE: u32 = 5;
    pub(in crate::vhost_user) const SET_LOG_BASE: u32 = 6;
    pub(in crate::vhost_user) const SET_VRING_NUM: u32 = 8;
    pub(in crate::vhost_user) const SET_VRING_ADDR: u32 = 9;
    pub(in crate::vhost_user) const SET_VRING_BASE: u32 = 10;
    pub(in crate::vhost_user) const GET_VRING_BASE: u32 = 11;
    pub(in crate::vhost_user) const SET_VRING_KICK: u32 = 12;
    pub(in crate::vhost_user) const SET_VRING_CALL: u32 = 13;
    pub(in crate::vhost_user) const SET_VRING_ERR: u32 = 14;
    pub(in crate::vhost_user) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(in crate::vhost_user) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(in crate::vhost_user) const SET_VRING_ENABLE: u32 = 18;
    pub(in crate::vhost_user) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(in crate::vhost_user) const GET_CONFIG: u32 = 24;
    pub(in crate::vhost_user) const GET_INFLIGHT_FD: u32 = 31;
    pub(in crate::vhost_user) const SET_INFLIGHT_FD: u32 = 32;
    pub(in crate::vhost_user) const ADD_MEM_REG: u32 = 37;
    pub(in crate::vhost_user) const REM_MEM_REG: u32 = 38;
}

const VERSION: u32 = 1;
const NEED_REPLY: u32 = 8;

/// A new event descriptor.
pub(in crate::vhost_user) fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an event")
}

/// Virtio features of a guest that goes about it in this `way`.
pub(in crate::vhost_user) fn features(way: Way) -> u64 {
    let optional = (u64::from(way.event_idx) << 29) | (u64::from(way.indirect) << 28);
    let flushes = u64::from(!way.is_write_through) << 9;
    optional | 1 << 32 | 1 << 30 | flushes | u64::from(way.is_logged) << 26
}

/// What GET_INFLIGHT_FD and SET_INFLIGHT_FD carry.
pub(in crate::vhost_user) fn inflight_message(len: u64, queues: u16, size: u16) -> Vec<u8> {
    let numbers = [&queues.to_le_bytes()[..], &size.to_le_bytes(), &[0; 4]].concat();
    [&len.to_le_bytes()[..], &0_u64.to_le_bytes(), &numbers].concat()
}

/// A connection.
pub(in crate::vhost_user) struct FrontEnd {
    pub(in crate::vhost_user) stream: UnixStream,
}

impl FrontEnd {
    pub(in crate::vhost_user) fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        Self { stream }
    }

    /// Sends any bytes.
    pub(in crate::vhost_user) fn send(
        &self,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "room for them");
        }
        let parts = [IoSlice::new(bytes)];
        rustix::net::sendmsg(&self.stream, &parts, &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    pub(in crate::vhost_user) fn message(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
        let len = u32::try_from(payload.len()).expect("short");
        let mut out: Vec<u8> =
            [code, VERSION | flags, len].into_iter().flat_map(u32::to_le_bytes).collect();
        out.extend(payload);
        out
    }

    /// The next message, and the descriptor that accompanies it.
    fn receive(&self) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
        let mut header = [0; 12];
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut header)];
        let received =
            rustix::net::recvmsg(&self.stream, &mut parts, &mut control, RecvFlags::WAITALL)?;
        let mut file = None;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                file = fds.into_iter().next();
            }
        }
        if received.bytes != header.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let len = u32::from_le_bytes(*header[8..].first_chunk().expect("4 bytes"));
        let mut payload = vec![0; len as usize];
        (&self.stream).read_exact(&mut payload)?;
        Ok((payload, file))
    }

    /// A question with an answer.
    pub(in crate::vhost_user) fn ask(
        &self,
        code: u32,
        payload: &[u8],
    ) -> (Vec<u8>, Option<OwnedFd>) {
        self.send(&Self::message(code, 0, payload), &[]).expect("sends");
        self.receive().expect("an answer")
    }

    /// An order; whether it was carried out.
    pub(in crate::vhost_user) fn order(
        &self,
        code: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<bool> {
        self.send(&Self::message(code, NEED_REPLY, payload), fds)?;
        let (answer, _) = self.receive()?;
        Ok(answer == 0_u64.to_le_bytes())
    }

    pub(in crate::vhost_user) fn command(&self, code: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        assert!(self.order(code, payload, fds).expect("an answer"), "message {code} is refused");
    }

    /// An order whose outcome is not asked for.
    pub(in crate::vhost_user) fn say(&self, code: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.send(&Self::message(code, 0, payload), fds).expect("sends");
    }

    pub(in crate::vhost_user) fn negotiate(&self, way: Way) {
        let (offered, _) = self.ask(code::GET_FEATURES, &[]);
        let offered = u64::from_le_bytes(*offered.first_chunk().expect("8 bytes"));
        assert_eq!(features(way) & !offered, 0);
        let (protocol, _) = self.ask(code::GET_PROTOCOL_FEATURES, &[]);
        // REPLY_ACK comes into force with both.
        let set = |code, bytes: &[u8]| self.say(code, bytes, &[]);
        set(code::SET_FEATURES, &features(way).to_le_bytes());
        set(code::SET_PROTOCOL_FEATURES, &protocol);
    }

    pub(in crate::vhost_user) fn share(&self, guest: &Guest) {
        let count = u32::try_from(guest.files.len()).expect("few");
        let mut table = [count.to_le_bytes(), [0; 4]].concat();
        for (layout, _) in &guest.files {
            table.extend(region(layout.guest_phys_addr, layout.memory_size, layout.user_addr));
        }
        let fds: Vec<_> = guest.files.iter().map(|(_, file)| file.as_fd()).collect();
        self.command(code::SET_MEM_TABLE, &table, &fds);
    }

    pub(in crate::vhost_user) fn addresses(&self, ring: &Ring) {
        let mut payload = [u32::from(ring.index), u32::from(ring.way.is_logged)]
            .into_iter()
            .flat_map(u32::to_le_bytes)
            .collect::<Vec<u8>>();
        let places = [USER + ring.desc(), USER + ring.used(), USER + ring.avail(), ring.used()];
        payload.extend(places.into_iter().flat_map(u64::to_le_bytes));
        self.command(code::SET_VRING_ADDR, &payload, &[]);
    }

    /// Sets a ring up from where it is, and enables it.
    pub(in crate::vhost_user) fn start(&self, ring: &Ring) {
        self.set(code::SET_VRING_NUM, ring, u32::from(ring.size));
        self.set(code::SET_VRING_BASE, ring, u32::from(ring.used_idx()));
        self.addresses(ring);
        self.hand(code::SET_VRING_CALL, ring, &ring.call);
        self.hand(code::SET_VRING_KICK, ring, &ring.kick);
        self.set(code::SET_VRING_ENABLE, ring, 1);
    }

    pub(in crate::vhost_user) fn set(&self, code: u32, ring: &Ring, number: u32) {
        self.command(code, &pair(ring.index, number), &[]);
    }

    pub(in crate::vhost_user) fn hand(&self, code: u32, ring: &Ring, fd: &impl AsFd) {
        self.command(code, &u64::from(ring.index).to_le_bytes(), &[fd.as_fd()]);
    }

    /// Stops a ring; returns where to continue.
    pub(in crate::vhost_user) fn stop(&self, ring: &Ring) -> u16 {
        let (answer, _) = self.ask(code::GET_VRING_BASE, &pair(ring.index, 0));
        u16::from_le_bytes(*answer[4..].first_chunk().expect("8 bytes"))
    }

    /// Whether the server hangs up.
    pub(in crate::vhost_user) fn is_closed(&self) -> bool {
        loop {
            match (&self.stream).read(&mut [0; 4096]) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == io::ErrorKind::ConnectionReset,
            }
        }
    }
}

fn pair(index: u16, number: u32) -> Vec<u8> {
    [u32::from(index), number].into_iter().flat_map(u32::to_le_bytes).collect()
}

/// A region of a memory table, without an offset.
pub(in crate::vhost_user) fn region(at: u64, len: u64, user: u64) -> Vec<u8> {
    [at, len, user, 0].into_iter().flat_map(u64::to_le_bytes).collect()
}
