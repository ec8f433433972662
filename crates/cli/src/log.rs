//! The log: lines on stderr or in a file, of a level that can be changed.
//!
//! With `--log-file` the lines of a server go to that file, and until it serves also to stderr,
//! where somebody waits for it. Lines that cannot be written are lost: a full disk, or a reader of
//! stderr that has left, must not end a server. A message is one line, whatever the names in it
//! hold: nobody who chooses a name can forge another.

use crate::failure::Failure;
use crate::plain::plain;
use mica_daemon::{LogLevel, LogSwitch, SERVING};
use parking_lot::Mutex;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Registry, fmt, reload};

/// The log, with a level that can be changed.
pub(crate) struct Log {
    level: Mutex<LogLevel>,
    filter: reload::Handle<Targets, Registry>,
    places: Arc<Mutex<Places>>,
}

/// Where lines go.
#[derive(Default)]
struct Places {
    file: Option<LogFile>,
    /// Whether they go only to the file, if there is one.
    is_settled: bool,
    /// Whether stderr is the file.
    is_detached: bool,
}

struct LogFile {
    path: PathBuf,
    file: File,
}

/// Starts the log.
pub(crate) fn start(level: LogLevel) -> Arc<Log> {
    let (filter, handle) = reload::Layer::new(filter(level));
    let places = Arc::<Mutex<Places>>::default();
    let writer = Arc::clone(&places);
    let lines = fmt::layer()
        .with_writer(move || Lines(Arc::clone(&writer)))
        .with_ansi(false)
        .with_target(false)
        .without_time()
        // It would be reported on the stderr that is gone.
        .log_internal_errors(false);
    tracing_subscriber::registry().with(filter).with(lines).init();
    Arc::new(Log { level: Mutex::new(level), filter: handle, places })
}

impl Log {
    /// Appends lines to the file at `path` from now on, and until [`Log::settle`] to stderr too.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub(crate) fn open_file(&self, path: &Path) -> Result<(), Failure> {
        let failed = |error: io::Error| {
            Failure::from(error).within(format!("--log-file {}", path.display()))
        };
        let path = std::path::absolute(path).map_err(failed)?;
        let file = LogFile::open(path).map_err(failed)?;
        self.places.lock().file = Some(file);
        Ok(())
    }

    /// The server serves: if there is a file, lines go only there. With `nowhere` nobody waits for
    /// its output any more: both of its outputs become the file, or `nowhere`.
    ///
    /// # Errors
    /// Those of the system calls.
    pub(crate) fn settle(&self, nowhere: Option<File>) -> io::Result<()> {
        let mut places = self.places.lock();
        places.is_settled = true;
        let Some(nowhere) = nowhere else { return Ok(()) };
        places.is_detached = true;
        let to = places.file.as_ref().map_or(nowhere.as_fd(), |log| log.file.as_fd());
        Ok(replace_outputs(to)?)
    }
}

fn replace_outputs(to: BorrowedFd<'_>) -> rustix::io::Result<()> {
    rustix::stdio::dup2_stdout(to)?;
    rustix::stdio::dup2_stderr(to)
}

impl LogFile {
    fn open(path: PathBuf) -> io::Result<Self> {
        // Opening a FIFO would wait for a reader.
        if let Ok(found) = path.metadata()
            && !found.is_file()
            && !found.file_type().is_char_device()
        {
            return Err(io::Error::other("it is there and is not a file"));
        }
        let file = File::options().append(true).create(true).open(&path)?;
        Ok(Self { path, file })
    }
}

impl LogSwitch for Log {
    fn level(&self) -> LogLevel {
        *self.level.lock()
    }

    fn set_level(&self, level: LogLevel) {
        let mut now = self.level.lock();
        match self.filter.reload(filter(level)) {
            Ok(()) => *now = level,
            Err(error) => tracing::error!(%error, "cannot change the log level"),
        }
    }

    fn reopen(&self) -> mica_block::Result<()> {
        let mut places = self.places.lock();
        let Some(log) = &places.file else { return Ok(()) };
        let failed = |error| {
            mica_block::Error::from_io(format!("reopening the log {}", log.path.display()), error)
        };
        let log = LogFile::open(log.path.clone()).map_err(failed)?;
        if places.is_detached {
            replace_outputs(log.file.as_fd()).map_err(|error| failed(error.into()))?;
        }
        places.file = Some(log);
        Ok(())
    }
}

/// What writes lines: each is one call of `write`.
struct Lines(Arc<Mutex<Places>>);

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let len = line.len();
        let text = String::from_utf8_lossy(line);
        let line = plain(text.strip_suffix('\n').unwrap_or(&text)) + "\n";
        let line = line.as_bytes();
        let mut places = self.0.lock();
        let is_settled = places.is_settled;
        // A failure that was returned would be reported on stderr, with a panic if that is closed.
        let is_written = places.file.as_mut().map(|log| log.file.write_all(line));
        if !(is_written.is_some() && is_settled) {
            let _ = io::stderr().write_all(line);
        }
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What is served where is said also to those who asked for problems only.
fn filter(level: LogLevel) -> Targets {
    let lines = match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
    };
    let serving = if level == LogLevel::Warn { LevelFilter::INFO } else { lines };
    Targets::new().with_default(lines).with_target(SERVING, serving)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_goes_on_in_a_new_file_and_names_make_no_lines() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, old) = (folder.path().join("log"), folder.path().join("log.1"));
        let log = start(LogLevel::Info);
        log.open_file(&path).expect("opened");
        log.settle(None).expect("settled");
        tracing::info!("one");
        std::fs::rename(&path, &old).expect("renamed");
        tracing::info!("two");
        log.reopen().expect("reopened");
        tracing::info!("three");
        let name = "a\r\n ERROR forged\u{1b}[2J";
        tracing::info!(image = %name, %name, "at {name}");
        let read = |path| std::fs::read_to_string(path).expect("there");
        assert_eq!(read(&old), " INFO one\n INFO two\n");
        let text = read(&path);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text:?}");
        assert_eq!(lines[0], " INFO three");
        assert!(lines[1].starts_with(" INFO at a"), "{text:?}");
        let has_control = |line: &&str| line.chars().any(char::is_control);
        assert!(!lines.iter().any(has_control), "{text:?}");
    }
}
