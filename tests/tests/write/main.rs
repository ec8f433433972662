//! What is written through mica is there afterwards, as seen by QEMU and others.

mod faults;
mod filesystems;
mod foreign;
mod fsx;
mod kill;
mod load;
mod nbd;
