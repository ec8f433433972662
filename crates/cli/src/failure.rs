//! Failures of verbs: one line on stderr and an exit code.

use std::fmt::Write as _;
use std::process::ExitCode;

/// Why a verb failed.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    code: u8,
}

impl Failure {
    /// A failure with exit code 1.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 1 }
    }

    /// Its exit code.
    pub(crate) fn code(&self) -> u8 {
        self.code
    }

    /// The same with another exit code.
    #[must_use]
    pub(crate) fn with_code(self, code: u8) -> Self {
        Self { code, ..self }
    }

    /// The same failure, in the context of `what`.
    #[must_use]
    pub(crate) fn within(self, what: impl std::fmt::Display) -> Self {
        Self { message: format!("{what}: {}", self.message), ..self }
    }

    /// Prints it and returns the exit code.
    pub(crate) fn report(self) -> ExitCode {
        eprintln!("mica: {}", self.message);
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
        // Names come from images: whatever they hold, print one line of plain text.
        let message = message
            .chars()
            .map(|letter| if letter.is_control() { '\u{fffd}' } else { letter })
            .collect();
        Self { message, code: 1 }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::new(error.to_string())
    }
}
