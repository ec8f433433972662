//! The log of volumes: random work, power cuts and deaths of the process, judged by a model.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot continue")]

mod damage;
mod files;
mod given_up;
mod lost;
mod model;
mod random;
mod steps;
