//! `--ublk`: block devices of this machine's kernel. This build does not support them, and says so.

use mica_block::{Error, ErrorKind};
use std::path::Path;

const CONTROL: &str = "/dev/ublk-control";

/// Why it is refused, and what to do instead.
pub(crate) fn refusal(disk: &str) -> Error {
    let context = match Path::new(CONTROL).exists() {
        false => format!(
            "disk {disk:?}: --ublk: this kernel has no {CONTROL}: load its driver (modprobe \
             ublk_drv), or serve the disk by --vhost-user, --nbd or --fuse"
        ),
        true => format!(
            "disk {disk:?}: --ublk: the kernel has it, but this build of mica does not support it: \
             serve the disk by --vhost-user, --nbd or --fuse"
        ),
    };
    Error::new(ErrorKind::Unsupported, context)
}
