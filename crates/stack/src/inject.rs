//! Faults that the user requested: `--inject delay=2ms`, `--inject error=1%,errno=EIO`, `--inject
//! error=nth:3,op=write+sync`, `--inject redo-memory=64K`.

use crate::redo::CAPACITIES;
use mica_block::{Error, ErrorKind, Result, Store};
use mica_store::faulty::{
    DelayOptions, DelayStore, ErrorOptions, ErrorStore, LogOptions, LogStore, Operation,
    Operations, Sink, When,
};
use parking_lot::Mutex;
use rustix::io::Errno;
use std::io::Write;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// A fault of operations on images, or a log of them.
#[derive(Clone)]
pub enum Fault {
    /// Reads, or other operations, take longer.
    Delay(DelayOptions),
    /// Some reads, or other operations, fail.
    Error(ErrorOptions),
    /// Each operation is logged.
    Log(LogOptions),
    /// A redo log has only so many bytes. Whoever is to find it has to be told the same.
    RedoMemory(u64),
}

impl Fault {
    /// How it is written, for messages and help.
    pub const SYNTAX: &str = "delay=TIME[,op=LIST] | \
        error=WHEN[,op=LIST][,errno=NAME][,seed=NUMBER] | log=FILE | redo-memory=SIZE, \
        where TIME is like 500us, 2ms or 1s, WHEN is like 1%, every:100, nth:3, from:3 or \
        range:1M-2M, SIZE is 16K to 16M, and LIST is all or some of read+write+sync+punch+zero+allocate+set-len, \
        read if it is not said";

    /// `inner` with this fault.
    pub fn stack_on(&self, inner: Arc<dyn Store>) -> Arc<dyn Store> {
        match self {
            Self::Delay(options) => Arc::new(DelayStore::new(inner, *options)),
            Self::Error(options) => Arc::new(ErrorStore::new(inner, options.clone())),
            Self::Log(options) => Arc::new(LogStore::new(inner, options.clone())),
            Self::RedoMemory(_) => inner,
        }
    }
}

impl FromStr for Fault {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let fault = match text.split_once('=') {
            Some(("delay", rest)) => parse_delay(rest).map(Self::Delay),
            Some(("error", rest)) => parse_error(rest).map(Self::Error),
            Some(("redo-memory", size)) => {
                parse_bytes(size).filter(|bytes| CAPACITIES.contains(bytes)).map(Self::RedoMemory)
            }
            Some(("log", file)) => {
                return Ok(Self::Log(LogOptions { sink: open_log(file)? }));
            }
            _ => None,
        };
        fault.ok_or_else(|| {
            let what = format!("invalid --inject {text:?}; use {}", Self::SYNTAX);
            Error::new(ErrorKind::Invalid, what)
        })
    }
}

fn parse_delay(text: &str) -> Option<DelayOptions> {
    let (time, operations) = match text.split_once(',') {
        None => (text, Operations::READS),
        Some((time, rest)) => (time, parse_operations(rest.strip_prefix("op=")?)?),
    };
    Some(DelayOptions { operations, time: parse_duration(time)? })
}

fn parse_operations(text: &str) -> Option<Operations> {
    if text == "all" {
        return Some(Operations::ALL);
    }
    text.split('+').try_fold(Operations::NONE, |operations, name| {
        let named = |operation: &&Operation| operation.name() == name;
        Operation::ALL.iter().find(named).map(|operation| operations.with(*operation))
    })
}

pub(crate) fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().ok()?;
    let micros = match unit {
        "us" => number,
        "ms" => number.checked_mul(1_000)?,
        "s" => number.checked_mul(1_000_000)?,
        _ => return None,
    };
    Some(Duration::from_micros(micros))
}

fn parse_error(text: &str) -> Option<ErrorOptions> {
    let mut parts = text.split(',');
    let mut when = parse_when(parts.next()?)?;
    let mut errno = Errno::IO.raw_os_error();
    let mut operations = Operations::READS;
    for part in parts {
        match (part.split_once('=')?, &mut when) {
            (("errno", name), _) => errno = parse_errno(name)?,
            (("op", names), _) => operations = parse_operations(names)?,
            (("seed", number), When::Rate { seed, .. }) => *seed = number.parse().ok()?,
            _ => return None,
        }
    }
    Some(ErrorOptions { operations, when, errno })
}

fn parse_when(text: &str) -> Option<When> {
    if let Some(percent) = text.strip_suffix('%') {
        let share = percent.parse::<f64>().ok()? / 100.0;
        return (0.0..=1.0).contains(&share).then_some(When::Rate { share, seed: 0 });
    }
    let parse_count = |text: &str| text.parse().ok().filter(|count: &u64| *count > 0);
    match text.split_once(':')? {
        ("every", count) => parse_count(count).map(When::Every),
        ("nth", number) => parse_count(number).map(When::Nth),
        ("from", number) => parse_count(number).map(When::From),
        ("range", range) => {
            let (start, end) = range.split_once('-')?;
            let (start, end) = (parse_bytes(start)?, parse_bytes(end)?);
            (start < end).then(|| When::Ranges(std::iter::once(start..end).collect()))
        }
        _ => None,
    }
}

fn parse_bytes(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' | b'k' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        b'T' => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn parse_errno(text: &str) -> Option<i32> {
    let errno = match text {
        "EIO" => Errno::IO,
        "ENOSPC" => Errno::NOSPC,
        "EACCES" => Errno::ACCESS,
        "EPERM" => Errno::PERM,
        "EINVAL" => Errno::INVAL,
        "ENOMEM" => Errno::NOMEM,
        "ETIMEDOUT" => Errno::TIMEDOUT,
        "ESTALE" => Errno::STALE,
        "EROFS" => Errno::ROFS,
        "EDQUOT" => Errno::DQUOT,
        "EOPNOTSUPP" => Errno::OPNOTSUPP,
        number => return number.parse().ok().filter(|number| (1..4096).contains(number)),
    };
    Some(errno.raw_os_error())
}

/// A sink that appends lines to `file`; `-` is the standard error output.
fn open_log(file: &str) -> Result<Sink> {
    let output: Box<dyn Write + Send> = if file == "-" {
        Box::new(std::io::stderr())
    } else {
        let opened = std::fs::File::options().append(true).create(true).open(file);
        Box::new(opened.map_err(|error| Error::from_io(format!("--inject log={file}"), error))?)
    };
    let output = Mutex::new(output);
    Ok(Arc::new(move |line| {
        let mut output = output.lock();
        // A log that cannot be written must not stop the operations that it records.
        let _ = writeln!(output, "{line}");
    }))
}

#[cfg(test)]
mod tests;
