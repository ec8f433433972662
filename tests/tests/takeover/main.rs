//! A server that takes over from another one.

mod faults;
mod live;
mod signals;
