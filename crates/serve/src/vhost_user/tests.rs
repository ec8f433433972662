//! Whole servers with front ends that share memory with them.

mod data;
mod in_flight;
mod life;
mod lost_memory;
mod resize;
mod scarce;
mod strangers;
