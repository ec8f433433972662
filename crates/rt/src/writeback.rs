//! Writing back what is in the page cache. It makes nothing durable.

use crate::file::File;
use crate::file_io::on_thread;
use crate::system;
use rustix::fd::AsFd;
use std::io;
use std::sync::Arc;

/// Asks the system to begin to write `len` bytes at `offset` of `file` to their device. A hint: it
/// makes nothing durable, and takes no error away from the sync that does.
pub fn begin_writeback(file: impl AsFd, offset: u64, len: u64) {
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else { return };
    system::begin_sync_of_range(file.as_fd(), offset, len);
}

/// Has the system write `len` bytes at `offset` of `file` to their device, and waits until they are
/// no longer only in the page cache. A later sync reports what fails here, too.
///
/// # Errors
/// What the system reports; nothing where it does not know how to.
pub async fn write_back(file: &Arc<File>, offset: u64, len: u64) -> io::Result<()> {
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let written = on_thread(file, move |file| system::sync_range(file.as_fd(), offset, len)).await;
    match written {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::ESPIPE)) => Ok(()),
        written => written,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Backend, Executor};
    use std::io::{Read, Seek, Write};

    #[test]
    fn what_is_written_back_stays_as_it_is_and_what_cannot_be_is_no_error() {
        Executor::new(Backend::Pool).unwrap().block_on(async {
            let mut file = tempfile::NamedTempFile::new().expect("made");
            file.write_all(&[7; 10_000]).expect("written");
            let opened = file.reopen().expect("opened");
            let opened = Arc::new(File::new(opened.into(), Access::Buffered));
            for (offset, len) in [(0, 10_000), (4096, 1 << 40), (1 << 40, 1)] {
                write_back(&opened, offset, len).await.expect("written back");
            }
            for (offset, len) in [(u64::MAX, 1), (0, u64::MAX)] {
                let refused = write_back(&opened, offset, len).await.expect_err("no such range");
                assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
            }
            assert_eq!(std::fs::read(file.path()).expect("read"), [7; 10_000]);
            let (_reader, writer) = rustix::pipe::pipe().expect("a pipe");
            let pipe = Arc::new(File::new(writer, Access::Buffered));
            write_back(&pipe, 0, 1).await.expect("nothing to write back");
        });
    }

    #[test]
    fn hint_changes_nothing_wherever_it_is_given() {
        let mut file = tempfile::tempfile().expect("made");
        file.write_all(&[7; 10_000]).expect("written");
        for (offset, len) in [(0, 10_000), (4096, 1 << 40), (u64::MAX, 1), (0, u64::MAX)] {
            begin_writeback(&file, offset, len);
        }
        let mut bytes = Vec::new();
        file.rewind().expect("a file");
        file.read_to_end(&mut bytes).expect("read");
        assert_eq!(bytes, [7; 10_000]);
    }
}
