//! Connecting to unix sockets, which may be full.
//!
//! A server lets as many clients wait as it said to `listen(2)`. If it takes nobody in, because it
//! was stopped, or serves one client at a time, `connect(2)` waits for a place without end, and no
//! signal that is merely noted wakes it. So whoever connects does it here: nobody blocks in the
//! system call, and all have one patience: a place is waited for as long as an answer is. A server
//! that lets nobody in is one that does not answer.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// Connects to the unix socket at `path`. If it is full it is tried for up to `limit`, which is how
/// long the caller waits for an answer, too, or until `is_cancelled`. Blocks the thread meanwhile,
/// so that it is not for executors.
///
/// # Errors
/// `TimedOut` if it stayed full; `Interrupted` if that was cancelled; any other error of the
/// system.
#[expect(clippy::disallowed_methods, reason = "a thread that has no executor")]
pub fn connect_unix(
    path: &Path,
    limit: Duration,
    is_cancelled: impl Fn() -> bool,
) -> io::Result<UnixStream> {
    let start = Instant::now();
    loop {
        if let Some(stream) = connect_unix_at_once(path)? {
            return Ok(stream);
        }
        if is_cancelled() {
            let what = "it was told to stop while it waited for a connection";
            return Err(io::Error::new(io::ErrorKind::Interrupted, what));
        }
        let left = limit.saturating_sub(start.elapsed());
        if left.is_zero() {
            let what = format!(
                "it takes no connection within {} seconds: others have it, or it is stopped",
                limit.as_secs_f32()
            );
            return Err(io::Error::new(io::ErrorKind::TimedOut, what));
        }
        std::thread::sleep(PAUSE.min(left));
    }
}

/// Connects to the unix socket at `path`, or returns `None` if it is full. For those who only want
/// to know whether anybody listens there: somebody does.
///
/// # Errors
/// Any error of the system.
pub fn connect_unix_at_once(path: &Path) -> io::Result<Option<UnixStream>> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::io::retry_on_intr(|| connect(&socket, &address)) {
        Ok(()) => {
            let stream = UnixStream::from(socket);
            stream.set_nonblocking(false)?;
            Ok(Some(stream))
        }
        Err(Errno::AGAIN) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    /// A socket that lets one client wait, and those that wait there until it is full.
    fn full(folder: &Path) -> (std::path::PathBuf, UnixListener, Vec<UnixStream>) {
        let path = folder.join("socket");
        let listener = UnixListener::bind(&path).expect("bound");
        rustix::net::listen(&listener, 0).expect("it listens");
        let mut waiting = Vec::new();
        while let Some(stream) = connect_unix_at_once(&path).expect("it listens") {
            waiting.push(stream);
            assert!(waiting.len() < 100, "it is never full");
        }
        (path, listener, waiting)
    }

    #[test]
    fn full_socket_is_given_up_at_the_limit_and_when_told_to() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, _listener, _waiting) = full(folder.path());
        let late = connect_unix(&path, Duration::from_millis(30), || false).expect_err("full");
        assert_eq!(late.kind(), io::ErrorKind::TimedOut, "{late}");
        assert!(late.to_string().contains("takes no connection"), "{late}");
        let asked = Cell::new(0);
        let third = || {
            asked.set(asked.get() + 1);
            asked.get() == 3
        };
        let told = connect_unix(&path, Duration::from_secs(3600), third).expect_err("told to stop");
        assert_eq!(told.kind(), io::ErrorKind::Interrupted, "{told}");
    }

    #[test]
    fn place_that_becomes_free_is_taken_and_the_stream_blocks_as_usual() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, listener, waiting) = full(folder.path());
        let count = waiting.len();
        let let_in = Cell::new(false);
        let make_room = || {
            if !let_in.replace(true) {
                (0..count).for_each(|_| drop(listener.accept().expect("it waits")));
            }
            false
        };
        let mut stream =
            connect_unix(&path, Duration::from_secs(3600), make_room).expect("there is room now");
        let (mut served, _) = listener.accept().expect("it waits");
        std::thread::scope(|scope| {
            scope.spawn(|| served.write_all(b"x").expect("sent"));
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("waits for the byte");
            assert_eq!(&byte, b"x");
        });
    }

    #[test]
    fn nobody_is_waited_for_who_does_not_listen() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let patience = Duration::from_secs(3600);
        let none = connect_unix(&path, patience, || false).expect_err("nothing is there");
        assert_eq!(none.kind(), io::ErrorKind::NotFound, "{none}");
        drop(UnixListener::bind(&path).expect("bound"));
        let dead = connect_unix(&path, patience, || false).expect_err("nobody listens");
        assert_eq!(dead.kind(), io::ErrorKind::ConnectionRefused, "{dead}");
    }
}
