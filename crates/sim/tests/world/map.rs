//! The map of a chain against a naive walk of it: for each sector, layer by layer from the top,
//! L1 entry, L2 entry, interpretation. The walk knows the format and nothing else of mica.
//!
//! Chains are small and of every shape: layers of all cluster sizes and lengths, subclusters, raw
//! bases, more layers than one batch of a walk; with parts of an index and whole ones; and with
//! tables in which bits were flipped, where exactly the sectors must fail whose entries are
//! malformed.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot continue")]
#![expect(clippy::cast_possible_truncation, reason = "images of a few MiB")]

mod bugs;
mod clones;
mod files;
mod model;
mod random;
