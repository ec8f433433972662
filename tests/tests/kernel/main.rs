//! What a real kernel does beneath a server: power cuts, file systems that stand still or come
//! again without what was not written out. Needs root, loop devices and FUSE.

mod cuts;
mod remount;
mod stuck;
