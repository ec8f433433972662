//! Drawing on a terminal, which is restored afterwards, and the keys that are pressed there.

use crate::failure::Failure;
use crate::output::print;
use rustix::termios::{
    LocalModes, OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr,
};
use signal_hook::consts::SIGTSTP;
use signal_hook::low_level::emulate_default_handler;
use std::fmt::Write as _;

/// The alternate screen of the terminal, without a cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// The terminal. Dropping it restores its former state.
pub(super) struct Screen {
    before: Termios,
}

/// A line of text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Line {
    pub(super) style: Style,
    pub(super) text: String,
}

/// What a line looks like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Style {
    Plain,
    Bold,
    Dim,
    /// Above columns.
    Head,
    Warn,
    Bad,
}

/// A key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Key {
    Letter(char),
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    Enter,
    Backspace,
    Escape,
}

impl Line {
    pub(super) fn new(style: Style, text: String) -> Self {
        Self { style, text }
    }
}

impl Style {
    fn begin(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Bold => "\x1b[1m",
            Self::Dim => "\x1b[2m",
            Self::Head => "\x1b[7m",
            Self::Warn => "\x1b[33m",
            Self::Bad => "\x1b[31m",
        }
    }

    fn end(self) -> &'static str {
        if self == Self::Plain { "" } else { "\x1b[m" }
    }
}

impl Screen {
    /// `None` if stdin or stdout is not a terminal.
    pub(super) fn open() -> Option<Self> {
        let (stdin, stdout) = (std::io::stdin(), std::io::stdout());
        if !isatty(&stdin) || !isatty(&stdout) {
            return None;
        }
        let screen = Self { before: tcgetattr(&stdin).ok()? };
        screen.enter().ok()?;
        Some(screen)
    }

    fn enter(&self) -> Result<(), Failure> {
        let mut now = self.before.clone();
        // Keys arrive at once and are not echoed. Ctrl-C is still a signal, and so are its kin.
        now.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
        tcsetattr(std::io::stdin(), OptionalActions::Now, &now).map_err(std::io::Error::from)?;
        print(ENTER)
    }

    fn leave(&self) {
        // A terminal that is gone needs no restoring.
        let _ = print(LEAVE);
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.before);
    }

    /// Stops the process, as Ctrl-Z does, with the terminal as it was. Returns when it is
    /// continued.
    pub(super) fn suspend(&self) -> Result<(), Failure> {
        self.leave();
        emulate_default_handler(SIGTSTP)?;
        self.enter()
    }

    /// Its rows and columns.
    pub(super) fn size(&self) -> (usize, usize) {
        let size = tcgetwinsize(std::io::stdout()).map(|size| (size.ws_row, size.ws_col));
        // If it does not report its size, assume the classic one.
        match size {
            Ok((rows, columns)) if rows > 0 && columns > 0 => (rows.into(), columns.into()),
            _ => (24, 80),
        }
    }

    /// Draws as many of `lines` as fit.
    pub(super) fn draw(&self, lines: &[Line]) -> Result<(), Failure> {
        let (rows, columns) = self.size();
        print(&fitted(lines, rows, columns))
    }
}

/// `lines` drawn from the upper left corner over the old content.
fn fitted(lines: &[Line], rows: usize, columns: usize) -> String {
    let mut drawn = "\x1b[H".to_owned();
    for (index, line) in lines.iter().take(rows).enumerate() {
        let text: String = line.text.chars().take(columns).collect();
        let (begin, end) = (line.style.begin(), line.style.end());
        // Writing to a string does not fail. No newline after the last row, which would scroll.
        let next = if index > 0 { "\r\n" } else { "" };
        let _ = write!(drawn, "{next}{begin}{text}{end}\x1b[K");
    }
    drawn + "\x1b[J"
}

/// The keys of what a terminal sent. What is none is skipped.
pub(super) fn keys(mut sent: &[u8]) -> Vec<Key> {
    let mut keys = Vec::new();
    while let Some((first, rest)) = sent.split_first() {
        let named = NAMED.iter().find(|(sequence, _)| sent.starts_with(sequence));
        if let Some((sequence, key)) = named {
            keys.push(*key);
            sent = &sent[sequence.len()..];
            continue;
        }
        sent = match (first, rest.first()) {
            // Another sequence, to its last byte.
            (0x1b, Some(b'[' | b'O')) => {
                let end = rest[1..].iter().position(|byte| (0x40..=0x7e).contains(byte));
                end.map_or(&[], |end| &rest[end + 2..])
            }
            (0x1b, None) => {
                keys.push(Key::Escape);
                rest
            }
            _ => match letter(sent) {
                Some(letter) => {
                    keys.extend((!letter.is_control()).then_some(Key::Letter(letter)));
                    &sent[letter.len_utf8()..]
                }
                None => rest,
            },
        };
    }
    keys
}

/// The letter that `sent` begins with.
fn letter(sent: &[u8]) -> Option<char> {
    let begun = &sent[..sent.len().min(4)];
    let whole = match std::str::from_utf8(begun) {
        Ok(whole) => whole,
        Err(error) => std::str::from_utf8(&begun[..error.valid_up_to()]).ok()?,
    };
    whole.chars().next()
}

/// What terminals send, in normal and in application mode.
const NAMED: [(&[u8], Key); 16] = [
    (b"\x1b[A", Key::Up),
    (b"\x1bOA", Key::Up),
    (b"\x1b[B", Key::Down),
    (b"\x1bOB", Key::Down),
    (b"\x1b[5~", Key::PageUp),
    (b"\x1b[6~", Key::PageDown),
    (b"\x1b[H", Key::Home),
    (b"\x1bOH", Key::Home),
    (b"\x1b[1~", Key::Home),
    (b"\x1b[F", Key::End),
    (b"\x1bOF", Key::End),
    (b"\x1b[4~", Key::End),
    (b"\r", Key::Enter),
    (b"\n", Key::Enter),
    (b"\x7f", Key::Backspace),
    (b"\x08", Key::Backspace),
];

impl Drop for Screen {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_to_the_terminal() {
        let lines = |texts: &[&str]| -> Vec<_> {
            texts.iter().map(|text| Line::new(Style::Plain, (*text).to_owned())).collect()
        };
        assert_eq!(fitted(&lines(&["abc", "d"]), 9, 2), "\x1b[Hab\x1b[K\r\nd\x1b[K\x1b[J");
        assert_eq!(fitted(&lines(&["a", "b", "c"]), 2, 9), "\x1b[Ha\x1b[K\r\nb\x1b[K\x1b[J");
        assert_eq!(fitted(&[], 2, 9), "\x1b[H\x1b[J");
        let bad = Line::new(Style::Bad, "abc".to_owned());
        assert_eq!(fitted(&[bad], 2, 2), "\x1b[H\x1b[31mab\x1b[m\x1b[K\x1b[J");
    }

    #[test]
    fn keys_are_told_from_other_sequences() {
        assert_eq!(
            keys(b"q\x1b[A\x1b[5~\x1bOFj "),
            [Key::Letter('q'), Key::Up, Key::PageUp, Key::End, Key::Letter('j'), Key::Letter(' '),]
        );
        assert_eq!(
            keys("\x1b[1;5Cx\x1b[200~\t\rä\x7f".as_bytes()),
            [Key::Letter('x'), Key::Enter, Key::Letter('ä'), Key::Backspace]
        );
        assert_eq!(keys(b"/\xc3\xffb\x1b"), [Key::Letter('/'), Key::Letter('b'), Key::Escape]);
        assert_eq!(keys(b"\x1b["), []);
        assert_eq!(keys(b""), []);
    }
}
