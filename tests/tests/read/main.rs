//! What mica reads of chains, and what it says of them, is what QEMU reads and says.

mod chains;
mod diff;
mod frozen;
mod generated;
mod index;
mod map;
mod matrix;
mod survey;
mod tree;
