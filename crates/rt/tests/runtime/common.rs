//! What the tests of the runtime share: a run on each backend, and files to read.

use mica_rt::{Access, Backend, Executor, File};
use std::future::Future;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;

/// Runs `test` on an executor of each backend that does real I/O.
pub(crate) fn on_each_backend<F: Future<Output = ()>>(test: impl Fn() -> F) {
    for backend in real_backends() {
        Executor::new(backend).unwrap().block_on(test());
    }
}

/// The backends that do real I/O on this machine.
pub(crate) fn real_backends() -> Vec<Backend> {
    match Executor::new(Backend::Uring) {
        Ok(_) => vec![Backend::Uring, Backend::Pool],
        Err(error) => {
            eprintln!("skipped on uring: the system refuses io_uring here: {error}");
            vec![Backend::Pool]
        }
    }
}

/// Bytes of which no two neighbours of a block are the same.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((at + at / 251) % 251).unwrap()).collect()
}

/// A file of `content`, open with `access`. `None` where the file system knows no O_DIRECT.
pub(crate) fn file_of(content: &[u8], access: Access) -> Option<Arc<File>> {
    let mut made = tempfile::NamedTempFile::new().unwrap();
    made.write_all(content).unwrap();
    made.flush().unwrap();
    let flags = match access {
        Access::Buffered => 0,
        Access::Direct => libc::O_DIRECT,
    };
    match std::fs::File::options().read(true).custom_flags(flags).open(made.path()) {
        Ok(file) => Some(Arc::new(File::new(file.into(), access))),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            eprintln!("skipped O_DIRECT: {} knows none", std::env::temp_dir().display());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// An empty file, open with `access`, and its path; it is removed at the end. `None` where the file
/// system knows no O_DIRECT.
pub(crate) fn empty_file(access: Access) -> Option<(tempfile::TempPath, Arc<File>)> {
    let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
    let flags = match access {
        Access::Buffered => 0,
        Access::Direct => libc::O_DIRECT,
    };
    match std::fs::File::options().read(true).write(true).custom_flags(flags).open(&path) {
        Ok(file) => Some((path, Arc::new(File::new(file.into(), access)))),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            eprintln!("skipped O_DIRECT: {} knows none", std::env::temp_dir().display());
            None
        }
        Err(error) => panic!("{error}"),
    }
}
