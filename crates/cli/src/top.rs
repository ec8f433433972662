//! `mica top`: live figures of a server's disks.

mod columns;
mod order;
mod rates;
mod screen;
mod search;
mod view;

use crate::client::{Client, ControlArgs};
use crate::ctl::{depth, text};
use crate::failure::Failure;
use crate::output::{OutputFormat, monotonic, print};
use clap::Args;
use order::Sort;
use rates::{Latency, Rates, between};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use screen::{Key, Screen, keys};
use serde_json::Value;
use signal_hook::consts::{SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGWINCH};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use view::{View, Wish};

/// Time limit for an answer: a server that is stopped is as good as gone.
const ANSWER_WAIT: Duration = Duration::from_secs(3);

/// Show what the disks of a server are doing.
///
/// Refreshed every second; q quits, / searches names, states and notes for words, and Esc ends the
/// search. If stdout is not a terminal, lines are printed instead.
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
    /// Sort by problems, load, reads, writes, time, errors or name.
    ///
    /// On a terminal the first letter of each does the same. By default a terminal shows disks with
    /// problems first, and lines are printed in the server's order. Load is the bytes transferred,
    /// plus 4 KiB for each request; time is the 99th percentile.
    #[arg(long, value_enum, value_name = "KEY", hide_possible_values = true)]
    sort: Option<Sort>,
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
    let first = client.get("/v1/stats")?;
    let screen = if args.output == OutputFormat::Human { Screen::open() } else { None };
    match screen {
        Some(screen) => {
            // It interrupts the wait for keys, which is all that it is for.
            signal_hook::flag::register(SIGWINCH, Arc::default())?;
            // By default these two would leave the terminal as it is drawn on.
            signal_hook::flag::register(SIGQUIT, Arc::clone(&stopping))?;
            let suspending = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(SIGTSTP, Arc::clone(&suspending))?;
            let signals = Signals { stopping: &stopping, suspending: &suspending };
            watch(args, &client.within(ANSWER_WAIT), first, &screen, &signals)?;
        }
        None => report(args, &client, first, &stopping)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Signals that have arrived.
struct Signals<'a> {
    stopping: &'a AtomicBool,
    suspending: &'a AtomicBool,
}

/// Shows it on a terminal. A server that is gone may come back.
fn watch(
    args: &TopArgs,
    client: &Client,
    first: Value,
    screen: &Screen,
    signals: &Signals<'_>,
) -> Result<(), Failure> {
    let mut view = View::new(first, args.sort.unwrap_or(Sort::Problems));
    let mut answered = monotonic();
    let mut left = args.count;
    while left != Some(0) {
        let next = monotonic() + args.interval;
        loop {
            let (rows, columns) = screen.size();
            screen.draw(&view.lines(rows, columns))?;
            let now = monotonic();
            if now >= next {
                break;
            }
            let Some(pressed) = wait_for_keys(next - now)? else { return Ok(()) };
            let is_over = pressed.into_iter().any(|key| view.press(key) == Wish::Quit);
            if is_over || signals.stopping.load(Ordering::Relaxed) {
                return Ok(());
            }
            if signals.suspending.swap(false, Ordering::Relaxed) {
                screen.suspend()?;
            }
        }
        match client.get("/v1/stats") {
            Ok(now) => {
                view.answered(now);
                answered = monotonic();
            }
            Err(error) => view.unanswered(monotonic() - answered, error.message().to_owned()),
        }
        left = left.map(|left| left - 1);
    }
    let (rows, columns) = screen.size();
    screen.draw(&view.lines(rows, columns))
}

/// Waits for keys, a signal or the end of `wait`. `None` if the terminal is gone.
fn wait_for_keys(wait: Duration) -> Result<Option<Vec<Key>>, Failure> {
    let timeout = Timespec::try_from(wait).expect("an hour at most");
    let stdin = std::io::stdin();
    match poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&timeout)) {
        Ok(0) | Err(Errno::INTR) => Ok(Some(Vec::new())),
        Ok(_) => {
            let mut typed = [0; 64];
            let count = rustix::io::read(&stdin, &mut typed).unwrap_or(0);
            Ok((count > 0).then(|| keys(&typed[..count])))
        }
        Err(error) => Err(std::io::Error::from(error).into()),
    }
}

/// Prints it, for programs and files.
fn report(
    args: &TopArgs,
    client: &Client,
    mut before: Value,
    stopping: &AtomicBool,
) -> Result<(), Failure> {
    let timeout = Timespec::try_from(args.interval).expect("an hour at most");
    let mut left = args.count;
    while left != Some(0) {
        match poll(&mut [], Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(std::io::Error::from(error).into()),
        }
        if stopping.load(Ordering::Relaxed) {
            return Ok(());
        }
        let now = client.get("/v1/stats")?;
        let mut rates = between(&before, &now);
        if let Some(sort) = args.sort {
            sort.apply(&mut rates);
        }
        match args.output {
            OutputFormat::Json => print(&(rates::json(&now, &rates).to_string() + "\n"))?,
            OutputFormat::Human => print(&lines(&rates))?,
        }
        before = now;
        left = left.map(|left| left - 1);
    }
    Ok(())
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
