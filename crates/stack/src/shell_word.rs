//! Paths in commands that messages advise.

use std::path::Path;

/// `path` as a word that can be pasted into a shell.
pub fn shell_word(path: &Path) -> String {
    let text = path.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+@,=".contains(c);
    if text.chars().all(plain) {
        text.into_owned()
    } else if text.chars().any(char::is_control) {
        // Not a shell word, but nothing that a terminal obeys either.
        format!("{text:?}")
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_is_what_a_shell_reads_as_the_path() {
        for (path, word) in
            [("/a-b_1.qcow2", "/a-b_1.qcow2"), ("/a b", "'/a b'"), ("/it's", r"'/it'\''s'")]
        {
            assert_eq!(shell_word(Path::new(path)), word);
        }
    }
}
