//! Load generators for NBD and vhost-user-blk ([`vhost`]): one thread, many requests in flight,
//! every answer verified.
//!
//! It must never be the bottleneck: requests are sent in batches with one system call, answers are
//! taken in batches with one system call and verified in place. [`null`] measures the most that it
//! can do.

mod drive;
mod histogram;
pub(crate) mod null;
mod pattern;
mod replies;
pub(crate) mod stamp;
pub(crate) mod vhost;
mod write;

pub(crate) use drive::{Load, Outcome, Request, run, run_on_all};
pub(crate) use histogram::{Histogram, ratio};
pub(crate) use pattern::Pattern;
pub(crate) use write::{Durable, WriteLoad, Written, write};
