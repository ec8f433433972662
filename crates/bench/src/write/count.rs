//! System calls and bytes of a server, counted by strace while a load runs: the same for every
//! server, exact, and slow. Servers do their I/O in threads then, where strace sees it.

use super::Run;
use super::images;
use super::measure::{Bounds, Context};
use crate::load::ratio;
use crate::peers::Peer;
use crate::samples::Sample;
use anyhow::{Context as _, Result};
use mica_tests::clock;
use mica_tests::tools;
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Calls that are counted.
const CALLS: &str = "trace=pread64,preadv,preadv2,pwrite64,pwritev,pwritev2,fdatasync,fsync,\
                     fallocate,copy_file_range";
/// How much is counted: few writes, all of which strace makes slow.
const BOUNDS: Bounds = Bounds { limit: Duration::from_secs(20), writes_max: 1024 };
/// How long a count waits for the last lines of strace.
const SETTLE: Duration = Duration::from_millis(100);

/// What a server did to files.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Tally {
    syncs: u64,
    writes: u64,
    written_bytes: u64,
    zeroed_bytes: u64,
    image_read_bytes: u64,
    base_reads: u64,
    base_read_bytes: u64,
}

/// Counts what `peer` does while `case` runs, excluding opening and closing.
///
/// # Errors
/// If strace cannot trace it, or as a run.
pub(super) fn run(context: &Context<'_>, peer: &Peer, run: Run, sample: &mut Sample) -> Result<()> {
    let (kind, case) = run;
    let image = context.images.make(kind)?;
    let folder = tempfile::Builder::new().prefix("mica-bench-").tempdir()?;
    let log = folder.path().join("strace");
    let log_text = log.to_str().context("a path that is not UTF-8")?;
    // As a grandchild, strace leaves the server as our child, which can be stopped.
    let tracer = [
        tools::STRACE.program,
        "-D",
        "-f",
        "-y",
        "-s",
        "0",
        "-e",
        "signal=none",
        "-e",
        CALLS,
        "-o",
        log_text,
    ];
    let running = peer.start(&image.path, kind.format(), &tracer)?;
    clock::sleep(SETTLE);
    let before = fs::metadata(&log)?.len();
    let written = context.put(&running, case, sample.repeat, BOUNDS)?;
    clock::sleep(SETTLE);
    let after = fs::metadata(&log)?.len();
    let own = running.stop()?;
    let lines = fs::read(&log)?;
    let part = usize::try_from(before)?..usize::try_from(after)?;
    let lines = String::from_utf8_lossy(lines.get(part).unwrap_or_default()).into_owned();
    let tally = Tally::of(&lines, &context.images.base());
    let flushes = written.flushes.total().max(1);
    let guest = written.bytes.max(1);
    let copied = kind.copied_bytes(&written.offsets, u64::from(case.bytes));
    sample.put("guest_mib", ratio(guest, 1 << 20));
    sample.put("flushes", ratio(flushes, 1));
    sample.put("syncs", ratio(tally.syncs, 1));
    sample.put("syncs_per_flush", ratio(tally.syncs, flushes));
    sample.put("write_calls", ratio(tally.writes, 1));
    sample.put("written_mib", ratio(tally.written_bytes, 1 << 20));
    sample.put("zeroed_mib", ratio(tally.zeroed_bytes, 1 << 20));
    sample.put("written_per_guest_byte", ratio(tally.written_bytes, guest));
    sample.put("base_reads", ratio(tally.base_reads, 1));
    sample.put("base_read_mib", ratio(tally.base_read_bytes, 1 << 20));
    sample.put("base_read_bytes", ratio(tally.base_read_bytes, 1));
    sample.put("image_read_mib", ratio(tally.image_read_bytes, 1 << 20));
    sample.put("copied_expected_bytes", ratio(copied, 1));
    let beyond = tally.written_bytes.saturating_sub(guest + copied);
    sample.put("metadata_per_flush_kib", ratio(beyond, flushes * 1024));
    for (name, count) in own.iter().flat_map(|own| own["write"].as_object()).flatten() {
        sample.put(format!("own_{name}"), ratio(count.as_u64().unwrap_or(0), 1));
    }
    images::check(&image)
}

impl Tally {
    /// Adds up what strace printed for all threads.
    fn of(lines: &str, base: &Path) -> Self {
        let mut tally = Self::default();
        let mut unfinished: HashMap<&str, &str> = HashMap::new();
        for line in lines.lines() {
            let Some((thread, said)) = line.split_once(' ') else { continue };
            let said = said.trim_start();
            if let Some((begun, _)) = said.split_once(" <unfinished ...>") {
                unfinished.insert(thread, begun);
            } else if let Some(resumed) = said.strip_prefix("<... ") {
                let rest = resumed.split_once(" resumed>").map_or("", |(_, rest)| rest);
                if let Some(begun) = unfinished.remove(thread) {
                    tally.add(&format!("{begun}{rest}"), base);
                }
            } else {
                tally.add(said, base);
            }
        }
        tally
    }

    /// Adds one call, as `name(descriptor<path>, ...) = result`.
    fn add(&mut self, call: &str, base: &Path) {
        let Some((name, arguments)) = call.split_once('(') else { return };
        // Results are in a separate column, however short the call.
        let Some((arguments, result)) = arguments.rsplit_once(" = ") else { return };
        let arguments = arguments.trim_end().trim_end_matches(')');
        let result = result.split_whitespace().next().and_then(|word| word.parse::<u64>().ok());
        // A call that failed has done nothing.
        let Some(result) = result else { return };
        let path = arguments.split_once('<').and_then(|(_, path)| path.split_once('>'));
        let path = path.map_or("", |(path, _)| path);
        // Descriptors of sockets, pipes and clocks have no path.
        if !path.starts_with('/') || path.starts_with("/dev/") {
            return;
        }
        match name {
            "fdatasync" | "fsync" => self.syncs += 1,
            "fallocate" => {
                let len = arguments.rsplit(", ").next().and_then(|len| len.parse::<u64>().ok());
                if arguments.contains("FALLOC_FL_ZERO_RANGE") {
                    self.zeroed_bytes += len.unwrap_or(0);
                }
            }
            name if name.starts_with("pread") && Path::new(path) == base => {
                self.base_reads += 1;
                self.base_read_bytes += result;
            }
            name if name.starts_with("pread") => self.image_read_bytes += result,
            _ => {
                self.writes += 1;
                self.written_bytes += result;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Tally;
    use std::path::Path;

    #[test]
    fn calls_are_distinguished_by_name_file_and_outcome() {
        let lines = "7 pwrite64(9</d/a.img>, \"\"..., 4096, 8192) = 4096\n\
             8 pwritev(9</d/a.img>, [{iov_base=\"\"..., iov_len=512}], 1, 0 <unfinished ...>\n\
             7 preadv(10</d/base.raw>, [{iov_base=\"\"..., iov_len=61440}], 1, 0) = 61440\n\
             8 <... pwritev resumed>)           = 512\n\
             7 preadv2(9</d/a.img>, [], 1, 0, RWF_NOWAIT) = -1 EAGAIN (again)\n\
             8 fallocate(9</d/a.img>, FALLOC_FL_KEEP_SIZE|FALLOC_FL_ZERO_RANGE, 0, 65536) = 0\n\
             7 fdatasync(9</d/a.img>)           = 0\n\
             8 fdatasync(9</d/a.img> <unfinished ...>\n\
             8 <... fdatasync resumed>)         = 0\n\
             7 pwrite64(3<socket:[1]>, \"\"..., 16, 0) = 16\n";
        let tally = Tally::of(lines, Path::new("/d/base.raw"));
        let wanted = Tally {
            syncs: 2,
            writes: 2,
            written_bytes: 4096 + 512,
            zeroed_bytes: 65536,
            image_read_bytes: 0,
            base_reads: 1,
            base_read_bytes: 61440,
        };
        assert_eq!(tally, wanted);
    }
}
