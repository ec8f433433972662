//! What is written through mica is there afterwards, in the eyes of QEMU and of others.

mod faults;
mod filesystems;
mod foreign;
mod fsx;
mod kill;
mod load;
mod nbd;
