//! The per-queue executor and its I/O backends. Internal crate.
//!
//! A queue of mica is one thread with one [`Executor`]: its tasks, its timers, its operations, its
//! ring. The code above says `read_at(..).await` and does not know whether io_uring, a pool of
//! threads or the simulator does it; so the code that runs in production is the code that the
//! simulator drives, step by step, from a seed.
//!
//! An operation owns its buffer until it completes ([`Buf`]); a future that is dropped early leaves
//! the buffer with the operation.

mod backend;
mod buf;
mod clock;
mod core;
pub mod descriptors;
mod doorbell;
mod executor;
mod file;
mod file_io;
mod file_system;
mod join;
mod keyring;
mod lock;
mod log_limit;
mod looking;
mod net;
mod op;
mod pace;
mod parts;
mod process;
mod remote;
mod restrict;
mod send;
mod socket;
mod submit;
pub mod sync;
mod system;
mod task;
mod task_key;
mod time;
mod unix_connect;
mod writeback;

pub use backend::Backend;
pub use buf::{BUF_ALIGN, Buf, SharedMemory, release_freed_memory};
pub use clock::Instant;
pub use doorbell::{Doorbell, prepare_doorbells};
pub use executor::{Executor, Handle, look, yield_now, yield_to_ready};
pub use file::{Access, File};
pub use file_io::{
    fallocate, is_cached, on_thread, read_ahead, read_at, set_len, sync_data, write_at,
};
pub use file_system::FileSystem;
pub use join::{join_all, join_two};
pub use keyring::read_user_key;
pub use log_limit::{LogLimit, Omitted};
pub use looking::Looking;
pub use net::{MemoryStream, Stream};
pub use op::SimWork;
pub use pace::Pace;
pub use parts::{Part, Parts, write_parts};
pub use process::is_dying;
pub use rustix::fs::FallocateFlags;
pub use socket::Socket;
pub use submit::Op;
pub use task::{Task, catch_panic, spawn};
pub use time::{Elapsed, Sleep, now, sleep, timeout};
pub use unix_connect::{connect_unix, connect_unix_at_once};
pub use writeback::{begin_writeback, write_back};

use std::time::Duration;

/// An operation of a simulated device: `work` runs on `buf` when it completes, after about
/// `latency` of virtual time. Fails with ENOSYS outside the `sim` backend.
///
/// # Panics
/// Outside an executor.
pub fn simulate(buf: Buf, latency: Duration, work: SimWork) -> Op {
    Op::start(op::OpKind::Simulated { work: Some(work), buf, latency })
}
