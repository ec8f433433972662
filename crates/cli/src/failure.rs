//! Failures of verbs: one line on stderr and an exit code.

use crate::plain::plain;
use mica_block::ErrorKind;
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

/// Why a verb failed.
#[derive(Debug)]
pub(crate) struct Failure {
    /// `None` if there is nothing to say.
    message: Option<String>,
    code: u8,
    /// What kind of an error of a disk or a store it is, if it is one.
    kind: Option<ErrorKind>,
}

/// What a shell reports for a program that SIGPIPE killed, as happens to qemu-img.
const EXIT_NO_READER: u8 = 128 + 13;

impl Failure {
    /// A failure with exit code 1.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: Some(message.into()), code: 1, kind: None }
    }

    /// A failure of writing to stdout. A reader that takes the first lines and leaves (`| head`)
    /// wants no more, and no message.
    pub(crate) fn of_stdout(error: std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::BrokenPipe => {
                Self { message: None, code: EXIT_NO_READER, kind: None }
            }
            _ => Self::from(error).within("standard output"),
        }
    }

    /// Its exit code.
    pub(crate) fn code(&self) -> u8 {
        self.code
    }

    /// The same with another exit code, unless there is nothing to say.
    #[must_use]
    pub(crate) fn with_code(self, code: u8) -> Self {
        match self.message {
            Some(_) => Self { code, ..self },
            None => self,
        }
    }

    /// The same failure, in the context of `what`.
    #[must_use]
    pub(crate) fn within(self, what: impl std::fmt::Display) -> Self {
        Self { message: self.message.map(|message| format!("{what}: {message}")), ..self }
    }

    /// Whether there was no room for something.
    pub(crate) fn lacks_space(&self) -> bool {
        self.kind == Some(ErrorKind::NoSpace)
    }

    /// The same failure, and `what` is to be known besides.
    #[must_use]
    pub(crate) fn and(self, what: impl std::fmt::Display) -> Self {
        Self { message: self.message.map(|message| format!("{message}; {what}")), ..self }
    }

    /// What there is to say.
    pub(crate) fn message(&self) -> &str {
        self.message.as_deref().unwrap_or_default()
    }

    /// Prints it and returns the exit code.
    pub(crate) fn report(self) -> ExitCode {
        if let Some(message) = self.message {
            tell(&format!("mica: {message}"));
        }
        ExitCode::from(self.code)
    }
}

impl From<mica_block::Error> for Failure {
    fn from(error: mica_block::Error) -> Self {
        let mut message = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            // Writing to a string does not fail.
            let _ = write!(message, ": {error}");
            cause = error.source();
        }
        Self { kind: Some(error.kind()), ..Self::new(message) }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::new(error.to_string())
    }
}

/// Prints a line on stderr. If nobody reads that, there is nowhere left to complain.
///
/// Names come from images and users: whatever they hold, it is one line of plain text.
pub(crate) fn tell(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{}", plain(line));
}
