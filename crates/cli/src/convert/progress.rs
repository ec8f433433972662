//! How far a copy is: on stderr, for people and for programs, and whenever SIGUSR1 asks.

use crate::failure::tell;
use crate::output::{OutputFormat, human_size, monotonic, progress_bar};
use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;
use serde_json::{Value, json};
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::Signals;
use std::io::IsTerminal as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Where lines are printed instead of a bar, they are printed at most this often.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// The progress of one copy.
pub(crate) struct Progress(Arc<Shared>);

struct Shared {
    total: u64,
    done: AtomicU64,
    data: AtomicU64,
    started: Duration,
    /// When the last line was printed.
    line: Mutex<Duration>,
    form: Form,
}

/// How progress is shown without being asked for.
enum Form {
    Silent,
    Bar(ProgressBar),
    Lines(OutputFormat),
}

impl Progress {
    /// Starts the copy of `total` bytes. Shows it in `format`, if that is given; as a bar if people
    /// read it on a terminal.
    pub(crate) fn start(total: u64, format: Option<OutputFormat>) -> Self {
        let form = match format {
            None => Form::Silent,
            Some(OutputFormat::Human) if std::io::stderr().is_terminal() => Form::Bar(bar(total)),
            Some(format) => Form::Lines(format),
        };
        let started = monotonic();
        let [done, data] = [const { AtomicU64::new(0) }; 2];
        let shared = Shared { total, done, data, started, line: Mutex::new(started), form };
        let progress = Self(Arc::new(shared));
        progress.answer_signals();
        progress
    }

    /// Everything before `position` is copied, or about to be.
    pub(crate) fn at(&self, position: u64) {
        let shared = &*self.0;
        shared.done.store(position, Ordering::Relaxed);
        match &shared.form {
            Form::Silent => {}
            Form::Bar(bar) => bar.set_position(position),
            Form::Lines(format) => shared.print_line_if_due(*format),
        }
    }

    /// `bytes` of data were written.
    pub(crate) fn wrote(&self, bytes: u64) {
        self.0.data.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The copy is complete. Returns its figures.
    pub(crate) fn finish(self) -> Value {
        let shared = &*self.0;
        shared.done.store(shared.total, Ordering::Relaxed);
        let figures = shared.figures();
        match &shared.form {
            Form::Silent => {}
            Form::Lines(OutputFormat::Json) => tell(&figures.to_string()),
            Form::Bar(_) | Form::Lines(OutputFormat::Human) => {
                self.hide();
                tell(&shared.summary());
            }
        }
        figures
    }

    fn hide(&self) {
        if let Form::Bar(bar) = &self.0.form {
            bar.finish_and_clear();
        }
    }

    /// Prints a line at each SIGUSR1, as dd and qemu-img do.
    fn answer_signals(&self) {
        let shared = Arc::clone(&self.0);
        let answering = Signals::new([SIGUSR1]).and_then(|mut signals| {
            let answer = move || signals.forever().for_each(|_| shared.answer());
            std::thread::Builder::new().name("progress".to_owned()).spawn(answer)
        });
        if let Err(error) = answering {
            tracing::info!(%error, "SIGUSR1 is not answered");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.hide();
    }
}

impl Shared {
    fn print_line_if_due(&self, format: OutputFormat) {
        let mut line = self.line.lock();
        let now = monotonic();
        if now.saturating_sub(*line) >= LINE_EVERY {
            *line = now;
            tell(&self.line_in(format));
        }
    }

    fn answer(&self) {
        match &self.form {
            Form::Silent => tell(&self.line_in(OutputFormat::Human)),
            Form::Bar(bar) => bar.suspend(|| tell(&self.line_in(OutputFormat::Human))),
            Form::Lines(format) => tell(&self.line_in(*format)),
        }
    }

    fn line_in(&self, format: OutputFormat) -> String {
        match format {
            OutputFormat::Json => self.figures().to_string(),
            OutputFormat::Human => {
                let done = self.done.load(Ordering::Relaxed);
                let [copied, total, rate] = [done, self.total, self.rate(done)].map(human_size);
                let percent = percent(done, self.total);
                format!("{percent:.1} %: {copied} of {total}, {rate}/s")
            }
        }
    }

    fn summary(&self) -> String {
        let [total, rate] = [self.total, self.rate(self.total)].map(human_size);
        let seconds = self.elapsed().as_secs_f64();
        // Verbs that only read, and commits, do not count what they write.
        let data = match self.data.load(Ordering::Relaxed) {
            0 => String::new(),
            data => format!("; {} of it were written as data", human_size(data)),
        };
        format!("100 %: {total} in {seconds:.1} s, {rate}/s{data}")
    }

    fn figures(&self) -> Value {
        let done = self.done.load(Ordering::Relaxed);
        json!({
            "done": done,
            "total": self.total,
            "percent": (percent(done, self.total) * 10.0).round() / 10.0,
            "data-bytes": self.data.load(Ordering::Relaxed),
            "seconds": (self.elapsed().as_secs_f64() * 1000.0).round() / 1000.0,
            "bytes-per-second": self.rate(done),
        })
    }

    fn elapsed(&self) -> Duration {
        monotonic().saturating_sub(self.started)
    }

    fn rate(&self, done: u64) -> u64 {
        let milliseconds = self.elapsed().as_millis().max(1);
        u64::try_from(u128::from(done) * 1000 / milliseconds).unwrap_or(u64::MAX)
    }
}

fn percent(done: u64, total: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "one digit is shown")]
    let ratio = if total == 0 { 1.0 } else { done as f64 / total as f64 };
    ratio * 100.0
}

fn bar(total: u64) -> ProgressBar {
    let bar = progress_bar(total, "bytes");
    let template = "{percent:>3} % [{bar:30}] {binary_bytes} of {binary_total_bytes} \
                    {binary_bytes_per_sec} {eta}";
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: `mica commit -p` said of gigabytes that nothing of them was written.
    #[test]
    fn what_was_written_is_said_where_it_is_counted() {
        let progress = Progress::start(1 << 20, None);
        assert!(progress.0.summary().ends_with("/s"), "{}", progress.0.summary());
        progress.wrote(4096);
        let summary = progress.0.summary();
        assert!(summary.ends_with("; 4 KiB of it were written as data"), "{summary}");
    }
}
