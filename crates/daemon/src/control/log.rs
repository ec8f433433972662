//! How much is logged, which can be changed while the process serves.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What goes to stderr besides errors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogLevel {
    /// Nothing.
    Off,
    /// What went wrong.
    Error,
    /// What somebody should know.
    Warn,
    /// What happens.
    Info,
    /// What a developer wants to know.
    Debug,
}

/// What the log is told.
pub trait LogSwitch: Send + Sync {
    /// What it is.
    fn level(&self) -> LogLevel;

    /// Changes it.
    fn set_level(&self, level: LogLevel);
}
