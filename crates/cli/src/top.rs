//! `mica top`: live figures of a server's disks.

mod rates;
mod screen;

use crate::client::ControlArgs;
use crate::ctl::{depth, duration, table, text};
use crate::failure::Failure;
use crate::output::{OutputFormat, print};
use clap::Args;
use rates::{Latency, Rates, between};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use screen::Screen;
use serde_json::Value;
use signal_hook::consts::{SIGINT, SIGTERM};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Show what the disks of a server are doing.
///
/// Refreshed every second; q quits. Where stdout is no terminal, lines are printed.
#[derive(Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    control: ControlArgs,
    /// How to print it: human or json.
    ///
    /// As JSON, one object per line and interval.
    #[arg(long, value_enum, default_value = "human", value_name = "FORMAT")]
    #[arg(hide_possible_values = true, hide_default_value = true)]
    output: OutputFormat,
    /// Seconds between updates.
    #[arg(short = 'i', long, default_value = "1", value_name = "SECONDS", value_parser = interval)]
    interval: Duration,
    /// Quit after this many updates.
    #[arg(short = 'n', long, value_name = "COUNT")]
    count: Option<u64>,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    let seconds = seconds.ok_or("must be between 0.1 and 3600 seconds")?;
    Ok(Duration::from_secs_f64(seconds))
}

pub(crate) fn run(args: &TopArgs) -> Result<ExitCode, Failure> {
    let stopping = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stopping))?;
    }
    let client = args.control.client();
    let mut before = client.get("/v1/stats")?;
    let screen = if args.output == OutputFormat::Human { Screen::open() } else { None };
    if let Some(screen) = &screen {
        screen.draw(&page(&before, &[]))?;
    }
    let mut left = args.count;
    while left != Some(0) && wait_for_update(args.interval, &stopping, screen.as_ref())? {
        let now = client.get("/v1/stats")?;
        let rates = between(&before, &now);
        match &screen {
            Some(screen) => screen.draw(&page(&now, &rates))?,
            None if args.output == OutputFormat::Json => {
                print(&(rates::json(&now, &rates).to_string() + "\n"))?;
            }
            None => print(&lines(&rates))?,
        }
        before = now;
        left = left.map(|left| left - 1);
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits for the next update. False if it is to quit.
fn wait_for_update(
    interval: Duration,
    stopping: &AtomicBool,
    screen: Option<&Screen>,
) -> Result<bool, Failure> {
    let timeout = Timespec::try_from(interval).expect("an hour at most");
    let stdin = std::io::stdin();
    let mut keys = [PollFd::new(&stdin, PollFlags::IN)];
    // Keys only work on a screen.
    let watched = if screen.is_some() { &mut keys[..] } else { &mut [] };
    match poll(watched, Some(&timeout)) {
        Ok(0) | Err(Errno::INTR) => {}
        Ok(_) => {
            let mut typed = [0; 64];
            let count = rustix::io::read(&stdin, &mut typed).unwrap_or(0);
            // A terminal that is gone yields nothing.
            if count == 0 || typed[..count].iter().any(|key| matches!(key, b'q' | b'Q')) {
                return Ok(false);
            }
        }
        Err(error) => return Err(std::io::Error::from(error).into()),
    }
    Ok(!stopping.load(Ordering::Relaxed))
}

/// The text of a screen.
fn page(answer: &Value, rates: &[Rates<'_>]) -> String {
    let uptime = duration(answer["uptime_ms"].as_u64().unwrap_or(0) / 1000);
    let rows = rates.iter().map(|rates| {
        vec![
            text(&rates.disk["name"]),
            rate(rates.reads),
            rate(rates.writes),
            mib(rates.read_bytes),
            mib(rates.written_bytes),
            time(rates.read.mean_us()),
            time(rates.read.p99_us()),
            time(rates.write.mean_us()),
            time(rates.write.p99_us()),
            percent(rates.hit_rate),
            depth(rates.disk),
            text(&rates.disk["clients"]),
            text(&rates.disk["state"]),
        ]
    });
    let head = [
        "DISK", "READ/S", "WRITE/S", "R MIB/S", "W MIB/S", "R MEAN", "R P99", "W MEAN", "W P99",
        "HITS", "LAYERS", "CLIENTS", "STATE",
    ];
    let disks = table(&head, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 11], rows.collect());
    let version = text(&answer["version"]);
    format!("mica {version}, up {uptime}; q quits\n\n{disks}")
}

/// A line for each disk.
fn lines(rates: &[Rates<'_>]) -> String {
    let latency = |latency: &Latency| {
        format!("{} mean {} p99", time(latency.mean_us()), time(latency.p99_us()))
    };
    rates.iter().fold(String::new(), |lines, rates| {
        let line = format!(
            "{}: reads {}/s {} MiB/s {}, writes {}/s {} MiB/s {}, map hits {}, layers {}, \
             clients {}, {}\n",
            text(&rates.disk["name"]),
            rate(rates.reads),
            mib(rates.read_bytes),
            latency(&rates.read),
            rate(rates.writes),
            mib(rates.written_bytes),
            latency(&rates.write),
            percent(rates.hit_rate),
            depth(rates.disk),
            text(&rates.disk["clients"]),
            text(&rates.disk["state"]),
        );
        lines + &line
    })
}

fn rate(per_second: f64) -> String {
    format!("{per_second:.0}")
}

fn mib(bytes_per_second: f64) -> String {
    format!("{:.1}", bytes_per_second / f64::from(1 << 20))
}

fn percent(part: Option<f64>) -> String {
    part.map_or_else(|| "-".to_owned(), |part| format!("{:.1}%", part * 100.0))
}

fn time(us: Option<f64>) -> String {
    match us {
        None => "-".to_owned(),
        Some(us) if us < 1000.0 => format!("{us:.0} us"),
        Some(us) if us < 1_000_000.0 => format!("{:.1} ms", us / 1000.0),
        Some(us) => format!("{:.1} s", us / 1_000_000.0),
    }
}
