//! `mica bench`: how fast an image is read or written, in the words of `qemu-img bench`.

use crate::failure::Failure;
use crate::images::{ImageArgs, size_of};
use crate::output::{ReportArgs, human_size, monotonic};
use clap::Args;
use mica_block::{Disk, read_whole};
use mica_qcow2::IndexUse;
use mica_rt::{Backend, Buf, Executor, join_all};
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};
use serde_json::json;
use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Longest request.
const BYTES_MAX: u64 = 64 << 20;
const DEPTH_MAX: u64 = 1024;
const USAGE: u8 = 1;

/// Measure how fast an image is read or written.
///
/// One thread sends requests to consecutive offsets and keeps a fixed number of them in flight. At
/// the end of the disk it wraps around. The page cache is included, unless --cache=none is given.
#[derive(Args)]
pub(crate) struct BenchArgs {
    /// Number of requests.
    #[arg(short = 'c', long, default_value_t = 75_000)]
    count: u64,
    /// Number of requests in flight.
    #[arg(short = 'd', long, default_value_t = 64)]
    depth: u64,
    /// Bytes per request.
    #[arg(short = 's', long, default_value = "4k", value_name = "SIZE")]
    buffer_size: String,
    /// Distance between the starts of two requests; by default their length.
    #[arg(short = 'S', long, value_name = "SIZE", hide_short_help = true)]
    step_size: Option<String>,
    /// Offset of the first request.
    #[arg(short = 'o', long, default_value = "0", value_name = "OFFSET")]
    offset: String,
    /// Write, overwriting what is there.
    #[arg(short = 'w', long)]
    write: bool,
    /// The byte to write.
    #[arg(long, default_value_t = 0, value_name = "BYTE", requires = "write")]
    pattern: u8,
    /// Flush after every COUNT requests.
    #[arg(long, value_name = "COUNT", requires = "write")]
    flush_interval: Option<u64>,
    /// Do not wait for requests in flight before a flush.
    #[arg(long, requires = "flush_interval", hide_short_help = true)]
    no_drain: bool,
    /// Use io_uring only: fail where the system does not permit it.
    #[arg(short = 'n', long, conflicts_with = "aio", hide_short_help = true)]
    native: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    images: ImageArgs,
    /// The image.
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
}

/// The requests of a run.
struct Plan {
    count: u64,
    depth: u64,
    bytes: u64,
    step: u64,
    offset: u64,
    pattern: Option<u8>,
    flush: Option<Flush>,
}

#[derive(Clone, Copy)]
struct Flush {
    every: u64,
    drains: bool,
}

pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode, Failure> {
    let plan = Plan::of(args)?;
    let executor = match args.native {
        true => Executor::new(Backend::Uring)
            .map_err(|error| Failure::new(format!("io_uring: {error}")))?,
        false => args.images.executor()?,
    };
    let elapsed = executor.block_on(async {
        let (format, chain) = (args.images.format(), args.images.chain_options(IndexUse::Read)?);
        if !args.write {
            let disk = args.images.open(&args.image, IndexUse::Read).await?;
            return plan.run(&*disk).await;
        }
        let images = args.images.image_options()?;
        let disk = mica_stack::open_writable(&args.image, format, images, &chain).await?;
        let ran = plan.run(&*disk).await;
        let closed = disk.close().await;
        let elapsed = ran?;
        closed?;
        Ok::<_, Failure>(elapsed)
    })?;
    plan.report(args, elapsed)?;
    Ok(ExitCode::SUCCESS)
}

impl Plan {
    fn of(args: &BenchArgs) -> Result<Self, Failure> {
        let refuse = |what: &str| Err(Failure::new(what).with_code(USAGE));
        let bytes = size_of("-s", &args.buffer_size)?;
        let offset = size_of("-o", &args.offset)?;
        let step = args.step_size.as_deref().map(|step| size_of("-S", step)).transpose()?;
        let step = step.unwrap_or(bytes);
        if ![bytes, step, offset].iter().all(|size| size.is_multiple_of(SECTOR_BYTES)) {
            return refuse("-s, -S and -o must be multiples of 512");
        }
        if !(SECTOR_BYTES..=BYTES_MAX).contains(&bytes) {
            return refuse("-s must be between 512 and 64M");
        }
        if args.count == 0 || !(1..=DEPTH_MAX).contains(&args.depth) {
            return refuse("-c must be at least 1, and -d between 1 and 1024");
        }
        let flush = match args.flush_interval {
            Some(every) if every < args.depth => {
                return refuse("--flush-interval cannot be less than -d");
            }
            every => every.map(|every| Flush { every, drains: !args.no_drain }),
        };
        let pattern = args.write.then_some(args.pattern);
        Ok(Self { count: args.count, depth: args.depth, bytes, step, offset, pattern, flush })
    }

    /// Sends all requests, and returns how long that took.
    async fn run(&self, disk: &dyn Disk) -> Result<Duration, Failure> {
        let len = disk.geometry().len;
        if len < self.bytes {
            return Err(Failure::new(format!("a disk of {len} bytes is shorter than a request")));
        }
        let began = monotonic();
        let round = self.flush.filter(|flush| flush.drains).map_or(self.count, |flush| flush.every);
        let mut first = 0;
        while first < self.count {
            let end = (first + round).min(self.count);
            self.run_round(disk, (first, end)).await?;
            if self.flush.is_some_and(|flush| flush.drains) && end - first == round {
                disk.flush().await?;
            }
            first = end;
        }
        Ok(monotonic() - began)
    }

    /// Sends the requests from one number to another, and waits for them.
    async fn run_round(&self, disk: &dyn Disk, (first, end): (u64, u64)) -> Result<(), Failure> {
        let next = Cell::new(first);
        let failure = RefCell::new(None);
        let workers = (0..self.depth.min(end - first)).map(|_| async {
            while next.get() < end && failure.borrow().is_none() {
                let number = next.replace(next.get() + 1);
                if let Err(error) = self.send(disk, number).await {
                    failure.borrow_mut().get_or_insert(error);
                }
            }
        });
        join_all(workers).await;
        failure.into_inner().map_or(Ok(()), Err)
    }

    async fn send(&self, disk: &dyn Disk, number: u64) -> Result<(), Failure> {
        let at = GuestOffset::new(self.place(number, disk.geometry().len));
        let len = usize::try_from(self.bytes).expect("64 MiB");
        let Some(pattern) = self.pattern else {
            let range = GuestRange::new(at, self.bytes).expect("on the disk");
            let plan = disk.plan(range, Vec::new()).finish().await?;
            read_whole(disk, &plan).await?;
            return Ok(());
        };
        let mut buf = Buf::new(len);
        buf.fill(pattern);
        disk.write(at, buf).await.0?;
        match self.flush {
            Some(Flush { every, drains: false }) if (number + 1).is_multiple_of(every) => {
                Ok(disk.flush().await?)
            }
            _ => Ok(()),
        }
    }

    /// Where a request starts on a disk of `len` bytes.
    fn place(&self, number: u64, len: u64) -> u64 {
        let places = (len - self.bytes) / SECTOR_BYTES + 1;
        let sectors = u128::from(self.offset / SECTOR_BYTES)
            + u128::from(number) * u128::from(self.step / SECTOR_BYTES);
        let place = u64::try_from(sectors % u128::from(places)).expect("less than a disk has");
        place * SECTOR_BYTES
    }

    fn report(&self, args: &BenchArgs, elapsed: Duration) -> Result<(), Failure> {
        let Self { count, depth, bytes, step, offset, .. } = *self;
        let kind = if self.pattern.is_some() { "write" } else { "read" };
        let seconds = elapsed.as_secs_f64();
        let nanoseconds = elapsed.as_nanos().max(1);
        let rate = |what: u128| u64::try_from(what * 1_000_000_000 / nanoseconds).unwrap_or(0);
        let requests = rate(u128::from(count));
        let moved = rate(u128::from(count) * u128::from(bytes));
        let mut text = format!(
            "Sending {count} {kind} requests, {bytes} bytes each, {depth} in parallel (starting at \
             offset {offset}, step size {step})\n"
        );
        if let Some(Flush { every, drains }) = self.flush {
            let how = if drains { "with" } else { "without" };
            text += &format!("Sending flush every {every} requests, {how} a drain\n");
        }
        let rates = format!("{requests} requests and {} a second", human_size(moved));
        text += &format!("Run completed in {seconds:.3} seconds: {rates}.\n");
        args.report.print(
            &text,
            &json!({
                "kind": kind,
                "requests": count,
                "bytes": bytes,
                "depth": depth,
                "seconds": seconds,
                "requests-per-second": requests,
                "bytes-per-second": moved,
            }),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_stay_on_the_disk_and_go_on_at_its_start() {
        let plan = Plan {
            count: 9,
            depth: 1,
            bytes: 1024,
            step: 1024,
            offset: 512,
            pattern: None,
            flush: None,
        };
        let places: Vec<_> = (0..5).map(|number| plan.place(number, 4096)).collect();
        assert_eq!(places, [512, 1536, 2560, 0, 1024]);
        assert_eq!(plan.place(u64::MAX, 1024), 0);
        assert!(plan.place(u64::MAX, !511) < u64::MAX - 1024);
    }
}
