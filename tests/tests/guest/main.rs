//! Real guests: a virtual machine with Debian's kernel has a disk that mica serves, as
//! vhost-user-blk or over NBD. What the guest reads and writes is judged in the guest by its own
//! programs, and on the host by QEMU's and by e2fsck.
//!
//! ```text
//! guest: dd, cmp, ext4 ▶ virtio_blk ▶ QEMU ─vhost-user▶ mica ▶ image
//!                                     QEMU ─NBD───────▶ mica ▶ image
//! ```
//!
//! The machine is `mica_tests::machine`; `cargo xtask setup` installs QEMU, and gets the kernel and
//! a busybox into `target/machine`. KVM is used if it can boot a guest, otherwise TCG, under which
//! a guest takes some seconds to boot.
//!
//! The tests of restarts kill mica, or ask it to stop, while the guest writes; they print how long
//! the guest stalled (`--nocapture` shows it). `MICA_GUEST_KILLS` says how often, 4 by default:
//!
//! ```text
//! MICA_GUEST_KILLS=50 cargo test -p mica-tests --test guest -- --nocapture restart
//! ```

mod chain;
mod ext4;
/// What the tests share: files, servers, verdicts.
mod host;
mod pattern;
mod resize;
mod restart;
