//! The log: lines on stderr, of a level that can be changed.

use mica_daemon::{LogLevel, LogSwitch};
use std::sync::{Arc, Mutex, PoisonError};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Registry, fmt, reload};

/// The log, with a level that can be changed.
pub(crate) struct Log {
    level: Mutex<LogLevel>,
    filter: reload::Handle<LevelFilter, Registry>,
}

/// Starts the log.
pub(crate) fn start(level: LogLevel) -> Arc<Log> {
    let (filter, handle) = reload::Layer::new(filter(level));
    let lines = fmt::layer()
        .with_writer(std::io::stderr)
        // The report of a line that could not be written would panic where there is no stderr.
        .log_internal_errors(false)
        .with_ansi(false)
        .with_target(false)
        .without_time();
    tracing_subscriber::registry().with(filter).with(lines).init();
    Arc::new(Log { level: Mutex::new(level), filter: handle })
}

impl LogSwitch for Log {
    fn level(&self) -> LogLevel {
        *self.level.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_level(&self, level: LogLevel) {
        let mut now = self.level.lock().unwrap_or_else(PoisonError::into_inner);
        match self.filter.reload(filter(level)) {
            Ok(()) => *now = level,
            Err(error) => tracing::error!(%error, "cannot change the log level"),
        }
    }
}

fn filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
    }
}
