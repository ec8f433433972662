//! Keys that the kernel keeps for processes.

use std::ffi::CString;
use std::io;

/// `KEYCTL_READ` of `keyctl(2)`.
const READ: libc::c_long = 11;

/// The payload of the key of type `user` that is called `name` in the keyrings of this process, at
/// most so many bytes.
///
/// # Errors
/// What the system reports; `InvalidInput` if the name has a zero byte, or the key is longer.
pub fn read_user_key(name: &str, bytes_max: usize) -> io::Result<Vec<u8>> {
    let name = CString::new(name)?;
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: the first two are strings that end with a zero byte and outlive the call; the third
    // may be null, and the fourth is no pointer.
    let key =
        unsafe { libc::syscall(libc::SYS_request_key, c"user".as_ptr(), name.as_ptr(), none, 0) };
    if key < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut payload = vec![0_u8; bytes_max];
    // SAFETY: the kernel writes at most as many bytes as the buffer has, which outlives the call.
    let len =
        unsafe { libc::syscall(libc::SYS_keyctl, READ, key, payload.as_mut_ptr(), payload.len()) };
    let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
    if len > payload.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the key is too long"));
    }
    payload.truncate(len);
    Ok(payload)
}
