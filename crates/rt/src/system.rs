//! System calls that no safe crate has, each behind a safe function.
//!
//! Invariants
//! - I1 Each `unsafe` block is one call, and what makes it sound is in its function: descriptors
//!   and memory are borrowed for as long as it takes.

use std::ffi::{CStr, c_long};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `KEYCTL_READ` of `keyctl(2)`.
const READ: c_long = 11;

/// Gives free memory of the heap back to the system, where the C library can.
pub(crate) fn trim_heap() {
    // SAFETY: it takes no pointer, and any thread may call it at any time.
    #[cfg(target_env = "gnu")]
    let _ = unsafe { libc::malloc_trim(0) };
}

/// Begins to write a range of `file` to its device. A hint: it may do nothing.
pub(crate) fn begin_sync_of_range(file: BorrowedFd<'_>, offset: i64, len: i64) {
    let file = file.as_raw_fd();
    // SAFETY: no memory is passed, and the descriptor is open for as long as it is borrowed.
    let _ = unsafe { libc::sync_file_range(file, offset, len, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Writes a range of `file` to its device, and waits until that is done. It makes nothing durable.
///
/// # Errors
/// What the system reports.
pub(crate) fn sync_range(file: BorrowedFd<'_>, offset: i64, len: i64) -> io::Result<()> {
    let file = file.as_raw_fd();
    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: no memory is passed, and the descriptor is open for as long as it is borrowed.
    match unsafe { libc::sync_file_range(file, offset, len, all) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The number of the key of type `user` that is called `name` in the keyrings of this process.
///
/// # Errors
/// What the system reports.
pub(crate) fn find_user_key(name: &CStr) -> io::Result<c_long> {
    let (kind, none) = (c"user", std::ptr::null::<libc::c_char>());
    // SAFETY: the first two are strings that end with a zero byte and outlive the call; the third
    // may be null, and the fourth is no pointer.
    let key =
        unsafe { libc::syscall(libc::SYS_request_key, kind.as_ptr(), name.as_ptr(), none, 0) };
    if key < 0 { Err(io::Error::last_os_error()) } else { Ok(key) }
}

/// Reads the payload of a key into `payload`. Returns its length, which may be greater.
///
/// # Errors
/// What the system reports.
pub(crate) fn read_key(key: c_long, payload: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the kernel writes at most as many bytes as the buffer has, which outlives the call.
    let len =
        unsafe { libc::syscall(libc::SYS_keyctl, READ, key, payload.as_mut_ptr(), payload.len()) };
    usize::try_from(len).map_err(|_| io::Error::last_os_error())
}
