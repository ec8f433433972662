//! Disks as raw files (`mica serve --fuse`): other programs and the kernel use them, and judge.
//!
//! Needs the right to mount: root and `/dev/fuse`.

mod life;
mod requests;
/// `mica serve --fuse`, and the file that it serves.
mod served;
mod tools_on_it;
