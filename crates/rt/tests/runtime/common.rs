//! Helpers of the runtime's tests: a run on each backend, files to read, sockets, tasks.

use mica_rt::{Access, Backend, Executor, File, Socket, Stream, sleep, spawn};
use std::cell::Cell;
use std::fs::OpenOptions;
use std::future::Future;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

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

/// Bytes in which no two neighbouring blocks are the same.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((at + at / 251) % 251).unwrap()).collect()
}

/// A file of `content`, open with `access`. `None` if the file system does not support O_DIRECT.
pub(crate) fn file_of(content: &[u8], access: Access) -> Option<Arc<File>> {
    let mut made = tempfile::NamedTempFile::new().unwrap();
    made.write_all(content).unwrap();
    made.flush().unwrap();
    open(made.path(), std::fs::File::options().read(true), access)
}

/// An empty file, open with `access`, and its path; it is removed at the end. `None` if the file
/// system does not support O_DIRECT.
pub(crate) fn empty_file(access: Access) -> Option<(tempfile::TempPath, Arc<File>)> {
    let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
    let file = open(&path, std::fs::File::options().read(true).write(true), access)?;
    Some((path, file))
}

fn open(path: &Path, options: &mut OpenOptions, access: Access) -> Option<Arc<File>> {
    let flags = match access {
        Access::Buffered => 0,
        Access::Direct => libc::O_DIRECT,
    };
    match options.custom_flags(flags).open(path) {
        Ok(file) => Some(Arc::new(File::new(file.into(), access))),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            eprintln!("skipped O_DIRECT: {} does not support it", std::env::temp_dir().display());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A stream and the socket at its other end.
pub(crate) fn socket_pair() -> (Stream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Stream::Socket(Arc::new(Socket::new(ours).unwrap())), theirs)
}

/// Spawns tasks and waits for all of them.
pub(crate) struct Group(Rc<Cell<usize>>);

impl Group {
    pub(crate) fn new() -> Self {
        Self(Rc::default())
    }

    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        let count = Rc::clone(&self.0);
        count.set(count.get() + 1);
        spawn(async move {
            future.await;
            count.set(count.get() - 1);
        });
    }

    pub(crate) async fn finish(self) {
        while self.0.get() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    }
}
