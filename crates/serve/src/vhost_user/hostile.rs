//! A stranger's messages, descriptors, rings and chains.

use super::batch::BusyQueues;
use super::chain::{Chain, Table};
use super::common::Common;
use super::config::has;
use super::placement::Placement;
use super::request::{ID_BYTES, Request, Rules};
use super::server::session;
use super::stats::Counters;
use crate::budget::Party;
use crate::testing::clock::pause;
use crate::testing::memory::MemoryDisk;
use crate::workers::Workers;
use mica_rt::Backend;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Bytes of the memory that is handed over.
const MEMORY_BYTES: u64 = 64 << 10;
/// Bytes of it that the input says.
const IMAGE_BYTES_MAX: usize = 8 << 10;
/// Descriptors of the table that [`survive_chains`] reads.
const TABLE_ENTRIES: u16 = 16;

/// Holds a session with what `input` says, and panics if the server did. The first two bytes are
/// the length of what is written to the guest's memory, which follows; the rest is messages, each
/// with its number, its flags, what descriptors go with it, the length of its payload (a byte
/// each), and the payload. Tells what the server counted.
pub fn survive(input: &[u8]) -> Counters {
    static WORKERS: OnceLock<Arc<Workers>> = OnceLock::new();
    let workers = WORKERS.get_or_init(|| Workers::start(2, Backend::Auto).expect("workers"));
    let Some((len, rest)) = input.split_first_chunk() else { return Counters::default() };
    let len = usize::from(u16::from_le_bytes(*len)).min(rest.len()).min(IMAGE_BYTES_MAX);
    let (image, messages) = rest.split_at(len);
    let mut disk = MemoryDisk::new(1 << 20);
    disk.align = 1;
    let disk = Arc::new(disk);
    let stats = (0..2).map(|_| Default::default()).collect();
    let id = [b'x'; ID_BYTES as usize];
    let common = Common {
        disk: Arc::clone(&disk) as _,
        stats,
        discard: Default::default(),
        edges: None,
        limiter: None,
        back_channel: Default::default(),
        losses: Default::default(),
        logs: Default::default(),
        party: Party::new(workers.pool()),
        busy_queues: BusyQueues::default(),
        placement: Placement::new(workers),
        is_ending: Default::default(),
        id,
    };
    let common = Arc::new(common);
    let (near, far) = UnixStream::pair().expect("a pair");
    let served = Arc::clone(&common);
    let server = std::thread::spawn(move || session(far, &served));
    if talk(&near, image, messages) {
        // The queues poll their rings concurrently.
        pause(Duration::from_micros(300));
    }
    drop(near);
    assert!(server.join().is_ok(), "the session panicked");
    let counters = common.counters();
    assert_eq!(counters.panics, 0, "a queue panicked");
    assert!(disk.is_quiet(), "a request outlived its session");
    counters
}

/// Sends `messages` until the server hangs up; whether a queue may run.
fn talk(near: &UnixStream, image: &[u8], mut messages: &[u8]) -> bool {
    let memory = memory(image);
    let mut has_kicks = false;
    while let Some(([code, flags, files, len], rest)) = messages.split_first_chunk() {
        let (payload, rest) = rest.split_at(usize::from(*len).min(rest.len()));
        messages = rest;
        has_kicks |= *code == SET_VRING_KICK;
        // The version, which every message has, is in the lowest bits; none is a reply.
        let header = [u32::from(*code), 1 | u32::from(flags & 8), u32::from(*len)];
        let header: Vec<u8> = header.into_iter().flat_map(u32::to_le_bytes).collect();
        let fds: Vec<OwnedFd> = (0..files % 4).map(|_| descriptor(files / 4, &memory)).collect();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let parts = [IoSlice::new(&header), IoSlice::new(payload)];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        if rustix::net::sendmsg(near, &parts, &mut control, flags).is_err() {
            break;
        }
    }
    has_kicks
}

const SET_VRING_KICK: u8 = 12;

fn memory(image: &[u8]) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = memfd_create("guest", flags).expect("a memfd");
    ftruncate(&memory, MEMORY_BYTES).expect("a length");
    let memory = File::from(memory);
    memory.write_all_at(image, 0).expect("writes");
    memory
}

fn descriptor(kind: u8, memory: &File) -> OwnedFd {
    match kind % 8 {
        0..=2 => memory.try_clone().expect("a file").into(),
        3..=5 => eventfd(1, EventfdFlags::CLOEXEC).expect("an event"),
        6 => rustix::pipe::pipe().expect("a pipe").0,
        _ => File::open("/dev/zero").expect("it is there").into(),
    }
}

/// Reads the chains of a table that is `input`, and panics if what is read makes no sense. How
/// many were requests.
pub fn survive_chains(input: &[u8]) -> usize {
    let len = usize::try_from(MEMORY_BYTES).expect("small");
    let guest = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), len)]).expect("memory");
    let kept = &input[..input.len().min(len)];
    guest.write_slice(kept, GuestAddress(0)).expect("it has room");
    let table = Table { at: GuestAddress(0), entries: u32::from(TABLE_ENTRIES) };
    let rules = Rules { disk_len: 1 << 20, is_writable: has(input.len() as u64, 0) };
    let mut chain = Chain::default();
    let is_request = |head: &u16| {
        if chain.read(&guest, table, *head).is_err() {
            return false;
        }
        let all = || chain.readable.iter().chain(&chain.writable);
        assert!(all().all(|piece| piece.len > 0), "an empty piece");
        assert!(all().map(|piece| u64::from(piece.len)).sum::<u64>() <= 1 << 32, "too long");
        Request::parse(&guest, &mut chain, rules).is_ok()
    };
    (0..=TABLE_ENTRIES).filter(is_request).count()
}

#[cfg(test)]
mod tests;
