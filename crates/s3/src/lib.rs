//! Stores of objects in buckets of S3 and of services that speak like it. Internal crate.
//!
//! ```text
//! executor ─▶ Bucket ─▶ a task on the thread of tokio ─▶ object_store ─▶ the service
//!          ◀─────────── an answer that wakes the executor's task
//! ```
//!
//! Invariants
//! - B1 The client beneath repeats nothing: of a put that was repeated, nobody could say whether
//!   the object that is there is its own. `mica_store::object::RetryObjects` can.
//! - B2 A put has found an object only if the service says that the condition does not hold (412).
//!   A conflict (409) is no answer: another request for the name was under way.
//! - B3 Listings rely on the order of keys, which buckets of the "directory" kind do not have.
//!
//! Not every service keeps its promises: each store is probed before it holds a volume.

mod bucket;
mod list;
mod outcome;
mod runtime;

pub use bucket::{Bucket, BucketOptions, Credentials, REQUEST_LIMIT};

#[cfg(test)]
mod tests;
