//! Drawing on a terminal, which is restored afterwards.

use crate::failure::Failure;
use crate::output::print;
use rustix::termios::{
    LocalModes, OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr,
};
use std::fmt::Write as _;

/// The alternate screen of the terminal, without a cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// The terminal. Dropping it restores its former state.
pub(super) struct Screen {
    before: Termios,
}

impl Screen {
    /// `None` if stdin or stdout is not a terminal.
    pub(super) fn open() -> Option<Self> {
        let (stdin, stdout) = (std::io::stdin(), std::io::stdout());
        if !isatty(&stdin) || !isatty(&stdout) {
            return None;
        }
        let before = tcgetattr(&stdin).ok()?;
        let mut now = before.clone();
        // Keys arrive at once and are not echoed. Ctrl-C is still a signal.
        now.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
        tcsetattr(&stdin, OptionalActions::Now, &now).ok()?;
        let screen = Self { before };
        print(ENTER).ok()?;
        Some(screen)
    }

    /// Draws as much of `page` as fits.
    pub(super) fn draw(&self, page: &str) -> Result<(), Failure> {
        let size = tcgetwinsize(std::io::stdout()).map(|size| (size.ws_row, size.ws_col));
        // If it does not report its size, assume the classic one.
        let (rows, columns) = match size {
            Ok((rows, columns)) if rows > 0 && columns > 0 => (rows, columns),
            _ => (24, 80),
        };
        print(&fitted(page, rows.into(), columns.into()))
    }
}

/// `page` drawn from the upper left corner over the old content.
fn fitted(page: &str, rows: usize, columns: usize) -> String {
    let mut drawn = "\x1b[H".to_owned();
    for (index, line) in page.lines().take(rows).enumerate() {
        let line: String = line.chars().take(columns).collect();
        // Writing to a string does not fail. No newline after the last row, which would scroll.
        let _ = write!(drawn, "{}{line}\x1b[K", if index > 0 { "\r\n" } else { "" });
    }
    drawn + "\x1b[J"
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that is gone needs no restoring.
        let _ = print(LEAVE);
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::fitted;

    #[test]
    fn a_page_is_cut_to_the_terminal() {
        assert_eq!(fitted("abc\nd\n", 9, 2), "\x1b[Hab\x1b[K\r\nd\x1b[K\x1b[J");
        assert_eq!(fitted("a\nb\nc\n", 2, 9), "\x1b[Ha\x1b[K\r\nb\x1b[K\x1b[J");
        assert_eq!(fitted("", 2, 9), "\x1b[H\x1b[J");
    }
}
