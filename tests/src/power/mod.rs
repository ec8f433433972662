//! Power cuts beneath a real kernel and file system: everything that reaches a disk is recorded,
//! and replayed up to the moment of a cut.
//!
//! ```text
//! guest ─NBD▶ mica ▶ ext4 ▶ loop ▶ nbdfuse ─NBD▶ qemu-storage-daemon: blklogwrites ▶ disk, log
//! ```

mod history;
mod recorder;
mod replay;

pub use history::{Effect, History, SECTOR, stamped, stamps};
pub use recorder::{DISK_BYTES, Recorder, Recording, TOOLS, lacks};
pub use replay::{CUTS, Cut, Disk, Survivor, places};
