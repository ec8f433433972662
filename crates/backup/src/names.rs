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
        "{name:?} is not a valid name of a state: it becomes part of file names, has at most \
         {STATE_BYTES_MAX} bytes, and does not begin with a dot"
    );
    Err(Error::new(ErrorKind::Invalid, what))
}

/// # Errors
/// `Invalid` if no disk can be called `name`.
pub(crate) fn check_disk(name: &str) -> Result<()> {
    if is_name(name) {
        return Ok(());
    }
    let what = format!(
        "{name:?} is not a valid name of a disk: it must have 1 to {STATE_BYTES_MAX} bytes, and \
         neither a slash nor control characters"
    );
    Err(Error::new(ErrorKind::Invalid, what))
}

/// What a disk is called in backups that others call `name`: the same, if it can be. Otherwise it
/// is cut, and what may not be in it becomes `_`.
pub fn disk_name(name: &str) -> String {
    let end = name.floor_char_boundary(STATE_BYTES_MAX);
    let fit = |letter| if is_allowed(letter) { letter } else { '_' };
    let name: String = name[..end].chars().map(fit).collect();
    // It has to have some name.
    if name.is_empty() { "disk".to_owned() } else { name }
}

fn is_name(name: &str) -> bool {
    (1..=STATE_BYTES_MAX).contains(&name.len()) && name.chars().all(is_allowed)
}

fn is_allowed(letter: char) -> bool {
    letter != '/' && !letter.is_control()
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

    #[test]
    fn names_of_disks_are_made_fit() {
        for (given, fit) in [
            ("web", "web"),
            (".web", ".web"),
            ("a/b", "a_b"),
            ("a\n\u{85}b", "a__b"),
            ("", "disk"),
            // What ends in the middle of a letter is left out, too: it has two bytes.
            (&("x".repeat(199) + "\u{e9}y"), &"x".repeat(199)),
            (&"x".repeat(300), &"x".repeat(200)),
        ] {
            assert_eq!(disk_name(given), fit);
            check_disk(&disk_name(given)).unwrap();
        }
    }
}
