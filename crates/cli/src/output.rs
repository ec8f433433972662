//! Output: results on stdout, progress on stderr.

use crate::failure::Failure;
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::io::Write as _;
use std::time::Duration;

/// How results are printed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum)]
pub(crate) enum OutputFormat {
    #[default]
    Human,
    Json,
}

#[derive(Args, Clone, Default)]
pub(crate) struct OutputArgs {
    /// How to print the result: human or json.
    #[arg(long, value_enum, default_value = "human", value_name = "FORMAT")]
    #[arg(hide_possible_values = true, hide_default_value = true)]
    pub(crate) output: OutputFormat,
}

// Options of verbs that can be quiet. (A doc comment would become the help of the verb.)
#[derive(Args, Clone, Default)]
pub(crate) struct ReportArgs {
    /// Print only errors.
    #[arg(short = 'q', long)]
    quiet: bool,
    #[command(flatten)]
    output: OutputArgs,
}

impl ReportArgs {
    /// Those of a verb that prints its result so.
    pub(crate) fn printing(output: OutputFormat) -> Self {
        Self { quiet: false, output: OutputArgs { output } }
    }

    /// How to print progress, if it is `wanted`.
    pub(crate) fn progress(&self, wanted: bool) -> Option<OutputFormat> {
        Some(self.output.output).filter(|_| wanted && !self.quiet)
    }

    /// How to print the result, if at all.
    pub(crate) fn format(&self) -> Option<OutputFormat> {
        Some(self.output.output).filter(|format| !self.quiet || *format == OutputFormat::Json)
    }

    /// Whether the result is wanted as JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.output.output == OutputFormat::Json
    }

    /// Prints the result: `text`, or the same as `json`, or nothing.
    ///
    /// # Errors
    /// If stdout is gone.
    pub(crate) fn print(&self, text: &str, json: &impl Serialize) -> Result<(), Failure> {
        match self.format() {
            None => Ok(()),
            Some(OutputFormat::Human) => print(text),
            Some(OutputFormat::Json) => print_json(json),
        }
    }
}

/// Prints text on stdout.
///
/// # Errors
/// If stdout is gone.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(Failure::of_stdout)
}

/// Prints a value as JSON, indented as qemu-img does.
///
/// # Errors
/// If stdout is gone.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let mut text = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, formatter);
    value.serialize(&mut serializer).map_err(|error| Failure::new(error.to_string()))?;
    print(&(String::from_utf8_lossy(&text) + "\n"))
}

/// The time since some moment in the past.
pub(crate) fn monotonic() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.try_into().unwrap_or_default()
}

/// A progress bar on stderr if that is a terminal, else nothing.
pub(crate) fn progress_bar(total: u64, unit: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
    let template = format!("{{msg}} [{{bar:40}}] {{pos}}/{{len}} {unit} {{eta}}");
    match ProgressStyle::with_template(&template) {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}

/// A length formatted for people, as by qemu-img.
pub(crate) fn human_size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut unit = 0;
    let mut divisor = 1_u64;
    // As QEMU's size_to_str: the next unit from 1000 on, three significant digits.
    while unit + 1 < UNITS.len() && bytes / divisor >= 1000 {
        unit += 1;
        divisor <<= 10;
    }
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let value = bytes as f64 / divisor as f64;
    let text = match value {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    };
    let text = match text.split_once('.') {
        Some(_) => text.trim_end_matches('0').trim_end_matches('.'),
        None => &text,
    };
    format!("{text} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::human_size;

    #[test]
    fn sizes_are_written_as_by_qemu() {
        assert_eq!(human_size(0), "0 B");
        assert_eq!(human_size(512), "512 B");
        assert_eq!(human_size(2 << 20), "2 MiB");
        assert_eq!(human_size(459_264), "448 KiB");
        assert_eq!(human_size(339_968), "332 KiB");
        assert_eq!(human_size(1 << 30), "1 GiB");
        assert_eq!(human_size(1_572_864), "1.5 MiB");
    }
}
