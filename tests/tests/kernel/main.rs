//! What a real kernel does beneath a server: power cuts, file systems that freeze, or return
//! without what was not written out. Needs root, loop devices and FUSE.

mod cuts;
mod names;
mod remount;
mod sidecars;
mod stuck;
mod threads;
