//! Keys that the kernel keeps for processes.

use crate::system;
use std::ffi::CString;
use std::io;

/// The payload of the key of type `user` that is called `name` in the keyrings of this process, at
/// most so many bytes.
///
/// # Errors
/// What the system reports; `InvalidInput` if the name has a zero byte, or the key is longer.
pub fn read_user_key(name: &str, bytes_max: usize) -> io::Result<Vec<u8>> {
    let name = CString::new(name)?;
    let key = system::find_user_key(&name)?;
    let mut payload = vec![0_u8; bytes_max];
    let len = system::read_key(key, &mut payload)?;
    if len > payload.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the key is too long"));
    }
    payload.truncate(len);
    Ok(payload)
}
