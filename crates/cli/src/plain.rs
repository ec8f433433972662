//! Text that others chose (names in images, answers of servers), as it is shown.

/// `text` as one line without control characters.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { '\u{fffd}' } else { letter }).collect()
}
