//! Chains that are read in the simulated world, and testers that are tested themselves.

mod chains;
mod corpus;
mod map;
mod specs;
mod testers;
