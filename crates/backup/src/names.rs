//! What states and disks may be called.

use mica_block::{Error, ErrorKind, Result};

/// Longest name of a state, and of a disk, in bytes: the names of files have endings.
pub const STATE_BYTES_MAX: usize = 200;

/// # Errors
/// `Invalid` if no state can be called `name`: it becomes the first part of names of files.
pub fn check_state(name: &str) -> Result<()> {
    if is_name(name) && !name.starts_with('.') {
        return Ok(());
    }
    let what = format!(
        "no state can be called {name:?}: it becomes a part of the names of files, has at most \
         {STATE_BYTES_MAX} bytes, and does not begin with a dot"
    );
    Err(Error::new(ErrorKind::Invalid, what))
}

/// Whether a disk can be called so.
pub(crate) fn is_name(name: &str) -> bool {
    let is_allowed = |letter: char| letter != '/' && !letter.is_control();
    (1..=STATE_BYTES_MAX).contains(&name.len()) && name.chars().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_parts_of_the_names_of_files() {
        for good in ["mon", "20261126", "a@b", "2026-11-26T08:00:00Z", &"x".repeat(200)] {
            check_state(good).unwrap();
        }
        for bad in ["", ".", ".hidden", "a/b", "../up", "a\n", &"x".repeat(201)] {
            assert_eq!(check_state(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad}");
        }
    }
}
