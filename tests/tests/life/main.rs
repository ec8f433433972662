//! The life of a chain: layers that come while it is served, clones, internal snapshots.

mod clones;
mod groups;
mod internal;
mod owners;
mod raw;
mod snapshots;
mod together;
mod unclosed;
mod world;
