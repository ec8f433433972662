//! The log level, which can be changed at run time.

use clap::ValueEnum;
use mica_block::Result;
use serde::{Deserialize, Serialize};

/// What is logged to stderr besides errors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogLevel {
    /// Nothing.
    Off,
    /// Failures.
    Error,
    /// Problems that somebody should know of, and what is served where.
    Warn,
    /// Events.
    Info,
    /// Details for developers.
    Debug,
}

/// The log's level, as the control socket sees it.
pub trait LogSwitch: Send + Sync {
    /// The current level.
    fn level(&self) -> LogLevel;

    /// Sets the level.
    fn set_level(&self, level: LogLevel);

    /// Goes on in a new file if the log has one that was renamed, as programs that rotate logs do.
    ///
    /// # Errors
    /// If the new file cannot be opened; then it goes on in the old one.
    fn reopen(&self) -> Result<()> {
        Ok(())
    }
}
