//! Chains that are read in the simulated world, and tests of the tests.

mod chains;
mod corpus;
mod map;
mod specs;
mod testers;
