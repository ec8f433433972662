//! Whether the executor makes small writes to a file by itself ([`File::write_in_place`]).
//!
//! ext2, ext3 and ext4 cannot tell beforehand whether a write to the page cache would wait, so each
//! one would be given to a thread, which costs several times what the write does.
//! But a write may block: on dirty pages, on a journal, on a file system that is frozen; and then
//! everything else on the executor blocks with it. So the executor makes writes only to files of
//! these file systems, and only while no other disk would suffer. Disks are added and removed while
//! the process runs, so this is checked at each write.

use mica_rt::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether executors may make writes by themselves, for all files of a process.
#[derive(Default)]
pub(crate) struct InPlace {
    is_allowed: Arc<AtomicBool>,
}

impl InPlace {
    pub(crate) fn set(&self, is_allowed: bool) {
        self.is_allowed.store(is_allowed, Ordering::Relaxed);
    }

    /// Lets the executor write `file` by itself if that is faster, and while it is allowed.
    pub(crate) fn apply_to(&self, file: File) -> File {
        match file.is_on_ext() {
            true => file.write_in_place(Arc::clone(&self.is_allowed)),
            false => file,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_rt::Access;

    #[test]
    fn file_of_ext4_is_written_in_place_while_that_is_allowed_and_no_other_is() {
        let (in_place, made) = (InPlace::default(), tempfile::NamedTempFile::new().expect("made"));
        let opened = |path: &std::path::Path| {
            let fd = std::fs::File::open(path).expect("opened");
            in_place.apply_to(File::new(fd.into(), Access::Buffered))
        };
        let (file, other) = (opened(made.path()), opened("/proc/self/stat".as_ref()));
        let is_ext = file.is_on_ext();
        for is_allowed in [false, true, false] {
            in_place.set(is_allowed);
            assert_eq!(file.is_written_in_place(), is_ext && is_allowed);
            assert!(!other.is_written_in_place());
        }
    }
}
