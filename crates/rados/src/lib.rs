//! Stores of objects in pools of Ceph RADOS. Internal crate.
//!
//! ```text
//! executor ─▶ Pool ─▶ Requests ─▶ librados (ffi) ─▶ the storage daemons
//!          ◀──────────────────────────────────────── a callback that wakes the executor's task
//!               └▶ Lists ─▶ a few threads ─▶ Walk ─▶ librados, which lists only while one waits
//! ```
//!
//! A store is a namespace of a pool. An object has its own name there, and a locator that follows
//! from it (`layout`), by which folders are listed without looking at the rest of the pool.
//!
//! Invariants
//! - P1 A put is one operation: create, which fails if the object exists, and write. RADOS orders
//!   the operations on an object, remembers those that are sent twice, and answers one only when
//!   everything before it is durable: also that an object exists.
//! - P2 Every request ends: with an answer, or after the time it has. What ran out of time may
//!   still happen: the error is of kind `Io`, after which nobody knows.
//! - P3 A client that the cluster has blocklisted is told so by an error of kind `Denied`: for
//!   good. A [`ReconnectingPool`] is another client then.
//! - P4 A full pool refuses puts (`NoSpace`) and lets objects be deleted. Nothing waits for room.

mod ffi;
mod folders;
mod known;
mod layout;
mod list;
mod lists;
mod outcome;
mod pool;
mod reconnecting;
mod requests;
mod shared;
mod threads;
mod walk;

pub use pool::{Pool, PoolOptions};
pub use reconnecting::ReconnectingPool;
