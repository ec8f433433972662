//! Layers that are merged, up into the active layer and down into one beneath, while a guest writes
//! and while nobody does: QEMU reads what is left.

mod beside;
mod bitmaps;
mod chain;
mod datafile;
mod elsewhere;
mod encrypted;
mod full;
mod live;
mod offline;
